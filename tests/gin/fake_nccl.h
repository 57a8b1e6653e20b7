// An NCCL that connects ranks of one process and moves nothing: what the host side of the network over NCCL
// (src/cuda/transport/gin.cc) is tested with, where there is neither a GPU nor NCCL. fake_nccl.cc is libnccl.so.2 then.
#pragma once

#include <nccl_device/host.h>

#include <atomic>

namespace tw::gin {

// The steps that ranks make together.
enum class Step { kNone, kInit, kWindow, kDevice };

// What the library shall do, and what has been asked of it. To be changed while no communicator is there.
struct FakeNccl {
  ncclGinType_t type = NCCL_GIN_TYPE_PROXY;
  int most_contexts = 64;
  Step faulty = Step::kNone;      // the step that
  int faulty_rank = 0;            // this rank
  bool fails = false;             // fails in, or else never comes to
  std::atomic<int> cut_off = -1;  // the rank whose puts fail
  std::atomic<int> destroyed = 0;
  std::atomic<int> aborted = 0;
  std::atomic<int> windows = 0;       // that are registered, of all ranks
  std::atomic<int> device_comms = 0;  // likewise
};
FakeNccl& fake_nccl();

}  // namespace tw::gin
