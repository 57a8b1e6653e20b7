// The plan of a combine: which kernel, how many blocks send and sum, how wide tiles are, how many rows are packets.
// Pure.
#pragma once

#include "cuda/launch/combine.h"
#include "cuda/plan/budget.h"

namespace tw::cuda {

struct CombineFacts {
  bool apart = true;  // what is summed overwrites no row that is still to be sent
};

// Reads of *params what the call has (tokens, bound, send, receive, dtypes, what its memory allows), writes kind,
// tiles, wide, roles, single, joins, per_tile, pushed, pushed_parts, turn_chunks, drawn, tail_packets and rehearses.
void plan_combine(const Budget& budget, const Shape& shape, const CombineFacts& facts, CombineParams* params);

}  // namespace tw::cuda
