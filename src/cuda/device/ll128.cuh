// LL128 packets as a warp sees them: a group of four, 16 bytes to a thread, the last thread of each eight with the
// flag.
//
// Takes places in a window and a step; gives stores that a reader either sees whole or recognises as not there, and
// looks and waits on the reading side. A caller of store_packet must ask is_together() just before, and readers must
// treat Parts::value as valid only when missing() is -1 for all of the warp and nothing was taken apart.
//
// What breaks if this changes: S4. A packet's flag is all that says its data is there; data that goes out or is read by
// another instruction than its flag may be of an earlier step. rest() is speed alone.
#pragma once

#include "cuda/device/wait.cuh"
#include "layout/ll128.h"

namespace tw::cuda {

constexpr uint32_t kGroupBytes = 4 * kPacketBytes;
constexpr uint32_t kGroupWords = 4 * kPacketWords;

__device__ inline bool is_flag() { return threadIdx.x % kPacketThreads == kPacketThreads - 1; }
// Gives the first of the thread's two words in the stream.
__device__ inline uint32_t first_word(uint32_t group) {
  return (4 * group + threadIdx.x % 32 / kPacketThreads) * kPacketWords + threadIdx.x % kPacketThreads * 2;
}
// Gives the place of the thread's part in a row's packets, in bytes.
__device__ inline uint32_t packet_place(uint32_t group) { return group * kGroupBytes + threadIdx.x % 32 * 16; }

// Gives the mask of the eight threads of this thread's packet.
__device__ inline uint32_t packet_threads() { return 0xffu << (threadIdx.x % 32 / kPacketThreads * kPacketThreads); }

// Whether those eight make their next access in one instruction.
__device__ inline bool is_together() { return (~active_threads() & packet_threads()) == 0; }

// Stores a part of a packet whose threads are not together: the flag follows the data, behind a fence.
__device__ __noinline__ static void store_apart(void* to, uint64_t a, uint64_t b) {
  if (!is_flag()) put_pair(to, a, b);
  __syncwarp(packet_threads());
  if (!is_flag()) return;
  fence_system();
  put_pair(to, a, b);
}

// Stores a thread's part of a packet. `together`: is_together(), asked just before.
__device__ inline void store_packet(bool together, void* to, uint64_t a, uint64_t b) {
  if (together) {
    put_pair(to, a, b);
  } else {
    store_apart(to, a, b);
  }
}

// Gives where the packets of a source's row are in a window. `row` counts the source's rows that are packets.
__device__ inline uint64_t packet_at(const PacketsAt& packets, int bank, int source, int row) {
  return packets.bank[bank] + source * packets.source + static_cast<uint64_t>(static_cast<uint32_t>(row)) * packets.row;
}

// Gives the distance from the first bank to the step's bank.
__device__ inline uint64_t bank_offset(const PacketsAt& packets, const Step& step) {
  return step.bank() != 0 ? packets.bank[1] - packets.bank[0] : 0;
}

// Sleeps between two looks, of 0.3 us each: a long wait must not take the memory's bandwidth from those who send.
__device__ inline void rest(int looks) {
  if (looks > 16) __nanosleep(100);
}

// Loads words w and w + 1 of a row of `end` words that allows accesses of 8 bytes; the flag's thread loads the first
// alone.
__device__ inline Vec16 load_two(const std::byte* row, uint32_t w, uint32_t end) {
  const auto* const words = reinterpret_cast<const unsigned long long*>(row);
  Vec16 value{};
  if (w < end) value.a = load_fresh<unsigned long long>(words + w);
  if (w + 1 < end && !is_flag()) value.b = load_fresh<unsigned long long>(words + (w + 1));
  return value;
}

// A part of a row, which one warp moves.
struct Tile {
  uint32_t number;  // its number in the row
  uint32_t begin;   // its first group of packets
  uint32_t end;
  uint32_t parts;  // tiles of Tiles that it joins
};
__device__ inline Tile tile_of(const Tiles& tiles, uint32_t number, uint32_t parts = 1) {
  const uint32_t begin = number * tiles.tile_groups;
  return {number, begin, min(tiles.groups, begin + parts * tiles.tile_groups), parts};
}

// One tile out of several ranks' rows, which are taken in turns: the tile, the index of the row among its rank's rows,
// and the turn, which says whose row it is.
struct Share {
  Tile tile;
  int index;
  int turn;
};
__device__ inline Share share_of(const Tiles& tiles, uint32_t ranks, uint32_t u) {
  const uint32_t rest = divide(u, tiles.per_row);
  const uint32_t index = ranks == 1 ? rest : rest / ranks;
  return {tile_of(tiles, u - rest * tiles.per_row.divisor), static_cast<int>(index),
          static_cast<int>(rest - index * ranks)};
}

// Gives in how many groups of a tile the thread has a part of a packet.
__device__ inline uint32_t part_of(const Tiles& tiles, const Tile& tile) {
  const uint32_t place = packet_place(tile.begin);
  const uint32_t there = place < tiles.packet_bytes ? (tiles.packet_bytes - place + kGroupBytes - 1) / kGroupBytes : 0;
  return min(there, tile.end - tile.begin);
}

// A thread's parts of the packets of one tile, in a row or in several rows at once.
template <int kRows, int kGroups = kTileGroups>
struct Parts {
  const std::byte* at[kRows];  // the thread's part in the tile's first group; nullptr: the row is no packets
  uint32_t groups;             // groups in which the thread has a part
  bool apart;                  // the last look took data and flags by separate instructions
  Vec16 value[kGroups][kRows];

  __device__ void cover(const Tiles& tiles, const Tile& tile) { groups = part_of(tiles, tile); }
  __device__ void look() {
    apart = !is_together();
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (at[row] == nullptr) continue;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (g < groups) value[g][row] = load_pair(at[row] + g * kGroupBytes);
      }
    }
  }
  // Gives a row whose flag is not there, -1 if all are.
  __device__ int missing(const Step& step) const {
    int found = -1;
    if (!is_flag()) return found;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (at[row] == nullptr) continue;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (g < groups && value[g][row].b != step.number) found = row;
      }
    }
    return found;
  }
};

// Waits until all of a warp's packets have the step's flag; they must have been looked at once. False if the wait ended
// otherwise (S6). source_of(row) gives who sends it; failed(source) is asked now and then.
template <int kRows, int kGroups, class SourceOf, class Failed>
__device__ inline bool await_packets(const GroupView& g, const Step& step, Parts<kRows, kGroups>* parts,
                                     SourceOf&& source_of, Failed&& failed) {
  Patience patience(g);
#pragma unroll 1
  for (int looks = 0;; ++looks) {
    const int missing = parts->missing(step);
    if (!__any_sync(~0u, missing >= 0)) {
      // All flags are there, so all data is; but data may have been looked at before the flags.
      if (__any_sync(~0u, parts->apart)) {
        fence_system();
        parts->look();
      }
      return true;
    }
    bool late = false;
    const bool over = patience.over(&late);
    if (g.no_wait) return true;
    if (__any_sync(~0u, over || patience.looked())) {
      const bool lost = patience.looked() && missing >= 0 && failed(source_of(missing));
      if (late && missing >= 0) report_failure(g, step, twTimeout, source_of(missing), 0);
      if (over && !late && missing >= 0) report_stopped(g, step, source_of(missing), 0);
      if (__any_sync(~0u, over || lost)) return false;
    }
    rest(looks);
    parts->look();
  }
}

}  // namespace tw::cuda
