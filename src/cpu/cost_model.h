// What a dispatch takes over a carrier, by strategy: from what was measured, from what all ranks have in common and
// from the bound of the call. So all ranks decide alike without asking each other.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/carrier.h"
#include "layout/shape.h"

namespace tw::cpu {

// A row of a message: 16 bytes before each part say where the part goes.
inline constexpr uint64_t kPutHeader = 16;

constexpr uint64_t payload_row_bytes(const Shape& shape) {
  uint64_t bytes = 0;
  for (int q = 0; q < shape.payloads; ++q) bytes += shape.payload_bytes[q];
  return bytes;
}

// Of a routed dispatch, with what travels beside it.
constexpr uint64_t routed_row_bytes(const Shape& shape) {
  return payload_row_bytes(shape) + meta_bytes(shape.top_k) + kPutHeader * (1 + shape.payloads);
}

// Of a gathered one: payloads, ids and weights.
constexpr uint64_t gathered_row_bytes(const Shape& shape) {
  return payload_row_bytes(shape) + meta_bytes(shape.top_k) - sizeof(RowHeader);
}

constexpr uint64_t combined_row_bytes(const Shape& shape) { return shape.combine_bytes + kPutHeader; }

// The longest message of any step of a group.
constexpr uint64_t longest_message(const Shape& shape) {
  const uint64_t row = std::max({routed_row_bytes(shape), gathered_row_bytes(shape), combined_row_bytes(shape)});
  const uint64_t counts = kPutHeader + sizeof(int32_t) * (static_cast<uint64_t>(shape.ranks) +
                                                          static_cast<uint64_t>(shape.most_local_experts));
  return std::max(row * static_cast<uint64_t>(shape.max_tokens), shape.exact() ? counts : 0);
}

// Bytes of each message that travel with its frame, in the first move of a step: as many, to all peers together, as take
// half as long as a second move takes to begin. A step whose messages fit is one move. Of one whose messages are longer
// the second move has only the rest, so blocks cost it nothing but what shorter messages leave empty beside longer ones.
inline uint64_t choose_inline_bytes(const Shape& shape, const Costs& costs) {
  const double bytes = costs.exchange_us * costs.exchange_rate / 2 / std::max(1, shape.ranks - 1);
  return static_cast<uint64_t>(std::clamp(bytes, 0.0, static_cast<double>(longest_message(shape))));
}

// Share of a rank's tokens that go to another given rank, were experts drawn evenly and ranks had equally many.
inline double share_of_rank(const Shape& shape) { return 1 - std::pow(1 - 1.0 / shape.ranks, shape.top_k); }

// Microseconds of a dispatch whose ranks have `bound` tokens each.
inline double dispatch_us(const Shape& shape, const Costs& costs, uint64_t inline_bytes, int bound, bool gathered) {
  const double peers = shape.ranks - 1;
  const double message = gathered ? static_cast<double>(bound) * static_cast<double>(gathered_row_bytes(shape))
                                  : bound * share_of_rank(shape) * static_cast<double>(routed_row_bytes(shape));
  const double blocks = costs.exchange_us + peers * static_cast<double>(inline_bytes) / costs.exchange_rate;
  if (message <= static_cast<double>(inline_bytes)) return blocks;
  const double start = gathered ? costs.gather_us : costs.exchange_us;
  const double rest = message - static_cast<double>(inline_bytes);
  return blocks + start + peers * rest / (gathered ? costs.gather_rate : costs.exchange_rate);
}

inline bool choose_gathered(const Shape& shape, const Costs& costs, twStrategy_t strategy, uint64_t inline_bytes,
                            int bound) {
  if (strategy != twAuto) return strategy == twGathered;
  // Routed where it is close: it sends fewer bytes, and measurements are not exact.
  constexpr double kClearly = 0.8;
  return dispatch_us(shape, costs, inline_bytes, bound, true) <
         kClearly * dispatch_us(shape, costs, inline_bytes, bound, false);
}

}  // namespace tw::cpu
