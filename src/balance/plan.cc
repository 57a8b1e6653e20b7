// Plans one layer: makes loads whole numbers, chooses between an update and a plan from nothing, and computes what
// twPlan reports; it also lists the moves between two maps. The conversion of loads is exact but for one rounding, the
// same on every machine: everything behind it depends on that.
#include "balance/plan.h"

#include <algorithm>
#include <cmath>

#include "balance/bound.h"
#include "balance/place.h"
#include "balance/update.h"

namespace tw::balance {
namespace {

constexpr int kBits = 52;  // bits of a layer's total: sums and products with small counts stay within 64

// Makes the loads whole numbers; *scale: the power of two that a Load of 1 stands for.
Problem to_whole(const Shape& shape, const double* loads, int* scale) {
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

Placed place(const Request& request, const Problem& problem, const int32_t* old) {
  const Shape& shape = request.shape;
  const auto from_nothing = [&] {
    return shape.groups > 0 ? Placed{place_on_nodes(problem, request.tolerance)} : place_anywhere(problem);
  };
  if (old == nullptr) {
    const Placed made = from_nothing();
    Packing packing(problem, made.experts);
    for (int32_t r = 0; r < shape.ranks; ++r) packing.sort_rank(r);
    return {packing.experts(), made.bound};
  }
  const std::vector<int32_t> before(old, old + shape.places());
  const int32_t few = shape.places() / 2;  // with at most so many writes, a plan from nothing has no chance
  std::vector<int32_t> best = before;
  if (request.budget < shape.places()) best = update(problem, before, request.budget, request.tolerance);
  if (request.budget > few) {
    auto made = relabel(shape, from_nothing().experts, before);
    const bool allowed = writes_between(before, made) <= request.budget;
    // A plan from nothing may be wanted though it is not cooler: for groups, or to get rid of doubles.
    const bool anew = (shape.groups > 0 && request.budget >= shape.places()) || has_doubles(shape, best);
    const bool cooler = Packing(problem, made).peak() < Packing(problem, best).peak();
    if (allowed && (anew || cooler)) best = std::move(made);
  }
  return {std::move(best)};
}

}  // namespace

void plan_layer(const Request& request, int32_t layer, const double* loads, Result* result) {
  const Shape& shape = request.shape;
  int scale = 0;
  const Problem problem = to_whole(shape, loads, &scale);
  const int32_t* const old =
      request.old == nullptr ? nullptr : request.old + static_cast<int64_t>(layer) * shape.places();
  const auto [experts, known] = place(request, problem, old);
  const Packing packing(problem, experts);
  std::copy(experts.begin(), experts.end(), result->experts);
  add_up(shape, result->experts, packing.counts().data(), loads, result->loads);
  const double hottest = *std::max_element(result->loads, result->loads + shape.ranks);
  const Load bound = known > 0 ? known : lower_bound(problem, packing.peak());
  // The bound is not above what was reached: both are rounded.
  result->bound = std::min(std::ldexp(static_cast<double>(bound), scale), hottest);
  result->stray = stray_share(problem, experts);
}

void add_up(const Shape& shape, const int32_t* map, const int32_t* replicas, const double* loads, double* rank_loads) {
  for (int32_t r = 0; r < shape.ranks; ++r) {
    double load = 0;
    for (int32_t i = r * shape.slots; i < (r + 1) * shape.slots; ++i) load += loads[map[i]] / replicas[map[i]];
    rank_loads[r] = load;
  }
}

std::vector<Move> moves_between(const Shape& shape, const int32_t* from, const int32_t* to) {
  std::vector<std::vector<int32_t>> holders(shape.experts);
  for (int32_t slot = 0; slot < shape.places(); ++slot) holders[from[slot]].push_back(slot);
  std::vector<int32_t> copied(shape.places(), 0);  // copies from each slot
  std::vector<Move> moves;
  for (int32_t slot = 0; slot < shape.places(); ++slot) {
    if (from[slot] == to[slot]) continue;
    const int32_t rank = slot / shape.slots;
    const auto distance = [&](int32_t other) {
      const int32_t there = other / shape.slots;
      return there == rank ? 0 : shape.node_of(there) == shape.node_of(rank) ? 1 : 2;
    };
    int32_t best = -1;
    for (const int32_t other : holders[to[slot]]) {
      if (best < 0 || distance(other) < distance(best) ||
          (distance(other) == distance(best) && copied[other] < copied[best])) {
        best = other;
      }
    }
    ++copied[best];
    moves.push_back({slot, to[slot], from[slot], best});
  }
  return moves;
}

}  // namespace tw::balance
