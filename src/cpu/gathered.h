// A gathered dispatch: every rank gets all tokens of all ranks with their routing, and takes what a routed dispatch
// would have brought it. It runs the sender's send_dispatch itself and keeps the puts that are for it, so both
// strategies leave the same bytes in the window (S9). A message comes from another process: ids and counts out of it
// are checked before they are used as places.
//
// A combine has no gathered form of its own: a rank has partials for the tokens that it got and for no others, and one
// row for each of these is the least that can be sent, whichever collective carries it. A reduce-scatter would add
// zeros for the rest, and would sum in an order that is not ours.
#pragma once

#include <cstring>
#include <vector>

#include "core/backend.h"
#include "cpu/staged.h"
#include "exchange/counts.h"
#include "exchange/dispatch.h"

namespace tw::cpu {

struct Gathered {
  const Context& context;
  WindowMap map;  // of the call's rows
  StepPlace at;
  int32_t bound;
  uint64_t note;
  const Counts* counts;            // high throughput alone
  const uint64_t* receive_offset;  // as in row_place
};

// A transport that keeps, out of one source's puts, those for this rank.
class Picker {
 public:
  Picker(StagedTransport& transport, int source) : transport_(transport), source_(source) {}

  int rank() const { return source_; }
  int ranks() const { return transport_.ranks(); }
  void put(int peer, uint64_t offset, const void* from, size_t n) {
    if (peer == transport_.rank()) transport_.put(peer, offset, from, n);
  }
  void put_row(int peer, uint64_t offset, const void* from, size_t n) { put(peer, offset, from, n); }
  void flush() {}
  void publish(int peer, uint64_t offset, Signal signal, uint64_t note) {
    if (peer == transport_.rank()) transport_.store(offset, signal, note);
  }
  Signal load(uint64_t offset) const { return transport_.load(offset); }
  std::byte* local(uint64_t offset) const { return transport_.local(offset); }
  const std::byte* returned(StepPlace at, uint64_t offset) const { return transport_.returned(at, offset); }
  Waited wait(int, uint64_t, uint32_t, TimePoint) { return Wake::kArrived; }

 private:
  StagedTransport& transport_;
  int source_;
};

// Puts the rows that a routed dispatch of `source` would have put here, and its signal.
inline void put_picked(StagedTransport& transport, const Gathered& call, int source, const Routing& routing,
                       const RowsIn* payloads) {
  Picker picker(transport, source);
  const auto begin = [&](int) {
    return call.counts != nullptr ? call.counts->source[source] : int64_t{source} * call.bound;
  };
  send_dispatch(picker, call.map, call.at, routing, payloads, call.note, call.receive_offset, begin);
}

// Writes a message: ids, weights, then each payload, of all tokens.
inline void pack_gathered(const Shape& shape, const Routing& routing, const RowsIn* payloads, std::byte* message) {
  const auto tokens = static_cast<size_t>(routing.tokens);
  const size_t routed = tokens * static_cast<size_t>(shape.top_k);
  std::memcpy(message, routing.ids, routed * sizeof(int32_t));
  message += routed * sizeof(int32_t);
  std::memcpy(message, routing.weights, routed * sizeof(float));
  message += routed * sizeof(float);
  for (int q = 0; q < shape.payloads; ++q) {
    const size_t bytes = shape.payload_bytes[q];
    for (size_t token = 0; token < tokens; ++token, message += bytes) {
      std::memcpy(message, payloads[q].data + static_cast<int64_t>(token) * payloads[q].stride, bytes);
    }
  }
}

// Takes what is for this rank out of a source's message. The message comes from elsewhere: ids beyond the experts count
// as none.
inline void unpack_gathered(StagedTransport& transport, const Gathered& call, int source, int32_t tokens,
                            const std::byte* message) {
  const Shape& shape = call.map.shape();
  const auto count = static_cast<size_t>(std::min(tokens, call.bound > 0 ? call.bound : shape.default_bound()));
  const size_t routed = count * static_cast<size_t>(shape.top_k);
  std::vector<int32_t> ids(routed);
  std::vector<float> weights(routed);
  const auto take = [&](void* to, size_t bytes) {
    if (bytes > 0) std::memcpy(to, message, bytes);  // an empty vector has no memory
    message += bytes;
  };
  take(ids.data(), routed * sizeof(int32_t));
  take(weights.data(), routed * sizeof(float));
  for (int32_t& id : ids) id = id < shape.experts ? std::max(id, -1) : -1;
  RowsIn payloads[kMaxPayloads];
  for (int q = 0; q < shape.payloads; ++q) {
    payloads[q] = {message, static_cast<int64_t>(shape.payload_bytes[q])};
    message += count * shape.payload_bytes[q];
  }
  std::vector<int64_t> first(count + 1);
  std::vector<Destination> destinations(count * static_cast<size_t>(shape.fan_out()));
  std::vector<int32_t> send_counts(static_cast<size_t>(shape.ranks));
  Routing routing{static_cast<int32_t>(count), ids.data(),        weights.data(), first.data(),
                  destinations.data(),         send_counts.data()};
  assign_slots(shape, call.context.placement, &routing);
  if (call.counts != nullptr) {  // rows that are dropped were not sent
    for (int rank = 0; rank < shape.ranks; ++rank) send_counts[rank] = call.counts->at(shape, source, rank);
  }
  put_picked(transport, call, source, routing, payloads);
}

}  // namespace tw::cpu
