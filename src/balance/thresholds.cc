// Computes thresholds, and what an expert's replicas are worth for each (balance/thresholds.h). The comparisons are
// exact, in whole numbers, because the proof in company.cc rests on them: a share that is taken for big or small by
// mistake makes the packing bound wrong.
#include "balance/thresholds.h"

#include <algorithm>

namespace tw::balance {

Thresholds::Thresholds(const Problem& problem, Load limit, size_t most)
    : limit_(limit), mates_(problem.shape.slots - 1) {
  for (const Load w : problem.loads) {
    for (int64_t c = least_count(w, limit); 2 * w > limit * c; ++c) {
      const Load t = limit + 1 - share(w, static_cast<int32_t>(c));
      if (2 * t <= limit) values_.push_back(t);
    }
  }
  std::sort(values_.begin(), values_.end());
  values_.erase(std::unique(values_.begin(), values_.end()), values_.end());
  const size_t n = values_.size();
  if (n <= most) return;
  for (size_t i = 0; i < most; ++i) values_[i] = values_[i * n / most];
  values_.resize(most);
}

Worth Thresholds::of(Load load, int64_t count) const {
  // Big: load / count > limit - t. Small: load / count < t.
  const bool big = share(2 * load, static_cast<int32_t>(count)) > limit_;
  const Load below = big ? limit_ - share(load, static_cast<int32_t>(count)) : load / count;
  const auto at = std::upper_bound(values_.begin(), values_.end(), below) - values_.begin();
  return {big ? -mates_ * count : count, static_cast<int32_t>(at)};
}

int64_t least_count(Load load, Load limit) { return std::max<Load>((load + limit - 1) / limit, 1); }

}  // namespace tw::balance
