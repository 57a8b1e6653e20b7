// What is posted to ranks of other hosts behind a kernel that has written their blocks (transport/posted.h): parameters
// and launches.
//
// launch_pace makes a step without rows where the channel does not stand before the bank that a view needs;
// launch_post moves the blocks of a step to their ranks, and their signals behind them; launch_await_signals waits
// until all signals of a step are there. Where rows go to a host once, launch_pack comes before launch_post and lays
// out the messages, and launch_pull copies this rank's rows from where they lie on its host; launch_gate tries whether
// that may be.
//
// What breaks if this changes: T3, T5 and T6 between devices. A signal that is added by another way than by these
// leaves peers waiting, or with a difference that is not the signal's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/launch/group_view.h"
#include "layout/inbox_map.h"

namespace tw::cuda {

// The most memories that a network has: of windows, of what goes out, of what arrives and of inboxes, anew for each
// growth.
inline constexpr int kNetMemories = 64;

// What a kernel needs of a network (transport/network.h): an address in the memory of its device. What lies there is
// the business of transport/net.cuh.
struct NetView {
  const void* state = nullptr;
};

// A place in a network's memory: the memory's number, which is the same on all ranks, and bytes from where it begins.
struct NetPlace {
  int32_t memory = 0;
  uint64_t offset = 0;
};

inline constexpr int kMostPosts = kMaxPayloads + 2;  // payloads, metadata, load statistics

// Memory of ranks of this host, as it is mapped here.
struct NearPlace {
  std::byte* const* begins;  // [N] where the memory begins; NULL: of another host
  uint64_t offset;
};

// What goes to each rank: its block of this rank's memory, to this rank's block of the rank's memory. Places are those
// of bank 0.
struct PostRegion {
  NetPlace from;        // of the block for rank 0
  NetPlace to;          // of the block of rank 0
  const std::byte* at;  // `from`
  NearPlace near;       // `to`
  uint64_t block;       // bytes from one block to the next, here and there
  uint64_t row;         // bytes of each of the rows that the signal tells of; 0: the whole block goes, always
  uint64_t bank_here;   // bytes from bank 0 to bank 1,
  uint64_t bank_there;  // and from one bank to the next
  uint64_t in_message;  // bytes from a message's begin to this region's rows (HostRows); 0: they go to each rank
};

// How rows travel between this rank and another (layout/topology.h).
struct RankRoute {
  int32_t message;  // to it: the message to its host, which brings them once to all its ranks; -1: straight to it
  int32_t rail;     // its place among the ranks of its host
  int32_t keeper;   // from it: the rank of this host at which its message lies; -1: straight to this rank
  int32_t list;     // which of those that lie there
};
// A message to another host: the rank there that it is put to, which of the lists there it is, and the host's ranks.
struct MessageRoute {
  int32_t peer;
  int32_t list;
  int32_t ranks;
};

// Rows that go to each host once (layout/inbox_map.h).
struct HostRows {
  const RankRoute* ranks;        // [N]; NULL: rows go straight to each rank
  const MessageRoute* messages;  // [others]
  int32_t others;                // messages
  int32_t bound;                 // rows of a message that there is room for
  int32_t all;                   // 1: each rank gets all rows, in the same slots: a message is the block of its peer
  NetPlace from;                 // the first message that goes out, in bank 0
  std::byte* at;                 // `from`
  NetPlace to;                   // the first list of an inbox, in bank 0
  NearPlace near;                // `to`
  uint64_t message;              // bytes from one message to the next
  uint64_t bank_here;            // bytes from bank 0 to bank 1,
  uint64_t bank_there;           // and there
  uint32_t* rows;                // [others] how many rows a message has, if not all; 0 between steps
};

// Which ranks a post serves: where partials are folded on the way, first all but the owners for whom this rank folds,
// as its mates wait for it before they fold; then these.
enum class Served : int32_t { kAll, kOthers, kOwners };

// Which tokens a dispatch has sent where, as its handle keeps it.
struct SentTokens {
  int32_t tokens;
  int32_t fan_out;
  const int32_t* fan;               // [tokens]
  const Destination* destinations;  // [tokens, fan_out]
};

// Where the signals of a step go, and what they were; likewise.
struct PostSignals {
  NetPlace from;   // this rank's lines, by rank: kSignalStride each
  NetPlace to;     // the lines of all sources there
  std::byte* at;   // `from`
  NearPlace near;  // `to`
  uint64_t* told;  // [2, N] what each rank of another host has been told in a bank (T6)
};

// Of the kernels that pack, post and pull.
struct PostParams {
  GroupView group;
  NetView net;
  PostSignals signals;
  PostRegion regions[kMostPosts];
  int32_t count;  // of regions
  int32_t channel;
  int32_t parts;  // blocks that copy to one rank of this host; a network's puts take a thread
  int32_t first;  // ranks from here on, so many, get regions; signals go to all
  int32_t ranks;
  Served served;
  int32_t loads;      // the region that has load statistics: its banks go by dispatches; -1: none
  uint32_t* arrived;  // [N] counters that are 0: blocks that have copied for a rank
  HostRows once;
  SentTokens sent;  // where rows go once
  twPhase_t phase;
};

// Of a kernel that waits before or behind those that make the step.
struct PaceParams {
  GroupView group;
  NetView net;
  PostSignals signals;
  twPhase_t phase;
  int32_t channel;
  int32_t bank;   // that the step must have
  int32_t local;  // ranks of each host, neighbours, where those of other hosts fold for this one; else 0
};

// Of the test whether ranks of this host see what the network has put into a mate's inbox as soon as that one's word
// tells of it. Places are those of InboxMap, channel 0, bank 0.
struct GateParams {
  NetView net;
  HostRows once;
  NetPlace words;        // of the lists of an inbox, a line each
  NearPlace near_words;  // `words`
  int32_t me;
  int32_t ranks;
  uint64_t bytes;  // of each trial, a multiple of 8; they lie behind each other in a message
  uint64_t timeout_ns;
  uint32_t* wrong;  // counts trials that were not seen whole, and sources that did not come
};
inline constexpr int kGateTrials = 16;

// All return a cudaError_t as int, load_pulls that of loading the kernels of messages. blocks: that may work at once.
int load_pulls();
int launch_gate(const GateParams& params, void* stream);
int launch_pack(const PostParams& params, int blocks, void* stream);
int launch_pull(const PostParams& params, int blocks, void* stream);
int launch_pace(const PaceParams& params, void* stream);
int launch_post(const PostParams& params, void* stream);
int launch_await_signals(const PaceParams& params, void* stream);

}  // namespace tw::cuda
