// Cools the hottest rank by exchanging slots with another rank: first one for one, then two for two. Takes a packing, a
// range of ranks and a goal, and changes the packing. It never makes the hottest rank hotter and never puts an expert
// on a rank twice; ties go to the first that was found, so that plans are the same everywhere.
//
// Ranks r and q that exchange slots whose shares differ by d carry load(r) - d and load(q) + d; the best d is half of
// what they differ by. With both sorted by share, one walk over them finds the best partner of each slot.
#include <algorithm>
#include <array>
#include <numeric>

#include "balance/packing.h"

namespace tw::balance {
namespace {

constexpr int32_t kPairSlots = 16;  // two for two is tried for ranks of at most so many slots: 120 pairs
constexpr int32_t kPatience = 1;    // times the ranks: so many searches for ranks that block the hottest

struct Found {
  Load peak;  // the hotter of the two ranks afterwards
  std::array<int32_t, 2> from{-1, -1}, to{-1, -1};
};

// One or two slots of a rank, and the sum of their shares. Lists of choices have the largest first.
struct Choice {
  Load sum;
  std::array<int32_t, 2> places;
};

bool fits(const Packing& packing, const Choice& a, const Choice& b, Among among) {
  const int32_t slots = packing.problem().shape.slots;
  const int32_t r = a.places[0] / slots, q = b.places[0] / slots;
  const auto enters = [&](const Choice& coming, const Choice& leaving, int32_t rank) {
    for (const int32_t place : coming.places) {
      if (place < 0) continue;
      const int32_t e = packing.at(place);
      for (const int32_t other : leaving.places) {
        if (other >= 0 && packing.at(other) == e) return false;  // it would only change its place
      }
      if (packing.holds(rank, e)) return false;
    }
    return true;
  };
  const auto several = [&](const Choice& choice) {
    return std::count_if(choice.places.begin(), choice.places.end(),
                         [&](int32_t place) { return place >= 0 && packing.count(packing.at(place)) > 1; });
  };
  return enters(a, b, q) && enters(b, a, r) && (among == Among::kAll || several(a) == several(b));
}

// Walks the choices of r and q, both sorted, and keeps the best exchange that fits.
void walk(const Packing& packing, const std::vector<Choice>& of_r, const std::vector<Choice>& of_q, Load hot, Load cool,
          Among among, Found* best) {
  const Load difference = hot - cool;
  size_t j = 0;
  for (const Choice& a : of_r) {
    const Load wanted = a.sum - difference / 2;
    while (j < of_q.size() && of_q[j].sum > wanted) ++j;
    // The last choice above what is wanted, and the first not above.
    for (size_t k = j > 0 ? j - 1 : 0; k <= j && k < of_q.size(); ++k) {
      const Load d = a.sum - of_q[k].sum;
      if (d <= 0 || d >= difference) continue;
      const Load peak = std::max(hot - d, cool + d);
      if (peak < best->peak && fits(packing, a, of_q[k], among)) *best = {peak, a.places, of_q[k].places};
    }
  }
}

void list_singles(const Packing& packing, int32_t rank, std::vector<Choice>* choices) {
  const int32_t slots = packing.problem().shape.slots;
  choices->clear();
  for (int32_t place = rank * slots; place < (rank + 1) * slots; ++place) {
    choices->push_back({packing.share_at(place), {place, -1}});
  }
}

void list_pairs(const Packing& packing, int32_t rank, std::vector<Choice>* choices) {
  const int32_t slots = packing.problem().shape.slots, first = rank * slots;
  choices->clear();
  for (int32_t i = 0; i < slots; ++i) {
    for (int32_t k = i + 1; k < slots; ++k) {
      choices->push_back({packing.share_at(first + i) + packing.share_at(first + k), {first + i, first + k}});
    }
  }
  std::stable_sort(choices->begin(), choices->end(), [](const Choice& a, const Choice& b) { return a.sum > b.sum; });
}

template <class List>
Found search(const Packing& packing, int32_t r, int32_t first, int32_t last, Among among, List&& list) {
  static thread_local std::vector<Choice> of_r, of_q;
  Found best{packing.load(r)};
  list(packing, r, &of_r);
  for (int32_t q = first; q < last; ++q) {
    // Even the best exchange leaves the mean of both.
    if (q == r || (packing.load(r) + packing.load(q)) / 2 >= best.peak) continue;
    list(packing, q, &of_q);
    walk(packing, of_r, of_q, packing.load(r), packing.load(q), among, &best);
  }
  return best;
}

}  // namespace

// Stops when no rank above the goal can be helped. It does end: each exchange brings the loads of its two ranks closer,
// so the sum of squares over all ranks falls each time.
void exchange(Packing* packing, int32_t first, int32_t last, Load goal, Among among) {
  const int32_t slots = packing->problem().shape.slots;
  for (int32_t r = first; r < last; ++r) packing->sort_rank(r);
  std::vector<char> stuck(last, 0);  // ranks that could not be helped since the last exchange
  int32_t patience = kPatience * (last - first);
  for (;;) {
    // A hot rank may be blocked by another that is almost as hot, which is then the one to cool first.
    int32_t r = -1;
    for (int32_t q = first; q < last; ++q) {
      if (!stuck[q] && packing->load(q) > goal && (r < 0 || packing->load(q) > packing->load(r))) r = q;
    }
    const bool hottest = r == packing->hottest(first, last);
    if (r < 0 || (!hottest && --patience < 0)) return;
    Found found = search(*packing, r, first, last, among, list_singles);
    if (found.from[0] < 0 && hottest && slots > 2 && slots <= kPairSlots)
      found = search(*packing, r, first, last, among, list_pairs);
    if (found.from[0] < 0) {
      stuck[r] = 1;
      continue;
    }
    for (int i = 0; i < 2 && found.from[i] >= 0; ++i) packing->swap(found.from[i], found.to[i]);
    packing->sort_rank(r);
    packing->sort_rank(found.to[0] / slots);
    stuck.assign(last, 0);
  }
}

}  // namespace tw::balance
