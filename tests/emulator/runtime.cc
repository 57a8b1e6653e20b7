// The parts of CUDA's runtime and driver that the library calls, for devices that are the CPU: streams are threads with
// a queue, device memory is the host's, and memory that processes share is a file without a name.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "prelude.h"

#include <cuda.h>

namespace tw::emulator {
namespace {

int number_of(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}
// The one device of the machine that this process sees, as with CUDA_VISIBLE_DEVICES; -1: it sees all. Looked up each
// time, so that a process may be told once it is there.
int only_device() { return number_of("TOKENWAY_EMULATOR_VISIBLE", -1); }
int devices() {
  static const int count = number_of("TOKENWAY_EMULATOR_DEVICES", 16);
  return only_device() < 0 ? count : 1;
}
// Few: each block takes a thread of the CPU. Looked up each time, so that a test may have more.
int sms() { return number_of("TOKENWAY_EMULATOR_SMS", 8); }

// Blocks of a kernel that are on a device at once; looked up likewise, so that a test may have others take the rest.
int room() { return std::clamp(number_of("TOKENWAY_EMULATOR_ROOM", sms()), 1, sms()); }

thread_local int t_device = 0;

class Stream {
 public:
  explicit Stream(int device) : device_(device), thread_([this] { serve(); }) { thread_.detach(); }

  void add(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return tasks_.empty(); });
  }
  bool is_idle() {
    const std::lock_guard lock(mutex_);
    return tasks_.empty();
  }
  int device() const { return device_; }

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      const std::function<void()>& task = tasks_.front();  // stays there until it is over: wait()
      lock.unlock();
      task();
      lock.lock();
      tasks_.pop_front();
      changed_.notify_all();
    }
  }

  int device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_;
};

// Never deleted, as their threads are not ended: a process may end while a kernel waits. One that is destroyed serves
// the next that is made on its device once its work is done; thousands of groups would take thousands of threads
// otherwise.
struct Streams {
  std::mutex mutex;
  std::vector<Stream*> all, destroyed;
  std::map<int, Stream*> defaults;

  Stream* make(int device) {
    const auto idle = std::find_if(destroyed.begin(), destroyed.end(),
                                   [device](Stream* one) { return one->device() == device && one->is_idle(); });
    if (idle == destroyed.end()) {
      all.push_back(new Stream(device));
      return all.back();
    }
    Stream* const made = *idle;
    destroyed.erase(idle);
    return made;
  }
};
Streams& streams() {
  static auto* const made = new Streams;
  return *made;
}
Stream& find(cudaStream_t stream) {
  if (stream != nullptr && stream != cudaStreamLegacy && stream != cudaStreamPerThread) {
    return *reinterpret_cast<Stream*>(stream);
  }
  Streams& known = streams();
  const std::lock_guard lock(known.mutex);
  Stream*& found = known.defaults[t_device];
  if (found == nullptr) found = known.make(t_device);
  return *found;
}

struct Memory {
  int fd;
  size_t bytes;
  int kinds;  // CUmemAllocationHandleType: by what it may be exported
};

// Memory of the host that is pinned: copies out of it read it when they are made.
class Pinned {
 public:
  void add(void* at, size_t bytes) {
    const std::lock_guard lock(mutex_);
    blocks_[static_cast<std::byte*>(at)] = bytes;
  }
  void remove(void* at) {
    const std::lock_guard lock(mutex_);
    blocks_.erase(static_cast<std::byte*>(at));
  }
  bool holds(const void* at) {
    const std::lock_guard lock(mutex_);
    const auto after = blocks_.upper_bound(static_cast<const std::byte*>(at));
    if (after == blocks_.begin()) return false;
    return at < std::prev(after)->first + std::prev(after)->second;
  }

 private:
  std::mutex mutex_;
  std::map<const std::byte*, size_t> blocks_;
};
Pinned& pinned() {
  static auto* const made = new Pinned;
  return *made;
}

// With CUDA_LAUNCH_BLOCKING=1, where tensors are the CPU's and in the order of no stream: what follows a launch or a
// copy has what it made.
void wait_if_blocking(Stream& on) {
  static const bool blocking = number_of("CUDA_LAUNCH_BLOCKING", 0) == 1;
  if (blocking) on.wait();
}

thread_local cudaError_t t_last = cudaSuccess;
cudaError_t say(cudaError_t error) {
  if (error != cudaSuccess) t_last = error;
  return error;
}

std::mutex limits_mutex;
std::map<const void*, int>& shared_limits() {
  static auto* const made = new std::map<const void*, int>;
  return *made;
}

}  // namespace

thread_local int t_launches = 0;
// What the calling thread captures, instead of running it; NULL: nothing. Kernels alone: other work runs at once.
thread_local std::vector<std::function<void()>>* t_captured = nullptr;

void launch(void* stream, dim3 blocks, dim3 threads, uint32_t shared, std::function<void()> kernel, const char* name) {
  ++t_launches;
  Stream& on = find(static_cast<cudaStream_t>(stream));
  std::function<void()> grid = [=, kernel = std::move(kernel)] {
    run_grid(blocks, threads, shared, kernel, name, static_cast<unsigned>(room()));
  };
  if (t_captured != nullptr) {
    t_captured->push_back(std::move(grid));
    return;
  }
  on.add(std::move(grid));
  wait_if_blocking(on);
}

// ---- The driver's virtual memory.

namespace driver {

CUresult error_string(CUresult error, const char** text) {
  *text = error == CUDA_SUCCESS ? "no error" : "an error of the emulator";
  return CUDA_SUCCESS;
}
CUresult granularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = 64 * 1024;
  return CUDA_SUCCESS;
}

// What TOKENWAY_EMULATOR_FABRIC says of fabric handles: "granted"; "refused" and "unexported", as without an IMEX
// channel; "foreign", as if others had another channel. Not set: the devices know none.
bool fabric_is(const char* what) {
  const char* const text = std::getenv("TOKENWAY_EMULATOR_FABRIC");
  return text != nullptr && std::strcmp(text, what) == 0;
}
CUresult device(CUdevice* device, int number) {
  *device = number;
  return number >= 0 && number < devices() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult attribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED &&
           std::getenv("TOKENWAY_EMULATOR_FABRIC") != nullptr;
  return CUDA_SUCCESS;
}

CUresult create(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* prop,
                unsigned long long) {
  const int kinds = prop->requestedHandleTypes;
  if ((kinds & CU_MEM_HANDLE_TYPE_FABRIC) != 0) {
    if (std::getenv("TOKENWAY_EMULATOR_FABRIC") == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (fabric_is("refused")) return CUDA_ERROR_NOT_PERMITTED;
  }
  const int fd = memfd_create("tokenway-emulator", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(new Memory{fd, bytes, kinds});
  return CUDA_SUCCESS;
}
CUresult release(CUmemGenericAllocationHandle handle) {
  const auto* const memory = reinterpret_cast<Memory*>(handle);
  close(memory->fd);
  delete memory;
  return CUDA_SUCCESS;
}
CUresult reserve(CUdeviceptr* at, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  void* const made = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *at = reinterpret_cast<CUdeviceptr>(made);
  return CUDA_SUCCESS;
}
CUresult free_address(CUdeviceptr at, size_t bytes) {
  return munmap(reinterpret_cast<void*>(at), bytes) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
// What is mapped: begin to end.
std::mutex mapped_mutex;
std::map<CUdeviceptr, CUdeviceptr>& mapped() {
  static auto* const made = new std::map<CUdeviceptr, CUdeviceptr>;
  return *made;
}

CUresult map(CUdeviceptr at, size_t bytes, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
  const auto* const memory = reinterpret_cast<Memory*>(handle);
  // Not accessible before set_access.
  void* const made = mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd, 0);
  if (made == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard lock(mapped_mutex);
  mapped()[at] = at + bytes;
  return CUDA_SUCCESS;
}
CUresult unmap(CUdeviceptr at, size_t bytes) {
  {
    const std::lock_guard lock(mapped_mutex);
    mapped().erase(at);
  }
  void* const made = mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return made == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult set_access(CUdeviceptr at, size_t bytes, const CUmemAccessDesc*, size_t) {
  return mprotect(reinterpret_cast<void*>(at), bytes, PROT_READ | PROT_WRITE) == 0 ? CUDA_SUCCESS
                                                                                   : CUDA_ERROR_INVALID_VALUE;
}
// A fabric handle names a file of the process that exports it, which any other may open by that: it needs neither a
// socket nor a folder in common.
struct Fabric {
  pid_t process;
  int fd;
  ino_t file;
};
static_assert(sizeof(Fabric) <= sizeof(CUmemFabricHandle));

CUresult export_handle(void* to, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType kind,
                       unsigned long long) {
  const auto* const memory = reinterpret_cast<Memory*>(handle);
  if ((memory->kinds & kind) == 0) return CUDA_ERROR_INVALID_VALUE;
  if (kind == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    *static_cast<int*>(to) = fcntl(memory->fd, F_DUPFD_CLOEXEC, 0);
    return CUDA_SUCCESS;
  }
  if (fabric_is("unexported")) return CUDA_ERROR_NOT_PERMITTED;
  struct stat found {};
  fstat(memory->fd, &found);
  const Fabric fabric{getpid(), memory->fd, found.st_ino};
  std::memcpy(to, &fabric, sizeof fabric);
  return CUDA_SUCCESS;
}
int open_fabric(const void* handle) {
  Fabric fabric{};
  std::memcpy(&fabric, handle, sizeof fabric);
  const std::string path = "/proc/" + std::to_string(fabric.process) + "/fd/" + std::to_string(fabric.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat found {};
  if (fd < 0 || (fstat(fd, &found) == 0 && found.st_ino == fabric.file)) return fd;
  close(fd);
  return -1;
}
CUresult import_handle(CUmemGenericAllocationHandle* handle, void* from, CUmemAllocationHandleType kind) {
  const bool fabric = kind == CU_MEM_HANDLE_TYPE_FABRIC;
  if (fabric && fabric_is("foreign")) return CUDA_ERROR_NOT_PERMITTED;
  const int own =
      fabric ? open_fabric(from) : fcntl(static_cast<int>(reinterpret_cast<intptr_t>(from)), F_DUPFD_CLOEXEC, 0);
  const off_t bytes = own < 0 ? -1 : lseek(own, 0, SEEK_END);
  if (bytes <= 0) return CUDA_ERROR_INVALID_HANDLE;
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(new Memory{own, static_cast<size_t>(bytes), 0});
  return CUDA_SUCCESS;
}

const std::map<std::string, void*>& entries() {
  static const auto* const made = new std::map<std::string, void*>{
      {"cuGetErrorString", reinterpret_cast<void*>(error_string)},
      {"cuDeviceGet", reinterpret_cast<void*>(device)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(attribute)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(granularity)},
      {"cuMemCreate", reinterpret_cast<void*>(create)},
      {"cuMemRelease", reinterpret_cast<void*>(release)},
      {"cuMemAddressReserve", reinterpret_cast<void*>(reserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(free_address)},
      {"cuMemMap", reinterpret_cast<void*>(map)},
      {"cuMemUnmap", reinterpret_cast<void*>(unmap)},
      {"cuMemSetAccess", reinterpret_cast<void*>(set_access)},
      {"cuMemExportToShareableHandle", reinterpret_cast<void*>(export_handle)},
      {"cuMemImportFromShareableHandle", reinterpret_cast<void*>(import_handle)},
  };
  return *made;
}

}  // namespace driver
}  // namespace tw::emulator

using namespace tw::emulator;

// ---- The runtime.

extern "C" {

// For tests: kernels that the calling thread has launched so far.
int tokenway_emulated_launches() { return t_launches; }
// For tests: captures the kernels that the calling thread launches from now on, to the end of the capture, which gives
// them, and replays them on a stream, behind which it waits.
void tokenway_emulated_capture() { t_captured = new std::vector<std::function<void()>>; }
void* tokenway_emulated_end_capture() { return std::exchange(t_captured, nullptr); }
void tokenway_emulated_replay(const void* graph, void* stream) {
  Stream& on = find(static_cast<cudaStream_t>(stream));
  for (const auto& grid : *static_cast<const std::vector<std::function<void()>>*>(graph)) on.add(grid);
  on.wait();
}
// For tests: whether memory is the driver's virtual memory, which other processes could map.
int tokenway_emulated_exportable(const void* at) {
  const auto address = reinterpret_cast<CUdeviceptr>(at);
  const std::lock_guard lock(driver::mapped_mutex);
  const auto after = driver::mapped().upper_bound(address);
  return after != driver::mapped().begin() && address < std::prev(after)->second ? 1 : 0;
}

cudaError_t cudaGetDeviceCount(int* count) { return *count = devices(), cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = t_device, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= devices()) return say(cudaErrorInvalidDevice);
  t_device = device;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDA_VERSION, cudaSuccess; }
cudaError_t cudaGetLastError() { return std::exchange(t_last, cudaSuccess); }
const char* cudaGetErrorString(cudaError_t) { return "an error of the emulator"; }
const char* cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "cudaError"; }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* prop, int device) {
  *prop = {};
  std::strcpy(prop->name, "emulated");
  std::memset(prop->uuid.bytes, 0x7e, sizeof prop->uuid.bytes);
  prop->uuid.bytes[0] = static_cast<char>(only_device() < 0 ? device : only_device());
  prop->major = 9;
  prop->multiProcessorCount = sms();
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : attribute == cudaDevAttrMultiProcessorCount ? sms() : 0;
  if (attribute == cudaDevAttrGPUDirectRDMAWritesOrdering) *value = cudaGPUDirectRDMAWritesOrderingAllDevices;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 1, cudaSuccess; }
cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr, int, int) { return *value = 1, cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) { return *free = *total = size_t{8} << 30, cudaSuccess; }

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const auto found = driver::entries().find(name);
  const bool known = found != driver::entries().end();
  *function = known ? found->second : nullptr;
  *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  Streams& known = streams();
  const std::lock_guard lock(known.mutex);
  *stream = reinterpret_cast<cudaStream_t>(known.make(t_device));
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {  // its work goes on
  Streams& known = streams();
  const std::lock_guard lock(known.mutex);
  known.destroyed.push_back(reinterpret_cast<Stream*>(stream));
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return find(stream).wait(), cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return find(stream).is_idle() ? cudaSuccess : say(cudaErrorNotReady);
}
cudaError_t cudaDeviceSynchronize() {
  std::vector<Stream*> all;
  {
    Streams& known = streams();
    const std::lock_guard lock(known.mutex);
    all = known.all;
  }
  for (Stream* const stream : all) {
    if (stream->device() == t_device) stream->wait();
  }
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = t_captured != nullptr ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

// Memory that is new holds anything.
cudaError_t cudaMallocAsync(void** at, size_t bytes, cudaStream_t) {
  *at = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
  if (*at == nullptr) return say(cudaErrorMemoryAllocation);
  std::memset(*at, 0xcd, bytes);
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** at, size_t bytes) { return cudaMallocAsync(at, bytes, nullptr); }
cudaError_t cudaFree(void* at) { return std::free(at), cudaSuccess; }
cudaError_t cudaFreeAsync(void* at, cudaStream_t stream) {
  find(stream).add([at] { std::free(at); });
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
  find(stream).add([=] { std::memset(at, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  Stream& on = find(stream);
  if (kind != cudaMemcpyHostToDevice || pinned().holds(from)) {  // is read when the copy is made, as by a device
    on.add([=] { std::memcpy(to, from, bytes); });
  } else {
    const auto* const begin = static_cast<const std::byte*>(from);
    on.add([=, copy = std::vector(begin, begin + bytes)] { std::memcpy(to, copy.data(), bytes); });
  }
  wait_if_blocking(on);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** at, size_t bytes, unsigned) {
  *at = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (*at == nullptr) return say(cudaErrorMemoryAllocation);
  return pinned().add(*at, bytes), cudaSuccess;
}
cudaError_t cudaFreeHost(void* at) { return pinned().remove(at), std::free(at), cudaSuccess; }
cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
cudaError_t cudaHostGetDevicePointer(void** on_device, void* on_host, unsigned) {
  return *on_device = on_host, cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  const std::lock_guard lock(limits_mutex);
  *attributes = {};
  attributes->maxDynamicSharedSizeBytes = std::max(48 * 1024, shared_limits()[kernel]);
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  if (value > static_cast<int>(kSharedBytes)) return say(cudaErrorInvalidValue);
  const std::lock_guard lock(limits_mutex);
  shared_limits()[kernel] = value;
  return cudaSuccess;
}
// Refuses: the types of this kernel's parameters are not known here.
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return say(cudaErrorNotSupported);
}

}  // extern "C"
