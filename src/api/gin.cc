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

Status create_gin(twComm_t* comm, int32_t rank, int32_t nranks, const twCommConfig_t* given) {
  tw::Environment environment;
  twCommConfig_t config;
  TW_RETURN_IF_FAILED(tw::api::read_hosts_config(comm, rank, nranks, given, &environment, &config));
  int device = config.device;
  const Status usable = tw::api::find_device("config.device", &device);
  const tw::api::Alike alike{std::to_string(config.ranks_per_host) + " on CUDA devices",
                             tw::compose("{}", Argument("config.ranks_per_host"))};
  tw::api::MetHosts met;
  TW_RETURN_IF_FAILED(tw::api::meet_hosts(rank, nranks, config, alike, usable, &met));
#if TOKENWAY_WITH_CUDA
  TW_RETURN_IF_FAILED(tw::try_network(*met.mesh, met.all, tw::api::kBehindMeeting, met.deadline, device));
#endif
  *comm = tw::api::make_comm(std::move(met.mesh), environment, config.timeout_ms);
  (*comm)->hosts = std::move(met.hosts);
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
