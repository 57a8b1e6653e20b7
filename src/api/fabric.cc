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

// The tag of a meeting before a comm's first occasion, behind that of meet_hosts.
constexpr uint64_t kEngineStage = (uint64_t{1} << 16) + 1;

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
  if (comm == nullptr) return fail(twInvalidArgument, "{} is NULL", Argument("comm"));
  TW_RETURN_IF_FAILED(tw::api::check_rank(rank, nranks));
  tw::Environment environment;
  twCommConfig_t config;
  TW_RETURN_IF_FAILED(tw::api::read_comm_config(given, &environment, &config));
  if (config.allgather == nullptr) return fail(twInvalidArgument, "{} is NULL", Argument("config.allgather"));
  TW_RETURN_IF_FAILED(tw::check_range("config.ranks_per_host", config.ranks_per_host, 0, TW_MAX_RANKS));
  tw::net::FabricOptions options;
  if (config.provider != nullptr) options.provider = config.provider;
  // Waits end by the groups' timeouts, however long these are, and by asking who is to blame.
  options.patience = std::chrono::hours(24 * 365);
  TW_RETURN_IF_FAILED(check_provider(options.provider));
  const auto gather = [&](const void* mine, void* all, size_t bytes) {
    return config.allgather(mine, all, bytes, config.allgather_context);
  };
  const tw::TimePoint deadline = tw::api::after(config.timeout_ms);
  auto hosts = std::make_unique<tw::Hosts>();
  const tw::api::Alike alike{std::to_string(config.ranks_per_host) + " and " + options.provider,
                             tw::compose("{} or {}", Argument("config.ranks_per_host"), Argument("config.provider"))};
  std::unique_ptr<tw::Bootstrap> mesh;
  TW_RETURN_IF_FAILED(
      tw::api::meet_hosts(rank, nranks, gather, config.ranks_per_host, alike, {}, deadline, hosts.get(), &mesh));
  std::vector<int> all;
  for (int member = 0; member < nranks; ++member) all.push_back(member);
  auto engines = std::make_shared<Engines>(options, nranks);
  const bool several = *std::max_element(hosts->of.begin(), hosts->of.end()) > 0;
  if (several) TW_RETURN_IF_FAILED(engines->connect_first({mesh.get(), all, kEngineStage, deadline}));
  hosts->connect = [engines](const tw::net::Meeting& meeting, std::unique_ptr<tw::net::Engine>* engine) {
    return engines->connect(meeting, engine);
  };
  *comm = tw::api::make_comm(std::move(mesh), environment, config.timeout_ms);
  (*comm)->hosts = std::move(hosts);
  return {};
}

}  // namespace

namespace tw::api {
namespace {

constexpr uint64_t kMeshStage = uint64_t{1} << 16;  // a tag before a comm's first occasion
constexpr char kConnecting[] = "connecting the ranks of a host";

// Connects the ranks of this host, which are those with this rank's number in `of`.
Status connect_host(int rank, const std::string& address, TimePoint deadline, Hosts* hosts) {
  const int mine = hosts->of[static_cast<size_t>(rank)];
  int count = 0;
  for (const int host : hosts->of) hosts->local.push_back(host == mine ? count++ : -1);
  return connect_mesh(hosts->local[static_cast<size_t>(rank)], count, address, deadline, &hosts->among);
}

}  // namespace

Status meet_hosts(int rank, int size, const std::function<int(const void*, void*, size_t)>& allgather,
                  int ranks_per_host, const Alike& alike, const Status& ready, TimePoint deadline, Hosts* hosts,
                  std::unique_ptr<Bootstrap>* mesh) {
  std::string address;
  TW_RETURN_IF_FAILED(agree_on_hosts(rank, size, allgather, ranks_per_host, &hosts->of, &address));
  TW_RETURN_IF_FAILED(connect_tcp(rank, size, allgather, alike.note, alike.what, deadline, mesh));
  std::vector<int> all;
  for (int member = 0; member < size; ++member) all.push_back(member);
  const Status met = ready.ok() ? connect_host(rank, address, deadline, hosts) : ready;
  return agree(**mesh, all, kMeshStage, deadline, kConnecting, met);
}

}  // namespace tw::api

twResult_t twCommCreateFabric(twComm_t* comm, int32_t rank, int32_t nranks, const twCommConfig_t* given) {
  return tw::api::enter([&] { return create_fabric(comm, rank, nranks, given); });
}
