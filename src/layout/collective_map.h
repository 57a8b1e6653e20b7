// CollectiveMap: where the rows of a gather or reduce lie in a bank. It takes the call's bound and row sizes, which all
// ranks of a step have alike, and gives byte offsets from the bank's begin: row i of source s of tensor q lies at (s,
// i) of the tensor's part, [N, b, row]. The parts follow each other, aligned to 256 bytes.
//
// Host and kernels both use it. S10 allows it to depend on the bound, because it only says what lies inside a bank. If
// a place changes, ranks of different builds write over each other's rows (window images in tests/ change too).
#pragma once

#include <cstdint>

#include "layout/shape.h"

namespace tw {

inline constexpr int kMostHostSizes = 256;  // a kernel's parameters hold so many sizes, where the host knows them

struct CollectiveMap {
  int32_t tensors = 0;
  int32_t bound = 0;
  uint64_t row_bytes[kMaxPayloads] = {};
  uint64_t begin[kMaxPayloads] = {};
  uint64_t bytes = 0;  // of all parts; UINT64_MAX if that passes 64 bits

  static constexpr uint64_t kAlignment = 256;

  static constexpr CollectiveMap make(int32_t ranks, int32_t bound, const uint64_t* row_bytes, int32_t tensors) {
    CollectiveMap map;
    map.tensors = tensors;
    map.bound = bound;
    const uint64_t rows = static_cast<uint64_t>(ranks) * static_cast<uint64_t>(bound);
    for (int32_t q = 0; q < tensors; ++q) {
      map.row_bytes[q] = row_bytes[q];
      map.begin[q] = map.bytes;
      if (row_bytes[q] > (UINT64_MAX / 2 - map.bytes) / rows) {
        map.bytes = UINT64_MAX;
        return map;
      }
      map.bytes = (map.bytes + rows * row_bytes[q] + kAlignment - 1) / kAlignment * kAlignment;
    }
    return map;
  }

  // Bytes of one row of each tensor, together.
  constexpr uint64_t rows_bytes() const {
    uint64_t sum = 0;
    for (int32_t q = 0; q < tensors; ++q) sum += row_bytes[q];
    return sum;
  }
  // Offset of a row from the begin of a bank.
  constexpr uint64_t row(int32_t q, int32_t source, int32_t i) const {
    return begin[q] +
           (static_cast<uint64_t>(source) * static_cast<uint64_t>(bound) + static_cast<uint64_t>(i)) * row_bytes[q];
  }
};

}  // namespace tw
