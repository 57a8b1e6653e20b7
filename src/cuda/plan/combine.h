// The plan of a combine: which kernel, how many blocks send and sum, how wide tiles are, how many rows go as packets.
//
// Pure: the same call, shape and budget give the same plan.
//
// What breaks if this changes: kind and tail_packets decide which rows come as packets, and every rank must decide
// alike (S4, S10); the rest is speed alone.
#pragma once

#include "cuda/launch/combine.h"
#include "cuda/plan/budget.h"

namespace tw::cuda {

struct CombineFacts {
  bool apart = true;    // blocks may sum beside others that send: the memory of sums overwrites no row that is still
                        // to be sent, and the kernel that sends also sums (cuda/launch/bias.h)
  bool parted = false;  // the call is one part of several, for which kernels of packets have no places
};

// Plans one call. Reads of *params what the call has (tokens, bound, send, receive, dtypes, what its memory allows);
// writes kind, tiles, wide, roles, single, joins, per_tile, pushed, pushed_parts, turn_chunks, drawn, tail_packets and
// rehearses.
void plan_combine(const Budget& budget, const Shape& shape, const CombineFacts& facts, CombineParams* params);
// The same for rows that return as e4m3.
void plan_fp8(const Budget& budget, const Shape& shape, const CombineFacts& facts, CombineParams* params);

// Plans one that returns rows per expert. `packets`: all rows go as packets, else none does; `apart`: as in
// CombineFacts. Writes kind, tiles, roles and per_tile, and for chunks group.packet_tokens and tail_packets, which are
// 0 (else no row would go in a chunk, and owners would wait for what does not come, S4), pushed_parts, turn_chunks and
// drawn.
void plan_choices(const Budget& budget, const Shape& shape, bool packets, bool apart, CombineParams* params);

}  // namespace tw::cuda
