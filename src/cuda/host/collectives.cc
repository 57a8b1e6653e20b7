// Gathers and reduce-scatters on a device, as the host sees them: a call becomes kernel parameters and one launch.
//
// Takes a CollectiveCall that the core has checked, with its places in a bank; plan/collective.cc decides the rest.
//
// What breaks if this changes: S3 (views and in_window decide when signals go), and the width of accesses, which the
// memory of every tensor must allow. The digest is what lets ranks see that they make the same call.
#include <algorithm>

#include "cuda/host/backend.h"
#include "cuda/plan/collective.h"

namespace tw::cuda {

namespace {

// Describes a tensor, and what its places allow.
CollectiveRows rows_of(const CollectiveCall& call, int q) {
  const CollectiveTensor& tensor = call.tensors[q];
  CollectiveRows rows{};
  rows.in = tensor.in;
  rows.block_stride = tensor.block_stride;
  rows.row_stride = tensor.row_stride;
  rows.out = tensor.out;
  rows.out_stride = tensor.out_stride;
  rows.begin = call.places.begin[q];
  rows.row_bytes = static_cast<uint32_t>(call.places.row_bytes[q]);
  rows.elements = static_cast<uint32_t>(tensor.elements);
  rows.from = tensor.from;
  rows.to = tensor.to;
  constexpr uint32_t kPart = 16 * kPushedVectors;
  rows.parts = (rows.row_bytes + kPart - 1) / kPart;
  rows.width = width_of({address_of(tensor.in), static_cast<uint64_t>(tensor.block_stride),
                         static_cast<uint64_t>(tensor.row_stride), address_of(tensor.out),
                         static_cast<uint64_t>(tensor.out_stride), rows.row_bytes});
  return rows;
}

}  // namespace

Status NvlinkBackend::run_collective(const CollectiveCall& call, bool send, bool receive) {
  const OnDevice on(device_);
  remember(call.stream);
  CollectiveParams p{};
  p.at = collective_;
  p.group = view_at(call.at, context_.map, !call.send_only);
  p.channel = call.at.channel;
  p.bank = call.views || over_carrier() ? call.at.bank() : -1;
  p.bound = call.bound;
  p.send = send;
  p.receive = receive;
  p.reduces = call.reduces;
  p.flat = call.flat;
  p.tensors = call.places.tensors;
  p.digest = call.digest;
  p.all_sizes = call.all_sizes;
  p.wide_sizes = call.wide_sizes;
  p.sizes_at = call.sizes_at;
  p.counts = call.counts;
  p.offsets = call.offsets;
  std::copy(call.sizes.begin(), call.sizes.end(), p.sizes);
  for (int q = 0; q < p.tensors; ++q) p.rows[q] = rows_of(call, q);
  const Budget budget = budget_of(shape(), call.sm_limit);
  plan_collective(budget, context_.map, {call.views, call.in_window, staged_ != nullptr}, &p);
  const bool early = budget.early && captures(call.stream);
  const auto launch = call.reduces ? launch_reduce : launch_gather;
  return launched(call.reduces ? "a reduce-scatter" : "a gather", launch(p, p.roles.grid(), early, call.stream));
}

}  // namespace tw::cuda
