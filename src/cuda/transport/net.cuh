// What kernels do with a network (transport/network.h): each of these by one thread, and of those that post to one peer
// in one context, one at a time. They wait for no peer but for room in its queue, and not even that once the network
// has been aborted; what is posted then goes nowhere.
//
//   net_put: copies bytes of this rank's memory into a peer's.
//   net_add: adds to a word of a peer's, behind all earlier puts to it in that context.
//
// Over NCCL (GIN). Where a thread of NCCL's takes what is posted (PROXY), that thread ends for all peers once one of
// them fails, and NCCL's own wait for room in its queue then has no end: so room is waited for here, where the wait can
// be ended, before NCCL is called. Where the device talks to the NIC itself (GDAKI), each peer has a queue of the
// NIC's, which by itself ends what is under way to a peer that is gone.
//
// What breaks if this changes: S4 and S6 between hosts.
#pragma once

#include "cuda/launch/posts.h"

#if TOKENWAY_WITH_GIN
#include <nccl_device.h>

#include "cuda/transport/gin.h"
#endif

namespace tw::cuda {

#if TOKENWAY_WITH_GIN
inline __device__ const GinState& gin_state(const NetView& net) { return *static_cast<const GinState*>(net.state); }

inline __device__ bool is_stopped(const GinState& state) {
  return *static_cast<const volatile uint32_t*>(&state.stopped) != 0;
}

// Waits until the queue to a peer has room. False: the network has been aborted.
inline __device__ bool await_room(const GinState& state, const ncclGin& gin, int peer) {
  if (is_stopped(state)) return false;
  if (gin._ginBackend != NCCL_NET_DEVICE_GIN_PROXY) return true;
  const ncclGinProxyGpuCtx_t& queue = static_cast<const ncclGinProxyGpuCtx_t*>(gin._ginHandle)[gin.contextId];
  const volatile uint32_t* const posted = queue.pis + peer;
  const volatile uint32_t* const taken = queue.cis + peer;
  while (*posted - *taken >= queue.queueSize) {
    if (is_stopped(state)) return false;
  }
  return true;
}

inline __device__ void net_put(const NetView& net, int context, int peer, NetPlace to, NetPlace from, uint64_t bytes) {
  const GinState& state = gin_state(net);
  const ncclGin gin(state.comm, context);
  if (!await_room(state, gin, peer)) return;
  gin.put(ncclTeamWorld(state.comm), peer, state.windows[to.memory], to.offset, state.windows[from.memory], from.offset,
          bytes);
}

inline __device__ void net_add(const NetView& net, int context, int peer, NetPlace word, uint64_t add) {
  const GinState& state = gin_state(net);
  const ncclGin gin(state.comm, context);
  if (!await_room(state, gin, peer)) return;
  gin.signal(ncclTeamWorld(state.comm), peer, ncclGin_StrongVASignalAdd{state.windows[word.memory], word.offset, add});
}
#else
// No network is ever made in such a build (connect_network).
inline __device__ void net_put(const NetView&, int, int, NetPlace, NetPlace, uint64_t) { __trap(); }
inline __device__ void net_add(const NetView&, int, int, NetPlace, uint64_t) { __trap(); }
#endif

}  // namespace tw::cuda
