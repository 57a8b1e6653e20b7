// Outline: how much a step is going to put, told to the transport before the first put. CpuTransport chooses streaming
// stores by it (speed alone); StagedTransport lays messages out by it: if a step puts more than its outline says, it
// writes behind its message's room.
#pragma once

#include <cstdint>
#include <numeric>

#include "exchange/combine.h"
#include "layout/hosts_map.h"

namespace tw::cpu {

// A combine whose partials for other hosts are folded before they go.
struct Folding {
  WindowMap map;  // of the call's rows
  RowTypes travels;
  bool values = false;  // values of choices go beside them
};

struct Outline {
  const int32_t* rows = nullptr;     // [N] rows for each rank; NULL: one for each
  int puts = 0;                      // puts of a row
  uint64_t bytes = 0;                // bytes of a row, all its puts together
  uint64_t once = 0;                 // bytes of one more put for each rank; 0: none
  Area area = Area::kInbox;          // where the step's rows go between hosts
  const WindowMap* map = nullptr;    // of a combine's partials; NULL in other steps
  const Folding* folding = nullptr;  // of Area::kFolds

  uint64_t all_rows(int ranks) const {
    if (rows == nullptr) return static_cast<uint64_t>(ranks);
    return static_cast<uint64_t>(std::accumulate(rows, rows + ranks, int64_t{0}));
  }
};

}  // namespace tw::cpu
