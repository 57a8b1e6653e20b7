// Sums that token replicas share on a device, as the host sees them: a SharingCall becomes kernel parameters and one
// launch, or two around a carrier's moves. And the digest of a routing, launched where its ids are read first.
//
// What breaks if this changes: the widths of accesses, which the memory of the caller's rows and their places in a bank
// must allow; and the digest must be of the ids that the dispatch has read, or ranks are told that they differ where
// they do not.
#include <algorithm>

#include "cuda/host/backend.h"
#include "cuda/plan/collective.h"

namespace tw::cuda {

Status NvlinkBackend::run_sharing(const SharingCall& call, HandleArrays& handle, bool send, bool receive) {
  const OnDevice on(device_);
  remember(call.stream);
  SharingParams p{};
  p.at = collective_;
  p.group = view_at(call.at, context_.map, true);
  p.channel = call.at.channel;
  p.bank = bank_of(call.at);
  p.bound = call.bound;
  p.send = send;
  p.receive = receive;
  p.tensors = call.places.tensors;
  p.digest = static_cast<uint32_t>(call.note() >> 32);
  p.replicas = context_.replicas;
  p.all_tokens = handle.all.tokens;
  p.parts = call.parts;
  p.sums = handle.all.sums;
  p.status = handle.device.status;
  for (int q = 0; q < p.tensors; ++q) {
    const SharedRows& shared = call.tensors[q];
    CollectiveRows& rows = p.rows[q];
    rows.in = rows.out = shared.rows;
    rows.row_bytes = static_cast<uint32_t>(shared.row_bytes);
    rows.row_stride = rows.out_stride = static_cast<int64_t>(shared.row_bytes);
    rows.block_stride = static_cast<int64_t>(call.places.row_bytes[q]);
    rows.begin = call.places.begin[q];
    rows.elements = static_cast<uint32_t>(shared.elements);
    rows.from = rows.to = shared.dtype;
    constexpr uint32_t kPart = 16 * kPushedVectors;
    rows.parts = (rows.row_bytes + kPart - 1) / kPart;
    rows.width = width_of({address_of(shared.rows), shared.row_bytes, call.places.row_bytes[q]});
  }
  const Budget budget = budget_of(shape(), call.sm_limit);
  CollectiveFacts facts;
  facts.staged = staged_ != nullptr;
  facts.sources = context_.replicas.size - 1;
  plan_collective(budget, context_.map, facts, &p);
  const bool early = budget.early && captures(call.stream);
  return launched("the sharing of sums", launch_sharing(p, p.roles.grid(), early, call.stream));
}

Status NvlinkBackend::keep_sharing_pace(const SharingCall& call) {
  if (!over_carrier()) return {};
  const OnDevice on(device_);
  remember(call.stream);
  const MovedStep step{call.at, twPhaseGather, call.stream, true, false, 0};
  TW_RETURN_IF_FAILED(staged_->start(view_, step, shared(call.places), true));
  return staged_->join(view_, step, {});
}

Status NvlinkBackend::run_digest(HandleArrays& handle, bool capturing, void* stream) {
  RoutingSource& source = handle.all.source;
  if (!source.unread) return {};
  DigestParams p{};
  p.ids = source.ids;
  p.weights = source.weights;
  std::copy(std::begin(source.id_stride), std::end(source.id_stride), p.id_stride);
  std::copy(std::begin(source.weight_stride), std::end(source.weight_stride), p.weight_stride);
  p.top_k = shape().top_k;
  p.choices = static_cast<int64_t>(handle.all.tokens) * p.top_k;
  p.wide = source.id_dtype == twInt64 ? 1 : 0;
  p.sums = handle.all.sums;
  TW_RETURN_IF_FAILED(launched("the digest of a routing", launch_digest(p, stream)));
  if (!capturing) source = {};
  return {};
}

}  // namespace tw::cuda
