// NCCL, loaded at run time: the library neither links with it nor needs it. The build takes its headers (TOKENWAY_GIN);
// libnccl.so.2 is looked for by the first call in a process, and stays. Where PyTorch has loaded one, that one serves.
//
// Kernels are compiled with the device code of the headers, and NCCL refuses device code that is newer than itself. So
// the library must be as new as the headers, and these are 2.30.7 or newer: the first in which all that is used here
// (signals at an address that are ordered behind all puts, in contexts of their own) is as it is since.
//
// What breaks if this changes: an older library that is taken all the same reads structs of another size.
#pragma once

#include <string>

#include "core/status.h"

#if TOKENWAY_WITH_GIN
#include <nccl_device/host.h>
#endif

namespace tw::cuda {

#if TOKENWAY_WITH_GIN
struct Nccl {
  decltype(&::ncclGetVersion) version = nullptr;
  decltype(&::ncclGetErrorString) error_string = nullptr;
  decltype(&::ncclGetLastError) last_error = nullptr;
  decltype(&::ncclGetUniqueId) unique_id = nullptr;
  decltype(&::ncclCommInitRankConfig) init = nullptr;
  decltype(&::ncclCommGetAsyncError) async_error = nullptr;
  decltype(&::ncclCommQueryProperties) properties = nullptr;
  decltype(&::ncclCommWindowRegister) add_window = nullptr;
  decltype(&::ncclCommWindowDeregister) drop_window = nullptr;
  decltype(&::ncclDevCommCreate) make_device_comm = nullptr;
  decltype(&::ncclDevCommDestroy) drop_device_comm = nullptr;
  decltype(&::ncclCommDestroy) destroy = nullptr;
  decltype(&::ncclCommAbort) abort = nullptr;

  // Makes a sentence of a result. `comm` may be NULL.
  Status check(const char* what, ncclResult_t result) const;
};

// Gives the library that is loaded. twUnsupported, with a sentence that says what was found and what is needed, if none
// serves.
Status find_nccl(const Nccl** nccl);

// What the library says of its version, as NCCL counts: 23007 is "2.30.7".
std::string nccl_version_text(int version);
#endif

}  // namespace tw::cuda
