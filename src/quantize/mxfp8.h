// Quantisation to mxfp8, the MXFP8 formats of the OCP Microscaling Formats (MX) specification 1.0: it defines every
// bit, for the host and for devices. A change here changes the bits of results, and must be made in the oracle too
// (tests/py/test_microscaling.py).
//
// A block is 32 consecutive elements of a row, and their scale one byte of UE8M0: 2^(byte - 127), or NaN for 255. The
// shared exponent is the specification's, floor(log2(largest magnitude)) - emax, where emax is the largest exponent of
// the elements' format: 8 of e4m3, 15 of e5m2. Its floor leaves quotients below 2^(emax + 1), which is above the
// largest number of the format; these saturate.
//
//   NaN or infinity     the byte 255, and every value 0x7f, NaN: what spoils a block shows
//   all zero            the byte 0, the least scale; zeros keep their sign
//   else                the shared exponent + 127, at least 0, which is reached below 2^(emax - 126) and in subnormal
//                       numbers; it ends at 254 - emax
//
// A value is x / 2^(byte - 127), which is exact, rounded to nearest even to the format, and at most 448 or 57344.
// Whether the processor flushes subnormal numbers to 0 changes nothing.
#pragma once

#include "core/status.h"
#include "quantize/rows.h"
#include "quantize/tiles.h"

namespace tw::quantize {

inline constexpr int kMxBlock = 32;          // elements that share a scale
inline constexpr uint8_t kMxNanScale = 255;  // of UE8M0

// The two formats of elements.
struct E4m3 {
  static constexpr uint32_t kLargestExponent = 8;
  static constexpr uint32_t kLargestBits = 0x43e00000u;  // 448
  static constexpr int kFraction = 3, kBias = 7;
};
struct E5m2 {
  static constexpr uint32_t kLargestExponent = 15;
  static constexpr uint32_t kLargestBits = 0x47600000u;  // 57344
  static constexpr int kFraction = 2, kBias = 15;
};

// The scale of a block. `magnitude`: the largest of its magnitudes, compared as bits, as in quantize/fp8.h.
template <class Format>
TW_HOST_DEVICE inline uint8_t mx_scale(uint32_t magnitude) {
  if (magnitude >= kInfinity) return kMxNanScale;
  const uint32_t exponent = magnitude >> 23;  // floor(log2) + 127; 0 for 0 and for subnormal numbers
  return static_cast<uint8_t>(exponent > Format::kLargestExponent ? exponent - Format::kLargestExponent : 0);
}

// What elements of a block are multiplied with; not for the scale NaN. Both are powers of two that are normal numbers,
// or 0 where the product is too small for every format.
struct MxInverse {
  float normal;     // 2^(127 - scale)
  float subnormal;  // 2^(1 - scale): for what `raised` has multiplied with 2^126
};
TW_HOST_DEVICE inline MxInverse mx_inverse(uint8_t scale) {
  const uint32_t least = scale < 128u ? 128u - scale : 0u;
  return {std::bit_cast<float>((254u - scale) << 23), std::bit_cast<float>(least << 23)};
}

// A finite element's magnitude over its block's scale.
TW_HOST_DEVICE inline float mx_quotient(uint32_t magnitude, MxInverse inverse) {
  const bool subnormal = magnitude < kLeastNormal;
  // Both factors are chosen and multiplied once: a branch would keep compilers from vectorising.
  const float from = subnormal ? raised(magnitude) : std::bit_cast<float>(magnitude);
  return times(from, subnormal ? inverse.subnormal : inverse.normal);
}

template <class Format>
TW_HOST_DEVICE inline uint8_t mx_value(float x, MxInverse inverse) {
  const uint32_t all = std::bit_cast<uint32_t>(x);
  const uint32_t bits = std::bit_cast<uint32_t>(mx_quotient(all & kMagnitude, inverse));
  const uint32_t within = bits < Format::kLargestBits ? bits : Format::kLargestBits;
  const uint32_t code = narrow_magnitude<Format::kFraction, Format::kBias>(within);
  return static_cast<uint8_t>((all >> 24 & 0x80u) | code);
}

// One call of twQuantizeMxfp8, checked.
struct MxCall {
  Rows rows;
  int64_t elements;  // of a row, a multiple of kMxBlock
  twDtype_t dtype;   // twFloat32, twBfloat16 or twFloat16
  bool e5m2;         // else e4m3
  Matrix from;
  uint8_t* values;  // [total, elements], contiguous
  ByteScales scales;

  TW_HOST_DEVICE int64_t blocks() const { return elements / kMxBlock; }  // blocks of a row
};

// Quantises on the calling thread.
void quantize_mxfp8_cpu(const MxCall& call);

// Enqueues the kernel on `stream`; as quantize_fp8_cuda. Its cost follows the number of rows that counts say are there.
Status quantize_mxfp8_cuda(const MxCall& call, int32_t device, void* stream);

}  // namespace tw::quantize
