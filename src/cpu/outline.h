// What a step is going to put, told to the transport before it does.
#pragma once

#include <cstdint>
#include <numeric>

namespace tw::cpu {

struct Outline {
  const int32_t* rows = nullptr;  // [N] for each rank; NULL: one for each
  int puts = 0;                   // of a row
  uint64_t bytes = 0;             // of a row, all its puts together
  uint64_t once = 0;              // of one put more for each rank; 0: none

  uint64_t all_rows(int ranks) const {
    if (rows == nullptr) return static_cast<uint64_t>(ranks);
    return static_cast<uint64_t>(std::accumulate(rows, rows + ranks, int64_t{0}));
  }
};

}  // namespace tw::cpu
