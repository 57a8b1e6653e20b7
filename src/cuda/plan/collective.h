// The plan of a gather or reduce-scatter: whether rows go as packets, how many blocks send and receive, how wide tiles
// are.
//
// Pure: the same call, map and budget give the same plan. How rows travel follows from what all ranks have alike
// (bound, row sizes, packet bound); if it followed from anything else, ranks would look for rows where none are sent
// (S4, S10). The number of blocks and the tiles are speed alone.
#pragma once

#include "cuda/launch/collective.h"
#include "cuda/plan/budget.h"
#include "layout/window_map.h"

namespace tw::cuda {

struct CollectiveFacts {
  bool views = false;      // the caller sees rows in the window
  bool in_window = false;  // the caller's rows lie there
  bool staged = false;     // rows go over a staged transport
  int32_t sources = 0;     // ranks whose rows come, where this rank's own are in place; 0: all ranks'
};

// Plans one call. Reads of *params what the call has (bound, send, receive, reduces, flat, all_sizes, tensors, and rows
// with the widths that their memory allows); writes everything else that decides tiles, roles and packets.
void plan_collective(const Budget& budget, const WindowMap& map, const CollectiveFacts& facts,
                     CollectiveParams* params);

}  // namespace tw::cuda
