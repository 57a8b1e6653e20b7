// Where values and scales lie in a row that a combine returns as e4m3, with a scale for each block of 128 elements or
// one for all, which does not travel. It takes the number of elements and gives bytes.
//
//   values     one byte each, padded with zeros to whole 16 bytes
//   scales     float32, one for each block, in rows that have them; padded to whole 16 bytes
//
// So rows, values and scales begin at multiples of 16 whatever the number of elements is. Both ends go by these
// numbers: a change that one side makes alone breaks S10.
#pragma once

#include <cstdint>

namespace tw {

inline constexpr uint64_t kFp8Elements = 128;  // that share a scale
inline constexpr uint64_t kFp8Aligned = 16;

constexpr uint64_t fp8_aligned(uint64_t bytes) { return (bytes + kFp8Aligned - 1) / kFp8Aligned * kFp8Aligned; }
// Where a row's scales begin.
constexpr uint64_t fp8_scales_begin(uint64_t elements) { return fp8_aligned(elements); }
// Bytes of a row; elements: less than 2^60.
constexpr uint64_t fp8_row_bytes(uint64_t elements, bool in_blocks) {
  const uint64_t blocks = in_blocks ? (elements + kFp8Elements - 1) / kFp8Elements : 0;
  return fp8_scales_begin(elements) + fp8_aligned(sizeof(float) * blocks);
}

}  // namespace tw
