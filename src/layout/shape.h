// The sizes that fix a window: the same on every rank, constant for a group's life.
#pragma once

#include <cstdint>

namespace tw {

inline constexpr int kMaxPayloads = 8;

// Rows of so many bytes that share a word on a device: chunks of 8 to 16 KiB, or a row, or 64. A chunk is sent by one
// block, which has its share of the link alone, 2 us for 16 KiB when all senders do, and what it carries is not summed
// before. One warp of a block makes the fences.
constexpr int32_t chunk_rows_of(uint64_t row_bytes) {
  int32_t rows = 1;
  while (rows < 64 && 2 * static_cast<uint64_t>(rows) * row_bytes <= (16u << 10)) rows *= 2;
  return rows;
}

struct Shape {
  int32_t ranks = 0;       // N
  int32_t experts = 0;     // E; of a group with a placement P, its physical slots
  int32_t top_k = 0;       // K
  int32_t max_tokens = 0;  // B
  int32_t lanes = 0;
  int32_t payloads = 0;
  uint64_t payload_bytes[kMaxPayloads] = {};  // of one row
  uint64_t combine_bytes = 0;                 // of one row
  // High throughput alone, else 0.
  int32_t recv_rows = 0;           // R: rows of all sources together
  int32_t most_local_experts = 0;  // of any rank
  uint64_t lease_bytes = 0;        // for leases (core/leases.h), whole pages
  // What only devices have: 0 on the CPU.
  int32_t packet_tokens = 0;  // rows of a source that may travel as packets (layout/ll128.h)
  int32_t chunk_rows = 0;     // rows of a bulk combine that share a word
  int32_t carried = 0;        // 1: rows go over a carrier, in blocks by source: so an inbox has them as slots do
  // Of a group with a placement alone, else 0 (tokenway/placement.h).
  int32_t logical_experts = 0;  // E
  int32_t counts_loads = 0;     // 1: dispatches tell what is chosen

  constexpr bool exact() const { return recv_rows > 0; }
  constexpr bool leases() const { return lease_bytes > 0; }
  // Ids that a caller may give: below this.
  constexpr int32_t choices() const { return logical_experts > 0 ? logical_experts : experts; }
  // Rows that a rank may receive in a step.
  constexpr int64_t most_rows() const { return recv_rows > 0 ? recv_rows : static_cast<int64_t>(ranks) * max_tokens; }
  // A token goes to at most this many ranks: places per token in the owner's inbox.
  constexpr int32_t fan_out() const { return top_k < ranks ? top_k : ranks; }
};

// What travels beside the payloads of a row: who it is at its owner, and its routing. In memory the header is
// followed by ids int32[K], global, as the owner gave them or the slots that serve them, and weights float32[K].
struct RowHeader {
  int32_t token;     // row at the owner
  int32_t position;  // of the receiving rank among the token's ranks, ascending: its place in the owner's inbox
};

constexpr uint64_t meta_bytes(int32_t top_k) {
  return sizeof(RowHeader) + static_cast<uint64_t>(top_k) * (sizeof(int32_t) + sizeof(float));
}

}  // namespace tw
