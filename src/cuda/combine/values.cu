// Values of choices beside the rows of a combine: cuda/launch/values.h says how they travel. Takes ValuesParams; gives
// [T, K] at the owner, each value from the one rank that holds the chosen expert.
//
// A row's values are 4 * K bytes where its partial is thousands. Two small kernels are expected to cost a combine a few
// microseconds (not measured yet); values in the rows of the inbox would have changed the kernels of all combines.
//
// What breaks if this changes: S2 (skips), S4 (each thread's fence follows its stores, and the combine's signals follow
// this kernel), and that the owner reads a value only where its row came (the bank holds those of earlier steps too).
#include <cuda_runtime.h>

#include "cuda/device/wait.cuh"
#include "cuda/launch/launch.h"
#include "cuda/launch/loading.h"
#include "cuda/launch/values.h"

namespace tw::cuda {
namespace {

// How a warp's threads share rows of K values: some have one row together, and take its values in turns.
struct RowThreads {
  int width = 1;  // threads of a row, a power of two

  __device__ explicit RowThreads(int top_k) {
    while (width < 32 && width < top_k) width *= 2;
  }
  __device__ int rows() const { return 32 / width; }
  __device__ int row() const { return lane() / width; }
  __device__ int first() const { return lane() % width; }
};

__device__ inline int warps() { return static_cast<int>(gridDim.x) * kWarps; }
__device__ inline int warp() { return static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32; }

// Whether there is anything to return: as the combine's own kernels decide (combine/end.cuh, can_combine).
__device__ inline bool can_return(const ValuesParams& p) {
  const int32_t status = *reinterpret_cast<const volatile int32_t*>(p.handle.status);
  const volatile ChannelState& channel = p.group.channels[p.channel];
  return !is_sticky(p.group) && status == twSuccess && (p.part == 0 || channel.failed != channel.step);
}

// Loads the bits of the value of a row's k-th choice; 0 where rows are choices, and this one is another rank's.
__device__ inline uint32_t load_value(const ValuesParams& p, int source, int64_t row, int slot, int k) {
  const Shape& shape = p.group.map.shape();
  if (!p.by_expert) {
    const int64_t at = shape.exact() ? row : slot;
    return load_fresh<uint32_t>(p.values + source * p.block_stride + at * p.row_stride + 4 * k);
  }
  const ExpertRow place = load_both(p.handle.places + row * shape.top_k + k);
  if (place.expert < 0) return 0;
  return load_fresh<uint32_t>(p.values + place.expert * p.block_stride + place.row * p.row_stride);
}

// Puts the values of the rows that came from a source into its window: the `turn`-th of `turns` warps.
__device__ void put_values(const ValuesParams& p, const Step& step, int source, int turn, int turns) {
  const GroupView& g = p.group;
  const Shape& shape = g.map.shape();
  const RowThreads threads(shape.top_k);
  const auto rows = static_cast<int>(load_fresh<uint32_t>(p.handle.counts + source));
  const int64_t first = shape.exact() ? static_cast<int64_t>(load_fresh<unsigned long long>(p.handle.source + source))
                                      : int64_t{source} * p.bound;
  std::byte* const window = target_of(g, source, true);
#pragma unroll 1
  for (int slot = turn * threads.rows() + threads.row(); slot < rows; slot += turns * threads.rows()) {
    const int64_t row = first + slot;
    const uint64_t header = load_fresh<unsigned long long>(p.handle.meta + row * (1 + shape.top_k));
    const int token = static_cast<int>(header) - p.begin;
    if (token < 0 || token >= shape.part_tokens()) continue;  // of another part
    std::byte* const to = window + values_target(g, step.channel, step.bank(), source, slot, p.bound, token,
                                                 static_cast<int>(header >> 32));
#pragma unroll 1
    for (int k = threads.first(); k < shape.top_k; k += threads.width) {
      put_data(reinterpret_cast<uint32_t*>(to) + k, load_value(p, source, row, slot, k));
    }
  }
}

__global__ void __launch_bounds__(kThreads) put_values_kernel(const __grid_constant__ ValuesParams p) {
  await_earlier();
  const GroupView& g = p.group;
  const int ranks = g.map.shape().ranks;
  Step step{next_step(g, p.channel), p.channel, p.bound, twPhaseCombine, p.rows_digest};
  begin_at_bank(g, p.bank, &step.number);
  const Step skipped = step;
  if (p.skips) ++step.number;
  if (__syncthreads_and(can_return(p)) == 0) return;  // threads that differ would wait for each other
  if (p.skips && !skip_step(g, step)) return;         // the group is finished: the combine sends nothing either
  const int each = min(warps(), ranks);               // sources that have warps at the same time
  const int turns = (warps() - 1 - warp() % each) / each + 1;
#pragma unroll 1
  for (int i = warp() % each; i < ranks; i += each) {
    put_values(p, step, (g.me + 1 + i) % ranks, warp() / each, turns);
  }
  fence_system();  // S4
  __syncthreads();
  if (p.skips && threadIdx.x == 0) end_step(g, skipped, begin_end(g, skipped));
}

// Whether a rank's signal of the step says that its rows, and with them its values, are there.
__device__ inline bool came(const GroupView& g, const Step& step, int rank) {
  Source source;
  return g.no_wait || (saw(g, step, rank, Look::kSignal, &source) && source.error == twSuccess);
}

// Gives the bits of the value of a token's k-th choice: 0 if no rank has returned one.
__device__ uint32_t taken_value(const ValuesParams& p, const Step& step, int token, int fan, int k) {
  const GroupView& g = p.group;
  const Shape& shape = g.map.shape();
  const auto id = static_cast<int32_t>(load_fresh<uint32_t>(p.handle.ids + int64_t{token} * shape.top_k + k));
  if (id < 0 || id >= shape.experts) return 0;
  const int rank = expert_rank(g.experts[id]);
  const Destination* const sent = p.handle.destinations + int64_t{token} * shape.fan_out();
  int position = -1;
  int slot = 0;
#pragma unroll 4
  for (int i = 0; i < fan; ++i) {  // to the end, so that several loads are on their way
    const Destination to = load_both(sent + i);
    if (to.rank == rank) position = i, slot = to.slot;
  }
  if (position < 0 || slot >= static_cast<int>(load_fresh<uint32_t>(p.handle.send_counts + rank))) return 0;
  const std::byte* const values =
      window_of(g, g.me) + values_source(g, step.channel, step.bank(), rank, slot, p.bound, token - p.begin, position);
  return load_fresh<uint32_t>(values + 4 * k);
}

__global__ void __launch_bounds__(kThreads) take_values_kernel(const __grid_constant__ ValuesParams p) {
  await_earlier();
  const GroupView& g = p.group;
  const Shape& shape = g.map.shape();
  const int top_k = shape.top_k;
  const Step step{next_step(g, p.channel) - 1, p.channel, p.bound, twPhaseCombine, p.rows_digest};  // it has ended
  bool good = can_return(p);
  for (int rank = static_cast<int>(threadIdx.x); rank < shape.ranks; rank += kThreads)
    good = good && came(g, step, rank);
  if (__syncthreads_and(good) == 0) {  // also what parts before have brought does not count
    const int64_t all = int64_t{p.tokens} * top_k;
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < all; i += int64_t{gridDim.x} * kThreads) {
      p.out[i] = 0x7fc00000u;
    }
    return;
  }
  const RowThreads threads(top_k);
  const int end = min(p.tokens, p.begin + shape.part_tokens());
#pragma unroll 1
  for (int token = p.begin + warp() * threads.rows() + threads.row(); token < end; token += warps() * threads.rows()) {
    const auto fan = static_cast<int>(load_fresh<uint32_t>(p.handle.fan + token));
#pragma unroll 1
    for (int k = threads.first(); k < top_k; k += threads.width) {
      p.out[int64_t{token} * top_k + k] = taken_value(p, step, token, fan, k);
    }
  }
}

}  // namespace

int launch_put_values(const ValuesParams& params, int grid, void* stream) {
  return launch_kernel(put_values_kernel, params, grid, 0, false, stream);
}
int launch_take_values(const ValuesParams& params, int grid, void* stream) {
  return launch_kernel(take_values_kernel, params, grid, 0, false, stream);
}

int load_values(const Shape& /*shape*/) {
  if (const int error = allow_shared(reinterpret_cast<const void*>(put_values_kernel), 0)) return error;
  return allow_shared(reinterpret_cast<const void*>(take_values_kernel), 0);
}

}  // namespace tw::cuda
