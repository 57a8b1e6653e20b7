// Some GPUs: memory, peer access, and the timing of graphs on all at once.
#include <algorithm>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "floor.h"
#include "memory.cuh"

void fail(const std::string& sentence) {
  std::fprintf(stderr, "tokenway-floor: %s\n", sentence.c_str());
  std::fflush(stderr);
  std::_Exit(1);  // the other GPU's thread may be in a call: no destructors
}

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) fail(std::string(what) + ": " + cudaGetErrorString(error));
}

namespace {

__global__ void fill(uint32_t* words, size_t count, int index) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    words[i] = pattern(index, i);
  }
}

// All GPUs meet: what follows starts at the same time on all, to a microsecond. The step is one of its own, behind
// those of blocks, and so are its signals, behind those of exchanges.
__global__ void align(Side side) {
  uint32_t* const own = side.steps + side.slots * kSlotWords;
  const uint32_t step = *own + 1;
  side.slots += kMaxGpus;
  for (int i = 0; i < side.gpus - 1; ++i) store_release(side.signal(side.other(i), side.index), step);
  Patience patience(side.expired);
  for (int i = 0; i < side.gpus - 1; ++i) {
    while (before(load_acquire(side.signal(side.index, side.other(i))), step)) {
      if (patience.lost()) break;
    }
  }
  *own = step;
}

void enable_peer(int from, int to) {
  CHECK_CUDA(cudaSetDevice(from));
  const cudaError_t error = cudaDeviceEnablePeerAccess(to, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    static_cast<void>(cudaGetLastError());
    return;
  }
  check(error, "cudaDeviceEnablePeerAccess");
}

template <typename T>
T* allocate(size_t bytes) {
  void* memory = nullptr;
  CHECK_CUDA(cudaMalloc(&memory, bytes));
  CHECK_CUDA(cudaMemset(memory, 0, bytes));
  CHECK_CUDA(cudaDeviceSynchronize());  // the streams do not wait for the default one
  return static_cast<T*>(memory);
}

// Whether two devices reach each other's memory.
bool reach(int a, int b) {
  int there = 0, back = 0;
  CHECK_CUDA(cudaDeviceCanAccessPeer(&there, a, b));
  CHECK_CUDA(cudaDeviceCanAccessPeer(&back, b, a));
  return there != 0 && back != 0;
}

// Flags of blocks, then a signal of each GPU for exchanges, and one for `align`.
size_t flag_words(size_t slots) { return (slots + 2 * kMaxGpus) * kSlotWords; }

// One slot more than blocks have, for `align`.
size_t step_words(size_t slots) { return (slots + 1) * kSlotWords; }

}  // namespace

void Mesh::find_devices() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) fail(std::string("no CUDA devices: ") + cudaGetErrorString(error));
  for (int first = 0; first < count; ++first) {
    std::vector<int> found = {first};
    for (int next = first + 1; next < count && static_cast<int>(found.size()) < gpus_; ++next) {
      if (std::all_of(found.begin(), found.end(), [&](int device) { return reach(device, next); })) {
        found.push_back(next);
      }
    }
    if (static_cast<int>(found.size()) < gpus_) continue;
    for (int i = 0; i < gpus_; ++i) sides_[i].device = found[i];
    return;
  }
  fail("of " + std::to_string(count) + " CUDA devices no " + std::to_string(gpus_) +
       " can all reach each other's memory, which the floor of so many needs");
}

Mesh::Mesh(int gpus, int rows, int row_bytes) : gpus_(gpus) {
  find_devices();
  for (int i = 0; i < gpus_; ++i) {
    for (int k = 0; k < gpus_; ++k) {
      if (i != k) enable_peer(sides_[i].device, sides_[k].device);
    }
  }
  CHECK_CUDA(cudaGetDeviceProperties(&properties_, sides_[0].device));
  slots_ = std::max<size_t>(4 * static_cast<size_t>(rows), 4096);
  const size_t data = std::max(static_cast<size_t>(rows) * row_bytes, kCopyBytes);
  const size_t bank = std::max(static_cast<size_t>(rows) * line_bytes(row_bytes), kCopyBytes);
  for (int i = 0; i < gpus_; ++i) {
    Side& side = sides_[i];
    CHECK_CUDA(cudaSetDevice(side.device));
    CHECK_CUDA(cudaStreamCreateWithFlags(&streams_[i], cudaStreamNonBlocking));
    auto* source = allocate<uint4>(data);
    fill<<<1024, 256, 0, streams_[i]>>>(reinterpret_cast<uint32_t*>(source), data / sizeof(uint32_t), i);
    side.index = i;
    side.gpus = gpus_;
    side.slots = slots_;
    side.source = source;
    side.out = allocate<uint4>(data);
    side.bank = bank / sizeof(uint4);
    side.steps = allocate<uint32_t>(step_words(slots_) * sizeof(uint32_t));
    side.arrivals = allocate<uint32_t>(3 * kSlotWords * sizeof(uint32_t));
    side.expired = side.arrivals + kSlotWords;
    side.differences = side.arrivals + 2 * kSlotWords;
    auto* inbox = allocate<uint4>(gpus_ * bank);
    auto* flags = allocate<uint32_t>(flag_words(slots_) * sizeof(uint32_t));
    for (int k = 0; k < gpus_; ++k) {
      sides_[k].inboxes[i] = inbox;
      sides_[k].flags[i] = flags;
    }
    CHECK_CUDA(cudaDeviceSynchronize());
  }
}

Mesh::~Mesh() {
  for (int i = 0; i < gpus_; ++i) {
    Side& side = sides_[i];
    CHECK_CUDA(cudaSetDevice(side.device));
    CHECK_CUDA(cudaStreamDestroy(streams_[i]));
    for (void* memory : {const_cast<void*>(static_cast<const void*>(side.source)), static_cast<void*>(side.out),
                         static_cast<void*>(side.inboxes[i]), static_cast<void*>(side.flags[i]),
                         static_cast<void*>(side.steps), static_cast<void*>(side.arrivals)}) {
      CHECK_CUDA(cudaFree(memory));
    }
  }
}

void Mesh::reset() {
  for (int i = 0; i < gpus_; ++i) {
    const Side& side = sides_[i];
    CHECK_CUDA(cudaSetDevice(side.device));
    CHECK_CUDA(cudaMemsetAsync(side.inboxes[i], 0, gpus_ * side.bank * sizeof(uint4), streams_[i]));
    CHECK_CUDA(cudaMemsetAsync(side.flags[i], 0, flag_words(slots_) * sizeof(uint32_t), streams_[i]));
    CHECK_CUDA(cudaMemsetAsync(side.steps, 0, step_words(slots_) * sizeof(uint32_t), streams_[i]));
    CHECK_CUDA(cudaMemsetAsync(side.arrivals, 0, 3 * kSlotWords * sizeof(uint32_t), streams_[i]));
  }
  for (int i = 0; i < gpus_; ++i) CHECK_CUDA(cudaStreamSynchronize(streams_[i]));
}

void Mesh::replay(cudaGraphExec_t* graphs, cudaEvent_t (*events)[2], int repeat, int ways, std::vector<float>* times) {
  std::barrier start(ways);
  std::vector<std::thread> threads;
  for (int i = 0; i < ways; ++i) {
    threads.emplace_back([&, i] {
      CHECK_CUDA(cudaSetDevice(sides_[i].device));
      for (int r = 0; r < repeat; ++r) {
        start.arrive_and_wait();
        CHECK_CUDA(cudaGraphLaunch(graphs[i], streams_[i]));
        CHECK_CUDA(cudaStreamSynchronize(streams_[i]));
        float milliseconds = 0;
        CHECK_CUDA(cudaEventElapsedTime(&milliseconds, events[i][0], events[i][1]));
        times[i].push_back(milliseconds);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

cudaGraphExec_t Mesh::capture(const Launch& launch, int count, int ways, int index, const cudaEvent_t* events) {
  Side side = sides_[index];
  side.gpus = ways;
  const cudaStream_t stream = streams_[index];
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  if (ways > 1) align<<<1, 1, 0, stream>>>(side);
  launch(side, stream);  // one for the caches and the instruction fetch
  CHECK_CUDA(cudaEventRecordWithFlags(events[0], stream, cudaEventRecordExternal));
  for (int k = 0; k < count; ++k) launch(side, stream);
  CHECK_CUDA(cudaEventRecordWithFlags(events[1], stream, cudaEventRecordExternal));
  CHECK_CUDA(cudaGetLastError());  // of the launches
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  CHECK_CUDA(cudaGraphUpload(executable, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  CHECK_CUDA(cudaGraphDestroy(graph));
  return executable;
}

void Mesh::check_waits(int ways) const {
  for (int i = 0; i < ways; ++i) {
    CHECK_CUDA(cudaSetDevice(sides_[i].device));
    uint32_t expired = 0;
    CHECK_CUDA(cudaMemcpy(&expired, sides_[i].expired, sizeof expired, cudaMemcpyDeviceToHost));
    if (expired != 0) {
      fail("device " + std::to_string(sides_[i].device) + " waited in vain for another one");
    }
  }
}

Figures Mesh::time(const Launch& launch, int count, int repeat, int ways) {
  cudaGraphExec_t graphs[kMaxGpus] = {};
  cudaEvent_t events[kMaxGpus][2] = {};
  for (int i = 0; i < ways; ++i) {
    CHECK_CUDA(cudaSetDevice(sides_[i].device));
    for (cudaEvent_t& event : events[i]) CHECK_CUDA(cudaEventCreate(&event));
    graphs[i] = capture(launch, count, ways, i, events[i]);
  }
  constexpr int kWarmUp = 2;
  std::vector<float> times[kMaxGpus];
  replay(graphs, events, kWarmUp + repeat, ways, times);
  std::vector<double> slowest;
  for (int r = kWarmUp; r < kWarmUp + repeat; ++r) {
    float ms = 0;
    for (int i = 0; i < ways; ++i) ms = std::max(ms, times[i][r]);
    slowest.push_back(ms * 1e3 / count);
  }
  check_waits(ways);
  for (int i = 0; i < ways; ++i) {
    CHECK_CUDA(cudaSetDevice(sides_[i].device));
    CHECK_CUDA(cudaGraphExecDestroy(graphs[i]));
    for (cudaEvent_t event : events[i]) CHECK_CUDA(cudaEventDestroy(event));
  }
  std::sort(slowest.begin(), slowest.end());
  const size_t n = slowest.size();
  return {slowest.front(), (slowest[(n - 1) / 2] + slowest[n / 2]) / 2};
}
