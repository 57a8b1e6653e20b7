// The entry points that make and end comms: they check the configuration and devices, read the environment, and connect
// the ranks (src/bootstrap). A rank whose arguments are bad fails here before it meets anybody, and its peers wait for
// it until their timeout.
#include <algorithm>
#include <cstdlib>

#include "api/check.h"
#include "api/comms.h"
#include "api/enter.h"
#include "api/hosts.h"
#include "api/registry.h"
#include "bootstrap/bootstrap.h"
#include "net/libfabric.h"

namespace tw::api {

TimePoint after(int32_t milliseconds) {
  return std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
}

Status settle_timeout(int32_t* timeout_ms, Environment* environment) {
  TW_RETURN_IF_FAILED(read_environment(environment));
  TW_RETURN_IF_FAILED(check_range("config.timeout_ms", *timeout_ms, 0, INT32_MAX));
  if (*timeout_ms == 0) *timeout_ms = environment->timeout_ms;
  return {};
}

Status read_comm_config(const twCommConfig_t* given, Environment* environment, twCommConfig_t* config) {
  twCommConfig_t known = TW_COMM_CONFIG_INIT;
  if (given != nullptr) TW_RETURN_IF_FAILED(read_struct("config", given, &known));
  *config = known;
  return settle_timeout(&config->timeout_ms, environment);
}

Status check_rank(int32_t rank, int32_t nranks) {
  TW_RETURN_IF_FAILED(check_ranks(nranks));
  return check_range("rank", rank, 0, nranks - 1);
}

Status find_device([[maybe_unused]] const Argument& name, [[maybe_unused]] int* device) {
#if TOKENWAY_WITH_CUDA
  if (*device < -1) {
    return fail(twInvalidArgument, "{} is {}; it must be -1 (the current one) or more", name, Value(*device));
  }
  return tw::check_device(device);
#else
  return fail(twUnsupported, "this library was built without CUDA");
#endif
}

twComm* make_comm(std::unique_ptr<Bootstrap> bootstrap, const Environment& environment, int32_t timeout_ms) {
  auto comm = std::make_unique<twComm>();
  comm->bootstrap = std::move(bootstrap);
  comm->environment = environment;
  comm->timeout_ms = timeout_ms;
  comms.add(comm.get());
  return comm.release();
}

}  // namespace tw::api

namespace {

using tw::Argument;
using tw::fail;
using tw::Status;
using tw::Value;
using tw::api::after;
using tw::api::check_rank;
using tw::api::comms;
using tw::api::enter;
using tw::api::find_device;
using tw::api::make_comm;
using tw::api::read_comm_config;
using tw::api::settle_timeout;
using tw::api::visit;

// Connects ranks that are processes. `device`: of this rank, -1: it is on the CPU. `ready`: whether the device can be
// used; who waits in the caller's allgather is told if not.
Status connect(int32_t rank, int32_t nranks, const twCommConfig_t& config, int device, Status ready,
               std::unique_ptr<tw::Bootstrap>* mesh) {
  const tw::TimePoint deadline = after(config.timeout_ms);
  if (config.allgather != nullptr) {
    const auto gather = [&](const void* mine, void* all, size_t bytes) {
      return config.allgather(mine, all, bytes, config.allgather_context);
    };
    std::string address;
    tw::Sentence apart;
    TW_RETURN_IF_FAILED(tw::agree_on_address(rank, nranks, gather, ready, &address, device >= 0 ? &apart : nullptr));
    if (address.empty()) return tw::api::connect_hosts(rank, nranks, gather, device, apart, deadline, mesh);
    return tw::connect_mesh(rank, nranks, address, deadline, mesh);
  }
  TW_RETURN_IF_FAILED(std::move(ready));
  if (config.address == nullptr || *config.address == '\0') {
    return fail(twInvalidArgument, "{} is empty; it must name the comm, the same on all ranks (or give {})",
                Argument("config.address"), Argument("config.allgather"));
  }
  return tw::connect_mesh(rank, nranks, config.address, deadline, mesh);
}

// Checks the devices of local ranks. Ranks that share one wait for each other on it, each in a hardware queue of its
// own.
Status local_devices(const int32_t* given, int32_t nranks, std::vector<int>* devices) {
  devices->assign(given, given + nranks);
  for (int32_t rank = 0; rank < nranks; ++rank) {
    int& device = (*devices)[rank];
    if (device < 0) {
      return fail(twInvalidArgument, "{} is {}; it must be from 0 on", Argument("config.devices[]", rank),
                  Value(device));
    }
    TW_RETURN_IF_FAILED(find_device("config.devices", &device));
    const auto sharing = std::count(devices->begin(), devices->end(), device);
    if (sharing > TW_MAX_LOCAL_RANKS) {
      return fail(twInvalidArgument, "{} puts {} ranks on device {}; at most {} may share one",
                  Argument("config.devices"), sharing, device, TW_MAX_LOCAL_RANKS);
    }
    constexpr int kUsualQueues = 8;
    const char* const queues = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    if (sharing > 1 && sharing > (queues == nullptr ? kUsualQueues : std::atoi(queues))) {
      return fail(twUnsupported,
                  "{} ranks share device {}, and CUDA_DEVICE_MAX_CONNECTIONS is {}; set it to 32 before the first CUDA "
                  "call, or their streams wait for each other in a common queue",
                  sharing, device, queues == nullptr ? "not set" : queues);
    }
  }
  return {};
}

// Creates a comm whose ranks are processes; its groups exchange through memory of the host, or of a device each. A
// device that cannot be used is refused before any rank is met.
Status create_between_processes(twComm_t* comm, int32_t rank, int32_t nranks, const twCommConfig_t* given,
                                bool on_device) {
  TW_CHECK_NOT_NULL(comm);
  TW_RETURN_IF_FAILED(check_rank(rank, nranks));
  tw::Environment environment;
  twCommConfig_t config;
  TW_RETURN_IF_FAILED(read_comm_config(given, &environment, &config));
  int device = on_device ? config.device : -1;
  Status ready = on_device ? find_device("config.device", &device) : Status{};
  std::unique_ptr<tw::Bootstrap> mesh;
  TW_RETURN_IF_FAILED(connect(rank, nranks, config, device, std::move(ready), &mesh));
  *comm = make_comm(std::move(mesh), environment, config.timeout_ms);
  if (on_device) (*comm)->device = device;
  return {};
}

}  // namespace

twResult_t twCommCreateShm(twComm_t* comm, int32_t rank, int32_t nranks, const twCommConfig_t* given) {
  return enter([&] { return create_between_processes(comm, rank, nranks, given, false); });
}

twResult_t twCommCreateCuda(twComm_t* comm, int32_t rank, int32_t nranks, const twCommConfig_t* given) {
  return enter([&] { return create_between_processes(comm, rank, nranks, given, true); });
}

namespace {

Status check_portable(const twPortableConfig_t& config) {
  if (config.allgather == nullptr) return fail(twInvalidArgument, "{} is NULL", Argument("config.allgather"));
  if (config.carrier == nullptr) return fail(twInvalidArgument, "{} is NULL", Argument("config.carrier"));
  if (config.strategy < twRouted || config.strategy > twAuto) {
    return fail(twInvalidArgument, "{} is {}; it must be {}, {} or {}", Argument("config.strategy"),
                Value(config.strategy), TW_CONSTANT(twRouted), TW_CONSTANT(twGathered), TW_CONSTANT(twAuto));
  }
  if (config.inline_bytes < -1) {
    return fail(twInvalidArgument, "{} is {}; it must be -1 (as measured) or from 0 on",
                Argument("config.inline_bytes"), Value(config.inline_bytes));
  }
  TW_RETURN_IF_FAILED(tw::check_switch("config.on_device", config.on_device));
  if (config.on_device == 1 && config.strategy == twGathered) {
    return fail(twUnsupported,
                "{} is {}; on CUDA devices dispatches are routed, in blocks of fixed size: give {} or {}",
                Argument("config.strategy"), TW_CONSTANT(twGathered), TW_CONSTANT(twRouted), TW_CONSTANT(twAuto));
  }
  return {};
}

Status check_carrier(const twCarrier_t& calls, bool on_device) {
  const bool host = calls.start && calls.wait;
  const bool device = calls.enqueue && calls.join && calls.abort;
  if (calls.offer && calls.open && calls.close && (on_device ? device : host)) return {};
  return fail(twInvalidArgument, "{} has a function that is NULL", Argument("config.carrier"));
}

}  // namespace

twResult_t twCommCreatePortable(twComm_t* comm, int32_t rank, int32_t nranks, const twPortableConfig_t* given) {
  return enter([&]() -> Status {
    TW_CHECK_NOT_NULL(comm);
    TW_RETURN_IF_FAILED(check_rank(rank, nranks));
    twPortableConfig_t config = TW_PORTABLE_CONFIG_INIT;
    TW_RETURN_IF_FAILED(tw::api::read_struct("config", given, &config));
    TW_RETURN_IF_FAILED(check_portable(config));
    auto carrier = std::make_unique<tw::Carrier>();
    TW_RETURN_IF_FAILED(tw::api::read_struct("config.carrier", config.carrier, &carrier->calls));
    const bool on_device = config.on_device != 0;
    TW_RETURN_IF_FAILED(check_carrier(carrier->calls, on_device));
    if (on_device) TW_RETURN_IF_FAILED(find_device("config.device", &config.device));
    carrier->strategy = config.strategy;
    carrier->inline_bytes = config.inline_bytes;
    tw::Environment environment;
    TW_RETURN_IF_FAILED(settle_timeout(&config.timeout_ms, &environment));
    const auto gather = [&](const void* mine, void* all, size_t bytes) {
      return config.allgather(mine, all, bytes, config.allgather_context);
    };
    const char* const names[] = {"routed", "gathered", "auto"};
    std::string note = std::string(names[config.strategy]) + " and " + std::to_string(config.inline_bytes);
    if (on_device) note += " on CUDA devices";
    std::unique_ptr<tw::Bootstrap> mesh;
    TW_RETURN_IF_FAILED(tw::connect_tcp(rank, nranks, gather, note,
                                        tw::compose("{}, {} or {}", Argument("config.strategy"),
                                                    Argument("config.inline_bytes"), Argument("config.on_device")),
                                        after(config.timeout_ms), &mesh));
    *comm = make_comm(std::move(mesh), environment, config.timeout_ms);
    (*comm)->carrier = std::move(carrier);
    if (on_device) (*comm)->device = config.device;
    return {};
  });
}

twResult_t twCommCreateLocal(twComm_t* made, int32_t nranks, const twCommConfig_t* given) {
  return enter([&]() -> Status {
    if (made == nullptr) return fail(twInvalidArgument, "{} is NULL", Argument("comms"));
    TW_RETURN_IF_FAILED(tw::api::check_ranks(nranks));
    tw::Environment environment;
    twCommConfig_t config;
    TW_RETURN_IF_FAILED(read_comm_config(given, &environment, &config));
    std::vector<int> devices;
    if (config.devices != nullptr) TW_RETURN_IF_FAILED(local_devices(config.devices, nranks, &devices));
    auto bootstraps = tw::make_local_bootstraps(nranks);
    for (int32_t rank = 0; rank < nranks; ++rank) {
      made[rank] = make_comm(std::move(bootstraps[rank]), environment, config.timeout_ms);
      made[rank]->devices = devices;
      if (!devices.empty()) made[rank]->device = devices[rank];
    }
    return {};
  });
}

twResult_t twCommDestroy(twComm_t comm) {
  return enter([&]() -> Status {
    tw::Turn turn;
    TW_RETURN_IF_FAILED(comms.find("comm", comm, [&] { return tw::api::take_turn(*comm, "twCommDestroy", &turn); }));
    if (comm->groups > 0) {
      return fail(twInvalidUsage, "{} has {} groups; destroy them first", Argument("comm"), comm->groups.load());
    }
    tw::api::withdraw(comms, comm);
    turn.forget();
    delete comm;
    return {};
  });
}

twResult_t twCommRank(twComm_t comm, int32_t* rank, int32_t* nranks) {
  return visit(comms, "comm", comm, [&]() -> Status {
    if (rank != nullptr) *rank = comm->bootstrap->rank();
    if (nranks != nullptr) *nranks = comm->bootstrap->size();
    return {};
  });
}

twResult_t twDeviceFabric(int32_t device, twFabric_t* fabric) {
  return enter([&]() -> Status {
    int number = device;
    TW_RETURN_IF_FAILED(find_device("device", &number));
    twFabric_t known{};
#if TOKENWAY_WITH_CUDA
    TW_RETURN_IF_FAILED(tw::device_fabric(number, &known));
#endif
    return tw::api::write_struct("fabric", known, fabric);
  });
}

twResult_t twLibfabric(const char** version, const char** providers) {
  static thread_local tw::net::LibraryFacts facts;
  return enter([&]() -> Status {
    TW_CHECK_NOT_NULL(version);
    TW_CHECK_NOT_NULL(providers);
    tw::net::LibraryFacts found;
    TW_RETURN_IF_FAILED(tw::net::describe_library(&found));
    facts = std::move(found);
    *version = facts.version.c_str();
    *providers = facts.providers.c_str();
    return {};
  });
}

twResult_t twCommDevice(twComm_t comm, int32_t* device) {
  return visit(comms, "comm", comm, [&]() -> Status {
    TW_CHECK_NOT_NULL(device);
    *device = comm->device;
    return {};
  });
}
