// Window memory on devices: CUDA virtual memory of each rank, exported as a file descriptor and mapped by every peer;
// between ranks of one process the same mapping; over a staged transport memory of a rank's own, from cudaMalloc.
//
// Takes what a backend is made from (BackendInit) and gives a mapping per rank. A mapping is unmapped and released
// once, by who lets go of it last.
//
// What breaks if this changes: a window that is not zero but for its signals when peers see it makes data of a step
// appear that nobody has sent (S2, S4).
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "core/backend.h"
#include "cuda/driver/driver.h"

namespace tw::cuda {

// Device memory at an address, which is unmapped and released once.
class DeviceMapping {
 public:
  DeviceMapping() = default;
  ~DeviceMapping();
  DeviceMapping(const DeviceMapping&) = delete;
  DeviceMapping& operator=(const DeviceMapping&) = delete;

  // Allocates memory of a device, readable and writable by the devices `readers`.
  static Status create(const Driver& driver, int device, const std::vector<int>& readers, uint64_t bytes, bool exported,
                       std::shared_ptr<DeviceMapping>* mapping);
  // Allocates memory of a device, the current one, by cudaMalloc; no other device reaches it.
  static Status allocate(int device, uint64_t bytes, std::shared_ptr<DeviceMapping>* mapping);
  // Maps a peer's memory, readable and writable by the device `reader`.
  static Status import(const Driver& driver, int fd, int reader, uint64_t bytes,
                       std::shared_ptr<DeviceMapping>* mapping);
  // Gives a descriptor for peers.
  Status export_to(Fd* fd) const;

  std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }

  // Says that from now on whoever lets go of it last must not wait for the device: that may be garbage collection in
  // another rank's thread, for which kernels on this device wait. Kernels may still read the memory, so a thread of its
  // own waits and unmaps.
  void keep() { kept_ = true; }
  // While one of these lives in this thread, the device has been waited for, and a kept mapping is unmapped at once all
  // the same.
  class UnmapsHere {
   public:
    UnmapsHere();
    ~UnmapsHere();
    UnmapsHere(const UnmapsHere&) = delete;
    UnmapsHere& operator=(const UnmapsHere&) = delete;
  };

 private:
  static std::shared_ptr<DeviceMapping> make(int device);
  Status map(const std::vector<int>& readers);

  const Driver* driver_ = nullptr;
  CUmemGenericAllocationHandle handle_ = 0;
  bool has_handle_ = false;
  CUdeviceptr address_ = 0;
  bool mapped_ = false;
  bool plain_ = false;  // came from cudaMalloc
  uint64_t bytes_ = 0;
  std::atomic<bool> kept_ = false;
};

struct DeviceWindows {
  std::vector<std::shared_ptr<DeviceMapping>> by_rank;  // by rank of the group
  int sharing = 1;                                      // ranks of the group on this rank's device
  bool linked = true;                                   // every other device is reached over NVLink
};

// Makes this rank's window, zero but for its signals, and maps those of all members. Collective; uses `tag`.
Status map_device_windows(const BackendInit& init, uint64_t tag, DeviceWindows* windows);
// Makes this rank's window alone, which stands for all: over a staged transport nobody maps another's.
Status make_own_window(const BackendInit& init, DeviceWindows* windows);

}  // namespace tw::cuda
