// Two GPUs: memory, peer access, and the timing of graphs on both at once.
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

// Both GPUs meet: what follows starts at the same time on both, to a microsecond.
__global__ void align(Side side, size_t slot) {
  uint32_t* const own = side.steps + slot * kSlotWords;
  const uint32_t step = *own + 1;
  store_release(side.peer_flags + slot * kSlotWords, step);
  Patience patience(side.expired);
  while (before(load_acquire(side.flags + slot * kSlotWords), step)) {
    if (patience.lost()) break;
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

}  // namespace

void Pair::find_devices() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) fail(std::string("no CUDA devices: ") + cudaGetErrorString(error));
  for (int a = 0; a < count; ++a) {
    for (int b = a + 1; b < count; ++b) {
      int there = 0, back = 0;
      CHECK_CUDA(cudaDeviceCanAccessPeer(&there, a, b));
      CHECK_CUDA(cudaDeviceCanAccessPeer(&back, b, a));
      if (there != 0 && back != 0) {
        sides_[0].device = a;
        sides_[1].device = b;
        return;
      }
    }
  }
  fail("of " + std::to_string(count) + " CUDA devices no two can reach each other's memory; the floor needs two");
}

Pair::Pair(int rows, int row_bytes) {
  find_devices();
  enable_peer(sides_[0].device, sides_[1].device);
  enable_peer(sides_[1].device, sides_[0].device);
  CHECK_CUDA(cudaGetDeviceProperties(&properties_, sides_[0].device));
  slots_ = std::max<size_t>(4 * static_cast<size_t>(rows), 4096);
  const size_t data = std::max(static_cast<size_t>(rows) * row_bytes, kCopyBytes);
  const size_t bank = std::max(static_cast<size_t>(rows) * line_bytes(row_bytes), kCopyBytes);
  for (int i = 0; i < 2; ++i) {
    Side& side = sides_[i];
    CHECK_CUDA(cudaSetDevice(side.device));
    CHECK_CUDA(cudaStreamCreateWithFlags(&streams_[i], cudaStreamNonBlocking));
    auto* source = allocate<uint4>(data);
    fill<<<1024, 256, 0, streams_[i]>>>(reinterpret_cast<uint32_t*>(source), data / sizeof(uint32_t), i);
    side.source = source;
    side.out = allocate<uint4>(data);
    side.inbox = allocate<uint4>(2 * bank);
    side.bank = bank / sizeof(uint4);
    // One slot more than blocks have, for `align`.
    side.flags = allocate<uint32_t>((slots_ + 1) * kSlotWords * sizeof(uint32_t));
    side.steps = allocate<uint32_t>((slots_ + 1) * kSlotWords * sizeof(uint32_t));
    side.arrivals = allocate<uint32_t>(3 * kSlotWords * sizeof(uint32_t));
    side.expired = side.arrivals + kSlotWords;
    side.differences = side.arrivals + 2 * kSlotWords;
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  for (int i = 0; i < 2; ++i) {
    sides_[i].peer_inbox = sides_[1 - i].inbox;
    sides_[i].peer_flags = sides_[1 - i].flags;
  }
}

Pair::~Pair() {
  for (int i = 0; i < 2; ++i) {
    Side& side = sides_[i];
    CHECK_CUDA(cudaSetDevice(side.device));
    CHECK_CUDA(cudaStreamDestroy(streams_[i]));
    for (void* memory : {const_cast<void*>(static_cast<const void*>(side.source)), static_cast<void*>(side.out),
                         static_cast<void*>(side.inbox), static_cast<void*>(side.flags), static_cast<void*>(side.steps),
                         static_cast<void*>(side.arrivals)}) {
      CHECK_CUDA(cudaFree(memory));
    }
  }
}

void Pair::reset() {
  for (int i = 0; i < 2; ++i) {
    const Side& side = sides_[i];
    CHECK_CUDA(cudaSetDevice(side.device));
    const size_t words = (slots_ + 1) * kSlotWords;
    CHECK_CUDA(cudaMemsetAsync(side.inbox, 0, 2 * side.bank * sizeof(uint4), streams_[i]));
    CHECK_CUDA(cudaMemsetAsync(side.flags, 0, words * sizeof(uint32_t), streams_[i]));
    CHECK_CUDA(cudaMemsetAsync(side.steps, 0, words * sizeof(uint32_t), streams_[i]));
    CHECK_CUDA(cudaMemsetAsync(side.arrivals, 0, 3 * kSlotWords * sizeof(uint32_t), streams_[i]));
  }
  for (int i = 0; i < 2; ++i) CHECK_CUDA(cudaStreamSynchronize(streams_[i]));
}

void Pair::replay(cudaGraphExec_t* graphs, cudaEvent_t (*events)[2], int repeat, int ways, std::vector<float>* times) {
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

Figures Pair::time(const Launch& launch, int count, int repeat, int ways) {
  cudaGraphExec_t graphs[2] = {};
  cudaEvent_t events[2][2] = {};
  for (int i = 0; i < ways; ++i) {
    CHECK_CUDA(cudaSetDevice(sides_[i].device));
    for (cudaEvent_t& event : events[i]) CHECK_CUDA(cudaEventCreate(&event));
    cudaGraph_t graph = nullptr;
    CHECK_CUDA(cudaStreamBeginCapture(streams_[i], cudaStreamCaptureModeThreadLocal));
    if (ways == 2) align<<<1, 1, 0, streams_[i]>>>(sides_[i], slots_);
    launch(sides_[i], streams_[i]);  // one for the caches and the instruction fetch
    CHECK_CUDA(cudaEventRecordWithFlags(events[i][0], streams_[i], cudaEventRecordExternal));
    for (int k = 0; k < count; ++k) launch(sides_[i], streams_[i]);
    CHECK_CUDA(cudaEventRecordWithFlags(events[i][1], streams_[i], cudaEventRecordExternal));
    CHECK_CUDA(cudaGetLastError());  // of the launches
    CHECK_CUDA(cudaStreamEndCapture(streams_[i], &graph));
    CHECK_CUDA(cudaGraphInstantiate(&graphs[i], graph, 0));
    CHECK_CUDA(cudaGraphUpload(graphs[i], streams_[i]));
    CHECK_CUDA(cudaStreamSynchronize(streams_[i]));
    CHECK_CUDA(cudaGraphDestroy(graph));
  }
  constexpr int kWarmUp = 2;
  std::vector<float> times[2];
  replay(graphs, events, kWarmUp + repeat, ways, times);
  std::vector<double> slowest;
  for (int r = kWarmUp; r < kWarmUp + repeat; ++r) {
    const float ms = ways == 2 ? std::max(times[0][r], times[1][r]) : times[0][r];
    slowest.push_back(ms * 1e3 / count);
  }
  for (int i = 0; i < ways; ++i) {
    CHECK_CUDA(cudaSetDevice(sides_[i].device));
    uint32_t expired = 0;
    CHECK_CUDA(cudaMemcpy(&expired, sides_[i].expired, sizeof expired, cudaMemcpyDeviceToHost));
    if (expired != 0) {
      fail("device " + std::to_string(sides_[i].device) + " waited in vain for the other one");
    }
    CHECK_CUDA(cudaGraphExecDestroy(graphs[i]));
    for (cudaEvent_t event : events[i]) CHECK_CUDA(cudaEventDestroy(event));
  }
  std::sort(slowest.begin(), slowest.end());
  const size_t n = slowest.size();
  return {slowest.front(), (slowest[(n - 1) / 2] + slowest[n / 2]) / 2};
}
