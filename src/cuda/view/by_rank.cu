// Copies out of the window by source, as rows lie there, into tensors that the caller gave (rank_major, flat). Takes
// ViewParams; gives the rows that have come, nothing beyond them.
//
// Floor: the bytes of the valid rows, read once and written once. Blocks read the counts on the device; rows beyond
// them cost nothing.
//
// What breaks if this changes: S3 as in view/view.cuh. How rows are shared out to warps is speed alone.
#include <cuda_runtime.h>

#include "cuda/launch/launch.h"
#include "cuda/launch/loading.h"
#include "cuda/view/view.cuh"

namespace tw::cuda {
namespace {

__global__ void __launch_bounds__(kViewThreads) rank_view_kernel(const __grid_constant__ ViewParams p) {
  const Shape& shape = p.group.map.shape();
  const Arrived rows(shared_at<int32_t>(0), shape);
  begin_view(p);
  await_earlier();
  const int bank = bank_of_channel(p);
  begin_rows(p, rows);
  const int count = rows.begin[shape.ranks];
  const int warps = kViewWarps * static_cast<int>(gridDim.x);
  const int parts = parts_of(count, warps);
  for (int u = static_cast<int>(blockIdx.x + threadIdx.x / 32 * gridDim.x); u < count * parts; u += warps) {
    const int64_t at = place_of(rows, shape.ranks, u / parts);
    scatter_payloads(p, at, bank, static_cast<uint32_t>(u % parts), static_cast<uint32_t>(parts), {at, 1});
  }
}

uint32_t bytes_of(const Shape& shape) { return 4 * Arrived::words(shape); }

}  // namespace

int launch_rank_view(const ViewParams& params, int grid, bool early, void* stream) {
  return launch_kernel(rank_view_kernel, params, grid, bytes_of(params.group.map.shape()), early, stream, kViewThreads);
}

int load_rank_view(const Shape& shape) {
  return allow_shared(reinterpret_cast<const void*>(rank_view_kernel), bytes_of(shape));
}

}  // namespace tw::cuda
