#include "balance/place.h"

#include <algorithm>
#include <utility>

#include "balance/bound.h"
#include "balance/update.h"

namespace tw::balance {
namespace {

constexpr int32_t kSmallPlaces = 24;  // slots up to which place_exactly() is worth a try
constexpr int32_t kSmallExperts = 12;

// As many slots as experts on a rank, or more: every expert everywhere, so that all ranks carry the mean. The slots
// beyond hold the lowest experts again, the same on all ranks.
std::vector<int32_t> place_everywhere(const Shape& shape) {
  std::vector<int32_t> experts;
  for (int32_t place = 0; place < shape.places(); ++place) experts.push_back(place % shape.slots % shape.experts);
  return experts;
}

}  // namespace

Placed place_anywhere(const Problem& problem) {
  const Shape& shape = problem.shape;
  if (shape.slots >= shape.experts) return {place_everywhere(shape)};
  const bool spare = shape.places() > shape.experts;
  const Units simple = lower_bound(problem, 0);
  auto counts = apportion(problem.loads.data(), shape.experts, shape.places(), shape.ranks);
  Placed placed;
  if (shape.slots == 2 && spare) placed.bound = fit_pairs(problem, &counts);
  const Units goal = goal_of(std::max(simple, placed.bound));
  refine_counts(problem, goal, &counts);
  const auto items = items_of(problem, counts);
  Packing best(problem, pack(items, shape.ranks, shape.slots, Start::kPlain, goal));
  exchange(&best, 0, shape.ranks, goal);
  // Where a few hot replicas need the smallest beside them, exchanges alone may not get there.
  if (shape.slots > 2 && best.peak() - simple > simple / 2000) {
    Packing other(problem, pack(items, shape.ranks, shape.slots, Start::kCompany, simple));
    exchange(&other, 0, shape.ranks, goal);
    if (other.peak() < best.peak()) best = std::move(other);
  }
  // Replicas moved one by one, where counts and packing do not fit each other. With two slots a rank the counts are as
  // good as that gets, without replicas there is nothing to move.
  if (shape.slots > 2 && spare && best.peak() - simple > simple / 500) {
    best = Packing(problem, polish(problem, best.experts(), goal));
  }
  placed.experts = best.experts();
  if (shape.places() <= kSmallPlaces && shape.experts <= kSmallExperts && best.peak() > simple) {
    placed.experts = place_exactly(problem, std::move(placed.experts));
  }
  return placed;
}

}  // namespace tw::balance
