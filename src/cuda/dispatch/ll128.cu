// Dispatch of rows that all travel as packets, in calls of the usual kind (launch/tiles.h, Kind::kPackets). Takes
// DispatchParams; gives the same rows, slots and handle as dispatch/dispatch.cu does.
//
// Floor: an exchange of packets, 2.5 us and the bytes over the link. What comes on top is instructions: a warp runs one
// in about 5 cycles, and one that it meets for the first time in 5 to 10; and each load that waits for another is 0.6
// us. So whatever does not need the step, the ids or the payload is worked out before the kernel waits for the one
// before it; then all that is needed is loaded at once; no warp waits for another but where tokens are routed; and what
// the caller needs but no peer does comes after the stores.
//
// What breaks if this changes: S3 (await_earlier), S4 (the flags), S7 (send before receive), S8 (skip_step), S9. The
// order of everything else is speed alone.
#include <cuda_runtime.h>

#include "cuda/device/loads.cuh"
#include "cuda/dispatch/end.cuh"
#include "cuda/dispatch/ll128_send.cuh"
#include "cuda/launch/launch.h"
#include "cuda/launch/loading.h"

namespace tw::cuda {
namespace {

// ---- Sending

// Shows how many rows are this rank's own, and clears the slots that hold none of them: by the first `warps` warps of a
// side. The launch alone decides which side: rows may be sent by a kernel of another kind, which leaves this to whoever
// receives.
__device__ inline void show_own(const Block& b, int own, uint32_t warp, uint32_t warps) {
  const DispatchParams& p = b.p;
  const int me = p.group.me;
  if (warp == 0 && lane() == 0) p.shown.counts[me] = p.handle.counts[me] = own;
  if (own == p.bound) return;
  show_nothing(p, row_at(p, me, own), row_at(p, me, p.bound), static_cast<int>(warp) * 32 + lane(),
               static_cast<int>(warps) * 32);
}

template <int kGroups, bool kAlone>
__device__ inline void send_tiles(const Block& b, const Routing<kAlone>& routing, Outgoing<kGroups> out,
                                  Loaded<kGroups> loaded) {
  const DispatchParams& p = b.p;
  const Shares shares = sent_shares(p.roles);
  const uint32_t all = static_cast<uint32_t>(p.tokens) * p.tiles.per_row.divisor;
  if (is_teller()) tell_counts(b, routing);
#pragma unroll 1
  for (uint32_t u = shares.first; u < all;) {
    const bool draws = all > shares.step;  // there are more than those that everybody begins with
    const uint32_t work_item =
        draw(work_counters(p.group, b.step), draws && lane() == 0);  // on its way while this tile is sent
    send_tile<kGroups, true>(b, routing.find(b, out.token), out, loaded);
    if (!draws) break;
    u = shares.step + __shfl_sync(~0u, work_item, 0);
    if (u >= all) break;
    out = Outgoing<kGroups>(p, u);
    loaded = Loaded<kGroups>(out);
  }
  const uint32_t warps = all > 0 ? min(all, shares.step) : shares.step;
  if (p.receive && shares.first < warps) show_own(b, routing.count(b, p.group.me), shares.first, warps);
}

// ---- Receiving

// A tile of a slot of another rank: where the thread's part of its packets comes, and where that goes.
template <int kGroups>
struct Incoming {
  int rank;
  int slot;
  Tile tile;
  const std::byte* packet;
  const std::byte* signal;  // the rank's
  Words<kGroups, std::byte> words;
  ItemsAt items;

  // Makes one from a share of all tiles. `window`: this rank's; `bank`: in that window.
  __device__ static Incoming make(const DispatchParams& p, std::byte* window, std::byte* bank, uint32_t u) {
    const int ranks = p.group.map.shape().ranks;
    const Share in = share_of(p.tiles, static_cast<uint32_t>(ranks - 1), u);
    const int after = p.group.me + 1 + in.turn;
    return {p, window, bank, in.tile, after < ranks ? after : after - ranks, in.index};
  }
  __device__ Incoming(const DispatchParams& p, std::byte* window, std::byte* bank, const Tile& of, int from, int at)
      : rank(from),
        slot(at),
        tile(of),
        packet(window + packet_at(p.packets, p.bank, from, at) + packet_place(of.begin)),
        signal(window + p.group.map.signal(p.channel, p.bank, from)),
        words(words_here<kGroups>(p, bank, row_at(p, from, at), of)),
        items(p, bank, row_at(p, from, at)) {}
  __device__ void pin() {
    words.pin();
    items.pin();
    cuda::pin(rank, slot, tile.number, tile.begin, tile.end, packet, signal);
  }
};

// Waits for a source's signal and, if it has a row for the slot, for the packets.
template <int kGroups>
__device__ inline Source await_tile(const Block& b, const Incoming<kGroups>& in, Parts<1, kGroups>* packets) {
  const GroupView& g = b.p.group;
  const auto bound = static_cast<uint32_t>(b.p.bound);
  const uint64_t note = b.step.note(0);
  const uint64_t usual = pack(Signal{b.step.low(), Mode::kDispatchPackets, 0});
  Source source;
  bool known = false;
  Patience patience(g);
#pragma unroll 1
  for (int looks = 0;; ++looks) {
    packets->look();
    if (!known) {
      const Vec16 signal = load_pair(in.signal);
      const uint32_t n = static_cast<uint32_t>(signal.a) & kMaxCount;
      source.signal = signal.a;
      source.n = static_cast<int>(n);
      known = __all_sync(~0u, (signal.a ^ usual) >> 28 == 0 && signal.b == note && n <= bound);
      if (!known && __any_sync(~0u, g.no_wait || reached(unpack(signal.a).step, b.step.low()))) {
        known = true;  // another signal, which await_source judges
        source = await_source(g, b.step, in.rank, Look::kTakesPart, false);
      }
    }
    if (known && __any_sync(~0u, source.error != twSuccess || in.slot >= source.n)) return source;
    if (known && !__any_sync(~0u, packets->missing(b.step) >= 0)) {
      if (__any_sync(~0u, packets->apart)) {  // all is there, but data may have been looked at before the flags
        fence_system();
        packets->look();
      }
      return source;
    }
    bool late = false;
    const bool over = patience.over(&late);
    if (g.no_wait) return source;
    if (__any_sync(~0u, over)) {
      if (late) report_failure(g, b.step, twTimeout, in.rank, source.signal);
      source.error = __any_sync(~0u, late) ? twTimeout : twPeerAborted;
      return source;
    }
    rest(looks);
  }
}

// Takes what came for a tile of a slot, or clears the slot. The first tile of a source also makes known how many rows
// came and what is wrong.
template <int kGroups>
__device__ inline void take_tile(const Block& b, const Incoming<kGroups>& in) {
  const DispatchParams& p = b.p;
  Parts<1, kGroups> packets;
  packets.cover(p.tiles, in.tile);
  packets.at[0] = in.packet;
  const Source source = await_tile(b, in, &packets);
  const bool good = !__any_sync(~0u, source.error != twSuccess);
  const bool first = in.slot == 0 && has_meta(in.tile);
  if (good && in.slot < source.n) {
    Vec16 pair[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) pair[g] = packets.value[g][0];
    in.words.store(pair);
    if (has_meta(in.tile)) {
      const uint32_t id = item_of(pair[0], lane());
      take_items(b, in.items, pair[0], id, item_of(pair[0], lane() + p.group.map.shape().top_k));
      if (lane() == 0) check_header(p, b.step, pair[0].a);
    }
  } else if (good && has_meta(in.tile)) {
    const int64_t row = row_at(p, in.rank, in.slot);
    show_nothing(p, row, row + 1, lane(), 32);
  }
  if (lane() != 0) return;
  if (!good) b.scratch.fail(in.rank, source.error);
  if (!first) return;
  p.shown.counts[in.rank] = p.handle.counts[in.rank] = good ? source.n : 0;
  if (!good) report_source(p.group, b.step, in.rank, source);
}

template <int kGroups>
__device__ inline void take_tiles(const Block& b, Incoming<kGroups> in) {
  const DispatchParams& p = b.p;
  const Shares shares = received_shares(p.roles);
  const uint32_t all = static_cast<uint32_t>(p.bound * (b.ranks() - 1)) * p.tiles.per_row.divisor;
  if (!p.send) {  // an earlier kernel has sent
    show_own(b, static_cast<int>(load_fresh<uint32_t>(p.handle.send_counts + p.group.me)), shares.first, shares.step);
  }
#pragma unroll 1
  for (uint32_t u = shares.first; u < all;) {
    take_tile<kGroups>(b, in);
    u += shares.step;
    if (u < all) in = Incoming<kGroups>::make(p, b.scratch.windows()[p.group.me], b.bank, u);
  }
}

// ---- The kernel

template <int kGroups, bool kAlone>
__global__ void __launch_bounds__(kThreads, 1) dispatch_packets_kernel(const __grid_constant__ DispatchParams p) {
  let_next_begin();
  if (does_nothing_else(p)) return count_loads_apart(p);
  const GroupView& g = p.group;
  const Shape& shape = g.map.shape();
  const Scratch scratch(p);
  const int thread = static_cast<int>(threadIdx.x);
  warm(p);
  if (thread < shape.ranks) {
    scratch.windows()[thread] = window_of(g, thread);
    scratch.source_error()[thread] = twSuccess;
  }
  if (thread == 0) *scratch.failed() = 0;
  fill_table(p, scratch);
  const bool sends = p.send && is_sender(p.roles);
  const uint32_t none = static_cast<uint32_t>(p.tokens) * p.tiles.per_row.divisor;
  Outgoing<kGroups> out(p, sends ? sent_shares(p.roles).first : none);
  // The bank is the host's rule (PROTOCOL.md, views): a step that would have the other one is skipped.
  std::byte* const window = window_of(g, g.me);
  std::byte* const bank = window + g.map.bank(p.channel, p.bank);
  auto in = Incoming<kGroups>::make(p, window, bank, received_shares(p.roles).first);
  IdsAt ids_from = ids_at(p, kAlone ? lane() : thread);
  IdsAt more_from = ids_at(p, kAlone ? p.tokens : thread + kRound);
  const bool routes = sends && (!kAlone || sent_shares(p.roles).first < none || is_teller());
  if (!routes) ids_from.bytes = more_from.bytes = 0;
  out.pin();
  in.pin();
  pin(ids_from.from, ids_from.bytes, more_from.from, more_from.bytes);
  meet();  // the table is filled
  await_earlier();
  const Ids ids = load_ids(ids_from);
  const Ids more = load_ids(more_from);
  const Loaded<kGroups> loaded(out);
  const uint32_t digest = load_digest(p.in.digest);
  Step step{next_step(g, p.channel), p.channel, p.bound, twPhaseDispatch, digest_of(p, digest), g.note_bits};
  const bool sticky = is_sticky(g);
  Routing<kAlone> routing;
  if (routes) routing.make(p, scratch, ids, more);
  const bool skips = static_cast<int>(step.number & 1) != p.bank;
  if (skips) ++step.number;
  bool usable = __syncthreads_or(sticky) == 0;  // threads that differ would wait for each other
  const Block b{p, scratch, step, bank};
  if (p.send && usable && skips) usable = skip_step(g, step);
  if (sends && usable) send_tiles(b, routing, out, loaded);  // S7: nobody here waits
  // From here on leave_status and finish_dispatch (dispatch/end.cuh), written out: with the functions a dispatch of 1
  // to 8 tokens took 0.05 us longer, 3.82 for 3.77 (2x H100, bench/results/same-kernels-2-gpus.json).
  const uint32_t arrived = begin_end(g, step, p.receive && thread == 0);
  if (thread == 0 && blockIdx.x == 0) {           // what no peer waits for
    if (p.receive) *p.handle.status = twSuccess;  // until a block that has seen an error knows all others to be done
    if (p.in.map != nullptr) *p.handle.digest = digest;
    clear_counters(g, step);
  }
  if (usable) {
    if (p.receive && is_receiver(p.roles)) take_tiles<kGroups>(b, in);
    if (p.loads_block == LoadsBlock::kLast && blockIdx.x == gridDim.x - 1) count_loads(p);
  } else if (p.receive) {
    give_up(b);
  }
  if (!p.receive) return;
  __syncthreads();
  if (*scratch.failed() != 0) clear_failed(b);
  if (thread != 0) return;
  end_step(g, step, arrived);
  say_done(g, step);
}

// Calls use(kernel). With few tokens a warp has one group at a time, so that no instructions are there twice.
template <class Use>
int with_kernel(bool alone, uint32_t groups, Use&& use) {
  if (alone) return use(dispatch_packets_kernel<1, true>);
  return use(groups <= 2 ? dispatch_packets_kernel<2, false> : dispatch_packets_kernel<kTileGroups, false>);
}

}  // namespace

int launch_dispatch_packets(const DispatchParams& params, int grid, bool early, void* stream) {
  return with_kernel(params.tokens <= kFewTokens && params.tiles.tile_groups == 1, params.tiles.tile_groups,
                     [&](auto* kernel) { return launch_kernel(kernel, params, grid, params.at.bytes, early, stream); });
}

int load_dispatch_packets(const Shape& shape) {
  for (const uint32_t groups : {1, 2, kTileGroups}) {
    const int error = with_kernel(groups == 1, groups, [&](auto* kernel) {
      return allow_shared(reinterpret_cast<const void*>(kernel), DispatchScratch::make(shape).bytes);
    });
    if (error != 0) return error;
  }
  return 0;
}

}  // namespace tw::cuda
