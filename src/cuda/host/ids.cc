// Ids of a call on a device, as the host hands them to kernels: the caller's or the handle's own, and the map by which
// they become physical experts.
//
// Takes a handle and whether an earlier kernel has copied the ids; gives IdsIn. replace_map() waits for all calls of
// this rank.
//
// What breaks if this changes: S9: a map that changes while a kernel reads it gives other physical experts in each
// block. Ranks whose maps differ find out by the digest (docs/PROTOCOL.md, Maps and counting).
#include "cuda/host/backend.h"
#include "cuda/launch/counts.h"

namespace tw::cuda {

// Gives the ids of a call. In high throughput the exchange of counts has copied what a dispatch needs.
IdsIn NvlinkBackend::ids_of(const HandleArrays& handle, bool copied) const {
  IdsIn in{};
  const RoutingSource& source = handle.source;
  in.own = copied || !source.unread;
  in.ids = in.own ? handle.routing.ids : source.ids;
  in.weights = in.own ? handle.routing.weights : source.weights;
  in.wide = !in.own && source.id_dtype == twInt64;
  for (const int i : {0, 1}) {
    const int64_t own_stride = i == 0 ? shape().top_k : 1;
    in.id_stride[i] = in.own ? own_stride : source.id_stride[i];
    in.weight_stride[i] = in.own ? own_stride : source.weight_stride[i];
  }
  in.limit = in.own ? shape().experts : shape().choices();
  if (context_.maps->empty()) return in;
  in.map = in.own ? nullptr : arena_->map(handle.map.layer, shape());
  in.digest = in.own ? handle.device.digest : in.map + MapWords::kDigest;
  return in;
}

// Chooses physical experts by quotas where the policy says so: a kernel does that before the ids are used, which from
// then on are the handle's own.
Status NvlinkBackend::choose_slots(const HandleArrays& handle, StepPlace at, twPhase_t phase, void* stream, IdsIn* in) {
  if (in->map == nullptr || context_.spec->policy != twReplicaBalanced) return {};
  BalanceParams p{};
  p.group = view_;
  p.handle = view_of(handle);
  p.in = *in;
  p.scratch = arena_->balance(at.channel, shape());
  p.channel = at.channel;
  p.bank = phase == twPhaseDispatch ? at.bank() : bank_of(at);
  p.tokens = handle.routing.tokens;
  p.phase = phase;
  TW_RETURN_IF_FAILED(launched("balancing a batch", launch_balance(p, stream)));
  *in = ids_of(handle, true);
  return {};
}

Status NvlinkBackend::replace_map(int32_t layer, const ExpertMap& map, void* stream) {
  const OnDevice on(device_);
  if (captures(stream)) {
    return fail(twInvalidUsage, "{} waits for the device, which a stream that is captured cannot",
                Function{"twGroupReplaceMap"});
  }
  remember(stream);
  // Kernels that read a map while it changes would choose other physical experts in each of their blocks (S9).
  if (const cudaError_t error = wait_for_calls(); error != cudaSuccess) {
    return cuda_failure("waiting for calls before a map is replaced", error);
  }
  if (was_interrupted()) return fail(twInterrupted, "interrupted in a wait for calls before a map is replaced");
  return arena_->write_map(layer, shape(), map);
}

}  // namespace tw::cuda
