// Combine of rows that return as e4m3 with scales. Takes Fp8Params; gives each token's sum in the caller's output. As
// in combine/combine.cu some blocks send and the others sum; its chunks, signals and ends are used here too.
//
// A sender makes a tile of a partial in float32, quantises it on its way to the inbox, and stores the scales of its
// blocks beside it; a tile has whole blocks, so no warp waits for another. The owner multiplies and adds in order of
// positions. This rank's own partials go through its inbox: they are rounded as all others are.
//
// Floor: (H + 4 * ceil(H / 128)) / (2 * H) of what bfloat16 has on the link, 0.516 for 7168 elements. The last rows do
// not go as packets, so a fence, a signal and a flight follow the last chunk, some 5 us: with few tokens that is more
// than half of the bytes saves. A quantising pass before a combine of plain rows would read all rows once and write
// half of that, 60 us for 4096 tokens between four ranks, in which the link has nothing to do. Measured: 0.75x at 4096
// tokens, 0.94x at 512 between two, where half of the rows stay (2x H200, bench/results/returns-2-gpus.json); 0.56x and
// 0.74x by an older kernel between four (4x H100, returns-4-gpus.json).
//
// What breaks if this changes: S3 (late_signal; nothing is written before await_earlier), S4 (chunks), S7 (send before
// sum), S9 (order of terms, combine/fp8.cuh).
#include <cuda_runtime.h>

#include "cuda/combine/chunks.cuh"
#include "cuda/combine/drawn.cuh"
#include "cuda/combine/end.cuh"
#include "cuda/combine/fp8.cuh"
#include "cuda/launch/bias.h"
#include "cuda/launch/launch.h"
#include "cuda/launch/loading.h"

namespace tw::cuda {
namespace {

// A warp's view of the call.
struct Fp8Sum : Sum {
  const Fp8Params& q;

  // Whether a partial is a row, without a weight.
  __device__ bool whole_rows() const { return !p.expert_major && !p.weighted; }
  __device__ bool in_blocks() const { return q.scale == 0.0f; }
};

// ---- Sending

// Whether a thread's part of the tile is loaded by load_whole. `begin`: the thread's first element; alike in a warp.
__device__ __forceinline__ bool loads_whole(const Fp8Sum& s, int64_t begin) {
  const CombineParams& p = s.p;
  const int64_t end = begin - int64_t{lane()} * kFp8Each + kFp8Tile;
  return p.sums_fit != 0 && float_bytes(p.rows_dtype) == 2 && end <= p.elements;
}
__device__ __forceinline__ void load_tile(const Fp8Sum& s, const std::byte* row, int64_t begin,
                                          Sixteen (&to)[kFp8Steps], uint32_t (&largest)[kFp8Steps]) {
  const CombineParams& p = s.p;
  if (loads_whole(s, begin)) {
    if (p.rows_dtype == twBfloat16) return load_whole<twBfloat16>(row, begin, to, largest);
    return load_whole<twFloat16>(row, begin, to, largest);
  }
#pragma unroll
  for (int u = 0; u < kFp8Steps; ++u) {
    load_sixteen(row, p.rows_dtype, begin + u * kFp8Step, p.elements, p.sums_fit != 0, &to[u]);
    largest[u] = largest_of(to[u]);
  }
}
// Adds a term of the thread's part of a tile to a partial; `first`: it begins the sum.
__device__ __forceinline__ void add_row(const Fp8Sum& s, const std::byte* row, const float* weight, int64_t begin,
                                        bool first, Sixteen (&sum)[kFp8Steps]) {
  Sixteen term[kFp8Steps];
  uint32_t largest[kFp8Steps];
  load_tile(s, row, begin, term, largest);
#pragma unroll
  for (int u = 0; u < kFp8Steps; ++u) {
#pragma unroll
    for (int i = 0; i < kFp8Each; ++i) {
      const float value = weight != nullptr ? __fmul_rn(*weight, term[u].v[i]) : term[u].v[i];
      sum[u].v[i] = first ? value : __fadd_rn(sum[u].v[i], value);
    }
  }
}

// Quantises a thread's part of a tile into its place in an inbox. `begin`: its first element; `largest`: the largest
// magnitude of each step.
__device__ __forceinline__ void put_tile(const Fp8Sum& s, std::byte* to, int64_t begin, const Sixteen (&sum)[kFp8Steps],
                                         uint32_t (&largest)[kFp8Steps]) {
  const bool in_blocks = s.in_blocks();
  float scale[kFp8Steps];
#pragma unroll
  for (int u = 0; u < kFp8Steps; ++u) {
    if (in_blocks) largest[u] = block_largest(largest[u]);
    scale[u] = in_blocks ? block_scale(largest[u]) : s.q.scale;
  }
#pragma unroll
  for (int u = 0; u < kFp8Steps; ++u) {
    const int64_t first = begin + u * kFp8Step;
    if (first >= s.p.elements) continue;
    put_data(reinterpret_cast<uint4*>(to + first), narrow_sixteen(sum[u], scale[u], largest[u], in_blocks));
    if (in_blocks && lane() % kFp8Sharing == 0) {
      put_data(reinterpret_cast<float*>(to + s.q.scales_from) + first / static_cast<int64_t>(kFp8Elements), scale[u]);
    }
  }
}

// Sends one of a chunk's tiles, or nothing if the chunk has fewer rows (combine/chunks.cuh, push_chunks).
//
// kFast: rows of bfloat16 in whole tiles, each a partial as it lies, of which a sum of the same type is made. It is the
// usual call, and has an instance of its own: with all types and layouts in one a warp goes through more code for a
// tile, and 4096 tokens took 134 us for 127 (2x H200).
template <twDtype_t kWire, bool kFast>
__device__ inline void push_item(const Fp8Sum& s, int number, int item) {
  const CombineParams& p = s.p;
  const Chunk chunk = chunk_of(s, number);
  const auto row = static_cast<int>(divide(static_cast<uint32_t>(item), p.tiles.per_row));
  if (row >= chunk.rows) return;
  const int slot = chunk.number * s.chunk_rows() + row;
  auto header = static_cast<uint64_t>(slot);
  if (asks_header(p.group)) {
    const int64_t meta = meta_row(p, chunk.owner, slot) * (1 + p.group.map.shape().top_k);
    header = load_fresh<unsigned long long>(p.handle.meta + meta);
  }
  const int64_t begin = int64_t{item - row * p.pushed_parts} * kFp8Tile + int64_t{lane()} * kFp8Each;
  Sixteen sum[kFp8Steps];
  uint32_t largest[kFp8Steps];
  if (kFast) {
    load_whole<twBfloat16>(row_in(p, chunk.owner, slot), begin, sum, largest);
  } else if (s.whole_rows()) {
    load_tile(s, row_in(p, chunk.owner, slot), begin, sum, largest);
  } else {
    collect_terms(p, s.set(), chunk.owner, slot, load_choice(p, meta_row(p, chunk.owner, slot), lane()));
    const int set = s.set() * p.group.map.shape().top_k;
    const auto rows = shared_at<const std::byte*>(p.at.rows) + set;
    const auto weights = shared_at<float>(p.at.weights) + set;
    const int count = shared_at<int32_t>(p.at.row_counts)[s.set()];
#pragma unroll 1
    for (int j = 0; j < count; ++j) add_row(s, rows[j], p.weighted ? weights + j : nullptr, begin, j == 0, sum);
#pragma unroll
    for (int u = 0; u < kFp8Steps; ++u) largest[u] = largest_of(sum[u]);
  }
  put_tile(s, place_of(s, chunk.owner, header), begin, sum, largest);
}

// ---- Summing

// Sums a tile of a token whose terms have been found, all of them in the inbox. With kBiased the sum starts from its
// row of `bias`, which may lie where the sum goes: a thread stores what it has loaded.
template <bool kFast, bool kBiased>
__device__ __forceinline__ void sum_fp8_tile(const Fp8Sum& s, const BiasRows* bias, int token, int fan, uint32_t tile) {
  constexpr int kPairs = 4;  // terms that are loaded before the first of them is added
  const CombineParams& p = s.p;
  const int64_t begin = int64_t{tile} * kFp8Tile + int64_t{lane()} * kFp8Each;
  Sixteen sum[kFp8Steps] = {};
  if constexpr (kBiased) {
#pragma unroll
    for (int u = 0; u < kFp8Steps; ++u) {
      load_sixteen(bias->rows + token * bias->stride, bias->dtype, begin + u * kFp8Step, p.elements,
                   bias->vectors_fit != 0, &sum[u]);
    }
  }
#pragma unroll 1
  for (int position = 0; position < fan; position += kPairs) {
    uint4 term[kFp8Steps][kPairs];
    float scale[kFp8Steps][kPairs];
    // What is not there is loaded from elsewhere in a row and not used, so that no load waits for a branch.
#pragma unroll
    for (int t = 0; t < kPairs; ++t) {
      const std::byte* const row = s.places()[min(position + t, fan - 1)];
      const auto* const scales = reinterpret_cast<const uint32_t*>(row + s.q.scales_from);
#pragma unroll
      for (int u = 0; u < kFp8Steps; ++u) {
        const int64_t first = kFast || begin + u * kFp8Step < p.elements ? begin + u * kFp8Step : 0;
        scale[u][t] = s.q.scale;
        term[u][t] = load_fresh<uint4>(reinterpret_cast<const uint4*>(row + first));
        if (s.in_blocks()) {
          scale[u][t] = __uint_as_float(load_fresh<uint32_t>(scales + first / static_cast<int64_t>(kFp8Elements)));
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kFp8Steps; ++u) {
#pragma unroll
      for (int t = 0; t < kPairs; ++t) {
        if (position + t < fan) {
          add_sixteen(&sum[u], term[u][t], scale[u][t], !kBiased && position + t == 0);
        }
      }
    }
  }
  std::byte* const out = p.out + static_cast<int64_t>(token) * p.out_stride;
#pragma unroll
  for (int u = 0; u < kFp8Steps; ++u) {
    const int64_t first = begin + u * kFp8Step;
    if (kFast) {
      store_sixteen(out, twBfloat16, first, first + kFp8Each, true, sum[u]);
    } else {
      store_sixteen(out, p.out_dtype, first, p.elements, p.vectors_fit != 0, sum[u]);
    }
  }
}

// Sums tiles of all tokens, in order, each by whichever warp is free (combine/combine.cu, sum_tokens).
template <bool kFast, bool kBiased>
__device__ void sum_fp8_tokens(const Fp8Sum& s, const BiasRows* bias) {
  const CombineParams& p = s.p;
  const uint32_t per_row = p.tiles.per_row.divisor;
  const uint32_t end = static_cast<uint32_t>(p.tokens) * per_row;
  each_drawn(sum_counters(p.group, s.step), received_shares(p.roles), s.sums(), end, [&](uint32_t u, auto& found) {
    const uint32_t row = divide(u, p.tiles.per_row);
    const auto token = static_cast<int>(row);
    const Terms terms = find_terms(s, token, load_sent(p, token, lane()));
    found();
    if (terms.here) {
      sum_fp8_tile<kFast, kBiased>(s, bias, token, terms.fan, u - row * per_row);
    } else {
      give_up_token(s, token);
    }
  });
}

// Does what is left when a block has sent.
template <bool kFast, bool kBiased>
__device__ inline void conclude_fp8(const Fp8Sum& s, const BiasRows* bias) {
  conclude_step(s, [&] {
    if (s.sums() || (s.p.receive && s.p.joins)) sum_fp8_tokens<kFast, kBiased>(s, bias);
  });
}

template <bool kFast>
__global__ void __launch_bounds__(kThreads, 1) combine_fp8_kernel(const __grid_constant__ Fp8Params q) {
  let_next_begin();
  const CombineParams& p = q.call;
  Fp8Sum s{{p, Step{0, p.channel, p.bound, twPhaseCombine, p.rows_digest}}, q};
  if (!begin_step<true>(&s, q)) return;
  if (s.sends()) send_in_chunks(s, [&] { push_chunks<twDtypeNone, kFast>(s); });
  conclude_fp8<kFast, false>(s, nullptr);
}

// The half of it that sums, from a bias (combine/bias.cu). Another launch of the kernel above has sent.
__global__ void __launch_bounds__(kThreads, 1) combine_fp8_bias_kernel(const __grid_constant__ Fp8BiasParams q) {
  const CombineParams& p = q.call.call;
  Fp8Sum s{{p, Step{0, p.channel, p.bound, twPhaseCombine, p.rows_digest}}, q.call};
  await_earlier();
  if (begin_sums(&s)) conclude_fp8<false, true>(s, &q.bias);
}

}  // namespace

int launch_combine_fp8(const Fp8Params& params, int grid, bool early, void* stream) {
  const auto kernel = params.fast != 0 ? combine_fp8_kernel<true> : combine_fp8_kernel<false>;
  return launch_kernel(kernel, params, grid, params.call.at.bytes, early, stream);
}

int launch_fp8_bias(const Fp8BiasParams& params, void* stream) {
  const CombineParams& p = params.call.call;
  return launch_kernel(combine_fp8_bias_kernel, params, p.roles.grid(), p.at.bytes, false, stream);
}

int load_combine_fp8(const Shape& shape) {
  const uint32_t bytes = CombineScratch::make(shape).bytes;
  for (const void* kernel : {reinterpret_cast<const void*>(combine_fp8_kernel<true>),
                             reinterpret_cast<const void*>(combine_fp8_kernel<false>),
                             reinterpret_cast<const void*>(combine_fp8_bias_kernel)}) {
    if (const int error = allow_shared(kernel, bytes); error != 0) return error;
  }
  return 0;
}

}  // namespace tw::cuda
