// Tables for kernels: several arrays, filled on the host, that become one block of device memory. An array's place is
// its offset in the block, aligned to 64 bytes.
#pragma once

#include <cstring>
#include <vector>

#include "cuda/driver/driver.h"

namespace tw::cuda {

class Tables {
 public:
  // Gives the place of so many bytes: those at `data`, or zeros if that is NULL.
  size_t place(const void* data, size_t bytes) {
    const size_t at = (host_.size() + 63) / 64 * 64;
    host_.resize(at + bytes);
    if (data != nullptr && bytes > 0) std::memcpy(host_.data() + at, data, bytes);
    return at;
  }
  // Makes the block, on a stream, and waits for it; the caller frees it, also after an error.
  Status copy_to_device(cudaStream_t stream, std::byte** block) const {
    void* memory = nullptr;
    TW_CUDA(cudaMallocAsync(&memory, host_.size(), stream));
    *block = static_cast<std::byte*>(memory);
    TW_CUDA(cudaMemcpyAsync(*block, host_.data(), host_.size(), cudaMemcpyHostToDevice, stream));
    TW_CUDA(cudaStreamSynchronize(stream));
    return {};
  }

 private:
  std::vector<std::byte> host_;
};

}  // namespace tw::cuda
