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

// A warp's draws of the items below `end`. `own`: what warps begin with. By whole warps.
struct Draws {
  uint32_t* counter;
  Shares own;
  uint32_t end;
  uint32_t reply = 0;

  __device__ bool any() const { return end > own.step; }
  // Draws an item, which next() gives. The reply is on its way in between.
  __device__ __forceinline__ void ask() { reply = draw(counter, any() && lane() == 0); }
  __device__ __forceinline__ uint32_t next() const { return any() ? own.step + __shfl_sync(~0u, reply, 0) : end; }
  // Gives the first item. `begins`: the warp has a share of what warps begin with, or it has come later to help.
  __device__ __forceinline__ uint32_t first(bool begins) {
    if (begins) return own.first;
    ask();
    return next();
  }
};

// Does each(item, found) for the items below `end` that fall to a warp, whose threads all come here. `own`, `begins`:
// as for Draws. `each` calls found() once, when it knows where its item is and has nothing to wait for but memory: the
// next one is drawn there.
template <class Each>
__device__ __forceinline__ void each_drawn(uint32_t* counter, const Shares& own, bool begins, uint32_t end,
                                           Each&& each) {
  Draws draws{counter, own, end};
  const auto found = [&] { draws.ask(); };
  uint32_t item = draws.first(begins);
#pragma unroll 1
  while (item < end) {
    each(item, found);
    item = draws.next();
  }
}

}  // namespace tw::cuda
