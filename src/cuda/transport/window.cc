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

// The UUID of a rank's device, by which ranks recognise it.
using Card = std::array<char, 16>;

Card card_of(int device) {
  Card card{};
  cudaDeviceProp prop{};
  if (cudaGetDeviceProperties(&prop, device) == cudaSuccess) std::memcpy(card.data(), prop.uuid.bytes, card.size());
  return card;
}

// Gives the UUIDs of all devices that this process can see, by device number.
std::vector<Card> cards_here() {
  int count = 0;
  cudaGetDeviceCount(&count);
  std::vector<Card> cards;
  for (int device = 0; device < count; ++device) cards.push_back(card_of(device));
  return cards;
}

thread_local int unmapping_here = 0;

LocalRegistry<DeviceMapping>& local_windows() {
  static LocalRegistry<DeviceMapping> windows;
  return windows;
}

// Sets a window to zero, and every signal to the first step value. It uses a stream of its own, as the caller's streams
// may be busy waiting.
Status prepare(const Context& context, std::byte* window) {
  const WindowMap& map = context.map;
  cudaStream_t stream = nullptr;
  TW_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const uint64_t count = 2 * kSignalStride * static_cast<uint64_t>(map.shape().ranks);
  std::vector<std::byte> host(count);
  for (uint64_t at = 0; at < count; at += kSignalStride) {
    const uint64_t signal = pack({context.first_step, Mode::kNone, 0});
    std::memcpy(host.data() + at, &signal, sizeof signal);
  }
  cudaError_t error = cudaMemsetAsync(window, 0, map.bytes(), stream);
  for (int channel = 0; channel < map.shape().channels && error == cudaSuccess; ++channel) {
    error = cudaMemcpyAsync(window + map.signal(channel, 0, 0), host.data(), count, cudaMemcpyHostToDevice, stream);
  }
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  return error == cudaSuccess ? Status{} : cuda_failure("preparing a window", error);
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

bool is_linked(int device, int other) {
  int rank = 1;  // the attribute is a performance rank; 0 is the fastest way
  return device == other ||
         (cudaDeviceGetP2PAttribute(&rank, cudaDevP2PAttrNativeAtomicSupported, device, other) == cudaSuccess &&
          rank != 0);
}

}  // namespace

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
  if (mapped_) driver_->unmap(address_, bytes_);
  if (address_ != 0) driver_->free_address(address_, bytes_);
  if (has_handle_) driver_->release(handle_);
}

Status DeviceMapping::map(const std::vector<int>& readers) {
  TW_RETURN_IF_FAILED(driver_->check("reserve addresses for a window", driver_->reserve(&address_, bytes_, 0, 0, 0)));
  TW_RETURN_IF_FAILED(driver_->check("map a window", driver_->map(address_, bytes_, 0, handle_, 0)));
  mapped_ = true;
  std::vector<CUmemAccessDesc> access(readers.size());
  for (size_t i = 0; i < readers.size(); ++i) {
    access[i].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access[i].location.id = readers[i];
    access[i].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  }
  return driver_->check("make a window accessible",
                        driver_->set_access(address_, bytes_, access.data(), access.size()));
}

Status DeviceMapping::create(const Driver& driver, int device, const std::vector<int>& readers, uint64_t bytes,
                             bool exported, std::shared_ptr<DeviceMapping>* mapping) {
  const std::shared_ptr<DeviceMapping> made = make(device);
  made->driver_ = &driver;
  const CUmemAllocationProp prop = properties(device, exported);
  TW_RETURN_IF_FAILED(size_of(driver, prop, bytes, &made->bytes_));
  TW_RETURN_IF_FAILED(driver.check("allocate a window", driver.create(&made->handle_, made->bytes_, &prop, 0)));
  made->has_handle_ = true;
  TW_RETURN_IF_FAILED(made->map(readers));
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
  made->bytes_ = bytes;
  made->plain_ = true;
  *mapping = made;
  return {};
}

Status DeviceMapping::import(const Driver& driver, int fd, int reader, uint64_t bytes,
                             std::shared_ptr<DeviceMapping>* mapping) {
  const std::shared_ptr<DeviceMapping> made = make(reader);
  made->driver_ = &driver;
  const CUmemAllocationProp prop = properties(reader, true);
  TW_RETURN_IF_FAILED(size_of(driver, prop, bytes, &made->bytes_));
  TW_RETURN_IF_FAILED(driver.check(
      "import a peer's window", driver.import_handle(&made->handle_, reinterpret_cast<void*>(static_cast<intptr_t>(fd)),
                                                     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)));
  made->has_handle_ = true;
  TW_RETURN_IF_FAILED(made->map({reader}));
  *mapping = made;
  return {};
}

Status DeviceMapping::export_to(Fd* fd) const {
  int raw = -1;
  TW_RETURN_IF_FAILED(driver_->check(
      "export a window", driver_->export_handle(&raw, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)));
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
  windows->linked = false;
  return {};
}

Status map_device_windows(const BackendInit& init, uint64_t tag, DeviceWindows* windows) {
  const Context& context = *init.context;
  const bool local = init.bootstrap->in_process();
  const uint64_t bytes = context.map.bytes();
  const Driver* driver = nullptr;
  std::shared_ptr<DeviceMapping> own;
  Parcel mine;
  std::vector<int> readers{init.device};
  for (const int device : init.devices) {
    if (std::find(readers.begin(), readers.end(), device) == readers.end()) readers.push_back(device);
  }
  Status made = find_driver(&driver);
  for (size_t i = 0; i < readers.size() && made.ok(); ++i) made = check_peer(readers[i], init.device, context.me);
  if (made.ok()) made = DeviceMapping::create(*driver, init.device, readers, bytes, !local, &own);
  if (made.ok()) made = prepare(context, own->data());
  Fd exported;
  if (made.ok() && !local) {
    made = own->export_to(&exported);
    if (!made.ok() && descriptor_shortage() != 0) made = fail_to_receive(init.bootstrap->size(), "export a window");
    mine.fd = std::make_shared<const Fd>(std::move(exported));
  }
  const uint64_t numbered = made.ok() && local ? local_windows().add(own) : 0;
  mine.bytes = pack_result(made).add(made.ok() ? card_of(init.device) : Card{}).add(numbered).take();
  std::vector<Parcel> all;
  Status met = gather(*init.bootstrap, init.members, tag, mine, init.deadline, "exchanging windows", &all);
  TW_RETURN_IF_FAILED(std::move(made));
  TW_RETURN_IF_FAILED(std::move(met));
  windows->by_rank.resize(all.size());
  windows->sharing = 0;
  const std::vector<Card> cards = cards_here();
  for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
    Unpacker reader(all[rank].bytes);
    TW_RETURN_IF_FAILED(read_result(init.members[rank], reader));
    const Card card = reader.get<Card>();
    const auto number = reader.get<uint64_t>();
    const auto found = std::find(cards.begin(), cards.end(), card);
    const int device = found == cards.end() ? -1 : static_cast<int>(found - cards.begin());  // -1: hidden from us
    if (device == init.device) ++windows->sharing;
    if (!reader.ok()) return fail(twSystemError, "rank {} could not give its window", rank);
    if (device >= 0) TW_RETURN_IF_FAILED(check_peer(init.device, device, rank));
    windows->linked &= device >= 0 && is_linked(init.device, device);
    std::shared_ptr<DeviceMapping>& window = windows->by_rank[rank];
    if (rank == context.me) {
      window = own;
    } else if (local) {
      window = local_windows().find(number);
      if (window == nullptr) return fail(twSystemError, "rank {} could not give its window", rank);
    } else {
      const Fd* const fd = all[rank].fd.get();
      if (fd == nullptr) return fail(twSystemError, "rank {} could not give its window", rank);
      if (!*fd) return fail_to_receive(init.bootstrap->size(), "take a peer's window");
      TW_RETURN_IF_FAILED(DeviceMapping::import(*driver, fd->get(), init.device, bytes, &window));
    }
  }
  return {};
}

}  // namespace tw::cuda
