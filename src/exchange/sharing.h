// Sums that token replicas share, on hosts: each rank of a set puts the sums of its share into the windows of the
// others, behind a combine. It is a gather among the ranks of a set, in a step of all ranks: signals go to and come
// from everyone (S2), and bring no number of rows, which follows from the tokens, but the digest of a rank's tokens.
//
// The digests of all sets are compared by all ranks, so a set that holds unlike tokens fails the step on all of them
// alike. Whoever looked at its own set alone would go on where others have failed.
#pragma once

#include <cstring>

#include "exchange/step.h"
#include "exchange/token_replicas.h"

namespace tw {

// Puts this rank's share of tensor q, rows from share(q) on of row_bytes(q), and publishes the step.
template <Transport T, class Share, class RowBytes>
void send_sharing(T& t, const WindowMap& map, StepPlace at, const CollectiveMap& places, const ReplicaSet& set,
                  int32_t count, uint64_t note, uint32_t digest, Share&& share, RowBytes&& row_bytes) {
  const uint64_t bank = map.bank(at.channel, at.bank());
  for (int32_t turn = 1; turn < set.size; ++turn) {
    const int rank = set.first + (set.place + turn) % set.size;
    for (int32_t q = 0; q < places.tensors; ++q) {
      const uint64_t bytes = row_bytes(q);
      for (int32_t i = 0; i < count; ++i) {
        t.put_row(rank, bank + places.row(q, set.place, i), share(q) + static_cast<uint64_t>(i) * bytes, bytes);
      }
    }
  }
  publish_step(t, map, at, Mode::kGather, note, [&](int) { return digest; });
}

// Gives the first rank whose digest is not that of the first rank of its set; -1 if there is none. digests: [N].
inline int32_t find_unlike(const int32_t* digests, int32_t ranks, int32_t replicas) {
  for (int32_t rank = 0; rank < ranks; ++rank) {
    if (digests[rank] != digests[rank / replicas * replicas]) return rank;
  }
  return -1;
}

// Copies what the others of the set have put here to its place in tensor q, [T, row] at `rows`. Needs a successful
// await_step, and digests that are alike.
template <Transport T>
void take_sharing(T& t, const WindowMap& map, StepPlace at, const CollectiveMap& places, const ReplicaSet& set,
                  int32_t tokens, int32_t q, std::byte* rows, uint64_t bytes) {
  const uint64_t bank = map.bank(at.channel, at.bank());
  for (int32_t place = 0; place < set.size; ++place) {
    if (place == set.place) continue;
    std::byte* const to = rows + static_cast<uint64_t>(set.begin(tokens, place)) * bytes;
    for (int32_t i = 0; i < set.count(tokens, place); ++i) {
      std::memcpy(to + static_cast<uint64_t>(i) * bytes, t.local(bank + places.row(q, place, i)), bytes);
    }
  }
}

}  // namespace tw
