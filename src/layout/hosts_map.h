// HostsMap: what a rank has beside its window where ranks are on several hosts (docs/PROTOCOL.md, "Between hosts"): an
// inbox for the lists of each remote source whose rail peer it is, staging for what it puts, words and their blocks,
// all of them twice, for each channel. It takes the group's Shape and where this rank stands, and gives bytes.
//
// All of it follows from the group's maxima (S10). If a size is too small, a source writes over another one's list.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "layout/shape.h"

namespace tw {

struct HostsMap {
  int32_t hosts = 1;
  int32_t local = 1;       // ranks of this rank's host
  int32_t lists = 0;       // remote ranks whose rail peer this one is; it folds partials for the same ones
  bool by_domain = false;  // partials of a host are folded before they travel

  static constexpr uint64_t kBanks = 2;        // T3
  static constexpr uint64_t kWordRoom = 64;    // a word has a line to itself: words have different writers
  static constexpr uint64_t kBlockEntry = 32;  // of each rank: note, n, where its partials go, its rows word

  // `sizes`: ranks of each host. Rank `rail` of host `host`; ranks of a host that is larger share rail peers.
  static constexpr HostsMap make(std::span<const int32_t> sizes, int32_t host, int32_t rail, bool by_domain) {
    HostsMap map;
    map.hosts = static_cast<int32_t>(sizes.size());
    map.local = sizes[host];
    map.by_domain = by_domain;
    for (int32_t other = 0; other < map.hosts; ++other) {
      if (other != host && sizes[other] > rail) map.lists += (sizes[other] - rail + map.local - 1) / map.local;
    }
    return map;
  }

  // One row of a list: its header, ids, weights, a slot for each rank of the host (-1: not for that one), payloads.
  constexpr uint64_t list_row(const Shape& shape) const {
    const uint64_t head = meta_bytes(shape.top_k) + sizeof(int32_t) * static_cast<uint64_t>(local);
    return align(head, kRowAlignment) + align(shape.most_dispatch_bytes(), kRowAlignment);
  }
  // One inbox of a bank: lists of a dispatch or, by_domain, the folds of other hosts for this rank, one of each.
  constexpr uint64_t inbox_bytes(const Shape& shape) const {
    const uint64_t row = by_domain ? std::max(list_row(shape), shape.most_combine_bytes()) : list_row(shape);
    return times(lists, shape.max_tokens) * row;
  }
  // Staging of a bank: a list for each other host, or what a combine returns to other hosts: partials of all tokens
  // that ranks there may have sent or, by_domain, the folds for the ranks whose rail peer this one is.
  constexpr uint64_t staging_bytes(const Shape& shape) const {
    const uint64_t dispatch = times(hosts - 1, shape.max_tokens) * list_row(shape);
    const uint64_t owners = by_domain ? lists : shape.ranks - local;
    return std::max(dispatch, owners * static_cast<uint64_t>(shape.part_tokens()) * shape.most_combine_bytes());
  }
  // Words and blocks of a bank: those that come and those staged, and a rows word of each remote rank.
  constexpr uint64_t word_bytes(const Shape& shape) const {
    const uint64_t block = kWordRoom + align(kBlockEntry * static_cast<uint64_t>(local), kWordRoom);
    return (times(lists, 1) + times(hosts - 1, 1)) * block + times(shape.ranks - local, 1) * kWordRoom;
  }
  constexpr uint64_t bytes(const Shape& shape) const {
    return kBanks * static_cast<uint64_t>(shape.channels) *
           (inbox_bytes(shape) + staging_bytes(shape) + word_bytes(shape));
  }

  // What a combine of this bound needs of a bank of the window where partials go by the rail peer, or to the rank that
  // folds: those of the own host for the own tokens, and those that come for other ranks.
  constexpr uint64_t combine_bank(const Shape& shape, int32_t bound) const {
    const uint64_t own = times(bound, std::min(shape.top_k, local));
    return (own + times(lists, local) * static_cast<uint64_t>(bound)) * shape.most_combine_bytes();
  }

 private:
  static constexpr uint64_t kRowAlignment = 16;
  static constexpr uint64_t align(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }
  static constexpr uint64_t times(int32_t a, int32_t b) { return static_cast<uint64_t>(a) * static_cast<uint64_t>(b); }
};

}  // namespace tw
