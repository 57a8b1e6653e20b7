// Solves small problems exactly: it tries all counts, and for each all ways to pack them, and cuts off what cannot be
// better than the best plan known. Takes a plan and an effort, gives the best plan found. The effort counts steps, not
// time, so that the plan is the same on every machine.
#include <algorithm>
#include <utility>

#include "balance/bound.h"
#include "balance/ladder.h"
#include "balance/place.h"

namespace tw::balance {
namespace {

class Search {
 public:
  Search(const Problem& problem, std::vector<int32_t> known, int64_t effort)
      : problem_(problem),
        shape_(problem.shape),
        left_(effort),
        best_(std::move(known)),
        peak_(Packing(problem, best_).peak()),
        floor_(lower_bound(problem, 0)),
        counts_(shape_.experts, 1),
        loads_(shape_.ranks, 0),
        filled_(shape_.ranks, 0),
        held_(shape_.ranks, 0),
        trial_(shape_.places(), -1) {}

  std::vector<int32_t> run() {
    choose(0, shape_.places() - shape_.experts);
    return std::move(best_);
  }

 private:
  // Chooses counts of the experts from e on, with `spare` slots beyond one each.
  void choose(int32_t e, int32_t spare) {
    if (over()) return;
    if (e == shape_.experts) {
      if (spare == 0) try_counts();
      return;
    }
    const int32_t most = std::min(spare, shape_.ranks - 1);
    const int32_t later = (shape_.experts - e - 1) * (shape_.ranks - 1);  // slots that the experts after it can take
    for (int32_t more = std::max(0, spare - later); more <= most; ++more) {
      if (share(problem_.loads[e], 1 + more) >= peak_) continue;
      counts_[e] = 1 + more;
      choose(e + 1, spare - more);
    }
    counts_[e] = 1;
  }

  bool over() const { return left_ <= 0 || peak_ <= floor_; }

  void try_counts() {
    --left_;
    items_.clear();
    for (int32_t e = 0; e < shape_.experts; ++e) {
      items_.insert(items_.end(), counts_[e], {share(problem_.loads[e], counts_[e]), e});
    }
    std::sort(items_.begin(), items_.end(), [](const auto& a, const auto& b) {
      return a.first != b.first ? a.first > b.first : a.second < b.second;
    });
    auto largest = items_.begin();
    auto smallest = items_.rbegin();
    const auto next = [](auto* item) { return ((*item)++)->first; };
    if (climb(shape_, peak_, [&] { return next(&largest); }, [&] { return next(&smallest); }) >= peak_) return;
    Load total = 0;
    for (const auto& item : items_) total += item.first;
    place(0, 0, total);
  }

  // Places the items from k on. `from`: where the last replica went, as the replicas of one expert go to ascending
  // ranks.
  void place(int32_t k, int32_t from, Load left) {
    --left_;
    if (over()) return;
    if (k == shape_.places()) {
      peak_ = *std::max_element(loads_.begin(), loads_.end());
      best_ = trial_;
      return;
    }
    Load room = 0;
    const Load smallest = items_.back().first;
    for (int32_t r = 0; r < shape_.ranks; ++r) {
      const int32_t open = shape_.slots - filled_[r];
      if (loads_[r] + open * smallest >= peak_) return;
      if (open > 0) room += std::min(peak_ - 1 - loads_[r], open * items_[k].first);
    }
    if (room < left) return;
    const auto [size, e] = items_[k];
    const bool again = k > 0 && items_[k - 1].second == e;
    for (int32_t r = again ? from + 1 : 0; r < shape_.ranks; ++r) {
      if (filled_[r] == shape_.slots || loads_[r] + size >= peak_ || like_an_earlier(r)) continue;
      trial_[r * shape_.slots + filled_[r]++] = e;
      loads_[r] += size;
      held_[r] |= 1u << e;
      place(k + 1, r, left - size);
      held_[r] &= ~(1u << e);
      loads_[r] -= size;
      --filled_[r];
    }
  }

  // Whether an earlier rank holds the same: such ranks are alike, so only the lowest of them is served.
  bool like_an_earlier(int32_t r) const {
    return std::find(held_.begin(), held_.begin() + r, held_[r]) != held_.begin() + r;
  }

  const Problem& problem_;
  const Shape& shape_;
  int64_t left_;  // what is left of the effort, in placements of a slot and in counts
  std::vector<int32_t> best_;
  Load peak_;   // peak of best_: only plans below it are looked for
  Load floor_;  // the bound: no plan is below it
  std::vector<int32_t> counts_;
  std::vector<Load> loads_;
  std::vector<int32_t> filled_;
  std::vector<uint32_t> held_;  // [N], a bit for each expert
  std::vector<int32_t> trial_;
  std::vector<std::pair<Load, int32_t>> items_;  // (size, expert), the largest first
};

}  // namespace

std::vector<int32_t> place_exactly(const Problem& problem, std::vector<int32_t> known, int64_t effort) {
  return Search(problem, std::move(known), effort).run();
}

}  // namespace tw::balance
