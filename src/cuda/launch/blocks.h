// What is the same in all kernels of the exchange: a block, its rounds, and the sizes that host and device count in.
#pragma once

#include <algorithm>
#include <cstdint>
#include "tokenway/tokenway.h"

namespace tw::cuda {

// Of a block that exchanges. Its threads may have 128 registers, so it fills an SM, and a grid of SMs is all there at
// once.
inline constexpr int kThreads = 512;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kRound = kThreads;  // tokens that are routed at a time; of the first round one by each thread
inline constexpr int kMostPackets = 2 * kRound;  // tokens of a bound with which all rows may go as packets
inline constexpr int kGroup = 32;                // tokens that a warp marks at a time, and that a word has bits for
inline constexpr int kCounted = 2 * kGroup;      // and that a block counts at a time, in an exchange of counts
inline constexpr int kTileGroups = 4;            // at most so many groups of packets are one warp's at a time
inline constexpr int kSummedGroups = 2;          // or so many, of rows that are sums: registers
inline constexpr uint32_t kPushedVectors = 32 * kTileGroups;  // of 16 bytes, of a row into an inbox, likewise
inline constexpr int kMetaGroups = 2;  // in so many lies what travels beside the payloads of a row
inline constexpr int kChunks = 32;     // chunks of a block that may be under way or waiting for their fence
inline constexpr int kNear = 8;
inline constexpr int kRanksAtOnce = 32;  // bits of a mask of ranks
inline constexpr int kMostRounds = 8;    // that are remembered at most

// Where an expert is, in one word: its rank and its slot there.
constexpr int kSlotBits = 20;
static_assert(TW_MAX_EXPERTS <= 1 << kSlotBits && TW_MAX_RANKS <= 1 << (32 - kSlotBits));
constexpr uint32_t pack_expert(int32_t rank, int32_t slot) {
  return static_cast<uint32_t>(rank) << kSlotBits | static_cast<uint32_t>(slot);
}
constexpr uint32_t kNoExpert = ~0u;  // its rank is beyond all
constexpr int32_t expert_rank(uint32_t packed) { return static_cast<int32_t>(packed >> kSlotBits); }
constexpr int32_t expert_slot(uint32_t packed) { return static_cast<int32_t>(packed & ((1u << kSlotBits) - 1)); }

// Of so many tiles each, the turns of chunks that a block has ahead of what it has sent (combine/chunks.cuh): what
// keeps its warps busy, and those whose fence is under way; not many more, as what is drawn early is not shared out any
// more.
constexpr int32_t turns_ahead(int32_t items) { return std::min(kChunks / 2, (kWarps + items - 1) / items + 3); }

}  // namespace tw::cuda
