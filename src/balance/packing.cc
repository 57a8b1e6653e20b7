// Moves of a Packing (balance/packing.h): swapping places, replacing an expert, ordering a rank. Each keeps experts,
// counts, shares and loads in step. If one of these is not updated, every search behind it compares wrong numbers, and
// plans get worse without an error.
#include "balance/packing.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace tw::balance {

Packing::Packing(const Problem& problem, std::vector<int32_t> experts)
    : problem_(&problem),
      slots_(problem.shape.slots),
      experts_(std::move(experts)),
      counts_(problem.shape.experts, 0),
      shares_(problem.shape.experts, 0),
      loads_(problem.shape.ranks, 0) {
  for (const int32_t expert : experts_) ++counts_[expert];
  for (int32_t e = 0; e < problem.shape.experts; ++e) {
    if (counts_[e] > 0) shares_[e] = share(problem.loads[e], counts_[e]);
  }
  for (int32_t place = 0; place < problem.shape.places(); ++place) loads_[place / slots_] += share_at(place);
}

int32_t Packing::hottest(int32_t first, int32_t last) const {
  return static_cast<int32_t>(std::max_element(loads_.begin() + first, loads_.begin() + last) - loads_.begin());
}

Load Packing::peak() const { return *std::max_element(loads_.begin(), loads_.end()); }

void Packing::swap(int32_t a, int32_t b) {
  const Load difference = share_at(a) - share_at(b);
  loads_[a / slots_] -= difference;
  loads_[b / slots_] += difference;
  std::swap(experts_[a], experts_[b]);
}

void Packing::set_share(int32_t expert, Load share) {
  const Load more = share - shares_[expert];
  shares_[expert] = share;
  const int32_t places = problem_->shape.places();
  for (int32_t place = 0; place < places; ++place) {
    if (experts_[place] == expert) loads_[place / slots_] += more;
  }
}

void Packing::replace(int32_t place, int32_t expert) {
  const int32_t before = experts_[place];
  if (before == expert) return;
  loads_[place / slots_] += shares_[expert] - shares_[before];
  experts_[place] = expert;
  --counts_[before];
  ++counts_[expert];
  set_share(before, share(problem_->loads[before], counts_[before]));
  set_share(expert, share(problem_->loads[expert], counts_[expert]));
}

void Packing::sort_rank(int32_t rank) {
  const auto first = experts_.begin() + static_cast<int64_t>(rank) * slots_;
  std::sort(first, first + slots_,
            [this](int32_t a, int32_t b) { return shares_[a] != shares_[b] ? shares_[a] > shares_[b] : a < b; });
}

bool Packing::can_swap(int32_t a, int32_t b) const {
  const int32_t x = experts_[a], y = experts_[b];
  return x != y && !holds(b / slots_, x) && !holds(a / slots_, y);
}

}  // namespace tw::balance
