// Dispatch of rows that all travel as packets, straight to their experts: what dispatch/ll128.cu and a copy by expert
// (view/few_rows.cu, view/by_expert.cu) do one after the other, in one kernel. Takes ByExpertParams; gives the caller's
// tensors, and all that both leave in the handle. Rows are not put into the window.
//
// Floor: an exchange of packets, and the stores of rows at their places, which pass while later packets are on the
// wire. What comes on top: a row's place is its number among its expert's rows, in order of source and slot, so no row
// can be placed before the ids of all rows are there. So senders send the first tile of every row before all others; it
// holds the ids. Each block that receives looks at those of all rows, sets a bit for each expert and row, and counts
// bits: no block waits for another. With up to 32 tokens there is nothing to add up first, so one barrier stands
// between the ids and the stores, and a warp's first packets are on their way across it.
//
// What breaks if this changes: S2 (every signal is waited for, and every row's packets), S4 (the flags), S7 (senders
// wait for nobody: own rows, whose places depend on other ranks, are the receivers'), S9. The rest is speed alone.
#include <cuda_runtime.h>

#include "cuda/device/loads.cuh"
#include "cuda/dispatch/end.cuh"
#include "cuda/dispatch/ll128_places.cuh"
#include "cuda/dispatch/ll128_send.cuh"
#include "cuda/launch/launch.h"
#include "cuda/launch/loading.h"

namespace tw::cuda {
namespace {

// ---- Sending

// The first tiles of all rows come before the others; else tiles lie in order of rows.
struct Cut {
  uint32_t row;
  uint32_t number;
};
__device__ inline Cut cut_of(const ByExpertParams& x, uint32_t rows, uint32_t u) {
  if (u < rows) return {u, 0};
  const uint32_t row = divide(u - rows, x.rest);
  return {row, 1 + (u - rows) - row * x.rest.divisor};
}

// Gives a share as dispatch/ll128.cu counts it.
__device__ inline uint32_t usual_share(const ByExpertParams& x, uint32_t u) {
  const Cut cut = cut_of(x, static_cast<uint32_t>(x.call.tokens), u);
  return cut.row * x.call.tiles.per_row.divisor + cut.number;
}

template <int kGroups, bool kAlone>
__device__ inline void send_tiles(const Block& b, const ByExpertParams& x, const Routing<kAlone>& routing,
                                  Outgoing<kGroups> out, Loaded<kGroups> loaded) {
  const DispatchParams& p = b.p;
  const Shares shares = sent_shares(p.roles);
  const uint32_t all = static_cast<uint32_t>(p.tokens) * p.tiles.per_row.divisor;
  if (is_teller()) tell_counts(b, routing);
#pragma unroll 1
  for (uint32_t u = shares.first; u < all;) {
    const bool draws = all > shares.step;  // there are more than those that everybody begins with
    const uint32_t work_item =
        draw(work_counters(p.group, b.step), draws && lane() == 0);  // on its way while this tile is sent
    send_tile<kGroups, false>(b, routing.find(b, out.token), out, loaded);
    if (!draws) return;
    u = shares.step + __shfl_sync(~0u, work_item, 0);
    if (u >= all) return;
    out = Outgoing<kGroups>(p, usual_share(x, u));
    loaded = Loaded<kGroups>(out);
  }
}

// ---- Receiving

// A tile of a row that comes, or of one of this rank's own, on its way; and where it goes.
template <int kGroups>
struct Arrival {
  int source;
  int index;  // slot, or token of this rank's
  Tile tile;
  Words<kGroups, std::byte> words;  // of place 0
  Parts<1, kGroups> packets;
  uint32_t id;  // own, with the metadata: the lane()-th, and its weight
  uint32_t high;
  uint32_t weight;

  __device__ Arrival(const ByExpertParams& x, const Cut& cut, int index_of, int turn)
      : source(source_of(x, turn)),
        index(index_of),
        tile(tile_of(x.call.tiles, cut.number)),
        words(x.call, tile, [&](int q) { return x.view.payloads[q]; }),
        id(~0u),
        high(~0u),
        weight(kOne) {
    packets.cover(x.call.tiles, tile);
  }
  __device__ static int source_of(const ByExpertParams& x, int turn) {  // this rank is the last one
    const int ranks = x.call.group.map.shape().ranks;
    const int after = x.call.group.me + 1 + turn;
    return after < ranks ? after : after - ranks;
  }
  // Makes one from a share of all tiles.
  __device__ static Arrival make(const ByExpertParams& x, uint32_t u) {
    const Cut cut = cut_of(x, x.slots.divisor * x.ranks.divisor, u);
    const uint32_t index = divide(cut.row, x.ranks);
    return {x, cut, static_cast<int>(index), static_cast<int>(cut.row - index * x.ranks.divisor)};
  }
  __device__ bool is_own(const DispatchParams& p) const { return source == p.group.me; }

  // Looks at it for the first time. Its slot is there whether or not a row has come; a token may not be.
  __device__ void begin(const DispatchParams& p, const std::byte* window) {
    if (!is_own(p)) {
      packets.at[0] = window + packet_at(p.packets, p.bank, source, index) + packet_place(tile.begin);
      packets.look();
      return;
    }
    packets.at[0] = nullptr;
    if (index >= p.tokens) return;
    const Words<kGroups, const std::byte> from(
        p, tile, [&](int q) { return p.payloads[q].data + index * p.payloads[q].stride; });
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (from.has(g, 0)) packets.value[g][0].a = load_fresh<unsigned long long>(from.at(g, 0));
      if (from.has(g, 1)) packets.value[g][0].b = load_fresh<unsigned long long>(from.at(g, 1));
    }
    if (!has_meta(tile) || lane() >= p.group.map.shape().top_k) return;
    const Choice choice = load_choice(p, index, lane());
    id = choice.low, high = choice.high, weight = __float_as_uint(choice.weight);
  }

  // Looks on until all of it is there or the block knows all rows, which ends (S6): whoever has looked too early need
  // not look again behind the barrier, which takes as long as a flight. A row need not come.
  __device__ void watch(const Block& b, const RowPlaces& s) {
#pragma unroll 1
    while (__any_sync(~0u, packets.missing(b.step) >= 0) && !s.all_found()) packets.look();
  }

  // Stores it at a place.
  __device__ void store(const ByExpertParams& x, int64_t place) const {
    const Shape& shape = x.call.group.map.shape();
    Words<kGroups, std::byte> there = words;
#pragma unroll
    for (int q = 0; q < kFastPayloads; ++q) there.rows.at[q] += place * static_cast<int64_t>(shape.payload_bytes[q]);
    Vec16 pair[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) pair[g] = packets.value[g][0];
    there.store(pair);
  }
};

// Shows the caller a row's metadata at its places, and keeps it in the handle. `expert`, `nth`: of the lane()-th id.
template <int kGroups>
__device__ inline void take_head(const Block& b, const ByExpertParams& x, const RowPlaces& s,
                                 const Arrival<kGroups>& in, int expert, int64_t place, int32_t kept) {
  const DispatchParams& p = b.p;
  const int top_k = p.group.map.shape().top_k;
  const Vec16& pair = in.packets.value[0][0];
  uint32_t id = 0;
  uint32_t weight = in.weight;
  int slot = in.index;
  if (in.is_own(p)) {  // a sender keeps its words
    slot = s.own_slot(in.index);
    const Choice choice{in.id, in.high, 0.0f};
    id = static_cast<uint32_t>(find_slot(p, valid_id(p.in, choice.id(p.in)), in.index));
  } else {
    id = item_of(pair, lane());
    weight = item_of(pair, lane() + top_k);
    keep_items(b, row_at(p, in.source, slot), pair);
    if (lane() == 0) check_header(p, b.step, pair.a);
  }
  if (lane() >= top_k) return;
  const int64_t row = row_at(p, in.source, slot);
  p.handle.places[row * top_k + lane()] = {expert, kept};
  if (expert >= 0) show_choice(x.view, row, lane(), expert, static_cast<int32_t>(id), weight, place);
}

// Puts a tile, which has been looked at, to its places.
template <int kGroups, bool kAlone>
__device__ inline void place_tile(const Block& b, const ByExpertParams& x, const RowPlaces& s, Arrival<kGroups>& in) {
  const DispatchParams& p = b.p;
  const bool own = in.is_own(p);
  if (own ? !s.is_mine(in.index) : in.index >= s.came()[in.source]) return;
  const auto row = static_cast<uint32_t>(in.source * p.bound + in.index);
  const int expert = lane() < kFastIds ? s.experts()[row * kFastIds + static_cast<uint32_t>(lane())] : -1;
  const int nth = expert >= 0 ? s.nth<kAlone>(expert, row) : -1;
  const int64_t begin = expert >= 0 ? s.begin_of(expert) : 0;
  const auto source_of = [&](int) { return in.source; };
  if (!own && !await_packets(p.group, b.step, &in.packets, source_of, [](int) { return false; })) {
    if (lane() == 0) b.scratch.fail(in.source, twTimeout);
    return;
  }
  const Places places{begin + nth, __ballot_sync(~0u, expert >= 0), expert};
  places.each(places.place, [&](int64_t place) { in.store(x, place); });
  if (has_meta(in.tile)) {
    take_head(b, x, s, in, expert, places.place, static_cast<int32_t>(x.view.alignment > 0 ? begin : 0) + nth);
  }
}

// Receives, by a block. S2: `came` is there only when all signals are.
template <int kGroups, bool kAlone>
__device__ inline void receive(const Block& b, const ByExpertParams& x, const RowPlaces& s, Arrival<kGroups> in) {
  const DispatchParams& p = b.p;
  const Shares shares = received_shares(p.roles);
  const std::byte* const window = b.scratch.windows()[p.group.me];
  const uint32_t all = x.slots.divisor * x.ranks.divisor * p.tiles.per_row.divisor;
  find_rows<kAlone ? 1 : 4>(b, x, s);
  if (shares.first < all) {
    in.begin(p, window);
    if (kAlone) in.watch(b, s);
  }
  __syncthreads();
  if (*b.scratch.failed() != 0) return;  // all of the block's warps see it: rows have no places
  if (!kAlone || x.view.alignment > 0) s.add_up<kAlone>();
  show_counts(b, s);
  if (!kAlone) finish_experts<kAlone>(s, shares);  // while rows are on the wire
#pragma unroll 1
  for (uint32_t u = shares.first; u < all;) {
    place_tile<kGroups, kAlone>(b, x, s, in);
    u += shares.step;
    if (u >= all) break;
    in = Arrival<kGroups>::make(x, u);
    in.begin(p, window);
  }
  if (kAlone) finish_experts<kAlone>(s, shares);
}

// Makes safe what the caller sees after an error, by a block that has seen it, when all have done: no row has come.
__device__ __noinline__ static void clear_all(Block b, const ByExpertParams& x) {
  clear_failed(b);
  const ViewParams& v = x.view;
  const auto thread = static_cast<int>(threadIdx.x);
  const int32_t experts = v.group.local_experts;
  const int64_t slots = static_cast<int64_t>(x.slots.divisor) * x.ranks.divisor;
  show_empty(v, 0, v.alignment > 0 ? v.rows : experts * slots, thread, kThreads);
  for (int i = thread; i < b.ranks(); i += kThreads) v.handle.counts[i] = 0;
  for (int i = thread; i <= experts; i += kThreads) {
    if (v.offsets != nullptr) v.offsets[i] = 0;
    if (i < experts) v.handle.expert_counts[i] = v.shown.counts[i] = 0;
  }
}

// ---- The kernel

template <int kGroups, bool kAlone>
__global__ void __launch_bounds__(kThreads, 1) dispatch_by_expert_kernel(const __grid_constant__ ByExpertParams x) {
  const DispatchParams& p = x.call;
  let_next_begin();
  if (does_nothing_else(p)) return count_loads_apart(p);
  const GroupView& g = p.group;
  const Shape& shape = g.map.shape();
  const Scratch scratch(p);
  const RowPlaces s(x);
  const int thread = static_cast<int>(threadIdx.x);
  warm(x);
  if (thread < shape.ranks) {
    scratch.windows()[thread] = window_of(g, thread);
    scratch.source_error()[thread] = twSuccess;
  }
  if (thread == 0) *scratch.failed() = 0;
  fill_table(p, scratch);
  const bool sends = is_sender(p.roles);
  if (!sends) s.clear();
  const uint32_t none = static_cast<uint32_t>(p.tokens) * p.tiles.per_row.divisor;
  const uint32_t first = sends ? sent_shares(p.roles).first : none;
  Outgoing<kGroups> out(p, first < none ? usual_share(x, first) : none);
  std::byte* const bank = window_of(g, g.me) + g.map.bank(p.channel, p.bank);
  auto in = Arrival<kGroups>::make(x, sends ? 0 : received_shares(p.roles).first);
  IdsAt ids_from = ids_at(p, kAlone ? lane() : thread);
  IdsAt more_from = ids_at(p, kAlone ? p.tokens : thread + kRound);
  const bool routes = sends && (!kAlone || first < none || is_teller());
  if (!routes) ids_from.bytes = more_from.bytes = 0;
  out.pin();
  in.words.pin();
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
  if (usable && skips) usable = skip_step(g, step);
  if (sends && usable) send_tiles(b, x, routing, out, loaded);  // S7: nobody here waits
  const uint32_t arrived = begin_end(g, step, thread == 0);
  leave_status(b, digest, twSuccess);  // until a block that has seen an error knows all others to be done
  if (usable && !sends) receive<kGroups, kAlone>(b, x, s, in);
  if (!usable) give_up(b);
  finish_block(g, step, arrived, scratch.failed(), [&] { clear_all(b, x); });
}

using ByExpertKernel = void (*)(ByExpertParams);

// With few tokens a warp has one group at a time, and no block adds up before it places rows.
ByExpertKernel kernel_of(bool alone) {
  return alone ? dispatch_by_expert_kernel<1, true> : dispatch_by_expert_kernel<kByExpertGroups, false>;
}

}  // namespace

int launch_dispatch_by_expert(const ByExpertParams& params, int grid, bool early, void* stream) {
  const DispatchParams& call = params.call;
  const bool alone = call.bound <= kFewTokens && call.tiles.tile_groups == 1;
  return launch_kernel(kernel_of(alone), params, grid, params.at.bytes, early, stream);
}

int load_dispatch_by_expert(const Shape&) {
  for (const bool alone : {true, false}) {
    const int error = allow_shared(reinterpret_cast<const void*>(kernel_of(alone)), kMostShared);
    if (error != 0) return error;
  }
  return 0;
}

}  // namespace tw::cuda
