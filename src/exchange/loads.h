// Load statistics (twGroupLoads): the format of what a rank tells of a dispatch, and the average that all ranks make of
// it alike. Each word has a tag beside its value, so it needs no order to anything: on a device it may come at any
// time.
//
// Every rank computes the same average from the same words. A change of the arithmetic, or of the order in which it
// rounds, changes the bits of results, and must be made in host, kernels and the oracle at once.
#pragma once

#include <cstdint>

#include "layout/shape.h"
#include "tokenway/placement.h"

namespace tw {

// A word of load statistics: tag:32 | value:32. A rank's first word of a dispatch has a CountedCall, 0 for a dispatch
// that does not count; the others say how often the rank's tokens have chosen each expert.
constexpr uint64_t told_word(uint32_t tag, uint32_t value) { return static_cast<uint64_t>(tag) << 32 | value; }
constexpr uint32_t told_tag(uint64_t word) { return static_cast<uint32_t>(word >> 32); }
constexpr uint32_t told_value(uint64_t word) { return static_cast<uint32_t>(word); }

// Which layer a dispatch counts for, and its clock: the sequence number of this dispatch among those of the layer at
// the rank that tells it, whichever channel they are on. Channels run side by side, so each keeps averages of its own.
// From the clock all ranks know alike how old the averages of one channel are beside another's.
struct CountedCall {
  static constexpr int kLayerBits = 13;
  static constexpr uint32_t kTurns = 1u << (32 - kLayerBits);
  static_assert(TW_MAX_LAYERS < 1 << kLayerBits);

  static constexpr uint32_t value(int32_t layer, uint32_t clock) {
    return (static_cast<uint32_t>(layer) + 1) | clock << kLayerBits;
  }
  static constexpr int32_t layer(uint32_t value) { return static_cast<int32_t>(value & ((1u << kLayerBits) - 1)) - 1; }
  static constexpr uint32_t clock(uint32_t value) { return value >> kLayerBits; }
  // How many dispatches lie between `before` and `clock`: less than kTurns / 2; 0 if `clock` is not later.
  static constexpr uint32_t since(uint32_t clock, uint32_t before) {
    const uint32_t turns = (clock - before) & (kTurns - 1);
    return turns < kTurns / 2 ? turns : 0;
  }
};

// The part of an average that is left after so many dispatches that brought nothing.
constexpr float aged_load(float load, float decay, uint32_t dispatches) {
  float power = decay;
  float left = 1.0f;
  for (; dispatches != 0; dispatches >>= 1) {
    if ((dispatches & 1) != 0) left = left * power;
    power = power * power;
  }
  return load * left;
}

// The average after one more dispatch, in which the tokens of all ranks have chosen an expert so often. Each operation
// is rounded, none is fused, and what is added up over ranks are integers: the bits are the same on all ranks.
constexpr float average_load(float load, float decay, uint32_t choices) {
  const float kept = load * decay;
  const float added = (1.0f - decay) * static_cast<float>(choices);
  return kept + added;
}

}  // namespace tw
