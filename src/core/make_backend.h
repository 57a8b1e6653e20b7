// How the core makes a backend, and what it asks of devices before there is one. It takes what a backend needs to come
// into being, and gives a Backend (core/backend.h).
//
// Ranks make a backend together: tags must rise, and be alike on all of them.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "core/backend.h"

namespace tw {

// What a backend needs to come into being: it makes this rank's window and maps the others', or uses another's.
struct BackendInit {
  Backend* arena = nullptr;  // whose window, signals and steps this one shares; it may end first
  const Context* context = nullptr;
  Bootstrap* bootstrap = nullptr;
  std::span<const int> members;  // the bootstrap's rank of each rank of the group
  uint64_t tag = 0;              // tag of one exchange of the bootstrap
  TimePoint deadline;
  int32_t spin_us = -1;
  uint64_t cache_bytes = 0;
  Carrier* carrier = nullptr;
  const Hosts* hosts = nullptr;
  // For devices alone.
  int device = -1;
  std::span<const int> devices;  // by rank of the bootstrap, where all ranks are in this process
  int32_t timeout_ms = 0;
  int32_t sm_limit = 0;
  bool blocking = false;
  bool no_wait = false;

  // Whether ranks are on devices of several hosts, where kernels post what goes between them (cuda/transport/posted.h).
  bool posts() const { return hosts != nullptr && device >= 0; }
};

// Makes the backend over shared memory (src/cpu). Collective among members; a rank that fails on its own tells the
// others before it returns.
Status make_cpu_backend(const BackendInit& init, std::unique_ptr<Backend>* backend);

// Makes the backend with staged transport over init.carrier (src/cpu): the ranks' memory stays their own. As
// make_cpu_backend; it may use init.tag and the fifteen tags after it.
Status make_staged_backend(const BackendInit& init, std::unique_ptr<Backend>* backend);

// Makes the backend between hosts (src/cpu): shared memory among the ranks of a host, an engine (src/net) to others. As
// make_cpu_backend; it may use init.tag and the fifteen tags after it, and the first of them in init.hosts->among too.
Status make_fabric_backend(const BackendInit& init, std::unique_ptr<Backend>* backend);

// Makes the backend on GPUs (src/cuda, in builds with CUDA). As make_cpu_backend; it may use init.tag and the
// thirty-one tags after it, and the first of them in init.hosts->among too.
Status make_nvlink_backend(const BackendInit& init, std::unique_ptr<Backend>* backend);
// Fails unless there is such a device; `device` -1 becomes the thread's current one.
Status check_device(int* device);
// Tells the free memory of a device.
Status device_memory(int device, uint64_t* free);
// Tells what the platform says of a device's fabric handles and NVLink domain.
Status device_fabric(int device, twFabric_t* fabric);
// A device's memory as other hosts may have it, tried out before there is a group. offer_sample makes a piece of memory
// that lives as long as *sample, and fills in what the others need of it; check_sample maps what another has offered,
// and fails with twUnsupported where NVLink does not join the two, or the mapping fails. Both are called alone.
Status offer_sample(int device, std::string* offer, std::shared_ptr<void>* sample);
Status check_sample(int device, const std::string& own, const std::string& theirs);
// Tells the version of what makes a network of devices on several hosts; fails with twUnsupported where it is not here.
Status network_version(std::string* version);
// Connects a network of these ranks' devices, and ends it again: whether a group will have one. Collective; uses the
// tags from `tag` to `tag + 3`, and fails on all ranks alike. twUnsupported: there is none here.
Status try_network(Bootstrap& bootstrap, std::span<const int> members, uint64_t tag, TimePoint deadline, int device);
// Tells whether a device sees what a network writes to others of its host as soon as that is announced there, by the
// platform's word.
Status sees_network_writes(int device, bool* sees);

}  // namespace tw
