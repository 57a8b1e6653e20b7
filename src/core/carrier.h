// A comm's carrier (tokenway/carrier.h): the caller's functions, the strategy, and what moves cost as measured.
// src/api/comm.cc fills it, the comm's first group measures the costs (src/cpu/staged_creation.cc), and
// src/cpu/cost_model.h decides by them. Costs must be the same on all ranks: else ranks move blocks of different sizes,
// or one gathers while another routes (twCallMismatch).
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
  bool measured = false;  // whether the comm's first group has measured, for all of them
  Costs costs;
};

}  // namespace tw
