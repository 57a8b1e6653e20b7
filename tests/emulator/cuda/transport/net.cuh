// src/cuda/transport/net.cuh for the emulator: kernels post straight into the engine between hosts, which network.cc
// has connected.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "cuda/launch/posts.h"
#include "network_state.h"

namespace tw::cuda {

inline void post(const NetView& net, int peer, const net::Put& put, const net::Word* word) {
  const auto& state = *static_cast<const emulator::NetworkState*>(net.state);
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

inline void count(const NetView& net, int peer, emulator::PostKind kind, uint64_t by) {
  emulator::count_post(static_cast<const emulator::NetworkState*>(net.state)->engine->rank(), peer, kind, by);
}

inline void net_put(const NetView& net, int, int peer, NetPlace to, NetPlace from, uint64_t bytes) {
  count(net, peer, emulator::kPuts, 1);
  count(net, peer, emulator::kPutBytes, bytes);
  post(net, peer, {{from.memory, from.offset}, {to.memory, to.offset}, bytes}, nullptr);
}
inline void net_add(const NetView& net, int, int peer, NetPlace word, uint64_t add) {
  count(net, peer, emulator::kAdds, 1);
  const net::Word added{{word.memory, word.offset}, add};
  post(net, peer, {{word.memory, 0}, {word.memory, 0}, 0}, &added);
}

}  // namespace tw::cuda
