// Kernels that there is one of for each kind of bulk call (kBulkKinds). For .cu files.
//
// with_kernel(kind, use): use(kernel), of the one of that kind.
#pragma once

#include "cuda/launch/launch.h"
#include "cuda/launch/loading.h"
#include "cuda/launch/tiles.h"

namespace tw::cuda {

// Launches that of the call's kind. It rehearses only where that takes no time.
template <class Params, class WithKernel>
int launch_bulk(Params params, int grid, bool early, void* stream, WithKernel&& with_kernel) {
  params.rehearses = params.rehearses && comes_early(early);
  return with_kernel(params.kind,
                     [&](auto* kernel) { return launch_kernel(kernel, params, grid, params.at.bytes, early, stream); });
}

// Loads all of them, and lets them have so much shared memory.
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
