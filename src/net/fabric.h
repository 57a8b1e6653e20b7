// The engine over libfabric: engine.h says what an engine is, endpoint.h what is asked of libfabric, and peer_queue.h
// how an operation becomes writes and messages.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "net/endpoint.h"
#include "net/engine.h"

namespace tw::net {

struct FabricOptions {
  std::string provider = "tcp";                // of endpoint.h's kProviders, the same on all ranks
  int32_t depth = 4096;                        // operations to a peer that are not done, at most
  uint64_t chunk_bytes = uint64_t{1} << 20;    // a longer put goes in pieces, so that patience counts pieces
  std::chrono::milliseconds patience{100000};  // with operations under way and none that ends, a peer has failed
};

// Connects the ranks of a meeting over libfabric: each opens an endpoint, they tell each other their names, and each
// sends every other a message, so that what cannot be reached is known here. Collective; if it fails on one rank it
// fails on all. twUnsupported: libfabric or the provider is not here, or a rank was not reached.
Status connect_fabric(const FabricOptions& options, const Meeting& meeting, std::unique_ptr<Engine>* engine);

// The same over an endpoint that this rank has opened, or could not open (`opened`).
Status connect_endpoint(const FabricOptions& options, const Meeting& meeting, std::unique_ptr<Endpoint> endpoint,
                        const Status& opened, std::unique_ptr<Engine>* engine);

}  // namespace tw::net
