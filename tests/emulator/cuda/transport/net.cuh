// src/cuda/transport/net.cuh for the emulator: kernels post straight into the engine between hosts, which network.cc
// has connected. What they post is counted, for tests.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "../../../gin/counts.h"
#include "cuda/launch/posts.h"
#include "network_state.h"

namespace tw::cuda {

inline const emulator::NetworkState& state_of(const NetView& net) {
  return *static_cast<const emulator::NetworkState*>(net.state);
}

inline void post(const NetView& net, int peer, const net::Put& put, const net::Word* word) {
  const emulator::NetworkState& state = state_of(net);
  if (emulator::is_broken(state.engine->rank())) return;
  while (emulator::is_held(state.engine->rank(), peer) && !state.aborted.load()) tw::emulator::poll();
  for (;;) {
    const net::Posted posted = word == nullptr ? state.engine->put(peer, put) : state.engine->put(peer, put, *word);
    if (posted == net::Posted::kRefused) {
      std::fprintf(stderr, "emulated kernel: a put to rank %d has no such place\n", peer);
      std::abort();
    }
    if (posted != net::Posted::kFull || state.aborted.load()) return;
    tw::emulator::poll();
  }
}

inline void net_put(const NetView& net, int, int peer, NetPlace to, NetPlace from, uint64_t bytes) {
  gin::post_counts().put(state_of(net).engine->rank(), peer, bytes);
  if (emulator::loses_puts() || (state_of(net).counts_alone && bytes > gin::kMoved)) return;
  post(net, peer, {{from.memory, from.offset}, {to.memory, to.offset}, bytes}, nullptr);
}
inline void net_add(const NetView& net, int, int peer, NetPlace word, uint64_t add) {
  gin::post_counts().add(state_of(net).engine->rank(), peer);
  const net::Word added{{word.memory, word.offset}, add};
  post(net, peer, {{word.memory, 0}, {word.memory, 0}, 0}, &added);
}

}  // namespace tw::cuda
