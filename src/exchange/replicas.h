// The choice of a physical expert: which of an expert's slots serves a choice (tokenway/placement.h). Takes a rank's
// view of a layer's map and a choice, gives the slot. It is written once, for the host and for kernels, with integers
// alone, so the result is the same everywhere; the oracle is python/tokenway/replica_reference.py.
//
// Except for twReplicaBalanced, a choice follows from rank, token and expert, so whoever reads ids finds the slot
// without asking or counting; on a device every block that routes does so. A change moves rows to other ranks: it
// changes the bits of results, and S9 breaks if it depends on anything that another rank or the clock says.
#pragma once

#include <cstdint>

#include "tokenway/tokenway.h"

namespace tw {

// One layer's map as one rank uses it. Slots that the rank never chooses are left out: those without a share, and under
// twReplicaLocalFirst those elsewhere.
struct Replicas {
  const int32_t* first = nullptr;    // [E + 1] where each expert's slots begin
  const int32_t* slots = nullptr;    // by expert, ascending
  const uint32_t* lower = nullptr;   // likewise, where a slot's interval begins, in 2^-32; for twReplicaShares alone
  const int32_t* several = nullptr;  // experts with more than one slot, ascending
  int32_t several_count = 0;
  int32_t rank = 0;

  constexpr int32_t count(int32_t expert) const { return first[expert + 1] - first[expert]; }
  // The slot that serves a token's choice, under every policy but twReplicaBalanced.
  constexpr int32_t choose(int32_t expert, int32_t token) const;
};

// The point of a token's choice of an expert in [0, 2^32): steps of the golden ratio spread the tokens of a rank
// evenly, however many there are. Ranks and experts begin at different points, so that what each leaves over does not
// add up.
constexpr uint32_t share_point(int32_t rank, int32_t token, int32_t expert) {
  return static_cast<uint32_t>(token) * 2654435769u + static_cast<uint32_t>(rank) * 2246822519u +
         static_cast<uint32_t>(expert) * 3266489917u;
}

constexpr int32_t Replicas::choose(int32_t expert, int32_t token) const {
  const int32_t begin = first[expert];
  const auto among = static_cast<uint32_t>(first[expert + 1] - begin);
  if (among == 1) return slots[begin];
  if (lower == nullptr) return slots[begin + (static_cast<uint32_t>(rank) + static_cast<uint32_t>(token)) % among];
  const uint32_t point = share_point(rank, token, expert);
  uint32_t i = among - 1;
  while (i > 0 && point < lower[begin + i]) --i;
  return slots[begin + i];
}

// ---- twReplicaBalanced

inline constexpr int kLevelRounds = 2;  // docs/notebook/balancing.md has what more rounds would give

// Shares `count` choices of an expert out to its slots, so that the largest load among their ranks is as small as it
// can be: each rank is filled up to one level, as water would. What is too much by rounding up is taken from slots in
// turn, beginning with one that differs from rank to rank. quota: [slots of the expert]. rank_of(slot): its rank.
template <class RankOf>
constexpr void fill_level(const Replicas& replicas, RankOf&& rank_of, int32_t expert, int32_t count,
                          const int32_t* load, int32_t* quota) {
  const int32_t* const slots = replicas.slots + replicas.first[expert];
  const int32_t among = replicas.count(expert);
  int32_t level = INT32_MAX;
  for (int32_t i = 0; i <= among; ++i) {  // each time at least one slot more turns out to be above the level
    int64_t below = 0;
    int64_t sum = count;
    for (int32_t j = 0; j < among; ++j) {
      const int32_t at = load[rank_of(slots[j])];
      if (at < level) ++below, sum += at;
    }
    const auto next = static_cast<int32_t>((sum + below - 1) / below);
    if (next == level) break;
    level = next;
  }
  int32_t left = -count;
  for (int32_t j = 0; j < among; ++j) {
    const int32_t at = load[rank_of(slots[j])];
    quota[j] = at < level ? level - at : 0;
    left += quota[j];
  }
  auto turn = (static_cast<uint32_t>(replicas.rank) + static_cast<uint32_t>(expert)) % static_cast<uint32_t>(among);
  for (; left > 0; turn = turn + 1 < static_cast<uint32_t>(among) ? turn + 1 : 0) {
    if (quota[turn] > 0) --quota[turn], --left;
  }
}

// Decides how many choices of each expert that has several slots go to each slot. counts: [E] of this rank's batch.
// load: [N], what experts with one slot bring; in the end, what all bring. quota: as `slots`; only the entries of
// experts with several slots are written.
template <class RankOf>
constexpr void level_loads(const Replicas& replicas, RankOf&& rank_of, const int32_t* counts, int32_t* load,
                           int32_t* quota) {
  for (int round = 0; round < kLevelRounds; ++round) {
    for (int32_t i = 0; i < replicas.several_count; ++i) {
      const int32_t expert = replicas.several[i];
      if (counts[expert] == 0) continue;
      const int32_t begin = replicas.first[expert];
      const int32_t end = replicas.first[expert + 1];
      for (int32_t j = begin; j < end && round > 0; ++j) load[rank_of(replicas.slots[j])] -= quota[j];
      fill_level(replicas, rank_of, expert, counts[expert], load, quota + begin);
      for (int32_t j = begin; j < end; ++j) load[rank_of(replicas.slots[j])] += quota[j];
    }
  }
}

// The slot of an expert's n-th choice in the batch: its slots serve as many choices as their quota, one slot after the
// other.
constexpr int32_t quota_slot(const Replicas& replicas, const int32_t* quota, int32_t expert, int32_t n) {
  int32_t at = replicas.first[expert];
  for (; n >= quota[at] && at + 1 < replicas.first[expert + 1]; ++at) n -= quota[at];
  return replicas.slots[at];
}

}  // namespace tw
