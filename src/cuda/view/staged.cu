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

constexpr int kLandThreads = 256;

__global__ void __launch_bounds__(kLandThreads) land_kernel(const __grid_constant__ LandParams p) {
  const WindowMap& map = p.group.map;
  const Shape& shape = map.shape();
  if (is_sticky(p.group)) return;
  std::byte* const bank = window_of(p.group, p.group.me) + map.bank(p.channel, p.bank);
  for (int source = 0; source < shape.ranks; ++source) {
    const int64_t begin = p.handle.source[source];
    const int64_t rows = min(p.handle.source[source + 1] - begin, static_cast<int64_t>(p.bound));
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
      const auto from = static_cast<uint64_t>(int64_t{source} * p.bound + row);
      const auto to = static_cast<uint64_t>(begin + row);
      for (int q = 0; q < shape.payloads; ++q) {
        const uint64_t bytes = shape.payload_bytes[q];
        copy_bytes(p.from + map.payload_begin(q) + from * bytes, bank + map.payload_begin(q) + to * bytes, bytes,
                   threadIdx.x, blockDim.x);
      }
      const uint64_t meta = meta_bytes(shape.top_k);
      copy_bytes(p.from + map.meta_begin() + from * meta, bank + map.meta_begin() + to * meta, meta, threadIdx.x,
                 blockDim.x);
    }
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
