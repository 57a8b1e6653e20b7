// Window memory on devices: CUDA virtual memory of each rank, exported as a fabric handle or a file descriptor
// (transport/handles.h) and mapped by every peer; between ranks of one process the same mapping; over a carrier
// memory of a rank's own, from cudaMalloc.
//
// Takes what a backend is made from (BackendInit) and gives a mapping per rank. A mapping is unmapped and released
// once, by who lets go of it last.
//
// What breaks if this changes: a window that is not zero but for its signals when peers see it makes data of a step
// appear that nobody has sent (S2, S4).
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "core/make_backend.h"
#include "cuda/driver/driver.h"
#include "cuda/transport/handles.h"

namespace tw::cuda {

// Device memory at an address, which is unmapped and released once. It may grow behind what is there.
class DeviceMapping {
 public:
  DeviceMapping() = default;
  ~DeviceMapping();
  DeviceMapping(const DeviceMapping&) = delete;
  DeviceMapping& operator=(const DeviceMapping&) = delete;

  // Allocates memory of a device, readable and writable by the devices `readers`, which can be exported by handles of
  // these kinds. Where both are wanted and the platform refuses fabric handles, descriptors alone are left.
  static Status create(const Driver& driver, int device, const std::vector<int>& readers, uint64_t bytes,
                       HandleKinds kinds, std::shared_ptr<DeviceMapping>* mapping);
  // Allocates memory of a device, the current one, by cudaMalloc; no other device reaches it.
  static Status allocate(int device, uint64_t bytes, std::shared_ptr<DeviceMapping>* mapping);
  // Maps a peer's memory of at least so many bytes, readable and writable by the device `reader`: by its fabric handle,
  // else by a descriptor, -1 if there is none.
  static Status import(const Driver& driver, const Offer& offer, int fd, int reader, uint64_t bytes,
                       std::shared_ptr<DeviceMapping>* mapping);
  // Gives what peers need to map the part that was added last: an offer, beside which a descriptor may go. An offer
  // without a fabric handle, where one was wanted, says who refused it.
  Status offer(Offer* offer);
  Status export_to(Fd* fd) const;

  // Adds memory `at` bytes from the begin, as create or import do. drop takes the last part away again.
  Status add(int device, const std::vector<int>& readers, uint64_t at, uint64_t bytes);
  Status add_import(const Offer& offer, int fd, int reader, uint64_t at, uint64_t bytes);
  void drop();
  // The kinds of handles that this memory can be exported by.
  HandleKinds kinds() const { return kinds_; }
  // CUresult with which a fabric handle was refused, of this memory or, where it is a peer's, to this process; else 0.
  int refusal() const { return refusal_; }
  // Whether the last part of a peer's memory was mapped by a fabric handle.
  bool has_fabric_handle() const { return has_fabric_handle_; }
  uint64_t bytes() const { return parts_.empty() ? 0 : parts_.back().at + parts_.back().bytes; }
  // Keeps memory that belongs to this one, but lies elsewhere.
  void attach(std::shared_ptr<DeviceMapping> more) { attached_.push_back(std::move(more)); }

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
  struct Part {
    CUmemGenericAllocationHandle handle;
    uint64_t at;
    uint64_t bytes;
  };

  static std::shared_ptr<DeviceMapping> make(int device);
  Status reserve(uint64_t bytes);
  Status fits(uint64_t at, uint64_t bytes) const;
  Status map(const Part& part, const std::vector<int>& readers);
  CUresult size_part(int device, uint64_t bytes, uint64_t* size) const;
  bool refuse(CUresult result);

  const Driver* driver_ = nullptr;
  CUdeviceptr address_ = 0;
  uint64_t reserved_ = 0;  // bytes of addresses
  std::vector<Part> parts_;
  bool plain_ = false;  // came from cudaMalloc
  HandleKinds kinds_;
  CUresult refusal_ = CUDA_SUCCESS;
  bool has_fabric_handle_ = false;
  std::vector<std::shared_ptr<DeviceMapping>> attached_;
  std::atomic<bool> kept_ = false;
};

struct DeviceWindows {
  std::vector<std::shared_ptr<DeviceMapping>> by_rank;  // by rank of the group
  int sharing = 1;                                      // ranks of the group on this rank's device
  twLinks_t links = twLinksVisible;                     // how this rank's device is joined to all others
  twHandles_t handles = twHandlesNone;                  // how it has the windows of other processes
  int refusal = 0;                                      // CUresult of whose refusal of fabric handles
};

// Sets memory to zero, on a stream of its own, as the caller's streams may be busy waiting; waits for that.
Status clear(std::byte* memory, uint64_t bytes);
// Copies from the host, likewise.
Status fill(std::byte* memory, const void* from, uint64_t bytes);
// The kinds of handles that memory is made for which ranks have of each other.
HandleKinds handle_kinds(const BackendInit& init, const Driver& driver);
// Makes memory on all members' devices, and maps that of all: `prepare` makes this rank's ready before a peer can map
// it. `ready`: how this rank's part before it went, which the others are told. Collective; uses `tag`.
Status share_device_memory(const BackendInit& init, uint64_t tag, const Status& ready, uint64_t bytes,
                           const std::function<Status(std::byte*)>& prepare, DeviceWindows* windows);
// Makes this rank's window, zero but for its signals, and maps those of all members. Collective; uses `tag`.
Status map_device_windows(const BackendInit& init, uint64_t tag, DeviceWindows* windows);
// Adds room for the channels of a larger map to all windows, at their addresses; zero. Collective; uses `tag`. Where it
// fails anywhere, drop_growth takes away what this rank has added.
Status grow_device_windows(const BackendInit& init, uint64_t tag, const WindowMap& grown, const DeviceWindows& windows);
void drop_growth(const DeviceWindows& windows, int me, bool local, const WindowMap& grown);
// Makes this rank's window alone, which stands for all: over a staged transport nobody maps another's.
Status make_own_window(const BackendInit& init, DeviceWindows* windows);
// Makes room for the channels of a larger map, apart from that window; zero.
Status grow_own_window(const BackendInit& init, const WindowMap& grown, std::shared_ptr<DeviceMapping>* region);

}  // namespace tw::cuda
