// Rows of each expert among those that have come: how many there are, and the number of each row among its expert's.
//
// Takes ArrivedParams behind a dispatch, and the block's shared memory. A block has a part of the rows, in order. It
// counts the experts of all rows before its own, so that blocks need not wait for each other: at 8192 rows of 8 ids
// that is some 10 us of a last block. Experts are counted kExperts at a time, rows are numbered kBatch at a time.
//
// What breaks if this changes: S9. A row's number among its expert's rows is its place, in order of source and slot,
// in every layout by expert and in index lists.
#pragma once

#include "cuda/view/by_expert.cuh"

namespace tw::cuda {

constexpr int kBatch = 64;      // rows whose experts a block finds at a time
constexpr int kExperts = 4096;  // experts that are counted at a time
static_assert(kTabled <= kExperts);

struct ExpertScratch {
  Arrived rows;
  int32_t* experts;  // [kBatch, pitch] local expert of each (row, k), -1 for none
  int32_t* nth;      // [kBatch, pitch] each row's number among the rows of its expert
  int32_t* next;     // [kExperts] rows of an expert so far
  int32_t* total;    // [kExperts] all rows of an expert
  uint32_t* table;   // [E + 1] where experts are, if there are few enough

  static __host__ __device__ uint32_t pitch(const Shape& shape) {  // in whole pairs of ids
    return (static_cast<uint32_t>(shape.top_k) + 1) / 2 * 2;
  }
  static uint32_t bytes(const Shape& shape) {
    return 4 * (Arrived::words(shape) + 2 * kBatch * pitch(shape) + 2 * counted(shape) + table_words(shape));
  }
  __device__ ExpertScratch(int32_t* at, const Shape& shape) : rows(at, shape) {
    experts = rows.at + shape.ranks;
    nth = experts + kBatch * pitch(shape);
    next = nth + kBatch * pitch(shape);
    total = next + counted(shape);
    table = reinterpret_cast<uint32_t*>(total + counted(shape));
  }
  static __host__ __device__ uint32_t table_words(const Shape& shape) {
    return is_tabled(shape) ? counted(shape) + 1 : 0;
  }
  static __host__ __device__ uint32_t counted(const Shape& shape) {
    return static_cast<uint32_t>(shape.experts < kExperts ? shape.experts : kExperts);
  }
};

// Two ids of a row, which are read together: ids begin at a multiple of 8 bytes, and weights follow them.
struct IdPairs {
  const ArrivedParams& p;
  const ExpertScratch& s;

  __device__ uint32_t each() const { return p.pairs.divisor; }  // pairs of a row
  __device__ uint64_t load(int row, uint32_t pair) const {
    const Shape& shape = p.group.map.shape();
    const int32_t* const ids = ids_of(p, place_of(s.rows, shape.ranks, row));
    const uint64_t two = load_fresh<unsigned long long>(ids + 2 * pair);
    return static_cast<int>(2 * pair) + 1 == shape.top_k ? two | ~uint64_t{0} << 32
                                                         : two;  // the second one is a weight
  }
  __device__ int expert(uint64_t two, uint32_t which) const {
    return local_expert(p, s.table, static_cast<int32_t>(two >> 32 * which));
  }
};

// Finds the local experts of the rows [from, from + count), into the block's memory.
__device__ inline void find_experts(const ArrivedParams& p, const ExpertScratch& s, int from, int count) {
  const IdPairs ids{p, s};
  for (uint32_t i = threadIdx.x; i < static_cast<uint32_t>(count) * ids.each(); i += blockDim.x) {
    const uint32_t row = divide(i, p.pairs);
    const uint64_t two = ids.load(from + static_cast<int>(row), i - row * ids.each());
    s.experts[2 * i] = ids.expert(two, 0);
    s.experts[2 * i + 1] = ids.expert(two, 1);
  }
}

// Sets the counts of the experts in [low, low + kExperts) to 0.
__device__ inline void clear_counts(const ArrivedParams& p, const ExpertScratch& s, int low) {
  const int experts = min(p.group.local_experts - low, kExperts);
  for (int i = threadIdx.x; i < experts; i += blockDim.x) s.next[i] = s.total[i] = 0;
}

// Counts rows of the experts in [low, end): those before row `from` into `next`, others into `total`; and finds the
// experts of the `count` rows from that one on, as find_experts does. Pairs before `begin`, and from `items` on, are
// left out. A thread has kAtOnce pairs on their way.
template <uint32_t kAtOnce>
__device__ inline void count_pairs(const ExpertScratch& s, const IdPairs& ids, uint32_t items, int low, int end,
                                   int from, int count, uint32_t begin = 0) {
  const uint32_t first = static_cast<uint32_t>(from) * ids.each();
#pragma unroll 1
  for (uint32_t base = begin + threadIdx.x; base < items; base += kAtOnce * blockDim.x) {
    uint64_t two[kAtOnce];
#pragma unroll
    for (uint32_t u = 0; u < kAtOnce; ++u) {
      const uint32_t i = base + u * blockDim.x;
      two[u] = ~uint64_t{0};
      if (i >= items) continue;
      const uint32_t row = divide(i, ids.p.pairs);
      two[u] = ids.load(static_cast<int>(row), i - row * ids.each());
    }
#pragma unroll
    for (uint32_t u = 0; u < 2 * kAtOnce; ++u) {
      const uint32_t i = base + u / 2 * blockDim.x;
      const int expert = ids.expert(two[u / 2], u % 2);
      if (i - first < static_cast<uint32_t>(count) * ids.each()) s.experts[2 * (i - first) + u % 2] = expert;
      if (expert >= low && expert < end) atomicAdd((i < first ? s.next : s.total) + (expert - low), 1);
    }
  }
}

// Counts rows of each expert in [low, low + kExperts): those before row `from` into `next`, all into `total`. On the
// way it finds the experts of the `count` rows from that one on. With little to count, few instructions are met for the
// first time.
__device__ inline void count_experts(const ArrivedParams& p, const ExpertScratch& s, int low, int from, int count) {
  const IdPairs ids{p, s};
  const int experts = min(p.group.local_experts - low, kExperts);
  const uint32_t items = static_cast<uint32_t>(s.rows.begin[p.group.map.shape().ranks]) * ids.each();
  if (items <= blockDim.x) {
    count_pairs<1>(s, ids, items, low, low + experts, from, count);
  } else {
    count_pairs<4>(s, ids, items, low, low + experts, from, count);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < experts; i += blockDim.x) s.total[i] += s.next[i];
}

// Numbers the batch's `count` rows among their experts' rows. One warp does so row after row, as a place means the
// order. Within a row no expert stands twice.
__device__ inline void number_rows(const ArrivedParams& p, const ExpertScratch& s, int low, int count) {
  const int top_k = p.group.map.shape().top_k;
  const int pitch = static_cast<int>(ExpertScratch::pitch(p.group.map.shape()));
  const int experts = min(p.group.local_experts - low, kExperts);
  for (int row = 0; row < count && threadIdx.x < 32; ++row) {
    for (int k = lane(); k < top_k; k += 32) {
      const int expert = s.experts[row * pitch + k] - low;
      const bool here = expert >= 0 && expert < experts;
      s.nth[row * pitch + k] = here ? s.next[expert]++ : -1;
    }
    __syncwarp();
  }
}

}  // namespace tw::cuda
