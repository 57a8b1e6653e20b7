// The exchange of counts, and slots by quotas of a batch: what their kernels take by value, and their launches.
#pragma once

#include <cstddef>
#include <cstdint>
#include "cuda/launch/group_view.h"

namespace tw::cuda {

// The exchange of counts.
struct CountsParams {
  GroupView group;
  HandleView handle;
  IdsIn in;
  int32_t* told;  // [N + E] rows for each rank and expert, while they are counted; else 0
  int32_t lane;
  int32_t bank;  // over a carrier; else -1
  int32_t tokens;
  int32_t alignment;                      // of an expert's rows in the grouped layout
  int32_t drop;                           // rows beyond a receiver's room, instead of refusing them all
  uint64_t receive_offset[kMaxPayloads];  // as of CountsCall
  int32_t send;
  int32_t receive;
  CountsOnHost* on_host;  // NULL: the host does not want them
  uint64_t serial;        // that tells it
};

// Slots by quotas of the batch, into the handle (counts/balance.cu).
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

// A cudaError_t comes back as int, so that the host side needs no CUDA header.
int launch_counts(const CountsParams& params, int grid, void* stream);
int launch_balance(const BalanceParams& params, void* stream);

}  // namespace tw::cuda
