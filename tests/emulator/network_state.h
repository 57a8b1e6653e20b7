// What emulated kernels need of an emulated network: the engine that they post into, and whether it has ended.
#pragma once

#include <atomic>

#include "net/engine.h"

namespace tw::emulator {

struct NetworkState {
  net::Engine* engine = nullptr;
  std::atomic<bool> aborted = false;
  bool counts_alone = false;  // large puts (tests/gin/counts.h)
};

}  // namespace tw::emulator
