// What kernels have of a network over NCCL, at NetView::state: transport/gin.cc makes it, transport/net.cuh reads it.
//
// It stays where it is while the network lives. A window is written before any rank knows the number of its memory.
//
// What breaks if this changes: both sides are compiled with one NCCL's headers, and the library must not be older
// (driver/nccl.h).
#pragma once

#include <nccl_device/host.h>

#include <cstdint>

#include "cuda/launch/posts.h"

namespace tw::cuda {

struct GinState {
  ncclDevComm comm;
  ncclWindow_t windows[kNetMemories];  // by the number of the memory
  uint32_t stopped;                    // not 0: nothing more is posted, and no wait for room goes on
};

}  // namespace tw::cuda
