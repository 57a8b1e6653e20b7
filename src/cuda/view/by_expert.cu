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

// Where the rows of experts begin, of those that are counted at a time: in the grouped of low latency (kPacked) as
// counted, in the block's memory behind ExpertScratch; in that of high throughput as ranks have told each other; else
// at multiples of all that could come.
template <bool kPacked>
struct Begins {
  const ViewParams& p;
  int32_t* counted;  // [kExperts + 1]
  int low;           // the first of the experts that are counted

  __device__ Begins(const ViewParams& params, const ExpertScratch& s)
      : p(params),
        counted(reinterpret_cast<int32_t*>(s.table + ExpertScratch::table_words(params.group.map.shape()))),
        low(0) {}
  static uint32_t bytes(const Shape& shape) { return kPacked ? 4 * (ExpertScratch::counted(shape) + 1) : 0; }

  // Gives where the rows of a local expert begin; the next expert's begin ends its places.
  __device__ int64_t of(int expert) const {
    if constexpr (kPacked) return counted[expert - low];
    if (p.group.map.shape().exact())
      return static_cast<int64_t>(load_fresh<unsigned long long>(p.handle.expert_begin + expert));
    return static_cast<int64_t>(expert) * p.group.map.shape().ranks * p.bound;
  }
  // What the handle keeps of a place, for a combine: where blocks are packed its row, else its number in the block.
  __device__ int32_t kept(int64_t begin, int nth) const {
    return static_cast<int32_t>(kPacked || p.group.map.shape().exact() ? begin : 0) + nth;
  }
  __device__ bool pads() const { return kPacked || p.group.map.shape().exact(); }  // padding is 0
};

// Writes the counts, and what stands where no row does.
template <bool kPacked>
__device__ void finish_experts(const ViewParams& p, const ExpertScratch& s, const Begins<kPacked>& begins) {
  const GroupView& g = p.group;
  for (int i = static_cast<int>(blockIdx.x); i < kExperts && begins.low + i < g.local_experts;
       i += static_cast<int>(gridDim.x)) {
    const int expert = begins.low + i;
    const int64_t begin = begins.of(expert);
    if (threadIdx.x == 0) p.handle.expert_counts[expert] = p.shown.counts[expert] = s.total[i];
    if (kPacked && threadIdx.x == 0 && p.offsets != nullptr) p.offsets[expert] = static_cast<int32_t>(begin);
    const int64_t from = begin + s.total[i];
    const int64_t to = begins.of(expert + 1);
    show_empty(p, from, to, static_cast<int>(threadIdx.x), kViewThreads);
    if (begins.pads()) clear_rows(p, from, to, static_cast<int>(threadIdx.x), kViewThreads);
  }
}

// Ends a grouped layout: shows what lies beyond all experts, where it has a fixed capacity, and tells where each expert
// begins.
__device__ void finish_grouped(const ViewParams& p, const Begins<false>& begins) {
  const GroupView& g = p.group;
  show_beyond(p, begins.of(g.local_experts));
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i <= g.local_experts;
       i += static_cast<int>(gridDim.x * blockDim.x)) {
    p.offsets[i] = static_cast<int32_t>(begins.of(i));
  }
}
// The same in low latency, where all but the last of the offsets are told with the counts.
__device__ void finish_grouped(const ViewParams& p, int32_t end) {
  show_beyond(p, end);
  if (blockIdx.x == 0 && threadIdx.x == 0) p.offsets[p.group.local_experts] = end;
}

// Copies a batch's rows [from, from + count) to the experts whose rows are numbered, with their ids and weights. Where
// rows are few, several warps share one.
template <bool kPacked>
__device__ void scatter(const ViewParams& p, const ExpertScratch& s, const Begins<kPacked>& begins, int from, int count,
                        int bank) {
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
      const int64_t begin = nth >= 0 ? begins.of(expert) : 0;
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
        p.handle.places[row * shape.top_k + k] = {expert, begins.kept(begin, nth)};
      }
    }
  }
}

template <bool kPacked>
__global__ void __launch_bounds__(kViewThreads, 2) expert_view_kernel(const __grid_constant__ ViewParams p) {
  const ExpertScratch s(shared_at<int32_t>(0), p.group.map.shape());
  Begins<kPacked> begins(p, s);
  int32_t end = 0;  // packed: of the experts so far
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
    if constexpr (kPacked) {
      const int experts = min(p.group.local_experts - low, kExperts);
      begins.low = low;
      __syncthreads();
      if (threadIdx.x < 32) begin_experts(begins.counted, experts, end, p.alignment, [&](int i) { return s.total[i]; });
      __syncthreads();
      end = begins.counted[experts];
    } else {
      begins.low = low;
    }
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
      scatter(p, s, begins, begin, count, bank);
    }
    __syncthreads();
    finish_experts(p, s, begins);
    __syncthreads();
  }
  if (p.offsets == nullptr) return;
  if constexpr (kPacked) {
    finish_grouped(p, end);
  } else {
    finish_grouped(p, begins);
  }
}

template <bool kPacked>
uint32_t shared_bytes(const Shape& shape) {
  return ExpertScratch::bytes(shape) + Begins<kPacked>::bytes(shape);
}

template <bool kPacked>
int launch_many_rows(const ViewParams& params, int grid, bool early, void* stream) {
  const uint32_t bytes = shared_bytes<kPacked>(params.group.map.shape());
  return launch_kernel(expert_view_kernel<kPacked>, params, grid, bytes, early, stream, kViewThreads);
}

template <bool kPacked>
int load_many_rows(const Shape& shape) {
  return allow_shared(reinterpret_cast<const void*>(expert_view_kernel<kPacked>), shared_bytes<kPacked>(shape));
}

}  // namespace

int launch_expert_view(const ViewParams& params, int grid, bool early, void* stream) {
  if (has_few_rows(params, grid)) return launch_few_rows_view(params, grid, early, stream);
  return params.alignment > 0 ? launch_many_rows<true>(params, grid, early, stream)
                              : launch_many_rows<false>(params, grid, early, stream);
}

int load_expert_view(const Shape& shape) {
  if (const int error = load_many_rows<false>(shape)) return error;
  return load_many_rows<true>(shape);
}

}  // namespace tw::cuda
