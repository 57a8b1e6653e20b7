// Combines per expert: what their kernels take by value, and the launches.
//
// They have kernels of their own, so that those of combines per rank stay as they are: with further parameters a pair
// of one token took 1.4 % longer.
//
// What breaks if this changes: `packets` must be alike on all ranks, else owner and sender disagree how rows come (S4,
// S10). CombineParams is as in launch/combine.h, with expert_major and without weighted: weights are the owner's.
#pragma once

#include "cuda/launch/combine.h"

namespace tw::cuda {

struct ChoicesParams {
  CombineParams call;
  const float* weights;   // of the owner, [T, K] over all parts; NULL: none
  int64_t weight_stride;  // in elements, from one token to the next
  int32_t packets;        // 1: all rows go as packets
};

// Launch the kernel of `params.call.roles`, where all rows are packets or none is; `early`: see launch.h. A cudaError_t
// comes back as int.
int launch_choice_packets(const ChoicesParams& params, bool early, void* stream);
int launch_choices_bulk(const ChoicesParams& params, bool early, void* stream);

}  // namespace tw::cuda
