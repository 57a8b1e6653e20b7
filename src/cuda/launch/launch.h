// Launching one kernel of the exchange. For .cu files.
//
// launch_kernel takes the kernel, its parameters by value, grid, shared memory and stream, and returns a cudaError_t.
// With `early` it asks for programmatic dependent launch (CUDA programming guide): the kernel comes onto the device
// when all blocks of the previous one in its stream have begun, and waits there (device/block.cuh, await_earlier), so
// that the cost of bringing it there passes while the other one runs.
//
// What breaks if this changes: S8. With `early` the next kernels of every channel and every rank of a device may be
// there too, so the host asks for it only where a device has one of each. Kernels that come early keep S3 by
// await_earlier.
#pragma once

#include <cuda_runtime.h>

#include "cuda/launch/blocks.h"

namespace tw::cuda {

// Whether what a kernel does before its wait takes no time, since the previous kernel still runs.
inline bool overlaps_previous(bool early) { return early; }

// The rounds of packets that each pair of ranks sends in the test of packets.
inline constexpr int kSelfTestRounds = 64;

template <class Params>
int launch_kernel(void (*kernel)(Params), const Params& params, int grid, uint32_t shared, bool early, void* stream,
                  int threads = kThreads) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace tw::cuda
