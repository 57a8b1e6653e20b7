// What is posted to ranks of other hosts behind a kernel that has written their blocks (transport/posted.h): parameters
// and launches.
//
// launch_pace makes a step without rows where the channel does not stand before the bank that a view needs;
// launch_post moves the blocks of a step to their ranks, and their signals behind them; launch_await_signals waits
// until all signals of a step are there.
//
// What breaks if this changes: T3, T5 and T6 between devices. A signal that is added by another way than by these
// leaves peers waiting, or with a difference that is not the signal's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/launch/group_view.h"

namespace tw::cuda {

// The most memories that a network has: of windows, of what goes out and of what arrives, anew for each growth.
inline constexpr int kNetMemories = 48;

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
};

// Where the signals of a step go, and what they were; likewise.
struct PostSignals {
  NetPlace from;   // this rank's lines, by rank: kSignalStride each
  NetPlace to;     // the lines of all sources there
  std::byte* at;   // `from`
  NearPlace near;  // `to`
  uint64_t* told;  // [2, N] what each rank of another host has been told in a bank (T6)
};

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
  int32_t loads;      // the region that has load statistics: its banks go by dispatches; -1: none
  uint32_t* arrived;  // [N] counters that are 0: blocks that have copied for a rank
};

// Of a kernel that waits before or behind those that make the step.
struct PaceParams {
  GroupView group;
  NetView net;
  PostSignals signals;
  twPhase_t phase;
  int32_t channel;
  int32_t bank;  // that the step must have
};

// All return a cudaError_t as int.
int launch_pace(const PaceParams& params, void* stream);
int launch_post(const PostParams& params, void* stream);
int launch_await_signals(const PaceParams& params, void* stream);

}  // namespace tw::cuda
