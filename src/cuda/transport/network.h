// The network of devices on several hosts: memories of a device into which peers' kernels put bytes and add to words.
// transport/net.cuh has what kernels do with it. gin.cc makes it of NCCL's device API (GIN), which goes by RDMA that
// the device begins itself, or by a thread of NCCL's; tests/emulator has one over the engine between hosts
// (net/engine.h).
//
// Order: what is put and added to one peer in one context forms a queue. Whoever loads a word and finds what has been
// added sees the bytes of all earlier puts of that queue. Nothing else is ordered. Nobody but one rank adds to a word,
// and nobody stores to it once it is in use.
//
// Bounds: only collective calls wait for peers, and they end by their deadline. A kernel that posts waits at most for
// room in the queue to a peer; where the peer is gone, abort() ends that.
//
// What breaks if this changes: S4 between hosts. A word that overtakes bytes is a wrong row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/make_backend.h"
#include "cuda/launch/posts.h"
#include "net/engine.h"

namespace tw::cuda {

class Network {
 public:
  // No kernel that posts is under way, and peers may be gone. Where abort() was called before, peers are told nothing.
  virtual ~Network() = default;

  // Makes memory of the current device, of virtual memory (transport/window.h, DeviceMapping, of one part, made with
  // HandleKinds::network), one of the network's: numbered from 0 on, alike on all ranks, of the same size. Collective.
  // It outlives the network. If it fails on one rank it fails on all, and the sentence says on which.
  virtual Status add_memory(const net::Meeting& meeting, std::byte* memory, uint64_t bytes, int* number) = 0;

  // For kernels; stays the same, whatever memory is added, so that captured kernels have it too.
  virtual NetView view() const = 0;

  // twSuccess while puts to all peers go; else why not. From any thread.
  virtual Status failure() = 0;

  // Ends waits of kernels that post, and takes nothing more. From any thread, more than once.
  virtual void abort() = 0;
};

// Connects the ranks of a meeting, on the current device, with so many contexts: one for each channel. Collective, with
// the tags from meeting.tag to meeting.tag + 3; if it fails on one rank it fails on all. twUnsupported: there is no
// such network here.
Status connect_network(const BackendInit& init, const net::Meeting& meeting, int contexts,
                       std::unique_ptr<Network>* made);

}  // namespace tw::cuda
