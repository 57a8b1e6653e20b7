// The bound by company: hot slots need cold ones beside them.
#pragma once

#include "balance/problem.h"

namespace tw::balance {

// The most found in low..high below which no plan's hottest rank is; low is known to be such a bound, high not.
Units company_bound(const Problem& problem, Units low, Units high);

}  // namespace tw::balance
