// Decides how many replicas each expert gets: apportion splits the largest share again and again, refine_counts moves
// replicas while counts alone keep a rank too hot. Takes loads and limits, gives counts whose sum is the number of
// slots, unless limits are too low. Ties are broken by the lower expert: the plan must be the same on every machine.
#include <algorithm>
#include <functional>
#include <utility>

#include "balance/ladder.h"
#include "balance/packing.h"

namespace tw::balance {
namespace {

constexpr int32_t kColdest = 32;  // experts of least load that may get one more replica, to fill a rank with less
constexpr int32_t kHottest = 64;  // experts of largest share, beyond those of the ranks that carry most
constexpr int32_t kPasses = 24;

// The shares of a layer's replicas, and the bound (climb) by them and by those with one replica moved.
class Ladder {
 public:
  Ladder(const Problem& problem, std::vector<int32_t>* counts) : problem_(problem), counts_(*counts) { fill(); }

  // The bound, or anything not below `limit` if it is not below that.
  Load peak(Load limit, int32_t* rung = nullptr) const {
    Run none[2] = {};
    return climb(Side<1>(sizes_, none, none), Side<-1>(sizes_, none, none), limit, rung);
  }

  // The bound if `to` had one replica more and `from` one less.
  Load peak_with(int32_t from, int32_t to, Load limit) const {
    const Run gone[2] = {run(from, counts_[from]), run(to, counts_[to])};
    const Run come[2] = {run(from, counts_[from] - 1), run(to, counts_[to] + 1)};
    return climb(Side<1>(sizes_, gone, come), Side<-1>(sizes_, gone, come), limit, nullptr);
  }

  void apply(int32_t from, int32_t to) {
    --counts_[from];
    ++counts_[to];
    fill();
  }

  Load size(int32_t i) const { return sizes_[i]; }

 private:
  struct Run {
    Load size = 0;
    int32_t left = 0;
  };

  // Walks the sizes from the largest down (1) or from the smallest up (-1), without the runs that go and with those
  // that come.
  template <int kStep>
  class Side {
   public:
    Side(const std::vector<Load>& sizes, const Run* gone, const Run* come)
        : at_(kStep > 0 ? sizes.data() : sizes.data() + sizes.size() - 1),
          left_(static_cast<int32_t>(sizes.size())),
          gone_{gone[0], gone[1]},
          come_{come[0], come[1]} {
      if (before(come_[1].size, come_[0].size)) std::swap(come_[0], come_[1]);
      if (come_[0].left == 0) std::swap(come_[0], come_[1]);
    }

    Load next() {
      while (left_ > 0 && (take(&gone_[0]) || take(&gone_[1]))) {
      }
      if (come_[0].left > 0 && (left_ == 0 || !before(*at_, come_[0].size))) {
        const Load size = come_[0].size;
        if (--come_[0].left == 0) std::swap(come_[0], come_[1]);
        return size;
      }
      const Load size = *at_;
      at_ += kStep;
      --left_;
      return size;
    }

   private:
    static bool before(Load a, Load b) { return kStep > 0 ? a > b : a < b; }

    bool take(Run* run) {
      if (run->left == 0 || run->size != *at_) return false;
      --run->left;
      at_ += kStep;
      --left_;
      return true;
    }

    const Load* at_;
    int32_t left_;
    Run gone_[2], come_[2];
  };

  Load climb(Side<1> largest, Side<-1> smallest, Load limit, int32_t* rung) const {
    return tw::balance::climb(
        problem_.shape, limit, [&] { return largest.next(); }, [&] { return smallest.next(); }, rung);
  }

  void fill() {
    sizes_.clear();
    for (int32_t e = 0; e < problem_.shape.experts; ++e) {
      sizes_.insert(sizes_.end(), counts_[e], share(problem_.loads[e], counts_[e]));
    }
    std::sort(sizes_.begin(), sizes_.end(), std::greater<>());
  }

  Run run(int32_t expert, int32_t replicas) const { return {share(problem_.loads[expert], replicas), replicas}; }

  const Problem& problem_;
  std::vector<int32_t>& counts_;
  std::vector<Load> sizes_;  // shares of all slots, the largest first
};

}  // namespace

std::vector<int32_t> apportion(const Load* loads, const std::vector<int32_t>& limits, int32_t places) {
  const auto experts = static_cast<int32_t>(limits.size());
  std::vector<int32_t> counts(experts, 1);
  // A heap of (share, expert), the largest share on top, the lower expert among equals.
  std::vector<std::pair<Load, int32_t>> heap;
  for (int32_t e = 0; e < experts; ++e) {
    if (limits[e] > 1) heap.emplace_back(loads[e], -e);
  }
  std::make_heap(heap.begin(), heap.end());
  for (int32_t left = places - experts; left > 0 && !heap.empty(); --left) {
    std::pop_heap(heap.begin(), heap.end());
    const int32_t e = -heap.back().second;
    ++counts[e];
    if (counts[e] < limits[e]) {
      heap.back().first = share(loads[e], counts[e]);
      std::push_heap(heap.begin(), heap.end());
    } else {
      heap.pop_back();
    }
  }
  return counts;
}

void refine_counts(const Problem& problem, Load goal, std::vector<int32_t>* counts) {
  const int32_t experts = problem.shape.experts;
  if (problem.shape.slots < 2 || problem.shape.places() == experts) return;
  Ladder ladder(problem, counts);
  std::vector<int32_t> by_load(experts), givers, takers;
  for (int32_t e = 0; e < experts; ++e) by_load[e] = e;
  std::stable_sort(by_load.begin(), by_load.end(),
                   [&](int32_t a, int32_t b) { return problem.loads[a] < problem.loads[b]; });
  for (int32_t pass = 0; pass < kPasses; ++pass) {
    int32_t rung = 0;
    Load best = ladder.peak(INT64_MAX, &rung);
    if (best <= goal) return;
    const Load hot = ladder.size(std::min(rung + kHottest, problem.shape.ranks - 1));
    givers.clear();
    takers.assign(by_load.begin(), by_load.begin() + std::min(kColdest, experts));
    for (int32_t e = 0; e < experts; ++e) {
      if ((*counts)[e] > 1) givers.push_back(e);
      if (share(problem.loads[e], (*counts)[e]) >= hot) takers.push_back(e);
    }
    int32_t from = -1, to = -1;
    for (const int32_t e : takers) {
      if ((*counts)[e] >= problem.shape.ranks) continue;
      for (const int32_t f : givers) {
        // The larger shares of the giver's other replicas must find room themselves.
        if (f == e || share(problem.loads[f], (*counts)[f] - 1) >= best) continue;
        const Load peak = ladder.peak_with(f, e, best);
        if (peak < best) {
          best = peak;
          from = f;
          to = e;
        }
      }
    }
    if (from < 0) return;
    ladder.apply(from, to);
  }
}

}  // namespace tw::balance
