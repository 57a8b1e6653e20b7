// The choice of physical experts in a kernel of its own: by the quotas of the batch (exchange/replicas.h, level_loads),
// before a dispatch or an exchange of counts, or in a group whose maps move by the map of the channel's version
// (exchange/epochs.h), before a dispatch. Takes the caller's ids; gives physical experts in the handle's ids, its
// weights, and by quotas choices per expert where the group counts.
//
// A map that moves is not chosen in the blocks of a dispatch, as they run beside the block that makes the version of
// the next one. To have them choose by versions with steps was tried: it spared a kernel, but all dispatches took 2 to
// 3 % longer (6.8 for 6.6 us a pair of one token, 2x H200), and those of maps that stay up to 10 %.
//
// Quotas are made by one block: they are few and follow from each other, so one thread makes them, out of shared
// memory, with the code that the host runs; all threads count, and a warp for each expert gives out what the expert has
// a quota of.
//
// What breaks if this changes: S9 and M3. Choices are given out in the order of tokens, by the rank's own batch alone
// and a version that all ranks have; timing must not enter.
#include <cuda_runtime.h>

#include <algorithm>

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

constexpr int kChoosing = 256;  // threads of a block that chooses by a map that moves

// Encodes a choice whose physical expert is known, until all are known. Applied again, it decodes.
__device__ inline int32_t settled(int32_t slot) { return -2 - slot; }

// The step that the ids are for.
__device__ Step step_of(const BalanceParams& p) {
  Step step{next_step(p.group, p.channel), p.channel, 0, p.phase};
  if (p.bank >= 0 && step.bank() != p.bank) ++step.number;  // the number that the exchange's step will have
  return step;
}

// Copies ids and weights into the handle and counts them. A bad id acts as -1 and is reported; those of a layout its
// own kernel reports.
__device__ void count_choices(const BalanceParams& p, const Replicas& replicas, const Batch& batch) {
  const bool of_step = p.channel >= 0;
  const Step step = of_step ? step_of(p) : Step{};
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

__global__ void __launch_bounds__(kThreads) balance_kernel(const __grid_constant__ BalanceParams p) {
  const Shape& shape = p.group.map.shape();
  const auto thread = static_cast<int>(threadIdx.x);
  const Batch batch(p);
  const uint32_t* const map = map_of(p.group, p.in, p.channel);
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
  if (thread == 0) {
    level_loads(replicas, RankOf{p.group.experts}, batch.counts, batch.load, batch.quota);
  }
  __syncthreads();
#pragma unroll 1
  for (int i = thread / 32; i < replicas.several_count; i += kWarps) {
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

// Chooses by a map that moves, each thread for itself. What the choices are counted by are the caller's ids, in the
// dispatch. Loads that follow from each other are what it takes: an id, where its physical experts are, which they are.
__global__ void __launch_bounds__(kChoosing) choose_kernel(const __grid_constant__ BalanceParams p) {
  const int top_k = p.group.map.shape().top_k;
  const int64_t choices = int64_t{p.tokens} * top_k;
  const auto first = static_cast<int64_t>(blockIdx.x) * kChoosing + static_cast<int>(threadIdx.x);
  await_earlier();
  let_next_begin();  // not before: the dispatch would be on the device while the call before this one is
  Step step{};
  const uint32_t* map = nullptr;
#pragma unroll 1
  for (int64_t i = first; i < choices || map == nullptr; i += int64_t{gridDim.x} * kChoosing) {
    const auto token = static_cast<int>(i / top_k);
    const auto k = static_cast<int>(i - int64_t{token} * top_k);
    const int64_t raw = i < choices ? raw_id(p.in, token, k) : -1;
    const float weight = i < choices ? raw_weight(p.in, token, k) : 0.0f;
    if (map == nullptr) map = map_of(p.group, p.in, p.channel), step = step_of(p);
    if (i == 0) *p.handle.digest = load_digest(map + MapWords::kDigest);
    if (i >= choices) return;
    const int32_t id = repeats(p.in, token, k, raw) ? -1 : valid_id(p.in, raw);
    if (id < 0 && raw != -1) report_id(p.group, step, token, k, raw);
    p.handle.ids[i] = slot_of(p.group, map, id, token);
    p.handle.weights[i] = weight;
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

int launch_choose(const BalanceParams& params, int most_blocks, bool early, void* stream) {
  const int64_t choices = int64_t{params.tokens} * params.group.map.shape().top_k;
  const auto blocks = static_cast<int>(std::clamp<int64_t>((choices + kChoosing - 1) / kChoosing, 1, most_blocks));
  return launch_kernel(choose_kernel, params, blocks, 0, early, stream, kChoosing);
}

int load_balance(const Shape& shape) {
  return allow_shared(reinterpret_cast<const void*>(balance_kernel), 4 * shared_words(shape));
}

}  // namespace tw::cuda
