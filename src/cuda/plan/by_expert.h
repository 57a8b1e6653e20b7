// Whether one kernel brings a dispatch's rows to their experts (launch/by_expert.h), or a copy follows the dispatch.
//
// Pure: takes a plan of the dispatch (plan/dispatch.h) and what the caller wants of it.
//
// What breaks if this changes: speed, as long as the kernel can do the call. Ranks need not choose alike: what they
// send each other is the same.
#pragma once

#include "cuda/launch/by_expert.h"
#include "cuda/plan/budget.h"

namespace tw::cuda {

struct ByExpertFacts {
  bool by_expert = false;  // rows are wanted by expert, and are not only numbered
  bool columns = false;    // some payload is wanted by column
  int width = 0;           // bytes that every store of a row by expert may take; 0: some payload is not wanted
  int32_t local_experts = 0;
};

// Whether it does; *params then has all but `view`. Reads `call` as it was planned, and plans its blocks again, as own
// rows are received too.
bool plan_by_expert(const Budget& budget, const Shape& shape, const ByExpertFacts& facts, ByExpertParams* params);

}  // namespace tw::cuda
