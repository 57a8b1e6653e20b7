// A kernel's passes: what it does from the wait for the previous kernel on, and, where it comes onto the device early,
// the same once before that wait, as a rehearsal. Kernels loop over both:
//
//   for (bool real = !rehearses;; real = true) {
//     begin_pass(real);
//     ...
//   }
//
// All threads of a block agree on `rehearses`. A rehearsal stores nothing, waits for nobody and makes nothing of what
// it loads, which may be of any time.
//
// Why: instructions are met in device memory, as those of the last step have left the caches since. Without the
// rehearsal 13 us passed from the wait to a warp's second tile, of which the link had work for 6: a dispatch and a
// combine of 4096 tokens took 2.3 us longer, 0.4 of it the combine's part. The loop stands in each kernel: with one
// loop here and the pass as a function, kernels spilled 100 bytes more a thread, and a pair of 4096 tokens took 347.1
// us for 341.8 (2x H100).
//
// What breaks if this changes: S3, where a rehearsal stores something or a pass begins before await_earlier.
#pragma once

#include "cuda/device/ptx.cuh"

namespace tw::cuda {

__device__ inline void begin_pass(bool real) {
  if (real) await_earlier();
}

}  // namespace tw::cuda
