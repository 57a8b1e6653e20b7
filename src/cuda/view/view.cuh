// What copies out of the window have in common: which rows have come, and how a warp copies one to its places.
//
// Takes ViewParams and what the dispatch before left in the handle; gives copies in the caller's tensors. Nobody here
// waits for a peer.
//
// What breaks if this changes: the bits of what the caller sees, and S3: the copies read the bank of the last step that
// ended, and must be done, in stream order, before the channel's next step publishes. How a row is shared out is speed
// alone.
#pragma once

#include "cuda/device/metadata.cuh"
#include "cuda/launch/view.h"

namespace tw::cuda {

constexpr int kViewThreads = 512;
constexpr int kViewWarps = kViewThreads / 32;

// Does what comes before the dispatch has ended.
template <class Params>
__device__ inline void begin_view(const Params& p) {
  let_next_begin();
  warm(p);
}

// The rows that have come, numbered by source and slot, in shared memory.
struct Arrived {
  int32_t* begin;  // [N + 1] the number of each source's first row
  int32_t* at;     // [N] the row of the window, and of what the handle keeps, that it is

  static uint32_t words(const Shape& shape) { return 2 * static_cast<uint32_t>(shape.ranks) + 1; }
  __device__ Arrived(int32_t* words, const Shape& shape) : begin(words), at(words + shape.ranks + 1) {}
};

// Fills them in. All threads call it, but one warp works, as one thread would wait for the memory once for each rank of
// a large group.
__device__ inline void begin_rows(const ArrivedParams& p, const Arrived& rows) {
  const Shape& shape = p.group.map.shape();
  if (threadIdx.x < 32) {
    int before = 0;
#pragma unroll 1
    for (int base = 0; base < shape.ranks; base += 32) {
      const int source = base + lane();
      int count = 0;
      if (source < shape.ranks) {
        count = static_cast<int>(load_fresh<uint32_t>(p.handle.counts + source));
        rows.at[source] = shape.exact() ? static_cast<int>(load_fresh<unsigned long long>(p.handle.source + source))
                                        : source * p.bound;
      }
      const int through = sum_through(count);
      if (source < shape.ranks) rows.begin[source] = before + through - count;
      before += __shfl_sync(~0u, through, 31);
    }
    if (lane() == 0) rows.begin[shape.ranks] = before;
  }
  __syncthreads();
}

// Gives which row of the window, and of what the handle keeps, the row of this number is.
__device__ inline int64_t place_of(const Arrived& rows, int ranks, int row) {
  int low = 0;
  int high = ranks;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (rows.begin[middle] <= row ? low : high) = middle;
  }
  return rows.at[low] + (row - rows.begin[low]);
}

__device__ inline int bank_of_channel(const ViewParams& p) {
  // The dispatch was the last step of the channel that ended.
  return static_cast<int>(load_fresh<unsigned long long>(&p.group.channels[p.channel].step) & 1);
}

// Gives where row `row` of a payload has arrived.
__device__ inline const std::byte* row_of(const ViewParams& p, int q, int bank, int64_t row) {
  return p.from[bank][q] + row * static_cast<int64_t>(p.group.map.shape().payload_bytes[q]);
}

// Gives where a byte of a place's row lies in a payload that is wanted by column.
__device__ inline int64_t in_columns(const Columns& columns, int64_t place, uint32_t byte) {
  const auto size = static_cast<uint32_t>(columns.element_bytes);
  return (byte / size * columns.rows + place) * size + byte % size;
}

// Calls use(V{}) with the vector type of so many bytes.
template <class Use>
__device__ inline void with_vectors(int bytes, Use&& use) {
  switch (bytes) {
    case 16:
      return use(uint4{});
    case 8:
      return use(0ull);
    case 4:
      return use(0u);
    case 2:
      return use(static_cast<unsigned short>(0));
    default:
      return use(static_cast<unsigned char>(0));
  }
}

// A thread's part of where a row goes: the place of its k-th choice, and (in all threads alike) which threads have one;
// and the expert that it is for, where payloads are wanted by column.
struct Places {
  int64_t place;
  uint32_t threads;
  int32_t expert = 0;

  // Calls use(value) for each thread that has a place, with that thread's value.
  template <class T, class Use>
  __device__ void each(T value, Use&& use) const {
#pragma unroll 1
    for (uint32_t left = threads; left != 0; left &= left - 1)
      use(__shfl_sync(~0u, value, __ffs(static_cast<int>(left)) - 1));
  }
};

// Gives the place of an expert's row in a payload that is wanted by column.
__device__ inline int64_t place_in_columns(const ViewParams& p, int q, const Places& places) {
  const int64_t each = static_cast<int64_t>(p.group.map.shape().ranks) * p.bound;
  return places.place + p.columns[q].shift(places.expert, each);
}

// Copies vectors [begin, end) of a row to its places. By a warp; the row is read once for each 32 choices.
template <class V>
__device__ inline void scatter_vectors(const ViewParams& p, int q, const std::byte* from, uint32_t begin, uint32_t end,
                                       const Places& places) {
  constexpr uint32_t kAtOnce = 4;
  const auto bytes = static_cast<int64_t>(p.group.map.shape().payload_bytes[q]);
  const auto here = reinterpret_cast<unsigned long long>(p.payloads[q] + places.place * bytes);
#pragma unroll 1
  for (uint32_t base = begin; base < end; base += 32 * kAtOnce) {
    const uint32_t first = base + static_cast<uint32_t>(lane());
    V value[kAtOnce] = {};
#pragma unroll
    for (uint32_t u = 0; u < kAtOnce; ++u) {
      if (first + 32 * u < end) value[u] = load_fresh<V>(reinterpret_cast<const V*>(from) + first + 32 * u);
    }
    places.each(here, [&](unsigned long long place) {
      auto* const to = reinterpret_cast<V*>(place) + first;
#pragma unroll
      for (uint32_t u = 0; u < kAtOnce; ++u) {
        if (first + 32 * u < end) to[32 * u] = value[u];
      }
    });
  }
}

// Does so into columns. It copies bytes: neither row nor tensor need be aligned to elements, and such rows are short.
__device__ inline void scatter_columns(const ViewParams& p, int q, const std::byte* from, const Places& places) {
  const uint32_t bytes = p.group.map.shape().payload_bytes[q];
  const int64_t here = place_in_columns(p, q, places);
  for (uint32_t base = 0; base < bytes; base += 32) {
    const uint32_t i = base + static_cast<uint32_t>(lane());
    const unsigned char value = i < bytes ? load_fresh<unsigned char>(from + i) : 0;
    places.each(here, [&](int64_t place) {
      if (i < bytes) p.payloads[q][in_columns(p.columns[q], place, i)] = static_cast<std::byte>(value);
    });
  }
}

// Gives how many warps share one row: several where rows are few.
__device__ inline int parts_of(int rows, int warps) { return max(1, min(kViewWarps, warps / max(1, rows))); }

// Copies part `part` of `parts` of all payloads of a row (place_of).
__device__ inline void scatter_payloads(const ViewParams& p, int64_t row, int bank, uint32_t part, uint32_t parts,
                                        const Places& places) {
  for (int q = 0; q < p.group.map.shape().payloads; ++q) {
    if (p.payloads[q] == nullptr) continue;
    const std::byte* const from = row_of(p, q, bank, row);
    if (p.columns[q].wanted()) {
      if (part == 0) scatter_columns(p, q, from, places);
      continue;
    }
    const uint32_t vectors = p.vectors[q];
    const uint32_t share = (vectors + parts - 1) / parts;
    const uint32_t begin = min(part * share, vectors);
    const uint32_t end = min(begin + share, vectors);
    with_vectors(p.width[q], [&](auto vector) { scatter_vectors<decltype(vector)>(p, q, from, begin, end, places); });
  }
}

}  // namespace tw::cuda
