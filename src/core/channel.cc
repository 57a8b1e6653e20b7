#include "core/channel.h"

#include <algorithm>

#include "core/interrupt.h"

namespace tw {

int milliseconds_to(TimePoint deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 1, INT32_MAX));
}

Status open_channel(const BackendInit& init, uint64_t tag, int device, const Status& ready, int64_t* channel) {
  const twCarrier_t& calls = init.carrier->calls;
  const int me = init.context->me;
  const auto ranks = static_cast<int>(init.members.size());
  int32_t port = 0;
  const bool offered = ready.ok() && (me != 0 || ranks == 1 || calls.offer(calls.context, &port) == 0);
  std::vector<Parcel> all;
  const Parcel mine{Packer().add<uint8_t>(offered).add(port).take(), {}};
  TW_RETURN_IF_FAILED(gather(*init.bootstrap, init.members, tag, mine, init.deadline, kConnecting, &all));
  TW_RETURN_IF_FAILED(ready);
  for (int rank = 0; rank < ranks; ++rank) {
    Unpacker reader(all[rank].bytes);
    if (reader.get<uint8_t>() == 0) return fail(twSystemError, "rank %d could not begin to connect", rank);
    if (rank == 0) port = reader.get<int32_t>();
  }
  *channel = -1;
  if (ranks == 1) return {};

  // Peers on this host may know it as localhost; others cannot.
  std::string local = "127.0.0.1";
  std::string host = local;
  for (int rank = 0; rank < ranks; ++rank) {
    if (rank == me) continue;
    std::string own;
    std::string theirs;
    init.bootstrap->addresses(init.members[rank], &own, &theirs);
    if (rank == 0) host = theirs;
    if (!own.empty() && own != "127.0.0.1" && own != "::1") local = own;
  }
  const std::vector<int32_t> comm_ranks(init.members.begin(), init.members.end());
  twChannelConfig_t config{};
  config.size = sizeof config;
  config.rank = me;
  config.nranks = ranks;
  config.comm_ranks = comm_ranks.data();
  config.local = local.c_str();
  config.host = host.c_str();
  config.port = port;
  config.timeout_ms = milliseconds_to(init.deadline);
  config.queues = init.context->map.shape().lanes;
  config.key = init.tag;
  config.device = device;
  char error[256] = "";
  int64_t opened = -1;
  if (calls.open(calls.context, &config, &opened, error) != 0 || opened < 0) {
    if (is_interrupted_now()) return fail(twInterrupted, "%s was interrupted", kConnecting);
    error[sizeof error - 1] = '\0';
    return fail(twSystemError, "%s: %s", kConnecting, error);
  }
  *channel = opened;
  return {};
}

}  // namespace tw
