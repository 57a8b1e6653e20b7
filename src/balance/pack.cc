// Packs replicas into slots from nothing, longest processing time first. Takes items (an expert, its share, its
// replicas), gives a plan that has an expert once on a rank. All searches start from here; equal sizes are ordered by
// replicas and then by expert, so that the plan is the same everywhere.
#include <algorithm>
#include <utility>

#include "balance/packing.h"

namespace tw::balance {
namespace {

struct Bin {
  Load load;
  int32_t rank;
  bool operator<(const Bin& other) const { return load != other.load ? load < other.load : rank < other.rank; }
};

class Packer {
 public:
  Packer(int32_t ranks, int32_t slots)
      : slots_(slots), filled_(ranks, 0), experts_(static_cast<size_t>(ranks) * slots, -1) {
    for (int32_t r = 0; r < ranks; ++r) open_.push_back({0, r});
  }

  // Places each hot item with the smallest ones beside it, as long as that makes more than `goal`. Lowers the counts of
  // what it places.
  void place_with_company(std::vector<Item>* items, Load goal) {
    int32_t rank = 0;
    const auto ranks = static_cast<int32_t>(filled_.size());
    for (Item& hot : *items) {
      for (; hot.count > 0 && rank < ranks; ++rank) {
        std::vector<Item*> mates;
        Load sum = hot.size;
        for (auto item = items->rbegin(); item != items->rend(); ++item) {
          if (static_cast<int32_t>(mates.size()) == slots_ - 1) break;
          if (item->count == 0 || &*item == &hot) continue;
          mates.push_back(&*item);
          sum += item->size;
        }
        if (static_cast<int32_t>(mates.size()) < slots_ - 1 || sum <= goal) return;
        put(&hot, &open_[rank]);
        for (Item* const item : mates) put(item, &open_[rank]);
      }
    }
  }

  void place(std::vector<Item>* items) {
    close_full();
    for (Item& item : *items) {
      // If there are fewer open ranks than replicas, the rest goes to the same ranks again, and mend() finds another
      // way.
      while (item.count > 0) {
        const auto n = std::min<int32_t>(item.count, static_cast<int32_t>(open_.size()));
        std::partial_sort(open_.begin(), open_.begin() + n, open_.end());
        for (int32_t i = 0; i < n; ++i) put(&item, &open_[i]);
        close_full();
      }
    }
  }

  // Takes second replicas of an expert off a rank, each by an exchange with a slot of a rank that lacks it. False if
  // some are left.
  bool mend() {
    const auto ranks = static_cast<int32_t>(filled_.size());
    for (int32_t place = 0; place < ranks * slots_; ++place) {
      const int32_t r = place / slots_, e = experts_[place];
      if (!is_double(experts_, slots_, place)) continue;
      bool done = false;
      for (int32_t other = 0; other < ranks * slots_ && !done; ++other) {
        if (other / slots_ == r || holds(other / slots_, e) || holds(r, experts_[other])) continue;
        std::swap(experts_[place], experts_[other]);
        done = true;
      }
      if (!done) return false;
    }
    return true;
  }

  std::vector<int32_t>& experts() { return experts_; }

 private:
  void put(Item* item, Bin* bin) {
    experts_[static_cast<size_t>(bin->rank) * slots_ + filled_[bin->rank]++] = item->expert;
    bin->load += item->size;
    --item->count;
  }

  void close_full() {
    std::erase_if(open_, [&](const Bin& bin) { return filled_[bin.rank] == slots_; });
  }

  bool holds(int32_t rank, int32_t expert) const {
    const auto first = experts_.begin() + static_cast<int64_t>(rank) * slots_;
    return std::find(first, first + slots_, expert) != first + slots_;
  }

  int32_t slots_;
  std::vector<int32_t> filled_;   // [ranks]
  std::vector<int32_t> experts_;  // [ranks * slots], -1: free
  std::vector<Bin> open_;         // ranks with a free slot
};

// Deals replicas like cards: those of an expert follow each other, and are no more than there are ranks.
std::vector<int32_t> deal(const std::vector<Item>& items, int32_t ranks, int32_t slots) {
  std::vector<int32_t> experts(static_cast<size_t>(ranks) * slots);
  int32_t k = 0;
  for (const Item& item : items) {
    for (int32_t i = 0; i < item.count; ++i, ++k)
      experts[static_cast<size_t>(k % ranks) * slots + k / ranks] = item.expert;
  }
  return experts;
}

}  // namespace

std::vector<Item> items_of(const Problem& problem, const std::vector<int32_t>& counts) {
  std::vector<Item> items;
  for (int32_t e = 0; e < problem.shape.experts; ++e)
    items.push_back({share(problem.loads[e], counts[e]), e, counts[e]});
  return items;
}

std::vector<int32_t> pack(std::vector<Item> items, int32_t ranks, int32_t slots, Start start, Load goal) {
  // Among equal sizes, the expert that must be on more ranks comes first.
  std::sort(items.begin(), items.end(), [start](const Item& a, const Item& b) {
    if (start == Start::kSpread && (a.count > 1) != (b.count > 1)) return a.count > 1;
    if (a.size != b.size) return a.size > b.size;
    return a.count != b.count ? a.count > b.count : a.expert < b.expert;
  });
  Packer packer(ranks, slots);
  std::vector<Item> left = items;
  if (start == Start::kCompany) packer.place_with_company(&left, goal);
  packer.place(&left);
  if (!packer.mend()) return deal(items, ranks, slots);
  return std::move(packer.experts());
}

}  // namespace tw::balance
