// The sending side of dispatches whose rows all travel as packets (dispatch/ll128.cu and ll128_by_expert.cu): routing,
// and a tile of a token's row to all its ranks.
//
// Takes DispatchParams and a share of the work; gives packets at the receivers, the handle's copy of the routing, and
// the signals. What becomes of this rank's own rows is the caller's.
//
// What breaks if this changes: S4 (the flags), S7 (nobody here waits), S9 (slots), and the bits of what receivers see.
// The order of everything else is speed alone.
#pragma once

#include "cuda/dispatch/ll128_tiles.cuh"

namespace tw::cuda {

// ---- Routing. With up to 32 tokens each warp makes it by itself, in registers; with more, up to two rounds, a block
// does.

template <bool kAlone>
struct Routing {
  uint32_t going = 0;  // alone: which tokens go to rank lane()

  // Makes the routing. `ids`: of token lane(), or, before a barrier, of token threadIdx.x; `more`: of the same token of
  // the second round.
  __device__ void make(const DispatchParams& p, const Scratch& scratch, const Ids& ids, const Ids& more) {
    if (kAlone) {
      going = route_warp<true>(p, scratch, lane(), 0, ids);
      return;
    }
    const auto token = static_cast<int>(threadIdx.x);
    mark_tokens<true>(p, scratch, token, ids, scratch.marks(token));
    if (p.tokens > kRound) mark_tokens<true>(p, scratch, token + kRound, more, scratch.marks(token + kRound));
  }
  // Gives whether a token goes to rank lane(), and its slot there.
  __device__ Place find(const Block& b, int token) const {
    if (kAlone) return {(going >> token & 1) != 0, __popc(going & below(token))};
    if (lane() >= b.ranks() || !b.scratch.goes(token, lane())) return {false, 0};
    return {true, b.scratch.before_packet(token, lane())};
  }
  // Gives how many tokens go to a rank.
  __device__ int count(const Block& b, int rank) const {
    if (kAlone) return __popc(__shfl_sync(~0u, going, rank));
    return rank < b.ranks() ? b.scratch.packets(b.p.tokens, rank) : 0;
  }
};

// ---- Sending

// A tile of a token's row and what this thread loads of it; with it, if the metadata lies there, the token's lane()-th
// id and weight.
template <int kGroups>
struct Outgoing {
  int token;
  Tile tile;
  Words<kGroups, const std::byte> words;
  uint32_t groups;        // groups in which the thread has a part of a packet
  uint64_t packet;        // its place in a window, for slot 0
  const std::byte* id;    // nullptr: none
  const std::byte* high;  // the upper half of an id of 64 bits
  const std::byte* weight;

  __device__ Outgoing(const DispatchParams& p, uint32_t u);
  __device__ void pin() {
    words.pin();
    cuda::pin(token, tile.number, tile.begin, tile.end, groups, packet, id, high, weight);
  }
};

template <int kGroups>
__device__ inline Outgoing<kGroups>::Outgoing(const DispatchParams& p, uint32_t u)
    : token(static_cast<int>(divide(u, p.tiles.per_row))),
      tile(tile_of(p.tiles, u - static_cast<uint32_t>(token) * p.tiles.per_row.divisor)),
      words(p, tile, [&](int q) { return p.payloads[q].data + token * p.payloads[q].stride; }),
      groups(part_of(p.tiles, tile)),
      packet(p.packets.bank[p.bank] + static_cast<uint32_t>(p.group.me) * p.packets.source + packet_place(tile.begin)),
      id(nullptr),
      high(nullptr),
      weight(nullptr) {
  if (token >= p.tokens) {
    words.which = 0;
    return;
  }
  if (!has_meta(tile) || lane() >= p.group.map.shape().top_k) return;
  const int64_t at = token * p.in.id_stride[0] + lane();
  id = static_cast<const std::byte*>(p.in.ids) + (at << (p.in.wide ? 3 : 2));
  if (p.in.wide) high = id + sizeof(uint32_t);
  if (p.in.weights == nullptr) return;
  weight =
      reinterpret_cast<const std::byte*>(p.in.weights + token * p.in.weight_stride[0] + lane() * p.in.weight_stride[1]);
}

constexpr uint32_t kOne = 0x3f800000;  // 1.0f

// All of that, loaded: it is on its way at once, and nothing is made of it yet.
template <int kGroups>
struct Loaded {
  Vec16 pair[kGroups];
  uint32_t id;
  uint32_t high;
  uint32_t weight;

  __device__ explicit Loaded(const Outgoing<kGroups>& out) : id(~0u), high(~0u), weight(kOne) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      pair[g] = {};
      if (out.words.has(g, 0)) pair[g].a = load_fresh<unsigned long long>(out.words.at(g, 0));
      if (out.words.has(g, 1)) pair[g].b = load_fresh<unsigned long long>(out.words.at(g, 1));
    }
    if (out.id != nullptr) id = load_fresh<uint32_t>(out.id);
    if (out.high != nullptr) high = load_fresh<uint32_t>(out.high);
    if (out.weight != nullptr) weight = load_fresh<uint32_t>(out.weight);
  }
  __device__ Choice choice() const { return {id, high, __uint_as_float(weight)}; }
};

// Keeps a token's routing in the handle.
__device__ inline void keep_token(const Block& b, int token, const Place& place, uint32_t ranks, uint32_t item,
                                  const Choice& choice) {
  const DispatchParams& p = b.p;
  const Shape& shape = p.group.map.shape();
  if (lane() == 0) p.handle.fan[token] = __popc(ranks);
  if (place.goes) {
    p.handle.destinations[token * shape.fan_out() + __popc(ranks & below(lane()))] = {lane(), place.slot};
  }
  if (p.in.own || lane() >= shape.top_k) return;
  p.handle.ids[token * shape.top_k + lane()] = static_cast<int32_t>(item);
  p.handle.weights[token * shape.top_k + lane()] = choice.weight;
}

// Sends a tile of a token's row to all its ranks. kOwn: this rank's own rows are stored where rows arrive, with their
// metadata; else the handle alone gets that, and whoever receives takes the row from the caller's tensor.
template <int kGroups, bool kOwn>
__device__ inline void send_tile(const Block& b, const Place& place, const Outgoing<kGroups>& out,
                                 Loaded<kGroups> loaded) {
  const DispatchParams& p = b.p;
  Vec16& pair = loaded.pair[0];
  const Choice choice = loaded.choice();
  uint32_t item = 0;
  if (has_meta(out.tile)) {
    item = checked_item(b, out.token, choice);
    put_items(b, out.token, item, &pair);
  }
  const uint32_t ranks = __ballot_sync(~0u, place.goes);
  const uint32_t own = ranks & 1u << p.group.me;
  // The header's second half says which of the token's ranks this is.
  const bool header = has_meta(out.tile) && lane() == 0;
  const auto addressed = [&](int rank) {
    return header ? pair.a | static_cast<uint64_t>(__popc(ranks & below(rank))) << 32 : pair.a;
  };
#pragma unroll 1
  for (uint32_t others = ranks & ~own; others != 0; others &= others - 1) {
    const int rank = __ffs(static_cast<int>(others)) - 1;
    const auto slot = static_cast<uint32_t>(__shfl_sync(~0u, place.slot, rank));
    std::byte* const to = b.scratch.windows()[rank] + out.packet + uint64_t{slot} * p.packets.row;
    const uint64_t first = addressed(rank);
    const bool together = is_together();
#pragma unroll
    for (uint32_t g = 0; g < kGroups; ++g) {
      if (g >= out.groups) continue;
      store_packet(together, to + g * kGroupBytes, g == 0 ? first : loaded.pair[g].a,
                   is_flag() ? b.step.number : loaded.pair[g].b);
    }
  }
  if (own != 0) {  // what nobody waits for comes last
    const int64_t row = row_at(p, p.group.me, __shfl_sync(~0u, place.slot, p.group.me));
    if constexpr (kOwn) {
      words_here<kGroups>(p, b.bank, row, out.tile).store(loaded.pair);
      if (has_meta(out.tile)) {
        take_items(b, ItemsAt(p, b.bank, row), {addressed(p.group.me), pair.b}, item, loaded.weight);
      }
    } else if (has_meta(out.tile)) {
      keep_items(b, row, {addressed(p.group.me), pair.b});
    }
  }
  if (has_meta(out.tile)) keep_token(b, out.token, place, ranks, item, choice);
}

// Whether this is the warp that has least to send; it tells how many rows go to each rank.
__device__ inline bool is_teller() { return blockIdx.x == 0 && threadIdx.x / 32 == kWarps - 1; }
template <bool kAlone>
__device__ inline void tell_counts(const Block& b, const Routing<kAlone>& routing) {
  const DispatchParams& p = b.p;
  const int n = routing.count(b, lane());
  if (lane() >= b.ranks()) return;
  publish_signal(p.group, b.step, lane(), Mode::kDispatchPackets, n, 0);
  p.handle.send_counts[lane()] = n;
}

}  // namespace tw::cuda
