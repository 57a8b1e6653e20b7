// Launching and loading the bulk kernels, of which there is one instantiation for each Kind in kBulkKinds
// (launch/tiles.h). For .cu files.
//
// Both functions take with_kernel(kind, use), which must call use(kernel) with the kernel of that kind and return its
// result. They return a cudaError_t as int.
//
// What breaks if this changes: a kind that load_bulk leaves out is loaded at its first launch, which waits for kernels
// that run, perhaps for ever (S6 ends the wait, the call fails). Else speed alone.
#pragma once

#include "cuda/launch/launch.h"
#include "cuda/launch/loading.h"
#include "cuda/launch/tiles.h"

namespace tw::cuda {

// Launches the kernel of the call's kind. It rehearses (dispatch/dispatch.cu) only where that takes no time.
template <class Params, class WithKernel>
int launch_bulk(Params params, int grid, bool early, void* stream, WithKernel&& with_kernel) {
  params.rehearses = params.rehearses && overlaps_previous(early);
  return with_kernel(params.kind,
                     [&](auto* kernel) { return launch_kernel(kernel, params, grid, params.at.bytes, early, stream); });
}

// Loads the kernels of all kinds, and allows each `bytes` of dynamic shared memory.
template <class WithKernel>
int load_bulk(uint32_t bytes, WithKernel&& with_kernel) {
  for (const Kind kind : kBulkKinds) {
    const int error =
        with_kernel(kind, [&](auto* kernel) { return allow_shared(reinterpret_cast<const void*>(kernel), bytes); });
    if (error != 0) return error;
  }
  return 0;
}

}  // namespace tw::cuda
