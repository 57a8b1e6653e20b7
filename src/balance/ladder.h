// The bound by counts: what the counts of replicas alone keep the hottest rank above. climb takes the shares from both
// ends and gives the bound. counts.cc moves replicas by it, exact.cc skips counts by it; if it were too high, good
// plans would be skipped.
//
// The hottest i + 1 replicas are on at most as many ranks, whose other slots hold at least the smallest shares. So some
// rank carries at least the mean of the first i + 1 rungs, where rung i is the i-th largest share with the next S - 1
// of the smallest. With two slots a rank a single rung is a bound too, and pairing the largest with the smallest
// reaches the highest of them: the P + 1 - i slots from the i-th smallest on cannot all be paired among the others.
#pragma once

#include "balance/problem.h"

namespace tw::balance {

// The bound, or anything not below `limit` if it is not below that. largest(), smallest(): the next share from that
// end. `rung`: the rung that gives the bound.
template <class Largest, class Smallest>
Load climb(const Shape& shape, Load limit, Largest&& largest, Smallest&& smallest, int32_t* rung = nullptr) {
  const int32_t mates = shape.slots - 1;
  Load highest = 0, sum = 0;
  for (int32_t i = 0; i < shape.ranks && highest < limit; ++i) {
    Load step = largest();
    for (int32_t k = 0; k < mates; ++k) step += smallest();
    sum += step;
    const Load bound = mates == 1 ? step : (sum + i) / (i + 1);
    if (bound > highest) {
      highest = bound;
      if (rung != nullptr) *rung = i;
    }
  }
  return highest;
}

}  // namespace tw::balance
