// The packing bound: what no plan can be below, with a proof beside each term in bound.cc. It takes a layer's problem
// and gives a load. The planner stops its search by it, and twPlan reports it: a bound that is too high ends searches
// early and claims that a plan cannot be improved when it can.
#pragma once

#include "balance/problem.h"

namespace tw::balance {

// Gives a load that no placement's hottest rank is below, if replicas split their expert's load evenly. `reached`: the
// hottest rank of some plan; the costly term is looked for only where the others leave a gap to that.
Load lower_bound(const Problem& problem, Load reached);

}  // namespace tw::balance
