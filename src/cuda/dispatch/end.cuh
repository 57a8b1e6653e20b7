// The end of a dispatch: what a block leaves when it has finished, and how outputs are made safe after an error.
//
// Takes a Block whose sends are done; clear_failed must be called by whole blocks. Gives counts 0, invalid ids and
// status twInternalError for sources that failed.
//
// What breaks if this changes: S2 (end_step comes last), and that outputs are safe after an error (docs/PROTOCOL.md,
// Errors): a combine reads the status and sends nothing.
#pragma once

#include "cuda/device/loads.cuh"
#include "cuda/dispatch/send.cuh"

namespace tw::cuda {

// Clears what failed sources have left, by a block that has seen the error, when all blocks have done with it.
__device__ __noinline__ static void clear_failed(Block b) {
  const DispatchParams& p = b.p;
  await_others(p.group, b.step);
  keep_begins<false>(p, b.scratch,
                     load_begins(p, static_cast<int>(threadIdx.x)));  // the kernel of packets has not done this
  __syncthreads();
#pragma unroll 1
  for (int source = 0; source < b.ranks(); ++source) {
    if (b.scratch.source_error()[source] == twSuccess) continue;
    if (threadIdx.x == 0) p.shown.counts[source] = p.handle.counts[source] = 0;
    show_nothing(p, b.row(source, 0), b.row(source, expected_rows(b, source)), static_cast<int>(threadIdx.x),
                 static_cast<int>(blockDim.x));
  }
  if (threadIdx.x == 0) *p.handle.status = twInternalError;
}

// Gives up where the group is finished: nothing goes out, and what the caller sees is made safe when all have done with
// it. Blocks that began before may think otherwise, so each block that knows clears everything.
__device__ inline void give_up(const Block& b) {
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < b.ranks(); i += kThreads) b.scratch.fail(i, twInternalError);
}

// Stores what a dispatch leaves for later calls, and no peer waits for, by one thread of all blocks. `status` holds
// until a block that has seen an error knows all others to be done, or until the group is finished, which a combine
// sees first.
__device__ inline void leave_status(const Block& b, uint32_t digest, twResult_t status) {
  const DispatchParams& p = b.p;
  if (threadIdx.x != 0 || blockIdx.x != 0) return;
  if (p.receive) *p.handle.status = status;
  if (p.in.map != nullptr) *p.handle.digest = digest;
  clear_counters(p.group, b.step);
}

// Ends a block, which has sent and received. `arrived`: from begin_end.
__device__ inline void finish_dispatch(const Block& b, bool usable, uint32_t arrived) {
  const DispatchParams& p = b.p;
  if (usable) {
    if (p.loads_block == LoadsBlock::kLast && blockIdx.x == gridDim.x - 1) count_loads(p);
  } else if (p.receive) {
    give_up(b);
  }
  if (p.receive) finish_block(p.group, b.step, arrived, b.scratch.failed(), [&] { clear_failed(b); });
}

}  // namespace tw::cuda
