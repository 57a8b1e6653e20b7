// Plans of all layers: what twPlan computes, once its arguments have been checked.
#pragma once

#include <cstdint>

#include "balance/problem.h"
#include "core/status.h"

namespace tw::balance {

struct Request {
  Shape shape;
  int32_t layers;
  int64_t tolerance;    // parts in a million
  int32_t budget;       // slot writes per layer; ignored without old
  const int32_t* old;   // [layers, N * S], or NULL
};

// Of one layer.
struct Result {
  int32_t* experts;  // [N * S]
  double* loads;     // [N], as the caller's
  double bound;
  double stray;      // share of the layer's load
};

// loads: [E], finite, none negative, their sum finite.
void plan_layer(const Request& request, int32_t layer, const double* loads, Result* result);

}  // namespace tw::balance
