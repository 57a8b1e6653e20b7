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

// What tests have the network do: have no room for what a source posts to a peer, lose all puts and no word, or fail at
// a rank, from which nothing goes any more.
bool is_held(int source, int peer);
bool loses_puts();
bool is_broken(int rank);

}  // namespace tw::emulator
