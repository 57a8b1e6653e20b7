// Combine per expert of many tokens: a row for each (token, k) goes to the token's owner as its expert made it, into
// its inbox, and is weighted and summed there. Takes ChoicesParams; gives each token's sum in the caller's output.
// combine/choices.cu does the same of few tokens.
//
// Floor: K rows of each token over the link, or min(K, N) times as many bytes as a combine per rank may take, then one
// flight, and the sum of K rows out of memory. Rows lie at (token, k) of the inbox, and go in the chunks and with the
// signals of combine/chunks.cuh: a chunk has the rows of all choices of a few received rows, and a token is summed when
// the chunks of all its ranks are there. This rank's own rows take the same way through its own window. Whose choices a
// received row has say the places that the dispatch, or the kernel of places, has kept.
//
// Which warp sends or sums a tile is drawn, and blocks that have sent join in the sums. By fixed shares some senders of
// 4096 tokens had ended after 300 us, others after 680, and then sums by half of the blocks, which had waited for the
// last row, took 420 (2x H200). So it took 1103 us, and takes 663 (bench/results/returns-2-gpus.json).
//
// What breaks if this changes: S3 (publishing follows the last read where rows lie in the window), S4 (a chunk's
// signal), S7 (send before sum), S9 (k ascending, each operation rounded: no sum knows the ranks), and that a row that
// was not sent is no term.
#include <cuda_runtime.h>

#include "cuda/combine/choices.cuh"
#include "cuda/combine/chunks.cuh"
#include "cuda/combine/drawn.cuh"
#include "cuda/combine/end.cuh"
#include "cuda/launch/choices.h"
#include "cuda/launch/launch.h"
#include "cuda/launch/loading.h"

namespace tw::cuda {
namespace {

// A warp's view of the call.
struct ChoiceSum : Sum {
  const ChoicesParams& c;
};

// ---- Sending

// Loads and stores a piece of a row that travels 16 bytes at a time (sums_fit).
__device__ inline void load_vectors(const CombineParams& p, const std::byte* row, const Tile& tile, Piece* piece) {
  const uint32_t begin = tile.number * p.per_tile;
  const uint32_t end = min(p.vectors, begin + p.per_tile);
#pragma unroll
  for (uint32_t i = 0; i < kTileGroups; ++i) {
    const uint32_t v = begin + static_cast<uint32_t>(lane()) + 32 * i;
    if (v >= end) continue;
    const uint4 vector = load_fresh<uint4>(row + uint64_t{16} * v);
    piece->pair[i] = {low_half(vector), high_half(vector)};
  }
}
__device__ inline void store_vectors(const CombineParams& p, std::byte* to, const Tile& tile, const Piece& piece) {
  const uint32_t begin = tile.number * p.per_tile;
  const uint32_t end = min(p.vectors, begin + p.per_tile);
#pragma unroll
  for (uint32_t i = 0; i < kTileGroups; ++i) {
    const uint32_t v = begin + static_cast<uint32_t>(lane()) + 32 * i;
    if (v < end) put_pair(to + uint64_t{16} * v, piece.pair[i].a, piece.pair[i].b);
  }
}

// Copies a tile of a row of another type or of an odd size.
__device__ __noinline__ static void copy_words(Sum s, const std::byte* row, std::byte* to, Tile tile) {
  const CombineParams& p = s.p;
  const auto bytes = static_cast<int64_t>(p.group.map.shape().combine_bytes);
  const auto put = [&](uint32_t at, uint64_t value) {
    if (at >= p.tiles.words) return;
    store_bytes(to + 8 * static_cast<uint64_t>(at), value, bytes - 8 * static_cast<int64_t>(at));
  };
  Piece piece;
  load_words(s, row, tile, &piece);
#pragma unroll
  for (uint32_t g = 0; g < kTileGroups; ++g) {
    if (tile.begin + g >= tile.end) continue;
    const uint32_t w = first_word(tile.begin + g);
    put(w, piece.pair[g].a);
    if (!is_flag()) put(w + 1, piece.pair[g].b);
  }
}

// Sends a tile of the rows of all choices of a received row that this rank serves. The next choice's is on its way
// while one is stored.
__device__ inline void send_choices(const ChoiceSum& s, int owner, int slot, const Tile& tile) {
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
    const auto from = [&](uint32_t choices) {
      return reinterpret_cast<const std::byte*>(__shfl_sync(~0u, mine, __ffs(static_cast<int>(choices)) - 1));
    };
    const auto to = [&](uint32_t choices) {
      const int k = base + __ffs(static_cast<int>(choices)) - 1;
      return s.windows()[owner] + choice_target(s, s.c, owner, slot, token, k);
    };
    if (!p.sums_fit) {
#pragma unroll 1
      for (; left != 0; left &= left - 1) copy_words(s, from(left), to(left), tile);
      continue;
    }
    if (left == 0) continue;
    Piece even;
    load_vectors(p, from(left), tile, &even);
#pragma unroll 1
    while (left != 0) {
      Piece odd;  // beside `even`, as what is still on its way cannot be moved
      const uint32_t second = left & (left - 1);
      if (second != 0) load_vectors(p, from(second), tile, &odd);
      store_vectors(p, to(left), tile, even);
      if (second == 0) break;
      left = second & (second - 1);
      if (left != 0) load_vectors(p, from(left), tile, &even);
      store_vectors(p, to(second), tile, odd);
    }
  }
}

// Sends one of a chunk's tiles, or nothing if the chunk has fewer rows (combine/chunks.cuh, push_chunks).
template <twDtype_t kWire, bool kFast>
__device__ inline void push_item(const ChoiceSum& s, int number, int item) {
  const Chunk chunk = chunk_of(s, number);
  const uint32_t row = divide(static_cast<uint32_t>(item), s.p.tiles.per_row);
  if (static_cast<int>(row) >= chunk.rows) return;
  const Tile tile = tile_of(s.p.tiles, static_cast<uint32_t>(item) - row * s.p.tiles.per_row.divisor);
  send_choices(s, chunk.owner, chunk.number * s.chunk_rows() + static_cast<int>(row), tile);
}

// ---- Summing

// Sums a tile of a token whose rows are in the inbox, 16 bytes at a time.
__device__ void sum_vectors_of(const ChoiceSum& s, int token, const Returned& first, uint32_t tile) {
  constexpr int kRows = 4;     // of which all are on their way before the first is added
  constexpr int kVectors = 2;  // of a thread in each
  const CombineParams& p = s.p;
  const int top_k = p.group.map.shape().top_k;
  const uint32_t end = min(p.vectors, (tile + 1) * p.per_tile);
#pragma unroll 1
  for (uint32_t v = tile * p.per_tile + static_cast<uint32_t>(lane()); __any_sync(~0u, v < end); v += 32 * kVectors) {
    Quad sum[kVectors][2] = {};
    bool begun = false;
#pragma unroll 1
    for (int base = 0; base < top_k; base += 32) {
      const Returned of = base == 0 ? first : find_returned(s, s.c, token, base);
      uint32_t left = of.there;
#pragma unroll 1
      while (left != 0) {
        uint4 term[kRows][kVectors];
        float weight[kRows];
        bool there[kRows];
#pragma unroll
        for (int t = 0; t < kRows; ++t) {
          there[t] = left != 0;
          const int source = max(__ffs(static_cast<int>(left)) - 1, 0);
          left &= left - 1;
          const auto* const at = reinterpret_cast<const std::byte*>(__shfl_sync(~0u, of.at, source));
          weight[t] = __shfl_sync(~0u, of.weight, source);
#pragma unroll
          for (int u = 0; u < kVectors; ++u) {
            if (there[t] && v + 32 * u < end) term[t][u] = load_fresh<uint4>(at + uint64_t{16} * (v + 32 * u));
          }
        }
#pragma unroll
        for (int t = 0; t < kRows; ++t) {
          if (!there[t]) continue;
#pragma unroll
          for (int u = 0; u < kVectors; ++u) {
            add_word(s.c, &sum[u][0], low_half(term[t][u]), weight[t], !begun);
            add_word(s.c, &sum[u][1], high_half(term[t][u]), weight[t], !begun);
          }
          begun = true;
        }
      }
    }
    std::byte* const out = p.out + static_cast<int64_t>(token) * p.out_stride;
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      if (v + 32 * u >= end) continue;
      store_word_of(p, out, 2 * (v + 32 * u), sum[u][0]);
      store_word_of(p, out, 2 * (v + 32 * u) + 1, sum[u][1]);
    }
  }
}

// Does so word by word, of rows of odd sizes too.
__device__ __noinline__ static void sum_words_of(ChoiceSum s, int token, Returned first, Tile tile) {
  const CombineParams& p = s.p;
  const int top_k = p.group.map.shape().top_k;
#pragma unroll 1
  for (uint32_t begin = tile.begin; begin < tile.end; begin += kGroups) {
    Quad sum[kGroups][2] = {};
    bool begun = false;
#pragma unroll 1
    for (int base = 0; base < top_k; base += 32) {
      const Returned of = base == 0 ? first : find_returned(s, s.c, token, base);
#pragma unroll 1
      for (uint32_t left = of.there; left != 0; left &= left - 1) {
        const int source = __ffs(static_cast<int>(left)) - 1;
        const auto* const at = reinterpret_cast<const std::byte*>(__shfl_sync(~0u, of.at, source));
        const float weight = __shfl_sync(~0u, of.weight, source);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          const uint32_t w = first_word(begin + g);
          if (begin + g >= tile.end) continue;
          const Vec16 pair = p.words_fit ? load_two(at, w, p.tiles.words) : load_any_pair(s, at, false, w);
          add_word(s.c, &sum[g][0], pair.a, weight, !begun);
          add_word(s.c, &sum[g][1], pair.b, weight, !begun);
        }
        begun = true;
      }
    }
    store_sums(p, token, {tile.number, begin, min(tile.end, begin + kGroups), 1}, sum);
  }
}

// Sums tiles of all tokens, each by whichever warp is free.
__device__ void sum_all(const ChoiceSum& s) {
  const CombineParams& p = s.p;
  const uint32_t per_row = p.tiles.per_row.divisor;
  const uint32_t end = static_cast<uint32_t>(max(p.tokens, 0)) * per_row;
  each_drawn(sum_counters(p.group, s.step), received_shares(p.roles), s.sums(), end, [&](uint32_t u, auto& found) {
    const uint32_t row = divide(u, p.tiles.per_row);
    const auto token = static_cast<int>(row);
    const Tile tile = tile_of(p.tiles, u - row * per_row);
    const Sent sent = load_sent(p, token, lane());  // on its way beside what find_returned loads
    const Returned first = find_returned(s, s.c, token, 0);
    const bool here = await_choices(s, token, sent);
    found();
    if (here && p.vectors_fit) {
      sum_vectors_of(s, token, first, tile.number);
    } else if (here) {
      sum_words_of(s, token, first, tile);
    } else {
      give_up_token(s, token);
    }
  });
}

__global__ void __launch_bounds__(kThreads, 1) choices_bulk_kernel(const __grid_constant__ ChoicesParams c) {
  let_next_begin();
  const CombineParams& p = c.call;
  ChoiceSum s{{p, Step{0, p.channel, p.bound, twPhaseCombine, p.rows_digest}}, c};
  if (!begin_step<true>(&s, c)) return;
  if (s.sends()) send_in_chunks(s, [&] { push_chunks<twDtypeNone, false>(s); });
  conclude_step(s, [&] {
    if (p.receive) sum_all(s);
  });
}

}  // namespace

int launch_choices_bulk(const ChoicesParams& params, bool early, void* stream) {
  return launch_kernel(choices_bulk_kernel, params, params.call.roles.grid(), params.call.at.bytes, early, stream);
}

int load_choices_bulk(const Shape& shape) {
  return allow_shared(reinterpret_cast<const void*>(choices_bulk_kernel), CombineScratch::make(shape).bytes);
}

}  // namespace tw::cuda
