// Tiles of a bulk combine's sums: in whole vectors where everything that is summed lies as rows do, otherwise by the
// geometry of packets.
//
// Takes a token, a tile and the token's destinations; waits for what must be in the inbox, and gives that part of the
// token's sum in the output, or NaN for the token and *failed.
//
// What breaks if this changes: the bits of results. Every way here adds the terms in order of positions, from the first
// term on, rounded once at the end (S9). Which way a tile takes is speed alone.
#pragma once

#include "cuda/combine/sums.cuh"

namespace tw::cuda {

// Stores 16 bytes' worth of the wire's type, summed as floats, as elements of the output's type.
template <twDtype_t kWire, bool kFast>
__device__ inline void store_sums(const CombineParams& p, std::byte* out, uint32_t vector, const Quad& low,
                                  const Quad& high) {
  if (kWire == twFloat32) {  // 4 elements: two in each quad
    const float v[4] = {low.v[0], low.v[1], high.v[0], high.v[1]};
    if (kFast || p.out_dtype == twFloat32) {
      reinterpret_cast<float4*>(out)[vector] = make_float4(v[0], v[1], v[2], v[3]);
    } else {
      reinterpret_cast<uint2*>(out)[vector] =
          make_uint2(narrow_two(p.out_dtype, v[0], v[1]), narrow_two(p.out_dtype, v[2], v[3]));
    }
    return;
  }
  const twDtype_t to = kFast ? kWire : p.out_dtype;
  if (to == twFloat32) {
    reinterpret_cast<float4*>(out)[2 * vector] = make_float4(low.v[0], low.v[1], low.v[2], low.v[3]);
    reinterpret_cast<float4*>(out)[2 * vector + 1] = make_float4(high.v[0], high.v[1], high.v[2], high.v[3]);
    return;
  }
  reinterpret_cast<uint4*>(out)[vector] =
      make_uint4(narrow_two(to, low.v[0], low.v[1]), narrow_two(to, low.v[2], low.v[3]),
                 narrow_two(to, high.v[0], high.v[1]), narrow_two(to, high.v[2], high.v[3]));
}
// Sums a tile of a token in whole vectors, where own rows are plain and all else lies in the inbox.
template <twDtype_t kWire, bool kFast>
__device__ inline void sum_vectors(const Sum& s, int token, int fan, const Tile& tile) {
  constexpr int kAtOnce = 3;
  constexpr int kPairs = 2;  // terms that are loaded before the first of them is added
  const CombineParams& p = s.p;
  const uint32_t end = min(p.vectors, (tile.number + tile.parts) * p.per_tile);
  const std::byte** const places = s.places();
  std::byte* const out = p.out + static_cast<int64_t>(token) * p.out_stride;
#pragma unroll 1
  for (uint32_t base = tile.number * p.per_tile + lane(); base < end; base += 32 * kAtOnce) {
    Quad low[kAtOnce] = {};
    Quad high[kAtOnce] = {};
#pragma unroll 1
    for (int position = 0; position < fan; position += kPairs) {
      uint4 term[kAtOnce][kPairs];
#pragma unroll
      for (int t = 0; t < kPairs; ++t) {
        if (position + t >= fan) continue;
        const auto* const row = reinterpret_cast<const uint4*>(places[position + t]);
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u) {
          if (base + 32 * u < end) term[u][t] = load_fresh<uint4>(row + base + 32 * u);
        }
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
#pragma unroll
        for (int t = 0; t < kPairs; ++t) {
          if (position + t >= fan) continue;
          add(&low[u], widen_word(kWire, low_half(term[u][t])), position + t == 0);
          add(&high[u], widen_word(kWire, high_half(term[u][t])), position + t == 0);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (base + 32 * u < end) store_sums<kWire, kFast>(p, out, base + 32 * u, low[u], high[u]);
    }
  }
}

constexpr uint32_t kLongTile = 256;  // vectors

// Sums a long tile of two terms, as most tokens have between two ranks. What comes next is on its way while this is
// summed: with few SMs, what a warp has in flight is what limits a combine. (The compiler keeps loads that depend on a
// condition, as those of any number of terms do, in memory, for which it has to wait.)
template <twDtype_t kWire, bool kFast>
__device__ inline void sum_two(const Sum& s, int token, const Tile& tile) {
  constexpr uint32_t kAtOnce = 2;
  struct Loaded {
    uint4 term[kAtOnce][2];
  };
  const CombineParams& p = s.p;
  const uint32_t begin = tile.number * p.per_tile;
  const uint32_t end = min(p.vectors, begin + tile.parts * p.per_tile);
  const uint32_t steps = (end - begin) / (32 * kAtOnce);
  const auto* const one = reinterpret_cast<const uint4*>(s.places()[0]);
  const auto* const other = reinterpret_cast<const uint4*>(s.places()[1]);
  std::byte* const out = p.out + static_cast<int64_t>(token) * p.out_stride;
  const auto add_two = [&](uint32_t v, const uint4& a, const uint4& b) {
    Quad low = widen_word(kWire, low_half(a));
    Quad high = widen_word(kWire, high_half(a));
    add(&low, widen_word(kWire, low_half(b)), false);
    add(&high, widen_word(kWire, high_half(b)), false);
    store_sums<kWire, kFast>(p, out, v, low, high);
  };
  const auto load = [&](uint32_t step, Loaded* to) {  // beyond the last step it loads that one again
    const uint32_t v = begin + min(step, steps - 1) * 32 * kAtOnce + static_cast<uint32_t>(lane());
#pragma unroll
    for (uint32_t u = 0; u < kAtOnce; ++u) {
      to->term[u][0] = load_fresh<uint4>(one + v + 32 * u);
      to->term[u][1] = load_fresh<uint4>(other + v + 32 * u);
    }
  };
  const auto sum = [&](uint32_t step, const Loaded& from) {
    const uint32_t v = begin + step * 32 * kAtOnce + static_cast<uint32_t>(lane());
#pragma unroll
    for (uint32_t u = 0; u < kAtOnce; ++u) add_two(v + 32 * u, from.term[u][0], from.term[u][1]);
  };
  if (steps > 0) {
    Loaded even, odd;  // two, as what is still on its way cannot be moved
    load(0, &even);
#pragma unroll 1
    for (uint32_t step = 0; step < steps; step += 2) {
      load(step + 1, &odd);
      sum(step, even);
      load(step + 2, &even);
      if (step + 1 < steps) sum(step + 1, odd);
    }
  }
#pragma unroll 1
  for (uint32_t v = begin + steps * 32 * kAtOnce + static_cast<uint32_t>(lane()); v < end; v += 32) {
    add_two(v, load_fresh<uint4>(one + v), load_fresh<uint4>(other + v));
  }
}

// Sums a tile of a token where this rank's own partial, whose terms are in the set, is still to be made. The next of
// the other terms is on its way meanwhile.
template <twDtype_t kWire>
__device__ __noinline__ static void sum_with_own(Sum s, int token, int fan, Tile tile) {
  constexpr int kAtOnce = 2;
  const CombineParams& p = s.p;
  const uint32_t end = min(p.vectors, (tile.number + tile.parts) * p.per_tile);
  std::byte* const out = p.out + static_cast<int64_t>(token) * p.out_stride;
  const auto load_from = [&](int position, uint32_t base, uint4(&ahead)[kAtOnce]) {
    if (position < fan && s.kinds()[position] == kOwn) ++position;  // a token has one own term at most
    if (position >= fan) return;
    const auto* const row = reinterpret_cast<const uint4*>(s.places()[position]);
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (base + 32 * u < end) ahead[u] = load_fresh<uint4>(row + base + 32 * u);
    }
  };
#pragma unroll 1
  for (uint32_t base = tile.number * p.per_tile + lane(); base < end; base += 32 * kAtOnce) {
    Quad low[kAtOnce] = {};
    Quad high[kAtOnce] = {};
    uint4 ahead[kAtOnce] = {};
    load_from(0, base, ahead);
#pragma unroll 1
    for (int position = 0; position < fan; ++position) {
      const bool own = s.kinds()[position] == kOwn;
      uint4 term[kAtOnce] = {};
      if (own) sum_partial<kWire>(p, s.set(), base, end, term);
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (!own) term[u] = ahead[u];
        add(&low[u], widen_word(kWire, low_half(term[u])), position == 0);
        add(&high[u], widen_word(kWire, high_half(term[u])), position == 0);
      }
      if (!own) load_from(position + 1, base, ahead);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (base + 32 * u < end) store_sums<kWire, false>(p, out, base + 32 * u, low[u], high[u]);
    }
  }
}

// Starts to load this rank's own row for a tile of a token's sum, for which nobody need wait, while the others are
// waited for. `sent`: the thread's.
__device__ inline void prefetch_own(const Sum& s, const Tile& tile, const Sent& sent) {
  const CombineParams& p = s.p;
  constexpr uint32_t kVectors = 8;  // vectors of 16 bytes that one prefetch brings
  const int own_slot = sent.to.slot - s.sent_first()[s.me()];
  const bool own = lane() < sent.fan && sent.to.rank == s.me() && own_slot < s.sent_rows()[s.me()];
  const uint32_t mine = __ballot_sync(~0u, own);
  if (mine == 0) return;
  const int slot = __shfl_sync(~0u, own_slot, __ffs(static_cast<int>(mine)) - 1);
  const uint32_t v = tile.number * p.per_tile + kVectors * static_cast<uint32_t>(lane());
  const uint32_t end = min(p.vectors, (tile.number + tile.parts) * p.per_tile);
  if (v < end) prefetch(row_in(p, s.me(), slot) + uint64_t{16} * v);
}

// Sums a tile of one token, by a warp. `found()` is called when all that is waited for is there, except packets.
// `as_packets`: sum by the geometry of packets whatever the terms are; it must be alike in all tiles of the token.
template <twDtype_t kWire, bool kFast, class Found>
__device__ inline void sum_tile(const Sum& s, int token, const Tile& tile, const Sent& sent, bool as_packets,
                                Found&& found) {
  const CombineParams& p = s.p;
  if (kFast) prefetch_own(s, tile, sent);
  const Terms terms = find_terms(s, token, sent);
  found();
  bool here = terms.here;
  if (!kFast && here && terms.own >= 0 && !s.simple()) {
    collect_terms(p, s.set(), p.group.me, terms.own, load_choice(p, meta_row(p, p.group.me, terms.own), lane()));
  }
  const bool packets = terms.packets || as_packets;
  if (here && !packets && (kFast || (p.vectors_fit && (p.plain || terms.own < 0)))) {
    if (terms.fan == 2 && tile.parts * p.per_tile >= kLongTile) {
      sum_two<kWire, kFast>(s, token, tile);
    } else {
      sum_vectors<kWire, kFast>(s, token, terms.fan, tile);
    }
  } else if (!kFast && here && !packets && p.sums_fit) {
    sum_with_own<kWire>(s, token, terms.fan, tile);
  } else if (here) {
    here = __all_sync(~0u, sum_packets<kWire, kFast>(s, token, terms.fan, tile));
  }
  if (!here) give_up_token(s, token);
}

}  // namespace tw::cuda
