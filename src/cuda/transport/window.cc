// Making, exporting, importing and mapping windows: window.h tells what they are.
//
// map_device_windows is collective: ranks exchange descriptors (or, in one process, numbers in a registry) and the
// UUIDs of their devices, and every rank learns the first error of any.
//
// What breaks if this changes: S2 needs every signal of a new window to hold the first step value before a peer can
// write or look (prepare comes before the exchange); S6 and S8 need that unmapping waits for no device in a thread that
// others wait for (DeviceMapping::make), and that `sharing` counts the ranks on this device.
#include "cuda/transport/window.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <system_error>
#include <thread>

#include "bootstrap/descriptors.h"
#include "bootstrap/local_registry.h"
#include "cuda/driver/nvml.h"

namespace tw::cuda {
namespace {

uint64_t round_up(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }

CUmemAllocationProp properties(int device, bool exported) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  if (exported) prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return prop;
}

// Gives the bytes that a window takes: whole pieces of the size by which the driver allocates and maps.
Status size_of(const Driver& driver, const CUmemAllocationProp& prop, uint64_t bytes, uint64_t* size) {
  size_t granularity = 0;
  TW_RETURN_IF_FAILED(
      driver.check("size a window", driver.granularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)));
  *size = round_up(bytes, granularity);
  return {};
}

Uuid uuid_of(int device) {
  Uuid uuid{};
  cudaDeviceProp prop{};
  if (cudaGetDeviceProperties(&prop, device) == cudaSuccess) std::memcpy(uuid.data(), prop.uuid.bytes, uuid.size());
  return uuid;
}

// Gives the UUIDs of all devices that this process can see, by device number.
std::vector<Uuid> uuids_here() {
  int count = 0;
  cudaGetDeviceCount(&count);
  std::vector<Uuid> uuids;
  for (int device = 0; device < count; ++device) uuids.push_back(uuid_of(device));
  return uuids;
}

thread_local int unmapping_here = 0;

LocalRegistry<DeviceMapping>& local_windows() {
  static LocalRegistry<DeviceMapping> windows;
  return windows;
}

// Does work(stream) on a stream of its own, as the caller's streams may be busy waiting, and waits for it.
template <class Work>
Status do_apart(Work&& work) {
  cudaStream_t stream = nullptr;
  TW_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaError_t error = work(stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  return error == cudaSuccess ? Status{} : cuda_failure("preparing a window", error);
}

// Sets a window to zero, and every signal to the first step value.
Status prepare(const Context& context, std::byte* window) {
  const WindowMap& map = context.map;
  const uint64_t count = 2 * kSignalStride * static_cast<uint64_t>(map.shape().ranks);
  std::vector<std::byte> host(count);
  for (uint64_t at = 0; at < count; at += kSignalStride) {
    const uint64_t signal = pack({context.first_step, Mode::kNone, 0});
    std::memcpy(host.data() + at, &signal, sizeof signal);
  }
  return do_apart([&](cudaStream_t stream) {
    cudaError_t error = cudaMemsetAsync(window, 0, map.bytes(), stream);
    for (int channel = 0; channel < map.shape().channels && error == cudaSuccess; ++channel) {
      error = cudaMemcpyAsync(window + map.signal(channel, 0, 0), host.data(), count, cudaMemcpyHostToDevice, stream);
    }
    return error;
  });
}

// The devices that reach a rank's window by the mapping of its own process.
std::vector<int> readers_of(const BackendInit& init) {
  std::vector<int> readers{init.device};
  for (const int device : init.devices) {
    if (std::find(readers.begin(), readers.end(), device) == readers.end()) readers.push_back(device);
  }
  return readers;
}

// Exports the last part of a rank's window to other processes.
Status export_part(const BackendInit& init, const DeviceMapping& window, Parcel* parcel) {
  Fd exported;
  Status made = window.export_to(&exported);
  if (!made.ok() && descriptor_shortage() != 0) made = fail_to_receive(init.bootstrap->size(), "export a window");
  parcel->fd = std::make_shared<const Fd>(std::move(exported));
  return made;
}

// The descriptor that a rank has given.
Status take_fd(const BackendInit& init, int rank, const Parcel& parcel, int* fd) {
  if (parcel.fd == nullptr) return fail(twSystemError, "rank {} could not give its window", rank);
  if (!*parcel.fd) return fail_to_receive(init.bootstrap->size(), "take a peer's window");
  *fd = parcel.fd->get();
  return {};
}

Status check_peer(int device, int other, int rank) {
  if (device == other) return {};
  int reachable = 0;
  TW_CUDA(cudaDeviceCanAccessPeer(&reachable, device, other));
  if (reachable != 0) return {};
  return fail(twUnsupported,
              "device {} cannot reach the memory of device {} (rank {}): the CUDA backend needs NVLink or PCIe peer "
              "access between all its ranks",
              device, other, rank);
}

// How a device is joined to another one, if CUDA knows both.
twLinks_t link_between(int device, int other) {
  if (device == other) return twLinksVisible;
  int atomics = 0;
  const cudaError_t asked = cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, device, other);
  return asked == cudaSuccess && atomics != 0 ? twLinksVisible : twLinksOther;
}

// Notes in `windows` how a rank's device is joined to this one's, and whether it is the same. A device that is hidden
// from this process (CUDA_VISIBLE_DEVICES) is mapped like any other, as what is imported is made accessible to our own.
Status note_link(const std::vector<Uuid>& here, int own, const Uuid& uuid, int rank, DeviceWindows* windows) {
  const auto found = std::find(here.begin(), here.end(), uuid);
  if (found == here.end()) {
    windows->links = std::min(windows->links, find_link(here[own], uuid));
    return {};
  }
  const int device = static_cast<int>(found - here.begin());
  if (device == own) ++windows->sharing;
  TW_RETURN_IF_FAILED(check_peer(own, device, rank));
  windows->links = std::min(windows->links, link_between(own, device));
  return {};
}

}  // namespace

Status clear(std::byte* memory, uint64_t bytes) {
  return do_apart([&](cudaStream_t stream) { return cudaMemsetAsync(memory, 0, bytes, stream); });
}

DeviceMapping::UnmapsHere::UnmapsHere() { ++unmapping_here; }
DeviceMapping::UnmapsHere::~UnmapsHere() { --unmapping_here; }

std::shared_ptr<DeviceMapping> DeviceMapping::make(int device) {
  return {new DeviceMapping, [device](DeviceMapping* mapping) {
            if (!mapping->kept_ || unmapping_here > 0) return delete mapping;
            const auto unmap = [mapping, device] {
              const OnDevice on(device);
              const OutsideCaptures apart;
              cudaDeviceSynchronize();
              (void)cudaGetLastError();
              delete mapping;
            };
            try {
              std::thread(unmap).detach();
            } catch (const std::system_error&) {  // the system gives no thread
              unmap();
            }
          }};
}

DeviceMapping::~DeviceMapping() {
  if (plain_) {
    cudaFree(data());
    return;
  }
  while (!parts_.empty()) drop();
  if (address_ != 0) driver_->free_address(address_, reserved_);
}

void DeviceMapping::drop() {
  const Part part = parts_.back();
  parts_.pop_back();
  driver_->unmap(address_ + part.at, part.bytes);
  driver_->release(part.handle);
}

// Addresses cost nothing until memory is mapped there, and a window that has more of them can grow where it is. A small
// window may become any, as decoding begins with a token or two.
Status DeviceMapping::reserve(uint64_t bytes) {
  constexpr uint64_t kTimes = 16;
  constexpr uint64_t kLeast = uint64_t{4} << 30;
  const uint64_t room = std::max(kTimes * bytes, kLeast);
  CUresult result = CUDA_SUCCESS;
  for (const uint64_t wanted : {round_up(room, kGrowthAlignment), bytes}) {
    result = driver_->reserve(&address_, wanted, 0, 0, 0);
    if (result != CUDA_SUCCESS) continue;
    reserved_ = wanted;
    return {};
  }
  address_ = 0;
  return driver_->check("reserve addresses for a window", result);
}

// Maps a part, and takes its handle over also where that fails.
Status DeviceMapping::map(const Part& part, const std::vector<int>& readers) {
  const CUdeviceptr at = address_ + part.at;
  Status mapped = driver_->check("map a window", driver_->map(at, part.bytes, 0, part.handle, 0));
  if (!mapped.ok()) {
    driver_->release(part.handle);
    return mapped;
  }
  parts_.push_back(part);
  std::vector<CUmemAccessDesc> access(readers.size());
  for (size_t i = 0; i < readers.size(); ++i) {
    access[i].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access[i].location.id = readers[i];
    access[i].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  }
  mapped =
      driver_->check("make a window accessible", driver_->set_access(at, part.bytes, access.data(), access.size()));
  if (!mapped.ok()) drop();
  return mapped;
}

Status DeviceMapping::fits(uint64_t at, uint64_t bytes) const {
  if (at < this->bytes()) {
    return fail(twInvalidUsage, "an earlier growth ended without an answer of all ranks; make a group of this size");
  }
  if (at <= reserved_ && bytes <= reserved_ - at) return {};
  return fail(twOutOfMemory, "a window has addresses for {} and needs {}; make a group of this size",
              bytes_text(reserved_), bytes_text(at + bytes));
}

Status DeviceMapping::add(int device, const std::vector<int>& readers, uint64_t at, uint64_t bytes, bool exported) {
  const CUmemAllocationProp prop = properties(device, exported);
  Part part{0, at, 0};
  TW_RETURN_IF_FAILED(size_of(*driver_, prop, bytes, &part.bytes));
  if (address_ == 0) TW_RETURN_IF_FAILED(reserve(part.bytes));
  TW_RETURN_IF_FAILED(fits(at, part.bytes));
  TW_RETURN_IF_FAILED(driver_->check("allocate a window", driver_->create(&part.handle, part.bytes, &prop, 0)));
  return map(part, readers);
}

Status DeviceMapping::add_import(int fd, int reader, uint64_t at, uint64_t bytes) {
  const CUmemAllocationProp prop = properties(reader, true);
  Part part{0, at, 0};
  TW_RETURN_IF_FAILED(size_of(*driver_, prop, bytes, &part.bytes));
  if (address_ == 0) TW_RETURN_IF_FAILED(reserve(part.bytes));
  TW_RETURN_IF_FAILED(fits(at, part.bytes));
  TW_RETURN_IF_FAILED(driver_->check(
      "import a peer's window", driver_->import_handle(&part.handle, reinterpret_cast<void*>(static_cast<intptr_t>(fd)),
                                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)));
  return map(part, {reader});
}

Status DeviceMapping::create(const Driver& driver, int device, const std::vector<int>& readers, uint64_t bytes,
                             bool exported, std::shared_ptr<DeviceMapping>* mapping) {
  const std::shared_ptr<DeviceMapping> made = make(device);
  made->driver_ = &driver;
  TW_RETURN_IF_FAILED(made->add(device, readers, 0, bytes, exported));
  *mapping = made;
  return {};
}

Status DeviceMapping::allocate(int device, uint64_t bytes, std::shared_ptr<DeviceMapping>* mapping) {
  const std::shared_ptr<DeviceMapping> made = make(device);
  void* memory = nullptr;
  if (const cudaError_t error = cudaMalloc(&memory, bytes); error != cudaSuccess) {
    return cuda_failure("allocating a window", error);
  }
  made->address_ = reinterpret_cast<CUdeviceptr>(memory);
  made->plain_ = true;
  *mapping = made;
  return {};
}

Status DeviceMapping::import(const Driver& driver, int fd, int reader, uint64_t bytes,
                             std::shared_ptr<DeviceMapping>* mapping) {
  const std::shared_ptr<DeviceMapping> made = make(reader);
  made->driver_ = &driver;
  TW_RETURN_IF_FAILED(made->add_import(fd, reader, 0, bytes));
  *mapping = made;
  return {};
}

Status DeviceMapping::export_to(Fd* fd) const {
  int raw = -1;
  TW_RETURN_IF_FAILED(
      driver_->check("export a window",
                     driver_->export_handle(&raw, parts_.back().handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)));
  *fd = Fd(raw);
  return {};
}

// The window comes from cudaMalloc, as the outgoing memory does (transport/staged.cc). Where NCCL's collectives are
// captured, NCCL has the peers map what it can export, which is virtual memory and not cudaMalloc's, and reads and
// writes there without a copy. It asks each end for itself, but both must be so: a sender that is not never takes the
// place that the receiver offers it, and the next collective waits for that place to be free (NCCL 2.29,
// device/prims_simple.h, setDataPtrs). Blocks of up to 16 KB go another way. Nor may one rank replay a graph while
// another makes the call eagerly, if both ends can be exported.
Status make_own_window(const BackendInit& init, DeviceWindows* windows) {
  std::shared_ptr<DeviceMapping> own;
  TW_RETURN_IF_FAILED(DeviceMapping::allocate(init.device, init.context->map.bytes(), &own));
  TW_RETURN_IF_FAILED(prepare(*init.context, own->data()));
  windows->by_rank.assign(init.members.size(), own);
  windows->links = twLinksOther;
  return {};
}

Status grow_own_window(const BackendInit& init, const WindowMap& grown, std::shared_ptr<DeviceMapping>* region) {
  TW_RETURN_IF_FAILED(DeviceMapping::allocate(init.device, grown.channels_bytes(), region));
  return clear((*region)->data(), grown.channels_bytes());
}

Status map_device_windows(const BackendInit& init, uint64_t tag, DeviceWindows* windows) {
  const Context& context = *init.context;
  const bool local = init.bootstrap->in_process();
  const uint64_t bytes = context.map.bytes();
  const Driver* driver = nullptr;
  std::shared_ptr<DeviceMapping> own;
  Parcel mine;
  const std::vector<int> readers = readers_of(init);
  Status made = find_driver(&driver);
  for (size_t i = 0; i < readers.size() && made.ok(); ++i) made = check_peer(readers[i], init.device, context.me);
  if (made.ok()) made = DeviceMapping::create(*driver, init.device, readers, bytes, !local, &own);
  if (made.ok()) made = prepare(context, own->data());
  if (made.ok() && !local) made = export_part(init, *own, &mine);
  const uint64_t numbered = made.ok() && local ? local_windows().add(own) : 0;
  mine.bytes = pack_result(made).add(made.ok() ? uuid_of(init.device) : Uuid{}).add(numbered).take();
  std::vector<Parcel> all;
  Status met = gather(*init.bootstrap, init.members, tag, mine, init.deadline, "exchanging windows", &all);
  TW_RETURN_IF_FAILED(std::move(made));
  TW_RETURN_IF_FAILED(std::move(met));
  windows->by_rank.resize(all.size());
  windows->sharing = 0;
  const std::vector<Uuid> here = uuids_here();
  for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
    Unpacker reader(all[rank].bytes);
    TW_RETURN_IF_FAILED(read_result(init.members[rank], reader));
    const Uuid uuid = reader.get<Uuid>();
    const auto number = reader.get<uint64_t>();
    if (!reader.ok()) return fail(twSystemError, "rank {} could not give its window", rank);
    TW_RETURN_IF_FAILED(note_link(here, init.device, uuid, rank, windows));
    std::shared_ptr<DeviceMapping>& window = windows->by_rank[rank];
    if (rank == context.me) {
      window = own;
    } else if (local) {
      window = local_windows().find(number);
      if (window == nullptr) return fail(twSystemError, "rank {} could not give its window", rank);
    } else {
      int fd = -1;
      TW_RETURN_IF_FAILED(take_fd(init, rank, all[rank], &fd));
      TW_RETURN_IF_FAILED(DeviceMapping::import(*driver, fd, init.device, bytes, &window));
    }
  }
  return {};
}

Status grow_device_windows(const BackendInit& init, uint64_t tag, const WindowMap& grown,
                           const DeviceWindows& windows) {
  const bool local = init.bootstrap->in_process();
  const int me = init.context->me;
  DeviceMapping& own = *windows.by_rank[me];
  Parcel mine;
  Status made = own.add(init.device, readers_of(init), grown.channels(), grown.channels_bytes(), !local);
  if (made.ok()) made = clear(own.data() + grown.channels(), grown.channels_bytes());
  if (made.ok() && !local) made = export_part(init, own, &mine);
  mine.bytes = pack_result(made).take();
  std::vector<Parcel> all;
  Status met = gather(*init.bootstrap, init.members, tag, mine, init.deadline, "exchanging windows", &all);
  TW_RETURN_IF_FAILED(std::move(made));
  TW_RETURN_IF_FAILED(std::move(met));
  for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
    Unpacker reader(all[rank].bytes);
    TW_RETURN_IF_FAILED(read_result(init.members[rank], reader));
    if (rank == me || local) continue;  // ranks of one process have one mapping
    int fd = -1;
    TW_RETURN_IF_FAILED(take_fd(init, rank, all[rank], &fd));
    TW_RETURN_IF_FAILED(windows.by_rank[rank]->add_import(fd, init.device, grown.channels(), grown.channels_bytes()));
  }
  return {};
}

void drop_growth(const DeviceWindows& windows, int me, bool local, const WindowMap& grown) {
  for (int rank = 0; rank < static_cast<int>(windows.by_rank.size()); ++rank) {
    if (rank != me && local) continue;
    if (windows.by_rank[rank]->bytes() > grown.channels()) windows.by_rank[rank]->drop();
  }
}

}  // namespace tw::cuda
