// Errors as sentences, and the driver's functions by name: driver.h tells what they are for.
//
// find_driver looks them up once in a process, in any thread; all must be there.
//
// What breaks if this changes: results of CUDA calls become other twResult_t, which callers test (twOutOfMemory,
// twUnsupported).
#include "cuda/driver/driver.h"

namespace tw::cuda {

Status cuda_failure(const char* call, int error) {
  const auto code = static_cast<cudaError_t>(error);
  constexpr size_t kShown = 80;  // characters of a call that may be a long expression
  (void)cudaGetLastError();      // otherwise the caller's next check would find it
  const twResult_t result = code == cudaErrorMemoryAllocation                                  ? twOutOfMemory
                            : code == cudaErrorInsufficientDriver || code == cudaErrorNoDevice ? twUnsupported
                                                                                               : twSystemError;
  return fail(result, "CUDA: {} ({}) in {}", cudaGetErrorString(code), cudaGetErrorName(code),
              std::string_view(call).substr(0, kShown));
}

Status Driver::check(const char* what, CUresult result) const {
  if (result == CUDA_SUCCESS) return {};
  const char* text = nullptr;
  error_string(result, &text);
  return fail(result == CUDA_ERROR_OUT_OF_MEMORY ? twOutOfMemory : twSystemError, "cannot {}: {} (CUresult {})", what,
              text == nullptr ? "unknown error" : text, result);
}

Status find_driver(const Driver** driver) {
  static Driver found{};
  static const Status status = []() -> Status {
    constexpr unsigned kVersion = 12000;
    const auto find = [](const char* name, auto* function) {
      cudaDriverEntryPointQueryResult result;
      return cudaGetDriverEntryPointByVersion(name, reinterpret_cast<void**>(function), kVersion, cudaEnableDefault,
                                              &result) == cudaSuccess &&
             result == cudaDriverEntryPointSuccess;
    };
    const bool all = find("cuGetErrorString", &found.error_string) &&
                     find("cuMemGetAllocationGranularity", &found.granularity) && find("cuMemCreate", &found.create) &&
                     find("cuMemRelease", &found.release) && find("cuMemAddressReserve", &found.reserve) &&
                     find("cuMemAddressFree", &found.free_address) && find("cuMemMap", &found.map) &&
                     find("cuMemUnmap", &found.unmap) && find("cuMemSetAccess", &found.set_access) &&
                     find("cuMemExportToShareableHandle", &found.export_handle) &&
                     find("cuMemImportFromShareableHandle", &found.import_handle) &&
                     find("cuDeviceGet", &found.device) && find("cuDeviceGetAttribute", &found.attribute);
    (void)cudaGetLastError();
    return all ? Status{} : fail(twUnsupported, "the CUDA driver lacks virtual memory functions (CUDA 12.0 or newer)");
  }();
  *driver = &found;
  return status;
}

}  // namespace tw::cuda
