// Routing: where a slot is decided. From the ids of a rank alone, without asking anybody, assign_slots finds which
// ranks each token goes to (distinct, ascending) and its slot there, the number of earlier tokens that go there too.
// The types of a routing and of what arrives are here too; all backends share them.
//
// S9: slots follow from ids alone. A rule that depends on timing, or that differs from the kernels'
// (src/cuda/device/routing.cuh), puts rows into slots where nobody looks for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "layout/shape.h"

namespace tw {

// Which rank holds each expert.
struct Placement {
  const int32_t* rank;  // [E]
  const int32_t* slot;  // [E], the rank's local expert

  // The local expert of `me` that an id names, or -1.
  int32_t local(int32_t id, int32_t me) const { return id >= 0 && rank[id] == me ? slot[id] : -1; }
};

struct Destination {
  int32_t rank;
  int32_t slot;
};

// Marks of a group of 32 consecutive tokens for one rank: which of them go there, by bit, and how many tokens before
// the group do. So a token's slot there is `before` plus the number of bits below its own.
struct GroupMarks {
  uint32_t going;
  int32_t before;
};

// The place of a received (row, k) in an expert's block.
struct ExpertRow {
  int32_t expert;  // local expert; -1: the choice is of no expert of this rank
  int32_t row;     // row of the expert's block; in exact layouts, row of the whole tensor
};

// One routing as its owner knows it; the arrays belong to a handle.
struct Routing {
  int32_t tokens = 0;                   // T
  int32_t* ids = nullptr;               // [T, K], global, -1 for none
  float* weights = nullptr;             // [T, K]
  int64_t* first = nullptr;             // [T + 1]
  Destination* destinations = nullptr;  // token t has first[t] .. first[t + 1], ranks ascending
  int32_t* send_counts = nullptr;       // [N], those that are dropped too

  int32_t fan_out(int32_t token) const { return static_cast<int32_t>(first[token + 1] - first[token]); }
};

// Fills first, destinations and send_counts from ids.
inline void assign_slots(const Shape& shape, const Placement& placement, Routing* routing) {
  std::memset(routing->send_counts, 0, sizeof(int32_t) * shape.ranks);
  int64_t total = 0;
  for (int32_t t = 0; t < routing->tokens; ++t) {
    routing->first[t] = total;
    Destination* const mine = routing->destinations + total;
    int32_t count = 0;
    for (int32_t k = 0; k < shape.top_k; ++k) {
      const int32_t id = routing->ids[static_cast<int64_t>(t) * shape.top_k + k];
      if (id < 0) continue;
      // Insertion into a short ascending list, each rank once: the deduplication.
      const int32_t rank = placement.rank[id];
      int32_t at = count;
      while (at > 0 && mine[at - 1].rank > rank) --at;
      if (at > 0 && mine[at - 1].rank == rank) continue;
      for (int32_t i = count; i > at; --i) mine[i] = mine[i - 1];
      mine[at].rank = rank;
      ++count;
    }
    for (int32_t i = 0; i < count; ++i) mine[i].slot = routing->send_counts[mine[i].rank]++;
    total += count;
  }
  routing->first[routing->tokens] = total;
}

// What arrived at a rank, copied out of the window so that a handle needs no bank; the arrays belong to a handle.
// Row r is the r-th in (source, slot) order.
struct Received {
  int32_t* counts = nullptr;  // [N]
  std::byte* meta = nullptr;  // [R] rows of meta_bytes(K): RowHeader, ids, weights

  struct Row {
    const RowHeader* header;
    const int32_t* ids;    // [K]
    const float* weights;  // [K]
  };
  Row row(int64_t r, int32_t top_k) const {
    const std::byte* const at = meta + r * static_cast<int64_t>(meta_bytes(top_k));
    const std::byte* const ids = at + sizeof(RowHeader);
    return {reinterpret_cast<const RowHeader*>(at), reinterpret_cast<const int32_t*>(ids),
            reinterpret_cast<const float*>(ids + sizeof(int32_t) * top_k)};
  }
};

}  // namespace tw
