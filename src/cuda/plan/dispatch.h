// The plan of a dispatch: which kernel, how many blocks send and receive, how wide tiles are, from which token on rows
// go as LL128 packets.
//
// Pure: the same call, shape and budget give the same plan.
//
// What breaks if this changes: speed, as long as the kind that is chosen can do the call (launch/tiles.h, Kind).
#pragma once

#include "cuda/launch/dispatch.h"
#include "cuda/plan/budget.h"

namespace tw::cuda {

// Whether a group's shape lets the kernels for usual calls do its dispatches, if tensors are laid out for them.
constexpr bool is_usual(const Shape& shape) {
  return shape.payloads <= kFastPayloads && shape.top_k <= kFastIds && shape.ranks <= kRanksAtOnce &&
         fits_tables(shape);
}

struct DispatchFacts {
  uint64_t words = 0;           // words of a row's stream, metadata included
  bool usual = false;           // the call is laid out as the kernels for usual calls need it (launch/tiles.h, Kind)
  bool metadata_known = false;  // an earlier dispatch has brought the routing's metadata
};

// Plans one call. Reads of *params what the call has (tokens, bound, send, receive, payloads and the handle's marks);
// writes kind, tiles, wide, roles, first_packet, early, rehearses and each payload's per_tile.
void plan_dispatch(const Budget& budget, const Shape& shape, const DispatchFacts& facts, DispatchParams* params);

}  // namespace tw::cuda
