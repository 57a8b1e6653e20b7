// The places of experts in the grouped layout. Takes the counts of a handle and the alignment of a call; gives where
// each local expert's rows begin, in the handle and in what the caller is shown.
//
// What breaks if this changes: devices place experts alike, so it is part of the bits of results.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/backend.h"

namespace tw::cpu {

inline void place_experts(int32_t experts, int64_t alignment, HandleArrays& handle) {
  handle.experts.begin[0] = 0;
  for (int32_t expert = 0; expert < experts; ++expert) {
    const int64_t rows = (handle.counts.experts[expert] + alignment - 1) / alignment * alignment;
    handle.experts.begin[expert + 1] = handle.experts.begin[expert] + rows;
  }
  std::copy_n(handle.experts.begin, experts + 1, handle.shown.offsets);
}

}  // namespace tw::cpu
