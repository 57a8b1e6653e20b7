// Dispatch on hosts: each row goes once to each rank that wants it, into the slot that exchange/routing.h decided.
// send_dispatch takes a routing and the caller's rows, and writes and publishes the step; take_meta copies the metadata
// that came into the handle, and checks it.
//
// Publishing before all rows are put breaks S4. Where rows lie is S9 and S10: the kernels of src/cuda/dispatch write
// the same bytes, and tests compare them.
#pragma once

#include <cstring>

#include "exchange/routing.h"
#include "exchange/step.h"

namespace tw {

// The caller's rows of a payload: row i begins at data + i * stride.
struct RowsIn {
  const std::byte* data = nullptr;
  int64_t stride = 0;  // bytes
};

// Where row `row` of payload q lies at a rank. receive_offset: that of Counts, if the rows go to leases; else NULL.
inline uint64_t row_place(const WindowMap& map, StepPlace at, const uint64_t* receive_offset, int rank, int q,
                          uint64_t row) {
  const uint64_t base =
      receive_offset != nullptr ? receive_offset[static_cast<int64_t>(rank) * map.shape().payloads + q] : 0;
  return base != 0 ? base + row * map.shape().payload_bytes[q] : map.payload_row(at.channel, at.bank(), q, row);
}

// Writes all rows of a step and publishes it. Never waits: S2 has made the bank free. begin(rank): the row there that
// is this rank's slot 0. Slots beyond send_counts are not sent. receive_offset: as in row_place.
template <Transport T, class Begin>
void send_dispatch(T& t, const WindowMap& map, StepPlace at, const Routing& routing, const RowsIn* payloads,
                   uint64_t note, const uint64_t* receive_offset, Begin&& begin) {
  const Shape& shape = map.shape();
  const size_t ids_bytes = sizeof(int32_t) * shape.top_k;
  const size_t weights_bytes = sizeof(float) * shape.top_k;
  alignas(RowHeader) std::byte meta[meta_bytes(TW_MAX_TOP_K)];
  for (int32_t token = 0; token < routing.tokens; ++token) {
    const int64_t routed = static_cast<int64_t>(token) * shape.top_k;
    std::memcpy(meta + sizeof(RowHeader), routing.ids + routed, ids_bytes);
    std::memcpy(meta + sizeof(RowHeader) + ids_bytes, routing.weights + routed, weights_bytes);
    // All copies of a token follow each other: its row is read from memory once and from the cache after that.
    for (int32_t position = 0; position < routing.fan_out(token); ++position) {
      const Destination to = routing.destinations[routing.first[token] + position];
      if (to.slot >= routing.send_counts[to.rank]) continue;
      const auto row = static_cast<uint64_t>(begin(to.rank) + to.slot);
      const RowHeader header{token, position};
      std::memcpy(meta, &header, sizeof header);
      t.put(to.rank, map.meta_row(at.channel, at.bank(), row), meta, meta_bytes(shape.top_k));
      for (int q = 0; q < shape.payloads; ++q) {
        t.put_row(to.rank, row_place(map, at, receive_offset, to.rank, q, row),
                  payloads[q].data + token * payloads[q].stride, shape.payload_bytes[q]);
      }
    }
  }
  publish_step(t, map, at, Mode::kDispatch, note, [&](int peer) { return routing.send_counts[peer]; });
}

// Copies the metadata that arrived into the handle. Needs received->counts, from await_step. False if a header is
// impossible: it is checked because combine writes where it says. begin(source): the source's first row.
template <Transport T, class Begin>
bool take_meta(T& t, const WindowMap& map, StepPlace at, int bound, Received* received, Begin&& begin) {
  const Shape& shape = map.shape();
  int64_t row = 0;
  for (int source = 0; source < shape.ranks; ++source) {
    const int32_t n = received->counts[source];
    if (n == 0) continue;
    std::memcpy(received->meta + row * static_cast<int64_t>(meta_bytes(shape.top_k)),
                t.local(map.meta_row(at.channel, at.bank(), static_cast<uint64_t>(begin(source)))),
                n * meta_bytes(shape.top_k));
    for (int32_t p = 0; p < n; ++p, ++row) {
      const Received::Row at_row = received->row(row, shape.top_k);
      const RowHeader header = *at_row.header;
      if (header.token < 0 || header.token >= bound || header.position < 0 || header.position >= shape.fan_out()) {
        return false;
      }
      for (int32_t k = 0; k < shape.top_k; ++k) {
        if (at_row.ids[k] < -1 || at_row.ids[k] >= shape.experts) return false;
      }
    }
  }
  return true;
}

}  // namespace tw
