// A caller's carrier (tokenway/carrier.h), as a comm has it.
#pragma once

#include "tokenway/carrier.h"

namespace tw {

// What moves take; the same on all ranks.
struct Costs {
  double exchange_us = 0;    // a move of few bytes, all-to-all
  double exchange_rate = 1;  // bytes per microsecond that a rank sends
  double gather_us = 0;      // likewise, all-gather
  double gather_rate = 1;
};

struct Carrier {
  twCarrier_t calls{};
  twStrategy_t strategy = twRouted;
  int64_t inline_bytes = -1;
  bool measured = false;  // by the comm's first group, for all of them
  Costs costs;
};

}  // namespace tw
