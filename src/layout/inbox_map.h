// InboxMap: where messages lie by which rows go to a host once, between devices of several hosts (transport/posted.h).
// A source sends one to its rail peer on each host that has several ranks; these read it there. It takes a Topology and
// a window's map, and gives bytes and offsets, once for the host and for how much memory a group needs.
//
//   message    head: the tokens of the source, as uint32; lists: for each rank of the host, in the order of rails, and
//              each of its slots of the source the number of its row here, uint32 each, as many as the source has
//              tokens; rows of each payload, as many as the call's bound allows
//   outgoing   for each channel: bank 0, bank 1; in each a message for each other host
//   inboxes    for each channel: bank 0, bank 1; in each a message for each list (Topology::list) that lies here; and
//              behind those of all channels the words of the trial at creation, a line each
//
// All of it follows from what all ranks have alike (S10), sized for the largest host.
#pragma once

#include <cstdint>

#include "layout/topology.h"
#include "layout/window_map.h"

namespace tw {

struct InboxMap {
  static constexpr uint64_t kHead = 64;
  static constexpr uint64_t kAlignment = 64;
  static constexpr uint64_t kBanks = 2;  // T3

  uint64_t channels = 0;
  uint64_t local = 0;    // the most ranks of a host
  uint64_t others = 0;   // hosts
  uint64_t lists = 0;    // the most that lie at one rank
  uint64_t message = 0;  // bytes of the longest; 0: no host has several ranks, or there is one host

  static InboxMap make(const Topology& topology, const WindowMap& map) {
    InboxMap made;
    if (topology.hosts() == 1 || topology.most_local() == 1) return made;
    const Shape& shape = map.shape();
    const auto tokens = static_cast<uint64_t>(shape.max_tokens);
    made.channels = static_cast<uint64_t>(shape.channels);
    made.local = static_cast<uint64_t>(topology.most_local());
    made.others = static_cast<uint64_t>(topology.hosts() - 1);
    made.lists = static_cast<uint64_t>(topology.most_lists());
    made.message = made.rows_at(tokens) + align(tokens * shape.most_dispatch_bytes() + kMaxPayloads * kAlignment);
    return made;
  }

  static constexpr uint64_t align(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
  // Where rows begin in a message of a call with that bound.
  constexpr uint64_t rows_at(uint64_t bound) const { return align(kHead + sizeof(uint32_t) * local * bound); }

  constexpr uint64_t outgoing_bank() const { return others * message; }
  constexpr uint64_t outgoing_at(int channel) const {
    return kBanks * outgoing_bank() * static_cast<uint64_t>(channel);
  }
  constexpr uint64_t outgoing_bytes() const { return kBanks * outgoing_bank() * channels; }

  constexpr uint64_t inbox_bank() const { return lists * message; }
  constexpr uint64_t inbox_at(int channel) const { return kBanks * inbox_bank() * static_cast<uint64_t>(channel); }
  constexpr uint64_t words_at() const { return kBanks * inbox_bank() * channels; }
  constexpr uint64_t inbox_bytes() const { return message == 0 ? 0 : words_at() + kAlignment * lists; }

  // What a group needs beside its window and its posts.
  constexpr uint64_t bytes() const { return outgoing_bytes() + inbox_bytes(); }
};

}  // namespace tw
