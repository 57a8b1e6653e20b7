// Conversions of float32 to floats of 8 and 4 bits, for the host and for devices: what the formats of this folder
// share. All round to nearest even, and none asks whether the processor flushes subnormal numbers to 0. A change here
// changes the bits of results, and must be made in the oracles too (tests/py/test_quantize.py, test_microscaling.py).
#pragma once

#include <bit>
#include <cstdint>

#if defined(__CUDACC__)
#define TW_HOST_DEVICE __host__ __device__
#else
#define TW_HOST_DEVICE
#endif

namespace tw::quantize {

inline constexpr uint32_t kMagnitude = 0x7fffffffu;    // a float without its sign
inline constexpr uint32_t kInfinity = 0x7f800000u;     // magnitudes from here on are infinite or NaN
inline constexpr uint32_t kLeastNormal = 0x00800000u;  // magnitudes below are subnormal, or 0

inline constexpr float kLargest = 448.0f;   // of e4m3
inline constexpr uint8_t kNanValue = 0x7f;  // a NaN of e4m3, and one of e5m2

// The product and the quotient rounded to nearest even, and never fused, whatever the flags of the compiler.
TW_HOST_DEVICE inline float times(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
TW_HOST_DEVICE inline float divide(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

// The code, without a sign, of a magnitude in a float with so many bits of fraction and such a bias. A magnitude beyond
// the largest number is the caller's: it becomes codes that the format uses otherwise. It has no branch, so that
// compilers vectorise it.
template <int kFraction, int kBias>
TW_HOST_DEVICE inline uint32_t narrow_magnitude(uint32_t bits) {
  // Below the least normal number an addition puts the last place of a float32 at that of the narrow format: the
  // hardware rounds to nearest even.
  constexpr uint32_t kShift = static_cast<uint32_t>(151 - kBias - kFraction) << 23;
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(bits) + std::bit_cast<float>(kShift)) - kShift;
  constexpr int kDropped = 23 - kFraction;
  constexpr uint32_t kBelowHalf = (1u << (kDropped - 1)) - 1;
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << 23;
  const uint32_t normal = (bits - kRebias + kBelowHalf + (bits >> kDropped & 1u)) >> kDropped;
  constexpr uint32_t kLeast = static_cast<uint32_t>(128 - kBias) << 23;
  return bits < kLeast ? subnormal : normal;
}

// Converts to e4m3 (no infinities, largest 448, NaN 0x7f and 0xff); a value that rounds beyond 448 becomes NaN.
TW_HOST_DEVICE inline uint8_t e4m3(float value) {
  const uint32_t all = std::bit_cast<uint32_t>(value);
  const uint32_t bits = all & kMagnitude;
  constexpr uint32_t kLastFinite = 0x43e80000u;  // 464, half way to what would be 480: to even, 448
  const uint32_t code = narrow_magnitude<3, 7>(bits);
  return static_cast<uint8_t>((all >> 24 & 0x80u) | (bits > kLastFinite ? kNanValue : code));
}

// The value of an e4m3 without a sign; NaN for 0x7f.
TW_HOST_DEVICE inline float e4m3_value(uint8_t code) {
  if (code == kNanValue) return std::bit_cast<float>(0x7fc00000u);
  if (code < 8) return times(static_cast<float>(code), 0x1p-9f);
  return std::bit_cast<float>((code + (120u << 3)) << 20);
}

// A subnormal magnitude times 2^126: a number that no mode of a processor flushes. Exact, and 0 for 0.
TW_HOST_DEVICE inline float raised(uint32_t subnormal) { return std::bit_cast<float>(0x3f800000u | subnormal) - 1.0f; }

}  // namespace tw::quantize
