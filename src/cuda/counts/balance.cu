// The choice of physical experts in a kernel of its own, before a dispatch or an exchange of counts: by the quotas of
// the batch (exchange/replicas.h, level_loads), or in a group whose maps move by the map of the channel's version
// (exchange/epochs.h). Takes the caller's ids; gives physical experts in the handle's ids, its weights, and choices per
// expert where the group counts.
//
// A map that moves is chosen here, once for a routing, and not in each block of a dispatch: those run beside the block
// that makes the version of the next one.
//
// One block: the quotas are few and follow from each other, so one thread makes them, out of shared memory, with the
// code that the host runs; all threads count, and a warp for each expert gives out what the expert has a quota of.
//
// What breaks if this changes: S9 and M3. Choices are given out in the order of tokens, by the rank's own batch alone
// and a version that all ranks have; timing must not enter.
#include <cuda_runtime.h>

#include "cuda/device/ids.cuh"
#include "cuda/launch/counts.h"
#include "cuda/launch/launch.h"
#include "cuda/launch/loading.h"
#include "exchange/epochs.h"

namespace tw::cuda {
namespace {

struct RankOf {
  const uint32_t* experts;

  constexpr int32_t operator()(int32_t slot) const { return expert_rank(experts[slot]); }
};

struct Batch {
  int32_t* counts;  // [E]
  int32_t* load;    // [N]
  int32_t* quota;   // [P]

  __device__ explicit Batch(const BalanceParams& p) {
    const Shape& shape = p.group.map.shape();
    counts = p.scratch != nullptr ? p.scratch : shared_at<int32_t>(0);
    load = counts + shape.choices();
    quota = load + shape.ranks;
  }
};

// Encodes a choice whose physical expert is known, until all are known. Applied again, it decodes.
__device__ inline int32_t settled(int32_t slot) { return -2 - slot; }

// Copies ids and weights into the handle and counts them. A bad id acts as -1 and is reported; those of a layout its
// own kernel reports.
__device__ void count_choices(const BalanceParams& p, const Replicas& replicas, const Batch& batch) {
  const bool of_step = p.channel >= 0;
  Step step{of_step ? next_step(p.group, p.channel) : 0, p.channel, 0, p.phase};
  if (p.bank >= 0 && step.bank() != p.bank) ++step.number;  // the number that the exchange's step will have
  visit_choices(p.in, p.tokens, p.group.map.shape().top_k, [&](int64_t i, int token, int k, int64_t raw, int32_t id) {
    if (of_step && id < 0 && raw != -1) report_id(p.group, step, token, k, raw);
    p.handle.ids[i] = id;
    if (of_step) p.handle.weights[i] = raw_weight(p.in, token, k);
    if (id < 0) return;
    atomicAdd(&batch.counts[id], 1);
    if (replicas.count(id) > 1) return;
    const int32_t slot = replicas.slots[replicas.first[id]];
    atomicAdd(&batch.load[expert_rank(p.group.experts[slot])], 1);
  });
}

// Gives out an expert's choices in the order of tokens, by a warp.
__device__ void give_out(const BalanceParams& p, const Replicas& replicas, const Batch& batch, int32_t expert) {
  const int top_k = p.group.map.shape().top_k;
  int before = 0;
#pragma unroll 1
  for (int begin = 0; begin < p.tokens && before < batch.counts[expert]; begin += 32) {
    const int token = begin + lane();
    int32_t* found = nullptr;
    for (int k = 0; token < p.tokens && k < top_k; ++k) {
      int32_t* const at = p.handle.ids + int64_t{token} * top_k + k;
      if (static_cast<int32_t>(load_fresh<uint32_t>(at)) == expert) found = at;
    }
    const uint32_t all = __ballot_sync(~0u, found != nullptr);
    if (found != nullptr) {
      *found = settled(quota_slot(replicas, batch.quota, expert, before + __popc(all & below(lane()))));
    }
    before += __popc(all);
  }
}

// Gives the layer's map for the version that the channel has.
__device__ const uint32_t* map_in_force(const BalanceParams& p) {
  const Shape& shape = p.group.map.shape();
  if (shape.moves == 0) return p.in.map;
  const MovingView& moving = p.group.loads.moving;
  const MapVersion version = unpack_version(load_fresh<unsigned long long>(&moving.versions[p.channel]));
  return p.in.map + MapHead::chosen(load_fresh<uint32_t>(&moving.heads[p.layer]), version) * MapWords::all(shape);
}

__global__ void __launch_bounds__(kThreads) balance_kernel(const __grid_constant__ BalanceParams p) {
  const Shape& shape = p.group.map.shape();
  const auto thread = static_cast<int>(threadIdx.x);
  const Batch batch(p);
  const uint32_t* const map = map_in_force(p);
  Replicas replicas = replicas_at(p.group, reinterpret_cast<const int32_t*>(map) + MapWords::kFirst);
  replicas.several_count = static_cast<int32_t>(load_fresh<uint32_t>(map + MapWords::kSeveral));
  for (int i = thread; i < shape.choices() + shape.ranks; i += kThreads) batch.counts[i] = 0;
  if (thread == 0 && p.handle.digest != nullptr) *p.handle.digest = load_digest(map + MapWords::kDigest);
  __syncthreads();
  count_choices(p, replicas, batch);
  __syncthreads();
  for (int e = thread; p.handle.choices != nullptr && shape.counts_loads != 0 && e < shape.choices(); e += kThreads) {
    p.handle.choices[e] = batch.counts[e];
  }
  if (thread == 0 && p.by_quotas != 0) {
    level_loads(replicas, RankOf{p.group.experts}, batch.counts, batch.load, batch.quota);
  }
  __syncthreads();
#pragma unroll 1
  for (int i = thread / 32; i < replicas.several_count && p.by_quotas != 0; i += kWarps) {
    give_out(p, replicas, batch, replicas.several[i]);
  }
  __syncthreads();
#pragma unroll 1
  for (int64_t i = thread; i < int64_t{p.tokens} * shape.top_k; i += kThreads) {
    const auto id = static_cast<int32_t>(load_fresh<uint32_t>(p.handle.ids + i));
    if (id < -1) p.handle.ids[i] = settled(id);
    if (id >= 0) p.handle.ids[i] = replicas.choose(id, static_cast<int32_t>(i / shape.top_k));
  }
}

uint32_t shared_words(const Shape& shape) {
  return shape.logical_experts > 0 && BalanceParams::fits(shape) ? BalanceParams::scratch_words(shape) : 0;
}

}  // namespace

int launch_balance(const BalanceParams& params, void* stream) {
  const uint32_t bytes = 4 * shared_words(params.group.map.shape());
  return launch_kernel(balance_kernel, params, 1, bytes, false, stream);
}

int load_balance(const Shape& shape) {
  return allow_shared(reinterpret_cast<const void*>(balance_kernel), 4 * shared_words(shape));
}

}  // namespace tw::cuda
