// Rows per expert at their owner: where a token's are, and how one is added. Kernels of combines per expert share it
// (combine/choices.cu, choices_bulk.cu, bias.cu).
//
// Takes ChoicesParams and the handle's routing; gives places of rows, and words of a sum.
//
// What breaks if this changes: S4 (await_choices acquires), S9 (multiply, then add), and that a row that was not sent
// is no term.
#pragma once

#include "cuda/combine/sums.cuh"
#include "cuda/launch/choices.h"

namespace tw::cuda {

// Gives where a choice's row goes, as an offset from its owner's window. `token` counts from the part's first.
__device__ inline uint64_t choice_target(const Sum& s, const ChoicesParams& c, int owner, int slot, int token, int k) {
  const GroupView& g = s.p.group;
  if (is_staged(g)) return g.map.choice_slot(s.step.channel, s.step.bank(), owner, slot, s.p.bound, k);
  return c.packets ? g.map.choice_packet(s.step.channel, s.step.bank(), token, k)
                   : g.map.choice_inbox(s.step.channel, s.step.bank(), token, k);
}

// A thread's part of a tile of a row, as it travels.
struct Piece {
  Vec16 pair[kTileGroups];
};

// Gives word w of a row in the wire's type, where the row is the one of the warp's set.
__device__ inline uint64_t sent_word(const Sum& s, const std::byte* row, bool as_it_is, uint32_t w) {
  if (w >= s.p.tiles.words) return 0;
  return as_it_is ? load_fresh<unsigned long long>(row + 8 * static_cast<uint64_t>(w)) : sum_word(s.p, s.set(), w);
}
// Loads the words of a piece, and the step for the threads that have the flags, by a warp. All of it is on its way
// before any of it is looked at.
__device__ inline void load_words(const Sum& s, const std::byte* row, const Tile& tile, Piece* piece) {
  const CombineParams& p = s.p;
  const bool as_it_is = p.rows_dtype == p.wire_dtype && p.words_fit;
  if (!as_it_is) {  // a partial of one term is that row, rounded
    __syncwarp();
    if (lane() == 0) {
      shared_at<const std::byte*>(p.at.rows)[s.set() * p.group.map.shape().top_k] = row;
      shared_at<int32_t>(p.at.row_counts)[s.set()] = 1;
    }
    __syncwarp();
  }
#pragma unroll
  for (uint32_t g = 0; g < kTileGroups; ++g) {
    if (tile.begin + g >= tile.end) continue;
    const uint32_t w = first_word(tile.begin + g);
    piece->pair[g].a = sent_word(s, row, as_it_is, w);
    piece->pair[g].b = is_flag() ? s.step.number : sent_word(s, row, as_it_is, w + 1);
  }
}

// Up to 32 choices of a token as its owner sums them; the thread's own is that of its lane.
struct Returned {
  uint32_t there;         // which have a row, by bit
  unsigned long long at;  // where the row, or its first packet, is
  int rank;               // who sends it
  float weight;
};
__device__ inline Returned find_returned(const Sum& s, const ChoicesParams& c, int token, int base) {
  const CombineParams& p = s.p;
  const GroupView& g = p.group;
  const Shape& shape = g.map.shape();
  const int k = base + lane();
  const int64_t of_rank = int64_t{p.part.first_token} + token;
  Returned found{0, 0, 0, 0.0f};
  int32_t id = -1;
  if (k < shape.top_k) {
    id = static_cast<int32_t>(load_fresh<uint32_t>(p.handle.ids + of_rank * shape.top_k + k));
    if (c.weights != nullptr) {
      found.weight = __uint_as_float(load_fresh<uint32_t>(c.weights + of_rank * c.weight_stride + k));
    }
  }
  bool there = id >= 0 && id < shape.experts;
  if (there) found.rank = expert_rank(g.experts[id]);
  int slot = 0;
  if (there && (shape.exact() || is_staged(g))) {  // elsewhere every row was sent, and its place is by its token
    const auto fan = static_cast<int>(load_fresh<uint32_t>(p.handle.fan + token));
    const Destination* const sent = p.handle.destinations + static_cast<int64_t>(token) * shape.fan_out();
    slot = -1;
#pragma unroll 4
    for (int i = 0; i < fan; ++i) {  // to the end, so that several loads are on their way
      const Destination to = load_both(sent + i);
      if (to.rank == found.rank) slot = to.slot - s.sent_first()[to.rank];
    }
    there = slot >= 0 && slot < s.sent_rows()[found.rank];
  }
  const uint64_t place = is_staged(g) ? g.map.choice_slot(s.step.channel, s.step.bank(), found.rank, slot, p.bound, k)
                                      : choice_target(s, c, g.me, 0, token, k);
  found.at = reinterpret_cast<unsigned long long>(s.window() + place);
  found.there = __ballot_sync(~0u, there);
  return found;
}

// Adds 8 bytes of a term, weighted if there are weights.
__device__ inline void add_word(const ChoicesParams& c, Quad* sum, uint64_t word, float weight, bool first) {
  Quad term = widen_word(c.call.wire_dtype, word);
#pragma unroll
  for (int e = 0; c.weights != nullptr && e < 4; ++e) term.v[e] = __fmul_rn(weight, term.v[e]);
  add(sum, term, first);
}

__device__ inline void store_word_of(const CombineParams& p, std::byte* out, uint32_t w, const Quad& sum) {
  if (w >= p.tiles.words) return;
  if (p.words_fit && p.out_dtype == p.wire_dtype && p.wire_dtype != twFloat32) {
    *reinterpret_cast<uint64_t*>(out + 8 * static_cast<uint64_t>(w)) = narrow_word(p.wire_dtype, sum);
  } else {
    store_elements(p.wire_dtype, p.out_dtype, p.elements, out, w, sum);
  }
}

// Stores the sums of a tile of a token, each thread the two words that it has summed.
__device__ inline void store_sums(const CombineParams& p, int token, const Tile& tile, const Quad (&sum)[kGroups][2]) {
  std::byte* const out = p.out + static_cast<int64_t>(token) * p.out_stride;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const uint32_t w = first_word(tile.begin + g);
    if (tile.begin + g >= tile.end) continue;
    store_word_of(p, out, w, sum[g][0]);
    if (!is_flag()) store_word_of(p, out, w + 1, sum[g][1]);
  }
}

// Waits until all rows of a token's choices are in the inbox. False if some will not come (S6). `first`: the thread's
// first destination; by a warp.
__device__ inline bool await_choices(const Sum& s, int token, const Sent& first) {
  bool here = true;
#pragma unroll 1
  for (int base = 0; base < s.fan_out(); base += 32) {
    const int position = base + lane();
    const auto [from, kept] = sent_row(s, base == 0 ? first : load_sent(s.p, token, position), position);
    if (kept) here &= await_row(s, from);
  }
  return __all_sync(~0u, here) != 0;  // S4: the threads that have looked have acquired
}

}  // namespace tw::cuda
