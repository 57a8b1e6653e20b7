// Packets: how few rows travel, and the last of many. A packet is 128 aligned bytes, 120 of data and 8 of flag, the
// step: who sees the flag sees the data, so no fence and no word stands between writer and reader (NCCL calls its like
// LL128).
//
// A row is a stream of 8-byte words, 15 to a packet. Of a dispatch: header, ids and weights (meta_bytes), then each
// payload, padded to whole words; where the payloads go as they lie, header, ids and weights alone. Of a combine: the
// partial.
#pragma once

#include <cstdint>

#include "layout/shape.h"

namespace tw {

inline constexpr uint64_t kPacketBytes = 128;
inline constexpr int kPacketWords = 15;   // of data
inline constexpr int kPacketThreads = 8;  // threads that read or write a packet together, 16 bytes each

constexpr uint64_t words_of(uint64_t bytes) { return (bytes + 7) / 8; }
constexpr uint64_t packets_of(uint64_t words) { return (words + kPacketWords - 1) / kPacketWords; }

constexpr uint64_t dispatch_words(const Shape& shape) {
  uint64_t words = words_of(meta_bytes(shape.top_k));
  for (int q = 0; q < shape.payloads; ++q) words += words_of(shape.payload_bytes[q]);
  return words;
}

// Bytes of the packets of what travels beside a row.
constexpr uint64_t meta_packet_bytes(const Shape& shape) {
  return kPacketBytes * packets_of(words_of(meta_bytes(shape.top_k)));
}

// Bytes of the packets of one row, whichever way it goes. May wrap only where rows alone pass 64 bits.
constexpr uint64_t packet_row_bytes(const Shape& shape) {
  const uint64_t dispatch = packets_of(dispatch_words(shape));
  const uint64_t combine = packets_of(words_of(shape.combine_bytes));
  return kPacketBytes * (dispatch > combine ? dispatch : combine);
}

}  // namespace tw
