// The places of experts in the grouped layouts. Takes the counts of a handle and the alignment of a call; gives where
// each local expert's rows begin, in the handle and, of counts that ranks exchanged, in what the caller is shown.
//
// What breaks if this changes: devices place experts alike, so it is part of the bits of results.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/backend.h"
#include "views/expert_major.h"

namespace tw::cpu {

inline void begin_experts(const int32_t* counts, int32_t experts, int64_t alignment, int64_t* begin) {
  begin[0] = 0;
  for (int32_t expert = 0; expert < experts; ++expert) {
    begin[expert + 1] = begin[expert] + (counts[expert] + alignment - 1) / alignment * alignment;
  }
}

inline void place_experts(int32_t experts, int64_t alignment, HandleArrays& handle) {
  begin_experts(handle.counts.experts, experts, alignment, handle.experts.begin);
  std::copy_n(handle.experts.begin, experts + 1, handle.shown.offsets);
}

// The same in low latency, of the rows that have come; also for a combine, as its dispatch may have been shown in
// another layout. In layouts that need no places it does nothing. next: [L], scratch.
inline void place_received(const Context& context, twLayout_t id, int64_t alignment, int32_t* next,
                           HandleArrays& handle) {
  if (!layout_of(id).placed_by_receiver()) return;
  const Shape& shape = context.map.shape();
  ExpertPlaces places(shape, context.placement, context.me, context.local_experts, next);
  int64_t rows = 0;
  for (int32_t source = 0; source < shape.ranks; ++source) rows += handle.received.counts[source];
  for (int64_t row = 0; row < rows; ++row) {
    places.each(handle.received.row(row, shape.top_k), [](int32_t, int32_t, int32_t) {});  // which counts in `next`
  }
  begin_experts(next, context.local_experts, alignment, handle.experts.slot_begin);
}

}  // namespace tw::cpu
