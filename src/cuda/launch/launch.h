// Launching the kernels of the exchange. For .cu files.
//
// `early` is programmatic dependent launch (CUDA programming guide): the kernel comes onto the device when all blocks
// of the one before it in its stream have begun, and waits there (device/block.cuh, await_earlier). So what it costs to
// bring it there passes while the other one runs. S8: of each lane and each rank of a device the kernels that come next
// may then be there too, which is why the host asks for it only where a device has one of each.
#pragma once

#include <cuda_runtime.h>

#include "cuda/launch/blocks.h"

namespace tw::cuda {

// Whether what a kernel does before its wait takes no time: the one before it still runs.
inline bool comes_early(bool early) { return early; }

// The test of packets: each pair of ranks sends so many rounds of them.
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
