// Rows per expert at their owner: where a token's are, and how one is added. Kernels of combines per expert share it
// (combine/choices.cu, combine/bias.cu).
//
// Takes ChoicesParams and the handle's routing; gives places of rows, and words of a sum.
//
// What breaks if this changes: S4 (an acquire of every signal), S9 (multiply, then add), and that a row that was not
// sent is no term.
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

// Waits for a rank's signal, which says that its rows are there (S4). False if the wait ended otherwise (S6), or the
// rank has refused: the warp that concludes reports that.
__device__ __noinline__ static bool await_rank(const GroupView& g, Step step, int rank) {
  Patience patience(g);
  Source source;
  while (!saw(g, step, rank, Look::kSignal, &source)) {
    bool late = false;
    if (patience.over(&late)) {
      if (late) {
        report_failure(g, step, twTimeout, rank, source.signal);
      } else {
        report_stopped(g, step, rank, source.signal);
      }
      return g.no_wait;
    }
    __nanosleep(100);
  }
  return g.no_wait || source.error == twSuccess;
}

// Waits for every rank's, by a block. False if rows of some will not come: the step has failed.
__device__ inline bool await_ranks(const Sum& s) {
  bool here = true;
#pragma unroll 1
  for (int rank = static_cast<int>(threadIdx.x); rank < s.ranks() && here; rank += kThreads) {
    here = await_rank(s.p.group, s.step, rank);
  }
  if (__syncthreads_and(here) != 0) return true;  // S4: what these threads have acquired the others may read
  if (threadIdx.x == 0) *s.failed() = 1;
  return false;
}

}  // namespace tw::cuda
