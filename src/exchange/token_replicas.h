// Token replicas: sets of neighbouring ranks that hold the same tokens. Which tokens a rank of a set sends, and a
// digest by which ranks see that theirs are alike. Hosts and kernels use both.
//
// What breaks if this changes: ranks of a set must cut the tokens alike, or rows of a sum are lost or overwritten; and
// ranks that hold unlike tokens must find out by the digest, as nothing else tells them.
#pragma once

#include <cstdint>

#include "exchange/signals.h"
#include "layout/collective_map.h"

namespace tw {

// The set of a rank.
struct ReplicaSet {
  int32_t size = 1;   // R
  int32_t first = 0;  // its first rank
  int32_t place = 0;  // of this rank in it

  static constexpr ReplicaSet of(int32_t size, int32_t rank) { return {size, rank / size * size, rank % size}; }

  constexpr bool is_one() const { return size == 1; }
  constexpr bool has(int32_t rank) const { return rank >= first && rank < first + size; }
  // The share of a place: tokens [begin, begin + count). Shares follow each other and differ by at most one token.
  constexpr int32_t begin(int32_t tokens, int32_t at) const {
    const int32_t more = tokens % size;  // so many places have one more
    return at * (tokens / size) + (at < more ? at : more);
  }
  constexpr int32_t count(int32_t tokens, int32_t at) const { return begin(tokens, at + 1) - begin(tokens, at); }
};

inline constexpr int32_t kDigestBlocks = 16;  // blocks of a device that make a digest together

constexpr uint32_t scramble(uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}
// What one choice adds to the digest of a routing. It is a sum, so that threads may add in any order. `place`: of the
// choice in [T, K]; `weight`: the bits of a float.
constexpr uint32_t choice_digest(uint32_t place, uint32_t id, uint32_t weight) {
  return scramble(scramble(scramble(place + 0x9e3779b9u) ^ id) ^ weight);
}
// The digest of T tokens, from the sum over their choices, and of the type of their sums, by which rows are cut: as
// many bits as a signal has for a number of rows.
constexpr uint32_t tokens_digest(int32_t tokens, uint32_t sum, int32_t dtype) {
  return scramble(sum + scramble(static_cast<uint32_t>(tokens) ^ static_cast<uint32_t>(dtype) << 28)) & kMaxCount;
}

// Where the rows that a set shares lie in a bank. `blocks`: places for the rows of so many sources. Rows are apart as
// if they were of the widest type, so that nothing follows from a type that ranks might differ in. `values`: [K] floats
// of each token follow its sum.
constexpr CollectiveMap sharing_places(int32_t blocks, int32_t bound, uint64_t elements, int32_t top_k, bool values) {
  const uint64_t row_bytes[] = {elements * sizeof(float), static_cast<uint64_t>(top_k) * sizeof(float)};
  return CollectiveMap::make(blocks, bound > 0 ? bound : 1, row_bytes, values ? 2 : 1);
}

}  // namespace tw
