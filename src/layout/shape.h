// Shape: the sizes that fix a window, and the metadata that travels with a row. The host fills a Shape from a checked
// configuration (core/config.cc); it is the same on every rank and constant for a group's life, but for max_tokens and
// room, which grow (core/grow.cc), and for what rows consist of, which a call may say anew within the room that there
// is (WindowMap::for_dispatch, for_combine). Everything that lies in a window follows from it (layout/window_map.h),
// which is what S10 asks for: a field that differs between ranks, or changes elsewhere, puts rows where a peer does not
// look. RowHeader and meta_bytes are bytes on the wire: both ends must agree on them.
#pragma once

#include <cstdint>

namespace tw {

inline constexpr int kMaxPayloads = 8;
// A combine has at most so many parts, for which handles have room on devices.
inline constexpr int32_t kMaxParts = 16;

// How many rows of so many bytes share a chunk signal on a device: chunks of 8 to 16 KiB, or one row, or 64. One block
// sends a chunk, and has only its own share of the link: 16 KiB take 2 us when all senders send. No row of a chunk is
// summed before all of it is there. One warp of a block makes the fences.
constexpr int32_t chunk_rows_of(uint64_t row_bytes) {
  int32_t rows = 1;
  while (rows < 64 && 2 * static_cast<uint64_t>(rows) * row_bytes <= (16u << 10)) rows *= 2;
  return rows;
}

// Tokens up to which rows per expert travel as LL128 packets; more go in chunks (cuda/combine/choices_bulk.cu). Between
// two H200 128 tokens took 37 us as packets and 39 in chunks, 512 took 115 and 104. Alike on all ranks (S10), and so
// not a number of the device's in cuda/plan/tuning.cc.
inline constexpr int32_t kMostChoicePackets = 256;

struct Shape {
  int32_t ranks = 0;       // N
  int32_t experts = 0;     // E; in a group with a placement P, its physical experts
  int32_t top_k = 0;       // K
  int32_t max_tokens = 0;  // B
  int32_t channels = 0;
  int32_t payloads = 0;
  uint64_t payload_bytes[kMaxPayloads] = {};  // of one row
  uint64_t combine_bytes = 0;                 // of one row
  // The next three are for high throughput, else 0.
  int32_t recv_rows = 0;           // R: rows of all sources that a rank may receive
  int32_t most_local_experts = 0;  // the most experts that any rank holds
  uint64_t lease_bytes = 0;        // bytes for leases (core/leases.h), whole pages
  uint64_t weight_bytes = 0;       // bytes for weights that peers read (tokenway/moving.h), whole pages
  // The next three are for devices alone: 0 on the CPU.
  int32_t packet_tokens = 0;  // rows of a source that may travel as LL128 packets (layout/ll128.h)
  int32_t chunk_rows = 0;     // rows of a bulk combine that share a chunk signal
  int16_t staged = 0;  // 1: staged transport: rows travel in blocks by source, and the inbox has them as slots do
  // 1: a combine returns a row for each (token, k) instead of one for each (token, rank). On the CPU too. (The two
  // share 32 bits, which makes kernels' parameters no longer.)
  int16_t per_expert = 0;
  // The next two are for a group with a placement alone, else 0 (tokenway/placement.h).
  int32_t logical_experts = 0;  // E
  int32_t counts_loads = 0;     // 1: dispatches tell load statistics
  int32_t moves = 0;            // 1: and how far this rank is with maps that move (exchange/epochs.h)
  // Tokens whose partials an inbox has room for: a combine of more takes several parts. 0: all, which is max_tokens.
  // At least max_tokens / kMaxParts, and at least low_latency_tokens. (It stands where it makes kernels' parameters no
  // longer.)
  int32_t inbox_tokens = 0;
  // The next two are for a group of both modes alone, else 0. Its Shape is that of its calls of high throughput;
  // WindowMap::for_low_latency has that of the others.
  int32_t low_latency_tokens = 0;   // the largest bound of a low-latency call
  int32_t low_latency_packets = 0;  // packet_tokens of such a call
  // Bytes that there is room for in each row, whatever a call's rows consist of: least_room of the configured rows.
  uint64_t dispatch_room = 0;  // of all payloads together
  uint64_t combine_room = 0;

  constexpr bool exact() const { return recv_rows > 0; }
  constexpr bool has_both_modes() const { return low_latency_tokens > 0; }
  constexpr bool leases() const { return lease_bytes > 0; }
  // Bytes of a dispatched row without its metadata. The sum may wrap only where rows alone pass 64 bits.
  constexpr uint64_t dispatch_bytes() const {
    uint64_t bytes = 0;
    for (int q = 0; q < payloads; ++q) bytes += payload_bytes[q];
    return bytes;
  }
  // Bytes that a row may have; at least what the configured rows have.
  constexpr uint64_t most_dispatch_bytes() const {
    return dispatch_room > dispatch_bytes() ? dispatch_room : dispatch_bytes();
  }
  constexpr uint64_t most_combine_bytes() const { return combine_room > combine_bytes ? combine_room : combine_bytes; }
  // Ids that a caller may give are below this.
  constexpr int32_t choices() const { return logical_experts > 0 ? logical_experts : experts; }
  // The bound of a dispatch that names none. In high throughput too, where a bound sizes nothing but is compared.
  constexpr int32_t default_bound() const { return max_tokens; }
  // How many rows a rank may receive in a step.
  constexpr int64_t most_rows() const { return recv_rows > 0 ? recv_rows : static_cast<int64_t>(ranks) * max_tokens; }
  // Tokens of one part of a combine, and how many parts a combine has whose ranks have at most `bound` tokens.
  constexpr int32_t part_tokens() const { return inbox_tokens > 0 ? inbox_tokens : max_tokens; }
  constexpr int32_t parts(int32_t bound) const { return bound > 0 ? (bound + part_tokens() - 1) / part_tokens() : 1; }
  // How many rows a handle has room for, whatever its dispatches are.
  constexpr int64_t handle_rows() const {
    const int64_t slots = static_cast<int64_t>(ranks) * low_latency_tokens;
    return most_rows() > slots ? most_rows() : slots;
  }
  // A token goes to at most this many ranks.
  constexpr int32_t fan_out() const { return top_k < ranks ? top_k : ranks; }
  // At most so many rows return for a token; the owner's inbox has as many places for it.
  constexpr int32_t returning() const { return per_expert != 0 ? top_k : fan_out(); }
};

// A row's metadata begins with its header: who the row is at its owner. In memory the header is followed by ids
// int32[K], global, as the owner gave them or the physical experts that serve them, and weights float32[K].
struct RowHeader {
  int32_t token;     // row at the owner
  int32_t position;  // of the receiving rank among the token's ranks, ascending: its place in the owner's inbox
};

constexpr uint64_t meta_bytes(int32_t top_k) {
  return sizeof(RowHeader) + static_cast<uint64_t>(top_k) * (sizeof(int32_t) + sizeof(float));
}

// Bytes of the values of a row's choices, float [K], which a combine may return beside its partial.
constexpr uint64_t choice_bytes(int32_t top_k) { return sizeof(float) * static_cast<uint64_t>(top_k); }

}  // namespace tw
