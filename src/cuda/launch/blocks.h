// The sizes that host and kernels count in: threads and warps of a block, tokens of a round, groups of packets, chunks,
// and the packing of an expert's place into one word. No functions that launch anything.
//
// Takes nothing from a call; every plan (plan/) and every kernel reads these constants.
//
// What breaks if one changes: kThreads decides that a block fills an SM, on which S8 (all waiting blocks fit) and the
// grids of plan/budget.cc rest; kRound, kGroup and kCounted decide how slots are counted (S9); the other numbers are
// speed and registers alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include "tokenway/tokenway.h"

namespace tw::cuda {

// Threads of a block that exchanges. A thread may have 128 registers, so a block fills an SM, and a grid of at most as
// many blocks as SMs is on the device all at once.
inline constexpr int kThreads = 512;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kRound = kThreads;  // tokens that are routed at a time; in the first round each thread routes one
inline constexpr int kMostPackets =
    2 * kRound;                    // the packet bound is at most this: tokens of a rank that go all as packets
inline constexpr int kGroup = 32;  // tokens that a warp marks at a time: one bit of a mark's word each
inline constexpr int kCounted = 2 * kGroup;  // tokens that a block counts at a time in an exchange of counts
inline constexpr int kTileGroups = 4;        // most groups of packets in one tile
inline constexpr int kSummedGroups = 2;      // the same for tiles whose rows are sums: registers allow no more
inline constexpr uint32_t kPushedVectors = 32 * kTileGroups;  // vectors of 16 bytes in a tile of an inbox's row
inline constexpr int kMetaGroups = 2;                         // groups of packets that hold a row's metadata
inline constexpr int kChunks = 32;  // chunks of a block that may be under way or waiting for their fence
inline constexpr int kNear = 8;     // windows whose addresses are among a kernel's parameters (GroupView::near_windows)
inline constexpr int kRanksAtOnce = 32;  // ranks that one mask of 32 bits holds
inline constexpr int kMostRounds = 8;    // most rounds whose marks a block remembers at once

// Packs where an expert is into one word: its rank, and the physical expert's number there.
constexpr int kSlotBits = 20;
static_assert(TW_MAX_EXPERTS <= 1 << kSlotBits && TW_MAX_RANKS <= 1 << (32 - kSlotBits));
constexpr uint32_t pack_expert(int32_t rank, int32_t slot) {
  return static_cast<uint32_t>(rank) << kSlotBits | static_cast<uint32_t>(slot);
}
constexpr uint32_t kNoExpert = ~0u;  // a rank beyond all ranks
constexpr int32_t expert_rank(uint32_t packed) { return static_cast<int32_t>(packed >> kSlotBits); }
constexpr int32_t expert_slot(uint32_t packed) { return static_cast<int32_t>(packed & ((1u << kSlotBits) - 1)); }

// How many turns of chunks, of `items` tiles each, a block draws ahead of what it has sent (combine/chunks.cuh): enough
// to keep its warps busy, and those whose fence is under way; not many more, as what is drawn early is no longer shared
// out.
constexpr int32_t turns_ahead(int32_t items) { return std::min(kChunks / 2, (kWarps + items - 1) / items + 3); }

}  // namespace tw::cuda
