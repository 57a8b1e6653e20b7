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

// Loads a thread's part of a tile whose elements are all there, of 16 bits, in rows that begin at multiples of 16
// bytes. All of it is on its way before the first of it is looked at.
__device__ __forceinline__ void load_whole(const std::byte* row, twDtype_t dtype, int64_t begin,
                                           Sixteen (&to)[kFp8Steps]) {
  uint4 raw[kFp8Steps][2];
#pragma unroll
  for (int u = 0; u < kFp8Steps; ++u) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      raw[u][i] = load_fresh<uint4>(reinterpret_cast<const uint4*>(row + 2 * (begin + u * kFp8Step)) + i);
    }
  }
#pragma unroll
  for (int u = 0; u < kFp8Steps; ++u) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      spread_word(dtype, low_half(raw[u][i]), 8 * i, &to[u]);
      spread_word(dtype, high_half(raw[u][i]), 8 * i + 4, &to[u]);
    }
  }
}

// Divides by one scale many times. A quotient of IEEE's takes some twenty instructions; with the reciprocal at hand it
// takes five: an estimate, and two corrections by its remainder, of which the last one rounds as IEEE says (Markstein,
// "Computation of elementary functions on the IBM RISC System/6000 processor", 1990: the reciprocal is the nearest
// float32, and the estimate before it is off by less than its last place). That holds where no remainder that counts is
// subnormal. Quotients below half of the least e4m3 do not count, so numbers from 2^-11 times the scale on do, and
// their remainders are 2^-25 of them. Small scales are lifted therefore, with the numbers, which changes no quotient.
struct Scale {
  float scale;
  float inverse;
  float lift;

  __device__ explicit Scale(float of) {
    lift = of < quantize::kSmall ? quantize::kLift : 1.0f;
    scale = __fmul_rn(of, lift);
    inverse = quantize::divide(1.0f, scale);
  }
  // x / scale, rounded to nearest even; a quotient beyond +-512 may be any beyond.
  __device__ float divides(float x) const {
    const float lifted = __fmul_rn(x, lift);  // infinite only where the quotient is beyond 512
    const float estimate = __fmul_rn(lifted, inverse);
    const float better = __fmaf_rn(__fmaf_rn(-estimate, scale, lifted), inverse, estimate);
    const float quotient = __fmaf_rn(__fmaf_rn(-better, scale, lifted), inverse, better);
    return copysignf(fabsf(estimate) < 512.0f ? quotient : estimate, x);  // remainders of 0 lose the sign of a zero
  }
};

// A quotient that ends at +-448, where the conversion to e4m3 does not see to that.
__device__ __forceinline__ float ended(float quotient) {
#if __CUDA_ARCH__ >= 890
  return quotient;
#else
  return quantize::saturated(quotient);
#endif
}
// Packs sixteen quotients as e4m3.
template <class Quotient>
__device__ __forceinline__ void pack_sixteen(Quotient&& quotient, uint32_t (&words)[4]) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const auto value = [&](int i) { return ended(quotient(4 * w + i)); };
    words[w] = quantize::e4m3_pair(value(0), value(1)) | quantize::e4m3_pair(value(2), value(3)) << 16;
  }
}
// Converts sixteen numbers to e4m3 by their scale.
//
// A number times the reciprocal of the scale is off the quotient by less than three of its last places. Both become the
// same e4m3 unless a number half-way between two of these lies between them, or is one of them. From 2^-6 on such a
// number's last 20 bits are 1 and zeros. Where one is near, or a value is so small that e4m3 has fewer bits for it
// (codes below 0x10, which some elements in ten thousand have), the thread divides. So an element takes 6 instructions
// instead of 17, with which a combine of thousands of tokens waited for quotients and not for the link.
__device__ __forceinline__ uint4 narrow_sixteen(const Sixteen& x, const Scale& scale) {
  constexpr uint32_t kFraction = 0x7fffff;
  constexpr uint32_t kHalfWay = 0x80000;
  constexpr uint32_t kApart = 4;  // last places
  constexpr uint32_t kLast = 2 * kHalfWay - 2 * kApart;
  const float factor = __fmul_rn(scale.inverse, scale.lift);  // exact
  uint32_t words[4];
  bool near = false;
  pack_sixteen(
      [&](int i) {
        const float estimate = __fmul_rn(x.v[i], factor);
        near |= ((__float_as_uint(estimate) + kHalfWay + kApart) & kLast) == 0;
        return estimate;
      },
      words);
#pragma unroll
  for (int w = 0; w < 4; ++w) near |= (((words[w] & 0x70707070u) + 0x70707070u) & 0x80808080u) != 0x80808080u;
  // Of a power of two the estimate is the quotient.
  if (near && (__float_as_uint(scale.scale) & kFraction) != 0) {
    pack_sixteen([&](int i) { return scale.divides(x.v[i]); }, words);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}
// Makes NaN of those that were no numbers, or of all: of one block, where one was none.
__device__ __forceinline__ uint4 spoil_sixteen(const Sixteen& x, bool all, const uint4& values) {
  uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
  for (int i = 0; i < kFp8Each; ++i) {
    const int shift = 8 * (i % 4);
    if (!all && !quantize::spoils(x.v[i])) continue;
    words[i / 4] = (words[i / 4] & ~(uint32_t{UINT8_MAX} << shift)) | uint32_t{quantize::kNanValue} << shift;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
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
// The largest of the magnitudes, as bits; block_largest: of the threads that share a block, by a whole warp.
__device__ __forceinline__ uint32_t largest_of(const Sixteen& x) {
  uint32_t magnitude = 0;
#pragma unroll
  for (int i = 0; i < kFp8Each; ++i) magnitude = larger_of(magnitude, x.v[i]);
  return magnitude;
}
__device__ __forceinline__ uint32_t block_largest(uint32_t magnitude) {
#pragma unroll
  for (int distance = kFp8Sharing / 2; distance > 0; distance /= 2) {
    magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, distance));
  }
  return magnitude;
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
