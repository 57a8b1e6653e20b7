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

#if TOKENWAY_WITH_CUDA
// Where the caller does not say how rows cross: if one device is not told to see what the network writes to others of
// its host, they go straight to each rank.
Status agree_on_crossing(int device, tw::api::MetHosts* met) {
  constexpr uint64_t kStage = tw::api::kBehindMeeting + 4;
  bool sees = false;
  const Status asked = tw::sees_network_writes(device, &sees);
  std::vector<tw::Parcel> all;
  const Status told = gather(*met->mesh, met->all, kStage, {tw::pack_result(asked).add(sees).take(), {}}, met->deadline,
                             "connecting the devices of several hosts", &all);
  TW_RETURN_IF_FAILED(asked);
  TW_RETURN_IF_FAILED(told);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    tw::Unpacker reader(all[rank].bytes);
    TW_RETURN_IF_FAILED(tw::read_result(static_cast<int>(rank), reader));
    if (!reader.get<bool>()) met->hosts->reads_mates = false;
  }
  return {};
}
#endif

Status create_gin(twComm_t* comm, int32_t rank, int32_t nranks, const twCommConfig_t* given) {
  tw::Environment environment;
  twCommConfig_t config;
  TW_RETURN_IF_FAILED(tw::api::read_hosts_config(comm, rank, nranks, given, &environment, &config));
  int device = config.device;
  const Status usable = tw::api::find_device("config.device", &device);
  TW_RETURN_IF_FAILED(tw::check_range("config.crossing", config.crossing, twCrossFaster, twCrossPerRank));
  const tw::api::Alike alike{
      std::to_string(config.ranks_per_host) + " on CUDA devices " + std::to_string(config.crossing),
      tw::compose("{} or {}", Argument("config.ranks_per_host"), Argument("config.crossing"))};
  tw::api::MetHosts met;
  TW_RETURN_IF_FAILED(tw::api::meet_hosts(rank, nranks, config, alike, usable, &met));
#if TOKENWAY_WITH_CUDA
  TW_RETURN_IF_FAILED(tw::try_network(*met.mesh, met.all, tw::api::kBehindMeeting, met.deadline, device));
  met.hosts->crossing = config.crossing;
  if (config.crossing == twCrossFaster) TW_RETURN_IF_FAILED(agree_on_crossing(device, &met));
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
