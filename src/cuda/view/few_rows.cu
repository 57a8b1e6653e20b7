// Copies out of the window, by expert, where there is room for few rows (view/by_expert.cu does all others): as in a
// step of decoding, which waits for each of them. Takes and gives what view/by_expert.cu does.
//
// Floor: a round trip for what the dispatch has left, another for the rows, and the stores. A block has one slot,
// whether or not a row has come to it; so it can load all ids together with the counts that say which of them are
// there, and its own row while it finds out where that goes. (More blocks than slots are there for the experts' counts
// alone.) There are no loops over batches, vectors or choices beyond 8, since a kernel takes some ten cycles for each
// instruction that it meets for the first time.
//
// What breaks if this changes: S9 (places as in view/by_expert.cu, bit for bit), and S3 as in view/view.cuh.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/launch/launch.h"
#include "cuda/launch/loading.h"
#include "cuda/view/by_expert.cuh"

namespace tw::cuda {
namespace {

constexpr int kFewIds = 4 * kViewThreads;
constexpr uint32_t kFewVectors = 2 * kViewThreads;  // most vectors of a row
constexpr uint32_t kIds = kFewIds / kViewThreads;   // ids of a thread
constexpr uint32_t kVectors = kFewVectors / kViewThreads;

struct FewScratch {
  int32_t* counts;   // [N]
  int32_t* before;   // [L] rows of an expert before this block's
  int32_t* others;   // [L] rows of an expert in slots before this block's
  int32_t* experts;  // [L] rows of an expert from this block's slot on
  int32_t* ids;      // [kFastIds]
  uint32_t* table;   // [E + 1]
  int32_t* begin;    // [L + 1] packed: where an expert's rows begin

  static uint32_t bytes(const Shape& shape, bool packed) {
    const int32_t begins = packed ? shape.experts + 1 : 0;
    return 4 * static_cast<uint32_t>(shape.ranks + 2 * shape.experts + 2 * kFastIds + shape.experts + 1 + begins);
  }
  __device__ FewScratch(int32_t* at, const Shape& shape)
      : counts(at),
        before(counts + shape.ranks),
        others(before + shape.experts),
        experts(others + shape.experts),
        ids(experts + kFastIds),
        table(reinterpret_cast<uint32_t*>(ids + kFastIds)),
        begin(reinterpret_cast<int32_t*>(table + shape.experts + 1)) {}
};

// The thread's part of a row, in each payload that the caller wants.
struct Loaded {
  uint4 value[kFastPayloads][kVectors];

  __device__ Loaded(const ViewParams& p, int64_t row, int bank) {
#pragma unroll
    for (int q = 0; q < kFastPayloads; ++q) {
      if (p.payloads[q] == nullptr) continue;
#pragma unroll
      for (uint32_t v = 0; v < kVectors; ++v) {
        const uint32_t at = threadIdx.x + v * kViewThreads;
        if (at < p.vectors[q]) value[q][v] = load_fresh<uint4>(row_of(p, q, bank, row) + uint64_t{16} * at);
      }
    }
  }
  // Stores it at the row's places, which all of the block's threads know alike.
  template <bool kColumns>
  __device__ void store(const ViewParams& p, const Places& places) const {
#pragma unroll
    for (int q = 0; q < kFastPayloads; ++q) {
      if (p.payloads[q] == nullptr) continue;
      if constexpr (kColumns) {
        if (p.columns[q].wanted()) {
          store_columns(p, q, places);
          continue;
        }
      }
      const auto bytes = static_cast<int64_t>(p.group.map.shape().payload_bytes[q]);
      places.each(reinterpret_cast<unsigned long long>(p.payloads[q] + places.place * bytes), [&](auto place) {
        auto* const to = reinterpret_cast<uint4*>(place) + threadIdx.x;
#pragma unroll
        for (uint32_t v = 0; v < kVectors; ++v) {
          if (threadIdx.x + v * kViewThreads < p.vectors[q]) to[v * kViewThreads] = value[q][v];
        }
      });
    }
  }
  // Does so by column: whole words, as scales are, or bytes.
  __device__ __forceinline__ void store_columns(const ViewParams& p, int q, const Places& places) const {
    const Columns& columns = p.columns[q];
    places.each(place_in_columns(p, q, places), [&](int64_t place) {
#pragma unroll
      for (uint32_t v = 0; v < kVectors; ++v) {
        const uint32_t at = threadIdx.x + v * kViewThreads;
        if (at >= p.vectors[q]) continue;
        const uint4 four = value[q][v];
        const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          std::byte* const to = p.payloads[q];
          if (columns.element_bytes == 4) {
            reinterpret_cast<uint32_t*>(to)[(4 * at + i) * columns.rows + place] = words[i];
            continue;
          }
#pragma unroll 1
          for (uint32_t byte = 0; byte < 4; ++byte) {
            to[in_columns(columns, place, 16 * at + 4 * i + byte)] = static_cast<std::byte>(words[i] >> (8 * byte));
          }
        }
      }
    });
  }
};

// The thread's part of the ids of all slots.
struct Ids {
  uint32_t row[kIds];
  uint32_t k[kIds];
  int32_t id[kIds];

  __device__ Ids(const ViewParams& p, uint32_t slots) {
#pragma unroll
    for (uint32_t u = 0; u < kIds; ++u) {
      const uint32_t i = threadIdx.x + u * kViewThreads;
      row[u] = divide(i, p.ids);
      k[u] = i - row[u] * p.ids.divisor;
      id[u] = row[u] < slots ? static_cast<int32_t>(load_fresh<uint32_t>(ids_of(p, row[u]) + k[u])) : -1;
    }
  }
  // Counts the ids by expert, and keeps those of the block's row. Before a barrier.
  __device__ void count(const ViewParams& p, const FewScratch& s, uint32_t slots, uint32_t own) const {
#pragma unroll
    for (uint32_t u = 0; u < kIds; ++u) {
      if (row[u] >= slots) continue;
      const uint32_t source = divide(row[u], p.slots);
      const bool here = static_cast<int>(row[u] - source * p.slots.divisor) < s.counts[source];
      const int expert = here ? local_expert(p, s.table, id[u]) : -1;
      if (expert >= 0) atomicAdd((row[u] < own ? s.before : s.others) + expert, 1);
      if (row[u] == own) s.experts[k[u]] = expert, s.ids[k[u]] = id[u];
    }
  }
};

// Writes counts, and what stands where no row does. A warp has one expert at a time.
template <bool kPacked>
__device__ void finish(const ViewParams& p, const FewScratch& s, int64_t slots) {
  const auto first = static_cast<int>(blockIdx.x * kViewWarps + threadIdx.x / 32);
  for (int expert = first; expert < p.group.local_experts; expert += static_cast<int>(gridDim.x) * kViewWarps) {
    const int total = s.before[expert] + s.others[expert];
    if (lane() == 0) p.handle.expert_counts[expert] = p.shown.counts[expert] = total;
    if constexpr (kPacked) {
      const int64_t begin = s.begin[expert];
      if (lane() == 0 && p.offsets != nullptr) p.offsets[expert] = static_cast<int32_t>(begin);
      show_empty(p, begin + total, s.begin[expert + 1], lane(), 32);
      clear_rows(p, begin + total, s.begin[expert + 1], lane(), 32);
    } else {
      show_empty(p, expert * slots + total, (expert + 1) * slots, lane(), 32);
    }
  }
  if (!kPacked || p.offsets == nullptr) return;
  const int32_t end = s.begin[p.group.local_experts];
  show_beyond(p, end);
  if (blockIdx.x == 0 && threadIdx.x == 0) p.offsets[p.group.local_experts] = end;
}

template <bool kColumns, bool kPacked>
__global__ void __launch_bounds__(kViewThreads, 2) few_rows_view_kernel(const __grid_constant__ ViewParams p) {
  const Shape& shape = p.group.map.shape();
  const FewScratch s(shared_at<int32_t>(0), shape);
  begin_view(p);
  for (int i = threadIdx.x; i < p.group.local_experts; i += kViewThreads) s.before[i] = s.others[i] = 0;
  fill_experts(p.group, s.table, kViewThreads);
  const auto slots = static_cast<uint32_t>(shape.ranks) * p.slots.divisor;
  const bool has_slot = blockIdx.x < slots;
  const uint32_t own = has_slot ? blockIdx.x : 0;
  const int k = lane();
  await_earlier();
  const int bank = bank_of_channel(p);
  const Ids ids(p, slots);
  uint32_t weight = 0;
  if (threadIdx.x < static_cast<uint32_t>(shape.top_k)) {
    weight = load_fresh<uint32_t>(ids_of(p, own) + shape.top_k + k);
  }
  for (int i = threadIdx.x; i < shape.ranks; i += kViewThreads) {
    s.counts[i] = static_cast<int>(load_fresh<uint32_t>(p.handle.counts + i));
  }
  __syncthreads();
  const Loaded row(p, own, bank);  // its slot is there even if no row has come
  ids.count(p, s, slots, own);
  __syncthreads();
  if constexpr (kPacked) {
    if (threadIdx.x < 32) {
      begin_experts(s.begin, p.group.local_experts, 0, p.alignment, [&](int i) { return s.before[i] + s.others[i]; });
    }
    __syncthreads();
  }
  if (has_slot) {
    const int expert = k < shape.top_k ? s.experts[k] : -1;
    const int nth = expert >= 0 ? s.before[expert] : -1;
    const int64_t begin = kPacked ? s.begin[max(expert, 0)] : static_cast<int64_t>(expert) * slots;
    const Places places{begin + nth, __ballot_sync(~0u, expert >= 0), expert};
    row.store<kColumns>(p, places);
    if (threadIdx.x < static_cast<uint32_t>(shape.top_k)) {
      p.handle.places[own * shape.top_k + k] = {expert, kPacked ? static_cast<int32_t>(begin) + nth : nth};
      if (expert >= 0) show_choice(p, own, k, expert, s.ids[k], weight, places.place);
    }
  }
  finish<kPacked>(p, s, slots);
}

using FewRowsKernel = void (*)(ViewParams);
FewRowsKernel kernel_of(bool columns, bool packed) {
  if (packed) return columns ? few_rows_view_kernel<true, true> : few_rows_view_kernel<false, true>;
  return columns ? few_rows_view_kernel<true, false> : few_rows_view_kernel<false, false>;
}

}  // namespace

bool has_few_rows(const ViewParams& params, int blocks) {
  const Shape& shape = params.group.map.shape();
  const int64_t slots = int64_t{shape.ranks} * params.bound;
  if (slots == 0 || slots > blocks || slots * shape.top_k > kFewIds) return false;
  if (shape.exact() || shape.top_k > kFastIds || shape.payloads > kFastPayloads || !is_tabled(shape)) return false;
  for (int q = 0; q < shape.payloads; ++q) {
    if (params.payloads[q] != nullptr && (params.width[q] != 16 || params.vectors[q] > kFewVectors)) return false;
  }
  return true;
}

int launch_few_rows_view(const ViewParams& params, int blocks, bool early, void* stream) {
  const Shape& shape = params.group.map.shape();
  const int finishing = (params.group.local_experts + kViewWarps - 1) / kViewWarps;
  const int grid = std::min(blocks, std::max(shape.ranks * params.bound, finishing));
  bool columns = false;
  for (int q = 0; q < shape.payloads; ++q) columns |= params.payloads[q] != nullptr && params.columns[q].wanted();
  const bool packed = params.alignment > 0;
  return launch_kernel(kernel_of(columns, packed), params, grid, FewScratch::bytes(shape, packed), early, stream,
                       kViewThreads);
}

int load_few_rows_view(const Shape& shape) {
  if (!is_tabled(shape)) return 0;
  for (const bool packed : {false, true}) {
    for (const bool columns : {false, true}) {
      const auto* const kernel = reinterpret_cast<const void*>(kernel_of(columns, packed));
      if (const int error = allow_shared(kernel, FewScratch::bytes(shape, packed))) return error;
    }
  }
  return 0;
}

}  // namespace tw::cuda
