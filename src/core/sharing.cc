// The step behind a combine in which token replicas share their sums: each rank sends those of its share to the others
// of its set. It is a step of all ranks on the combine's channel (S2 and S3 are then as for any other), which rows of
// other sets take no part in.
//
// Whether it is made must be the same on all ranks, or some would wait for others in it. Hosts that learn of errors in
// their calls leave it out behind a combine that failed, as that fails on all ranks alike or finishes the group.
// Devices learn late, so they make it whenever the combine was a step, and a rank that has refused the combine refuses
// it too.
#include "core/steps.h"

namespace tw {

SharingCall sharing_of(const twGroup& group, const twHandle& handle, const CombineRows& sent) {
  SharingCall call;
  const Shape& shape = sent.map.shape();
  const ReplicaSet& set = group.context.replicas;
  call.bound = handle.bound;
  call.parts = shape.parts(handle.bound);
  call.digest = sent.digest;
  const int32_t blocks = shape.staged != 0 ? shape.ranks : set.size;
  call.places = sharing_places(blocks, handle.bound, static_cast<uint64_t>(sent.elements), shape.top_k, sent.values);
  return call;
}

StepEnd share_sums(twGroup& group, twHandle& handle, const StepEnd& combined, StepPlace* at, Status* sent) {
  const CombineCall& combine = handle.combine;
  SharingCall call = sharing_of(group, handle, combine.sent);
  call.stream = combine.stream;
  call.sm_limit = combine.sm_limit;
  call.tensors[0] = {combine.all_out, static_cast<uint64_t>(combine.out_stride), combine.out_dtype,
                     combine.sent.elements};
  const int32_t top_k = group.shape().top_k;
  call.tensors[1] = {reinterpret_cast<std::byte*>(combine.all_values), choice_bytes(top_k), twFloat32, top_k};
  if (combined.code != twSuccess && !group.backend->on_device()) {
    group.backend->spoil_sharing(call, handle);
    return combined;
  }
  call.at = group.channels.begin(at->channel);
  *sent = group.backend->send_sharing(call, handle);
  if (!sent->ok()) {
    *at = call.at;
    return {};
  }
  const StepEnd end = group.backend->finish_sharing(call, deadline_of(group), handle);
  if (combined.code != twSuccess) return combined;
  *at = call.at;
  return end;
}

Status refuse_sharing(twGroup& group, twHandle& handle, const CombineRows& sent, int channel, void* stream,
                      Status why) {
  const SharingCall call = sharing_of(group, handle, sent);
  if (!group.backend->on_device() || call.parts > 1) return why;  // then the peers know, or their devices do
  Refusal refusal{twPhaseGather, false, &handle, stream, handle.bound, sent.map, call.places};
  return refuse_on(group, refusal, channel, std::move(why));
}

}  // namespace tw
