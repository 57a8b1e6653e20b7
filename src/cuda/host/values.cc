// Values of choices on a device, as the host sees them: the launch before a combine's kernel that puts them into the
// owners' windows, and the one behind it that takes what came.
//
// Takes a CombineCall that has values; gives launches on its stream.
//
// What breaks if this changes: the put must come before the kernel that publishes the combine's signals (S4), and what
// decides where values lie (bound, part, map) must be as in run_combine.
#include "cuda/launch/values.h"

#include <algorithm>

#include "cuda/host/backend.h"

namespace tw::cuda {

namespace {

// Gives the blocks for the values of `rows` rows. No more than a kernel that waits may have: that which puts values
// makes the step that is left out before a later part, in which all blocks wait (S8).
int blocks_for(const Budget& budget, const Shape& shape, int64_t rows) {
  const int64_t threads = rows * std::min(shape.top_k, 32);
  return static_cast<int>(std::clamp<int64_t>((threads + kThreads - 1) / kThreads, 1, budget.max_grid));
}

}  // namespace

ValuesParams NvlinkBackend::values_of(const CombineCall& call, const HandleArrays& handle) const {
  const Shape& rows = call.sent.map.shape();
  ValuesParams p{};
  p.group = view_at(call.at, call.sent.map, !call.send_only);
  p.handle = view_of(handle, rows);
  p.channel = call.at.channel;
  p.bank = bank_of(call.at);
  p.bound = std::min(call.bound, rows.part_tokens());
  p.part = call.part;
  p.begin = call.part * rows.part_tokens();
  p.skips = call.part > 0 ? 1 : 0;
  p.tokens = handle.routing.tokens;
  p.by_expert = layout_of(call.layout).by_expert ? 1 : 0;
  p.rows_digest = call.sent.digest;
  p.values = call.values.in.data;
  p.block_stride = call.values.in.block_stride;
  p.row_stride = call.values.in.row_stride;
  p.out = reinterpret_cast<uint32_t*>(call.values.out);
  return p;
}

Status NvlinkBackend::put_values(const CombineCall& call, HandleArrays& handle) {
  if (!call.sent.values) return {};
  const OnDevice on(device_);
  remember(call.stream);
  const Shape& rows = call.sent.map.shape();
  const Budget budget = budget_of(rows, call.sm_limit);
  const bool by_expert = layout_of(call.layout).by_expert;
  if (by_expert && handle.device.placed != call.layout) TW_RETURN_IF_FAILED(run_places(call, budget, handle));
  const int64_t most = rows.exact() ? rows.most_rows() : int64_t{rows.ranks} * call.bound;
  return launched("the values of a combine",
                  launch_put_values(values_of(call, handle), blocks_for(budget, rows, most), call.stream));
}

Status NvlinkBackend::take_values(const CombineCall& call, const HandleArrays& handle) {
  if (!call.sent.values) return {};
  const OnDevice on(device_);
  const Shape& rows = call.sent.map.shape();
  const int64_t tokens = std::min(handle.routing.tokens, rows.part_tokens());
  return launched("the values of a combine",
                  launch_take_values(values_of(call, handle), blocks_for(budget_of(rows, call.sm_limit), rows, tokens),
                                     call.stream));
}

}  // namespace tw::cuda
