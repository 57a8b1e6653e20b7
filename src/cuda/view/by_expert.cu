// Copies out of the window by expert: expert_major and grouped. Takes ViewParams; gives rows, ids, weights, origins,
// counts and offsets in the caller's tensors, and the places by which a combine finds them.
//
// Floor: the bytes of the valid rows, read once and written once for each place they go to. Blocks read the counts on
// the device; rows beyond them cost nothing. A block counts (view/counting.cuh), for some 10 us at 8192 rows of 8 ids,
// beside 150 us of copying. Then its warps copy rows, each by itself, so that many are under way. With few rows most of
// the time is instructions that are met for the first time, so there are few of them on that way.
//
// What breaks if this changes: S9 (a row's place is its number among its expert's rows, in order of source and slot),
// and S3 as in view/view.cuh.
#include <cuda_runtime.h>

#include "cuda/launch/launch.h"
#include "cuda/launch/loading.h"
#include "cuda/view/counting.cuh"

namespace tw::cuda {
namespace {

// Gives where the rows of a local expert begin; the next expert's begin ends its places.
__device__ int64_t begin_of(const ViewParams& p, int expert) {
  if (p.group.map.shape().exact())
    return static_cast<int64_t>(load_fresh<unsigned long long>(p.handle.expert_begin + expert));
  return static_cast<int64_t>(expert) * p.group.map.shape().ranks * p.bound;
}

// Writes zeros to rows [from, to) of a payload. By a block.
__device__ void clear_rows(const ViewParams& p, int q, int64_t from, int64_t to) {
  const auto bytes = static_cast<int64_t>(p.group.map.shape().payload_bytes[q]);
  const Columns& columns = p.columns[q];
  if (!columns.wanted() && p.width[q] == 16) {  // with an alignment of 128 rows an expert has 64 such rows on average
    auto* const vectors = reinterpret_cast<uint4*>(p.payloads[q]);
    for (int64_t i = from * (bytes / 16) + threadIdx.x; i < to * (bytes / 16); i += blockDim.x) vectors[i] = {};
    return;
  }
  for (int64_t i = from * bytes + threadIdx.x; i < to * bytes; i += blockDim.x) {
    p.payloads[q][columns.wanted() ? in_columns(columns, i / bytes, static_cast<uint32_t>(i % bytes)) : i] =
        std::byte{0};
  }
}

// Writes the counts, and what stands where no row does.
__device__ void finish_experts(const ViewParams& p, const ExpertScratch& s, int low) {
  const GroupView& g = p.group;
  for (int i = static_cast<int>(blockIdx.x); i < kExperts && low + i < g.local_experts;
       i += static_cast<int>(gridDim.x)) {
    const int expert = low + i;
    if (threadIdx.x == 0) p.handle.expert_counts[expert] = p.shown.counts[expert] = s.total[i];
    const int64_t from = begin_of(p, expert) + s.total[i];
    show_empty(p, from, begin_of(p, expert + 1), static_cast<int>(threadIdx.x), kViewThreads);
    for (int q = 0; q < g.map.shape().payloads && g.map.shape().exact(); ++q) {  // in exact layouts padding is 0
      if (p.payloads[q] != nullptr) clear_rows(p, q, from, begin_of(p, expert + 1));
    }
  }
}

// Ends a grouped layout: shows what lies beyond all experts, where it has a fixed capacity, and tells where each expert
// begins. Rows beyond stay as they are, because the cost of a dispatch must follow from what comes, not from what could
// have come.
__device__ void finish_grouped(const ViewParams& p) {
  const GroupView& g = p.group;
  const int64_t end = begin_of(p, g.local_experts);
  const int64_t share = (p.rows - end + gridDim.x - 1) / static_cast<int64_t>(gridDim.x);
  const int64_t from = end + static_cast<int64_t>(blockIdx.x) * share;
  show_empty(p, from, min(static_cast<int64_t>(p.rows), from + share), static_cast<int>(threadIdx.x), kViewThreads);
  for (int q = 0; q < g.map.shape().payloads && blockIdx.x == 0; ++q) {  // columns may be longer than there are rows
    if (p.payloads[q] == nullptr || !p.columns[q].wanted()) continue;
    clear_rows(p, q, p.rows, p.columns[q].rows);
  }
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i <= g.local_experts;
       i += static_cast<int>(gridDim.x * blockDim.x)) {
    p.offsets[i] = static_cast<int32_t>(begin_of(p, i));
  }
}

// Copies a batch's rows [from, from + count) to the experts whose rows are numbered, with their ids and weights. Where
// rows are few, several warps share one.
__device__ void scatter(const ViewParams& p, const ExpertScratch& s, int from, int count, int bank) {
  const Shape& shape = p.group.map.shape();
  const int parts = parts_of(count, kViewWarps);
  for (int u = static_cast<int>(threadIdx.x / 32); u < count * parts; u += kViewWarps) {
    const int i = u / parts;
    const int part = u - i * parts;
    const int64_t row = place_of(s.rows, shape.ranks, from + i);
    for (int base = 0; base < shape.top_k; base += 32) {
      const int k = base + lane();
      const int at = i * static_cast<int>(ExpertScratch::pitch(shape)) + k;
      const int nth = k < shape.top_k ? s.nth[at] : -1;
      const int expert = k < shape.top_k ? s.experts[at] : -1;
      Places places{0, __ballot_sync(~0u, nth >= 0), expert};
      const int64_t begin = nth >= 0 ? begin_of(p, expert) : 0;
      places.place = begin + nth;
      if (places.threads != 0) {
        scatter_payloads(p, row, bank, static_cast<uint32_t>(part), static_cast<uint32_t>(parts), places);
      }
      if (part != 0 || k >= shape.top_k) continue;
      if (nth >= 0) {
        const int32_t* const ids = ids_of(p, row);
        const uint32_t weight = load_fresh<uint32_t>(ids + shape.top_k + k);
        show_choice(p, row, k, expert, static_cast<int32_t>(load_fresh<uint32_t>(ids + k)), weight, places.place);
      }
      // A combine needs this. The place for an expert that is counted later is written then.
      if (nth >= 0 || expert < 0) {
        p.handle.places[row * shape.top_k + k] = {expert, static_cast<int32_t>(shape.exact() ? begin : 0) + nth};
      }
    }
  }
}

__global__ void __launch_bounds__(kViewThreads, 2) expert_view_kernel(const __grid_constant__ ViewParams p) {
  const ExpertScratch s(shared_at<int32_t>(0), p.group.map.shape());
  begin_view(p);
  clear_counts(p, s, 0);
  if (is_tabled(p.group.map.shape())) fill_experts(p.group, s.table, kViewThreads);
  await_earlier();
  const int bank = bank_of_channel(p);
  begin_rows(p, s.rows);
  const int rows = s.rows.begin[p.group.map.shape().ranks];
  const int blocks = static_cast<int>(gridDim.x);
  const int each = (rows + blocks - 1) / blocks;
  const int from = min(static_cast<int>(blockIdx.x) * each, rows);
  const int to = min(from + each, rows);
#pragma unroll 1
  for (int low = 0; low < p.group.local_experts; low += kExperts) {
    if (low > 0) {
      clear_counts(p, s, low);
      __syncthreads();
    }
    count_experts(p, s, low, from, min(kBatch, to - from));
#pragma unroll 1
    for (int begin = from; begin < to; begin += kBatch) {
      const int count = min(kBatch, to - begin);
      if (begin > from) {
        __syncthreads();
        find_experts(p, s, begin, count);
      }
      __syncthreads();
      number_rows(p, s, low, count);
      __syncthreads();
      scatter(p, s, begin, count, bank);
    }
    __syncthreads();
    finish_experts(p, s, low);
    __syncthreads();
  }
  if (p.offsets != nullptr) finish_grouped(p);
}

}  // namespace

int launch_expert_view(const ViewParams& params, int grid, bool early, void* stream) {
  if (has_few_rows(params, grid)) return launch_few_rows_view(params, grid, early, stream);
  return launch_kernel(expert_view_kernel, params, grid, ExpertScratch::bytes(params.group.map.shape()), early, stream,
                       kViewThreads);
}

int load_expert_view(const Shape& shape) {
  return allow_shared(reinterpret_cast<const void*>(expert_view_kernel), ExpertScratch::bytes(shape));
}

}  // namespace tw::cuda
