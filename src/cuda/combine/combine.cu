// Combine: some blocks send rows back to their owners, the others sum what arrives. Takes CombineParams; gives each
// token's sum in the caller's output. launch_combine also chooses between this kernel and that of combine/ll128.cu.
//
// Floor: bytes over the link, then one flight with the last of them and its flag, and the sum of that. The last rows
// for an owner, or all if they are few, go as packets, which are summed as they come. Those before them go into the
// owner's inbox, in chunks of a few rows with a signal each, so that they are summed while later ones are on the wire:
// pushing all, waiting, then summing would take 1.3 times as long. What the fence and the signal of a chunk take passes
// while the packets are on their way. Warps work alone, on a tile of a row at a time; those of a block wait for each
// other for chunks (combine/chunks.cuh), and where rows lie in the window.
//
// What breaks if this changes: S3 (late_signal; nothing is written before await_earlier), S7 (send before sum), S9
// (order of terms).
#include <cuda_runtime.h>

#include "cuda/combine/chunks.cuh"
#include "cuda/combine/end.cuh"
#include "cuda/combine/tiles.cuh"
#include "cuda/device/passes.cuh"
#include "cuda/launch/bulk.h"

namespace tw::cuda {

int load_combine_packets(const Shape& shape);
int load_parts();

namespace {

// ---- Sending

// What a warp has loaded of a tile of a row.
struct Ahead {
  Vec16 pair[kTileGroups];
};
template <twDtype_t kWire, bool kFast>
__device__ __forceinline__ void load_ahead(const Sum& s, const std::byte* row, const Tile& tile, Ahead* ahead) {
  if (!kFast && !s.simple() && s.p.word_sums_fit) {
    return sum_pairs<kWire, kTileGroups>(s.p, s.set(), tile.begin, tile.end, ahead->pair);
  }
#pragma unroll
  for (int g = 0; g < kTileGroups; ++g) {
    const uint32_t w = first_word(tile.begin + g);
    ahead->pair[g] = {};
    if (tile.begin + g >= tile.end) continue;
    ahead->pair[g] = kFast || s.simple() ? load_two(row, w, s.p.tiles.words) : load_any_pair(s, row, true, w);
  }
}

// Sends a tile of a row as packets to its owner.
__device__ __forceinline__ void send_packets(const Sum& s, int owner, int index, const Tile& tile, const Ahead& ahead) {
  const CombineParams& p = s.p;
  Parts<1> parts;
  parts.cover(p.tiles, tile);
  std::byte* const packet =
      s.windows()[owner] + packet_at(p.packets, s.step.bank(), p.group.me, index) + packet_place(tile.begin);
  const bool together = is_together();
#pragma unroll
  for (int g = 0; g < kTileGroups; ++g) {
    if (g >= parts.groups) continue;
    store_packet(together, packet + g * kGroupBytes, ahead.pair[g].a, is_flag() ? s.step.number : ahead.pair[g].b);
  }
}

// What a warp sends first, if rows are simple and all go as packets. It is loaded though nobody knows yet whether there
// is such a row: the place exists all the same, as the caller's tensor has all slots up to the bound.
struct First {
  bool loaded;
  int owner;
  Share share;
};
__device__ First first_of(const Sum& s) {
  const CombineParams& p = s.p;
  if (!s.sends() || !s.simple() || s.ranks() == 1 || p.bound > p.group.packet_tokens) return {};
  if (p.group.map.shape().exact()) return {};  // where rows begin is not known yet
  const Share share = share_of(p.tiles, min(32u, static_cast<uint32_t>(s.ranks() - 1)), sent_shares(p.roles).first);
  const int owner = p.group.me + 1 + share.turn;
  return {share.index < p.bound, owner < s.ranks() ? owner : owner - s.ranks(), share};
}

// Sends the last rows of all other owners as packets: a warp's share of them, beyond the first `before` tiles. `busy`:
// a warp of each block has other work.
template <twDtype_t kWire, bool kFast>
__device__ void push_packets(const Sum& s, uint32_t before, bool busy) {
  const CombineParams& p = s.p;
  const auto [begins, all] = sent_shares(p.roles);
  const uint32_t warps = busy ? all / kWarps * kPushing : all;
  uint32_t warp = begins + before * warps;
  const uint32_t per_slot = p.tiles.per_row.divisor * static_cast<uint32_t>(s.ranks() - 1);
  if (s.ranks() <= 33 && warp >= static_cast<uint32_t>(min(p.bound, p.group.packet_tokens)) * per_slot) return;
#pragma unroll 1
  for (int begin = 0; begin < s.ranks() - 1; begin += 32) {
    const int count = min(32, s.ranks() - 1 - begin);
    const int mine = (p.group.me + 1 + begin + lane()) % s.ranks();
    const int rows = lane() < count ? s.counts()[mine] : 0;
    const int first = s.first_packet(mine, rows);
    const int most = __reduce_max_sync(~0u, lane() < count ? rows - first : 0);
    const uint32_t end = static_cast<uint32_t>(most) * p.tiles.per_row.divisor * static_cast<uint32_t>(count);
#pragma unroll 1
    for (uint32_t u = warp; u < end; u += warps) {
      const Share share = share_of(p.tiles, static_cast<uint32_t>(count), u);
      const int slot = __shfl_sync(~0u, first, share.turn) + share.index;
      if (slot < __shfl_sync(~0u, rows, share.turn)) {
        const int owner = (p.group.me + 1 + begin + share.turn) % s.ranks();
        if (!kFast && !s.simple()) {
          collect_terms(p, s.set(), owner, slot, load_choice(p, meta_row(p, owner, slot), lane()));
        }
        Ahead ahead;
        load_ahead<kWire, kFast>(s, row_in(p, owner, slot), share.tile, &ahead);
        send_packets(s, owner, share.index, share.tile, ahead);
      }
    }
    warp = begins;  // for the next owners all tiles are still to be done
  }
}

// Sends everything. `first`: the tile that the warp sends first, if all go as packets, loaded. `begun`: see
// push_chunks.
template <twDtype_t kWire, bool kFast>
__device__ void send(const Sum& s, const First& first, const Ahead& ahead, bool begun) {
  const CombineParams& p = s.p;
  const bool chunks = p.bound > p.group.packet_tokens || !p.own_direct;
  if (!chunks) {
    if (first.loaded && first.share.index < s.counts()[first.owner]) {
      send_packets(s, first.owner, first.share.index, first.share.tile, ahead);
    }
    return push_packets<kWire, kFast>(s, first.loaded ? 1 : 0, false);
  }
  push_chunks<kWire, kFast>(s, begun);
  if (s.real && s.set() != kPushing) push_packets<kWire, kFast>(s, 0, true);
}

// ---- Summing

struct Item {
  int token;
  Tile tile;
};
// Gives the token and the tile that number u is, over all tokens in order, wide rows first.
__device__ inline Item summed_item(const CombineParams& p, uint32_t u) {
  const uint32_t wide = p.wide.tiles();
  const bool is_wide = u < wide;
  if (!is_wide) u -= wide;
  const Divider& per_row = is_wide ? p.wide.per_row : p.tiles.per_row;
  const uint32_t parts = is_wide ? p.wide.parts : 1;
  const uint32_t row = divide(u, per_row);
  return {static_cast<int>(is_wide ? row : row + p.wide.rows),
          tile_of(p.tiles, (u - row * per_row.divisor) * parts, parts)};
}

// Sums tiles of all tokens, in order. Each goes to whichever warp is free, because some SMs, those next to one that
// sends to a full link, load at a fraction of the others' speed. A warp draws its next tile when the rows of this one
// are here, so that a warp that waits holds no other tile.
//
// In low-SM kernels each warp has so many tiles that it may hold two: the next one's destinations are on their way
// while this one is summed (8 SMs: 475 us for 4096 tokens instead of 529). A warp whose next tile is p.single or later
// draws none before that one is begun; otherwise warps that wait for the last rows to come would hold the packets
// behind them.
//
// Blocks that have sent join in where tiles are wide. `sent`: the destinations of the first tile, in a block that
// begins with sums.
template <twDtype_t kWire, Kind kKind>
__device__ void sum_tokens(const Sum& s, Sent sent) {
  constexpr bool kFast = kKind != Kind::kGeneric;
  const CombineParams& p = s.p;
  const uint32_t end = p.wide.tiles() + (static_cast<uint32_t>(p.tokens) - p.wide.rows) * p.tiles.per_row.divisor;
  const Shares own = received_shares(p.roles);
  // Sums of tokens below `met` go by the geometry of packets, whatever their terms are. Where no tile is wide, these
  // are the first tokens of each block. So the block has met the instructions that the last tokens need, whose rows are
  // packets. (Without this those took 1.5 us longer, a combine 0.4.)
  const auto met =
      static_cast<int>(divide(static_cast<uint32_t>(p.roles.receiving) + p.tiles.per_row.divisor - 1, p.tiles.per_row));
  const bool draws = end > own.step;
  const auto take_work = [&] { return draw(sum_counters(p.group, s.step), draws && lane() == 0); };
  const auto drawn = [&](uint32_t work_item) { return draws ? own.step + __shfl_sync(~0u, work_item, 0) : end; };
  uint32_t u = own.first;
  const auto load = [&](uint32_t of, Sent* to) {
    if (of < end) *to = load_sent(p, summed_item(p, of).token, lane());
  };
  if (!s.sums()) {
    u = drawn(take_work());
    load(u, &sent);
  }
  constexpr uint32_t kNone = ~0u;
  uint32_t next = kKind == Kind::kLowSm ? drawn(take_work()) : kNone;
#pragma unroll 1
  while (u < end) {
    const Item item = summed_item(p, u);
    Sent after{};
    if (kKind == Kind::kLowSm && next != kNone) load(next, &after);
    const bool draws_one = kKind != Kind::kLowSm || next == kNone || next < p.single;
    uint32_t work_item = 0;
    const bool as_packets = kKind == Kind::kUsual && item.token < met;
    sum_tile<kWire, kFast>(s, item.token, item.tile, sent, as_packets, [&] {
      if (draws_one) work_item = take_work();
    });
    const uint32_t found = draws_one ? drawn(work_item) : kNone;
    if (kKind == Kind::kLowSm && next != kNone) {
      u = next, next = found;
      sent = after;
    } else {
      u = found;
      load(u, &sent);
    }
  }
}

// Starts to bring what a block loads first to the second-level cache (dispatch/dispatch.cu). `token`: the one that it
// sums first.
template <bool kFast>
__device__ inline void bring_near(const Sum& s, const FirstPush& push, int token) {
  const CombineParams& p = s.p;
  if (kFast) push.bring_near(p);
  if (threadIdx.x < 32 && lane() < s.ranks()) bring_counts_near(p, lane());
  if (threadIdx.x == 0) prefetch(&p.group.channels[p.channel]), prefetch(p.group.state), prefetch(p.handle.status);
  if (!s.sums() || token >= p.tokens) return;
  prefetch(p.handle.fan + token);
  prefetch(p.handle.destinations + static_cast<int64_t>(token) * s.fan_out());
}

// Does what is left when a block has sent. `sent`: the destinations for its first sum.
template <twDtype_t kWire, Kind kKind>
__device__ inline void conclude(const Sum& s, const Sent& sent) {
  conclude_step(s, [&] {
    if (s.sums() || (s.p.receive && s.p.joins)) sum_tokens<kWire, kKind>(s, sent);
  });
}

// The kernel of one wire type and kind. Blocks that only send go through their beginning, up to the first tiles, twice
// where they come onto the device early: dispatch/dispatch.cu says why.
template <twDtype_t kWire, Kind kKind>
__global__ void __launch_bounds__(kThreads, 1) combine_kernel(const __grid_constant__ CombineParams p) {
  constexpr bool kFast = kKind != Kind::kGeneric;
  let_next_begin();
  const GroupView& g = p.group;
  const auto thread = static_cast<int>(threadIdx.x);
  Sum s{p, Step{0, p.channel, p.bound, twPhaseCombine, p.rows_digest}};
#pragma unroll 1
  for (int i = thread; i < s.ranks(); i += kThreads) s.windows()[i] = target_of(g, i, p.send);
  if (thread == 0) *s.failed() = 0;
  begin_work(s);
  warm(p);
  const First first =
      kFast ? First{} : first_of(s);  // usual calls whose rows are all packets have another kernel, except a few
  FirstPush found(s);
  if (kFast) found.find(p);
  const int token = summed_item(p, received_shares(p.roles).first).token;
  bring_near<kFast>(s, found, token);
  const bool exact = g.map.shape().exact();
  s.real = !(kFast && p.rehearses && s.sends());
#pragma unroll 1
  for (;; s.real = true) {
    begin_pass(s.real);
    FirstPush push = found;
    if (!s.real) push.vectors = 0;
    const Counts of_owner = kFast && push.given && exact && s.real ? load_counts(s, push.owner) : Counts{};
    Ahead ahead{};
    Sent sent{};
    if (first.loaded) load_ahead<kWire, kFast>(s, row_of(p, first.owner, first.share.index), first.share.tile, &ahead);
    if (s.sums() && token < p.tokens) sent = load_sent(p, token, lane());
    const Counts counts = load_counts(s, thread);
    s.step.number = next_step(g, p.channel);
    const bool good = can_combine(p);
    if (kFast) push.load(p, static_cast<int>(of_owner.first), static_cast<int>(of_owner.received));
    begin_at_bank(g, p.bank, &s.step.number);
    if (p.part.skips) ++s.step.number;
    keep_counts(s, counts);
    bool usable = __syncthreads_and(good) != 0;  // threads that differ would wait for each other
    if (p.part.skips && p.send && usable) usable = skip_step(g, s.step);
    if (s.real && !usable) {
      if (p.receive) give_up(s);
      return;  // the step has not ended: it will be another kernel's, unless the group is finished
    }
    const bool given = kFast && push.given;
    if (given && (!s.real || push.slot < s.first_packet(push.owner, s.counts()[push.owner]))) push.store(s);
    if (s.real && p.send && thread == 0 && blockIdx.x == 0) say_sent(g, s.step);
    if (s.sends()) {
      if (s.real && !p.late_signal && blockIdx.x == 0 && s.set() == 0) publish_first(s);
      send<kWire, kFast>(s, first, ahead, given);  // S7: nobody here waits
      if (s.real && p.late_signal) publish_last(s);
    }
    if (s.real) return conclude<kWire, kKind>(s, sent);
  }
}

// Gives the kernels of one type on the wire.
auto of_wire(twDtype_t wire) {
  return [wire](Kind kind, auto&& use) {
    return with_kind(kind, [&](auto of) {
      constexpr Kind kKind = decltype(of)::value;
      if (wire == twBfloat16) return use(combine_kernel<twBfloat16, kKind>);
      return use(wire == twFloat16 ? combine_kernel<twFloat16, kKind> : combine_kernel<twFloat32, kKind>);
    });
  };
}

}  // namespace

int launch_combine(const CombineParams& params, int grid, bool early, void* stream) {
  if (params.kind == Kind::kPackets) return launch_combine_packets(params, grid, early, stream);
  return launch_bulk(params, grid, early, stream, of_wire(params.wire_dtype));
}

int load_combine(const Shape& shape) {
  if (const int error = load_combine_packets(shape)) return error;
  if (const int error = load_parts()) return error;
  for (const twDtype_t wire : {twBfloat16, twFloat16, twFloat32}) {
    if (const int error = load_bulk(CombineScratch::make(shape).bytes, of_wire(wire))) return error;
  }
  return 0;
}

}  // namespace tw::cuda
