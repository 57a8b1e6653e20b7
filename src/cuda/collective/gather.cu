// All-gather of uneven sizes: rows of all ranks to their places in the caller's tensors, or in the window.
//
// Takes CollectiveParams; gives the rows, and counts and offsets where the caller wants them. Floor: bytes over the
// link, and one flight. Few rows go as packets, which are put where they belong as they come; many go into the window,
// in chunks with a signal each, and are copied out of it while later ones are on the wire.
//
// What breaks if this changes: S4 (await_chunk, packets' flags), S6 (learn_sizes), and the places of rows in the
// output. A block may leave early only in ways that all its threads take.
#include <cuda_runtime.h>

#include "cuda/collective/collective.cuh"
#include "cuda/launch/loading.h"

namespace tw::cuda {
namespace {

// Gives where a tensor's rows are put; nullptr: nowhere.
__device__ inline std::byte* target(const Collect& s, const CollectiveRows& rows) {
  if (rows.out != nullptr) return rows.out;
  return s.p.flat ? nullptr : s.bank(s.me()) + rows.begin;
}

__device__ __noinline__ static void store_any_word(Collect s, int64_t row, uint32_t w, uint64_t value) {
  const WordAt at = word_at(s.p, w);
  const CollectiveRows& rows = s.p.rows[at.tensor];
  std::byte* const to = target(s, rows);
  if (to == nullptr) return;
  store_bytes(to + row * rows.row_bytes + 8 * uint64_t{at.word}, value, int64_t{rows.row_bytes} - 8 * int64_t{at.word});
}

// Stores a tile of a row, out of packets or of the caller's own row.
template <bool kFast, int kGroups>
__device__ inline void store_tile(const Collect& s, int64_t row, const Tile& tile, const Vec16 (&pair)[kGroups]) {
  const uint32_t end = s.p.tiles.words;
  std::byte* const to = target(s, s.p.rows[0]);
  auto* const words = reinterpret_cast<uint64_t*>(to + row * s.p.rows[0].row_bytes);
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const uint32_t w = first_word(tile.begin + g);
    if (tile.begin + g >= tile.end) continue;
    if (kFast && to != nullptr) {
      if (w < end) words[w] = pair[g].a;
      if (w + 1 < end && !is_flag()) words[w + 1] = pair[g].b;
    } else if (!kFast) {
      if (w < end) store_any_word(s, row, w, pair[g].a);
      if (w + 1 < end && !is_flag()) store_any_word(s, row, w + 1, pair[g].b);
    }
  }
}

// Waits for all signals where a gather learns the sizes, and finds out where rows go. By a block. False if they did not
// come.
__device__ inline bool learn_sizes(const Collect& s) {
  bool good = true;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < s.ranks(); i += kThreads) {
    const Source source = await_source(s.p.group, s.step, i, Look::kTakesPart, false);
    if (source.error == twTimeout) report_failure(s.p.group, s.step, twTimeout, i, source.signal);
    s.sizes()[i] = source.n;
    good &= source.error == twSuccess || s.p.group.no_wait;
  }
  if (__syncthreads_and(good) == 0) {
    *s.failed() = 1;
    return false;
  }
  if (!knows_first(s)) find_first(s, s.sizes());
  meet();
  return true;
}

template <bool kFast, int kGroups>
__device__ inline void take_packets(const Collect& s) {
  const CollectiveParams& p = s.p;
  const Shares shares = received_shares(p.roles);
  const int sources = s.ranks() - (p.own_sent ? 1 : 0);
  const uint32_t all = static_cast<uint32_t>(p.bound * sources) * p.tiles.per_row.divisor;
#pragma unroll 1
  for (uint32_t u = shares.first; u < all; u += shares.step) {
    const Share in = share_of(p.tiles, static_cast<uint32_t>(sources), u);
    const int source = (s.me() + 1 + in.turn) % s.ranks();  // this rank's own rows come last
    if (in.index >= s.sizes()[source]) continue;
    const int64_t row = int64_t{s.first()[source]} + in.index;
    if (s.is_direct(source)) {
      Vec16 own[kGroups];
      load_tile<kFast>(s, s.row_in(p.rows[0], source, in.index), source, in.index, in.tile, own);
      store_tile<kFast>(s, row, in.tile, own);
      continue;
    }
    Parts<1, kGroups> parts;
    parts.cover(p.tiles, in.tile);
    parts.at[0] =
        s.windows()[s.me()] + packet_at(p.packets, s.step.bank(), source, in.index) + packet_place(in.tile.begin);
    parts.look();
    const bool here = await_packets(
        p.group, s.step, &parts, [&](int) { return source; },
        [&](int rank) { return source_failed(p.group, s.step, rank); });
    if (!__all_sync(~0u, here)) {
      *s.failed() = 1;
      continue;
    }
    Vec16 pair[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) pair[g] = parts.value[g][0];
    store_tile<kFast>(s, row, in.tile, pair);
  }
}

// Copies this warp's tiles of the rows that come in chunks out of the window.
__device__ inline void take_chunks(const Collect& s) {
  const CollectiveParams& p = s.p;
  const Shares shares = received_shares(p.roles);
  const auto parts = static_cast<uint32_t>(p.pushed_parts);
  const uint32_t all = static_cast<uint32_t>(p.bound * s.ranks()) * parts;
#pragma unroll 1
  for (uint32_t u = shares.first; u < all; u += shares.step) {
    const uint32_t place = u / parts;
    const int i = static_cast<int>(place) / s.ranks();
    const int source = (s.me() + 1 + static_cast<int>(place) - i * s.ranks()) % s.ranks();
    if (i >= s.sizes()[source]) continue;
    const Part part = part_of(p, u - place * parts);
    const CollectiveRows& rows = p.rows[part.tensor];
    if (rows.out == nullptr) continue;  // the signals say that it is in the window
    const std::byte* from = s.row_in(rows, source, i);
    if (!s.is_direct(source)) {
      const bool here = lane() != 0 || await_chunk(p.group, s.step, source, i / s.chunk_rows());
      if (!__all_sync(~0u, here)) {  // S4: what the thread that has looked has acquired, all have
        *s.failed() = 1;
        continue;
      }
      from = s.bank(s.me()) + s.place(rows, source, i);
    }
    std::byte* const to = rows.out + (int64_t{s.first()[source]} + i) * rows.row_bytes;
    if (to != from) copy_part(rows, to, from, part.number);  // otherwise it is in place already
  }
}

// Clears counts and offsets: after an error nothing has come. By a block.
__device__ __noinline__ static void clear(Collect s) {
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i <= s.ranks(); i += kThreads) {
    if (s.p.counts != nullptr && i < s.ranks()) s.p.counts[i] = 0;
    if (s.p.offsets != nullptr) s.p.offsets[i] = 0;
  }
}

template <bool kPackets, bool kFast, int kGroups>
__global__ void __launch_bounds__(kThreads, 1) gather_kernel(const __grid_constant__ CollectiveParams p) {
  collect<kPackets, kFast, kGroups>(
      p, twPhaseGather,
      [](const Collect& s, const OutgoingTile& out, const Vec16(&pair)[kGroups]) {
        // Puts this rank's own rows in place too, once: nobody waits for them.
        if (!s.p.own_sent || out.share.turn != 0) return;
        store_tile<kFast>(s, int64_t{s.first()[s.me()]} + out.share.index, out.share.tile, pair);
      },
      [](const Collect& s) {
        if (!s.p.all_sizes && !learn_sizes(s)) return;
        if constexpr (kPackets) {
          take_packets<kFast, kGroups>(s);
        } else {
          take_chunks(s);
        }
      },
      [](const Collect& s) { clear(s); });
}

template <class Use>
int with_kernel(bool packets, bool fast, uint32_t groups, Use&& use) {
  if (!packets) return use(gather_kernel<false, true, 1>);
  if (!fast) return use(gather_kernel<true, false, kTileGroups>);
  return use(groups == 1 ? gather_kernel<true, true, 1> : gather_kernel<true, true, kTileGroups>);
}

}  // namespace

int launch_gather(const CollectiveParams& params, int grid, bool early, void* stream) {
  return with_kernel(params.by_packets != 0, params.usual != 0, params.tiles.tile_groups,
                     [&](auto* kernel) { return launch_kernel(kernel, params, grid, params.at.bytes, early, stream); });
}

int load_gather(const Shape& shape) {
  for (const bool packets : {false, true}) {
    for (const bool fast : {false, true}) {
      for (const uint32_t groups : {1, kTileGroups}) {
        const int error = with_kernel(packets, fast, groups, [&](auto* kernel) {
          return allow_shared(reinterpret_cast<const void*>(kernel), CollectiveScratch::make(shape).bytes);
        });
        if (error != 0) return error;
      }
    }
  }
  return 0;
}

}  // namespace tw::cuda
