// Weights that peers read (tokenway/moving.h), as the host sees them on devices: where a peer's window is mapped, and
// copies out of it by a copy engine. A copy takes no SM and waits for no kernel, so it holds up nobody's step; whether
// what it reads is whole is for its caller to know (core/moving.h).
#include "cuda/host/backend.h"

namespace tw::cuda {

std::byte* NvlinkBackend::window_of(int rank) {
  if (rank == context_.me) return window();
  return staged_ == nullptr ? windows_.by_rank[static_cast<size_t>(rank)]->data() : nullptr;
}

Status NvlinkBackend::copy(std::byte* to, const std::byte* from, uint64_t bytes, void* stream) {
  const OnDevice on(device_);
  TW_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)));
  return {};
}

}  // namespace tw::cuda
