// Which rows of a tensor a call beside the exchange works on, and where they lie; shared by src/quantize and
// src/activation, for the host and for devices. Rows that are not valid are neither read nor written.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quantize/floats.h"

namespace tw::quantize {

// The rows of a call: `groups` blocks of `each` rows; in block g the first counts[g] are valid.
struct Rows {
  int64_t total;  // groups * each
  int64_t each;   // > 0 if groups > 0
  int32_t groups;
  const int32_t* counts;  // NULL: all are valid. On a device in its memory; clamped to 0 .. `each`

  TW_HOST_DEVICE int64_t count(int64_t group) const {
    if (counts == nullptr) return each;
    const int64_t n = counts[group];
    return n < 0 ? 0 : n < each ? n : each;
  }
};

// A tensor [rows, elements] whose elements are contiguous; stride in bytes.
struct Matrix {
  std::byte* data;
  int64_t stride;
  TW_HOST_DEVICE std::byte* row(int64_t i) const { return data + i * stride; }
};

}  // namespace tw::quantize
