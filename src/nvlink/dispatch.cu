// Dispatch: one kernel, from ids to rows in place at their receivers.
//
// Floor: bytes over the link, then one flight with the last of them and its flag. The last tokens of a rank, or all if
// they are few, go as lines, which certify themselves. Those before them go as they lie; the fence and the word that
// these need (S4) take some 4 us, which pass while the lines are on the wire.
//
// Half of the blocks send, the others receive, and their warps work alone, on a unit of a row at a time: the senders
// need a bit for each token and rank (routing.cuh) and find the slots of their row from it; the receivers need a word
// of each source, which they look at while their first line comes. Nothing is handed over by way of barriers and memory
// but the bits, as each such step is half a microsecond.
#include <cuda_runtime.h>

#include "nvlink/dispatch_receive.cuh"
#include "nvlink/launch.h"

namespace tw::nvlink {
namespace {

// Moves to the bank that the caller's view needs, by a step without rows, where the lane does not stand before it. All
// blocks wait here before they send, so all must be there at once (S8). False if the wait failed.
__device__ __noinline__ bool skip_step(const DispatchParams& p, Step skipped) {
  const GroupView& g = p.group;
  skipped.number -= 1;
  if (blockIdx.x == 0) publish_empty(g, skipped, Mode::kSkip);
  bool passed = true;
  for (int i = threadIdx.x; i < g.map.shape().ranks; i += blockDim.x) {
    const Source source = await_source(g, skipped, i, Look::kTakesPart, false);
    // A peer may already be past the step that follows: then it has seen this rank's word of that one.
    const uint32_t seen = unpack(source.word).step;
    if (source.mode == Mode::kSkip || g.no_wait || (reached(seen, skipped.low()) && seen != skipped.low())) continue;
    passed = false;
    if (source.error != twPeerAborted) {
      report_failure(g, skipped, source.error == twTimeout ? twTimeout : twCallMismatch, i, source.word);
    }
  }
  return __syncthreads_and(passed) != 0;
}

// Clears away after what has failed, by one block when all have done with it.
__device__ __noinline__ void clear_failed(Block b) {
  const DispatchParams& p = b.p;
  await_done(p.group, b.step);
  for (int source = 0; source < b.ranks(); ++source) {
    if (b.scratch.source_error()[source] == twSuccess) continue;
    if (threadIdx.x == 0) p.shown.counts[source] = p.handle.counts[source] = 0;
    show_nothing(p, source, 0, p.bound, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x));
  }
  if (threadIdx.x == 0) *p.handle.status = twInternalError;
}

// The group is finished: nothing goes out, and what the caller sees is safe.
__device__ __noinline__ void show_failure(const DispatchParams& p) {
  const int ranks = p.group.map.shape().ranks;
  const int thread = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  for (int i = thread; i < ranks; i += static_cast<int>(gridDim.x * blockDim.x)) {
    p.shown.counts[i] = p.handle.counts[i] = 0;
  }
  if (threadIdx.x == 0) *p.handle.status = twInternalError;  // other blocks may have begun before
  for (int i = 0; i < ranks; ++i) show_nothing(p, i, 0, p.bound, thread, static_cast<int>(gridDim.x * blockDim.x));
}

template <bool kFast>
__global__ void __launch_bounds__(kThreads, 1) dispatch_kernel(const __grid_constant__ DispatchParams p) {
  let_next_begin();
  const GroupView& g = p.group;
  const Shape& shape = g.map.shape();
  const Scratch scratch(p);
  const int thread = static_cast<int>(threadIdx.x);
  const bool sends = p.send && is_sender(p.roles);
  const bool receives = p.receive && is_receiver(p.roles);
  warm(p);
  const uint32_t expert = p.table && thread < shape.experts ? g.experts[thread] : 0;
  for (int i = thread; i < shape.ranks; i += kThreads) {
    scratch.windows()[i] = window_of(g, i);
    scratch.base(0)[i] = 0;
    scratch.source_error()[i] = twSuccess;
  }
  if (thread == 0) *scratch.plain() = 0, *scratch.routed() = 1;
  if (thread < kWarps) scratch.progress()[thread] = 0;
  // What a sending warp sends first, though nobody knows yet where it goes.
  const uint32_t u = sent_shares(p.roles).first;
  const uint32_t row = divide(u, p.units.per_row);
  const Unit unit = sent_unit(p.units, u, row);
  await_earlier();
  Step step{next_step(g, p.lane), p.lane, p.bound, twPhaseDispatch};
  const bool sticky = is_sticky(g);
  Ahead ahead{};
  Ids ids{};
  if (sends) {  // on their way while these two and the table are
    ids = load_ids<kFast>(p, routed_token(p));
    if (row < static_cast<uint32_t>(p.tokens)) load_ahead<kFast>(p, static_cast<int>(row), unit, &ahead);
  }
  if (p.table) {
    if (thread < shape.experts) scratch.table()[thread] = expert;
    for (int i = kThreads + thread; i < shape.experts; i += kThreads) scratch.table()[i] = g.experts[i];
  }
  const bool skips = static_cast<int>(step.number & 1) != p.bank;
  if (skips) ++step.number;
  bool usable = __syncthreads_or(sticky) == 0;  // threads that differ would wait for each other
  uint32_t arrived = 0;
  if (p.receive && threadIdx.x == 0) {
    arrived = begin_end(g, step);
    if (blockIdx.x == 0) *p.handle.status = twSuccess;  // until somebody finds otherwise
  }
  const Block b{p, scratch, step, scratch.windows()[g.me] + g.map.bank(p.lane, step.bank())};
  if (p.send && usable && skips) usable = skip_step(p, step);
  if (thread == 0 && blockIdx.x == 0) clear_tickets(g, step);
  if (usable) {
    if (sends) send<kFast>(b, ahead, ids);  // S7: nobody here waits
    if (receives) receive<kFast>(b);
  } else if (p.receive) {
    show_failure(p);
  }
  if (!p.receive) return;
  __syncthreads();
  if (usable && receives && blockIdx.x == first_receiver(p.roles)) {  // its first warp has judged the sources
    bool failed = false;
    for (int i = static_cast<int>(threadIdx.x); i < b.ranks(); i += kThreads) {
      failed |= scratch.source_error()[i] != twSuccess;
    }
    if (__syncthreads_or(failed)) clear_failed(b);
  }
  if (threadIdx.x != 0) return;
  end_step(g, step, arrived);
  say_done(g, step);
}

}  // namespace

int launch_dispatch(const DispatchParams& params, int grid, bool early, void* stream) {
  return launch_kernel(params.fast ? dispatch_kernel<true> : dispatch_kernel<false>, params, grid, params.at.bytes,
                       early, stream);
}

int load_dispatch(const Shape& shape) {
  const uint32_t bytes = DispatchScratch::make(shape).bytes;
  if (const int error = allow_shared(reinterpret_cast<const void*>(dispatch_kernel<true>), bytes)) return error;
  return allow_shared(reinterpret_cast<const void*>(dispatch_kernel<false>), bytes);
}

}  // namespace tw::nvlink
