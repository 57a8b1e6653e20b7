// A sending warp's way through the tiles of all tokens: Simple rows, then packets.
//
// Takes a Block whose first round is marked, and what the warp has loaded already; afterwards every tile of every row
// is sent by some warp, and the last warp with Simple rows has published their signal.
//
// What breaks if this changes: S4 (finish_plain chains all sending warps before one fence), S7 (a warp waits for warps
// of its own block alone), and that each tile is drawn once. The order in which tiles go is speed alone.
#pragma once

#include "cuda/dispatch/send.cuh"

namespace tw::cuda {

// ---- Tiles by number, over all tokens in order. The first tile of a row has most to do, so another warp gets it from
// row to row.

struct Item {
  uint32_t row;
  Tile tile;
};
// Gives the row and the tile that number u is.
__device__ inline Item sent_item(const DispatchParams& p, uint32_t u) {
  const uint32_t wide = p.wide.tiles();
  const bool is_wide = u < wide;
  if (!is_wide) u -= wide;
  const Divider& divider = is_wide ? p.wide.per_row : p.tiles.per_row;
  const uint32_t parts = is_wide ? p.wide.parts : 1;
  const uint32_t per_row = divider.divisor;
  const uint32_t row = divide(u, divider);
  uint32_t number = u - row * per_row + row - divide(row, divider) * per_row;
  if (number >= per_row) number -= per_row;
  return {is_wide ? row : row + p.wide.rows, tile_of(p.tiles, number * parts, parts)};
}
// Gives the tiles of all rows before `token`, which is not among the wide rows.
__device__ inline uint32_t tiles_before(const DispatchParams& p, int32_t token) {
  return p.wide.tiles() + (static_cast<uint32_t>(token) - p.wide.rows) * p.tiles.per_row.divisor;
}

// Loads the tile that a warp begins with, in calls that are not usual.
__device__ inline void load_first(const DispatchParams& p, uint32_t u, Ahead* ahead) {
  const Item item = sent_item(p, u);
  const auto token = static_cast<int>(item.row);
  if (token < p.tokens) load_ahead<false>(p, token, item.tile, ahead);
}

// Gives how many warps begin with a tile; the other tiles are drawn from a work counter by whichever warp is free. The
// warp that routes later rounds begins with none.
__device__ inline uint32_t sending_warps(const DispatchParams& p) {
  return (p.tokens > kRound ? kWarps - 1 : kWarps) * static_cast<uint32_t>(p.roles.sending);
}

// ---- Simple rows, in usual calls

// A tile of a Simple row, and the first of its vectors that belong to this thread: found before it is known whether the
// tile exists, loaded before it is known where it goes.
struct PlainTile {
  bool there;
  Item item;
  uint32_t at;              // the thread's first vector, in bytes in a row of the first payload
  const std::byte* from;    // its address
  uint32_t vectors;         // the thread's vectors from there on
  const std::byte* second;  // its vector in the second payload; NULL: none of it is the thread's
  Vec16 even[kTileGroups];
  Vec16 odd[kTileGroups];  // the vectors behind `even`, if the tile is so wide
  Vec16 second_vector;

  // `is`: whether a tile of this number exists; otherwise nothing of it is loaded or sent.
  __device__ void find(const DispatchParams& p, uint32_t u, bool is) {
    there = is;
    item = sent_item(p, u);
    const auto row_of = [&](const PayloadIn& payload) {
      return payload.data + static_cast<int>(item.row) * payload.stride;
    };
    const auto first_of = [&](const PayloadIn& payload, uint32_t* count) {
      const Span span = span_of(payload, item.tile);
      const uint32_t v = span.begin + static_cast<uint32_t>(lane());
      *count = is && v < span.end ? (span.end - v + 31) / 32 : 0;
      return 16 * v;
    };
    at = first_of(p.payloads[0], &vectors);
    from = row_of(p.payloads[0]) + at;
    second = nullptr;
    if (p.group.map.shape().payloads < 2) return;
    uint32_t more = 0;
    const uint32_t second_at = first_of(p.payloads[1], &more);
    if (more > 0) second = row_of(p.payloads[1]) + second_at;
  }
  __device__ void pin() { cuda::pin(item.row, item.tile.number, item.tile.parts, at, from, vectors, second); }
  __device__ void bring_near(const DispatchParams& p) const {
    constexpr uint32_t kEach = 128 / 16;  // vectors
    const Span span = span_of(p.payloads[0], item.tile);
    const uint32_t v = span.begin + kEach * static_cast<uint32_t>(lane());
    if (there && v < span.end) cuda::prefetch(from + 16 * int64_t{v} - at);
  }
  __device__ void load(const DispatchParams& p) {
#pragma unroll
    for (uint32_t i = 0; i < 2 * kTileGroups; ++i) {
      if (i < vectors) (i < kTileGroups ? even : odd)[i % kTileGroups] = load_fresh<Vec16>(from + 512 * i);
    }
    if (second != nullptr) second_vector = load_fresh<Vec16>(second);
  }
};

// The tile of a Simple row with which a sending warp begins, in usual calls: found before the wait for the kernel
// before, and loaded in each pass (device/passes.cuh).
template <bool kFast>
struct FirstTile {
  bool is = false;  // there is such a tile
  PlainTile tile{};
  // As they were found: a rehearsal loads nothing.
  uint32_t vectors = 0;
  const std::byte* second = nullptr;

  // `u`: the warp's first tile, if it begins with one.
  __device__ FirstTile(const DispatchParams& p, uint32_t u, bool begins) {
    if (!kFast) return;
    is = begins && u < tiles_before(p, p.first_packet);
    tile.find(p, u, is);
    tile.pin();
    vectors = tile.vectors, second = tile.second;
  }
  __device__ int token() const { return static_cast<int>(tile.item.row); }
  // Begins a pass, before tile.load: a rehearsal loads nothing, and has zeros.
  __device__ void begin(bool real) {
    tile.vectors = real ? vectors : 0;
    tile.second = real ? second : nullptr;
    tile.there = real && is;
    for (int i = 0; i < kTileGroups; ++i) tile.even[i] = tile.odd[i] = {};
    tile.second_vector = {};
  }
};

// Calls use(to) for each rank of a mask; this rank, whose rows nobody waits for, comes last. `to`: thread i has that of
// rank i.
template <class Use>
__device__ inline void visit_ranks(int me, uint32_t ranks, std::byte* to, Use&& use) {
#pragma unroll 1
  while (ranks != 0) {
    const uint32_t others = ranks & ~bit_of(me);
    const int rank = __ffs(static_cast<int>(others != 0 ? others : ranks)) - 1;
    ranks &= ~bit_of(rank);
    use(reinterpret_cast<std::byte*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(to), rank)));
  }
}

// Sends vectors of a payload to all ranks of `ranks`, reading them once; thread i knows in `to` where the row lies at
// rank i. The first vectors are loaded already; those after them are on their way while others are stored.
__device__ inline void send_vectors(int me, const std::byte* from, Span span, uint32_t ranks, std::byte* to,
                                    Vec16 (&even)[kTileGroups], Vec16 (&odd)[kTileGroups]) {
  const auto store = [&](const Vec16* vectors) {
    visit_ranks(me, ranks, to, [&](std::byte* row) { store_vectors(row, span, vectors); });
  };
  constexpr uint32_t kAtOnce = 32 * kTileGroups;
#pragma unroll 1
  while (true) {
    store(even);
    span.begin += kAtOnce;
    if (span.begin >= span.end) return;
    load_vectors(from, {span.begin + kAtOnce, span.end}, even);
    store(odd);
    span.begin += kAtOnce;
    if (span.begin >= span.end) return;
    load_vectors(from, {span.begin + kAtOnce, span.end}, odd);
  }
}

// Sends a tile of a Simple row to all ranks of the row.
__device__ inline void send_plain(const Block& b, PlainTile* tile, const Target& target) {
  const DispatchParams& p = b.p;
  const uint32_t ranks = __ballot_sync(~0u, target.goes);
#pragma unroll 1
  for (int q = 0; q < p.group.map.shape().payloads; ++q) {
    const PayloadIn& payload = p.payloads[q];
    const std::byte* const from = payload.data + static_cast<int>(tile->item.row) * payload.stride;
    std::byte* const to = target.goes ? place_of(b, q, lane(), target.row) : nullptr;
    Span span = span_of(payload, tile->item.tile);
    if (!tile->there) span.end = span.begin;
    if (q > 0) {
      tile->even[0] = tile->second_vector;
      load_vectors<kTileGroups - 1>(from, {span.begin + 32, span.end}, tile->even + 1);
      load_vectors(from, {span.begin + 32 * kTileGroups, span.end}, tile->odd);
    }
    send_vectors(p.group.me, from, span, ranks, to, tile->even, tile->odd);
  }
}

// Sends the metadata of a row.
__device__ inline void send_metadata_row(const Block& b, int token, const Choice& choice, const Place& place) {
  __syncwarp();  // the warp's place is about to be overwritten
  stage_meta(b.p, b.scratch, b.step, token, choice);
  __syncwarp();
  send_metadata(b, token, false, place, 0, 0);
  keep_choice(b, token, __popc(__ballot_sync(~0u, place.goes)));
}
// Does so in a function of its own, apart from the loop that all warps run, because only one tile of a row has
// metadata. The choice is loaded here: when it was loaded with the row, there was no register for it, and a warp waited
// for it before asking for anything else.
__device__ __noinline__ static void send_metadata_apart(Block b, int token, Place place) {
  send_metadata_row(b, token, load_choice(b.p, token, lane()), place);
}

// Ends a warp's Simple rows; the last of all warps tells the peers. S4: each warp has synchronised its threads, then
// counters chain the warps, in the block and on the device, then one fence is made for the system.
__device__ __noinline__ static void finish_plain(Block b) {
  const DispatchParams& p = b.p;
  const GroupView& g = p.group;
  __syncwarp();
  int last = 0;
  if (lane() == 0) {
    __threadfence_block();
    last = atomicAdd(b.scratch.plain(), 1) == kWarps - 1;
    if (last) {
      __threadfence_block();  // the counter in the block is acquired too
      last = last_to_send(g, b.step, p.roles);
    }
  }
  if (!__shfl_sync(~0u, last, 0)) return;
  __syncwarp();                      // all threads have now synchronised with what thread 0 has
  if (p.first_packet == p.tokens) {  // there are no packets
    const int token = p.tokens - 1;
    const auto count = [&](int rank) {
      const int most = b.scratch.limit()[rank];  // in an exact layout: how many there are
      return p.handle.marks != nullptr ? most : min(b.scratch.through(token, rank), most);
    };
    return publish_signals(g, b.step, Mode::kDispatch, count);
  }
  fence_system();
  const uint64_t place = g.map.signal(b.step.channel, b.step.bank(), g.me) + kRowsOffset;
#pragma unroll 1
  for (int i = lane(); i < b.ranks(); i += 32) put_word(b.scratch.windows()[i] + place, b.step.number);
}

// ---- The loop over all tiles

// Tells how many rows go to a rank. The peer may learn it before the rows come, where packets certify themselves. The
// handle keeps it, because its combine checks what comes back. By one thread of one block. `known`: is_known.
__device__ inline void tell(const Block& b, int rank, int n, bool known) {
  const DispatchParams& p = b.p;
  if (blockIdx.x != 0) return;
  n = min(n, b.scratch.limit()[rank]);
  p.handle.send_counts[rank] = n;
  if (p.tokens > 0 && p.first_packet == p.tokens)
    return;  // there are no packets: a signal will say it when the rows are there
  const int plain = min(n, b.plain_before(rank));
  const Mode packets = known && plain > 0 ? Mode::kDispatchRows : Mode::kDispatchPackets;
  publish_signal(p.group, b.step, rank, p.group.packet_tokens > 0 ? packets : Mode::kDispatch, n, plain);
}

// Sends tiles of all tokens in order, round by round; the first round must be marked.
//
// A kernel that waits for another finds its instructions in no cache, and an instruction that a warp meets for the
// first time takes five times as long. So each kind of rows has a place of its own in the loop. And the warp that
// routes sends some of the last packets as soon as it has routed: so the blocks that send the other packets at the end,
// and the peers' blocks that take them, have met the instructions for it. `kPlaced`: all rounds are routed, and that
// warp begins with those packets.
//
// `first`: the warp's first tile in usual calls, loaded, if it is of a Simple row (`found`). `sent`: its payloads have
// been sent, but not its metadata. `ahead`: the first tile in other calls, loaded. `real`: otherwise this is a
// rehearsal with one tile of a Simple row. `known`: is_known.
template <Kind kKind, bool kPlaced>
__device__ inline void send(const Block& b, PlainTile first, bool found, bool sent, Ahead ahead, bool real,
                            bool known) {
  constexpr bool kFast = kKind != Kind::kGeneric;
  const DispatchParams& p = b.p;
  if (p.tokens == 0) {
#pragma unroll 1
    for (int rank = static_cast<int>(threadIdx.x); rank < b.ranks(); rank += kThreads) tell(b, rank, 0, known);
    return;
  }
  const uint32_t first_packet = tiles_before(p, p.first_packet);
  const uint32_t all = tiles_before(p, p.tokens);
  const uint32_t given = sending_warps(p);
  const auto blocks = static_cast<uint32_t>(p.roles.sending);
  uint32_t u = sent_shares(p.roles).first;
  const bool routes = real && p.tokens > kRound && u >= given;
  const uint32_t end = all - static_cast<uint32_t>(p.early);  // of the tiles that are drawn
  bool drawn = true;                                          // this tile was drawn, or given
  bool loaded = real && (!kFast || found);
  bool plain = p.first_packet > 0;  // there are Simple rows, and they are not finished yet
  int round = 0;
  uint32_t work_item = 0;
  const auto draw_next = [&] {  // the reply is on its way while this tile is sent
    work_item =
        draw(work_counters(p.group, b.step), real && end > given && (drawn || u + blocks >= all) && lane() == 0);
  };
  const auto find_next = [&] {
    if (!drawn && u + blocks < all) return u + blocks;
    drawn = true;
    const uint32_t next = given + __shfl_sync(~0u, work_item, 0);
    return end > given && next < end ? next : all;
  };
  const auto enter = [&](int last) {
#pragma unroll 1
    while (!kPlaced && round < last) await_round(b.scratch, ++round);
  };
  const auto told = [b, known](int rank, int n) { tell(b, rank, n, known); };
  if (kPlaced) {
#pragma unroll 1
    for (int rank = static_cast<int>(threadIdx.x); real && rank < b.ranks(); rank += kThreads) {
      told(rank, b.scratch.limit()[rank]);
    }
  } else if (real) {
    count_first(p, b.scratch, told);
  }
  if (routes) {
    if (!kPlaced) route_rest<kFast>(p, b.step, told);
    loaded = false;
    drawn = end + blockIdx.x >= all;
    u = end + blockIdx.x;
    if (drawn) {
      draw_next();
      u = find_next();
    }
  }
#pragma unroll 1
  while (u < all) {
    if (kFast && u < first_packet) {
      if (!loaded) {
        first.find(p, u, real);
        first.load(p);
      }
      const auto token = static_cast<int>(first.item.row);
      enter(token / kRound);
      const bool brings = real && !known && has_meta(first.item.tile);
      Choice choice{};
      if (kKind == Kind::kLowSm && brings) choice = load_choice(p, token, lane());
      const Place place = find_place<kPlaced>(p, b.scratch, token, 0);
      draw_next();
      // With the metadata behind the row, 8 SMs took 514 us instead of 439 to dispatch 4096 tokens: the warp had
      // nothing on its way.
      if (kKind == Kind::kLowSm && brings) send_metadata_row(b, token, choice, place);
      if (!sent) send_plain(b, &first, real ? b.target(place) : Target{lane() == 0, 0});
      sent = false;
      if (kKind != Kind::kLowSm && brings) send_metadata_apart(b, token, place);
      if (!real) return;
    } else {
      const Item item = sent_item(p, u);
      const auto token = static_cast<int>(item.row);
      if (!loaded) load_ahead<kFast>(p, token, item.tile, &ahead);
      enter(token / kRound);
      draw_next();
      if (plain && drawn && u >= first_packet) finish_plain(b), plain = false;
      send_tile<kFast, kPlaced>(b, token, item.tile, &ahead, known);
    }
    loaded = false;
    u = find_next();
  }
  if (!real) return;
  enter((p.tokens - 1) / kRound);
  if (plain) finish_plain(b);
}

}  // namespace tw::cuda
