// Ids of a call on a device, as the host hands them to kernels: the caller's or the handle's own, and the map by which
// they become physical experts. The layout of a routing follows from ids alone, so it is launched here too.
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
  in.map = in.own ? nullptr : memory_->map(handle.map.layer, shape());
  in.digest = in.own ? handle.device.digest : in.map + MapWords::kDigest;
  in.head = in.own || shape().moves == 0 ? nullptr : view_.loads.moving.heads + handle.map.layer;
  return in;
}

// Chooses physical experts by quotas where the policy says so, or before a dispatch where the channel's version says by
// which map: a kernel does that before the ids are used, which from then on are the handle's own.
Status NvlinkBackend::choose_slots(const Budget& budget, const HandleArrays& handle, StepPlace at, twPhase_t phase,
                                   void* stream, IdsIn* in) {
  const bool by_version = in->head != nullptr && phase == twPhaseDispatch;  // counts find the map themselves
  if (in->map == nullptr || !(balances() || by_version)) return {};
  BalanceParams p{};
  p.group = view_;
  p.handle = view_of(handle, shape());
  p.in = *in;
  p.scratch = memory_->balance(at.channel, shape());
  p.channel = at.channel;
  p.bank = phase == twPhaseDispatch ? at.bank() : bank_of(at);
  p.tokens = handle.routing.tokens;
  p.phase = phase;
  if (balances()) {
    TW_RETURN_IF_FAILED(launched("balancing a batch", launch_balance(p, stream)));
  } else {
    const bool early = budget.early_views && captures(stream);
    TW_RETURN_IF_FAILED(launched("choosing physical experts", launch_choose(p, budget.view_grid, early, stream)));
  }
  *in = ids_of(handle, true);
  return {};
}

// Chooses the physical experts of a layout by quotas, where the policy says so. A group of so many experts that the
// kernel's counts are in device memory has memory for them by channel; a layout has no channel, and takes its own.
Status NvlinkBackend::choose_for_layout(const LayoutCall& call, const IdsIn& in) {
  const auto stream = static_cast<cudaStream_t>(call.stream);
  BalanceParams p{};
  p.group = view_;
  p.handle.ids = call.layout.physical_ids;
  p.in = in;
  p.channel = p.bank = -1;
  p.tokens = call.tokens;
  void* scratch = nullptr;
  if (!BalanceParams::fits(shape())) {
    TW_CUDA(cudaMallocAsync(&scratch, sizeof(int32_t) * BalanceParams::scratch_words(shape()), stream));
  }
  p.scratch = static_cast<int32_t*>(scratch);
  Status status = launched("balancing the batch of a layout", launch_balance(p, call.stream));
  if (scratch != nullptr) TW_CUDA(cudaFreeAsync(scratch, stream));
  return status;
}

Status NvlinkBackend::find_layout(const LayoutCall& call) {
  const OnDevice on(device_);
  remember(call.stream);
  const auto stream = static_cast<cudaStream_t>(call.stream);
  HandleArrays routed;  // a routing that nobody keeps
  routed.source = call.source;
  routed.map.layer = call.layer;
  LayoutParams p{};
  p.group = view_;
  p.in = ids_of(routed, false);
  p.tokens = call.tokens;
  p.layout = call.layout;
  if (p.layout.tokens_per_rank != nullptr) {
    TW_CUDA(cudaMemsetAsync(p.layout.tokens_per_rank, 0, sizeof(int32_t) * static_cast<size_t>(shape().ranks), stream));
  }
  if (p.layout.tokens_per_expert != nullptr) {
    TW_CUDA(
        cudaMemsetAsync(p.layout.tokens_per_expert, 0, sizeof(int32_t) * static_cast<size_t>(shape().experts), stream));
  }
  if (call.tokens > 0) {
    if (balances()) {
      TW_RETURN_IF_FAILED(choose_for_layout(call, p.in));
      p.chosen = p.layout.physical_ids;
    }
    const int blocks = std::min((call.tokens + kCounted - 1) / kCounted, budget_.max_grid);
    TW_RETURN_IF_FAILED(launched("the layout of a routing", launch_layout(p, blocks, call.stream)));
  }
  if (!blocking_ || captures(call.stream)) return {};
  TW_CUDA(settle_stream(stream));
  return was_interrupted() ? fail(twInterrupted, "interrupted in a wait for the layout of a routing") : Status{};
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
  return memory_->write_map(layer, shape(), map);
}

}  // namespace tw::cuda
