// What a dispatch leaves when it has failed.
#pragma once

#include "nvlink/dispatch_send.cuh"

namespace tw::nvlink {

// Clears away after what has failed, by blocks that have seen it, when all have done with it.
__device__ __noinline__ static void clear_failed(Block b) {
  const DispatchParams& p = b.p;
  if (threadIdx.x == 0) say_done(p.group, b.step);  // others may wait here likewise
  await_done(p.group, b.step);
  keep_begins<false>(p, b.scratch,
                     load_begins(p, static_cast<int>(threadIdx.x)));  // which the kernel of lines has not done
  __syncthreads();
  for (int source = 0; source < b.ranks(); ++source) {
    if (b.scratch.source_error()[source] == twSuccess) continue;
    if (threadIdx.x == 0) p.shown.counts[source] = p.handle.counts[source] = 0;
    show_nothing(p, b.row(source, 0), b.row(source, expected_rows(b, source)), static_cast<int>(threadIdx.x),
                 static_cast<int>(blockDim.x));
  }
  if (threadIdx.x == 0) *p.handle.status = twInternalError;
}

// The group is finished: nothing goes out, and what the caller sees is made safe, when all have done with it. Blocks
// that have begun before may think otherwise, so each that knows clears everything.
__device__ inline void give_up(const Block& b) {
  for (int i = static_cast<int>(threadIdx.x); i < b.ranks(); i += kThreads) b.scratch.fail(i, twInternalError);
}

}  // namespace tw::nvlink
