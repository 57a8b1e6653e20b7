// The bound by company: hot slots need cold ones beside them, of which there may be too few. It takes a problem and the
// range in which the bound is looked for, and gives a bound; the proof is in company.cc. It must never give more than
// what some plan reaches.
#pragma once

#include "balance/problem.h"

namespace tw::balance {

// Gives the highest bound that it finds in low..high, below which no plan's hottest rank is. low is known to be such a
// bound, high is not.
Load company_bound(const Problem& problem, Load low, Load high);

}  // namespace tw::balance
