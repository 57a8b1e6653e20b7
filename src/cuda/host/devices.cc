// What the core asks of devices before a group has a backend (core/backend.h).
//
// check_device takes a device's number, or -1 for the current one, which it fills in; it fails with twUnsupported where
// no device can be used, and with twInvalidArgument where there is none of that number. device_memory gives the bytes
// that are free. try_network asks whether devices of several hosts have a network (transport/network.h).
//
// What breaks if this changes: messages and results that callers test. No invariant depends on it.
#include "core/make_backend.h"
#include "cuda/driver/driver.h"
#include "cuda/transport/network.h"

namespace tw {

Status check_device(int* device) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    int driver = 0;
    const bool none = cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0;
    return fail(twUnsupported, "no CUDA device can be used: {}",
                none ? "no NVIDIA driver is installed" : cudaGetErrorString(error));
  }
  if (*device == -1) TW_CUDA(cudaGetDevice(device));
  if (*device >= 0 && *device < count) return {};
  return fail(twInvalidArgument, "{} is {}; it must be from {} to {}", Argument("device"), Value(*device), Least(0),
              Most(count - 1));
}

Status device_memory(int device, uint64_t* free) {
  const cuda::OnDevice on(device);
  size_t now = 0;
  size_t all = 0;
  TW_CUDA(cudaMemGetInfo(&now, &all));
  *free = now;
  return {};
}

Status try_network(Bootstrap& bootstrap, std::span<const int> members, uint64_t tag, TimePoint deadline, int device) {
  const cuda::OnDevice on(device);
  BackendInit init;
  init.bootstrap = &bootstrap;
  init.members = members;
  init.device = device;
  std::unique_ptr<cuda::Network> network;
  return cuda::connect_network(init, {&bootstrap, members, tag, deadline}, 1, &network);
}

// Writes of GPUDirect RDMA may be in order for the device that they go to, or for all.
Status sees_network_writes(int device, bool* sees) {
  int order = 0;
  TW_CUDA(cudaDeviceGetAttribute(&order, cudaDevAttrGPUDirectRDMAWritesOrdering, device));
  *sees = order >= cudaGPUDirectRDMAWritesOrderingAllDevices;
  return {};
}

}  // namespace tw
