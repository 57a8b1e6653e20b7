#include "balance/place.h"

#include <algorithm>
#include <utility>

#include "balance/bound.h"
#include "balance/update.h"

namespace tw::balance {
namespace {

// Where place_exactly() comes to an end (test_balance.py has the shapes), and where it is worth a try of 20 ms.
constexpr int32_t kFewExperts = 8, kFewPlaces = 30;
constexpr int32_t kSmallExperts = 12, kSmallPlaces = 24;
constexpr int64_t kAllEffort = 40000000, kSomeEffort = 800000;
constexpr Units kNearly = 10000;  // one part of so many above the bound is as even as is worth anything

int64_t effort_for(const Shape& shape) {
  if (shape.experts <= kFewExperts && shape.places() <= kFewPlaces) return kAllEffort;
  return shape.experts <= kSmallExperts && shape.places() <= kSmallPlaces ? kSomeEffort : 0;
}

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
  const auto even = items_of(problem, counts);
  Placed placed;
  if (shape.slots == 2 && spare) placed.bound = fit_pairs(problem, &counts);
  const Units goal = goal_of(std::max(simple, placed.bound));
  refine_counts(problem, goal, &counts);
  const auto items = items_of(problem, counts);
  Packing best(problem, pack(items, shape.ranks, shape.slots, Start::kPlain, goal));
  exchange(&best, 0, shape.ranks, goal);
  // A batch is levelled by what experts of several replicas can shift, so each rank should have some, where ranks can
  // be even so: at 32 ranks, 288 slots and 128 tokens a rank the policy `balanced` then leaves two thirds of what it
  // would.
  if (spare && best.peak() - simple <= simple / kNearly) {
    Packing spread(problem, pack(items, shape.ranks, shape.slots, Start::kSpread, goal));
    exchange(&spread, 0, shape.ranks, goal, Among::kAlike);
    if (spread.peak() - simple <= simple / kNearly) best = std::move(spread);
  }
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
  // Never worse than the largest share as small as can be, and each to the coolest rank: DeepSeek's algorithm, but that
  // the replicas of an expert go to different ranks.
  Packing greedy(problem, pack(even, shape.ranks, shape.slots, Start::kPlain, goal));
  if (greedy.peak() < best.peak()) {
    exchange(&greedy, 0, shape.ranks, goal);
    best = std::move(greedy);
  }
  placed.experts = best.experts();
  if (const int64_t effort = effort_for(shape); effort > 0 && best.peak() > simple) {
    placed.experts = place_exactly(problem, std::move(placed.experts), effort);
  }
  return placed;
}

}  // namespace tw::balance
