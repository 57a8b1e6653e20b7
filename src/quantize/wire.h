// The bits of rows that a combine returns as e4m3: what quantize/fp8.h defines, where each block of 128 elements has a
// scale of its own, and the values of a scale that the caller gives for all. For the host and for devices. A change
// here changes the bits of results, and must be made in the oracle too (python/tokenway/wire_reference.py).
//
// With a scale that is given:
//
//   NaN or infinity      0x7f, NaN: what spoils an element shows
//   else                 e4m3(x / scale), the division rounded as IEEE says; beyond 448 it saturates: 448, with its
//   sign
//
// Whoever receives a value multiplies it with its scale in float32, rounded once.
#pragma once

#include "quantize/fp8.h"

namespace tw::quantize {

// A scale that is given lies in between: then no product of a scale and a value is subnormal or infinite, and inputs
// below the normal numbers become 0 in every mode of a processor.
inline constexpr float kLeastGiven = kLeastScale;
inline constexpr float kMostGiven = 0x1p+116f;

// Where a scale is at least kSmall, and no quotient by it reaches kMostQuotient, remainders of quotients that become
// another e4m3 than 0 are normal numbers, and no estimate of one is infinite.
inline constexpr float kSmall = 0x1p-60f;
inline constexpr float kMostQuotient = 0x1p+120f;

// A number or an infinity that ends at +-448.
TW_HOST_DEVICE inline float saturated(float value) {
  const float above = value < -kLargest ? -kLargest : value;
  return above > kLargest ? kLargest : above;
}
TW_HOST_DEVICE inline bool spoils(float value) { return (std::bit_cast<uint32_t>(value) & kMagnitude) >= kInfinity; }
TW_HOST_DEVICE inline uint8_t e4m3_scaled(float value, float scale) {
  return spoils(value) ? kNanValue : e4m3(saturated(divide(value, scale)));
}

// The value of an e4m3 with its sign.
TW_HOST_DEVICE inline float e4m3_float(uint8_t code) {
  const float magnitude = e4m3_value(code & 0x7f);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | static_cast<uint32_t>(code & 0x80) << 24);
}

}  // namespace tw::quantize
