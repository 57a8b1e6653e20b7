// Values of choices, which a combine returns beside its rows: what their two kernels take by value, and the launches.
//
// Values have kernels of their own, beside that of the combine, so that the kernels of rows stay as they are: one
// before it puts this rank's values into the owners' windows, and one behind it takes what came. The combine's signals
// say that the values are there, as they are published behind them in stream order.
//
// What breaks if this changes: S4 (values need the fence of the kernel that puts them, as the signals have none) and S2
// (skips: a later part of a combine is sent behind a step that is left out, which the kernel that puts values makes).
#pragma once

#include <cstdint>

#include "cuda/launch/group_view.h"

namespace tw::cuda {

struct ValuesParams {
  GroupView group;
  HandleView handle;
  int32_t channel;
  int32_t bank;  // as in CombineParams
  int32_t bound;
  int32_t part;          // its number, and
  int32_t begin;         // its first token, at any rank
  int32_t skips;         // 1: a step is left out before it (S2)
  int32_t tokens;        // of this rank, in all parts
  int32_t by_expert;     // rows are choices
  uint32_t rows_digest;  // as in CombineParams
  const std::byte* values;
  int64_t block_stride;
  int64_t row_stride;
  uint32_t* out;  // the bits of float [tokens, K]
};

// Both launch `grid` blocks, all of which must be on the device at once (S8). A cudaError_t comes back as int, so that
// the host side needs no CUDA header.
int launch_put_values(const ValuesParams& params, int grid, void* stream);
int launch_take_values(const ValuesParams& params, int grid, void* stream);

}  // namespace tw::cuda
