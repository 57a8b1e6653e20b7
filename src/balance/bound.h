// What no plan can do better than, with a proof beside each term in bound.cc.
#pragma once

#include "balance/problem.h"

namespace tw::balance {

// No placement of the shape, replicas splitting their expert's load evenly, has a hottest rank below this. `reached`:
// the hottest rank of some plan; the costly term is looked for only where the others leave a gap to that.
Units lower_bound(const Problem& problem, Units reached);

}  // namespace tw::balance
