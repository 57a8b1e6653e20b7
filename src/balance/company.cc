// The bound by company, with its proof: whether there is a plan at all whose hottest rank carries at most T. If it
// refutes a limit that some plan keeps, twPlan reports a wrong bound.
//
// A plan gives expert e a whole number of replicas c_e >= 1, their sum is P = N * S, and each replica carries w_e /
// c_e. Say its hottest rank carries at most T.
//
// Take 0 < t <= T / 2 and call a slot big if it carries more than T - t, small if less than t. A rank holds at most one
// big slot (two carry more than 2 (T - t) >= T), and beside it only small ones, else it carries more than T. Let h_t be
// -(S - 1), 0 or 1 as a slot is big, neither or small: over the slots of a rank, h_t adds up to at least 0. So does any
// mixture h = sum of l_t * h_t with weights l_t >= 0, and so it does over all slots:
//
//   sum over e of c_e * h(w_e / c_e) >= 0.
//
// What is the largest that this sum can be? For each e, c_e is at least ceil(w_e / T), and the c_e add up to P. The sum
// is at most what it is with parts of slots: c * h(w_e / c) is replaced by its concave hull over c, and slots are given
// where they add most. A further slot of an expert that is small for all t adds L = sum of l_t. All slots that are left
// can add this, so hulls are needed only where they are steeper. If even this sum is negative, no plan is within T.
//
// Any weights may be tried. They come from a game against an opponent who picks the counts. The counts that are best
// against some weights are a row that says what they are worth for each t alone; weights that are best against all rows
// so far are tried next. A few rows are enough. The sum that decides is computed in whole numbers.
#include "balance/company.h"

#include <algorithm>
#include <cmath>

#include "balance/game.h"
#include "balance/thresholds.h"

namespace tw::balance {
namespace {

constexpr size_t kThresholds = 128;
constexpr int32_t kRows = 24;                  // rows of a game
constexpr double kOne = 1 << 20;               // a weight of 1, in whole numbers
constexpr int32_t kStep = 2000, kFine = 4000;  // parts of the limit: the first step down; where halving ends

// A number of replicas of an expert, and what it is worth.
struct Option {
  int64_t count;
  Worth worth;
};

// The way from one option of an expert to a later one.
struct Gain {
  int64_t slots, value;  // so many more slots add so much; compared by value / slots
  size_t from, to;
};

class Company {
 public:
  explicit Company(const Problem& problem) : problem_(problem) {}

  // Whether no plan keeps all ranks within `limit`.
  bool refutes(Load limit) {
    left_ = problem_.shape.places();
    for (const Load w : problem_.loads) left_ -= least_count(w, limit);
    if (left_ < 0) return true;
    const Thresholds thresholds(problem_, limit, kThresholds);
    const size_t n = thresholds.size();
    if (n == 0) return false;
    list_options(limit, thresholds);
    // Weights that were good for another limit are a start here.
    if (weights_.empty()) weights_.assign(n, 1.0 / static_cast<double>(n));
    weights_.resize(n, 0);
    Game game(static_cast<int32_t>(n), problem_.shape.places() * problem_.shape.slots + 1.0);
    for (int32_t i = 0; i < kRows; ++i) {
      if (answer() < 0) return true;
      if (!game.add(row_)) return false;
      weights_ = game.weights();
      if (game.value() >= 0) return false;
    }
    return false;
  }

 private:
  void list_options(Load limit, const Thresholds& thresholds) {
    options_.clear();
    first_.clear();
    for (const Load w : problem_.loads) {
      first_.push_back(options_.size());
      const int64_t least = least_count(w, limit);
      for (int64_t c = least; c <= least + left_;) {
        options_.push_back({c, thresholds.of(w, c)});
        const auto [value, at] = options_.back().worth;
        if (value > 0 && at == 0) break;
        // Between counts where more thresholds make it small, a slot adds no more than L.
        c = value < 0 ? c + 1 : std::max(c + 1, w / thresholds[at - 1] + 1);
      }
    }
    first_.push_back(options_.size());
  }

  // The largest sum against the weights, rounded up; row_ becomes what those counts are worth for each threshold.
  int64_t answer() {
    const size_t n = weights_.size();
    above_.assign(n + 1, 0);
    for (size_t i = n; i-- > 0;) above_[i] = above_[i + 1] + std::llrint(weights_[i] * kOne);
    const int64_t all = above_[0];
    row_.assign(n + 1, 0);
    gains_.clear();
    int64_t value = 0, wanted = 0;
    for (size_t e = 0; e + 1 < first_.size(); ++e) {
      value += worth(options_[first_[e]]);
      enter(first_[e], 1);
      for (size_t i = first_[e]; i < first_[e + 1];) i = climb(i, first_[e + 1], all, &wanted);
    }
    int64_t left = left_;
    if (wanted > left) {
      std::sort(gains_.begin(), gains_.end(), [](const Gain& a, const Gain& b) {
        const int64_t x = a.value * b.slots, y = b.value * a.slots;
        return x != y ? x > y : a.from < b.from;
      });
    }
    for (const Gain& gain : gains_) {
      const int64_t slots = std::min(left, gain.slots);
      if (slots == 0) break;
      value += (gain.value * slots + gain.slots - 1) / gain.slots;
      left -= slots;
      const double part = static_cast<double>(slots) / static_cast<double>(gain.slots);
      enter(gain.from, -part);
      enter(gain.to, part);
    }
    for (size_t i = 1; i < n; ++i) row_[i] += row_[i - 1];
    row_.resize(n);
    for (double& cell : row_) cell += static_cast<double>(left);
    return value + left * all;
  }

  // The next corner of the hull behind option i, or `end` where the hull is no steeper than `all`.
  size_t climb(size_t i, size_t end, int64_t all, int64_t* wanted) {
    Gain best{1, all, i, end};
    for (size_t k = i + 1; k < end; ++k) {
      const int64_t slots = options_[k].count - options_[i].count;
      const int64_t value = worth(options_[k]) - worth(options_[i]);
      if (value * best.slots > best.value * slots) best = {slots, value, i, k};
    }
    if (best.to < end) {
      gains_.push_back(best);
      *wanted += best.slots;
    }
    return best.to;
  }

  int64_t worth(const Option& option) const { return option.worth.value * above_[option.worth.at]; }

  void enter(size_t option, double part) {
    const auto [value, at] = options_[option].worth;
    row_[at] += part * static_cast<double>(value);
  }

  const Problem& problem_;
  int64_t left_ = 0;             // slots beyond the least of each expert
  std::vector<Option> options_;  // those of all experts, each by count
  std::vector<size_t> first_;    // where each expert's options begin, and the end
  std::vector<double> weights_;  // weights of the thresholds
  std::vector<int64_t> above_;   // sums of weights from each threshold on, in whole numbers
  std::vector<Gain> gains_;
  std::vector<double> row_;
};

}  // namespace

Load company_bound(const Problem& problem, Load low, Load high) {
  Company company(problem);
  // What was reached is often almost the best: so the limit steps down from there, each step three times the last, then
  // halves.
  for (Load step = high / kStep + 1; high - step > low; step *= 3) {
    if (company.refutes(high - step)) {
      low = high - step;
      break;
    }
    high -= step;
  }
  while (high - low > problem.mean() / kFine + 1) {
    const Load middle = low + (high - low) / 2;
    (company.refutes(middle) ? low : high) = middle;
  }
  return low;
}

}  // namespace tw::balance
