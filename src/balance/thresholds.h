// Thresholds: what makes a slot big or small where ranks are to carry at most T (the proof is in company.cc). Takes a
// problem and a limit, gives the thresholds t that matter and an expert's worth for each. company.cc proves bounds by
// them, pairs.cc finds counts; a share on the wrong side of a threshold makes the bound wrong.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "balance/problem.h"

namespace tw::balance {

// What the replicas of an expert add, for the thresholds from `at` on: their number if these make them small; S - 1
// times that, negative, if big.
struct Worth {
  int64_t value;
  int32_t at;
};

class Thresholds {
 public:
  // Takes, for each share above half of `limit` that an expert can have within it, the least t that makes the share
  // big: a higher one only makes more slots small. Takes at most `most`, evenly picked.
  Thresholds(const Problem& problem, Load limit, size_t most);

  size_t size() const { return values_.size(); }
  Load operator[](size_t i) const { return values_[i]; }  // ascending
  Worth of(Load load, int64_t count) const;

 private:
  Load limit_;
  int64_t mates_;
  std::vector<Load> values_;
};

// The fewest replicas that carry at most `limit` each.
int64_t least_count(Load load, Load limit);

}  // namespace tw::balance
