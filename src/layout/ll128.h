// The format of LL128 packets, as which few rows travel, and the last of many. A packet is 128 aligned bytes: 120 of
// data and 8 of flag, the step. Whoever sees the flag sees the data, so no fence and no signal stands between writer
// and reader (NCCL calls its like LL128). This file gives the sizes, from a Shape; kernels of src/cuda write and read
// packets.
//
// A row is a stream of 8-byte words, 15 to a packet. A dispatch's row is header, ids and weights (meta_bytes), then
// each payload, padded to whole words; where the payloads go as Simple rows, the metadata alone. A combine's row is the
// partial.
//
// Senders and receivers go by these numbers alike: a change that only one side makes breaks S4 (rows are read that are
// not there), and a larger packet row moves everything behind it in the window (S10).
#pragma once

#include <cstdint>

#include "layout/shape.h"

namespace tw {

inline constexpr uint64_t kPacketBytes = 128;
inline constexpr int kPacketWords = 15;   // words of data
inline constexpr int kPacketThreads = 8;  // threads that read or write a packet together, 16 bytes each

constexpr uint64_t words_of(uint64_t bytes) { return (bytes + 7) / 8; }
constexpr uint64_t packets_of(uint64_t words) { return (words + kPacketWords - 1) / kPacketWords; }

constexpr uint64_t dispatch_words(const Shape& shape) {
  uint64_t words = words_of(meta_bytes(shape.top_k));
  for (int q = 0; q < shape.payloads; ++q) words += words_of(shape.payload_bytes[q]);
  return words;
}

// Bytes of the packets of a row's metadata.
constexpr uint64_t meta_packet_bytes(const Shape& shape) {
  return kPacketBytes * packets_of(words_of(meta_bytes(shape.top_k)));
}

// Bytes of the packets of one row, whichever way it goes and whatever it consists of: every payload may be padded to
// whole words. The product may wrap only where rows alone pass 64 bits.
constexpr uint64_t packet_row_bytes(const Shape& shape) {
  const uint64_t words = words_of(meta_bytes(shape.top_k)) + words_of(shape.most_dispatch_bytes()) + kMaxPayloads - 1;
  const uint64_t dispatch = packets_of(words);
  const uint64_t combine = packets_of(words_of(shape.most_combine_bytes()));
  return kPacketBytes * (dispatch > combine ? dispatch : combine);
}

}  // namespace tw
