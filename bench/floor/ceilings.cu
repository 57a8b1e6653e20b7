// What the links and the memories carry at best, and what a kernel and a flag cost.
#include <algorithm>
#include <cstdio>

#include "floor.h"
#include "memory.cuh"

namespace {

__global__ void empty(Side) {}

// A flag to each other GPU and one back, which is what every exchange has at least.
template <bool kOrdered>
__global__ void swap_flags(Side side) {
  const uint32_t step = *side.steps + 1;
  Patience patience(side.expired);
  for (int i = 0; i < side.gpus - 1; ++i) {
    uint32_t* const signal = side.signal(side.other(i), side.index);
    if (kOrdered) {
      store_release(signal, step);
    } else {
      store_relaxed(signal, step);
    }
  }
  for (int i = 0; i < side.gpus - 1; ++i) {
    const uint32_t* const signal = side.signal(side.index, side.other(i));
    while (before(kOrdered ? load_acquire(signal) : load_relaxed(signal), step)) {
      if (patience.lost()) break;
    }
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

// The same to all others at once: pieces of as much as a block stores at a time go to them in turn.
__global__ void __launch_bounds__(1024) spread(Side side, size_t count) {
  constexpr int kDeep = 8;
  const size_t piece = static_cast<size_t>(blockDim.x) * kDeep;
  for (size_t at = blockIdx.x * piece; at + piece <= count; at += gridDim.x * piece) {
    uint4* const to = side.inboxes[side.other(static_cast<int>(at / piece % (side.gpus - 1)))] + at + threadIdx.x;
    const uint4* const from = side.source + at + threadIdx.x;
    uint4 held[kDeep];
#pragma unroll
    for (int k = 0; k < kDeep; ++k) held[k] = from[k * blockDim.x];
#pragma unroll
    for (int k = 0; k < kDeep; ++k) to[k * blockDim.x] = held[k];
  }
}

enum class Kind { kPut, kGet, kLocal };
constexpr const char* kNames[] = {"put", "get", "local_copy"};

void enqueue_copy(Kind kind, int blocks, int threads, const Side& side, cudaStream_t stream) {
  if (kind == Kind::kPut && side.gpus > 2) {
    spread<<<blocks, threads, 0, stream>>>(side, Mesh::kCopyBytes / sizeof(uint4));
    return;
  }
  uint4* const peer = side.inboxes[1 - side.index];  // of the first two, of which one or both work
  uint4* to = kind == Kind::kPut ? peer : side.out;
  const uint4* from = kind == Kind::kGet ? peer : side.source;
  copy<<<blocks, threads, 0, stream>>>(to, from, Mesh::kCopyBytes / sizeof(uint4));
}

// GB/s per direction, payload counted once; of the block size that does best.
void print_copy(Mesh& mesh, Kind kind, int sms, int ways, int repeat, bool last) {
  struct Shape {
    int blocks, threads;
  };
  std::vector<Shape> shapes = {{sms, 1024}, {sms, 512}};
  if (sms == mesh.properties().multiProcessorCount) shapes.push_back({2 * sms, 1024});
  mesh.reset();  // GPUs that took no part have counted fewer steps
  Shape best_shape = {};
  Figures best = {};
  for (const Shape& shape : shapes) {
    const auto launch = [&](const Side& side, cudaStream_t stream) {
      enqueue_copy(kind, shape.blocks, shape.threads, side, stream);
    };
    const Figures us = mesh.time(launch, 8, repeat, ways);
    if (best.median == 0 || us.median < best.median) {
      best = us;
      best_shape = shape;
    }
  }
  const double bytes = static_cast<double>(Mesh::kCopyBytes);
  std::printf(
      "  {\"kind\": \"%s\", \"ways\": %d, \"sms\": %d, \"blocks\": %d, \"threads\": %d, \"best_gb_s\": %.1f, "
      "\"median_gb_s\": %.1f}%s\n",
      kNames[static_cast<int>(kind)], ways, sms, best_shape.blocks, best_shape.threads, bytes / best.best / 1e3,
      bytes / best.median / 1e3, last ? "" : ",");
  std::fflush(stdout);
}

void print_one(Mesh& mesh, const char* name, const Launch& launch, int repeat) {
  mesh.reset();
  const Figures us = mesh.time(launch, 50, repeat, mesh.gpus());
  std::printf(" \"%s_us\": {\"best\": %.3f, \"median\": %.3f},\n", name, us.best, us.median);
  std::fflush(stdout);
}

}  // namespace

void print_flags(Mesh& mesh, int repeat) {
  print_one(
      mesh, "empty_kernel", [](const Side& side, cudaStream_t stream) { empty<<<1, 32, 0, stream>>>(side); }, repeat);
  print_one(
      mesh, "flag_relaxed", [](const Side& side, cudaStream_t stream) { swap_flags<false><<<1, 1, 0, stream>>>(side); },
      repeat);
  print_one(
      mesh, "flag_release_acquire",
      [](const Side& side, cudaStream_t stream) { swap_flags<true><<<1, 1, 0, stream>>>(side); }, repeat);
}

void print_ceilings(Mesh& mesh, int repeat) {
  const int all = mesh.properties().multiProcessorCount;
  std::printf(" \"ceilings\": [\n");
  for (const Kind kind : {Kind::kPut, Kind::kGet}) {
    for (const int sms : {all, 24, 8}) {
      for (const int ways : {1, 2}) print_copy(mesh, kind, std::min(sms, all), ways, repeat, false);
      if (kind == Kind::kPut && mesh.gpus() > 2) print_copy(mesh, kind, std::min(sms, all), mesh.gpus(), repeat, false);
    }
  }
  print_copy(mesh, Kind::kLocal, all, 1, repeat, true);
  std::printf(" ],\n");
  mesh.reset();
}
