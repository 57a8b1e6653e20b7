// Waiting, by a block, for signals of several ranks at once, before a kernel that takes it for granted that they are
// there. Takes which ranks; gives nothing but that, or an error that has been reported: what signals say, that kernel
// judges.
//
// What breaks if this changes: S2 and S4. What a rank has stored before its signal is seen by all threads of the block.
#pragma once

#include "cuda/device/wait.cuh"

namespace tw::cuda {

// Waits for those for which among(rank).
template <class Among>
__device__ inline void await_ranks(const GroupView& g, const Step& step, Look look, Among&& among) {
  for (int i = threadIdx.x; i < g.map.shape().ranks; i += blockDim.x) {
    if (!among(i)) continue;
    const Source source = await_source(g, step, i, look, false);  // the last block looks far (Patience)
    if (source.error == twTimeout) report_failure(g, step, twTimeout, i, source.signal);
    if (source.error == twPeerAborted) report_stopped(g, step, i, source.signal);
  }
  __syncthreads();
}

__device__ inline void await_all(const GroupView& g, const Step& step, Look look) {
  await_ranks(g, step, look, [](int) { return true; });
}

}  // namespace tw::cuda
