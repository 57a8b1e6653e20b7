// Launches a kernel of one parameter on the current device, and finds its shared memory; for .cu files of src/quantize
// and src/activation. The call struct is copied at launch, so it need not outlive it. Results do not depend on this
// file.
#pragma once

#include <cuda_runtime.h>

namespace tw::quantize {

// A thread block's shared memory, as large as its launch asked for.
template <class T>
__device__ T* shared_memory() {
  extern __shared__ __align__(16) unsigned char memory[];
  return reinterpret_cast<T*>(memory);
}

template <class Call>
cudaError_t launch(void (*kernel)(Call), const Call& call, dim3 grid, int threads, void* stream, size_t shared = 0) {
  void* arguments[] = {const_cast<Call*>(&call)};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, dim3(static_cast<unsigned>(threads)), arguments,
                          shared, static_cast<cudaStream_t>(stream));
}

}  // namespace tw::quantize
