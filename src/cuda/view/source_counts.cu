// Counts of the rows of each expert by source, [L, N], behind a dispatch by expert. Takes SourceCountsParams; gives all
// of them. No row is copied.
//
// Floor: the start of a kernel, two round trips to memory (how many rows have come, and their ids) and 4 bytes for each
// count. A block has one source at a time, so no count is anybody else's, and blocks need not wait for each other.
//
// What breaks if this changes: what the caller takes for the place of a source's rows among an expert's (S9).
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/launch/launch.h"
#include "cuda/launch/loading.h"
#include "cuda/view/counting.cuh"

namespace tw::cuda {
namespace {

// Counts the rows of a source, for the experts in [low, low + experts), into `next`. By all threads, between barriers.
__device__ void count_source(const SourceCountsParams& p, const ExpertScratch& s, int source, int low, int experts) {
  const IdPairs ids{p, s};
  const int begin = s.rows.begin[source];
  const uint32_t items = static_cast<uint32_t>(s.rows.begin[source + 1] - begin) * ids.each();
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < items; i += kViewThreads) {
    const uint32_t row = divide(i, p.pairs);
    const uint64_t two = ids.load(begin + static_cast<int>(row), i - row * ids.each());
    for (uint32_t which = 0; which < 2; ++which) {
      const int expert = ids.expert(two, which) - low;
      if (expert >= 0 && expert < experts) atomicAdd(s.next + expert, 1);
    }
  }
}

__global__ void __launch_bounds__(kViewThreads) source_counts_kernel(const __grid_constant__ SourceCountsParams p) {
  const Shape& shape = p.group.map.shape();
  const ExpertScratch s(shared_at<int32_t>(0), shape);
  begin_view(p);
  if (is_tabled(shape)) fill_experts(p.group, s.table, kViewThreads);
  await_earlier();
  begin_rows(p, s.rows);
  for (int source = static_cast<int>(blockIdx.x); source < shape.ranks; source += static_cast<int>(gridDim.x)) {
    for (int low = 0; low < p.group.local_experts; low += kExperts) {
      const int experts = min(p.group.local_experts - low, kExperts);
      for (int i = threadIdx.x; i < experts; i += kViewThreads) s.next[i] = 0;
      __syncthreads();
      count_source(p, s, source, low, experts);
      __syncthreads();
      for (int i = threadIdx.x; i < experts; i += kViewThreads) {
        p.counts[int64_t{low + i} * shape.ranks + source] = s.next[i];
      }
      __syncthreads();
    }
  }
}

}  // namespace

int launch_source_counts(const SourceCountsParams& params, int grid, bool early, void* stream) {
  const Shape& shape = params.group.map.shape();
  return launch_kernel(source_counts_kernel, params, std::min(grid, shape.ranks), ExpertScratch::bytes(shape), early,
                       stream, kViewThreads);
}

int load_source_counts(const Shape& shape) {
  return allow_shared(reinterpret_cast<const void*>(source_counts_kernel), ExpertScratch::bytes(shape));
}

}  // namespace tw::cuda
