// Quantisation to nvfp4: it defines every bit, for the host and for devices. A change here changes the bits of results,
// and must be made in the oracle too (tests/py/test_microscaling.py).
//
// An element is e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and a sign in bit 3; two lie in a byte, the first in the low half. A
// block is 16 consecutive elements of a row with a scale of e4m3, and a float32 global scale stands behind those:
//
//   global_scale = largest magnitude / (6 * 448), at least 2^-116; 1 if all are 0. Blocks with NaN or infinity do not
//                  count. Or it is given
//   scale        = e4m3(largest magnitude of the block / (6 * global_scale)), at most 448; NaN (0x7f) for a block with
//                  NaN or infinity, and where that quotient is NaN
//   element      = e2m1(x / (scale * global_scale)), at most 6; 0 where the product is 0 or NaN. The sign is x's
//
// in float32, each operation rounded to nearest even. With a global scale of at least 2^-116 no product of scales is
// subnormal, and subnormal elements are raised before they are divided: whether the processor flushes subnormal numbers
// to 0 changes nothing.
#pragma once

#include "core/status.h"
#include "quantize/rows.h"
#include "quantize/tiles.h"

namespace tw::quantize {

inline constexpr int kNvfp4Block = 16;  // elements that share a scale
inline constexpr float kLargestE2m1 = 6.0f;
inline constexpr float kLeastGlobalScale = 0x1p-116f;

// The global scale of a tensor. `magnitude`: the largest of its blocks that are finite.
TW_HOST_DEVICE inline float nvfp4_global_scale(uint32_t magnitude) {
  if (magnitude == 0) return 1.0f;
  const float scale = divide(std::bit_cast<float>(magnitude), kLargestE2m1 * kLargest);
  return scale < kLeastGlobalScale ? kLeastGlobalScale : scale;
}

// The scale of a block, as e4m3. `magnitude`: the largest of its magnitudes, compared as bits, as in quantize/fp8.h.
TW_HOST_DEVICE inline uint8_t nvfp4_scale(uint32_t magnitude, float global_scale) {
  const float scale = divide(std::bit_cast<float>(magnitude), times(kLargestE2m1, global_scale));
  if (magnitude >= kInfinity || scale != scale) return kNanValue;
  return e4m3(scale > kLargest ? kLargest : scale);
}

// What elements of a block are divided by. A step of 0 becomes infinity, which makes every quotient 0.
struct Nvfp4Step {
  float normal;
  float subnormal;  // 2^126 times that: for what `raised` has multiplied so
};
TW_HOST_DEVICE inline Nvfp4Step nvfp4_step(uint8_t scale, float global_scale) {
  const float size = e4m3_value(scale & 0x7fu);
  const float product = times((scale & 0x80u) != 0 ? -size : size, global_scale);
  const float step = product == 0.0f ? std::bit_cast<float>(kInfinity) : product;
  return {step, times(step, 0x1p126f)};
}

// The code of one element, 4 bits.
TW_HOST_DEVICE inline uint32_t nvfp4_value(float x, Nvfp4Step step) {
  const uint32_t all = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = all & kMagnitude;
  const bool subnormal = magnitude < kLeastNormal;
  // Both sides are chosen and divided once: a branch would keep compilers from vectorising.
  const float from = subnormal ? raised(magnitude) : std::bit_cast<float>(magnitude);
  const uint32_t bits = std::bit_cast<uint32_t>(divide(from, subnormal ? step.subnormal : step.normal)) & kMagnitude;
  constexpr uint32_t kLargestBits = 0x40c00000u;  // 6
  const uint32_t within = bits < kLargestBits ? bits : kLargestBits;
  const uint32_t code = bits > kInfinity ? 0u : narrow_magnitude<1, 1>(within);
  return (all >> 28 & 8u) | code;
}

// One call of twQuantizeNvfp4, checked.
struct Nvfp4Call {
  Rows rows;
  int64_t elements;  // of a row, a multiple of kNvfp4Block
  twDtype_t dtype;   // twFloat32, twBfloat16 or twFloat16
  Matrix from;
  uint8_t* values;  // [total, elements / 2], contiguous
  ByteScales scales;
  float* global_scale;       // one, or one for each row, for each block of a row, or for each block
  int64_t global_stride[2];  // in elements; 0 where one serves all
  bool find;                 // it is one, and written

  TW_HOST_DEVICE int64_t blocks() const { return elements / kNvfp4Block; }  // blocks of a row
};

// Quantises on the calling thread.
void quantize_nvfp4_cpu(const Nvfp4Call& call);

// Enqueues the kernels on `stream`; as quantize_fp8_cuda. Their cost follows the number of rows that counts say are
// there. A global scale to be found is found in a pass of its own before, without a wait of the host.
Status quantize_nvfp4_cuda(const Nvfp4Call& call, int32_t device, void* stream);

}  // namespace tw::quantize
