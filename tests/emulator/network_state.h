// What emulated kernels need of an emulated network: the engine that they post into, and whether it has ended. What
// they post is counted, for tests.
#pragma once

#include <atomic>

#include "net/engine.h"

namespace tw::emulator {

struct NetworkState {
  net::Engine* engine = nullptr;
  std::atomic<bool> aborted = false;
};

// What kernels have posted, over all ranks of this process, from each rank of a network to each of its first kCounted.
// kUntold: puts behind the last add.
enum PostKind { kPuts, kPutBytes, kAdds, kUntold, kPostKinds };
inline constexpr int kCounted = 16;
void count_post(int source, int peer, PostKind kind, uint64_t by);

}  // namespace tw::emulator
