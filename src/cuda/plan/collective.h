// The plan of a gather or reduce-scatter. Pure. How rows travel follows from what all ranks have alike.
#pragma once

#include "cuda/launch/collective.h"
#include "cuda/plan/budget.h"
#include "layout/window_map.h"

namespace tw::cuda {

struct CollectiveFacts {
  bool views = false;      // the caller sees rows in the window
  bool in_window = false;  // the caller's rows lie there
  bool staged = false;     // rows go over a carrier
};

// Reads of *params what the call has (bound, send, receive, reduces, flat, all_sizes, tensors and rows with the widths
// that their memory allows), writes all else that tiles, roles and packets are decided by.
void plan_collective(const Budget& budget, const WindowMap& map, const CollectiveFacts& facts,
                     CollectiveParams* params);

}  // namespace tw::cuda
