// Index lists of a rank_major or flat view: by which of its rows the experts of this rank work, expert after expert, in
// blocks of one expert each. Takes IndexParams behind a dispatch; gives the lists that are wanted, whole. No row is
// copied.
//
// Floor: the start of a kernel, three round trips to memory (how many rows have come, their ids, the lists' stores),
// and 4 bytes for each place. A block has a part of the rows, in order. Where there is room for few rows, each block
// counts the experts of all, as those of a view by expert do (view/counting.cuh). With many that takes longer than a
// start: then a kernel in front counts each block's rows, and blocks add up what it has found. So no block waits for
// another. A place is the number of a choice among its expert's, behind the blocks of the experts before.
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

constexpr int kListedRows = 8;      // rows of a block that reads all ids: one warp numbers them
constexpr int kListBlocks = 64;     // most such blocks: with more, reading all ids in each takes longer than it saves
constexpr int kCountedRows = 32;    // rows of a block where they are counted before
constexpr int kFewChoices = 16384;  // choices that a block counts in about the time that a further kernel takes
static_assert(kCountedExperts <= kExperts);

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

// Gives the block's rows, [from, to).
struct Part {
  int from;
  int to;

  __device__ explicit Part(int rows) {
    const int blocks = static_cast<int>(gridDim.x);
    const int each = (rows + blocks - 1) / blocks;
    from = min(static_cast<int>(blockIdx.x) * each, rows);
    to = min(from + each, rows);
  }
};

// Adds up what the kernel in front has counted: of the blocks before this one into `next`, of all into `total`. A warp
// has kAtOnce blocks on their way.
__device__ void add_counts(const IndexParams& p, const ListScratch& s) {
  constexpr int kAtOnce = 8;
  const int experts = p.group.local_experts;
  const int blocks = static_cast<int>(gridDim.x);
  for (int expert = lane(); expert < experts; expert += 32) {
#pragma unroll 1
    for (int base = static_cast<int>(threadIdx.x / 32); base < blocks; base += kAtOnce * kViewWarps) {
      int32_t value[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int block = base + u * kViewWarps;
        value[u] = 0;
        if (block < blocks) value[u] = static_cast<int32_t>(load_fresh<uint32_t>(p.counted + block * experts + expert));
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const bool before = base + u * kViewWarps < static_cast<int>(blockIdx.x);
        if (value[u] != 0) atomicAdd((before ? s.next : s.total) + expert, value[u]);
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < experts; i += blockDim.x) s.total[i] += s.next[i];
}

// Finds the place of each choice of the batch's `count` rows, in the place of its number. One warp has 32 choices at a
// time, in order: those of one expert count those before them.
__device__ void place_choices(const IndexParams& p, const ListScratch& s, int low, int count) {
  const int items = count * static_cast<int>(ExpertScratch::pitch(p.group.map.shape()));
  const int experts = min(p.group.local_experts - low, kExperts);
  for (int base = 0; base < items && threadIdx.x < 32; base += 32) {
    const int i = base + lane();
    const int expert = i < items ? s.experts[i] - low : -1;
    const bool here = expert >= 0 && expert < experts;
    const uint32_t same = __match_any_sync(~0u, here ? expert : -1);
    const int before = __popc(same & below(lane()));
    const int32_t first = here ? s.next[expert] : 0;
    if (i < items) s.nth[i] = here ? first + before : -1;
    __syncwarp();
    if (here && before == 0) s.next[expert] = first + __popc(same);
    __syncwarp();
  }
}

// Writes the places of the batch's rows [from, from + count).
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

// Begins a kernel of lists: what it needs of experts and of the rows that came, whose counts begin at 0.
__device__ void begin_lists(const IndexParams& p, const ListScratch& s) {
  begin_view(p);
  clear_counts(p, s, 0);
  if (is_tabled(p.group.map.shape())) fill_experts(p.group, s.table, kViewThreads);
  await_earlier();
  begin_rows(p, s.rows);
}

// Counts the choices of each block's rows.
__global__ void __launch_bounds__(kViewThreads, 2) list_counts_kernel(const __grid_constant__ IndexParams p) {
  const ListScratch s(shared_at<int32_t>(0), p.group.map.shape());
  begin_lists(p, s);
  const Part part(s.rows.begin[p.group.map.shape().ranks]);
  const IdPairs ids{p, s};
  const uint32_t begin = static_cast<uint32_t>(part.from) * ids.each();
  const uint32_t end = static_cast<uint32_t>(part.to) * ids.each();
  count_pairs<1>(s, ids, end, 0, p.group.local_experts, part.from, 0, begin);
  __syncthreads();
  int32_t* const counts = p.counted + static_cast<int64_t>(blockIdx.x) * p.group.local_experts;
  for (int i = threadIdx.x; i < p.group.local_experts; i += kViewThreads) counts[i] = s.total[i];
}

__global__ void __launch_bounds__(kViewThreads, 2) index_lists_kernel(const __grid_constant__ IndexParams p) {
  const ListScratch s(shared_at<int32_t>(0), p.group.map.shape());
  begin_lists(p, s);
  const Part part(s.rows.begin[p.group.map.shape().ranks]);
  int32_t end = 0;
#pragma unroll 1
  for (int low = 0; low < p.group.local_experts; low += kExperts) {
    if (low > 0) {
      __syncthreads();
      clear_counts(p, s, low);
      __syncthreads();
    }
    if (p.counted != nullptr) {
      add_counts(p, s);
      find_experts(p, s, part.from, min(kBatch, part.to - part.from));
    } else {
      count_experts(p, s, low, part.from, min(kBatch, part.to - part.from));
    }
    __syncthreads();
    end = place_experts(p, s, low, end);
#pragma unroll 1
    for (int begin = part.from; begin < part.to; begin += kBatch) {
      const int count = min(kBatch, part.to - begin);
      if (begin > part.from) {
        __syncthreads();
        find_experts(p, s, begin, count);
        __syncthreads();
      }
      place_choices(p, s, low, count);
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
  IndexParams p = params;
  const int rows = p.lists.none / shape.top_k;
  const int many = std::clamp(rows / kCountedRows, 1, std::min(grid, kCountedBlocks));
  if (p.lists.none <= kFewChoices || many == 1) p.counted = nullptr;
  const int few = std::clamp(rows / kListedRows, 1, std::min(grid, kListBlocks));
  const int blocks = p.counted != nullptr ? many : few;
  const uint32_t shared = ListScratch::bytes(shape);
  if (p.counted != nullptr) {
    const int error = launch_kernel(list_counts_kernel, p, blocks, shared, early, stream, kViewThreads);
    if (error != 0) return error;
  }
  return launch_kernel(index_lists_kernel, p, blocks, shared, early, stream, kViewThreads);
}

int load_index_lists(const Shape& shape) {
  const uint32_t shared = ListScratch::bytes(shape);
  const int error = allow_shared(reinterpret_cast<const void*>(list_counts_kernel), shared);
  return error != 0 ? error : allow_shared(reinterpret_cast<const void*>(index_lists_kernel), shared);
}

}  // namespace tw::cuda
