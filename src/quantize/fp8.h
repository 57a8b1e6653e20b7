// Quantisation to e4m3 with a scale per block of 128 elements: it defines every bit, for the host and for devices. A
// change here changes the bits of results, and must be made in the oracle too (tests/py/test_quantize.py).
//
// A block is up to 128 consecutive elements of a row (the last block of a row may be shorter). Its scale:
//
//   all zero             1
//   NaN or infinity      the NaN 0x7fc00000, and every value of the block is 0x7f, NaN: what spoils a block shows
//   else                 largest magnitude / 448, rounded as IEEE says, or the smallest power of two that is not below
//                        the exact quotient; in both modes at least kLeastScale, 2^-116
//
// Its values are e4m3(x / scale), with the division rounded as IEEE says, too. So zeros keep their sign, and no
// quotient is beyond 448 by more than a rounding, which e4m3 rounds back.
//
// Why 2^-116: an input below the normal numbers (2^-126) then has a quotient below half of the smallest e4m3. So it
// becomes 0 whether or not the processor has been told to flush subnormal numbers to 0. Blocks of magnitudes below
// 5.4e-33 (448 * 2^-116) pay for it with precision.
#pragma once

#include <cstddef>

#include "core/status.h"
#include "quantize/rows.h"

namespace tw::quantize {

inline constexpr int kBlock = 128;  // elements that share a scale
inline constexpr float kLeastScale = 0x1p-116f;

// The scale of a block. `magnitude`: the largest of its magnitudes, compared as bits. So NaN is larger than infinity,
// infinity is larger than all numbers, and none of them is lost, in whatever order the elements are looked at.
TW_HOST_DEVICE inline float scale_of(uint32_t magnitude, bool power_of_two) {
  if (magnitude == 0) return 1.0f;
  if (magnitude >= kInfinity) return std::bit_cast<float>(0x7fc00000u);
  if (power_of_two) {
    // 448 is 1.75 * 2^8: m * 2^e over 448 lies in (2^(e-9), 2^(e-8)] if m <= 1.75, else in (2^(e-8), 2^(e-7)). Adding
    // 0x1fffff carries into the exponent exactly where the fraction is above 0.75.
    const int exponent = static_cast<int>((magnitude + 0x1fffffu) >> 23) - 8;
    constexpr int kLeast = 127 - 116;
    return std::bit_cast<float>(static_cast<uint32_t>(exponent < kLeast ? kLeast : exponent) << 23);
  }
  const float scale = divide(std::bit_cast<float>(magnitude), kLargest);
  return scale < kLeastScale ? kLeastScale : scale;
}

// Where scales go, here and in src/activation.
struct Scales {
  float* data;        // [rows, blocks], or packed [rows, ceil(blocks / 4)], of 4 bytes each; NULL: there are none
  int64_t stride[2];  // in such elements
  int64_t blocks;     // of a row
  bool packed;        // UE8M0, four to an int32; then they are powers of two

  static constexpr int64_t blocks_of(int64_t elements) { return (elements + kBlock - 1) / kBlock; }

  TW_HOST_DEVICE void put(int64_t row, int64_t block, float scale) const {
    data[row * stride[0] + block * stride[1]] = scale;
  }
  // Does so packed: the exponent as float32 has it, 2^(byte - 127), 255 for NaN. The last block of a row also fills its
  // word, with bytes of 0.
  TW_HOST_DEVICE void pack(int64_t row, int64_t block, float scale) const {
    auto* const word = reinterpret_cast<uint8_t*>(data + row * stride[0] + block / 4 * stride[1]);
    word[block % 4] = static_cast<uint8_t>(std::bit_cast<uint32_t>(scale) >> 23);
    for (int64_t byte = block % 4 + 1; byte < 4 && block + 1 == blocks; ++byte) word[byte] = 0;
  }
  TW_HOST_DEVICE void put_either(int64_t row, int64_t block, float scale) const {
    packed ? pack(row, block, scale) : put(row, block, scale);
  }
};

// One call of twQuantizeFp8, checked.
struct Call {
  Rows rows;
  int64_t elements;  // of a row
  twDtype_t dtype;   // twFloat32, twBfloat16 or twFloat16
  Matrix from;
  uint8_t* values;  // [total, elements], contiguous
  Scales scales;
  bool power_of_two;
};

// Quantises on the calling thread.
void quantize_fp8_cpu(const Call& call);

// Enqueues the kernel on `stream`, a cudaStream_t of `device`; does not wait, and can be captured. Where there are
// counts its cost follows the rows that they say are there. The thread's current device is as before. Errors:
// twInvalidArgument for a device that is not there, twUnsupported without a driver, twSystemError.
Status quantize_fp8_cuda(const Call& call, int32_t device, void* stream);

}  // namespace tw::quantize
