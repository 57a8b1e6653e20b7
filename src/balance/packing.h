// Packing: which expert is in which slot, and what every rank then carries; moves keep both in step. The functions
// below it are the steps of a plan: counts (apportion, refine_counts, fit_pairs), a first packing (pack), and
// exchanges. They take a Problem and give plans [N * S], rank major; all decide by whole numbers with fixed ties.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "balance/problem.h"

namespace tw::balance {

// Whether the rank of a place holds the place's expert in an earlier place too. experts: [N * S], rank major.
inline bool is_double(const std::vector<int32_t>& experts, int32_t slots, int32_t place) {
  const auto first = experts.begin() + place / slots * slots, here = experts.begin() + place;
  return std::find(first, here, *here) != here;
}

class Packing {
 public:
  // experts: [N * S], rank major.
  Packing(const Problem& problem, std::vector<int32_t> experts);

  const Problem& problem() const { return *problem_; }
  const std::vector<int32_t>& experts() const { return experts_; }  // [N * S], rank major
  const std::vector<int32_t>& counts() const { return counts_; }    // [E]
  Load load(int32_t rank) const { return loads_[rank]; }
  Load share_of(int32_t expert) const { return shares_[expert]; }
  Load share_at(int32_t place) const { return shares_[experts_[place]]; }
  int32_t at(int32_t place) const { return experts_[place]; }
  int32_t count(int32_t expert) const { return counts_[expert]; }

  bool holds(int32_t rank, int32_t expert) const {
    const int32_t* const first = experts_.data() + static_cast<int64_t>(rank) * slots_;
    for (int32_t i = 0; i < slots_; ++i) {
      if (first[i] == expert) return true;
    }
    return false;
  }
  // The hottest of ranks first..last-1, the lowest of several.
  int32_t hottest(int32_t first, int32_t last) const;
  Load peak() const;

  void swap(int32_t a, int32_t b);              // exchanges places of two ranks
  void replace(int32_t place, int32_t expert);  // one replica less of an expert, one more of another
  void sort_rank(int32_t rank);                 // orders its slots by share, the largest first, then by expert

  // Whether the expert at `a` may come to the rank of `b` and the other way round.
  bool can_swap(int32_t a, int32_t b) const;

 private:
  void set_share(int32_t expert, Load share);

  const Problem* problem_;
  int32_t slots_;
  std::vector<int32_t> experts_, counts_;
  std::vector<Load> shares_;  // [E]
  std::vector<Load> loads_;   // [N]
};

// Gives each expert replicas so that the largest share is as small as can be: each slot beyond one per expert goes to
// the expert whose replicas carry most (the lower of equals). It is optimal: it stops at the least T for which sum
// ceil(load / T) fits. An expert gets at most its limit; slots are left over if the limits are too low for all.
std::vector<int32_t> apportion(const Load* loads, const std::vector<int32_t>& limits, int32_t places);

// Moves replicas from one expert to another while the counts alone keep a rank above `goal` (ladder.h).
void refine_counts(const Problem& problem, Load goal, std::vector<int32_t>* counts);

// Finds counts for two slots a rank and some replicas, with more effort. Returns a load that no plan is below.
Load fit_pairs(const Problem& problem, std::vector<int32_t>* counts);

// Replicas of an expert that are to be packed, and what each of them carries.
struct Item {
  Load size;
  int32_t expert;
  int32_t count;  // at most the ranks
};
std::vector<Item> items_of(const Problem& problem, const std::vector<int32_t>& counts);

// Packs by longest processing time first: the largest item goes to the coolest ranks that have a free slot, to as many
// different ones as it has replicas. Items fill ranks * slots; the result is as long, rank major, and has an expert
// once on a rank. kSpread: experts of several replicas come before the others. kCompany: ranks that would be hotter
// than `goal` beside the smallest items get these first.
enum class Start { kPlain, kSpread, kCompany };
std::vector<int32_t> pack(std::vector<Item> items, int32_t ranks, int32_t slots, Start start, Load goal);

// Exchanges slots between ranks first..last-1 until the hottest carries at most `goal`, or no exchange makes it cooler.
// kAlike: only exchanges after which each rank has as many slots of experts with several replicas as before.
enum class Among { kAll, kAlike };
void exchange(Packing* packing, int32_t first, int32_t last, Load goal, Among among = Among::kAll);

}  // namespace tw::balance
