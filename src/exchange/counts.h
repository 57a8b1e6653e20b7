// The exchange of counts on hosts (docs/PROTOCOL.md, «Counts»): before the first row of a routing goes out, every rank
// tells how many rows it sends to each rank. So each knows where its own rows begin at each receiver, and how many it
// will receive. Takes a routing, gives Counts, and an Overflow if a rank has too little room.
//
// All ranks compute the same numbers from the same matrix: a change must keep them alike, else rows of two sources
// overlap (S9, S10) or one rank refuses what its peers send.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "exchange/routing.h"
#include "exchange/step.h"

namespace tw {

// What the exchange of counts of a routing has brought; the arrays belong to a handle.
struct Counts {
  int32_t* sent = nullptr;  // [N, N] rows that go from each rank (first index) to each, without those that are dropped
  int32_t* experts = nullptr;          // [L] rows for each local expert, from all ranks
  int64_t* begin = nullptr;            // [N] row at each rank where this rank's begin
  int64_t* source = nullptr;           // [N + 1] row here where each source's begin, and how many there are
  uint64_t* receive_offset = nullptr;  // [N, payloads], in groups with leases: where the next dispatch's rows land at
                                       // each rank, as WindowMap::counts has it
  bool exchanged = false;

  int32_t& at(const Shape& shape, int from, int to) const {
    return sent[static_cast<int64_t>(from) * shape.ranks + to];
  }
};

// Counts the rows that this rank sends to each expert: [E].
inline std::vector<int32_t> expert_rows(const Shape& shape, const Routing& routing) {
  std::vector<int32_t> rows(shape.experts, 0);
  for (int64_t i = 0; i < static_cast<int64_t>(routing.tokens) * shape.top_k; ++i) {
    if (routing.ids[i] >= 0) ++rows[routing.ids[i]];
  }
  return rows;
}

// Tells every rank this rank's counts. Never waits: S2 has made the bank free. receive_offset: [payloads] of this rank,
// as WindowMap::counts has it; NULL: none.
template <Transport T>
void send_counts(T& t, const WindowMap& map, StepPlace at, const Placement& placement, const Routing& routing,
                 const uint64_t* receive_offset, uint64_t note) {
  const Shape& shape = map.shape();
  const std::vector<int32_t> rows = expert_rows(shape, routing);
  std::vector<int32_t> told(WindowMap::counts_bytes(shape) / sizeof(int32_t));
  for (int rank = 0; rank < shape.ranks; ++rank) {
    std::fill(told.begin(), told.end(), 0);
    std::copy_n(routing.send_counts, shape.ranks, told.begin());
    for (int32_t expert = 0; expert < shape.experts; ++expert) {
      if (placement.rank[expert] == rank) told[shape.ranks + placement.slot[expert]] = rows[expert];
    }
    if (shape.leases() && receive_offset != nullptr) {
      std::memcpy(told.data() + WindowMap::receive_offsets_begin(shape) / sizeof(int32_t), receive_offset,
                  sizeof(uint64_t) * static_cast<size_t>(shape.payloads));
    }
    t.put(rank, map.counts(at.channel, at.bank(), t.rank()), told.data(), told.size() * sizeof(int32_t));
  }
  publish_step(t, map, at, Mode::kCounts, note, [](int) { return 0; });
}

// Whether up to `room` rows that land at the announced receive offsets stay within the leases. What comes from another
// process is checked, because a dispatch writes there.
inline bool within_leases(const WindowMap& map, const Counts& counts, int32_t room) {
  const Shape& shape = map.shape();
  for (int64_t i = 0; i < static_cast<int64_t>(shape.ranks) * shape.payloads && shape.leases(); ++i) {
    const uint64_t at = counts.receive_offset[i];
    const uint64_t bytes = static_cast<uint64_t>(room) * shape.payload_bytes[i % shape.payloads];
    if (at != 0 && (at < map.leases() || bytes > shape.lease_bytes || at - map.leases() > shape.lease_bytes - bytes)) {
      return false;
    }
  }
  return true;
}

// The rank that would receive more rows than there is room for, and how many it would receive.
struct Overflow {
  int rank = -1;
  int64_t rows = 0;
};

// Takes the counts that have come, after a successful await_step. Returns the first rank that would receive more than
// `room` rows. The rows too many are those of the last sources; with `drop` they are left out of `sent`.
template <Transport T>
Overflow take_counts(T& t, const WindowMap& map, StepPlace at, int32_t local_experts, int32_t room, bool drop,
                     Counts* counts) {
  const Shape& shape = map.shape();
  std::fill_n(counts->experts, local_experts, 0);
  for (int source = 0; source < shape.ranks; ++source) {
    const auto* const told = reinterpret_cast<const int32_t*>(t.local(map.counts(at.channel, at.bank(), source)));
    std::copy_n(told, shape.ranks, &counts->at(shape, source, 0));
    for (int32_t expert = 0; expert < local_experts; ++expert) counts->experts[expert] += told[shape.ranks + expert];
    if (!shape.leases()) continue;
    std::memcpy(counts->receive_offset + static_cast<int64_t>(source) * shape.payloads,
                told + WindowMap::receive_offsets_begin(shape) / sizeof(int32_t),
                sizeof(uint64_t) * static_cast<size_t>(shape.payloads));
  }
  Overflow overflow;
  for (int to = 0; to < shape.ranks; ++to) {
    int64_t row = 0;
    int64_t wanted = 0;
    for (int from = 0; from < shape.ranks; ++from) {
      int32_t& rows = counts->at(shape, from, to);
      wanted += rows;
      if (drop) rows = static_cast<int32_t>(std::min<int64_t>(rows, room - row));
      if (from == t.rank()) counts->begin[to] = row;
      if (to == t.rank()) counts->source[from] = row;
      row += rows;
    }
    if (to == t.rank()) counts->source[shape.ranks] = row;
    if (wanted > room && overflow.rank < 0) overflow = {to, wanted};
  }
  return overflow;
}

}  // namespace tw
