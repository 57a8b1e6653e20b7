// The layout of a routing: where a batch's tokens go, told without a step. Takes a routing whose slots are assigned
// (assign_slots), gives RoutingLayout. Kernels make the same (src/cuda/counts/layout.cu).
//
// Callers size their buffers by it, so it must be what a dispatch of the same ids does: it is read off the routing that
// a dispatch would use, and decides nothing anew (S9).
#pragma once

#include <algorithm>
#include <cstdint>

#include "exchange/routing.h"

namespace tw {

// NULL: not wanted.
struct RoutingLayout {
  int32_t* tokens_per_rank = nullptr;    // [N]
  int32_t* tokens_per_expert = nullptr;  // [E], by physical expert
  uint8_t* token_in_rank = nullptr;      // [T, N] 1: the token goes there
  int32_t* physical_ids = nullptr;       // [T, K]
};

inline void fill_layout(const Shape& shape, const Routing& routing, const RoutingLayout& layout) {
  const int64_t choices = static_cast<int64_t>(routing.tokens) * shape.top_k;
  if (layout.tokens_per_rank != nullptr) std::copy_n(routing.send_counts, shape.ranks, layout.tokens_per_rank);
  if (layout.physical_ids != nullptr) std::copy_n(routing.ids, choices, layout.physical_ids);
  if (layout.tokens_per_expert != nullptr) {
    std::fill_n(layout.tokens_per_expert, shape.experts, 0);
    for (int64_t i = 0; i < choices; ++i) {
      if (routing.ids[i] >= 0) ++layout.tokens_per_expert[routing.ids[i]];
    }
  }
  if (layout.token_in_rank == nullptr) return;
  const int64_t all = static_cast<int64_t>(routing.tokens) * shape.ranks;
  std::fill_n(layout.token_in_rank, all, uint8_t{0});
  for (int64_t token = 0; token < routing.tokens; ++token) {
    for (int64_t i = routing.first[token]; i < routing.first[token + 1]; ++i) {
      layout.token_in_rank[token * shape.ranks + routing.destinations[i].rank] = 1;
    }
  }
}

}  // namespace tw
