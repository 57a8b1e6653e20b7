// Partials and sums on a device: the order and the bits of exchange/summation.h, the terms of views/. Compiled without
// contraction of multiplications and additions.
//
// Takes rows in the caller's memory and a handle's metadata; gives words or vectors of a partial in the wire's type.
//
// What breaks if this changes: the bits of results (docs/PROTOCOL.md, Order of summation; S9). Every backend and the
// NumPy oracle return the same: the first term begins the sum, terms are added in order of k, each operation is rounded
// to nearest even, and one term alone without a weight passes through.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/device/routing.cuh"
#include "cuda/launch/combine.h"

namespace tw::cuda {

__host__ __device__ constexpr int float_bytes(twDtype_t dtype) { return dtype == twFloat32 ? 4 : 2; }

__device__ inline float widen(twDtype_t dtype, uint32_t bits) {
  if (dtype == twBfloat16) return __uint_as_float(bits << 16);
  if (dtype == twFloat16) return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  return __uint_as_float(bits);
}
__device__ inline uint32_t narrow(twDtype_t dtype, float value) {
  if (dtype == twBfloat16) return __bfloat16_as_ushort(__float2bfloat16_rn(value));
  if (dtype == twFloat16) return __half_as_ushort(__float2half_rn(value));
  return __float_as_uint(value);
}

// The elements of 8 bytes: 4 of 16 bits, or 2 of 32.
struct Quad {
  float v[4];
};
__device__ inline Quad widen_word(twDtype_t dtype, uint64_t word) {
  const auto low = static_cast<uint32_t>(word);
  const auto high = static_cast<uint32_t>(word >> 32);
  if (dtype == twBfloat16) {
    return {__uint_as_float(low << 16), __uint_as_float(low & 0xffff0000u), __uint_as_float(high << 16),
            __uint_as_float(high & 0xffff0000u)};
  }
  if (dtype == twFloat32) return {__uint_as_float(low), __uint_as_float(high), 0.0f, 0.0f};
  const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&low));
  const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&high));
  return {a.x, a.y, b.x, b.y};
}
__device__ inline uint32_t narrow_two(twDtype_t dtype, float a, float b) {
  if (dtype == twBfloat16) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&both);
  }
  const __half2 both = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&both);
}
// Packs a quad into 8 bytes; for 16-bit types alone.
__device__ inline uint64_t narrow_word(twDtype_t dtype, const Quad& quad) {
  return narrow_two(dtype, quad.v[0], quad.v[1]) | static_cast<uint64_t>(narrow_two(dtype, quad.v[2], quad.v[3])) << 32;
}
__device__ inline void add(Quad* sum, const Quad& term, bool first) {
#pragma unroll
  for (int e = 0; e < 4; ++e) sum->v[e] = first ? term.v[e] : __fadd_rn(sum->v[e], term.v[e]);
}

// Gives the one row of a slot in rank_major, in a call whose rows all go as packets.
__device__ inline const std::byte* row_of(const CombineParams& p, int source, int slot) {
  return p.rows + source * p.block_stride + slot * p.row_stride;
}

// row_in gives the row of a slot in any call, flat layouts included; meta_row gives the row of its metadata.
__device__ inline const std::byte* row_in(const CombineParams& p, int source, int slot) {
  return p.rows + source * p.block_stride + (shared_at<int32_t>(p.at.first)[source] + slot) * p.row_stride;
}
__device__ inline int64_t meta_row(const CombineParams& p, int source, int slot) {
  const int64_t begin = p.group.map.shape().exact() ? 0 : int64_t{source} * p.bound;
  return begin + shared_at<int32_t>(p.at.first)[source] + slot;
}

// What a handle keeps of the k-th choice of a row.
struct KeptChoice {
  ExpertRow place;  // expert -1: there is none, or it is another rank's; in rank_major nothing else in it counts
  float weight;     // where weights are wanted
};
// Loads it. `row`: meta_row. By expert the dispatch's places say everything, so that one round trip is enough.
__device__ inline KeptChoice load_choice(const CombineParams& p, int64_t row, int k) {
  const GroupView& g = p.group;
  const int top_k = g.map.shape().top_k;
  KeptChoice choice{{-1, 0}, 0.0f};
  if (k >= top_k) return choice;
  const int32_t* const ids = kept_ids(p.handle, top_k, row);
  if (p.weighted) choice.weight = __uint_as_float(load_fresh<uint32_t>(ids + top_k + k));
  if (p.expert_major) {
    choice.place = load_both(p.handle.places + row * top_k + k);
    return choice;
  }
  const auto id = static_cast<int32_t>(load_fresh<uint32_t>(ids + k));
  const bool real = id >= 0 && id < g.map.shape().experts;
  const uint32_t expert = real ? g.experts[id] : 0;
  if (real && expert_rank(expert) == g.me) choice.place.expert = expert_slot(expert);
  return choice;
}

// Collects the terms of the partial of slot (source, p), into a set in shared memory. `first`: the thread's choice. By
// one whole warp.
__device__ __noinline__ static void collect_terms(const CombineParams& p, int set, int source, int slot,
                                                  KeptChoice first) {
  const int top_k = p.group.map.shape().top_k;
  const auto rows = shared_at<const std::byte*>(p.at.rows) + set * top_k;
  const auto row_weights = shared_at<float>(p.at.weights) + set * top_k;
  int count = 0;
  float total = 0.0f;
  __syncwarp();  // the set is about to be overwritten
#pragma unroll 1
  for (int base = 0; base < top_k; base += 32) {
    const KeptChoice choice = base == 0 ? first : load_choice(p, meta_row(p, source, slot), base + lane());
    const bool local = choice.place.expert >= 0;
    uint32_t all = __ballot_sync(~0u, local);
    if (p.expert_major && local) {
      const int j = count + __popc(all & below(lane()));
      rows[j] = p.rows + choice.place.expert * p.block_stride + choice.place.row * p.row_stride;
      row_weights[j] = choice.weight;
    }
    const bool begun = count != 0;
    count += __popc(all);
    if (p.expert_major) continue;
#pragma unroll 1
    for (bool begins = !begun; all != 0; begins = false) {  // k ascending, as the sum of weights is defined
      const float next = __shfl_sync(~0u, choice.weight, __ffs(static_cast<int>(all)) - 1);
      total = begins ? next : __fadd_rn(total, next);
      all &= all - 1;
    }
  }
  if (lane() == 0) {
    if (!p.expert_major) {
      rows[0] = row_in(p, source, slot);
      row_weights[0] = total;
      count = 1;
    }
    shared_at<int32_t>(p.at.row_counts)[set] = count;
  }
  __syncwarp();
}

// Splits 16 bytes of the wire's type into the two quads of 8.
__device__ inline uint64_t low_half(const uint4& v) { return v.x | static_cast<uint64_t>(v.y) << 32; }
__device__ inline uint64_t high_half(const uint4& v) { return v.z | static_cast<uint64_t>(v.w) << 32; }
template <twDtype_t kWire>
__device__ inline uint4 narrow_vector(const Quad& low, const Quad& high) {
  if (kWire == twFloat32) {
    return make_uint4(__float_as_uint(low.v[0]), __float_as_uint(low.v[1]), __float_as_uint(high.v[0]),
                      __float_as_uint(high.v[1]));
  }
  return make_uint4(narrow_two(kWire, low.v[0], low.v[1]), narrow_two(kWire, low.v[2], low.v[3]),
                    narrow_two(kWire, high.v[0], high.v[1]), narrow_two(kWire, high.v[2], high.v[3]));
}

// Sums vectors first, first + 32, ... below `end` of rows that are of the wire's type and allow vectors, in their
// order. A sum of one term without a weight is that term, bit for bit.
template <twDtype_t kWire, int kAtOnce>
__device__ inline void sum_vectors(const std::byte* const* rows, const float* weights, bool weighted, int count,
                                   uint32_t first, uint32_t end, uint4 (&bits)[kAtOnce]) {
  constexpr int kRows = 4;  // rows that are on their way at once
  Quad low[kAtOnce] = {};
  Quad high[kAtOnce] = {};
#pragma unroll 1
  for (int j = 0; j < count; j += kRows) {
    uint4 term[kRows][kAtOnce] = {};
#pragma unroll
    for (int t = 0; t < kRows; ++t) {
      if (j + t >= count) continue;
      const auto* const row = reinterpret_cast<const uint4*>(rows[j + t]);
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (first + 32 * u < end) term[t][u] = load_fresh<uint4>(row + first + 32 * u);
      }
    }
    if (count == 1 && !weighted) {
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) bits[u] = term[0][u];
      return;
    }
#pragma unroll
    for (int t = 0; t < kRows; ++t) {
      if (j + t >= count) continue;
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        Quad a = widen_word(kWire, low_half(term[t][u]));
        Quad b = widen_word(kWire, high_half(term[t][u]));
#pragma unroll
        for (int e = 0; weighted && e < 4; ++e) {
          a.v[e] = __fmul_rn(weights[j + t], a.v[e]);
          b.v[e] = __fmul_rn(weights[j + t], b.v[e]);
        }
        add(&low[u], a, j + t == 0);
        add(&high[u], b, j + t == 0);
      }
    }
  }
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) bits[u] = narrow_vector<kWire>(low[u], high[u]);
}
// Does so with a set's partial, where sums_fit.
template <twDtype_t kWire, int kAtOnce>
__device__ inline void sum_partial(const CombineParams& p, int set, uint32_t first, uint32_t end,
                                   uint4 (&bits)[kAtOnce]) {
  const int top_k = p.group.map.shape().top_k;
  sum_vectors<kWire, kAtOnce>(shared_at<const std::byte*>(p.at.rows) + set * top_k,
                              shared_at<float>(p.at.weights) + set * top_k, p.weighted != 0,
                              shared_at<int32_t>(p.at.row_counts)[set], first, end, bits);
}

__device__ inline float load_element(const std::byte* row, twDtype_t dtype, int64_t i) {
  if (dtype == twFloat32) return __uint_as_float(load_fresh<unsigned int>(row + 4 * i));
  return widen(dtype, load_fresh<unsigned short>(row + 2 * i));
}

// Gives 8 bytes of a set's partial in the wire's type, whatever the types and weights; elements beyond the row are 0.
__device__ __noinline__ static uint64_t sum_word(const CombineParams& p, int set, int64_t w) {
  const int top_k = p.group.map.shape().top_k;
  const auto rows = shared_at<const std::byte*>(p.at.rows) + set * top_k;
  const auto weights = shared_at<float>(p.at.weights) + set * top_k;
  const int count = shared_at<int32_t>(p.at.row_counts)[set];
  const int size = float_bytes(p.wire_dtype);
  const int per_word = 8 / size;
  // A sum of one term is that term, bit for bit.
  const bool same = !p.weighted && p.rows_dtype == p.wire_dtype;
  if (same && count == 1) {
    return load_bytes(rows[0] + 8 * w, static_cast<int64_t>(p.group.map.shape().combine_bytes) - 8 * w);
  }
  Quad sum{};
  const bool vector = p.word_sums_fit != 0;
  constexpr int kRows = 4;  // rows that are on their way at once
#pragma unroll 1
  for (int base = 0; base < count; base += kRows) {
    uint64_t words[kRows] = {};
#pragma unroll
    for (int t = 0; t < kRows; ++t) {
      if (vector && base + t < count) words[t] = load_fresh<unsigned long long>(rows[base + t] + 8 * w);
    }
#pragma unroll
    for (int t = 0; t < kRows; ++t) {
      const int j = base + t;
      if (j >= count) continue;
      Quad term = widen_word(p.rows_dtype, words[t]);
      for (int e = 0; !vector && e < per_word; ++e) {
        term.v[e] = w * per_word + e < p.elements ? load_element(rows[j], p.rows_dtype, w * per_word + e) : 0.0f;
      }
      for (int e = 0; p.weighted && e < 4; ++e) term.v[e] = __fmul_rn(weights[j], term.v[e]);
      add(&sum, term, j == 0);
    }
  }
  if (size == 2) return narrow_word(p.wire_dtype, sum);
  return __float_as_uint(sum.v[0]) | static_cast<uint64_t>(__float_as_uint(sum.v[1])) << 32;
}

// Stores the elements of word w of a row's sum, of `elements` elements. The terms had type `from`; the result has type
// `to`.
__device__ __noinline__ static void store_elements(twDtype_t from, twDtype_t to, int64_t elements, std::byte* out,
                                                   int64_t w, Quad quad) {
  const int per_word = 8 / float_bytes(from);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int64_t element = w * per_word + e;
    if (e >= per_word || element >= elements) continue;
    const uint32_t bits = narrow(to, quad.v[e]);
    if (to == twFloat32) {
      reinterpret_cast<uint32_t*>(out)[element] = bits;
    } else {
      reinterpret_cast<uint16_t*>(out)[element] = static_cast<uint16_t>(bits);
    }
  }
}
template <twDtype_t kWire, bool kFast>
__device__ inline void store_quad(const CombineParams& p, std::byte* out, int64_t w, const Quad& quad) {
  if (kWire == twFloat32 && kFast) {
    reinterpret_cast<float2*>(out)[w] = make_float2(quad.v[0], quad.v[1]);
  } else if (kWire != twFloat32 && (kFast || (p.words_fit && p.out_dtype == kWire))) {
    *reinterpret_cast<uint64_t*>(out + 8 * w) = narrow_word(kWire, quad);
  } else {
    store_elements(p.wire_dtype, p.out_dtype, p.elements, out, w, quad);
  }
}

}  // namespace tw::cuda
