// HostsMap: where everything lies that ranks have beside their windows where they are on several hosts
// (docs/PROTOCOL.md, "Between hosts"): words with their blocks, inboxes for the messages of remote sources, room for
// what a combine returns, and staging; all of it twice, for each channel. It takes a Topology's numbers and a window's
// map, and gives bytes and offsets. It is the same on all ranks, sized for the largest host, so that a source knows
// where its rail peer reads.
//
//   words   for each list a word, a line to itself, and behind it its block; the blocks that this rank stages, one for
//           each host; the rows word of each rank
//   lists   inboxes, room for returns (if there is none in the window's bank), staging, the tags of partials that are
//           folded here; behind those of all channels what straight steps stage beyond that
//
// Where a group folds at the sending host, `returns` holds what the ranks of this host return to the owners for which
// this rank folds, by owner, token and rank, and folds go out through the inbox.
//
// All of it follows from the group's maxima (S10). If a size is too small, a source writes over another one's message.
#pragma once

#include <algorithm>
#include <cstdint>

#include "layout/topology.h"
#include "layout/window_map.h"

namespace tw {

// What a message is made of: records, each a head, a target for each rank that wants its bytes, and the bytes, padded
// to 8. A target is rail:16 | offset:48, an offset in that rank's window.
struct Record {
  uint32_t bytes;
  uint32_t targets;

  static constexpr int kOffsetBits = 48;
  static constexpr uint64_t kAlignment = 8;
  static constexpr uint64_t padded(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
  static constexpr uint64_t head(uint64_t targets) { return sizeof(Record) + sizeof(uint64_t) * targets; }
  static constexpr uint64_t room(uint64_t bytes, uint64_t targets) { return head(targets) + padded(bytes); }
};

// What a source says of its message before its word: in front of the entries of the ranks of the host.
struct Block {
  uint64_t bytes = 0;    // of the message
  uint32_t area = 0;     // Area
  uint32_t entries = 0;  // ranks of the host

  struct Entry {
    uint64_t note = 0;
    uint64_t rows_word = 0;  // what the rank's rows word of this source becomes in this step
    uint64_t n = 0;
  };
};

// Where a message lies at the rail peer.
enum class Area : uint32_t {
  kInbox,     // what goes out: rows of a dispatch or gather, counts
  kReturns,   // partials of a combine
  kStraight,  // nowhere: rows lie at their places in the windows already, and rows words tell it
  kFolds,     // in the inbox, behind its bytes: folds, of the rank of the source's host that makes them for this rank
};

// Whether a folding rank has a rank's partial of a token, and which step's: what ranks put in a step that the folding
// rank itself refused stays there.
struct FoldTag {
  uint32_t step = 0;
  uint32_t place = 0;  // one more than the rank's position among the token's ranks; 0: it has none, as behind the fold
};

struct HostsMap {
  static constexpr int kBanks = 2;            // T3
  static constexpr uint64_t kWordRoom = 64;   // a word has a line to itself: words have different writers
  static constexpr uint64_t kAlignment = 64;  // of every region

  int hosts = 1;
  int ranks = 0;
  int local = 1;  // the most ranks of a host
  int lists = 0;  // the most that lie at one rank
  int channels = 0;
  uint64_t inbox = 0;       // bytes of one message that goes out,
  uint64_t returns = 0;     // of one that returns,
  uint64_t staging = 0;     // of all messages of a step,
  uint64_t straight = 0;    // and of a step whose rows go straight
  uint64_t tags = 0;        // FoldTags of a list; 0: nothing is folded here
  uint64_t bank_bytes = 0;  // of a window's bank,
  uint64_t bank_used = 0;   // and of a combine's inbox in it
  uint64_t in_bank = 0;     // where returns begin in the window's bank; 0: they have room of their own

  // replicas: ranks that hold the same tokens, whose sums they put to each other straight.
  // folds: by domain, at the sending host.
  static HostsMap make(const Topology& topology, const WindowMap& map, int replicas, bool folds = false) {
    const Shape& shape = map.shape();
    HostsMap made;
    made.hosts = topology.hosts();
    made.ranks = topology.size();
    made.channels = shape.channels;
    if (made.hosts == 1) return made;
    made.local = topology.most_local();
    made.lists = topology.most_lists();
    const auto local = static_cast<uint64_t>(made.local);
    const auto tokens = static_cast<uint64_t>(shape.max_tokens);
    const uint64_t targets = std::min<uint64_t>(shape.top_k, local);
    // Every rank has its part of a bank in a gather or reduce, or each of the replicas.
    const uint64_t part = map.bank_bytes() / static_cast<uint64_t>(made.ranks) + kSlack;
    const uint64_t token = kMaxPayloads * (Record::room(0, targets) + Record::kAlignment) +
                           shape.most_dispatch_bytes() + targets * Record::room(meta_bytes(shape.top_k), 1);
    const uint64_t counts = local * Record::room(WindowMap::counts_bytes(shape), 1);
    const uint64_t loads = shape.counts_loads != 0 ? sizeof(uint64_t) * WindowMap::loads_words(shape) : 0;
    const uint64_t gathered = part + kMaxPayloads * (Record::room(0, local) + Record::kAlignment);
    made.inbox = align(std::max({tokens * token + Record::room(loads, local), counts, gathered}));
    const auto served = static_cast<uint64_t>(shape.per_expert != 0 ? shape.top_k : 1);
    const uint64_t returned = Record::room(shape.most_combine_bytes(), 1) + Record::room(sizeof(float), 1);
    const auto part_tokens = static_cast<uint64_t>(shape.part_tokens());
    made.returns = align(local * part_tokens * served * returned);
    if (folds) {
      const uint64_t values = local * Record::room(choice_bytes(shape.top_k), 1);
      made.inbox = std::max(made.inbox, align(sizeof(uint64_t) + part_tokens * (returned + values)));
      made.tags = part_tokens * local;
    }
    const auto sharing = static_cast<uint64_t>(std::min(replicas - 1, topology.most_remote()));
    made.straight =
        align(std::max(static_cast<uint64_t>(topology.most_remote()) * part,
                       replicas > 1 ? sharing * (map.bank_bytes() / static_cast<uint64_t>(replicas) + kSlack) : 0));
    const auto others = static_cast<uint64_t>(made.hosts - 1);
    made.staging = others * made.message();
    if (folds) made.straight = std::max(made.straight, others * made.returns);
    made.bank_bytes = map.bank_bytes();
    made.bank_used = inbox_end(map);
    made.place_returns();
    return made;
  }

  // Whether a group of that map, placed in the window of those that this one was made for, finds room in it.
  bool holds(const HostsMap& other) const {
    return inbox >= other.inbox && returns >= other.returns && straight_room() >= other.straight_room() &&
           tags >= other.tags && (tags != 0 ? straight_room() : staging) >= other.staging &&
           (in_bank == 0 || other.bank_used <= in_bank);
  }

  // The map with room for both, over one window.
  HostsMap with(const HostsMap& other) const {
    HostsMap made = *this;
    made.inbox = std::max(inbox, other.inbox);
    made.returns = std::max(returns, other.returns);
    made.tags = std::max(tags, other.tags);
    made.staging = std::max({staging, other.staging, static_cast<uint64_t>(hosts - 1) * made.message()});
    made.straight = std::max({straight, other.straight, made.tags != 0 ? std::max(staging, other.staging) : 0,
                              made.tags != 0 ? static_cast<uint64_t>(hosts - 1) * made.returns : 0});
    made.bank_used = std::max(bank_used, other.bank_used);
    made.place_returns();
    return made;
  }

  // The longest message that is staged.
  uint64_t message() const { return tags != 0 ? inbox : std::max(inbox, returns); }
  uint64_t straight_room() const { return std::max(straight, staging); }
  uint64_t block_bytes() const { return align(sizeof(Block) + sizeof(Block::Entry) * static_cast<uint64_t>(local)); }

  // ---- Offsets in the memory of words.
  uint64_t words_bytes() const { return hosts == 1 ? 0 : kBanks * static_cast<uint64_t>(channels) * words_bank(); }
  uint64_t word(int channel, int bank, int list) const {
    return words_at(channel, bank) + static_cast<uint64_t>(list) * (kWordRoom + block_bytes());
  }
  uint64_t block(int channel, int bank, int list) const { return word(channel, bank, list) + kWordRoom; }
  uint64_t staged_block(int channel, int bank, int host) const {
    return word(channel, bank, lists) + static_cast<uint64_t>(host) * block_bytes();
  }
  uint64_t rows_word(int channel, int bank, int rank) const {
    return staged_block(channel, bank, hosts) + static_cast<uint64_t>(rank) * kWordRoom;
  }

  // ---- Offsets in the memory of lists.
  uint64_t lists_bytes() const {
    return hosts == 1 ? 0 : kBanks * static_cast<uint64_t>(channels) * (lists_bank() + beyond());
  }
  uint64_t inbox_at(int channel, int bank, int list) const {
    return lists_at(channel, bank) + static_cast<uint64_t>(list) * inbox;
  }
  // In the memory of lists, or, where in_bank is not 0, from the begin of the window's bank.
  uint64_t returns_at(int channel, int bank, int list) const {
    const uint64_t begin = in_bank != 0 ? in_bank : inbox_at(channel, bank, lists);
    return begin + static_cast<uint64_t>(list) * returns;
  }
  uint64_t staging_at(int channel, int bank) const {
    return inbox_at(channel, bank, lists) + (in_bank != 0 ? 0 : static_cast<uint64_t>(lists) * returns);
  }

  uint64_t tag(int channel, int bank, int list, int token, int rail) const {
    const auto place = static_cast<uint64_t>(list) * tags + static_cast<uint64_t>(token * local + rail);
    return staging_at(channel, bank) + staging + sizeof(FoldTag) * place;
  }
  // Where straight runs are staged: with messages where there is room for both, else behind all lists. Partials that
  // are not folded, of a group that is placed in the window of one that folds, are too.
  uint64_t straight_at(int channel, int bank) const {
    if (beyond() == 0) return staging_at(channel, bank);
    return lists_at(channels, 0) + (static_cast<uint64_t>(channel) * kBanks + static_cast<uint64_t>(bank)) * straight;
  }

  // What a rank has beside its window, and what a reduce, replicas that share sums, or such a group take beyond that:
  // memory that nobody touches before the first of them, and the system does not give before.
  uint64_t bytes() const {
    return words_bytes() + (hosts == 1 ? 0 : kBanks * static_cast<uint64_t>(channels) * lists_bank());
  }
  uint64_t straight_bytes() const { return words_bytes() + lists_bytes() - bytes(); }

 private:
  static constexpr uint64_t kSlack = 4096;  // parts of a bank are aligned, each tensor's

  static constexpr uint64_t align(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
  // Puts returns behind the inbox of a combine in the window's bank, where they fit there.
  void place_returns() {
    const uint64_t all = static_cast<uint64_t>(lists) * returns;
    in_bank = bank_used + all <= bank_bytes ? (bank_bytes - all) / kAlignment * kAlignment : 0;
    if (in_bank < bank_used) in_bank = 0;
  }
  // Where the inbox of a combine, and the values beside it, end in a bank.
  static uint64_t inbox_end(const WindowMap& map) {
    const Shape& shape = map.shape();
    const auto places = static_cast<uint64_t>(shape.part_tokens()) * static_cast<uint64_t>(shape.returning());
    return align(places * shape.most_combine_bytes() + sizeof(float));
  }
  // Bytes of straight runs behind all lists, in a bank.
  uint64_t beyond() const { return straight > staging ? straight : 0; }
  uint64_t words_bank() const {
    return static_cast<uint64_t>(lists) * (kWordRoom + block_bytes()) + static_cast<uint64_t>(hosts) * block_bytes() +
           static_cast<uint64_t>(ranks) * kWordRoom;
  }
  uint64_t words_at(int channel, int bank) const {
    return (static_cast<uint64_t>(channel) * kBanks + static_cast<uint64_t>(bank)) * words_bank();
  }
  uint64_t lists_bank() const {
    const auto all = static_cast<uint64_t>(lists);
    return all * inbox + (in_bank != 0 ? 0 : all * returns) + staging + align(all * tags * sizeof(FoldTag));
  }
  uint64_t lists_at(int channel, int bank) const {
    return (static_cast<uint64_t>(channel) * kBanks + static_cast<uint64_t>(bank)) * lists_bank();
  }
};

}  // namespace tw
