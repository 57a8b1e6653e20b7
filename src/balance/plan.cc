#include "balance/plan.h"

#include <algorithm>
#include <cmath>

#include "balance/bound.h"
#include "balance/place.h"
#include "balance/update.h"

namespace tw::balance {
namespace {

constexpr int kBits = 52;  // of a layer's total: sums and products with small counts stay within 64

// The loads as whole numbers; scale: what one of these is, as a power of two.
Problem to_units(const Shape& shape, const double* loads, int* scale) {
  double total = 0;
  for (int32_t e = 0; e < shape.experts; ++e) total += loads[e];
  int exponent = 0;
  std::frexp(total, &exponent);
  *scale = exponent - kBits;
  Problem problem{shape, {}, 0};
  problem.loads.reserve(shape.experts);
  for (int32_t e = 0; e < shape.experts; ++e) {
    // Exact but for the last rounding: llrint rounds to even everywhere.
    problem.loads.push_back(total > 0 ? std::llrint(std::ldexp(loads[e], -*scale)) : 0);
    problem.total += problem.loads.back();
  }
  return problem;
}

int32_t writes_between(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
  int32_t writes = 0;
  for (size_t i = 0; i < a.size(); ++i) writes += a[i] != b[i] ? 1 : 0;
  return writes;
}

std::vector<int32_t> place(const Request& request, const Problem& problem, const int32_t* old) {
  const Shape& shape = request.shape;
  const auto from_nothing = [&] {
    return shape.groups > 0 ? place_on_nodes(problem, request.tolerance) : place_anywhere(problem);
  };
  if (old == nullptr) {
    Packing packing(problem, from_nothing());
    for (int32_t r = 0; r < shape.ranks; ++r) packing.sort_rank(r);
    return packing.experts();
  }
  const std::vector<int32_t> before(old, old + shape.places());
  const int32_t few = shape.places() / 2;  // up to so many writes, a plan from nothing has no chance
  std::vector<int32_t> best = before;
  if (request.budget < shape.places()) best = update(problem, before, request.budget, request.tolerance);
  if (request.budget > few) {
    auto made = relabel(shape, from_nothing(), before);
    const bool allowed = writes_between(before, made) <= request.budget;
    if (allowed && Packing(problem, made).peak() < Packing(problem, best).peak()) best = std::move(made);
  }
  return best;
}

}  // namespace

void plan_layer(const Request& request, int32_t layer, const double* loads, Result* result) {
  const Shape& shape = request.shape;
  int scale = 0;
  const Problem problem = to_units(shape, loads, &scale);
  const int32_t* const old =
      request.old == nullptr ? nullptr : request.old + static_cast<int64_t>(layer) * shape.places();
  const auto experts = place(request, problem, old);
  const Packing packing(problem, experts);
  std::copy(experts.begin(), experts.end(), result->experts);
  // In the caller's numbers, each share rounded, and added by slot.
  double hottest = 0;
  for (int32_t r = 0; r < shape.ranks; ++r) {
    double load = 0;
    for (int32_t i = r * shape.slots; i < (r + 1) * shape.slots; ++i) {
      load += loads[experts[i]] / packing.count(experts[i]);
    }
    result->loads[r] = load;
    hottest = std::max(hottest, load);
  }
  const Units bound = lower_bound(problem, packing.peak());
  // Not above what was reached: both are rounded.
  result->bound = std::min(std::ldexp(static_cast<double>(bound), scale), hottest);
  result->stray = stray_share(problem, experts);
}

}  // namespace tw::balance
