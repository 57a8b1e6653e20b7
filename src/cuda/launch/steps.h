// Steps without rows, and what a staged transport adds to a step: parameters and launches.
//
// launch_refuse publishes a refusal and drains the step; launch_land moves rows that came in blocks by source to their
// place; launch_await waits for the end of a step; launch_self_test finds out whether packets arrive whole.
//
// What breaks if this changes: a refused step is still a step, so S2 and S3 hold for it (docs/PROTOCOL.md, Refused
// steps); without the self-test packets may be used where they are torn (S4).
#pragma once

#include <cstddef>
#include <cstdint>
#include "cuda/launch/group_view.h"

namespace tw::cuda {

struct RefuseParams {
  GroupView group;
  int32_t channel;
  int32_t bank;           // of the dispatch that is refused; -1 for any other step
  const int32_t* status;  // the status of the dispatch that a combine answers
  twPhase_t phase;
  int32_t skips;  // the step was sent behind one that is left out, which has ended
  int32_t send;
  int32_t receive;
};

// Rows of a dispatch that have come in blocks by source.
struct LandParams {
  GroupView group;
  HandleView handle;
  const std::byte* from;
  int32_t channel;
  int32_t bank;
  int32_t bound;
};

struct AwaitParams {
  GroupView group;
  int32_t channel;
};

struct SelfTestParams {
  GroupView group;
  uint32_t* torn;  // counts packets that are found torn, and peers that never answer
  int32_t rounds;  // decided by the launch
};

// All return a cudaError_t as int, so that the host side needs no CUDA header.
int launch_refuse(const RefuseParams& params, void* stream);
int launch_land(const LandParams& params, int grid, void* stream);
int launch_await(const AwaitParams& params, void* stream);
int launch_self_test(const SelfTestParams& params, void* stream);

}  // namespace tw::cuda
