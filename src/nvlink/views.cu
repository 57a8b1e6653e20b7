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
  if (!columns.wanted() && p.width[q] == 16) {  // with an alignment of 128 rows an expert has 64 such on average
    auto* const vectors = reinterpret_cast<uint4*>(p.payloads[q]);
    for (int64_t i = from * (bytes / 16) + threadIdx.x; i < to * (bytes / 16); i += blockDim.x) vectors[i] = {};
    return;
  }
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

// ---- expert_major and grouped
//
// A block has a part of the rows, in order. It counts the experts of all rows before its own, so that blocks need not
// wait for each other: at 8192 rows of 8 ids some 10 us of a last block, beside 150 us of copying. Then its warps copy
// rows, each by itself, so that many are under way.

struct ExpertScratch {
  int32_t* begin;    // [N + 1]
  int32_t* experts;  // [kBatch, K] local expert of each (row, k), -1 for none
  int32_t* nth;      // [kBatch, K] the how manieth row of its expert this is
  int32_t* next;     // [kExperts] rows of an expert so far
  int32_t* total;    // [kExperts]

  static uint32_t bytes(const Shape& shape) {
    return 4 * (static_cast<uint32_t>(shape.ranks) + 1 + 2 * kBatch * static_cast<uint32_t>(shape.top_k) +
                2 * counted(shape));
  }
  __device__ ExpertScratch(int32_t* at, const Shape& shape) {
    begin = at;
    experts = begin + shape.ranks + 1;
    nth = experts + kBatch * shape.top_k;
    next = nth + kBatch * shape.top_k;
    total = next + counted(shape);
  }
  static __host__ __device__ uint32_t counted(const Shape& shape) {
    return static_cast<uint32_t>(shape.experts < kExperts ? shape.experts : kExperts);
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

// The local experts of the rows [from, from + count), into the block's memory.
__device__ void find_experts(const ViewParams& p, const ExpertScratch& s, int from, int count) {
  const Shape& shape = p.group.map.shape();
  for (uint32_t i = threadIdx.x; i < static_cast<uint32_t>(count * shape.top_k); i += blockDim.x) {
    const uint32_t row = divide(i, p.ids);
    const int64_t place = place_of(p, slot_of(s.begin, shape.ranks, from + static_cast<int>(row)));
    s.experts[i] =
        local_expert(p, static_cast<int32_t>(load_fresh<uint32_t>(ids_of(p, place) + (i - row * p.ids.divisor))));
  }
}

// Rows of each expert in [low, low + kExperts): those before `row` to `next`, all to `total`. Ids are read two at a
// time, as a row's begin at a multiple of 8 bytes and weights follow them; and several such at once.
__device__ void count_experts(const ViewParams& p, const ExpertScratch& s, int low, int row) {
  constexpr uint32_t kAtOnce = 4;
  const Shape& shape = p.group.map.shape();
  const int experts = min(p.group.local_experts - low, kExperts);
  for (int i = threadIdx.x; i < experts; i += blockDim.x) s.next[i] = s.total[i] = 0;
  __syncthreads();
  const uint32_t items = static_cast<uint32_t>(s.begin[shape.ranks]) * p.pairs.divisor;
  for (uint32_t base = threadIdx.x; base < items; base += kAtOnce * blockDim.x) {
    uint64_t pair[kAtOnce];
    bool before[kAtOnce];
#pragma unroll
    for (uint32_t u = 0; u < kAtOnce; ++u) {
      const uint32_t i = base + u * blockDim.x;
      pair[u] = ~uint64_t{0};
      if (i >= items) continue;
      const auto at = static_cast<int>(divide(i, p.pairs));
      const uint32_t k = 2 * (i - static_cast<uint32_t>(at) * p.pairs.divisor);
      before[u] = at < row;
      pair[u] = load_fresh<unsigned long long>(ids_of(p, place_of(p, slot_of(s.begin, shape.ranks, at))) + k);
      if (static_cast<int>(k) + 1 == shape.top_k) pair[u] |= ~uint64_t{0} << 32;  // a weight
    }
#pragma unroll
    for (uint32_t u = 0; u < 2 * kAtOnce; ++u) {
      const int expert = local_expert(p, static_cast<int32_t>(pair[u / 2] >> 32 * (u % 2))) - low;
      if (expert >= 0 && expert < experts) atomicAdd((before[u / 2] ? s.next : s.total) + expert, 1);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < experts; i += blockDim.x) s.total[i] += s.next[i];
  __syncthreads();
}

// The how manieth of their experts the batch's `count` rows are. Row after row by one warp: order is the meaning of a
// place. Within a row no expert stands twice.
__device__ void number_rows(const ViewParams& p, const ExpertScratch& s, int low, int count) {
  const int top_k = p.group.map.shape().top_k;
  const int experts = min(p.group.local_experts - low, kExperts);
  for (int row = 0; row < count && threadIdx.x < 32; ++row) {
    for (int k = static_cast<int>(threadIdx.x); k < top_k; k += 32) {
      const int expert = s.experts[row * top_k + k] - low;
      const bool here = expert >= 0 && expert < experts;
      s.nth[row * top_k + k] = here ? s.next[expert]++ : -1;
    }
    __syncwarp();
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

// A lane's part of where a row goes: the place of its k-th choice, and which lanes have one.
struct Places {
  int64_t place;
  uint32_t lanes;

  // use(place) for each.
  template <class Use>
  __device__ void each(Use&& use) const {
#pragma unroll 1
    for (uint32_t left = lanes; left != 0; left &= left - 1)
      use(__shfl_sync(~0u, place, __ffs(static_cast<int>(left)) - 1));
  }
};

// Vectors [begin, end) of a row to its places. By a warp; the row is read once for each 32 choices.
template <class V>
__device__ void scatter_vectors(const ViewParams& p, int q, const std::byte* from, uint32_t begin, uint32_t end,
                                const Places& places) {
  constexpr uint32_t kAtOnce = 4;
  const auto bytes = static_cast<int64_t>(p.group.map.shape().payload_bytes[q]);
  for (uint32_t base = begin; base < end; base += 32 * kAtOnce) {
    const uint32_t first = base + static_cast<uint32_t>(lane());
    V value[kAtOnce] = {};
#pragma unroll
    for (uint32_t u = 0; u < kAtOnce; ++u) {
      if (first + 32 * u < end) value[u] = load_fresh<V>(reinterpret_cast<const V*>(from) + first + 32 * u);
    }
    places.each([&](int64_t place) {
      auto* const to = reinterpret_cast<V*>(p.payloads[q] + place * bytes);
#pragma unroll
      for (uint32_t u = 0; u < kAtOnce; ++u) {
        if (first + 32 * u < end) to[first + 32 * u] = value[u];
      }
    });
  }
}

// The same into columns. Copied by bytes: neither row nor tensor need be aligned to elements, and such rows are short.
__device__ void scatter_columns(const ViewParams& p, int q, const std::byte* from, const Places& places) {
  const uint32_t bytes = p.group.map.shape().payload_bytes[q];
  for (uint32_t base = 0; base < bytes; base += 32) {
    const uint32_t i = base + static_cast<uint32_t>(lane());
    const unsigned char value = i < bytes ? load_fresh<unsigned char>(from + i) : 0;
    places.each([&](int64_t place) {
      if (i < bytes) p.payloads[q][in_columns(p.columns[q], place, i)] = static_cast<std::byte>(value);
    });
  }
}

// The part `part` of `parts` of all payloads of a row (place_of).
__device__ void scatter_payloads(const ViewParams& p, int64_t row, int bank, uint32_t part, uint32_t parts,
                                 const Places& places) {
  for (int q = 0; q < p.group.map.shape().payloads; ++q) {
    if (p.payloads[q] == nullptr) continue;
    const std::byte* const from = row_of(p, q, bank, row);
    if (p.columns[q].wanted()) {
      if (part == 0) scatter_columns(p, q, from, places);
      continue;
    }
    const uint32_t vectors = p.vectors[q].divisor;
    const uint32_t share = (vectors + parts - 1) / parts;
    const uint32_t begin = min(part * share, vectors);
    const uint32_t end = min(begin + share, vectors);
    switch (p.width[q]) {
      case 16:
        scatter_vectors<uint4>(p, q, from, begin, end, places);
        break;
      case 8:
        scatter_vectors<unsigned long long>(p, q, from, begin, end, places);
        break;
      case 4:
        scatter_vectors<unsigned int>(p, q, from, begin, end, places);
        break;
      case 2:
        scatter_vectors<unsigned short>(p, q, from, begin, end, places);
        break;
      default:
        scatter_vectors<unsigned char>(p, q, from, begin, end, places);
        break;
    }
  }
}

// What goes with a row's k-th choice: where it is, for a combine, and what the caller sees.
__device__ void show_choice(const ViewParams& p, int64_t row, int k, int expert, int32_t place_here, int64_t place) {
  const int top_k = p.group.map.shape().top_k;
  const int32_t* const ids = ids_of(p, row);
  p.handle.places[row * top_k + k] = place_here;
  if (p.shown.ids != nullptr) show_id(p.shown, place, p.shown.local ? expert : ids[k]);
  if (p.shown.weights != nullptr) p.shown.weights[place] = reinterpret_cast<const float*>(ids + top_k)[k];
  if (p.origins != nullptr) p.origins[place] = row * top_k + k;
}

// Copies a batch's rows [from, from + count) to the experts whose rows are numbered, with their ids and weights. Of few
// rows several warps have one together.
__device__ void scatter(const ViewParams& p, const ExpertScratch& s, int from, int count, int bank) {
  const Shape& shape = p.group.map.shape();
  constexpr int kViewWarps = kViewThreads / 32;
  const int parts = max(1, kViewWarps / max(1, count));
  for (int u = static_cast<int>(threadIdx.x / 32); u < count * parts; u += kViewWarps) {
    const int i = u / parts;
    const int part = u - i * parts;
    const int64_t row = place_of(p, slot_of(s.begin, shape.ranks, from + i));
    for (int base = 0; base < shape.top_k; base += 32) {
      const int k = base + lane();
      const int at = i * shape.top_k + k;
      const int nth = k < shape.top_k ? s.nth[at] : -1;
      Places places{0, __ballot_sync(~0u, nth >= 0)};
      if (nth >= 0) {
        const int64_t begin = begin_of(p, s.experts[at]);
        places.place = begin + nth;
        // In the expert's block; where blocks have their own size, of all rows.
        if (part == 0)
          show_choice(p, row, k, s.experts[at], static_cast<int32_t>(shape.exact() ? begin : 0) + nth, places.place);
      }
      if (places.lanes != 0)
        scatter_payloads(p, row, bank, static_cast<uint32_t>(part), static_cast<uint32_t>(parts), places);
    }
  }
}

__global__ void __launch_bounds__(kViewThreads, 2) expert_view_kernel(const __grid_constant__ ViewParams p) {
  const ExpertScratch s(shared_at<int32_t>(0), p.group.map.shape());
  begin_rows(p, s.begin);
  const int bank = bank_of_lane(p);
  const int rows = s.begin[p.group.map.shape().ranks];
  const int blocks = static_cast<int>(gridDim.x);
  const int each = (rows + blocks - 1) / blocks;
  const int from = min(static_cast<int>(blockIdx.x) * each, rows);
  const int to = min(from + each, rows);
  for (int low = 0; low < p.group.local_experts; low += kExperts) {
    if (low == 0) find_experts(p, s, from, min(kBatch, to - from));  // on their way while others are counted
    count_experts(p, s, low, from);
    for (int begin = from; begin < to; begin += kBatch) {
      const int count = min(kBatch, to - begin);
      if (low > 0 || begin > from) find_experts(p, s, begin, count);
      __syncthreads();
      number_rows(p, s, low, count);
      __syncthreads();
      scatter(p, s, begin, count, bank);
      __syncthreads();
    }
    finish_experts(p, s, low);
    __syncthreads();
  }
  if (p.offsets != nullptr) finish_grouped(p);
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
