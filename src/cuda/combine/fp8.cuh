// Elements of rows that return as e4m3, as a warp sees them: a thread has 16 at a time, which are 16 bytes on the wire,
// and eight threads share a block of 128 and its scale. The bits are those of quantize/wire.h, as on the CPU.
//
// Takes rows of the caller, gives values and scales; takes those, gives float32.
//
// What breaks if this changes: the bits of results (S9).
#pragma once

#include "cuda/device/sum.cuh"
#include "layout/fp8_rows.h"
#include "quantize/device.cuh"
#include "quantize/wire.h"

namespace tw::cuda {

constexpr int kFp8Each = 16;                          // elements of a thread
constexpr uint32_t kFp8Step = 32 * kFp8Each;          // of a warp
constexpr int kFp8Steps = kFp8Tile / kFp8Step;        // of a tile
constexpr int kFp8Sharing = kFp8Elements / kFp8Each;  // threads that share a scale
static_assert(kFp8Tile % kFp8Step == 0 && kFp8Step % kFp8Elements == 0, "a block lies in one step of a warp");

struct Sixteen {
  float v[kFp8Each];
};

// The four of 8 bytes of a 16-bit type, or the two of float32, at `at` of the sixteen.
__device__ __forceinline__ void spread_word(twDtype_t dtype, uint64_t word, int at, Sixteen* to) {
  const Quad quad = widen_word(dtype, word);
  to->v[at] = quad.v[0];
  to->v[at + 1] = quad.v[1];
  if (dtype == twFloat32) return;
  to->v[at + 2] = quad.v[2];
  to->v[at + 3] = quad.v[3];
}

// Loads the thread's elements of a row, from `first` on; those beyond the row are 0, which changes no largest
// magnitude. `fits`: rows begin at multiples of 16 bytes.
__device__ __forceinline__ void load_sixteen(const std::byte* row, twDtype_t dtype, int64_t first, int64_t elements,
                                             bool fits, Sixteen* to) {
  if (fits && first + kFp8Each <= elements) {
    const int size = float_bytes(dtype);
    const auto* const vectors = reinterpret_cast<const uint4*>(row + first * size);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= size) continue;  // a 16-bit type has two vectors
      const uint4 vector = load_fresh<uint4>(vectors + i);
      if (size == 4) {
        spread_word(twFloat32, low_half(vector), 4 * i, to);
        spread_word(twFloat32, high_half(vector), 4 * i + 2, to);
      } else if (i < 2) {
        spread_word(dtype, low_half(vector), 8 * i, to);
        spread_word(dtype, high_half(vector), 8 * i + 4, to);
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kFp8Each; ++i) to->v[i] = first + i < elements ? load_element(row, dtype, first + i) : 0.0f;
}

// The larger of a magnitude, as bits, and a number's: NaN is larger than infinity.
__device__ __forceinline__ uint32_t larger_of(uint32_t magnitude, float x) {
#if __CUDA_ARCH__ >= 800
  float larger;  // one instruction
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(__uint_as_float(magnitude)), "f"(fabsf(x)));
  return __float_as_uint(larger);
#else
  return max(magnitude, __float_as_uint(x) & quantize::kMagnitude);
#endif
}
// The largest of the magnitudes, as bits.
__device__ __forceinline__ uint32_t largest_of(const Sixteen& x) {
  uint32_t magnitude = 0;
#pragma unroll
  for (int i = 0; i < kFp8Each; ++i) magnitude = larger_of(magnitude, x.v[i]);
  return magnitude;
}
// The same of sixteen elements of a 16-bit type. Magnitudes of either type have the order of their bits as integers,
// NaN above infinity, so the larger halves of two words are those of an unsigned comparison.
template <twDtype_t kType>
__device__ __forceinline__ uint32_t largest_of_pairs(const uint4& a, const uint4& b) {
  constexpr uint32_t kBoth = 0x7fff7fff;
  const auto larger = [](uint32_t x, uint32_t y) { return __vmaxu2(x, y); };
  const uint32_t words[8] = {a.x & kBoth, a.y & kBoth, a.z & kBoth, a.w & kBoth,
                             b.x & kBoth, b.y & kBoth, b.z & kBoth, b.w & kBoth};
  const uint32_t pair = larger(larger(larger(words[0], words[1]), larger(words[2], words[3])),
                               larger(larger(words[4], words[5]), larger(words[6], words[7])));
  return __float_as_uint(widen(kType, max(pair & 0xffff, pair >> 16)));
}
// The largest of those of the threads that share a block, by a whole warp.
__device__ __forceinline__ uint32_t block_largest(uint32_t magnitude) {
#pragma unroll
  for (int distance = kFp8Sharing / 2; distance > 0; distance /= 2) {
    magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, distance));
  }
  return magnitude;
}

// Loads a thread's part of a tile whose elements are all there, of a 16-bit type, in rows that begin at multiples of 16
// bytes. All of it is on its way before the first of it is looked at.
__device__ __forceinline__ void load_raw(const std::byte* row, int64_t begin, uint4 (&raw)[kFp8Steps][2]) {
#pragma unroll
  for (int u = 0; u < kFp8Steps; ++u) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      raw[u][i] = load_fresh<uint4>(reinterpret_cast<const uint4*>(row + 2 * (begin + u * kFp8Step)) + i);
    }
  }
}
// Widens what load_raw has loaded. `largest`: the largest magnitude of each step, as largest_of gives it, found two
// elements at a time.
template <twDtype_t kType>
__device__ __forceinline__ void widen_raw(const uint4 (&raw)[kFp8Steps][2], Sixteen (&to)[kFp8Steps],
                                          uint32_t (&largest)[kFp8Steps]) {
#pragma unroll
  for (int u = 0; u < kFp8Steps; ++u) {
    largest[u] = largest_of_pairs<kType>(raw[u][0], raw[u][1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      spread_word(kType, low_half(raw[u][i]), 8 * i, &to[u]);
      spread_word(kType, high_half(raw[u][i]), 8 * i + 4, &to[u]);
    }
  }
}
template <twDtype_t kType>
__device__ __forceinline__ void load_whole(const std::byte* row, int64_t begin, Sixteen (&to)[kFp8Steps],
                                           uint32_t (&largest)[kFp8Steps]) {
  uint4 raw[kFp8Steps][2];
  load_raw(row, begin, raw);
  widen_raw<kType>(raw, to, largest);
}

// A quotient that ends at +-448, where the conversion to e4m3 does not see to that.
__device__ __forceinline__ float ended(float quotient) {
#if __CUDA_ARCH__ >= 890
  return quotient;
#else
  return quantize::saturated(quotient);
#endif
}

// Gives the scale of a block by its largest magnitude: quantize::scale_of(magnitude, false), without a branch, so that
// the blocks of a tile are worked on side by side.
__device__ __forceinline__ float block_scale(uint32_t magnitude) {
  constexpr float kInverse = 1.0f / quantize::kLargest;
  const float x = __uint_as_float(magnitude);
  const float estimate = __fmul_rn(x, kInverse);
  const float quotient = __fmaf_rn(__fmaf_rn(estimate, quantize::kLargest, -x), -kInverse, estimate);
  const float scale = fmaxf(quotient, quantize::kLeastScale);
  return magnitude == 0 ? 1.0f : magnitude < quantize::kInfinity ? scale : __uint_as_float(0x7fc00000u);
}

// Divides by one scale many times, by three instructions instead of the twenty of a division: an estimate by the
// reciprocal, its remainder, which is exact, and a correction by that. The sign of a zero stays. The quotient is IEEE's
// (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990), which holds where no
// remainder that counts is subnormal, no estimate is infinite, and the reciprocal is the nearest float32. The last was
// tried with all fractions of a scale, and all numbers whose quotient lies next to one that e4m3 rounds either way: one
// step of Newton's after an estimate that is off by a last place gives quotients that are right, except for two scales,
// whose fractions are at the end of all.
//
// Rejected: a test whether x * (1 / scale) could round otherwise, and a division only then. Rows of bfloat16 have so
// few bits that three quarters of a block's largest element, whose quotient lies half-way between two e4m3, is in most
// blocks, so nearly every warp divided.
struct Scale {
  float scale;
  float inverse;
  bool usual;  // false: quotient() may be off

  // `largest`: the largest magnitude that will be divided, as bits.
  __device__ __forceinline__ Scale(float of, uint32_t largest) : scale(of) {
    constexpr uint32_t kFraction = 0x7fffff;
    const float estimate = reciprocal_near(of);
    inverse = __fmaf_rn(estimate, __fmaf_rn(-of, estimate, 1.0f), estimate);
    usual = of >= quantize::kSmall && __fmul_rn(__uint_as_float(largest), inverse) < quantize::kMostQuotient &&
            (__float_as_uint(of) & kFraction) < kFraction - 2;
  }
  __device__ __forceinline__ float quotient(float x) const {
    const float estimate = __fmul_rn(x, inverse);
    return __fmaf_rn(__fmaf_rn(estimate, scale, -x), -inverse, estimate);
  }
  // Off by a last place at most on devices (all fractions, nine exponents, H200). Elsewhere it is made so.
  static __device__ __forceinline__ float reciprocal_near(float x) {
#ifdef __CUDA_ARCH__
    float near;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(x));
    return near;
#else
    const uint32_t bits = __float_as_uint(x);
    return __uint_as_float(__float_as_uint(quantize::divide(1.0f, x)) + bits % 3 - 1);
#endif
  }
};

// Converts sixteen elements to e4m3 one by one, in every case. `spoiled`: all of them become NaN.
__device__ __noinline__ static uint4 narrow_any(const Sixteen& x, float scale, bool spoiled) {
  uint32_t words[4] = {};
#pragma unroll 1
  for (int i = 0; i < kFp8Each; ++i) {
    const uint32_t code = spoiled ? uint32_t{quantize::kNanValue} : quantize::e4m3_scaled(x.v[i], scale);
    words[i / 4] |= code << (8 * (i % 4));
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}
// Converts sixteen elements to e4m3. `largest`: of their magnitudes or, where their block has a scale of its own
// (in_blocks), of the block's; if that is no number, all of a block is spoiled, else what is none.
__device__ __forceinline__ uint4 narrow_sixteen(const Sixteen& x, float scale, uint32_t largest, bool in_blocks) {
  const Scale by(scale, largest);
  if (!by.usual) {
    const Sixteen copy = x;  // what has an address lies in memory
    return narrow_any(copy, scale, in_blocks && largest >= quantize::kInfinity);
  }
  uint32_t words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const auto value = [&](int i) { return ended(by.quotient(x.v[4 * w + i])); };
    words[w] = quantize::e4m3_pair(value(0), value(1)) | quantize::e4m3_pair(value(2), value(3)) << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Gives the value of byte `at` of four e4m3.
__device__ __forceinline__ float2 widen_pair(uint32_t word, int at) {
  const uint32_t pair = word >> (8 * at);
#if __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
  return __half22float2(*reinterpret_cast<const __half2*>(&halves));
#else
  return make_float2(quantize::e4m3_float(static_cast<uint8_t>(pair)),
                     quantize::e4m3_float(static_cast<uint8_t>(pair >> 8)));
#endif
}

// Adds sixteen values times their scale to a sum.
__device__ __forceinline__ void add_sixteen(Sixteen* sum, const uint4& values, float scale, bool first) {
  const uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
  for (int i = 0; i < kFp8Each; i += 2) {
    const float2 pair = widen_pair(words[i / 4], i % 4);
    const float low = __fmul_rn(pair.x, scale);
    const float high = __fmul_rn(pair.y, scale);
    sum->v[i] = first ? low : __fadd_rn(sum->v[i], low);
    sum->v[i + 1] = first ? high : __fadd_rn(sum->v[i + 1], high);
  }
}

// Stores sixteen elements of a row's sum, rounded once; those beyond the row are left out. `fits`: as for loads.
__device__ __forceinline__ void store_sixteen(std::byte* row, twDtype_t dtype, int64_t first, int64_t elements,
                                              bool fits, const Sixteen& sum) {
  const float* const v = sum.v;
  if (!fits || first + kFp8Each > elements) {
#pragma unroll
    for (int i = 0; i < kFp8Each; ++i) {
      if (first + i >= elements) continue;
      const uint32_t bits = narrow(dtype, v[i]);
      if (dtype == twFloat32) {
        reinterpret_cast<uint32_t*>(row)[first + i] = bits;
      } else {
        reinterpret_cast<uint16_t*>(row)[first + i] = static_cast<uint16_t>(bits);
      }
    }
  } else if (dtype == twFloat32) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      reinterpret_cast<float4*>(row + 4 * first)[i] = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto two = [&](int at) { return narrow_two(dtype, v[8 * i + at], v[8 * i + at + 1]); };
      reinterpret_cast<uint4*>(row + 2 * first)[i] = make_uint4(two(0), two(2), two(4), two(2 + 4));
    }
  }
}

}  // namespace tw::cuda
