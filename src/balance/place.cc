// Makes a layer's plan from nothing: counts, packing, exchanges, and further searches where the result is not near the
// bound. Takes a Problem, gives a plan and, if it was computed, the packing bound. The result of a further search is
// kept only if the hottest rank gets cooler, or stays so near the bound that it does not matter. Searches end by counts
// of steps, never by time: plans are the same everywhere.
#include "balance/place.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "balance/bound.h"
#include "balance/update.h"

namespace tw::balance {
namespace {

// The sizes where place_exactly() comes to an end (test_balance.py has the shapes), and where it is worth a try of 20
// ms.
constexpr int32_t kFewExperts = 8, kFewPlaces = 30;
constexpr int32_t kSmallExperts = 12, kSmallPlaces = 24;
constexpr int64_t kAllEffort = 40000000, kSomeEffort = 800000;
constexpr int32_t kTriedSlots = 8192;  // slots that are packed in all, in search of better counts
constexpr Load kNearly = 10000;        // one part in so many above the bound is as even as is worth anything

int64_t effort_for(const Shape& shape) {
  if (shape.experts <= kFewExperts && shape.places() <= kFewPlaces) return kAllEffort;
  return shape.experts <= kSmallExperts && shape.places() <= kSmallPlaces ? kSomeEffort : 0;
}

// The plan where a rank has as many slots as there are experts, or more: every expert is everywhere, so that all ranks
// carry the mean. Further slots hold the lowest experts again, the same on all ranks.
std::vector<int32_t> place_everywhere(const Shape& shape) {
  std::vector<int32_t> experts;
  for (int32_t place = 0; place < shape.places(); ++place) experts.push_back(place % shape.slots % shape.experts);
  return experts;
}

// How many fewer replicas each of the hottest experts gets.
using Fewer = std::array<int32_t, 5>;

// All ways with up to two fewer for each, the smallest sum first.
std::vector<Fewer> ways_to_hold_back() {
  std::vector<Fewer> ways{Fewer{}};
  for (size_t i = 0; i < Fewer{}.size(); ++i) {
    for (size_t way = 0, before = ways.size(); way < 2 * before; ++way) {
      ways.push_back(ways[way % before]);
      ways.back()[i] = way < before ? 1 : 2;
    }
  }
  const auto sum = [](const Fewer& way) { return std::accumulate(way.begin(), way.end(), 0); };
  std::stable_sort(ways.begin(), ways.end(), [&](const Fewer& a, const Fewer& b) { return sum(a) < sum(b); });
  return ways;
}

// Counts of replicas with some fewer for the hottest experts; empty if an expert has not so many, or no other expert
// can have them. What is left over goes where it makes the largest share as small as can be, or to the coldest experts,
// where it fills a slot with least.
std::vector<int32_t> hold_back(const Problem& problem, const std::vector<int32_t>& by_load, const Fewer& fewer,
                               bool to_coldest) {
  const Shape& shape = problem.shape;
  std::vector<int32_t> limits(shape.experts, shape.ranks);
  auto counts = apportion(problem.loads.data(), limits, shape.places());
  for (size_t i = 0; i < std::min(fewer.size(), by_load.size()); ++i) {
    if (fewer[i] > 0) limits[by_load[i]] = counts[by_load[i]] -= fewer[i];
  }
  if (*std::min_element(limits.begin(), limits.end()) < 1) return {};
  if (!to_coldest) counts = apportion(problem.loads.data(), limits, shape.places());
  int32_t left = shape.places() - std::accumulate(counts.begin(), counts.end(), 0);
  for (auto e = by_load.rbegin(); to_coldest && left > 0 && e != by_load.rend(); ++e) {
    if (counts[*e] < limits[*e]) ++counts[*e], --left;
  }
  return left > 0 ? std::vector<int32_t>{} : counts;
}

// Looks for a better plan with fewer replicas of some of the hottest experts. Where the next hottest expert fills most
// of a rank, one more replica of the hottest has no place.
Packing with_fewer(const Problem& problem, Load goal, Packing best) {
  const Shape& shape = problem.shape;
  std::vector<int32_t> by_load(shape.experts);
  std::iota(by_load.begin(), by_load.end(), 0);
  std::stable_sort(by_load.begin(), by_load.end(),
                   [&](int32_t a, int32_t b) { return problem.loads[a] > problem.loads[b]; });
  int32_t tries = kTriedSlots / shape.places();
  for (const Fewer& fewer : ways_to_hold_back()) {
    for (const bool to_coldest : {false, true}) {
      const auto counts = hold_back(problem, by_load, fewer, to_coldest);
      if (counts.empty()) continue;
      if (--tries < 0 || best.peak() <= goal) return best;
      Packing other(problem, pack(items_of(problem, counts), shape.ranks, shape.slots, Start::kPlain, goal));
      exchange(&other, 0, shape.ranks, goal);
      if (other.peak() < best.peak()) best = std::move(other);
    }
  }
  return best;
}

}  // namespace

Placed place_anywhere(const Problem& problem) {
  const Shape& shape = problem.shape;
  if (shape.slots >= shape.experts) return {place_everywhere(shape)};
  const bool spare = shape.places() > shape.experts;
  const Load simple = lower_bound(problem, 0);
  const std::vector<int32_t> limits(shape.experts, shape.ranks);
  auto counts = apportion(problem.loads.data(), limits, shape.places());
  const auto even = items_of(problem, counts);
  Placed placed;
  if (shape.slots == 2 && spare) placed.bound = fit_pairs(problem, &counts);
  const Load goal = goal_of(std::max(simple, placed.bound));
  refine_counts(problem, goal, &counts);
  const auto items = items_of(problem, counts);
  Packing best(problem, pack(items, shape.ranks, shape.slots, Start::kPlain, goal));
  exchange(&best, 0, shape.ranks, goal);
  // The policy `balanced` levels a batch by what experts of several replicas can shift. So each rank should have some
  // of these, where ranks can be even that way: at 32 ranks, 288 slots and 128 tokens a rank `balanced` then leaves two
  // thirds of the imbalance that it would leave otherwise.
  if (spare && best.peak() - simple <= simple / kNearly) {
    Packing spread(problem, pack(items, shape.ranks, shape.slots, Start::kSpread, goal));
    exchange(&spread, 0, shape.ranks, goal, Among::kAlike);
    if (spread.peak() - simple <= simple / kNearly) best = std::move(spread);
  }
  // Where a few hot replicas need the smallest ones beside them, exchanges alone may not get there.
  if (shape.slots > 2 && best.peak() - simple > simple / 2000) {
    Packing other(problem, pack(items, shape.ranks, shape.slots, Start::kCompany, simple));
    exchange(&other, 0, shape.ranks, goal);
    if (other.peak() < best.peak()) best = std::move(other);
  }
  if (shape.slots > 2 && spare && best.peak() - simple > simple / 500)
    best = with_fewer(problem, goal, std::move(best));
  // Replicas are moved one by one where counts and packing do not fit each other. With two slots a rank the counts are
  // as good as that gets; without replicas there is nothing to move.
  if (shape.slots > 2 && spare && best.peak() - simple > simple / 500) {
    best = Packing(problem, polish(problem, best.experts(), goal));
  }
  // The plan is never worse than this simple one: the largest share as small as can be, and each item to the coolest
  // rank. That is DeepSeek's algorithm, but the replicas of an expert go to different ranks.
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
