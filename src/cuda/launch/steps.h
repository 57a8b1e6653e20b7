// Steps without rows, and what a staged transport adds to one: parameters and launches.
#pragma once

#include <cstddef>
#include <cstdint>
#include "cuda/launch/group_view.h"

namespace tw::cuda {

struct RefuseParams {
  GroupView group;
  int32_t lane;
  int32_t bank;           // of the dispatch that is refused; -1: of any other step
  const int32_t* status;  // of the dispatch that a combine answers
  twPhase_t phase;
  int32_t send;
  int32_t receive;
};

// Rows that have come in blocks by source.
struct LandParams {
  GroupView group;
  HandleView handle;
  const std::byte* from;
  int32_t lane;
  int32_t bank;
  int32_t bound;
};

struct AwaitParams {
  GroupView group;
  int32_t lane;
};

struct SelfTestParams {
  GroupView group;
  uint32_t* torn;  // packets found torn, plus peers that never answered
  int32_t rounds;  // the launch decides
};

// A cudaError_t comes back as int, so that the host side needs no CUDA header.
int launch_refuse(const RefuseParams& params, void* stream);
int launch_land(const LandParams& params, int grid, void* stream);
int launch_await(const AwaitParams& params, void* stream);
int launch_self_test(const SelfTestParams& params, void* stream);

}  // namespace tw::cuda
