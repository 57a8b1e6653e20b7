// Reduce-scatter of uneven sizes: partials of all ranks, summed where they belong. The sums are those of
// exchange/summation.h, over ranks ascending.
//
// Takes CollectiveParams; gives this rank's sums, or NaN after an error. Floor: bytes over the link, one flight, and
// the sum of what comes last. Few rows go as packets, which are summed as they come; many go into the window, in chunks
// with a signal each, and are summed while later ones are on the wire.
//
// What breaks if this changes: the bits of results (terms are added over ranks ascending, S9), and S4 (await_row,
// packets' flags).
#include <cuda_runtime.h>

#include "cuda/collective/collective.cuh"
#include "cuda/launch/loading.h"

namespace tw::cuda {
namespace {

// ---- Any types, sizes and places

// Stores the elements of word w of a row's sum.
__device__ inline void store_any(const CollectiveRows& rows, int i, uint32_t w, const Quad& sum) {
  store_elements(rows.from, rows.to, rows.elements, rows.out + i * rows.out_stride, w, sum);
}

// Gives where a source's row i for this rank is, if it is no packet.
__device__ inline const std::byte* term_of(const Collect& s, const CollectiveRows& rows, int source, int i) {
  if (s.is_direct(source)) return s.row_in(rows, source, i);
  return s.bank(s.me()) + s.place(rows, source, i);
}

// Sums words [begin, end) of row i of a tensor, whatever its type and size.
__device__ __noinline__ static void sum_any(Collect s, int q, int i, uint32_t begin, uint32_t end) {
  const CollectiveRows& rows = s.p.rows[q];
  constexpr int kAtOnce = 4;
#pragma unroll 1
  for (uint32_t w = begin + static_cast<uint32_t>(lane()); w < end; w += 32) {
    Quad sum{};
#pragma unroll 1
    for (int base = 0; base < s.ranks(); base += kAtOnce) {
      uint64_t term[kAtOnce] = {};
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t) {
        if (base + t >= s.ranks()) continue;
        term[t] = load_bytes(term_of(s, rows, base + t, i) + 8 * uint64_t{w}, int64_t{rows.row_bytes} - 8 * int64_t{w});
      }
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t) {
        if (base + t < s.ranks()) add(&sum, widen_word(rows.from, term[t]), base + t == 0);
      }
    }
    store_any(rows, i, w, sum);
  }
}

// ---- Packets

// The terms that are on their way to a thread at once.
constexpr int kAtOnce = 2;

// Sums a tile of row i. False if packets did not come.
template <twDtype_t kWire, int kGroups>
__device__ inline bool sum_packet_tile(const Collect& s, int i, const Tile& tile) {
  constexpr bool kFast = kWire != twDtypeNone;
  const CollectiveParams& p = s.p;
  Quad sum[kGroups][2] = {};
  Parts<kAtOnce, kGroups> parts;
  parts.cover(p.tiles, tile);
  twDtype_t types[kGroups][2];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      types[g][half] = kFast ? kWire : p.rows[word_at(p, first_word(tile.begin + g) + half).tensor].from;
    }
  }
#pragma unroll 1
  for (int base = 0; base < s.ranks(); base += kAtOnce) {
#pragma unroll
    for (int t = 0; t < kAtOnce; ++t) {
      const int source = base + t;
      const bool own = s.is_direct(source);
      parts.at[t] = source < s.ranks() && !own ? s.windows()[s.me()] + packet_at(p.packets, s.step.bank(), source, i) +
                                                     packet_place(tile.begin)
                                               : nullptr;
      if (!own) continue;
      const std::byte* const row = s.row_in(p.rows[0], source, i);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) parts.value[g][t] = load_group<kFast>(s, row, source, i, tile, g);
    }
    parts.look();
    if (!await_packets(
            p.group, s.step, &parts, [&](int t) { return base + t; },
            [&](int source) { return source_failed(p.group, s.step, source); })) {
      return false;
    }
#pragma unroll
    for (int t = 0; t < kAtOnce; ++t) {
      if (base + t >= s.ranks()) continue;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        add(&sum[g][0], widen_word(types[g][0], parts.value[g][t].a), base + t == 0);
        add(&sum[g][1], widen_word(types[g][1], parts.value[g][t].b), base + t == 0);
      }
    }
  }
  std::byte* const out = p.rows[0].out + i * p.rows[0].out_stride;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t w = first_word(tile.begin + g) + half;
      if (tile.begin + g >= tile.end || w >= p.tiles.words || (half == 1 && is_flag())) continue;
      if (!kFast) {
        const WordAt at = word_at(p, w);
        store_any(p.rows[at.tensor], i, at.word, sum[g][half]);
      } else if (kWire == twFloat32) {
        reinterpret_cast<float2*>(out)[w] = make_float2(sum[g][half].v[0], sum[g][half].v[1]);
      } else {
        reinterpret_cast<uint64_t*>(out)[w] = narrow_word(kWire, sum[g][half]);
      }
    }
  }
  return true;
}

template <twDtype_t kWire, int kGroups>
__device__ inline void sum_packets(const Collect& s) {
  const CollectiveParams& p = s.p;
  const Shares shares = received_shares(p.roles);
  const uint32_t all = static_cast<uint32_t>(s.sizes()[s.me()]) * p.tiles.per_row.divisor;
#pragma unroll 1
  for (uint32_t u = shares.first; u < all; u += shares.step) {
    const uint32_t i = divide(u, p.tiles.per_row);
    const Tile tile = tile_of(p.tiles, u - i * p.tiles.per_row.divisor);
    if (!__all_sync(~0u, sum_packet_tile<kWire, kGroups>(s, static_cast<int>(i), tile))) *s.failed() = 1;
  }
}

// ---- Chunks

// Sums a part of a row in whole vectors.
template <twDtype_t kWire>
__device__ inline void sum_vectors(const Collect& s, const CollectiveRows& rows, int i, uint32_t part) {
  constexpr int kVectors = 2;
  const uint32_t end = min(rows.row_bytes / 16, (part + 1) * kPushedVectors);
  auto* const out = reinterpret_cast<uint4*>(rows.out + i * rows.out_stride);
#pragma unroll 1
  for (uint32_t v = part * kPushedVectors + static_cast<uint32_t>(lane()); v < end; v += 32 * kVectors) {
    Quad low[kVectors] = {};
    Quad high[kVectors] = {};
#pragma unroll 1
    for (int base = 0; base < s.ranks(); base += kAtOnce) {
      uint4 term[kVectors][kAtOnce];
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t) {
        if (base + t >= s.ranks()) continue;
        const auto* const row = reinterpret_cast<const uint4*>(term_of(s, rows, base + t, i));
#pragma unroll
        for (int u = 0; u < kVectors; ++u) {
          if (v + 32 * u < end) term[u][t] = load_fresh<uint4>(row + v + 32 * u);
        }
      }
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
#pragma unroll
        for (int t = 0; t < kAtOnce; ++t) {
          if (base + t >= s.ranks()) continue;
          add(&low[u], widen_word(kWire, low_half(term[u][t])), base + t == 0);
          add(&high[u], widen_word(kWire, high_half(term[u][t])), base + t == 0);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      if (v + 32 * u < end) out[v + 32 * u] = narrow_vector<kWire>(low[u], high[u]);
    }
  }
}

// Waits until all ranks' row i is here. By a warp.
__device__ inline bool await_row(const Collect& s, int i) {
  bool here = true;
#pragma unroll 1
  for (int source = lane(); source < s.ranks(); source += 32) {
    if (s.is_direct(source)) continue;
    here &= await_chunk(s.p.group, s.step, source, i / s.chunk_rows());
  }
  return __all_sync(~0u, here);  // S4: what the threads that have looked have acquired, all have
}

template <twDtype_t kWire>
__device__ inline void sum_chunks(const Collect& s) {
  const CollectiveParams& p = s.p;
  const Shares shares = received_shares(p.roles);
  const auto parts = static_cast<uint32_t>(p.pushed_parts);
  const uint32_t all = static_cast<uint32_t>(s.sizes()[s.me()]) * parts;
#pragma unroll 1
  for (uint32_t u = shares.first; u < all; u += shares.step) {
    const auto i = static_cast<int>(u / parts);
    const Part part = part_of(p, u - static_cast<uint32_t>(i) * parts);
    if (!await_row(s, i)) {
      *s.failed() = 1;
      continue;
    }
    if constexpr (kWire == twDtypeNone) {
      const uint32_t words = (p.rows[part.tensor].row_bytes + 7) / 8;
      sum_any(s, part.tensor, i, part.number * kPartBytes / 8, min(words, (part.number + 1) * kPartBytes / 8));
    } else {
      sum_vectors<kWire>(s, p.rows[0], i, part.number);
    }
  }
}

// Writes NaN for all of this rank's rows, by a block.
__device__ __noinline__ static void fill_nan(Collect s) {
#pragma unroll 1
  for (int q = 0; q < s.p.tensors; ++q) {
    const CollectiveRows& rows = s.p.rows[q];
    const uint32_t nan = rows.to == twFloat32 ? 0x7fc00000u : rows.to == twBfloat16 ? 0x7fc0u : 0x7e00u;
    const int32_t count = s.sizes()[s.me()];
#pragma unroll 1
    for (int32_t i = 0; i < count; ++i) {
      std::byte* const out = rows.out + i * rows.out_stride;
#pragma unroll 1
      for (uint32_t at = threadIdx.x; at < rows.elements; at += kThreads) {
        if (rows.to == twFloat32) {
          reinterpret_cast<uint32_t*>(out)[at] = nan;
        } else {
          reinterpret_cast<uint16_t*>(out)[at] = static_cast<uint16_t>(nan);
        }
      }
    }
  }
}

template <bool kPackets, twDtype_t kWire, int kGroups>
__global__ void __launch_bounds__(kThreads, 1) reduce_kernel(const __grid_constant__ CollectiveParams p) {
  collect<kPackets, kWire != twDtypeNone, kGroups>(
      p, twPhaseReduce, [](const auto&...) {},
      [](const Collect& s) {
        if constexpr (kPackets) {
          sum_packets<kWire, kGroups>(s);
        } else {
          sum_chunks<kWire>(s);
        }
      },
      [](const Collect& s) { fill_nan(s); });
}

// Calls use(kernel). twDtypeNone stands for types that differ, or places that do not allow whole words or vectors; its
// packets have tiles of one size.
template <twDtype_t kWire, class Use>
int with_packets(bool packets, uint32_t groups, Use&& use) {
  if (!packets) return use(reduce_kernel<false, kWire, 1>);
  if constexpr (kWire != twDtypeNone) {
    if (groups == 1) return use(reduce_kernel<true, kWire, 1>);
  }
  return use(reduce_kernel<true, kWire, kTileGroups>);
}
template <class Use>
int with_kernel(bool packets, twDtype_t wire, uint32_t groups, Use&& use) {
  if (wire == twBfloat16) return with_packets<twBfloat16>(packets, groups, use);
  if (wire == twFloat16) return with_packets<twFloat16>(packets, groups, use);
  if (wire == twFloat32) return with_packets<twFloat32>(packets, groups, use);
  return with_packets<twDtypeNone>(packets, groups, use);
}

}  // namespace

int launch_reduce(const CollectiveParams& params, int grid, bool early, void* stream) {
  const twDtype_t wire = params.usual != 0 ? params.rows[0].from : twDtypeNone;
  return with_kernel(params.by_packets != 0, wire, params.tiles.tile_groups,
                     [&](auto* kernel) { return launch_kernel(kernel, params, grid, params.at.bytes, early, stream); });
}

int load_reduce(const Shape& shape) {
  for (const twDtype_t wire : {twDtypeNone, twBfloat16, twFloat16, twFloat32}) {
    for (const bool packets : {false, true}) {
      for (const uint32_t groups : {1, kTileGroups}) {
        const int error = with_kernel(packets, wire, groups, [&](auto* kernel) {
          return allow_shared(reinterpret_cast<const void*>(kernel), CollectiveScratch::make(shape).bytes);
        });
        if (error != 0) return error;
      }
    }
  }
  return 0;
}

}  // namespace tw::cuda
