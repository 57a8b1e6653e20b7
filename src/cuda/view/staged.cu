// Rows of a dispatch of high throughput that have come over a staged transport, in blocks by source: this moves them to
// where they belong, without gaps. Their number is known in device memory alone. await_kernel tells the host that a
// wait has begun.
//
// Takes LandParams; gives payloads and metadata in the bank of the step, as a dispatch between windows would have left
// them.
//
// What breaks if this changes: S4: both run behind the carrier's move on the same stream, and before the kernel that
// takes the rows.
#include <cuda_runtime.h>

#include "cuda/device/wait.cuh"
#include "cuda/launch/launch.h"
#include "cuda/launch/loading.h"
#include "cuda/launch/steps.h"

namespace tw::cuda {
namespace {

constexpr int kLandThreads = 512;
constexpr uint64_t kLandTile = 4096;  // bytes that a warp copies at a time

// Copies rows that lie behind each other, a tile of one by a warp at a time. `before`: rows that were copied before
// these, with whose tiles the warps have begun.
__device__ void land_rows(const std::byte* from, std::byte* to, uint64_t row, uint64_t rows, uint64_t before) {
  const auto warps = static_cast<uint64_t>(gridDim.x) * (kLandThreads / 32);
  const uint64_t warp = static_cast<uint64_t>(blockIdx.x) * (kLandThreads / 32) + threadIdx.x / 32;
  const uint64_t tiles = (row + kLandTile - 1) / kLandTile;
  for (uint64_t i = (warp + warps - before * tiles % warps) % warps; i < rows * tiles; i += warps) {
    const uint64_t begin = i % tiles * kLandTile;
    const uint64_t at = i / tiles * row + begin;
    copy_bytes(from + at, to + at, min(kLandTile, row - begin), static_cast<uint64_t>(lane()), 32);
  }
}

__global__ void __launch_bounds__(kLandThreads) land_kernel(const __grid_constant__ LandParams p) {
  const WindowMap& map = p.group.map;
  const Shape& shape = map.shape();
  if (is_sticky(p.group)) return;
  std::byte* const bank = window_of(p.group, p.group.me) + map.bank(p.channel, p.bank);
  const uint64_t meta = meta_bytes(shape.top_k);
  for (int source = 0; source < shape.ranks; ++source) {
    const int64_t begin = p.handle.source[source];
    const int64_t count = min(p.handle.source[source + 1] - begin, static_cast<int64_t>(p.bound));
    if (count <= 0) continue;
    const auto rows = static_cast<uint64_t>(count);
    const auto from = static_cast<uint64_t>(int64_t{source} * p.bound);
    const auto to = static_cast<uint64_t>(begin);
    for (int q = 0; q < shape.payloads; ++q) {
      const uint64_t row = shape.payload_bytes[q];
      const uint64_t at = map.payload_begin(q);
      land_rows(p.from + at + from * row, bank + at + to * row, row, rows, to);
    }
    land_rows(p.from + map.meta_begin() + from * meta, bank + map.meta_begin() + to * meta, meta, rows, to);
  }
}

// Tells the host that from here on it counts how long this rank waits for its peers.
__global__ void await_kernel(const __grid_constant__ AwaitParams p) {
  store_half(&p.group.pages[p.group.me]->staged[p.channel].waits,
             load_half(&p.group.pages[p.group.me]->staged[p.channel].sent));
}

}  // namespace

int launch_land(const LandParams& params, int grid, void* stream) {
  return launch_kernel(land_kernel, params, grid, 0, false, stream, kLandThreads);
}
int launch_await(const AwaitParams& params, void* stream) {
  return launch_kernel(await_kernel, params, 1, 0, false, stream, 32);
}

int load_land() {
  if (const int error = allow_shared(reinterpret_cast<const void*>(await_kernel), 0)) return error;
  return allow_shared(reinterpret_cast<const void*>(land_kernel), 0);
}

}  // namespace tw::cuda
