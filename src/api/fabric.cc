// twCommCreateFabric: ranks on the CPU of any hosts. They find out by the caller's allgather who is on which, connect
// over TCP, within each host over Unix sockets, and by libfabric.
//
// The engine of the comm's first group is connected here, so that what does not reach its peers is known before there
// is a group, and callers of `auto` can take another backend: on all ranks or on none.
#include <algorithm>

#include "api/check.h"
#include "api/comms.h"
#include "api/enter.h"
#include "net/endpoint.h"
#include "net/fabric.h"

namespace {

using tw::Argument;
using tw::fail;
using tw::Status;
using tw::Value;

Status check_provider(const std::string& provider) {
  for (const char* const known : tw::net::kProviders) {
    if (provider == known) return {};
  }
  return fail(twInvalidArgument, "{} is \"{}\"; it must be \"tcp\", \"shm\", \"verbs\" or \"efa\"",
              Argument("config.provider"), provider);
}

// The engines of a comm's groups. The first one is here already.
class Engines {
 public:
  Engines(tw::net::FabricOptions options, int ranks) : options_(std::move(options)), ranks_(ranks) {}

  Status connect_first(const tw::net::Meeting& meeting) { return tw::net::connect_fabric(options_, meeting, &first_); }

  // The first group of all ranks is made by the same call on all of them.
  Status connect(const tw::net::Meeting& meeting, std::unique_ptr<tw::net::Engine>* engine) {
    if (first_ == nullptr || static_cast<int>(meeting.members.size()) != ranks_) {
      return tw::net::connect_fabric(options_, meeting, engine);
    }
    *engine = std::move(first_);
    return {};
  }

 private:
  const tw::net::FabricOptions options_;
  const int ranks_;
  std::unique_ptr<tw::net::Engine> first_;
};

Status create_fabric(twComm_t* comm, int32_t rank, int32_t nranks, const twCommConfig_t* given) {
  tw::Environment environment;
  twCommConfig_t config;
  TW_RETURN_IF_FAILED(tw::api::read_hosts_config(comm, rank, nranks, given, &environment, &config));
  tw::net::FabricOptions options;
  if (config.provider != nullptr) options.provider = config.provider;
  // Waits end by the groups' timeouts, however long these are, and by asking who is to blame.
  options.patience = std::chrono::hours(24 * 365);
  TW_RETURN_IF_FAILED(check_provider(options.provider));
  const tw::api::Alike alike{std::to_string(config.ranks_per_host) + " and " + options.provider,
                             tw::compose("{} or {}", Argument("config.ranks_per_host"), Argument("config.provider"))};
  tw::api::MetHosts met;
  TW_RETURN_IF_FAILED(tw::api::meet_hosts(rank, nranks, config, alike, {}, &met));
  auto engines = std::make_shared<Engines>(options, nranks);
  const bool several = *std::max_element(met.hosts->of.begin(), met.hosts->of.end()) > 0;
  if (several) {
    TW_RETURN_IF_FAILED(engines->connect_first({met.mesh.get(), met.all, tw::api::kBehindMeeting, met.deadline}));
  }
  met.hosts->connect = [engines](const tw::net::Meeting& meeting, std::unique_ptr<tw::net::Engine>* engine) {
    return engines->connect(meeting, engine);
  };
  *comm = tw::api::make_comm(std::move(met.mesh), environment, config.timeout_ms);
  (*comm)->hosts = std::move(met.hosts);
  return {};
}

}  // namespace

twResult_t twCommCreateFabric(twComm_t* comm, int32_t rank, int32_t nranks, const twCommConfig_t* given) {
  return tw::api::enter([&] { return create_fabric(comm, rank, nranks, given); });
}
