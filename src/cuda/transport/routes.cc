// Tables of HostRoutes. Hosts that have one rank get none of their rows by messages: a message would be that rank's
// block, and a copy more.
#include "cuda/transport/routes.h"

#include <vector>

#include "cuda/transport/tables.h"

namespace tw::cuda {

HostRoutes::~HostRoutes() {
  cudaFree(ranks_);
  cudaFree(messages_);
  cudaFree(rows_);
}

Status HostRoutes::make(const Topology& topology, int me, int channels) {
  const int here = topology.host[me];
  const bool alone = topology.ranks[here].size() == 1;
  std::vector<MessageRoute> messages;
  std::vector<int> of_host(static_cast<size_t>(topology.hosts()), -1);
  for (int host = 0; host < topology.hosts(); ++host) {
    if (host == here) continue;
    const auto size = static_cast<int32_t>(topology.ranks[host].size());
    if (size > 1) of_host[static_cast<size_t>(host)] = static_cast<int>(messages.size());
    messages.push_back({size > 1 ? topology.rail_peer(me, host) : -1, topology.list(me, host), size});
  }
  std::vector<RankRoute> ranks;
  for (int rank = 0; rank < topology.size(); ++rank) {
    const bool keeps = !alone && topology.host[rank] != here;
    ranks.push_back({of_host[static_cast<size_t>(topology.host[rank])], topology.rail[rank],
                     keeps ? topology.rail_peer(rank, here) : -1, keeps ? topology.list(rank, here) : 0});
  }
  others_ = static_cast<int>(messages.size());
  TW_RETURN_IF_FAILED(upload(ranks, &ranks_));
  TW_RETURN_IF_FAILED(upload(messages, &messages_));
  return upload(std::vector<uint32_t>(static_cast<size_t>(channels) * messages.size()), &rows_);
}

void HostRoutes::place(int channel, HostRows* rows) const {
  rows->ranks = ranks_;
  rows->messages = messages_;
  rows->others = others_;
  rows->rows = rows_ + static_cast<size_t>(channel) * static_cast<size_t>(others_);
}

}  // namespace tw::cuda
