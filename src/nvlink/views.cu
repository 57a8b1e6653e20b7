// Copies out of the window: floor, the bytes of the valid rows read once and written once for each place they go to.
// Blocks read the counts on the device; rows beyond them cost nothing.
#include <cuda_runtime.h>

#include "nvlink/launch.h"
#include "nvlink/received.cuh"

namespace tw::nvlink {
namespace {

constexpr int kViewThreads = 512;
constexpr int kBatch = 64;      // rows whose experts a block finds at a time
constexpr int kExperts = 4096;  // that are counted at a time

// First row, in (source, slot) order, of each source. All threads; [N + 1] in shared memory.
__device__ void begin_rows(const ViewParams& p, int32_t* begin) {
  const int ranks = p.group.map.shape().ranks;
  if (threadIdx.x == 0) {
    int total = 0;
    for (int i = 0; i < ranks; ++i) {
      begin[i] = total;
      total += p.handle.counts[i];
    }
    begin[ranks] = total;
  }
  __syncthreads();
}

struct Slot {
  int source;
  int p;
};
__device__ Slot slot_of(const int32_t* begin, int ranks, int row) {
  int low = 0;
  int high = ranks;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (begin[middle] <= row ? low : high) = middle;
  }
  return {low, row - begin[low]};
}

__device__ int bank_of_lane(const ViewParams& p) {
  // The dispatch was the last step of the lane that ended.
  return static_cast<int>(p.group.lanes[p.lane].step & 1);
}

template <class V>
__device__ void copy_payload(const ViewParams& p, int q, const int32_t* begin, int bank) {
  const Shape& shape = p.group.map.shape();
  const std::byte* const window = p.group.windows[p.group.me];
  const uint32_t vectors = p.vectors[q].divisor;
  for (int row = static_cast<int>(blockIdx.x); row < begin[shape.ranks]; row += static_cast<int>(gridDim.x)) {
    const Slot slot = slot_of(begin, shape.ranks, row);
    const auto* const from =
        reinterpret_cast<const V*>(window + p.group.map.payload(p.lane, bank, q, slot.source, slot.p, p.bound));
    const int64_t at = static_cast<int64_t>(slot.source) * p.bound + slot.p;
    auto* const to = reinterpret_cast<V*>(p.payloads[q] + at * static_cast<int64_t>(shape.payload_bytes[q]));
    for (uint32_t i = threadIdx.x; i < vectors; i += blockDim.x) to[i] = load_fresh<V>(from + i);
  }
}

__global__ void __launch_bounds__(kViewThreads) rank_view_kernel(const __grid_constant__ ViewParams p) {
  int32_t* const shared = shared_at<int32_t>(0);
  begin_rows(p, shared);
  const int bank = bank_of_lane(p);
  for (int q = 0; q < p.group.map.shape().payloads; ++q) {
    if (p.payloads[q] == nullptr) continue;
    switch (p.width[q]) {
      case 16:
        copy_payload<uint4>(p, q, shared, bank);
        break;
      case 8:
        copy_payload<unsigned long long>(p, q, shared, bank);
        break;
      case 4:
        copy_payload<unsigned int>(p, q, shared, bank);
        break;
      case 2:
        copy_payload<unsigned short>(p, q, shared, bank);
        break;
      default:
        copy_payload<unsigned char>(p, q, shared, bank);
        break;
    }
  }
}

// ---- expert_major

struct ExpertScratch {
  int32_t* begin;    // [N + 1]
  int32_t* experts;  // [kBatch, K] local expert of each (row, k), -1 for none
  int32_t* next;     // [kExperts] rows of an expert so far
  int32_t* total;    // [kExperts]

  static uint32_t bytes(const Shape& shape) {
    return 4 * (static_cast<uint32_t>(shape.ranks) + 1 + kBatch * static_cast<uint32_t>(shape.top_k) + 2 * kExperts);
  }
  __device__ ExpertScratch(int32_t* at, const Shape& shape) {
    begin = at;
    experts = begin + shape.ranks + 1;
    next = experts + kBatch * shape.top_k;
    total = next + kExperts;
  }
};

__device__ const int32_t* ids_of(const ViewParams& p, const Slot& slot) {
  const int64_t row = static_cast<int64_t>(slot.source) * p.bound + slot.p;
  return reinterpret_cast<const int32_t*>(p.handle.meta + row * (1 + p.group.map.shape().top_k) + 1);
}
__device__ int local_expert(const ViewParams& p, int32_t id) {
  const GroupView& g = p.group;
  if (id < 0 || id >= g.map.shape().experts) return -1;
  const uint32_t expert = g.experts[id];
  return expert_rank(expert) == g.me ? expert_slot(expert) : -1;
}

// Rows of each expert in [low, low + kExperts): all of them, and those before `row`.
__device__ void count_experts(const ViewParams& p, const ExpertScratch& s, int low, int row) {
  const Shape& shape = p.group.map.shape();
  for (int i = threadIdx.x; i < kExperts; i += blockDim.x) s.next[i] = s.total[i] = 0;
  __syncthreads();
  const int rows = s.begin[shape.ranks];
  for (int64_t i = threadIdx.x; i < static_cast<int64_t>(rows) * shape.top_k; i += blockDim.x) {
    const int at = static_cast<int>(i / shape.top_k);
    const int expert = local_expert(p, ids_of(p, slot_of(s.begin, shape.ranks, at))[i % shape.top_k]) - low;
    if (expert < 0 || expert >= kExperts) continue;
    atomicAdd(&s.total[expert], 1);
    if (at < row) atomicAdd(&s.next[expert], 1);
  }
  __syncthreads();
}

// Places of the rows [from, to) at the experts in [low, low + kExperts), into the handle, where combine finds them.
__device__ void assign_places(const ViewParams& p, const ExpertScratch& s, int low, int from, int to) {
  const Shape& shape = p.group.map.shape();
  const int top_k = shape.top_k;
  for (int begin = from; begin < to; begin += kBatch) {
    const int count = min(kBatch, to - begin);
    for (int i = threadIdx.x; i < count * top_k; i += blockDim.x) {
      const Slot slot = slot_of(s.begin, shape.ranks, begin + i / top_k);
      s.experts[i] = local_expert(p, ids_of(p, slot)[i % top_k]);
    }
    __syncthreads();
    // Row after row by one warp: order is the meaning of a place. Within a row no expert stands twice.
    if (threadIdx.x < 32) {
      for (int row = 0; row < count; ++row) {
        const Slot slot = slot_of(s.begin, shape.ranks, begin + row);
        const int64_t at = (static_cast<int64_t>(slot.source) * p.bound + slot.p) * top_k;
        for (int k = threadIdx.x; k < top_k; k += 32) {
          const int expert = s.experts[row * top_k + k];
          if (expert < low || expert >= low + kExperts) continue;
          p.handle.places[at + k] = s.next[expert - low]++;
        }
        __syncwarp();
      }
    }
    __syncthreads();
  }
}

// ids and weights of places that hold nothing, and the counts.
__device__ void finish_experts(const ViewParams& p, const ExpertScratch& s, int low) {
  const GroupView& g = p.group;
  const int64_t per_expert = static_cast<int64_t>(g.map.shape().ranks) * p.bound;
  for (int i = static_cast<int>(blockIdx.x); i < kExperts && low + i < g.local_experts;
       i += static_cast<int>(gridDim.x)) {
    const int expert = low + i;
    if (threadIdx.x == 0) p.handle.expert_counts[expert] = p.shown.counts[expert] = s.total[i];
    for (int64_t place = s.total[i] + threadIdx.x; place < per_expert; place += blockDim.x) {
      if (p.shown.ids != nullptr) show_id(p.shown, expert * per_expert + place, p.shown.invalid);
      if (p.shown.weights != nullptr) p.shown.weights[expert * per_expert + place] = 0.0f;
    }
  }
}

template <class V>
__device__ void scatter_row(const ViewParams& p, int q, const Slot& slot, const int32_t* experts, const int32_t* places,
                            int bank) {
  const Shape& shape = p.group.map.shape();
  const int64_t per_expert = static_cast<int64_t>(shape.ranks) * p.bound;
  const auto* const from = reinterpret_cast<const V*>(
      p.group.windows[p.group.me] + p.group.map.payload(p.lane, bank, q, slot.source, slot.p, p.bound));
  for (uint32_t i = threadIdx.x; i < p.vectors[q].divisor; i += blockDim.x) {
    const V value = load_fresh<V>(from + i);
    for (int k = 0; k < shape.top_k; ++k) {
      if (experts[k] < 0) continue;
      const int64_t at = experts[k] * per_expert + places[k];
      reinterpret_cast<V*>(p.payloads[q] + at * static_cast<int64_t>(shape.payload_bytes[q]))[i] = value;
    }
  }
}

// Copies the rows [from, to) to their experts, with their ids and weights. The row is read once.
__device__ void scatter(const ViewParams& p, const ExpertScratch& s, int from, int to, int bank) {
  const Shape& shape = p.group.map.shape();
  const int top_k = shape.top_k;
  const int64_t per_expert = static_cast<int64_t>(shape.ranks) * p.bound;
  int32_t* const places = s.experts + top_k;
  for (int row = from; row < to; ++row) {
    const Slot slot = slot_of(s.begin, shape.ranks, row);
    const int64_t at = static_cast<int64_t>(slot.source) * p.bound + slot.p;
    const int32_t* const ids = ids_of(p, slot);
    __syncthreads();
    for (int k = threadIdx.x; k < top_k; k += blockDim.x) {
      const int expert = local_expert(p, ids[k]);
      s.experts[k] = expert;
      if (expert < 0) continue;
      places[k] = p.handle.places[at * top_k + k];
      const int64_t to_place = expert * per_expert + places[k];
      if (p.shown.ids != nullptr) show_id(p.shown, to_place, p.shown.local ? expert : ids[k]);
      if (p.shown.weights != nullptr) p.shown.weights[to_place] = reinterpret_cast<const float*>(ids + top_k)[k];
    }
    __syncthreads();
    for (int q = 0; q < shape.payloads; ++q) {
      if (p.payloads[q] == nullptr) continue;
      switch (p.width[q]) {
        case 16:
          scatter_row<uint4>(p, q, slot, s.experts, places, bank);
          break;
        case 8:
          scatter_row<unsigned long long>(p, q, slot, s.experts, places, bank);
          break;
        case 4:
          scatter_row<unsigned int>(p, q, slot, s.experts, places, bank);
          break;
        case 2:
          scatter_row<unsigned short>(p, q, slot, s.experts, places, bank);
          break;
        default:
          scatter_row<unsigned char>(p, q, slot, s.experts, places, bank);
          break;
      }
    }
  }
}

__global__ void __launch_bounds__(kViewThreads) expert_view_kernel(const __grid_constant__ ViewParams p) {
  const ExpertScratch s(shared_at<int32_t>(0), p.group.map.shape());
  begin_rows(p, s.begin);
  const int rows = s.begin[p.group.map.shape().ranks];
  const int blocks = static_cast<int>(gridDim.x);
  const int each = (rows + blocks - 1) / blocks;
  const int from = min(static_cast<int>(blockIdx.x) * each, rows);
  const int to = min(from + each, rows);
  for (int low = 0; low < p.group.local_experts; low += kExperts) {
    count_experts(p, s, low, from);
    assign_places(p, s, low, from, to);
    finish_experts(p, s, low);
    __syncthreads();
  }
  scatter(p, s, from, to, bank_of_lane(p));
}

uint32_t rank_view_bytes(const Shape& shape) { return 4 * (static_cast<uint32_t>(shape.ranks) + 1); }

}  // namespace

int launch_rank_view(const ViewParams& params, int grid, void* stream) {
  return launch_kernel(rank_view_kernel, params, grid, rank_view_bytes(params.group.map.shape()), false, stream,
                       kViewThreads);
}

int launch_expert_view(const ViewParams& params, int grid, void* stream) {
  return launch_kernel(expert_view_kernel, params, grid, ExpertScratch::bytes(params.group.map.shape()), false, stream,
                       kViewThreads);
}

int load_views(const Shape& shape) {
  const auto* const rank_view = reinterpret_cast<const void*>(rank_view_kernel);
  if (const int error = allow_shared(rank_view, rank_view_bytes(shape))) return error;
  return allow_shared(reinterpret_cast<const void*>(expert_view_kernel), ExpertScratch::bytes(shape));
}

}  // namespace tw::nvlink
