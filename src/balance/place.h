// A layer's plan from nothing.
#pragma once

#include <vector>

#include "balance/packing.h"

namespace tw::balance {

// How near the mean (or the bound) a plan must come for the search to end: 10 parts in a million.
inline Units goal_of(Units bound) { return bound + bound / 100000; }

// A plan [N * S], and what no plan is below, as far as that was looked for.
struct Placed {
  std::vector<int32_t> experts;
  Units bound = 0;
};

// Wherever it is best.
Placed place_anywhere(const Problem& problem);

// Each group of experts on one node, and beyond that as few slots elsewhere as bring every node's load within
// `tolerance` (parts in a million) of the mean of all, if that makes the hottest rank cooler. Needs shape.groups, a
// multiple of shape.nodes.
std::vector<int32_t> place_on_nodes(const Problem& problem, int64_t tolerance);

// Of a small problem, up to 32 experts: the best plan there is, if it can be found within an effort (20 million take
// half a second); else `known`, or better.
std::vector<int32_t> place_exactly(const Problem& problem, std::vector<int32_t> known, int64_t effort);

// Of slots that a placement fills, which carry load of a group that has its home on another node. Homes: [groups],
// nodes.
std::vector<int32_t> homes_of(const Problem& problem, const std::vector<int32_t>& experts);
double stray_share(const Problem& problem, const std::vector<int32_t>& experts);

}  // namespace tw::balance
