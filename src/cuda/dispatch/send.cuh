// The sending side of a dispatch, a tile at a time: warps work alone, each on a tile of a row, and wait for nobody here
// (S7).
//
// Takes a token, a tile and where the row goes (Place, Target); stores packets or Simple rows at the receivers,
// metadata with the first tile of a row, and the handle's copy of the routing.
//
// What breaks if this changes: S9 and S10 (a row goes to its slot, packets to the place that follows from bank, source
// and index), and the bits of what arrives. That the own row comes last, and how vectors are grouped, is speed alone.
#pragma once

#include "cuda/device/metadata.cuh"

namespace tw::cuda {

// Gives what a dispatch notes beside its bound. `map`: the digest of the map that its ids come from.
__device__ inline uint32_t digest_of(const DispatchParams& p, uint32_t map) {
  return mix_rows(mix_counted(map, p.counted != 0), p.rows_digest);
}

// Where a row goes, as thread i of the warp knows it for rank i: whether it goes there, and its row number there.
struct Target {
  bool goes;
  uint64_t row;
};

// What the warps of a block work with: the parameters, shared memory and the step.
struct Block {
  const DispatchParams& p;
  Scratch scratch;
  Step step;
  std::byte* bank;  // the step's bank, in this rank's window

  __device__ int ranks() const { return p.group.map.shape().ranks; }
  // row() gives where the row in a slot of a source lies in this rank's window; row_at() gives where this rank's row in
  // a slot lies at another rank.
  __device__ int64_t row(int source, int slot) const { return int64_t{scratch.here()[source]} + slot; }
  __device__ uint64_t row_at(int rank, int slot) const {
    return static_cast<uint64_t>(int64_t{scratch.there()[rank]} + slot);
  }
  // Gives the target in usual calls. `place`: for rank lane().
  __device__ Target target(const Place& place) const {
    if (!place.goes || place.slot >= scratch.limit()[lane()]) return {false, 0};
    return {true, row_at(lane(), place.slot)};
  }
  __device__ uint32_t meta_words() const { return 1 + static_cast<uint32_t>(p.group.map.shape().top_k); }
  // Gives the Simple rows for a rank; known when the round of the first packet is routed.
  __device__ int plain_before(int rank) const { return p.first_packet > 0 ? scratch.before_packets()[rank] : 0; }
};

// Whether a tile holds the row's metadata: all of it lies in the first.
__device__ inline bool has_meta(const Tile& tile) { return tile.number == 0; }

// Prepares what a block's warps share, before a barrier.
__device__ inline void begin_block(const DispatchParams& p, const Scratch& scratch) {
  const int thread = static_cast<int>(threadIdx.x);
  if (p.table) fill_table(p, scratch);
#pragma unroll 1
  for (int i = thread; i < p.group.map.shape().ranks; i += kThreads) {
    scratch.windows()[i] = target_of(p.group, i, p.send);
    scratch.base(0)[i] = 0;
    scratch.source_error()[i] = twSuccess;
  }
  if (thread == 0) *scratch.failed() = 0, *scratch.plain() = 0, *scratch.routed() = 1;
  if (thread < kWarps) scratch.progress()[thread] = 0;
}

// What a warp has loaded of a tile before it knows where the row goes.
struct Ahead {
  Vec16 pair[kTileGroups];  // words of packets, or vectors of the first payload as it lies, if it allows 16 bytes at a
                            // time
  Choice choice;
};

// The vectors of a payload's row that belong to a tile.
struct Span {
  uint32_t begin;
  uint32_t end;
};
__device__ inline Span span_of(const PayloadIn& payload, const Tile& tile) {
  const uint32_t begin = tile.number * payload.per_tile;
  return {begin, min(payload.vectors, begin + tile.parts * payload.per_tile)};
}

// Load and store the first vectors of a span of a row.
template <int kCount = kTileGroups>
__device__ inline void load_vectors(const std::byte* row, const Span& span, Vec16* vectors) {
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) {
    const uint32_t v = span.begin + static_cast<uint32_t>(lane()) + 32 * i;
    if (v < span.end) vectors[i] = load_fresh<Vec16>(row + uint64_t{16} * v);
  }
}
__device__ inline void store_vectors(std::byte* row, const Span& span, const Vec16* vectors) {
#pragma unroll
  for (uint32_t i = 0; i < kTileGroups; ++i) {
    const uint32_t v = span.begin + static_cast<uint32_t>(lane()) + 32 * i;
    if (v < span.end) put_data(reinterpret_cast<Vec16*>(row) + v, vectors[i]);
  }
}

// The metadata of an exact layout's rows travels once: until counts are exchanged again, its receivers have it
// (PROTOCOL_ON_DEVICES.md, rows alone). `since` is the low half of the step that brought it; 0 means that none has, and
// this very step's number may be found by a block that comes late. is_known says whether receivers have it. (A dispatch
// of 4096 tokens took 2 us longer with metadata.)
__device__ inline uint32_t load_since(const DispatchParams& p) {
  return p.handle.metadata_step == nullptr ? 0 : load_fresh<uint32_t>(p.handle.metadata_step);
}
__device__ inline bool is_known(const Step& step, uint32_t since) { return since != 0 && since != step.low(); }

// Loads a tile of a token's row; in usual calls the row must be packets.
template <bool kFast>
__device__ inline void load_ahead(const DispatchParams& p, int token, const Tile& tile, Ahead* ahead) {
  if (has_meta(tile)) ahead->choice = load_choice(p, token, lane());
  const PayloadIn& payload = p.payloads[0];
  if (kFast || token >= p.first_packet) {
    load_words<kFast>(p, token, tile, ahead->pair);
  } else if (payload.width == 16) {
    load_vectors(payload.data + token * payload.stride, span_of(payload, tile), ahead->pair);
  }
}

// Sends a tile of a row's packets to another rank. `position`: that rank's among the token's ranks.
__device__ inline void send_packets(const Block& b, const Tile& tile, int rank, int slot, int position,
                                    const Ahead& ahead) {
  Parts<1> parts;
  parts.cover(b.p.tiles, tile);
  std::byte* const packet = b.scratch.windows()[rank] +
                            packet_at(b.p.packets, b.step.bank(), b.p.group.me, slot - b.plain_before(rank)) +
                            packet_place(tile.begin);
  // The header's second half says which of the token's ranks this is.
  const uint64_t header = first_word(tile.begin) == 0 ? static_cast<uint64_t>(position) << 32 : 0;
  const bool together = is_together();
#pragma unroll
  for (int g = 0; g < kTileGroups; ++g) {
    if (g >= parts.groups) continue;
    store_packet(together, packet + g * kGroupBytes, g == 0 ? ahead.pair[g].a | header : ahead.pair[g].a,
                 is_flag() ? b.step.number : ahead.pair[g].b);
  }
}

template <class V>
__device__ inline void copy_span(const std::byte* from, std::byte* to, const Span& span) {
#pragma unroll 1
  for (uint32_t v = span.begin + static_cast<uint32_t>(lane()); v < span.end; v += 32) {
    put_data(reinterpret_cast<V*>(to) + v, load_fresh<V>(from + sizeof(V) * v));
  }
}
__device__ __noinline__ static void copy_narrow(const std::byte* from, std::byte* to, Span span, int width) {
  if (width >= 4) {
    copy_span<uint32_t>(from, to, span);
  } else {
    copy_span<unsigned char>(from, to, span);
  }
}

// Gives where a payload's rows begin in a rank's window, if not in the bank; else 0.
__device__ inline uint64_t load_receive_offsets(const DispatchParams& p, int payload, int rank) {
  if (!p.has_offsets) return 0;
  return load_fresh<unsigned long long>(p.handle.receive_offset + rank * p.group.map.shape().payloads + payload);
}
// Gives where a payload of a row lies in a window. `receive_offset`: from load_receive_offsets.
__device__ inline std::byte* row_in(const DispatchParams& p, const Step& step, std::byte* window, int payload,
                                    uint64_t row, uint64_t receive_offset) {
  const WindowMap& map = p.group.map;
  if (receive_offset != 0) return window + receive_offset + row * map.shape().payload_bytes[payload];
  return window + map.payload_row(step.channel, step.bank(), payload, row);
}
// Gives where it lies at a rank.
__device__ inline std::byte* place_of(const Block& b, int payload, int rank, uint64_t row) {
  return row_in(b.p, b.step, b.scratch.windows()[rank], payload, row, load_receive_offsets(b.p, payload, rank));
}

// Sends a tile of a Simple row to one of its ranks, in a call of any kind.
__device__ inline void send_any(const Block& b, int token, const Tile& tile, int rank, int slot, const Ahead& ahead) {
  const DispatchParams& p = b.p;
#pragma unroll 1
  for (int q = 0; q < p.group.map.shape().payloads; ++q) {
    const PayloadIn& payload = p.payloads[q];
    Span span = span_of(payload, tile);
    std::byte* const to = place_of(b, q, rank, b.row_at(rank, slot));
    const std::byte* const from = payload.data + token * payload.stride;
    if (payload.width != 16) {
      copy_narrow(from, to, span, payload.width);
      continue;
    }
    if (q == 0) {
      store_vectors(to, span, ahead.pair);
      span.begin += 32 * kTileGroups;
    }
    copy_span<Vec16>(from, to, span);
  }
}

// Stores header, ids and weights of a row at their place in a rank's window; gives the header.
__device__ inline uint64_t place_meta(const Block& b, int rank, int slot, int position) {
  const DispatchParams& p = b.p;
  const uint64_t* const words = b.scratch.meta();
  const uint64_t header = words[0] | static_cast<uint64_t>(position) << 32;
  auto* const row = reinterpret_cast<uint64_t*>(
      b.scratch.windows()[rank] + p.group.map.meta_row(b.step.channel, b.step.bank(), b.row_at(rank, slot)));
#pragma unroll 1
  for (uint32_t w = static_cast<uint32_t>(lane()); w < b.meta_words(); w += 32)
    put_data(row + w, w == 0 ? header : words[w]);
  return header;
}
// Sends a row's metadata to another rank: as packets, so that it need not wait for the signal behind all rows before
// taking it.
__device__ inline void send_meta(const Block& b, int rank, int slot, int position) {
  const DispatchParams& p = b.p;
  if (p.group.packet_tokens == 0) {
    place_meta(b, rank, slot, position);
    return;
  }
  const uint64_t* const words = b.scratch.meta();
  std::byte* const packet =
      b.scratch.windows()[rank] + p.group.map.meta_packet(b.step.channel, b.step.bank(), b.row_at(rank, slot));
  const uint64_t header = first_word(0) == 0 ? static_cast<uint64_t>(position) << 32 : 0;
#pragma unroll 1
  for (uint32_t g = 0; packet_place(g) < p.group.map.meta_packet_row(); ++g) {
    const uint32_t w = first_word(g);
    const uint64_t a = w < b.meta_words() ? words[w] : 0;
    const uint64_t second = w + 1 < b.meta_words() ? words[w + 1] : 0;
    const bool together = is_together();
    store_packet(together, packet + packet_place(g), g == 0 ? a | header : a, is_flag() ? b.step.number : second);
  }
}
// Stores the metadata of a row that stays here, and takes it at once.
__device__ inline void take_own(const Block& b, int slot, int position) {
  const uint64_t header = place_meta(b, b.p.group.me, slot, position);
  take_meta(b.p, b.scratch, b.step, b.row(b.p.group.me, slot), b.scratch.meta(), header);
}

// Keeps a token's routing in the handle, for its combine and later dispatches.
__device__ inline void keep_choice(const Block& b, int token, int fan) {
  const DispatchParams& p = b.p;
  const int top_k = p.group.map.shape().top_k;
  if (lane() == 0) p.handle.fan[token] = fan;
  if (p.in.own) return;
  const auto* const items = reinterpret_cast<const uint32_t*>(b.scratch.meta() + 1);
#pragma unroll 1
  for (int k = lane(); k < top_k; k += 32) {
    p.handle.ids[int64_t{token} * top_k + k] = static_cast<int32_t>(items[k]);
    p.handle.weights[int64_t{token} * top_k + k] = __uint_as_float(items[top_k + k]);
  }
}

// Puts the metadata in front of a tile's words.
template <bool kFast>
__device__ inline void put_meta(const Block& b, const Tile& tile, Ahead* ahead) {
#pragma unroll
  for (int g = 0; g < (kFast ? 1 : kMetaGroups); ++g) {
    const uint32_t w = first_word(tile.begin + g);
    if (w < b.meta_words()) ahead->pair[g].a = b.scratch.meta()[w];
    if (w + 1 < b.meta_words() && !is_flag()) ahead->pair[g].b = b.scratch.meta()[w + 1];
  }
}

// Sends a token's metadata, which is staged in the warp's place, to those of its ranks from `base` on; thread i of the
// warp knows the i-th of them in `place`. Packets carry it themselves. `before`: how many of the token's ranks are
// below `base`.
__device__ inline void send_metadata(const Block& b, int token, bool packets, const Place& place, int base,
                                     int before) {
  const uint32_t all = __ballot_sync(~0u, place.goes);
  const auto me = static_cast<uint32_t>(b.p.group.me - base);
#pragma unroll 1
  for (uint32_t left = packets ? all & bit_of(static_cast<int>(me)) : all; left != 0; left &= left - 1) {
    const int i = __ffs(static_cast<int>(left)) - 1;
    const int slot = __shfl_sync(~0u, place.slot, i);
    const int position = before + __popc(all & below(i));
    if (slot >= b.scratch.limit()[base + i]) continue;  // the receiver has no room for it
    if (i == static_cast<int>(me)) {
      take_own(b, slot, position);
    } else if (!packets) {
      send_meta(b, base + i, slot, position);
    }
  }
  if (!place.goes) return;
  const int64_t at = int64_t{token} * b.p.group.map.shape().fan_out() + before + __popc(all & below(lane()));
  b.p.handle.destinations[at] = {base + lane(), place.slot};
}

// Sends a tile of a token's row to all its ranks, ascending; in usual calls the row must be packets. `known`: is_known.
template <bool kFast, bool kPlaced>
__device__ inline void send_tile(const Block& b, int token, const Tile& tile, Ahead* ahead, bool known) {
  const DispatchParams& p = b.p;
  const bool packets = kFast || token >= p.first_packet;
  const bool brings = has_meta(tile) && (packets || !known);
  if (brings) {
    __syncwarp();  // the warp's place is about to be overwritten
    stage_meta(p, b.scratch, b.step, token, ahead->choice);
    __syncwarp();
    if (packets) put_meta<kFast>(b, tile, ahead);
  }
  int before = 0;  // ranks of the token below base
#pragma unroll 1
  for (int base = 0; base < (kFast ? 1 : b.ranks()); base += kRanksAtOnce) {
    const Place place = find_place<kPlaced>(p, b.scratch, token, base);
    const uint32_t all = __ballot_sync(~0u, place.goes);
    const auto me = static_cast<uint32_t>(p.group.me - base);
    const uint32_t own = me < kRanksAtOnce ? all & 1u << me : 0;
#pragma unroll 1
    for (uint32_t others = all & ~own; others != 0; others &= others - 1) {
      const int i = __ffs(static_cast<int>(others)) - 1;
      const int slot = __shfl_sync(~0u, place.slot, i);
      const int position = before + __popc(all & below(i));
      if (slot >= b.scratch.limit()[base + i]) continue;  // the receiver has no room for it
      if (packets) {
        send_packets(b, tile, base + i, slot, position, *ahead);
      } else if (!kFast) {
        send_any(b, token, tile, base + i, slot, *ahead);
      }
    }
    if (own != 0) {  // what nobody waits for comes last
      const int slot = __shfl_sync(~0u, place.slot, static_cast<int>(me));
      const bool goes = slot < b.scratch.limit()[p.group.me];
      if (goes && packets) {
        place_words<kFast>(p, b.bank, b.row(p.group.me, slot), tile, tile.end - tile.begin, ahead->pair);
      } else if (goes && !kFast) {
        send_any(b, token, tile, p.group.me, slot, *ahead);
      }
    }
    if (brings) send_metadata(b, token, packets, place, base, before);
    before += __popc(all);
  }
  if (brings) keep_choice(b, token, before);
}

// Where a rank's rows begin in this rank's window (`here`), where this rank's begin in that rank's (`there`), and how
// many of those it has room for (`limit`).
struct Begins {
  int32_t here;
  int32_t there;
  int32_t limit;
};
// Loads them for a rank; ranks beyond the group get places that nobody uses.
__device__ inline Begins load_begins(const DispatchParams& p, int rank) {
  const int ranks = p.group.map.shape().ranks;
  Begins at{rank * p.bound, source_at(p.group, rank) * p.bound, INT32_MAX};
  if (rank >= ranks || !p.group.map.shape().exact()) return at;
  const auto low_half = [&](const void* of) { return static_cast<int32_t>(load_fresh<uint32_t>(of)); };
  at.here = low_half(p.handle.source + rank);
  if (places_rows(p.group)) at.there = low_half(p.handle.begin + rank);
  at.limit = low_half(p.handle.sent_rows + p.group.me * ranks + rank);
  return at;
}
__device__ inline void bring_begins_near(const DispatchParams& p, int rank) {
  if (!p.group.map.shape().exact()) return;
  prefetch(p.handle.source + rank);
  prefetch(p.handle.begin + rank);
  prefetch(p.handle.sent_rows + p.group.me * p.group.map.shape().ranks + rank);
  if (p.has_offsets) prefetch(p.handle.receive_offset + rank * p.group.map.shape().payloads);
}
// Keeps those of all ranks for the block, before a barrier. `at`: for rank threadIdx.x; threads beyond the ranks may
// have anything.
template <bool kFast>
__device__ inline void keep_begins(const DispatchParams& p, const Scratch& scratch, Begins at) {
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < p.group.map.shape().ranks; i += kThreads) {
    scratch.here()[i] = at.here;
    scratch.there()[i] = at.there;
    scratch.limit()[i] = at.limit;
    if (kFast) return;  // there are no more than 32 ranks
    at = load_begins(p, i + kThreads);
  }
}

// Gives the slots of a source, filled or not: in an exact layout, the rows that it announced.
__device__ inline int expected_rows(const Block& b, int source) {
  if (!b.p.group.map.shape().exact()) return b.p.bound;
  return static_cast<int>(load_fresh<unsigned long long>(b.p.handle.source + source + 1)) - b.scratch.here()[source];
}

}  // namespace tw::cuda
