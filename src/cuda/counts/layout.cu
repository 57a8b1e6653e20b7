// The layout of a routing (exchange/routing_layout.h says what that is), by ids in device memory, without a step. Takes
// the caller's ids; gives what of RoutingLayout is wanted. Counters are 0 when the kernel begins.
//
// Blocks take kCounted tokens at a time: a thread for each choice marks its rank, and marks say where tokens go and how
// many. Nobody waits for another, so any grid will do.
//
// What breaks if this changes: S9: the ranks and physical experts must be those that a dispatch of the same ids finds
// (device/routing.cuh, counts.cu); both come from device/ids.cuh.
#include <cuda_runtime.h>

#include "cuda/device/ids.cuh"
#include "cuda/launch/counts.h"
#include "cuda/launch/launch.h"
#include "cuda/launch/loading.h"

namespace tw::cuda {
namespace {

// A block's working memory: its own counters, if there are few enough.
struct LayoutScratch {
  int32_t* told;    // [1] 1: the block has reported a bad id
  uint32_t* marks;  // [kCounted / kGroup, N] which tokens go to each rank
  int32_t* own;     // [N + E], or NULL

  static __host__ __device__ int32_t mark_words(const Shape& shape) { return kCounted / kGroup * shape.ranks; }
  static __host__ __device__ bool has_own(const Shape& shape) {
    return int64_t{shape.ranks} + shape.experts <= kMaxTable;
  }
  static uint32_t bytes(const Shape& shape) {
    const int32_t own = has_own(shape) ? shape.ranks + shape.experts : 0;
    return 4 * static_cast<uint32_t>(1 + mark_words(shape) + own);
  }
  __device__ explicit LayoutScratch(const Shape& shape)
      : told(shared_at<int32_t>(0)),
        marks(shared_at<uint32_t>(4)),
        own(has_own(shape) ? shared_at<int32_t>(4 * static_cast<uint32_t>(1 + mark_words(shape))) : nullptr) {}
};

// Where a block counts; NULL: not wanted.
struct LayoutCounters {
  int32_t* per_rank;    // [N]
  int32_t* per_expert;  // [E]

  __device__ LayoutCounters(const LayoutParams& p, const LayoutScratch& scratch)
      : per_rank(p.layout.tokens_per_rank), per_expert(p.layout.tokens_per_expert) {
    if (scratch.own == nullptr) return;
    if (per_rank != nullptr) per_rank = scratch.own;
    if (per_expert != nullptr) per_expert = scratch.own + p.group.map.shape().ranks;
  }
};

// Marks and counts a choice, the i-th of all. A bad id acts as -1, and a block reports its first.
__device__ void mark_choice(const LayoutParams& p, const LayoutScratch& scratch, const LayoutCounters& counters,
                            int64_t i) {
  const GroupView& g = p.group;
  const Shape& shape = g.map.shape();
  const auto token = static_cast<int>(i / shape.top_k);
  const auto k = static_cast<int>(i - int64_t{token} * shape.top_k);
  const int64_t raw = raw_id(p.in, token, k);
  const int32_t id = repeats(p.in, token, k, raw) ? -1 : valid_id(p.in, raw);
  if (id < 0 && raw != -1 && atomicExch(scratch.told, 1) == 0) {
    write_bad_id(g, Step{atomicAdd(&g.state->bad_layouts, 1) + 1, -1, 0, twPhaseNone}, token, k, raw);
  }
  const int32_t slot =
      p.chosen != nullptr ? static_cast<int32_t>(load_fresh<uint32_t>(p.chosen + i)) : slot_of(g, p.in.map, id, token);
  if (p.layout.physical_ids != nullptr && p.chosen == nullptr) p.layout.physical_ids[i] = slot;
  if (slot < 0) return;
  if (counters.per_expert != nullptr) atomicAdd(&counters.per_expert[slot], 1);
  uint32_t* const marks = scratch.marks + token % kCounted / kGroup * shape.ranks;
  atomicOr(&marks[expert_rank(g.experts[slot])], 1u << (token % kGroup));
}

// Does kCounted tokens from `first` on. By a block.
__device__ void lay_out_some(const LayoutParams& p, const LayoutScratch& scratch, const LayoutCounters& counters,
                             int first) {
  const Shape& shape = p.group.map.shape();
  const auto thread = static_cast<int>(threadIdx.x);
  const int marks = LayoutScratch::mark_words(shape);
  const int tokens = min(kCounted, p.tokens - first);
  for (int i = thread; i < marks; i += kThreads) scratch.marks[i] = 0;
  __syncthreads();
  for (int i = thread; i < tokens * shape.top_k; i += kThreads) {
    mark_choice(p, scratch, counters, int64_t{first} * shape.top_k + i);
  }
  __syncthreads();
  for (int i = thread; counters.per_rank != nullptr && i < marks; i += kThreads) {
    const int going = __popc(scratch.marks[i]);
    if (going != 0) atomicAdd(&counters.per_rank[i % shape.ranks], going);
  }
  uint8_t* const in_rank = p.layout.token_in_rank;
  for (int i = thread; in_rank != nullptr && i < tokens * shape.ranks; i += kThreads) {
    const int token = i / shape.ranks;
    const uint32_t going = scratch.marks[token / kGroup * shape.ranks + i % shape.ranks];
    in_rank[int64_t{first} * shape.ranks + i] = static_cast<uint8_t>(going >> (token % kGroup) & 1);
  }
  __syncthreads();  // the marks are about to be overwritten
}

__global__ void __launch_bounds__(kThreads) layout_kernel(const __grid_constant__ LayoutParams p) {
  const Shape& shape = p.group.map.shape();
  const LayoutScratch scratch(shape);
  const LayoutCounters counters(p, scratch);
  const auto thread = static_cast<int>(threadIdx.x);
  const int own = scratch.own == nullptr ? 0 : shape.ranks + shape.experts;
  for (int i = thread; i < own; i += kThreads) scratch.own[i] = 0;
  if (thread == 0) *scratch.told = 0;
  __syncthreads();
  const auto blocks = static_cast<int>(gridDim.x);
#pragma unroll 1
  for (int first = static_cast<int>(blockIdx.x) * kCounted; first < p.tokens; first += blocks * kCounted) {
    lay_out_some(p, scratch, counters, first);
  }
  for (int i = thread; i < own; i += kThreads) {
    if (scratch.own[i] == 0) continue;
    const bool of_rank = i < shape.ranks;
    atomicAdd(of_rank ? &p.layout.tokens_per_rank[i] : &p.layout.tokens_per_expert[i - shape.ranks], scratch.own[i]);
  }
}

}  // namespace

int launch_layout(const LayoutParams& params, int grid, void* stream) {
  return launch_kernel(layout_kernel, params, grid, LayoutScratch::bytes(params.group.map.shape()), false, stream);
}

int load_layout(const Shape& shape) {
  return allow_shared(reinterpret_cast<const void*>(layout_kernel), LayoutScratch::bytes(shape));
}

}  // namespace tw::cuda
