// Copies out of the window: what their kernels take by value, and their launches.
#pragma once

#include <cstddef>
#include <cstdint>
#include "cuda/launch/group_view.h"
#include "cuda/launch/tiles.h"
#include "views/columns.h"

namespace tw::cuda {

// Copies out of the window: rank_major outputs that the caller gave, or expert_major ones.
struct ViewParams {
  GroupView group;
  HandleView handle;
  int32_t lane;
  int32_t bound;
  Divider ids;                        // of a row
  Divider pairs;                      // of them
  Divider slots;                      // of a source
  std::byte* payloads[kMaxPayloads];  // NULL: not wanted
  // Where its rows begin, by bank: worked out on the host, as kernels take some ten cycles for each instruction that
  // they meet for the first time.
  const std::byte* from[2][kMaxPayloads];
  int32_t width[kMaxPayloads];
  uint32_t vectors[kMaxPayloads];  // of that many bytes in a row
  Columns columns[kMaxPayloads];
  Shown shown;       // by expert: [L, N*b] or grouped; counts are handle.expert_counts and `counts`
  int32_t* offsets;  // grouped: [L + 1]
  int64_t* origins;  // grouped, NULL: not wanted
  int32_t rows;      // grouped: that are shown, those beyond what comes too
};

// `grid` blocks; `early`: see launch.h. A cudaError_t comes back as int, so that the host side needs no CUDA header.
int launch_rank_view(const ViewParams& params, int grid, bool early, void* stream);
int launch_expert_view(const ViewParams& params, int grid, bool early, void* stream);

}  // namespace tw::cuda
