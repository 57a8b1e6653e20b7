// Making, exporting, importing and mapping windows: window.h tells what they are.
//
// map_device_windows is collective: ranks exchange fabric handles and descriptors (or, in one process, numbers in a
// registry), and the UUIDs and NVLink domains of their devices; every rank learns the first error of any.
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
#include "cuda/transport/tables.h"

namespace tw::cuda {
namespace {

uint64_t round_up(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }

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

// This rank's number among the members.
int own_number(const BackendInit& init) {
  return static_cast<int>(std::ranges::find(init.members, init.bootstrap->rank()) - init.members.begin());
}

// Exports the last part of a rank's window to other processes: a fabric handle, and a descriptor for ranks that cannot
// use it. Where there is the one, the other need not be.
Status export_part(const BackendInit& init, DeviceMapping& window, Offer* offer, Parcel* parcel) {
  TW_RETURN_IF_FAILED(window.offer(offer));
  if (!window.kinds().descriptors) return {};
  Fd exported;
  Status made = window.export_to(&exported);
  if (!made.ok() && offer->fabric != 0) return {};
  if (!made.ok() && descriptor_shortage() != 0) made = fail_to_receive(init.bootstrap->size(), "export a window");
  parcel->fd = std::make_shared<const Fd>(std::move(exported));
  return made;
}

// The descriptor that a rank has given; -1 if it has a fabric handle instead.
Status take_fd(const BackendInit& init, int rank, const Parcel& parcel, const Offer& offer, int* fd) {
  *fd = parcel.fd != nullptr ? parcel.fd->get() : -1;
  if (*fd >= 0 || offer.fabric != 0) return {};
  if (parcel.fd == nullptr) return fail(twSystemError, "rank {} could not give its window", rank);
  return fail_to_receive(init.bootstrap->size(), "take a peer's window");
}

// Notes how this rank has a peer's window: the weakest of all counts.
void note_handles(const DeviceMapping& own, const Offer& theirs, const DeviceMapping& window, DeviceWindows* windows) {
  int refusal = 0;
  for (const int each : {own.refusal(), theirs.refusal, window.refusal()}) refusal = refusal != 0 ? refusal : each;
  const twHandles_t how = window.has_fabric_handle() ? twHandlesFabric
                          : refusal != 0             ? twHandlesRefused
                                                     : twHandlesDescriptors;
  windows->handles = windows->handles == twHandlesNone ? how : std::min(windows->handles, how);
  if (windows->refusal == 0) windows->refusal = refusal;
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

// What ranks tell each other of their devices.
struct Card {
  Uuid uuid{};
  Domain domain;
};

// Notes in `windows` how a rank's device is joined to this one's, and whether it is the same. A device that is hidden
// from this process (CUDA_VISIBLE_DEVICES), or on another host, is mapped like any other, as what is imported is made
// accessible to our own.
Status note_link(const std::vector<Uuid>& here, int own, const Domain& domain, const Card& card, int rank,
                 DeviceWindows* windows) {
  const auto found = std::find(here.begin(), here.end(), card.uuid);
  if (found == here.end()) {
    const twLinks_t link = domain.joins(card.domain) ? twLinksNvml : find_link(here[own], card.uuid);
    windows->links = std::min(windows->links, link);
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

Status fill(std::byte* memory, const void* from, uint64_t bytes) {
  return do_apart(
      [&](cudaStream_t stream) { return cudaMemcpyAsync(memory, from, bytes, cudaMemcpyHostToDevice, stream); });
}

HandleKinds handle_kinds(const BackendInit& init, const Driver& driver) {
  if (init.bootstrap->in_process()) return {};
  // Between hosts the ranks of one host alone map each other's memory, and a network reaches it.
  if (init.posts()) return {true, false, true};
  return {init.bootstrap->shares_memory(), knows_fabric_handles(driver, init.device)};
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

// Gives the bytes that memory takes: whole pieces of the size by which the driver allocates and maps.
CUresult DeviceMapping::size_part(int device, uint64_t bytes, uint64_t* size) const {
  const CUmemAllocationProp prop = properties(device, kinds_);
  size_t granularity = 0;
  const CUresult sized = driver_->granularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  if (sized == CUDA_SUCCESS) *size = round_up(bytes, granularity);
  return sized;
}

// Does without fabric handles from now on, if it can. Whatever the driver says but that memory is short is a refusal:
// it has several results for a process without a channel, a service that does not run and a device that is not ready.
bool DeviceMapping::refuse(CUresult result) {
  if (!kinds_.fabric || !kinds_.descriptors || result == CUDA_ERROR_OUT_OF_MEMORY) return false;
  kinds_.fabric = false;
  refusal_ = result;
  return true;
}

Status DeviceMapping::add(int device, const std::vector<int>& readers, uint64_t at, uint64_t bytes) {
  Part part{0, at, 0};
  for (;;) {
    CUresult made = size_part(device, bytes, &part.bytes);
    if (made == CUDA_SUCCESS) {
      if (address_ == 0) TW_RETURN_IF_FAILED(reserve(part.bytes));
      TW_RETURN_IF_FAILED(fits(at, part.bytes));
      const CUmemAllocationProp prop = properties(device, kinds_);
      made = driver_->create(&part.handle, part.bytes, &prop, 0);
    }
    if (made == CUDA_SUCCESS) return map(part, readers);
    if (refuse(made)) continue;
    return kinds_.fabric ? fabric_refused(*driver_, "allocate a window", made)
                         : driver_->check("allocate a window", made);
  }
}

Status DeviceMapping::add_import(const Offer& offer, int fd, int reader, uint64_t at, uint64_t bytes) {
  if (offer.bytes < bytes) return fail(twSystemError, "a peer's window has {} bytes instead of {}", offer.bytes, bytes);
  if (address_ == 0) TW_RETURN_IF_FAILED(reserve(offer.bytes));
  TW_RETURN_IF_FAILED(fits(at, offer.bytes));
  Part part{0, at, offer.bytes};
  if (offer.fabric != 0) {
    CUmemFabricHandle handle = offer.handle;
    const CUresult taken = driver_->import_handle(&part.handle, &handle, CU_MEM_HANDLE_TYPE_FABRIC);
    Status mapped =
        taken == CUDA_SUCCESS ? map(part, {reader}) : fabric_refused(*driver_, "import a peer's window", taken);
    has_fabric_handle_ = mapped.ok();
    if (mapped.ok() || fd < 0) return mapped;
    refusal_ = taken != CUDA_SUCCESS ? taken : CUDA_ERROR_NOT_SUPPORTED;
  }
  TW_RETURN_IF_FAILED(driver_->check(
      "import a peer's window", driver_->import_handle(&part.handle, reinterpret_cast<void*>(static_cast<intptr_t>(fd)),
                                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)));
  return map(part, {reader});
}

Status DeviceMapping::create(const Driver& driver, int device, const std::vector<int>& readers, uint64_t bytes,
                             HandleKinds kinds, std::shared_ptr<DeviceMapping>* mapping) {
  const std::shared_ptr<DeviceMapping> made = make(device);
  made->driver_ = &driver;
  made->kinds_ = kinds;
  TW_RETURN_IF_FAILED(made->add(device, readers, 0, bytes));
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

Status DeviceMapping::import(const Driver& driver, const Offer& offer, int fd, int reader, uint64_t bytes,
                             std::shared_ptr<DeviceMapping>* mapping) {
  const std::shared_ptr<DeviceMapping> made = make(reader);
  made->driver_ = &driver;
  TW_RETURN_IF_FAILED(made->add_import(offer, fd, reader, 0, bytes));
  *mapping = made;
  return {};
}

Status DeviceMapping::offer(Offer* offer) {
  offer->bytes = parts_.back().bytes;
  if (kinds_.fabric) {
    const CUresult made = driver_->export_handle(&offer->handle, parts_.back().handle, CU_MEM_HANDLE_TYPE_FABRIC, 0);
    offer->fabric = made == CUDA_SUCCESS ? 1 : 0;
    if (made != CUDA_SUCCESS && !refuse(made)) return fabric_refused(*driver_, "export a window", made);
  }
  offer->refusal = refusal_;
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

// The window comes from cudaMalloc, as the outgoing memory does (transport/carrier.cc). Where NCCL's collectives are
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
  const auto begin = [&](std::byte* window) { return prepare(*init.context, window); };
  return share_device_memory(init, tag, {}, init.context->map.bytes(), begin, windows);
}

Status share_device_memory(const BackendInit& init, uint64_t tag, const Status& ready, uint64_t bytes,
                           const std::function<Status(std::byte*)>& prepare, DeviceWindows* windows) {
  const int me = own_number(init);
  const bool local = init.bootstrap->in_process();
  const Driver* driver = nullptr;
  std::shared_ptr<DeviceMapping> own;
  Parcel mine;
  const std::vector<int> readers = readers_of(init);
  Status made = ready.ok() ? find_driver(&driver) : ready;
  for (size_t i = 0; i < readers.size() && made.ok(); ++i) made = check_peer(readers[i], init.device, me);
  if (made.ok()) made = DeviceMapping::create(*driver, init.device, readers, bytes, handle_kinds(init, *driver), &own);
  if (made.ok()) made = prepare(own->data());
  Offer offer;
  if (made.ok() && !local) made = export_part(init, *own, &offer, &mine);
  const uint64_t numbered = made.ok() && local ? local_windows().add(own) : 0;
  // NVML is asked where the answer matters: its first call takes a while.
  const Uuid uuid = uuid_of(init.device);
  const Card card{uuid, offer.fabric != 0 ? find_domain(uuid) : Domain{}};
  mine.bytes = pack_result(made).add(card).add(numbered).add(offer).take();
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
    const Card theirs = reader.get<Card>();
    const auto number = reader.get<uint64_t>();
    const Offer given = reader.get<Offer>();
    if (!reader.ok()) return fail(twSystemError, "rank {} could not give its window", rank);
    TW_RETURN_IF_FAILED(note_link(here, init.device, card.domain, theirs, rank, windows));
    std::shared_ptr<DeviceMapping>& window = windows->by_rank[rank];
    if (rank == me) {
      window = own;
    } else if (local) {
      window = local_windows().find(number);
      if (window == nullptr) return fail(twSystemError, "rank {} could not give its window", rank);
    } else {
      int fd = -1;
      TW_RETURN_IF_FAILED(take_fd(init, rank, all[rank], given, &fd));
      TW_RETURN_IF_FAILED(DeviceMapping::import(*driver, given, fd, init.device, bytes, &window));
      note_handles(*own, given, *window, windows);
    }
  }
  return {};
}

Status grow_device_windows(const BackendInit& init, uint64_t tag, const WindowMap& grown,
                           const DeviceWindows& windows) {
  const bool local = init.bootstrap->in_process();
  const int me = own_number(init);
  DeviceMapping& own = *windows.by_rank[me];
  Parcel mine;
  Offer offer;
  Status made = own.add(init.device, readers_of(init), grown.channels(), grown.channels_bytes());
  if (made.ok()) made = clear(own.data() + grown.channels(), grown.channels_bytes());
  if (made.ok() && !local) made = export_part(init, own, &offer, &mine);
  mine.bytes = pack_result(made).add(offer).take();
  std::vector<Parcel> all;
  Status met = gather(*init.bootstrap, init.members, tag, mine, init.deadline, "exchanging windows", &all);
  TW_RETURN_IF_FAILED(std::move(made));
  TW_RETURN_IF_FAILED(std::move(met));
  for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
    Unpacker reader(all[rank].bytes);
    TW_RETURN_IF_FAILED(read_result(init.members[rank], reader));
    if (rank == me || local) continue;  // ranks of one process have one mapping
    const Offer given = reader.get<Offer>();
    int fd = -1;
    TW_RETURN_IF_FAILED(take_fd(init, rank, all[rank], given, &fd));
    TW_RETURN_IF_FAILED(
        windows.by_rank[rank]->add_import(given, fd, init.device, grown.channels(), grown.channels_bytes()));
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
