// What the links and the memories carry at best, and what a kernel and a flag cost.
#include <algorithm>
#include <cstdio>

#include "floor.h"
#include "memory.cuh"

namespace {

__global__ void empty(Side) {}

// One flag there and one back, which is what every exchange has at least.
template <bool kOrdered>
__global__ void swap_flags(Side side) {
  const uint32_t step = *side.steps + 1;
  Patience patience(side.expired);
  if (kOrdered) {
    store_release(side.peer_flags, step);
  } else {
    store_relaxed(side.peer_flags, step);
  }
  while (before(kOrdered ? load_acquire(side.flags) : load_relaxed(side.flags), step)) {
    if (patience.lost()) break;
  }
  *side.steps = step;
}

// 16-byte accesses, eight loads of a thread in flight: few SMs need them to fill a link.
__global__ void __launch_bounds__(1024) copy(uint4* __restrict__ to, const uint4* __restrict__ from, size_t count) {
  constexpr int kDeep = 8;
  const size_t width = static_cast<size_t>(gridDim.x) * blockDim.x;
  size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + (kDeep - 1) * width < count; i += kDeep * width) {
    uint4 held[kDeep];
#pragma unroll
    for (int k = 0; k < kDeep; ++k) held[k] = from[i + k * width];
#pragma unroll
    for (int k = 0; k < kDeep; ++k) to[i + k * width] = held[k];
  }
  for (; i < count; i += width) to[i] = from[i];
}

enum class Kind { kPut, kGet, kLocal };
constexpr const char* kNames[] = {"put", "get", "local_copy"};

void enqueue_copy(Kind kind, int blocks, int threads, const Side& side, cudaStream_t stream) {
  uint4* to = kind == Kind::kPut ? side.peer_inbox : side.out;
  const uint4* from = kind == Kind::kGet ? side.peer_inbox : side.source;
  copy<<<blocks, threads, 0, stream>>>(to, from, Pair::kCopyBytes / sizeof(uint4));
}

// GB/s per direction, payload counted once; of the block size that does best.
void print_copy(Pair& pair, Kind kind, int sms, int ways, int repeat, bool last) {
  struct Shape {
    int blocks, threads;
  };
  std::vector<Shape> shapes = {{sms, 1024}, {sms, 512}};
  if (sms == pair.properties().multiProcessorCount) shapes.push_back({2 * sms, 1024});
  Shape best_shape = {};
  Figures best = {};
  for (const Shape& shape : shapes) {
    const auto launch = [&](const Side& side, cudaStream_t stream) {
      enqueue_copy(kind, shape.blocks, shape.threads, side, stream);
    };
    const Figures us = pair.time(launch, 8, repeat, ways);
    if (best.median == 0 || us.median < best.median) {
      best = us;
      best_shape = shape;
    }
  }
  const double bytes = static_cast<double>(Pair::kCopyBytes);
  std::printf(
      "  {\"kind\": \"%s\", \"ways\": %d, \"sms\": %d, \"blocks\": %d, \"threads\": %d, \"best_gb_s\": %.1f, "
      "\"median_gb_s\": %.1f}%s\n",
      kNames[static_cast<int>(kind)], ways, sms, best_shape.blocks, best_shape.threads, bytes / best.best / 1e3,
      bytes / best.median / 1e3, last ? "" : ",");
  std::fflush(stdout);
}

void print_one(Pair& pair, const char* name, const Launch& launch, int repeat) {
  pair.reset();
  const Figures us = pair.time(launch, 50, repeat, 2);
  std::printf(" \"%s_us\": {\"best\": %.3f, \"median\": %.3f},\n", name, us.best, us.median);
  std::fflush(stdout);
}

}  // namespace

void print_flags(Pair& pair, int repeat) {
  print_one(
      pair, "empty_kernel", [](const Side& side, cudaStream_t stream) { empty<<<1, 32, 0, stream>>>(side); }, repeat);
  print_one(
      pair, "flag_relaxed", [](const Side& side, cudaStream_t stream) { swap_flags<false><<<1, 1, 0, stream>>>(side); },
      repeat);
  print_one(
      pair, "flag_release_acquire",
      [](const Side& side, cudaStream_t stream) { swap_flags<true><<<1, 1, 0, stream>>>(side); }, repeat);
}

void print_ceilings(Pair& pair, int repeat) {
  const int all = pair.properties().multiProcessorCount;
  std::printf(" \"ceilings\": [\n");
  for (const Kind kind : {Kind::kPut, Kind::kGet}) {
    for (const int sms : {all, 24, 8}) {
      for (const int ways : {1, 2}) print_copy(pair, kind, std::min(sms, all), ways, repeat, false);
    }
  }
  print_copy(pair, Kind::kLocal, all, 1, repeat, true);
  std::printf(" ],\n");
  pair.reset();
}
