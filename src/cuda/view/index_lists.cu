// Index lists of a rank_major or flat view: by which of its rows the experts of this rank work, expert after expert, in
// blocks of one expert each. Takes IndexParams behind a dispatch; gives the lists that are wanted, whole. No row is
// copied.
//
// Floor: the start of a kernel, three round trips to memory (how many rows have come, their ids, the lists' stores),
// and 4 bytes for each place. Blocks count as those of a view by expert do (view/counting.cuh), each for itself, so
// none waits for another. So they are few: each reads the ids of all rows. A place is then the number of a choice among
// its expert's, behind the blocks of the experts before.
//
// What breaks if this changes: S9. Products sum in the order of these lists, and src/views/index_lists.h writes the
// same ones.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/launch/launch.h"
#include "cuda/launch/loading.h"
#include "cuda/view/counting.cuh"

namespace tw::cuda {
namespace {

constexpr int kListedRows = 8;   // rows of a block: one warp numbers them, and all warps read all ids
constexpr int kListBlocks = 64;  // most blocks: with more of them, reading all ids in each takes longer than it saves

struct ListScratch : ExpertScratch {
  int32_t* begin;  // [kExperts + 1] the place where an expert's begin

  static uint32_t bytes(const Shape& shape) { return ExpertScratch::bytes(shape) + 4 * (counted(shape) + 1); }
  __device__ ListScratch(int32_t* at, const Shape& shape)
      : ExpertScratch(at, shape), begin(reinterpret_cast<int32_t*>(table + table_words(shape))) {}
};

// Finds where the places of the experts in [low, low + kExperts) begin, the first ones at `from`; gives where they end.
// `next` is then the place of the block's next choice of an expert. By all threads, but one warp works.
__device__ int32_t place_experts(const IndexParams& p, const ListScratch& s, int low, int32_t from) {
  const int experts = min(p.group.local_experts - low, kExperts);
  if (threadIdx.x < 32) {
    int32_t before = from;
#pragma unroll 1
    for (int base = 0; base < experts; base += 32) {
      const int expert = base + lane();
      const uint32_t total = expert < experts ? static_cast<uint32_t>(s.total[expert]) : 0;
      const uint32_t blocks = divide(total + p.block.divisor - 1, p.block);
      const auto places = static_cast<int32_t>(blocks * p.block.divisor);
      const int32_t through = sum_through(places);
      if (expert < experts) {
        s.begin[expert] = before + through - places;
        s.next[expert] += before + through - places;
      }
      before += __shfl_sync(~0u, through, 31);
    }
    if (lane() == 0) s.begin[experts] = before;
  }
  __syncthreads();
  return s.begin[experts];
}

// Writes the places of the batch's rows [from, from + count), which are numbered.
__device__ void list_rows(const IndexParams& p, const ListScratch& s, int from, int count) {
  if (p.lists.sorted_rows == nullptr) return;
  const Shape& shape = p.group.map.shape();
  const auto top_k = static_cast<uint32_t>(shape.top_k);
  for (uint32_t i = threadIdx.x; i < static_cast<uint32_t>(count) * top_k; i += blockDim.x) {
    const uint32_t row = divide(i, p.ids);
    const uint32_t k = i - row * top_k;
    const int32_t place = s.nth[row * ExpertScratch::pitch(shape) + k];
    if (place < 0) continue;
    const int64_t at = place_of(s.rows, shape.ranks, from + static_cast<int>(row));
    p.lists.sorted_rows[place] = static_cast<int32_t>(at * top_k + k);
  }
}

// Fills the blocks of the experts in [low, low + kExperts) up, and tells whose they are. Each expert is one block's of
// the kernel.
__device__ void fill_blocks(const IndexParams& p, const ListScratch& s, int low) {
  const int experts = min(p.group.local_experts - low, kExperts);
  for (int i = static_cast<int>(blockIdx.x); i < experts; i += static_cast<int>(gridDim.x)) {
    const int32_t begin = s.begin[i];
    const int32_t end = s.begin[i + 1];
    for (int32_t at = begin + s.total[i] + static_cast<int>(threadIdx.x); at < end; at += kViewThreads) {
      if (p.lists.sorted_rows != nullptr) p.lists.sorted_rows[at] = p.lists.none;
    }
    const auto first = static_cast<int32_t>(divide(static_cast<uint32_t>(begin), p.block));
    const auto last = static_cast<int32_t>(divide(static_cast<uint32_t>(end), p.block));
    for (int32_t block = first + static_cast<int>(threadIdx.x); block < last; block += kViewThreads) {
      if (p.lists.block_experts != nullptr) p.lists.block_experts[block] = low + i;
    }
  }
}

// Writes that from place `end` on there is nothing. Products that look at the capacity alone find nothing to do there.
__device__ void fill_end(const IndexParams& p, int32_t end) {
  const auto thread = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  const auto threads = static_cast<int32_t>(gridDim.x * blockDim.x);
  if (p.lists.num_sorted != nullptr && thread == 0) *p.lists.num_sorted = end;
  for (int64_t at = int64_t{end} + thread; at < p.lists.capacity && p.lists.sorted_rows != nullptr; at += threads) {
    p.lists.sorted_rows[at] = p.lists.none;
  }
  const auto first = static_cast<int32_t>(divide(static_cast<uint32_t>(end), p.block));
  const auto blocks = static_cast<int32_t>(divide(static_cast<uint32_t>(p.lists.capacity), p.block));
  for (int32_t block = first + thread; block < blocks && p.lists.block_experts != nullptr; block += threads) {
    p.lists.block_experts[block] = -1;
  }
}

__global__ void __launch_bounds__(kViewThreads, 2) index_lists_kernel(const __grid_constant__ IndexParams p) {
  const ListScratch s(shared_at<int32_t>(0), p.group.map.shape());
  begin_view(p);
  clear_counts(p, s, 0);
  if (is_tabled(p.group.map.shape())) fill_experts(p.group, s.table, kViewThreads);
  await_earlier();
  begin_rows(p, s.rows);
  const int rows = s.rows.begin[p.group.map.shape().ranks];
  const int blocks = static_cast<int>(gridDim.x);
  const int each = (rows + blocks - 1) / blocks;
  const int from = min(static_cast<int>(blockIdx.x) * each, rows);
  const int to = min(from + each, rows);
  int32_t end = 0;
#pragma unroll 1
  for (int low = 0; low < p.group.local_experts; low += kExperts) {
    if (low > 0) {
      __syncthreads();
      clear_counts(p, s, low);
      __syncthreads();
    }
    count_experts(p, s, low, from, min(kBatch, to - from));
    __syncthreads();
    end = place_experts(p, s, low, end);
#pragma unroll 1
    for (int begin = from; begin < to; begin += kBatch) {
      const int count = min(kBatch, to - begin);
      if (begin > from) {
        __syncthreads();
        find_experts(p, s, begin, count);
        __syncthreads();
      }
      number_rows(p, s, low, count);
      __syncthreads();
      list_rows(p, s, begin, count);
    }
    fill_blocks(p, s, low);
  }
  fill_end(p, end);
}

}  // namespace

int launch_index_lists(const IndexParams& params, int grid, bool early, void* stream) {
  const Shape& shape = params.group.map.shape();
  const int rows = params.lists.none / shape.top_k;
  const int blocks = std::clamp(rows / kListedRows, 1, std::min(grid, kListBlocks));
  return launch_kernel(index_lists_kernel, params, blocks, ListScratch::bytes(shape), early, stream, kViewThreads);
}

int load_index_lists(const Shape& shape) {
  return allow_shared(reinterpret_cast<const void*>(index_lists_kernel), ListScratch::bytes(shape));
}

}  // namespace tw::cuda
