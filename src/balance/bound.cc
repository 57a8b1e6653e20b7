// The packing bound, with its proof. It takes a layer's problem and gives a number that no plan's hottest rank is
// below; if a term were too high, searches would end early and twPlan would report a bound that is wrong.
//
// There are three bounds, of which the largest counts. A plan gives expert e a whole number of replicas c_e >= 1, their
// sum is P = N * S, and each replica carries w_e / c_e. Let T be what the hottest rank carries.
//
// 1. Mean. The ranks together carry the total, so T is at least total / N.
//
// 2. Hottest expert. Let d_e be the number of ranks that hold e. One of them carries at least w_e / d_e of it, so
//    d_e >= w_e / T, and the sum of d_e is at most P, each at most N. Hence T is at least the least T for which
//    sum max(1, ceil(w_e / T)) <= P with every term at most N. apportion() finds that T, as it always splits the
//    largest share. Beside a slot of the hottest expert stand S - 1 others; if P = E, where no expert can have a second
//    replica, these carry at least the S - 1 smallest loads: T >= w_max + these.
//
// 3. Company. Hot slots need cold ones beside them, of which there may be too few: company.cc.
#include "balance/bound.h"

#include <algorithm>

#include "balance/company.h"
#include "balance/packing.h"

namespace tw::balance {
namespace {

constexpr int32_t kCompanySlots = 8;  // with more slots than this there always is company

}  // namespace

Load lower_bound(const Problem& problem, Load reached) {
  const Shape& shape = problem.shape;
  const auto counts = apportion(problem.loads.data(), std::vector<int32_t>(shape.experts, shape.ranks), shape.places());
  Load hottest = 0;
  for (int32_t e = 0; e < shape.experts; ++e) {
    // Rounded down, as nothing here may be above what is true.
    hottest = std::max(hottest, problem.loads[e] / std::min(counts[e], shape.ranks));
  }
  Load bound = std::max(problem.total / shape.ranks, hottest);
  if (shape.places() == shape.experts) {
    std::vector<Load> loads = problem.loads;
    std::sort(loads.begin(), loads.end());
    Load company_of_hottest = loads.back();
    for (int32_t i = 0; i + 1 < shape.slots; ++i) company_of_hottest += loads[i];
    bound = std::max(bound, company_of_hottest);
  }
  if (shape.slots > 1 && shape.slots <= kCompanySlots && shape.slots < shape.experts &&
      reached - bound > bound / 1000) {
    bound = std::max(bound, company_bound(problem, bound, reached));
  }
  return bound;
}

}  // namespace tw::balance
