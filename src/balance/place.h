// A layer's plan from nothing, and where its load strays. The functions take a Problem and give a plan [N * S], in
// which no rank holds an expert twice unless it must; update.h changes a plan that is in use instead. The same problem
// must give the same plan on every machine.
#pragma once

#include <vector>

#include "balance/packing.h"

namespace tw::balance {

// How near the mean (or the bound) a plan must come for the search to end: 10 parts in a million.
inline Load goal_of(Load bound) { return bound + bound / 100000; }

// A plan [N * S], and a load that no plan is below, as far as that was looked for.
struct Placed {
  std::vector<int32_t> experts;
  Load bound = 0;
};

// Places replicas wherever it is best.
Placed place_anywhere(const Problem& problem);

// Places each group of experts on one node, with as few slots elsewhere as bring every node's load within `tolerance`
// (parts in a million) of the mean of all, if that makes the hottest rank cooler. Needs shape.groups, a multiple of
// shape.nodes.
std::vector<int32_t> place_on_nodes(const Problem& problem, int64_t tolerance);

// Solves a small problem of up to 32 experts: gives the best plan there is, if it can be found within an effort (20
// million take half a second); else `known`, or a better one.
std::vector<int32_t> place_exactly(const Problem& problem, std::vector<int32_t> known, int64_t effort);

// homes_of finds the home node of each group, [groups], from a placement; stray_share is the share of the load that
// slots on other nodes carry.
std::vector<int32_t> homes_of(const Problem& problem, const std::vector<int32_t>& experts);
double stray_share(const Problem& problem, const std::vector<int32_t>& experts);

}  // namespace tw::balance
