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

// First row, in (source, slot) order, of each source. All threads; [N + 1] in shared memory. By a warp, as one thread
// would wait for the memory once for each rank of a large group.
__device__ void begin_rows(const ViewParams& p, int32_t* begin) {
  const int ranks = p.group.map.shape().ranks;
  if (threadIdx.x < 32) {
    const auto lane = static_cast<int>(threadIdx.x);
    int before = 0;
#pragma unroll 1
    for (int base = 0; base < ranks; base += 32) {
      const int rows = base + lane < ranks ? p.handle.counts[base + lane] : 0;
      int through = rows;
      for (int by = 1; by < 32; by *= 2) {
        const int other = __shfl_sync(~0u, through, max(lane - by, 0));
        if (lane >= by) through += other;
      }
      if (base + lane < ranks) begin[base + lane] = before + through - rows;
      before += __shfl_sync(~0u, through, 31);
    }
    if (lane == 0) begin[ranks] = before;
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

// Which row of the window, and of what the handle keeps, it is.
__device__ int64_t place_of(const ViewParams& p, const Slot& slot) {
  const int64_t begin =
      p.group.map.shape().exact() ? p.handle.source[slot.source] : static_cast<int64_t>(slot.source) * p.bound;
  return begin + slot.p;
}

__device__ int bank_of_lane(const ViewParams& p) {
  // The dispatch was the last step of the lane that ended.
  return static_cast<int>(p.group.lanes[p.lane].step & 1);
}

// Row `row` of a payload, where it has come to.
__device__ const std::byte* row_of(const ViewParams& p, int q, int bank, int64_t row) {
  const WindowMap& map = p.group.map;
  if (p.landing[q] != nullptr) return p.landing[q] + row * static_cast<int64_t>(map.shape().payload_bytes[q]);
  return p.group.windows[p.group.me] + map.payload_row(p.lane, bank, q, static_cast<uint64_t>(row));
}

template <class V>
__device__ void copy_payload(const ViewParams& p, int q, const int32_t* begin, int bank) {
  const Shape& shape = p.group.map.shape();
  const uint32_t vectors = p.vectors[q].divisor;
  for (int row = static_cast<int>(blockIdx.x); row < begin[shape.ranks]; row += static_cast<int>(gridDim.x)) {
    const Slot slot = slot_of(begin, shape.ranks, row);
    const int64_t at = place_of(p, slot);
    const auto* const from = reinterpret_cast<const V*>(row_of(p, q, bank, at));
    auto* const to = reinterpret_cast<V*>(p.payloads[q] + at * static_cast<int64_t>(shape.payload_bytes[q]));
    for (uint32_t i = threadIdx.x; i < vectors; i += blockDim.x) to[i] = load_fresh<V>(from + i);
  }
}

// Where a byte of a place's row lies in a payload that is wanted by column.
__device__ int64_t in_columns(const Columns& columns, int64_t place, uint32_t byte) {
  const auto size = static_cast<uint32_t>(columns.element_bytes);
  return (byte / size * columns.rows + place) * size + byte % size;
}

// Zeros for rows [from, to) of a payload. By a block.
__device__ void clear_rows(const ViewParams& p, int q, int64_t from, int64_t to) {
  const auto bytes = static_cast<int64_t>(p.group.map.shape().payload_bytes[q]);
  const Columns& columns = p.columns[q];
  for (int64_t i = from * bytes + threadIdx.x; i < to * bytes; i += blockDim.x) {
    p.payloads[q][columns.wanted() ? in_columns(columns, i / bytes, static_cast<uint32_t>(i % bytes)) : i] =
        std::byte{0};
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
  int64_t* places;   // [K] where a row goes, -1 for nowhere
  int32_t* begin;    // [N + 1]
  int32_t* experts;  // [kBatch, K] local expert of each (row, k), -1 for none
  int32_t* next;     // [kExperts] rows of an expert so far
  int32_t* total;    // [kExperts]

  static uint32_t bytes(const Shape& shape) {
    return 8 * static_cast<uint32_t>(shape.top_k) +
           4 * (static_cast<uint32_t>(shape.ranks) + 1 + kBatch * static_cast<uint32_t>(shape.top_k) + 2 * kExperts);
  }
  __device__ ExpertScratch(int32_t* at, const Shape& shape) {
    places = reinterpret_cast<int64_t*>(at);
    begin = at + 2 * shape.top_k;
    experts = begin + shape.ranks + 1;
    next = experts + kBatch * shape.top_k;
    total = next + kExperts;
  }
};

// `row`: place_of.
__device__ const int32_t* ids_of(const ViewParams& p, int64_t row) {
  return reinterpret_cast<const int32_t*>(p.handle.meta + row * (1 + p.group.map.shape().top_k) + 1);
}
// Where the rows of a local expert begin, and how many places there are for them.
__device__ int64_t begin_of(const ViewParams& p, int expert) {
  if (p.group.map.shape().exact()) return p.handle.expert_begin[expert];
  return static_cast<int64_t>(expert) * p.group.map.shape().ranks * p.bound;
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
    const int64_t place = place_of(p, slot_of(s.begin, shape.ranks, at));
    const int expert = local_expert(p, ids_of(p, place)[i % shape.top_k]) - low;
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
      const int row = begin + i / top_k;
      s.experts[i] = local_expert(p, ids_of(p, place_of(p, slot_of(s.begin, shape.ranks, row)))[i % top_k]);
    }
    __syncthreads();
    // Row after row by one warp: order is the meaning of a place. Within a row no expert stands twice.
    if (threadIdx.x < 32) {
      for (int row = 0; row < count; ++row) {
        const int64_t at = place_of(p, slot_of(s.begin, shape.ranks, begin + row)) * top_k;
        for (int k = threadIdx.x; k < top_k; k += 32) {
          const int expert = s.experts[row * top_k + k];
          if (expert < low || expert >= low + kExperts) continue;
          // In the expert's block; where blocks have their own size, of all rows.
          const auto before = static_cast<int32_t>(shape.exact() ? begin_of(p, expert) : 0);
          p.handle.places[at + k] = before + s.next[expert - low]++;
        }
        __syncwarp();
      }
    }
    __syncthreads();
  }
}

// Places that hold nothing. By a block.
__device__ void show_empty(const ViewParams& p, int64_t from, int64_t to) {
  for (int64_t place = from + threadIdx.x; place < to; place += blockDim.x) {
    if (p.shown.ids != nullptr) show_id(p.shown, place, p.shown.invalid);
    if (p.shown.weights != nullptr) p.shown.weights[place] = 0.0f;
    if (p.origins != nullptr) p.origins[place] = -1;
  }
}

// What stands where no row does, and the counts.
__device__ void finish_experts(const ViewParams& p, const ExpertScratch& s, int low) {
  const GroupView& g = p.group;
  for (int i = static_cast<int>(blockIdx.x); i < kExperts && low + i < g.local_experts;
       i += static_cast<int>(gridDim.x)) {
    const int expert = low + i;
    if (threadIdx.x == 0) p.handle.expert_counts[expert] = p.shown.counts[expert] = s.total[i];
    const int64_t from = begin_of(p, expert) + s.total[i];
    show_empty(p, from, begin_of(p, expert + 1));
    for (int q = 0; q < g.map.shape().payloads && g.map.shape().exact(); ++q) {  // there, padding is 0
      if (p.payloads[q] != nullptr) clear_rows(p, q, from, begin_of(p, expert + 1));
    }
  }
}

// Of a grouped layout, what lies beyond all experts, where it has a fixed capacity; and where each begins. Rows stay as
// they are there: what a dispatch costs must not follow from what could have come.
__device__ void finish_grouped(const ViewParams& p) {
  const GroupView& g = p.group;
  const int64_t end = begin_of(p, g.local_experts);
  const int64_t share = (p.rows - end + gridDim.x - 1) / static_cast<int64_t>(gridDim.x);
  const int64_t from = end + static_cast<int64_t>(blockIdx.x) * share;
  show_empty(p, from, min(static_cast<int64_t>(p.rows), from + share));
  for (int q = 0; q < g.map.shape().payloads && blockIdx.x == 0; ++q) {  // what columns are longer than there are rows
    if (p.payloads[q] == nullptr || !p.columns[q].wanted()) continue;
    clear_rows(p, q, p.rows, p.columns[q].rows);
  }
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i <= g.local_experts;
       i += static_cast<int>(gridDim.x * blockDim.x)) {
    p.offsets[i] = static_cast<int32_t>(begin_of(p, i));
  }
}

template <class V>
__device__ void scatter_row(const ViewParams& p, int q, int64_t row, const int64_t* places, int bank) {
  const Shape& shape = p.group.map.shape();
  const auto* const from = reinterpret_cast<const V*>(row_of(p, q, bank, row));
  for (uint32_t i = threadIdx.x; i < p.vectors[q].divisor; i += blockDim.x) {
    const V value = load_fresh<V>(from + i);
    for (int k = 0; k < shape.top_k; ++k) {
      if (places[k] < 0) continue;
      reinterpret_cast<V*>(p.payloads[q] + places[k] * static_cast<int64_t>(shape.payload_bytes[q]))[i] = value;
    }
  }
}

// The same into columns. Copied by bytes: neither row nor tensor need be aligned to elements, and such rows are short.
__device__ void scatter_columns(const ViewParams& p, int q, int64_t row, const int64_t* places, int bank) {
  const Shape& shape = p.group.map.shape();
  const std::byte* const from = row_of(p, q, bank, row);
  for (uint32_t i = threadIdx.x; i < shape.payload_bytes[q]; i += blockDim.x) {
    const auto value = static_cast<std::byte>(load_fresh<unsigned char>(from + i));
    for (int k = 0; k < shape.top_k; ++k) {
      if (places[k] >= 0) p.payloads[q][in_columns(p.columns[q], places[k], i)] = value;
    }
  }
}

// Copies the rows [from, to) to their experts, with their ids and weights. The row is read once.
__device__ void scatter(const ViewParams& p, const ExpertScratch& s, int from, int to, int bank) {
  const Shape& shape = p.group.map.shape();
  const int top_k = shape.top_k;
  int64_t* const places = s.places;
  for (int i = from; i < to; ++i) {
    const int64_t row = place_of(p, slot_of(s.begin, shape.ranks, i));
    const int32_t* const ids = ids_of(p, row);
    __syncthreads();
    for (int k = threadIdx.x; k < top_k; k += blockDim.x) {
      const int expert = local_expert(p, ids[k]);
      places[k] = -1;
      if (expert < 0) continue;
      const int64_t place = (shape.exact() ? 0 : begin_of(p, expert)) + p.handle.places[row * top_k + k];
      places[k] = place;
      if (p.shown.ids != nullptr) show_id(p.shown, place, p.shown.local ? expert : ids[k]);
      if (p.shown.weights != nullptr) p.shown.weights[place] = reinterpret_cast<const float*>(ids + top_k)[k];
      if (p.origins != nullptr) p.origins[place] = row * top_k + k;
    }
    __syncthreads();
    for (int q = 0; q < shape.payloads; ++q) {
      if (p.payloads[q] == nullptr) continue;
      if (p.columns[q].wanted()) {
        scatter_columns(p, q, row, places, bank);
        continue;
      }
      switch (p.width[q]) {
        case 16:
          scatter_row<uint4>(p, q, row, places, bank);
          break;
        case 8:
          scatter_row<unsigned long long>(p, q, row, places, bank);
          break;
        case 4:
          scatter_row<unsigned int>(p, q, row, places, bank);
          break;
        case 2:
          scatter_row<unsigned short>(p, q, row, places, bank);
          break;
        default:
          scatter_row<unsigned char>(p, q, row, places, bank);
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
  if (p.offsets != nullptr) finish_grouped(p);
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
