// Finds counts for two slots a rank, where moving single replicas does not help any more. Takes counts, gives better
// ones and the packing bound; all is whole numbers with fixed ties.
//
// With two slots a rank, counts keep within a limit T if and only if, for each t up to T / 2, there are as many slots
// below t as above T - t (company.cc; that many are enough, as pairing the largest with the smallest shows). The number
// of missing slots, over all t, falls with each step in the right direction, where the hottest pair alone may need
// several steps at once. So a replica goes from the expert where that harms least to the one where it helps most. Where
// nothing helps, each t that lacks slots counts more from then on.
//
// Worse counts make worse plans, no more; but twPlan reports the bound, which must never be above what some plan
// reaches.
#include <algorithm>
#include <cstdlib>
#include <vector>

#include "balance/bound.h"
#include "balance/packing.h"
#include "balance/thresholds.h"

namespace tw::balance {
namespace {

constexpr size_t kPairThresholds = 256;  // with fewer than all, keeping to these is not sufficient: peaks are checked
constexpr int32_t kTries = 6;            // limits that are tried
constexpr int32_t kSteps = 80;           // steps for each limit
constexpr int32_t kRest = 4;             // steps in which an expert that has changed does not change back

constexpr Worth kNothing{0, 0};

class Fit {
 public:
  Fit(const Problem& problem, Load limit, const std::vector<int32_t>& counts)
      : problem_(problem),
        limit_(limit),
        thresholds_(problem, limit, kPairThresholds),
        counts_(counts),
        rests_(counts.size(), 0),
        lacks_(thresholds_.size(), 0),
        prices_(thresholds_.size(), 1),
        costs_(thresholds_.size() + 1, 0) {}

  // Searches; returns whether counts within the limit were found.
  bool run() {
    int64_t free = problem_.shape.places();
    for (int32_t e = 0; e < problem_.shape.experts; ++e) {
      least_.push_back(static_cast<int32_t>(least_count(problem_.loads[e], limit_)));
      counts_[e] = std::max(counts_[e], least_[e]);
      free -= counts_[e];
      enter(thresholds_.of(problem_.loads[e], counts_[e]), 1);
      list(e);
    }
    add_up();
    for (; free < 0; ++free) {
      if (!change(-1, 0)) return false;
    }
    int64_t before = costs_.back();
    for (int32_t step = 1; step <= kSteps; ++step) {
      if (before == 0) return true;
      if (!change(-1, step) || !change(1, step)) return false;
      const int64_t after = costs_.back();
      before = after < before ? after : raise();
    }
    return before == 0;
  }

  const std::vector<int32_t>& counts() const { return counts_; }

 private:
  struct Around {
    Worth less = kNothing, same = kNothing, more = kNothing;
  };

  void list(int32_t e) {
    around_.resize(counts_.size());
    const Load w = problem_.loads[e];
    Around& around = around_[e];
    around.same = thresholds_.of(w, counts_[e]);
    if (counts_[e] > least_[e]) around.less = thresholds_.of(w, counts_[e] - 1);
    around.more = thresholds_.of(w, counts_[e] + 1);
  }

  void enter(const Worth& worth, int64_t sign) {
    for (size_t j = worth.at; j < thresholds_.size(); ++j) lacks_[j] -= static_cast<int32_t>(sign * worth.value);
  }

  // What is missing if `come` is added and `go` taken away; if that is not below `limit`, any number that is not.
  int64_t cost(const Worth& come, const Worth& go, int64_t limit) const {
    const auto n = static_cast<int32_t>(thresholds_.size());
    const int32_t first = std::min(come.at, go.at), second = std::max(come.at, go.at);
    const auto middle = static_cast<int32_t>(come.at < go.at ? -come.value : go.value);
    const auto last = static_cast<int32_t>(go.value - come.value);
    int64_t sum = costs_[first];
    for (int32_t j = first; j < second; ++j) sum += std::max(lacks_[j] + middle, 0) * prices_[j];
    if (last == 0) return sum + costs_[n] - costs_[second];
    for (int32_t j = second; j < n && sum < limit; ++j) sum += std::max(lacks_[j] + last, 0) * prices_[j];
    return sum;
  }

  // Adds costs up; called after each change of what is missing, or of prices. Returns the whole cost.
  int64_t add_up() {
    for (size_t j = 0; j < thresholds_.size(); ++j) costs_[j + 1] = costs_[j] + std::max(lacks_[j], 0) * prices_[j];
    return costs_.back();
  }

  bool change(int32_t by, int32_t step) {
    int32_t best = -1;
    int64_t lowest = INT64_MAX;
    for (int32_t e = 0; e < problem_.shape.experts; ++e) {
      if (by < 0 ? counts_[e] <= least_[e] : counts_[e] >= problem_.shape.ranks) continue;
      if (rests_[e] * by < 0 && std::abs(rests_[e]) > step) continue;
      const int64_t found = cost(by < 0 ? around_[e].less : around_[e].more, around_[e].same, lowest);
      if (found < lowest) {
        best = e;
        lowest = found;
      }
    }
    if (best < 0) return false;
    enter(around_[best].same, -1);
    counts_[best] += by;
    list(best);
    enter(around_[best].same, 1);
    rests_[best] = by * (step + kRest);
    add_up();
    return true;
  }

  int64_t raise() {
    for (size_t j = 0; j < thresholds_.size(); ++j) prices_[j] += lacks_[j] > 0 ? 1 : 0;
    return add_up();
  }

  const Problem& problem_;
  const Load limit_;
  const Thresholds thresholds_;
  std::vector<int32_t> counts_, least_;
  std::vector<int32_t> rests_;   // [E] the step until which an expert rests, with the sign of its last change
  std::vector<int32_t> lacks_;   // slots below each threshold that are missing (negative: to spare)
  std::vector<int32_t> prices_;  // price of a missing slot at each threshold
  std::vector<int64_t> costs_;   // cost of what is missing below each threshold
  std::vector<Around> around_;   // what each expert adds with a replica less, as it is, and with one more
};

Load peak_of(const Problem& problem, const std::vector<int32_t>& counts) {
  std::vector<Load> sizes;
  for (int32_t e = 0; e < problem.shape.experts; ++e) {
    sizes.insert(sizes.end(), counts[e], share(problem.loads[e], counts[e]));
  }
  std::sort(sizes.begin(), sizes.end());
  Load peak = 0;
  for (size_t i = 0; i < sizes.size() / 2; ++i) peak = std::max(peak, sizes[i] + sizes[sizes.size() - 1 - i]);
  return peak;
}

}  // namespace

Load fit_pairs(const Problem& problem, std::vector<int32_t>* counts) {
  Load high = peak_of(problem, *counts);
  const Load bound = lower_bound(problem, high);
  Load low = bound;
  // The bound is mostly near, so the first try is near it.
  for (int32_t i = 0; i < kTries && high - low > problem.mean() / 4000; ++i) {
    const Load limit = low + (high - low) / (i == 0 ? 4 : 2);
    Fit fit(problem, limit, *counts);
    const Load peak = fit.run() ? peak_of(problem, fit.counts()) : high;
    if (peak < high) {
      *counts = fit.counts();
      high = peak;
    } else {
      low = limit;
    }
  }
  return bound;
}

}  // namespace tw::balance
