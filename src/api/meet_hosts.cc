// How ranks of any hosts meet before they have a comm (comms.h): they find out who is on which host by the caller's
// allgather, connect over TCP, and within each host over Unix sockets.
//
// A rank that fails on its own takes part in the meeting behind the connections, so that the others hear at once.
#include "api/check.h"
#include "api/comms.h"

namespace tw::api {
namespace {

constexpr uint64_t kMeshStage = kBehindMeeting - 1;
constexpr char kConnecting[] = "connecting the ranks of a host";

// Connects the ranks of this host, which are those with this rank's number in `of`.
Status connect_host(int rank, const std::string& address, TimePoint deadline, Hosts* hosts) {
  const int mine = hosts->of[static_cast<size_t>(rank)];
  int count = 0;
  for (const int host : hosts->of) hosts->local.push_back(host == mine ? count++ : -1);
  return connect_mesh(hosts->local[static_cast<size_t>(rank)], count, address, deadline, &hosts->among);
}

}  // namespace

Status read_hosts_config(const twComm_t* comm, int32_t rank, int32_t nranks, const twCommConfig_t* given,
                         Environment* environment, twCommConfig_t* config) {
  if (comm == nullptr) return fail(twInvalidArgument, "{} is NULL", Argument("comm"));
  TW_RETURN_IF_FAILED(check_rank(rank, nranks));
  TW_RETURN_IF_FAILED(read_comm_config(given, environment, config));
  if (config->allgather == nullptr) return fail(twInvalidArgument, "{} is NULL", Argument("config.allgather"));
  return check_range("config.ranks_per_host", config->ranks_per_host, 0, TW_MAX_RANKS);
}

Status meet_hosts(int32_t rank, int32_t nranks, const twCommConfig_t& config, const Alike& alike, const Status& ready,
                  MetHosts* met) {
  const auto gather = [&](const void* mine, void* all, size_t bytes) {
    return config.allgather(mine, all, bytes, config.allgather_context);
  };
  met->deadline = after(config.timeout_ms);
  met->hosts = std::make_unique<Hosts>();
  for (int member = 0; member < nranks; ++member) met->all.push_back(member);
  std::string address;
  TW_RETURN_IF_FAILED(agree_on_hosts(rank, nranks, gather, config.ranks_per_host, &met->hosts->of, &address));
  TW_RETURN_IF_FAILED(connect_tcp(rank, nranks, gather, alike.note, alike.what, met->deadline, &met->mesh));
  const Status among = ready.ok() ? connect_host(rank, address, met->deadline, met->hosts.get()) : ready;
  return agree(*met->mesh, met->all, kMeshStage, met->deadline, kConnecting, among);
}

}  // namespace tw::api
