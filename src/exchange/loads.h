// How often experts are chosen (twGroupLoads): what a rank tells of a dispatch, and the average that all ranks make of
// it alike. Each word has a tag beside its value, so it needs no order to anything: on a device it may come when it
// likes.
#pragma once

#include <cstdint>

#include "layout/shape.h"

namespace tw {

// A word that tells: tag:32 | value:32. The first of a rank's in a dispatch has layer + 1, 0 for a dispatch that does
// not count; the others how often the rank's tokens have chosen each expert.
constexpr uint64_t told_word(uint32_t tag, uint32_t value) { return static_cast<uint64_t>(tag) << 32 | value; }
constexpr uint32_t told_tag(uint64_t word) { return static_cast<uint32_t>(word >> 32); }
constexpr uint32_t told_value(uint64_t word) { return static_cast<uint32_t>(word); }

// The average after one more dispatch, in which all ranks' tokens have chosen an expert so often. Each operation is
// rounded, none is fused, and who adds up adds integers: the same bits on all ranks.
constexpr float average_load(float load, float decay, uint32_t choices) {
  const float kept = load * decay;
  const float added = (1.0f - decay) * static_cast<float>(choices);
  return kept + added;
}

}  // namespace tw
