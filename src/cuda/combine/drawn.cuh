// Work that warps draw: what each begins with follows from its place, and whoever is free takes the next of what is
// left, because groups of SMs share the way to the link and to memory, and some are twice as fast as others.
//
// Takes a counter of the step (device/wait.cuh) and the number of items; gives each item to one warp, in order.
//
// What breaks if this changes: S5, where a counter is used that the kernel before has not cleared; and a row that no
// warp has sent.
#pragma once

#include "cuda/device/block.cuh"
#include "cuda/device/ptx.cuh"

namespace tw::cuda {

// Does each(item, found) for the items below `end` that fall to a warp, whose threads all come here. `own`: what warps
// begin with; `begins`: this one has a share of that, or it has come later to help. `each` calls found() once, when it
// knows where its item is and has nothing to wait for but memory: the next one is drawn there, and the reply is on its
// way meanwhile.
template <class Each>
__device__ __forceinline__ void each_drawn(uint32_t* counter, const Shares& own, bool begins, uint32_t end,
                                           Each&& each) {
  const bool draws = end > own.step;
  uint32_t reply = 0;
  const auto found = [&] { reply = draw(counter, draws && lane() == 0); };
  const auto drawn = [&] { return draws ? own.step + __shfl_sync(~0u, reply, 0) : end; };
  if (!begins) found();
  uint32_t item = begins ? own.first : drawn();
#pragma unroll 1
  while (item < end) {
    each(item, found);
    item = drawn();
  }
}

}  // namespace tw::cuda
