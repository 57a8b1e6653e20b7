// Plans of layers: what twPlan computes, once src/api/balance.cc has checked its arguments. A Request has what all
// layers share; plan_layer takes a layer's loads and gives its map, rank loads, packing bound and stray share. The same
// request must give the same plan on every rank, as ranks compute plans without asking each other.
#pragma once

#include <cstdint>
#include <vector>

#include "balance/problem.h"

namespace tw::balance {

struct Request {
  Shape shape;
  int32_t layers;
  int64_t tolerance;   // parts in a million
  int32_t budget;      // slot writes per layer; ignored without old
  const int32_t* old;  // [layers, N * S], or NULL
};

// The result for one layer.
struct Result {
  int32_t* experts;  // [N * S]
  double* loads;     // [N], in the unit of the caller's loads
  double bound;
  double stray;  // share of the layer's load
};

// Plans a layer. loads: [E], finite, none negative, their sum finite.
void plan_layer(const Request& request, int32_t layer, const double* loads, Result* result);

// Computes what each rank carries under a map [N * S], each share rounded, and added by slot: [N]. replicas: [E] of the
// map.
void add_up(const Shape& shape, const int32_t* map, const int32_t* replicas, const double* loads, double* rank_loads);

struct Move {
  int32_t slot, expert, before, source;
};

// Lists what changes from one map to another, by slot, and where to copy from (see twPlanMove_t).
std::vector<Move> moves_between(const Shape& shape, const int32_t* from, const int32_t* to);

}  // namespace tw::balance
