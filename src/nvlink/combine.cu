// Combine: half of each block's warps send rows back to their owners, the other half sum what arrives.
//
// Floor: bytes over the link, then one flight with the last of them and its flag, and the sum of that. The last rows
// for an owner, or all if they are few, go as lines, which are summed as they come. Those before them go into the
// owner's inbox, in chunks of a few rows with a word each, so that they are summed while later ones are on the wire:
// pushing all, waiting, then summing would take 1.3 times as long. What the fence and the word of a chunk take passes
// while the lines are on their way.
//
// Warps work alone, on a unit of a row at a time, and wait for each other only where rows lie in the window.
#include <cuda_runtime.h>

#include "nvlink/combine.cuh"
#include "nvlink/launch.h"

namespace tw::nvlink {
namespace {

// ---- Sending

// What a warp has loaded of a unit of a row.
struct Ahead {
  Vec16 pair[kUnitGroups];
};
__device__ __forceinline__ void load_ahead(const Sum& s, const std::byte* row, const Unit& unit, Ahead* ahead) {
#pragma unroll
  for (int g = 0; g < kUnitGroups; ++g) {
    const uint32_t w = first_word(unit.begin + g);
    ahead->pair[g] = {};
    if (unit.begin + g >= unit.end) continue;
    ahead->pair[g] = s.simple() ? load_two(row, w, s.p.units.words) : load_any_pair(s, row, true, w);
  }
}

// A unit of a row as lines to its owner.
__device__ __forceinline__ void send_lines(const Sum& s, int owner, int index, const Unit& unit, const Ahead& ahead) {
  const CombineParams& p = s.p;
  Parts<1> parts;
  parts.cover(p.units, unit);
  std::byte* const line =
      s.windows()[owner] + p.group.map.line(s.step.lane, s.step.bank(), p.group.me, index) + line_place(unit.begin);
#pragma unroll
  for (int g = 0; g < kUnitGroups; ++g) {
    if (g >= parts.groups) continue;
    store_pair(line + g * kGroupBytes, ahead.pair[g].a, is_flag() ? s.step.number : ahead.pair[g].b);
  }
}

// What a warp sends first, if rows are simple and all go as lines: loaded though nobody knows yet whether there is such
// a row. The place exists all the same, as the caller's tensor has all slots up to the bound.
struct First {
  bool loaded;
  int owner;
  Share share;
};
__device__ First first_of(const Sum& s) {
  const CombineParams& p = s.p;
  if (!p.send || !s.simple() || s.ranks() == 1 || p.bound > p.group.line_tokens) return {};
  const Share share =
      share_of(p.units, min(32u, static_cast<uint32_t>(s.ranks() - 1)), blockIdx.x + threadIdx.x / 32 * gridDim.x);
  const int owner = p.group.me + 1 + share.turn;
  return {share.index < p.bound, owner < s.ranks() ? owner : owner - s.ranks(), share};
}

// The last rows of all other owners, a warp's share of them. The first unit is in `ahead` if it is loaded.
__device__ void push_lines(const Sum& s, const First& early, Ahead ahead) {
  const CombineParams& p = s.p;
  const uint32_t warps = gridDim.x * kSendWarps;
  uint32_t warp = blockIdx.x + threadIdx.x / 32 * gridDim.x;
  if (early.loaded) {
    if (early.share.index < s.counts()[early.owner]) {
      send_lines(s, early.owner, early.share.index, early.share.unit, ahead);
    }
    warp += warps;
  }
  const uint32_t per_slot = p.units.per_row.divisor * static_cast<uint32_t>(s.ranks() - 1);
  if (s.ranks() <= 33 && warp >= static_cast<uint32_t>(min(p.bound, p.group.line_tokens)) * per_slot) return;
#pragma unroll 1
  for (int begin = 0; begin < s.ranks() - 1; begin += 32) {
    const int count = min(32, s.ranks() - 1 - begin);
    const int mine = (p.group.me + 1 + begin + lane()) % s.ranks();
    const int rows = lane() < count ? s.counts()[mine] : 0;
    const int first = s.first_line(mine, rows);
    const int most = __reduce_max_sync(~0u, lane() < count ? rows - first : 0);
    const uint32_t end = static_cast<uint32_t>(most) * p.units.per_row.divisor * static_cast<uint32_t>(count);
#pragma unroll 1
    for (uint32_t u = warp; u < end; u += warps) {
      const Share share = share_of(p.units, static_cast<uint32_t>(count), u);
      const int slot = __shfl_sync(~0u, first, share.turn) + share.index;
      if (slot < __shfl_sync(~0u, rows, share.turn)) {
        const int owner = (p.group.me + 1 + begin + share.turn) % s.ranks();
        if (!s.simple()) {
          __syncwarp();  // the set is about to be overwritten
          collect_terms(p, s.set(), owner, slot);
        }
        load_ahead(s, row_of(p, owner, slot), share.unit, &ahead);
        send_lines(s, owner, share.index, share.unit, ahead);
      }
    }
    warp = blockIdx.x + threadIdx.x / 32 * gridDim.x;  // of the next owners all units are to do
  }
}

// A unit of a plain row, 16 bytes a lane and several at once.
__device__ void copy_unit(const Sum& s, const std::byte* row, std::byte* to, uint32_t unit) {
  constexpr int kAtOnce = 4;
  const uint32_t end = min(s.p.vectors, (unit + 1) * s.p.per_unit);
#pragma unroll 1
  for (uint32_t base = unit * s.p.per_unit + lane(); base < end; base += 32 * kAtOnce) {
    uint4 value[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (base + 32 * u < end) value[u] = load_fresh<uint4>(row + 16 * static_cast<uint64_t>(base + 32 * u));
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (base + 32 * u < end) reinterpret_cast<uint4*>(to)[base + 32 * u] = value[u];
    }
  }
}

// Of weighted rows, several rows to a partial, other types, odd sizes.
__device__ __noinline__ void sum_into(const Sum& s, int owner, int slot, std::byte* to, const Unit& unit) {
  const CombineParams& p = s.p;
  const auto bytes = static_cast<int64_t>(p.group.map.shape().combine_bytes);
  const uint32_t end = min(p.units.words, unit.end * 4 * kLineWords);
  __syncwarp();  // the set is about to be overwritten
  collect_terms(p, s.set(), owner, slot);
#pragma unroll 1
  for (uint32_t w = unit.begin * 4 * kLineWords + lane(); w < end; w += 32) {
    const uint64_t value = sum_word(p, s.set(), w);
    if (p.words_fit) {
      reinterpret_cast<uint64_t*>(to)[w] = value;
    } else {
      store_bytes(to + 8 * static_cast<uint64_t>(w), value, bytes - 8 * static_cast<int64_t>(w));
    }
  }
}

// A unit of one row's partial into its owner's inbox, by a warp.
__device__ void push_unit(const Sum& s, int owner, int slot, const Unit& unit) {
  const CombineParams& p = s.p;
  const WindowMap& map = p.group.map;
  const uint64_t header = load_fresh<unsigned long long>(
      p.handle.meta + (static_cast<int64_t>(owner) * p.bound + slot) * (1 + map.shape().top_k));
  std::byte* const to = s.windows()[owner] +
                        map.inbox(s.step.lane, s.step.bank(), static_cast<int>(header), static_cast<int>(header >> 32));
  if (p.plain && p.vectors_fit) {
    copy_unit(s, row_of(p, owner, slot), to, unit.number);
  } else {
    sum_into(s, owner, slot, to, unit);
  }
}

// A chunk of rows that are no lines.
struct Chunk {
  int owner;
  int number;
  int rows;  // 0: there is no such chunk
};
// Chunks of all owners in turns, so that none waits for the others'. Own rows that are summed where they lie have none.
__device__ Chunk chunk_of(const Sum& s, int i) {
  const int owners = s.ranks() - (s.p.own_direct ? 1 : 0);
  const int owner = (s.p.group.me + 1 + i % owners) % s.ranks();
  const int number = i / owners;
  const int rows = s.first_line(owner, s.counts()[owner]);
  return {owner, number, max(0, min(s.chunk_rows(), rows - number * s.chunk_rows()))};
}

__device__ void push_chunks(const Sum& s) {
  const CombineParams& p = s.p;
  const auto blocks = static_cast<int>(gridDim.x);
  int most = 0;
#pragma unroll 1
  for (int i = 0; i < s.ranks(); ++i) {
    if (i != p.group.me || !p.own_direct) most = max(most, s.first_line(i, s.counts()[i]));
  }
  const int chunks = (s.ranks() - (p.own_direct ? 1 : 0)) * ((most + s.chunk_rows() - 1) / s.chunk_rows());
  int32_t* const sent = shared_at<int32_t>(p.at.sent);
  const auto parts = static_cast<int>(p.units.per_row.divisor);
  const int items = s.chunk_rows() * parts;  // of a chunk
#pragma unroll 1
  for (int begin = 0; begin * blocks + static_cast<int>(blockIdx.x) < chunks; begin += kChunks) {
    meet<kSenders>(kAmongSenders);
    if (threadIdx.x < kChunks) sent[threadIdx.x] = 0;
    meet<kSenders>(kAmongSenders);
#pragma unroll 1
    for (int x = s.set(); x < kChunks * items; x += kSendWarps) {
      const int mine = x / items;
      const int i = (begin + mine) * blocks + static_cast<int>(blockIdx.x);
      if (i >= chunks) break;
      const Chunk chunk = chunk_of(s, i);
      const int row = (x - mine * items) / parts;
      if (row >= chunk.rows) continue;
      push_unit(s, chunk.owner, chunk.number * s.chunk_rows() + row,
                unit_of(p.units, static_cast<uint32_t>(x % parts)));
      __syncwarp();
      if (lane() != 0) continue;
      // S4: the counter's acquire and release chain the chunk's rows, one fence then brings all before the word.
      __threadfence_block();
      if (atomicAdd(&sent[mine], 1) != chunk.rows * parts - 1) continue;
      fence_system();
      store_word(
          s.windows()[chunk.owner] + p.group.map.chunk_word(s.step.lane, s.step.bank(), p.group.me, chunk.number),
          s.step.number);
    }
  }
}

// The last block whose rows are sent publishes, when all have been read and written (S3).
__device__ void publish_last(const Sum& s) {
  meet<kSenders>(kAmongSenders);
  if (threadIdx.x >= 32) return;
  const int last = threadIdx.x == 0 && last_to_send(s.p.group, s.step);
  if (!__shfl_sync(~0u, last, 0)) return;
  __syncwarp();  // what lane 0 has synchronised with, all have
  publish_words(s.p.group, s.step, Mode::kCombine, [&](int rank) { return s.counts()[rank]; }, lane(), 32);
}

__device__ void send(const Sum& s, const First& early, const Ahead& ahead) {
  const CombineParams& p = s.p;
  // Every row has a word of its own or certifies itself. The step's word also says that nothing of the other bank is
  // read any more (S3): where rows lie outside the window that is so from the start.
  if (!p.late_word && blockIdx.x == 0 && threadIdx.x < 32) {
#pragma unroll 1
    for (int i = lane(); i < s.ranks(); i += 32) {
      publish_word(p.group, s.step, (p.group.me + 1 + i) % s.ranks(), Mode::kCombine,
                   s.counts()[(p.group.me + 1 + i) % s.ranks()], 0);
    }
  }
  if (p.bound > p.group.line_tokens || !p.own_direct) push_chunks(s);
  push_lines(s, early, ahead);
  if (p.late_word) publish_last(s);
}

// ---- Summing

// The unit of a summing warp that comes first.
__device__ uint32_t first_sum() { return blockIdx.x + (threadIdx.x - kSenders) / 32 * gridDim.x; }

// Units of all tokens, a warp's share of them. `sent`: of the first.
template <twDtype_t kWire>
__device__ void sum_tokens(const Sum& s, Sent sent) {
  const CombineParams& p = s.p;
  const uint32_t end = static_cast<uint32_t>(p.tokens) * p.units.per_row.divisor;
  const uint32_t warps = gridDim.x * kReceiveWarps;
#pragma unroll 1
  for (uint32_t u = first_sum(); u < end; u += warps) {
    const uint32_t token = divide(u, p.units.per_row);
    const uint32_t next = divide(u + warps, p.units.per_row);
    Sent after{};  // of the next unit, on its way while this one is summed
    if (u + warps < end) after = load_sent(p, static_cast<int>(next), lane());
    sum_unit<kWire>(s, static_cast<int>(token), unit_of(p.units, u - token * p.units.per_row.divisor), sent);
    sent = after;
  }
}

// NaN for the tokens that a block's units belong to.
__device__ __noinline__ void give_up(const Sum& s) {
  const CombineParams& p = s.p;
  if (threadIdx.x < kSenders) return;
  const uint32_t end = static_cast<uint32_t>(p.tokens) * p.units.per_row.divisor;
#pragma unroll 1
  for (uint32_t u = first_sum(); u < end; u += gridDim.x * kReceiveWarps) {
    fill_nan(p, static_cast<int>(divide(u, p.units.per_row)), 1, lane(), 32);
  }
}

// One warp waits for every word (S2) and sees that every row that went out came back.
__device__ void await_words(const Sum& s) {
  const CombineParams& p = s.p;
  bool good = true;
#pragma unroll 1
  for (int i = lane(); i < s.ranks(); i += 32) {
    Source source = await_source(p.group, s.step, i, Look::kTakesPart);
    if (p.group.no_wait) continue;
    if (source.error == twSuccess && source.n != s.sent_rows()[i]) source.error = twCallMismatch;
    report_source(p.group, s.step, i, source);
    good &= source.error == twSuccess;
  }
  if (!__all_sync(~0u, good) && lane() == 0) *s.failed() = 1;
}

__global__ void __launch_bounds__(kThreads, 1) combine_kernel(const __grid_constant__ CombineParams p) {
  let_next_begin();
  const GroupView& g = p.group;
  Sum s{p, Step{0, p.lane, p.bound, twPhaseCombine}};
  for (int i = threadIdx.x; i < s.ranks(); i += kThreads) s.windows()[i] = window_of(g, i);
  if (threadIdx.x == 0) *s.failed() = 0;
  warm(p);
  const First early = first_of(s);
  const uint32_t token = divide(first_sum(), p.units.per_row);
  await_earlier();
  s.step.number = next_step(g, p.lane);
  // A dispatch that failed is answered by nobody: all ranks have seen it fail, and skip this step alike.
  const bool good = !is_sticky(g) && *reinterpret_cast<volatile int32_t*>(p.handle.status) == twSuccess;
  Ahead ahead{};
  Sent sent{};
  if (threadIdx.x < kSenders) {
    if (early.loaded) load_ahead(s, row_of(p, early.owner, early.share.index), early.share.unit, &ahead);
  } else if (token < static_cast<uint32_t>(p.tokens)) {
    sent = load_sent(p, static_cast<int>(token), lane());
  }
  for (int i = threadIdx.x; i < s.ranks(); i += kThreads) {
    s.counts()[i] = static_cast<int>(load_fresh<uint32_t>(p.handle.counts + i));
    s.sent_rows()[i] = static_cast<int>(load_fresh<uint32_t>(p.handle.send_counts + i));
  }
  const bool usable = __syncthreads_and(good) != 0;  // threads that differ would wait for each other
  const auto thread = static_cast<int>(threadIdx.x);
  if (!usable) {
    if (p.receive) give_up(s);
    return;  // not done: this step will be another kernel's, unless the group is finished
  }
  uint32_t arrived = 0;
  if (p.receive && thread == 0) arrived = begin_end(g, s.step);
  const bool concludes = p.receive && blockIdx.x == gridDim.x - 1;
  if (thread < kSenders) {  // S7: nobody here waits, but for one warp that has sent
    if (p.send) send(s, early, ahead);
    if (concludes && s.set() == kSendWarps - 1) await_words(s);
  } else if (p.receive) {
    if (p.wire_dtype == twBfloat16) {
      sum_tokens<twBfloat16>(s, sent);
    } else if (p.wire_dtype == twFloat16) {
      sum_tokens<twFloat16>(s, sent);
    } else {
      sum_tokens<twFloat32>(s, sent);
    }
  }
  if (!p.receive) return;
  __syncthreads();
  if (*s.failed() != 0) {
    if (concludes) {
      await_done(g, s.step);
      fill_nan(p, 0, p.tokens, thread, kThreads);
    } else {
      give_up(s);  // units of a token that came after one that did not
    }
  }
  if (thread != 0) return;
  end_step(g, s.step, arrived);
  say_done(g, s.step);
}

}  // namespace

int launch_combine(const CombineParams& params, int grid, bool early, void* stream) {
  return launch_kernel(combine_kernel, params, grid, params.at.bytes, early, stream);
}

int load_combine(const Shape& shape) {
  return allow_shared(reinterpret_cast<const void*>(combine_kernel), CombineScratch::make(shape).bytes);
}

}  // namespace tw::nvlink
