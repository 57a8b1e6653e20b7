// InboxMap: where messages lie by which a row goes to a host once, or comes from one, between devices of several hosts
// (transport/posted.h). A source of rows sends one to its rail peer on each host that has several ranks, which read it
// there. A rank that has folded partials of its host for an owner sends one to that owner. A step has one kind alone.
// It takes a Topology and a window's map, and gives bytes and offsets, once for the host and for how much memory a
// group needs.
//
//   message    head: the tokens of the source, as uint32; lists: for each rank of the host, in the order of rails, and
//              each of its slots of the source the number of its row here, uint32 each, as many as the source has
//              tokens; rows of each payload, as many as the call's bound allows
//   of folds   head; one list: for each token of the owner the number of its fold here, kNoRow if there is none, as
//              many as the call's bound allows; folds, where rows are
//   outgoing   for each channel: bank 0, bank 1; in each a message for each other host. Behind those of all channels
//              likewise the tags, if there are folds: for each rank and each of its tokens the step of which this rank
//              has a partial, and the slot that the partial is in
//   inboxes    for each channel: bank 0, bank 1; in each a message for each list (Topology::list) that lies here; and
//              behind those of all channels the words of the trial at creation, a line each
//
// All of it follows from what all ranks have alike (S10), sized for the largest host.
#pragma once

#include <algorithm>
#include <cstdint>

#include "layout/topology.h"
#include "layout/window_map.h"

namespace tw {

// What messages a group has.
struct InboxUses {
  bool rows = false;   // of dispatches and gathers
  bool folds = false;  // of combines by domain, where domains are hosts
};

struct InboxMap {
  static constexpr uint64_t kHead = 64;
  static constexpr uint64_t kAlignment = 64;
  static constexpr uint64_t kBanks = 2;  // T3
  static constexpr uint32_t kNoRow = ~0u;

  uint64_t channels = 0;
  uint64_t ranks = 0;
  uint64_t tokens = 0;   // the most of a rank
  uint64_t local = 0;    // the most ranks of a host
  uint64_t others = 0;   // hosts
  uint64_t lists = 0;    // the most that lie at one rank
  uint64_t message = 0;  // bytes of the longest; 0: there are none, as where no host has several ranks, or one has all
  InboxUses uses;

  static InboxMap make(const Topology& topology, const WindowMap& map, const InboxUses& uses) {
    InboxMap made;
    if (topology.hosts() == 1 || topology.most_local() == 1 || !(uses.rows || uses.folds)) return made;
    const Shape& shape = map.shape();
    made.channels = static_cast<uint64_t>(shape.channels);
    made.ranks = static_cast<uint64_t>(shape.ranks);
    made.tokens = static_cast<uint64_t>(shape.max_tokens);
    made.local = static_cast<uint64_t>(topology.most_local());
    made.others = static_cast<uint64_t>(topology.hosts() - 1);
    made.lists = static_cast<uint64_t>(topology.most_lists());
    made.uses = uses;
    const uint64_t rows = made.tokens * shape.most_dispatch_bytes() + kMaxPayloads * kAlignment;
    const uint64_t folds = made.tokens * shape.most_combine_bytes();
    made.message = made.rows_at(made.tokens) + align(std::max(uses.rows ? rows : 0, uses.folds ? folds : 0));
    return made;
  }

  static constexpr uint64_t align(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
  // Where rows begin in a message of a call with that bound.
  constexpr uint64_t rows_at(uint64_t bound) const { return align(kHead + sizeof(uint32_t) * local * bound); }

  constexpr uint64_t outgoing_bank() const { return others * message; }
  constexpr uint64_t outgoing_at(int channel) const {
    return kBanks * outgoing_bank() * static_cast<uint64_t>(channel);
  }
  constexpr uint64_t tags_bank() const { return uses.folds ? align(sizeof(uint64_t) * ranks * tokens) : 0; }
  constexpr uint64_t tags_at(int channel) const {
    return kBanks * (outgoing_bank() * channels + tags_bank() * static_cast<uint64_t>(channel));
  }
  constexpr uint64_t outgoing_bytes() const { return kBanks * (outgoing_bank() + tags_bank()) * channels; }

  constexpr uint64_t inbox_bank() const { return lists * message; }
  constexpr uint64_t inbox_at(int channel) const { return kBanks * inbox_bank() * static_cast<uint64_t>(channel); }
  constexpr uint64_t words_at() const { return kBanks * inbox_bank() * channels; }
  constexpr uint64_t inbox_bytes() const { return message == 0 ? 0 : words_at() + kAlignment * lists; }

  // What a group needs beside its window and its posts.
  constexpr uint64_t bytes() const { return outgoing_bytes() + inbox_bytes(); }
};

}  // namespace tw
