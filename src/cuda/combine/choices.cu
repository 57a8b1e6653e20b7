// Combine per expert of few tokens: a row for each (token, k) goes to the token's owner as its expert made it, in LL128
// packets, and is weighted and summed there as it comes. Takes ChoicesParams; gives each token's sum in the caller's
// output. combine/choices_bulk.cu does the same of more tokens.
//
// Floor: K rows of each token over the link, or min(K, N) times as many bytes as a combine per rank may take, then one
// flight. The places of packets are by (token, k) of the owner, of which one rank alone writes each; this rank's own
// rows take the same way through its own window. A warp has a tile of a row at a time, and finds whose choices the row
// has by the places that the dispatch, or the kernel of places, has kept.
//
// What breaks if this changes: S3 (publishing follows the last read where rows lie in the window), S4 (a flag in every
// packet), S7 (send before sum), S9 (k ascending, each operation rounded: no sum knows the ranks), and that a row that
// was not sent is no term.
#include <cuda_runtime.h>

#include "cuda/combine/choices.cuh"
#include "cuda/combine/end.cuh"
#include "cuda/launch/choices.h"
#include "cuda/launch/launch.h"
#include "cuda/launch/loading.h"

namespace tw::cuda {
namespace {

// ---- Sending

// Sends a tile of one choice's row, by a warp. `to`: where the row's first packet goes.
__device__ inline void send_row(const Sum& s, const std::byte* row, std::byte* to, const Tile& tile) {
  const CombineParams& p = s.p;
  Piece piece;
  load_words(s, row, tile, &piece);
  const uint32_t own = part_of(p.tiles, tile);
  __syncwarp();
  const bool together = is_together();
#pragma unroll
  for (uint32_t g = 0; g < kTileGroups; ++g) {
    if (g < own) store_packet(together, to + packet_place(tile.begin + g), piece.pair[g].a, piece.pair[g].b);
  }
}

// Sends a tile of the rows of all choices of a received row that this rank serves.
__device__ void send_choices(const Sum& s, const ChoicesParams& c, int owner, int slot, const Tile& tile) {
  const CombineParams& p = s.p;
  const int top_k = p.group.map.shape().top_k;
  const int64_t row = meta_row(p, owner, slot);
  const uint64_t header = load_fresh<unsigned long long>(p.handle.meta + row * (1 + top_k));
  const int token = static_cast<int>(header) - p.part.begin;
#pragma unroll 1
  for (int base = 0; base < top_k; base += 32) {
    ExpertRow place{-1, 0};
    if (base + lane() < top_k) place = load_both(p.handle.places + row * top_k + base + lane());
    const auto mine =
        reinterpret_cast<unsigned long long>(p.rows + place.expert * p.block_stride + place.row * p.row_stride);
    uint32_t left = __ballot_sync(~0u, place.expert >= 0);
#pragma unroll 1
    for (; left != 0; left &= left - 1) {
      const int k = __ffs(static_cast<int>(left)) - 1;
      const auto* const from = reinterpret_cast<const std::byte*>(__shfl_sync(~0u, mine, k));
      send_row(s, from, s.windows()[owner] + choice_target(s, c, owner, slot, token, base + k), tile);
    }
  }
}

__device__ void send_all(const Sum& s, const ChoicesParams& c) {
  const CombineParams& p = s.p;
  int most = 0;
#pragma unroll 1
  for (int i = lane(); i < s.ranks(); i += 32) most = max(most, s.counts()[i]);
  most = __reduce_max_sync(~0u, most);
  const auto ranks = static_cast<uint32_t>(s.ranks());
  const uint32_t end = static_cast<uint32_t>(most) * p.tiles.per_row.divisor * ranks;
  const Shares shares = sent_shares(p.roles);
#pragma unroll 1
  for (uint32_t u = shares.first; u < end; u += shares.step) {
    const Share share = share_of(p.tiles, ranks, u);
    const int owner = (p.group.me + 1 + share.turn) % s.ranks();
    if (share.index < s.counts()[owner]) send_choices(s, c, owner, share.index, share.tile);
  }
}

// ---- Summing

// Takes two choices of a token, those that the lanes `from` have (-1: none), into the parts, and looks once. (Four at
// once took a pair of 1 to 8 tokens 0.4 to 1 us longer, 4x H100.)
__device__ inline void expect_two(const Returned& of, const int (&from)[kTerms], const Tile& tile, int (&rank)[kTerms],
                                  float (&weight)[kTerms], Parts<kTerms, kGroups>* parts) {
#pragma unroll
  for (int t = 0; t < kTerms; ++t) {
    const int source = max(from[t], 0);
    const auto* const at = reinterpret_cast<const std::byte*>(__shfl_sync(~0u, of.at, source));
    rank[t] = __shfl_sync(~0u, of.rank, source);
    weight[t] = __shfl_sync(~0u, of.weight, source);
    parts->at[t] = from[t] < 0 ? nullptr : at + packet_place(tile.begin);
  }
  parts->look();
}

// Sums up to kGroups groups of a token. `first`: its first choices. False if packets did not come.
__device__ bool sum_returned(const Sum& s, const ChoicesParams& c, int token, const Returned& first, const Tile& tile) {
  const CombineParams& p = s.p;
  const int top_k = p.group.map.shape().top_k;
  Quad sum[kGroups][2] = {};
  bool begun = false;
  Parts<kTerms, kGroups> parts;
  parts.cover(p.tiles, tile);
#pragma unroll 1
  for (int base = 0; base < top_k; base += 32) {
    const Returned of = base == 0 ? first : find_returned(s, c, token, base);
    uint32_t left = of.there;
#pragma unroll 1
    while (left != 0) {
      int from[kTerms];
#pragma unroll
      for (int t = 0; t < kTerms; ++t) {
        from[t] = __ffs(static_cast<int>(left)) - 1;  // -1 if there is none
        left &= left - 1;
      }
      int rank[kTerms];
      float weight[kTerms];
      expect_two(of, from, tile, rank, weight, &parts);
      if (!await_packets(
              p.group, s.step, &parts, [&](int t) { return t == 0 ? rank[0] : rank[1]; },
              [&](int source) { return source_failed(p.group, s.step, source); })) {
        return false;
      }
#pragma unroll
      for (int t = 0; t < kTerms; ++t) {
        if (from[t] < 0) continue;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          if (tile.begin + g >= tile.end) continue;
          add_word(c, &sum[g][0], parts.value[g][t].a, weight[t], !begun);
          add_word(c, &sum[g][1], parts.value[g][t].b, weight[t], !begun);
        }
        begun = true;
      }
    }
  }
  store_sums(p, token, tile, sum);
  return true;
}

__device__ void sum_all(const Sum& s, const ChoicesParams& c) {
  const CombineParams& p = s.p;
  const Shares shares = received_shares(p.roles);
  const uint32_t all = static_cast<uint32_t>(max(p.tokens, 0)) * p.tiles.per_row.divisor;
#pragma unroll 1
  for (uint32_t u = shares.first; u < all; u += shares.step) {
    const uint32_t row = divide(u, p.tiles.per_row);
    const auto token = static_cast<int>(row);
    const Tile tile = tile_of(p.tiles, u - row * p.tiles.per_row.divisor);
    const Returned first = find_returned(s, c, token, 0);
    bool here = true;
#pragma unroll 1
    for (uint32_t begin = tile.begin; begin < tile.end && here; begin += kGroups) {
      here = sum_returned(s, c, token, first, {tile.number, begin, min(tile.end, begin + kGroups), 1});
    }
    if (!here) give_up_token(s, token);
  }
}

__global__ void __launch_bounds__(kThreads, 1) choices_kernel(const __grid_constant__ ChoicesParams c) {
  let_next_begin();
  const CombineParams& p = c.call;
  Sum s{p, Step{0, p.channel, p.bound, twPhaseCombine, p.rows_digest}};
  if (!begin_step<false>(&s, c)) return;
  if (s.sends()) {  // S7: nobody here waits
    if (!p.late_signal && blockIdx.x == 0 && s.set() == kWarps - 1) publish_first(s);
    send_all(s, c);
    if (p.late_signal) publish_last(s);
  }
  conclude_step(s, [&] {
    if (s.sums()) sum_all(s, c);
  });
}

}  // namespace

int launch_choice_packets(const ChoicesParams& params, bool early, void* stream) {
  return launch_kernel(choices_kernel, params, params.call.roles.grid(), params.call.at.bytes, early, stream);
}

int load_choice_packets(const Shape& shape) {
  return allow_shared(reinterpret_cast<const void*>(choices_kernel), CombineScratch::make(shape).bytes);
}

}  // namespace tw::cuda
