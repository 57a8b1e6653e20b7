// Combine of few rows: all go as lines and are summed out of the lines as they come. Floor: one flight over the link.
// The whole block works on one row, then on one token, so that a row is on its way at once.
#include <cuda_runtime.h>

#include "nvlink/combine.cuh"

namespace tw::nvlink {
namespace {

// Terms of one token, by the first threads. Needs a barrier after it.
__device__ void find_terms(const Sum& s, int token) {
  const CombineParams& p = s.p;
  if (token >= p.tokens) return;
#pragma unroll 1
  for (int position = threadIdx.x; position < s.fan_out(); position += blockDim.x) {
    const Destination from = p.handle.destinations[static_cast<int64_t>(token) * s.fan_out() + position];
    const int fan = p.handle.fan[token];
    if (position == 0) s.fan()[0] = fan;
    if (position < fan) find_term<false>(s, 0, token, position, from);
  }
}

// This rank's own partial of a token whose terms are found, if it must be summed. All threads; barriers inside.
__device__ void collect_own(const Sum& s) {
  __syncthreads();
  if (threadIdx.x < 32) {
    for (int position = 0; position < s.fan()[0]; ++position) {
      if (s.kinds(0)[position] != kOwn) continue;
      collect_terms(s.p, 0, s.p.group.me, s.from(0)[position].slot);
    }
  }
}

// Rows of an owner, this block's slots of them. `early`: the part of the first one that this thread has loaded already.
__device__ void send_rows(const Sum& s, int owner, bool has_early, Vec16 early) {
  const CombineParams& p = s.p;
  const int blocks = static_cast<int>(gridDim.x);
  const int rows = s.counts()[owner];
  std::byte* const lines = s.windows()[owner] + p.group.map.line(s.step.lane, s.step.bank(), p.group.me, 0);
#pragma unroll 1
  for (int slot = (static_cast<int>(blockIdx.x) + blocks - owner % blocks) % blocks; slot < rows; slot += blocks) {
    std::byte* const line = lines + slot * p.group.map.line_row();
    if (has_early) {
      if (threadIdx.x < s.lanes())
        store_pair(line + 16 * threadIdx.x, early.a, is_flag(threadIdx.x) ? s.step.number : early.b);
      send_line_row(s, line, row_of(p, owner, slot), 0, threadIdx.x + blockDim.x, blockDim.x);
      has_early = false;
      continue;
    }
    if (!s.simple()) {
      __syncthreads();
      if (threadIdx.x < 32) collect_terms(p, 0, owner, slot);
      __syncthreads();
    }
    send_line_row(s, line, row_of(p, owner, slot), 0, threadIdx.x, blockDim.x);
  }
}

// What this thread will send first, if rows are simple: loaded before anybody knows whether there is such a row. The
// place exists all the same, as the caller's tensor has all slots up to the bound.
__device__ Vec16 load_early(const Sum& s, int owner, bool* loaded) {
  const CombineParams& p = s.p;
  const int blocks = static_cast<int>(gridDim.x);
  const int slot = (static_cast<int>(blockIdx.x) + blocks - owner % blocks) % blocks;
  *loaded = p.send && s.simple() && s.ranks() > 1 && slot < p.bound;
  Vec16 value{};
  if (!*loaded || threadIdx.x >= s.lanes()) return value;
  const uint32_t w = word_of(threadIdx.x);
  const std::byte* const row = row_of(p, owner, slot);
  if (w < s.words()) value.a = load_input<unsigned long long>(row + 8 * w);
  if (!is_flag(threadIdx.x) && w + 1 < s.words()) value.b = load_input<unsigned long long>(row + 8 * w + 8);
  return value;
}

__device__ void sum_tokens(const Sum& s, bool found) {
  const CombineParams& p = s.p;
#pragma unroll 1
  for (int token = static_cast<int>(blockIdx.x); token < p.tokens; token += static_cast<int>(gridDim.x)) {
    if (!found) {
      __syncthreads();
      find_terms(s, token);
    }
    found = false;
    if (!s.simple()) collect_own(s);
    __syncthreads();
    const bool here = sum_lines<false>(s, 0, token, threadIdx.x, blockDim.x);
    if (!__syncthreads_and(here)) fill_nan(p, token, 1, threadIdx.x, blockDim.x);
  }
}

__global__ void __launch_bounds__(kThreads, 1) combine_lines_kernel(const __grid_constant__ CombineParams p) {
  const Sum s{p, Step{next_step(p.group, p.lane), p.lane, p.bound, twPhaseCombine}};
  const int first_owner = (p.group.me + 1) % s.ranks();
  bool has_early = false;
  const Vec16 early = load_early(s, first_owner, &has_early);
  // The scratch of terms serves sending too, unless rows are simple.
  const bool found = p.receive && s.simple();
  if (found) find_terms(s, static_cast<int>(blockIdx.x));
  const bool usable = begin_combine(s);
  __syncthreads();
  if (!usable) {
    if (p.receive && blockIdx.x == 0) fill_nan(p, 0, p.tokens, threadIdx.x, blockDim.x);
    return;  // not done: this step will be another kernel's, unless the group is finished
  }
  uint32_t arrived = 0;
  if (p.receive && threadIdx.x == 0) arrived = begin_end(p.group, s.step);
  if (p.send) {
    // Lines certify themselves, so the word may overtake them: it only says that this rank takes part, and with how
    // many rows. The rows do not lie in the window, so nothing of the other bank is read any more (S3).
    if (blockIdx.x == gridDim.x - 1) {
      publish_unordered(p.group, s.step, Mode::kCombine, [&](int rank) { return s.counts()[rank]; });
    }
#pragma unroll 1
    for (int i = 1; i < s.ranks(); ++i) {
      send_rows(s, (p.group.me + i) % s.ranks(), i == 1 && has_early, early);
    }
  }
  if (p.receive) {
    sum_tokens(s, found);
    if (blockIdx.x == gridDim.x - 1) conclude(s);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (!p.receive) return;
  end_step(p.group, s.step, arrived);
  say_done(p.group, s.step);
}

}  // namespace

int launch_combine_lines(const CombineParams& params, int grid, void* stream) {
  combine_lines_kernel<<<grid, kThreads, params.at.bytes, static_cast<cudaStream_t>(stream)>>>(params);
  return cudaGetLastError();
}

int load_combine_lines(const Shape& shape) {
  return allow_shared(reinterpret_cast<const void*>(combine_lines_kernel), CombineScratch::make(shape, false).bytes);
}

}  // namespace tw::nvlink
