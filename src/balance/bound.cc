// Three bounds, of which the largest counts. A plan gives expert e a whole number of replicas c_e >= 1, their sum is
// P = N * S, and each carries w_e / c_e. Let T be what the hottest rank carries.
//
// 1. Mean. The ranks together carry the total, so T is at least total / N.
//
// 2. Hottest expert. Let d_e be the ranks that hold e. One of them carries at least w_e / d_e of it, so d_e >= w_e / T,
//    and the sum of d_e is at most P, each at most N. Hence T is at least the least T for which
//    sum max(1, ceil(w_e / T)) <= P with every term at most N: what apportion() finds, as it always splits the largest
//    share. Beside a slot of the hottest expert stand S - 1 others; if P = E, where no expert can have a second
//    replica, these carry at least the S - 1 smallest loads: T >= w_max + these.
//
// 3. Company. Take 0 < t <= T / 2 and call a slot big if it carries more than T - t, small if less than t. A rank holds
//    at most one big slot (two carry more than 2 (T - t) >= T), and beside it only small ones, else it carries more
//    than T. So a plan within T has at least (S - 1) small slots for each big one: sum over e of g_e(c_e) >= 0, where
//    g_e(c) is -(S - 1) c, 0 or c as its replicas are big, neither or small. For each e, c_e is at least ceil(w_e / T).
//    The largest that the sum can be, the c_e adding up to P, is at most what it is with parts of slots: each g_e
//    replaced by its concave hull, and slots given where they add most. If even that is negative, no plan is within T.
//    Any t may be tried; T is narrowed down by halving.
#include "balance/bound.h"

#include <algorithm>
#include <array>
#include <functional>

#include "balance/packing.h"

namespace tw::balance {
namespace {

constexpr int32_t kThresholds = 24;  // of each kind
constexpr int32_t kHalvings = 9;
constexpr int32_t kCompanySlots = 8;  // more of them, and there always is company

struct Gain {
  int64_t slots, value;  // so many slots add so much; compared by value / slots
};

// What expert with load w adds at its least replica count, and what further slots can add, the better first.
struct Offers {
  int64_t slots, value;
  std::array<Gain, 2> more;
  int32_t count = 0;
};

Offers offers_of(Units w, Units limit, Units threshold, int64_t mates) {
  const auto at_least_one = [](Units n) { return std::max<Units>(n, 1); };
  const int64_t least = at_least_one((w + limit - 1) / limit);  // w / c <= T
  const int64_t not_big = at_least_one((w + limit - threshold - 1) / (limit - threshold));
  const int64_t small = w / threshold + 1;
  Offers offers{least, 0, {}, 0};
  if (small <= least) {
    offers.value = least;
    return offers;
  }
  if (not_big <= least) {
    offers.more[offers.count++] = {small - least, small};
    return offers;
  }
  offers.value = -mates * least;
  const Gain first{not_big - least, mates * least}, second{small - not_big, small};
  const Gain both{small - least, small + mates * least};
  // The hull: by way of the middle only where that is above the straight way.
  if (small <= not_big || first.value * both.slots <= both.value * first.slots) {
    offers.more[offers.count++] = both;
  } else {
    offers.more[offers.count++] = first;
    offers.more[offers.count++] = second;
  }
  return offers;
}

// Whether term 3 shows, with this threshold, that no plan keeps all ranks within `limit`.
bool refutes(const Problem& problem, Units limit, Units threshold, std::vector<Gain>* gains) {
  int64_t left = problem.shape.places(), value = 0;
  gains->clear();
  for (const Units w : problem.loads) {
    const Offers offers = offers_of(w, limit, threshold, problem.shape.slots - 1);
    left -= offers.slots;
    value += offers.value;
    for (int32_t i = 0; i < offers.count; ++i) {
      // A slot more of an expert that is small already adds one: what adds less is not needed.
      if (offers.more[i].value > offers.more[i].slots) gains->push_back(offers.more[i]);
    }
  }
  if (left < 0) return true;
  if (value + left >= 0) return false;
  std::sort(gains->begin(), gains->end(), [](const Gain& a, const Gain& b) {
    const int64_t x = a.value * b.slots, y = b.value * a.slots;
    return x != y ? x > y : a.slots < b.slots;
  });
  for (const Gain& gain : *gains) {
    if (left == 0) break;
    const int64_t slots = std::min(left, gain.slots);
    value += (gain.value * slots + gain.slots - 1) / gain.slots;
    left -= slots;
  }
  return value + left < 0;
}

Units company(const Problem& problem, Units low, Units high) {
  const int32_t experts = problem.shape.experts;
  std::vector<Units> cold = problem.loads, hot;
  const auto counts = apportion(problem.loads.data(), experts, problem.shape.places(), problem.shape.ranks);
  for (int32_t e = 0; e < experts; ++e) hot.push_back(share(problem.loads[e], counts[e]));
  const size_t n = static_cast<size_t>(std::min(kThresholds, experts));
  std::partial_sort(cold.begin(), cold.begin() + n, cold.end());
  std::partial_sort(hot.begin(), hot.begin() + n, hot.end(), std::greater<>());
  std::vector<Gain> gains;
  size_t latest = 0;  // what refuted the last limit is likely to refute the next
  for (int32_t i = 0; i < kHalvings && high - low > problem.mean() / 10000; ++i) {
    const Units middle = low + (high - low) / 2;
    bool refuted = false;
    for (size_t k = 0; k < 2 * n && !refuted; ++k) {
      const size_t which = (latest + k) % (2 * n);
      const Units threshold = which < n ? cold[which] + 1 : middle - hot[which - n];
      if (threshold <= 0 || threshold > middle / 2) continue;
      refuted = refutes(problem, middle, threshold, &gains);
      if (refuted) latest = which;
    }
    (refuted ? low : high) = middle;
  }
  return low;
}

}  // namespace

Units lower_bound(const Problem& problem, Units reached) {
  const Shape& shape = problem.shape;
  const auto counts = apportion(problem.loads.data(), shape.experts, shape.places(), shape.ranks);
  Units hottest = 0;
  for (int32_t e = 0; e < shape.experts; ++e) {
    // Rounded down, as nothing here may be above what is true.
    hottest = std::max(hottest, problem.loads[e] / std::min(counts[e], shape.ranks));
  }
  Units bound = std::max(problem.total / shape.ranks, hottest);
  if (shape.places() == shape.experts) {
    std::vector<Units> loads = problem.loads;
    std::sort(loads.begin(), loads.end());
    Units company_of_hottest = loads.back();
    for (int32_t i = 0; i + 1 < shape.slots; ++i) company_of_hottest += loads[i];
    bound = std::max(bound, company_of_hottest);
  }
  if (shape.slots > 1 && shape.slots <= kCompanySlots && shape.slots < shape.experts &&
      reached - bound > bound / 1000) {
    bound = std::max(bound, company(problem, bound, reached));
  }
  return bound;
}

}  // namespace tw::balance
