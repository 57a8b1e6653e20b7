// Small problems: all counts, and for each all ways to pack them, cut off where they cannot be better than what is
// known.
#include <algorithm>
#include <utility>

#include "balance/place.h"

namespace tw::balance {
namespace {

constexpr int64_t kEffort = 4000000;  // ways to place a slot that are tried: 20 to 40 ms

class Search {
 public:
  Search(const Problem& problem, std::vector<int32_t> known)
      : problem_(problem),
        shape_(problem.shape),
        best_(std::move(known)),
        peak_(Packing(problem, best_).peak()),
        counts_(shape_.experts, 1),
        loads_(shape_.ranks, 0),
        filled_(shape_.ranks, 0),
        trial_(shape_.places(), -1) {}

  std::vector<int32_t> run() {
    choose(0, shape_.places() - shape_.experts);
    return std::move(best_);
  }

 private:
  // Counts of the experts from e on, with so many slots beyond one each.
  void choose(int32_t e, int32_t spare) {
    if (effort_ >= kEffort) return;
    if (e == shape_.experts) {
      if (spare == 0) try_counts();
      return;
    }
    const int32_t most = std::min(spare, shape_.ranks - 1);
    const int32_t later = (shape_.experts - e - 1) * (shape_.ranks - 1);  // that the experts after it can take
    for (int32_t more = std::max(0, spare - later); more <= most; ++more) {
      if (share(problem_.loads[e], 1 + more) >= peak_) continue;
      counts_[e] = 1 + more;
      choose(e + 1, spare - more);
    }
    counts_[e] = 1;
  }

  void try_counts() {
    items_.clear();
    for (int32_t e = 0; e < shape_.experts; ++e) {
      items_.insert(items_.end(), counts_[e], {share(problem_.loads[e], counts_[e]), e});
    }
    std::sort(items_.begin(), items_.end(), [](const auto& a, const auto& b) {
      return a.first != b.first ? a.first > b.first : a.second < b.second;
    });
    Units total = 0;
    for (const auto& item : items_) total += item.first;
    place(0, 0, total);
  }

  // The items from k on. `from`: where the last replica went, as those of one expert go to ascending ranks.
  void place(int32_t k, int32_t from, Units left) {
    if (++effort_ >= kEffort) return;
    if (k == shape_.places()) {
      peak_ = *std::max_element(loads_.begin(), loads_.end());
      best_ = trial_;
      return;
    }
    Units room = 0;
    for (int32_t r = 0; r < shape_.ranks; ++r) {
      if (filled_[r] < shape_.slots) room += peak_ - 1 - loads_[r];
    }
    if (room < left) return;
    const auto [size, e] = items_[k];
    const bool again = k > 0 && items_[k - 1].second == e;
    bool tried_empty = false;
    for (int32_t r = again ? from + 1 : 0; r < shape_.ranks; ++r) {
      if (filled_[r] == shape_.slots || loads_[r] + size >= peak_) continue;
      if (filled_[r] == 0 && std::exchange(tried_empty, true)) break;  // all empty ranks are alike
      trial_[r * shape_.slots + filled_[r]++] = e;
      loads_[r] += size;
      place(k + 1, r, left - size);
      loads_[r] -= size;
      --filled_[r];
    }
  }

  const Problem& problem_;
  const Shape& shape_;
  std::vector<int32_t> best_;
  Units peak_;  // of best_: only what is below is looked for
  std::vector<int32_t> counts_;
  std::vector<Units> loads_;
  std::vector<int32_t> filled_, trial_;
  std::vector<std::pair<Units, int32_t>> items_;  // (size, expert), the largest first
  int64_t effort_ = 0;
};

}  // namespace

std::vector<int32_t> place_exactly(const Problem& problem, std::vector<int32_t> known) {
  return Search(problem, std::move(known)).run();
}

}  // namespace tw::balance
