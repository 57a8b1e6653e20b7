// The step in which token replicas share their sums (exchange/sharing.h), as the CPU's backends make it: a SharingCall
// and a handle become places, rows and a note, and after an error all T rows are NaN.
#pragma once

#include "core/backend.h"
#include "cpu/outline.h"
#include "cpu/vector.h"
#include "exchange/sharing.h"

namespace tw::cpu {

// counts: [N], scratch.
template <class T>
void send_sharing(T& transport, const Context& context, const SharingCall& call, const HandleArrays& handle,
                  int32_t* counts) {
  const ReplicaSet& set = context.replicas;
  const int32_t count = set.count(handle.all.tokens, set.place);
  for (int rank = 0; rank < transport.ranks(); ++rank) {
    counts[rank] = set.has(rank) && rank != context.me ? count : 0;
  }
  const auto row_bytes = [&](int32_t q) { return call.tensors[q].row_bytes; };
  const auto share = [&](int32_t q) {
    return call.tensors[q].rows + static_cast<uint64_t>(handle.all.begin) * row_bytes(q);
  };
  const uint32_t digest = tokens_digest(handle.all.tokens, handle.all.sum, call.tensors[0].dtype);
  uint64_t bytes = 0;
  for (int32_t q = 0; q < call.places.tensors; ++q) bytes += row_bytes(q);
  transport.begin(call.at, {counts, call.places.tensors, bytes, 0, Area::kStraight}, false);
  tw::send_sharing(transport, context.map, call.at, call.places, set, count, call.note(), digest, share, row_bytes);
}

inline void spoil_sharing(const SharingCall& call, const HandleArrays& handle) {
  for (int32_t q = 0; q < call.places.tensors; ++q) {
    fill_nan(call.tensors[q].rows, call.tensors[q].dtype, handle.all.tokens * call.tensors[q].elements);
  }
}

template <class T>
StepEnd finish_sharing(T& transport, const Context& context, const SharingCall& call, TimePoint deadline,
                       const HandleArrays& handle, int32_t* digests) {
  const ReplicaSet& set = context.replicas;
  StepEnd end = await_step(transport, context.map, call.at, Mode::kGather, call.note(), deadline, digests);
  const int32_t unlike = end.code == twSuccess ? find_unlike(digests, transport.ranks(), set.size) : -1;
  if (unlike >= 0) end = {twReplicaMismatch, unlike, {}, static_cast<uint32_t>(unlike / set.size * set.size)};
  if (end.code != twSuccess) {
    spoil_sharing(call, handle);
    return end;
  }
  for (int32_t q = 0; q < call.places.tensors; ++q) {
    take_sharing(transport, context.map, call.at, call.places, set, handle.all.tokens, q, call.tensors[q].rows,
                 call.tensors[q].row_bytes);
  }
  return end;
}

}  // namespace tw::cpu
