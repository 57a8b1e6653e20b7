// A plan from one that is there: update changes few slots of a plan in use, polish improves one that is not in use yet,
// relabel renames ranks. They take plans [N * S] and give plans. update must not change more slots than its budget, as
// each is a copy of an expert's weights.
#pragma once

#include <vector>

#include "balance/packing.h"

namespace tw::balance {

// Changes at most `budget` slots of `old` [N * S] so that the hottest rank carries as little as that allows. With
// shape.groups, load leaves its home only from a node that carries more than `tolerance` (parts in a million) above the
// mean. Second replicas of an expert on a rank go first, also where a rank gets hotter by that.
std::vector<int32_t> update(const Problem& problem, const std::vector<int32_t>& old, int32_t budget, int64_t tolerance);

// Improves a plan that is not in use yet in the same way, without groups or a budget, and with less effort.
std::vector<int32_t> polish(const Problem& problem, const std::vector<int32_t>& plan, Load goal);

// Whether a rank holds an expert twice though it need not.
bool has_doubles(const Shape& shape, const std::vector<int32_t>& experts);

// Renames the ranks of a plan, and orders its slots, so that as many as possible hold what they held in `old`. Ranks of
// one node stay together.
std::vector<int32_t> relabel(const Shape& shape, const std::vector<int32_t>& plan, const std::vector<int32_t>& old);

}  // namespace tw::balance
