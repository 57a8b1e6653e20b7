// The kernel of balance.cu, for those who launch it.
#pragma once

#include "nvlink/params.h"

namespace tw::nvlink {

// Slots by quotas of the batch, into the handle (balance.cu).
struct BalanceParams {
  GroupView group;
  HandleView handle;
  IdsIn in;
  int32_t* scratch;  // [E + N + P], NULL: shared memory has room
  int32_t lane;
  int32_t bank;  // of the step that follows; -1: it takes any
  int32_t tokens;
  twPhase_t phase;

  static uint32_t scratch_words(const Shape& shape) {
    return static_cast<uint32_t>(shape.logical_experts + shape.ranks + shape.experts);
  }
  static bool fits(const Shape& shape) { return scratch_words(shape) <= kMaxTable; }
};

int launch_balance(const BalanceParams& params, void* stream);

}  // namespace tw::nvlink
