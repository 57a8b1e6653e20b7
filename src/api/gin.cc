// twCommCreateGin: ranks on CUDA devices of any hosts. They find out by the caller's allgather who is on which, and
// connect over TCP, and within each host over Unix sockets. Each group connects a network of their devices
// (cuda/transport/network.h); here one is tried, so that what is not there is known before there is a group, and
// callers of `auto` can take another backend: on all ranks or on none.
//
// A device that cannot be used is told to the peers in the meeting behind the connections: they would wait for its
// rank.
#include "api/check.h"
#include "api/comms.h"
#include "api/enter.h"
#include "core/make_backend.h"

namespace {

using tw::Argument;
using tw::fail;
using tw::Status;

// The tag of a meeting before a comm's first occasion, behind that of meet_hosts.
constexpr uint64_t kNetworkStage = (uint64_t{1} << 16) + 1;

Status create_gin(twComm_t* comm, int32_t rank, int32_t nranks, const twCommConfig_t* given) {
  if (comm == nullptr) return fail(twInvalidArgument, "{} is NULL", Argument("comm"));
  TW_RETURN_IF_FAILED(tw::api::check_rank(rank, nranks));
  tw::Environment environment;
  twCommConfig_t config;
  TW_RETURN_IF_FAILED(tw::api::read_comm_config(given, &environment, &config));
  if (config.allgather == nullptr) return fail(twInvalidArgument, "{} is NULL", Argument("config.allgather"));
  TW_RETURN_IF_FAILED(tw::check_range("config.ranks_per_host", config.ranks_per_host, 0, TW_MAX_RANKS));
  int device = config.device;
  const Status usable = tw::api::find_device("config.device", &device);
  const auto gather = [&](const void* mine, void* all, size_t bytes) {
    return config.allgather(mine, all, bytes, config.allgather_context);
  };
  const tw::TimePoint deadline = tw::api::after(config.timeout_ms);
  const std::string note = std::to_string(config.ranks_per_host) + " on CUDA devices";
  std::unique_ptr<tw::Bootstrap> mesh;
  auto hosts = std::make_unique<tw::Hosts>();
  TW_RETURN_IF_FAILED(tw::api::meet_hosts(rank, nranks, gather, config.ranks_per_host,
                                          {note, tw::compose("{}", Argument("config.ranks_per_host"))}, usable,
                                          deadline, hosts.get(), &mesh));
#if TOKENWAY_WITH_CUDA
  std::vector<int> all;
  for (int member = 0; member < nranks; ++member) all.push_back(member);
  TW_RETURN_IF_FAILED(tw::try_network(*mesh, all, kNetworkStage, deadline, device));
#endif
  *comm = tw::api::make_comm(std::move(mesh), environment, config.timeout_ms);
  (*comm)->hosts = std::move(hosts);
  (*comm)->device = device;
  return {};
}

}  // namespace

twResult_t twNccl(const char** version) {
  static thread_local std::string found;
  return tw::api::enter([&]() -> Status {
    if (version == nullptr) return fail(twInvalidArgument, "{} is NULL", Argument("version"));
#if TOKENWAY_WITH_CUDA
    std::string here;
    TW_RETURN_IF_FAILED(tw::network_version(&here));
    found = std::move(here);
    *version = found.c_str();
    return {};
#else
    return fail(twUnsupported, "this library was built without CUDA");
#endif
  });
}

twResult_t twCommCreateGin(twComm_t* comm, int32_t rank, int32_t nranks, const twCommConfig_t* given) {
  return tw::api::enter([&] { return create_gin(comm, rank, nranks, given); });
}
