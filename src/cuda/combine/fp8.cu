// Combine of rows that return as e4m3 with scales. Takes Fp8Params; gives each token's sum in the caller's output. As
// in combine/combine.cu some blocks send and the others sum; its chunks, signals and ends are used here too.
//
// A sender makes a tile of a partial in float32, quantises it on its way to the inbox, and stores the scales of its
// blocks beside it (combine/fp8_send.cuh); a tile has whole blocks, so no warp waits for another. The owner multiplies
// and adds in order of positions. This rank's own partials go through its inbox: they are rounded as all others are.
//
// Floor: (H + 4 * ceil(H / 128)) / (2 * H) of what bfloat16 has on the link, 0.516 for 7168 elements. The last rows do
// not go as packets, so a fence, a signal and a flight follow the last chunk, some 5 us: with few tokens that is more
// than half of the bytes saves. A quantising pass before a combine of plain rows would read all rows once and write
// half of that, 60 us for 4096 tokens between four ranks, in which the link has nothing to do. Measured: 0.65x at 4096
// tokens, 0.94x at 512 between two, where half of the rows stay (2x H200, bench/results/returns-2-gpus.json); 0.56x and
// 0.74x by an older kernel between four (4x H100, returns-4-gpus.json).
//
// What it waits for is memory, so both halves look ahead: a sender loads a row while it quantises the one before, and a
// warp that sums finds its next token meanwhile. What else was tried is in docs/notebook/combine.md.
//
// What breaks if this changes: S3 (late_signal; nothing is written before await_earlier), S4 (chunks), S7 (send before
// sum), S9 (order of terms, combine/fp8.cuh).
#include <cuda_runtime.h>

#include "cuda/combine/chunks.cuh"
#include "cuda/combine/drawn.cuh"
#include "cuda/combine/end.cuh"
#include "cuda/combine/fp8_send.cuh"
#include "cuda/launch/bias.h"
#include "cuda/launch/launch.h"
#include "cuda/launch/loading.h"

namespace tw::cuda {
namespace {

// ---- Summing

// Sums a tile of a token whose terms have been found, all of them in the inbox. With kBiased the sum starts from its
// row of `bias`, which may lie where the sum goes: a thread stores what it has loaded. `look_ahead()` is called once,
// while terms are on their way. kPairs: terms that are loaded before the first of them is added.
template <bool kFast, bool kBiased, int kPairs, class LookAhead>
__device__ __forceinline__ void sum_fp8_tile(const Fp8Sum& s, const BiasRows* bias, int token, int fan, uint32_t tile,
                                             LookAhead&& look_ahead) {
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
    if (position == 0) look_ahead();
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
  if (fan == 0) look_ahead();
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

// Sums tiles of all tokens, in order, each by whichever warp is free (combine/combine.cu, sum_tokens). A warp draws its
// next tile when the rows of this one are here, so that a warp that waits holds no other; where the next one's rows
// come from is on its way while this one is summed.
//
// Tokens of up to two terms, all of them between two ranks, have code of their own: what is loaded for terms that are
// not there is as much again. With both a combine of 4096 tokens took 120.4 us instead of 123.1 (2x H200).
template <bool kFast, bool kBiased>
__device__ void sum_fp8_tokens(const Fp8Sum& s, const BiasRows* bias) {
  const CombineParams& p = s.p;
  const uint32_t per_row = p.tiles.per_row.divisor;
  const uint32_t end = static_cast<uint32_t>(p.tokens) * per_row;
  Draws draws{sum_counters(p.group, s.step), received_shares(p.roles), end};
  const auto load = [&](uint32_t item) {
    return item < end ? load_sent(p, static_cast<int>(divide(item, p.tiles.per_row)), lane()) : Sent{};
  };
  uint32_t item = draws.first(s.sums());
  Sent sent = load(item);
#pragma unroll 1
  while (item < end) {
    const uint32_t row = divide(item, p.tiles.per_row);
    const auto token = static_cast<int>(row);
    const Terms terms = find_terms(s, token, sent);
    draws.ask();
    uint32_t next = end;
    const auto look_ahead = [&] {
      next = draws.next();
      sent = load(next);
    };
    const uint32_t tile = item - row * per_row;
    if (!terms.here) {
      give_up_token(s, token);
      look_ahead();
    } else if (kFast && terms.fan <= 2) {
      sum_fp8_tile<kFast, kBiased, 2>(s, bias, token, terms.fan, tile, look_ahead);
    } else {
      sum_fp8_tile<kFast, kBiased, 4>(s, bias, token, terms.fan, tile, look_ahead);
    }
    item = next;
  }
}

// Does what is left when a block has sent.
template <bool kFast, bool kBiased>
__device__ inline void conclude_fp8(const Fp8Sum& s, const BiasRows* bias) {
  conclude_step(s, [&] {
    if (s.sums() || (s.p.receive && s.p.joins)) sum_fp8_tokens<kFast, kBiased>(s, bias);
  });
}

// kFast: rows of bfloat16 in whole tiles, each a partial as it lies, of which a sum of the same type is made. It is the
// usual call, and has an instance of its own: with all types and layouts in one a warp goes through more code for a
// tile, and 4096 tokens took 134 us for 127 (2x H200).
template <bool kFast>
__global__ void __launch_bounds__(kThreads, 1) combine_fp8_kernel(const __grid_constant__ Fp8Params q) {
  let_next_begin();
  const CombineParams& p = q.call;
  Fp8Sum s{{p, Step{0, p.channel, p.bound, twPhaseCombine, p.rows_digest}}, q};
  if (!begin_step<true>(&s, q)) return;
  if (s.sends()) {
    send_in_chunks(s, [&] {
      if constexpr (kFast) {
        send_usual(s);
      } else {
        push_chunks<twDtypeNone, false>(s);
      }
    });
  }
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
