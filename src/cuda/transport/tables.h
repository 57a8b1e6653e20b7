// Work on the current device beside the caller's streams, and tables in its memory: arrays of the host's, or zeros, in
// memory that the caller frees (cudaFree).
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "cuda/driver/driver.h"
#include "cuda/transport/window.h"

namespace tw::cuda {

// Does work(stream) on a stream of its own, as the caller's streams may be busy waiting, and waits for it.
template <class Work>
Status do_apart(Work&& work) {
  cudaStream_t stream = nullptr;
  TW_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaError_t error = work(stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  return error == cudaSuccess ? Status{} : cuda_failure("preparing memory", error);
}

// Makes [count], zero.
template <class T>
Status allocate(size_t count, T** made) {
  void* memory = nullptr;
  TW_CUDA(cudaMalloc(&memory, count * sizeof(T)));
  *made = static_cast<T*>(memory);
  return clear(static_cast<std::byte*>(memory), count * sizeof(T));
}

// Makes a copy of an array that is not empty.
template <class T>
Status upload(const std::vector<T>& table, T** made) {
  TW_RETURN_IF_FAILED(allocate(table.size(), made));
  return fill(reinterpret_cast<std::byte*>(*made), table.data(), table.size() * sizeof(T));
}

}  // namespace tw::cuda
