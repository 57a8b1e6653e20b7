// CUDA for the host side: errors as sentences, the current device as a scope, and the driver's virtual memory, found at
// run time so that the library loads where there is no driver.
//
// find_driver gives a table that lives as long as the process, or twUnsupported. cuda_failure clears CUDA's last error.
//
// What breaks if this changes: an error that is not cleared is found by the caller's next check. No invariant depends
// on it otherwise.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "core/status.h"

namespace tw::cuda {

#define TW_CUDA(call)                                                          \
  do {                                                                         \
    const cudaError_t error_ = (call);                                         \
    if (error_ != cudaSuccess) return ::tw::cuda::cuda_failure(#call, error_); \
  } while (0)

Status cuda_failure(const char* call, int error);
inline Status launched(const char* what, int error) { return error == 0 ? Status{} : cuda_failure(what, error); }

// The driver's functions for virtual memory, and for what a device knows of it.
struct Driver {
  decltype(&cuGetErrorString) error_string;
  decltype(&cuMemGetAllocationGranularity) granularity;
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) free_address;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
  decltype(&cuMemExportToShareableHandle) export_handle;
  decltype(&cuMemImportFromShareableHandle) import_handle;
  decltype(&cuDeviceGet) device;
  decltype(&cuDeviceGetAttribute) attribute;

  Status check(const char* what, CUresult result) const;
};
Status find_driver(const Driver** driver);

// Makes a device the thread's current one while it lives.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    cudaGetDevice(&before_);
    if (before_ != device) cudaSetDevice(device);
    changed_ = before_ != device;
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// Lets this thread make calls that another thread's capture forbids: none of them touches that capture's streams.
class OutsideCaptures {
 public:
  OutsideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~OutsideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace tw::cuda
