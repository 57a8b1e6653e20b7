// How a call's rows are shared out to blocks and warps: plain structs that the host decides (plan/) and kernels carry
// out.
//
// Takes a WindowMap where places in it are needed; gives counts and dividers alone, no memory.
//
// What breaks if this changes: every tile of every row must be some warp's, so plan and kernels must count alike (else
// rows are missing, S4); Roles keep S7 (a block sends before it waits) and S8 (grid() blocks fit on the device). The
// widths themselves are speed alone.
#pragma once

#include <cstdint>
#include <type_traits>
#include "cuda/launch/blocks.h"
#include "layout/window_map.h"

namespace tw::cuda {

// Gives x / d for x < 2^31 without a division (device/block.cuh, divide). The method is Granlund and Montgomery,
// "Division by invariant integers using multiplication", PLDI 1994.
struct Divider {
  uint32_t divisor = 1;
  uint32_t factor = 0;
  uint32_t shift = 0;

  static constexpr Divider make(uint32_t d) {
    Divider by;
    by.divisor = d;
    while (by.shift < 32 && (uint64_t{1} << by.shift) < d) ++by.shift;
    by.factor = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << by.shift) - d)) / d + 1);
    return by;
  }
};

// How a row is cut into tiles. One warp moves a tile at a time: some groups of four packets, or, of a Simple row, an
// equal share of its vectors.
struct Tiles {
  Divider per_row;
  uint32_t tile_groups;   // groups of packets in a tile; the last of a row may have fewer
  uint32_t groups;        // groups of packets in a row
  uint32_t words;         // words in a row's stream
  uint32_t packet_bytes;  // bytes of a row's packets
};

// The first `rows` rows go in wider tiles, each of which joins `parts` of Tiles. If few SMs work, all Simple rows do,
// because what a tile costs beside its bytes counts there. If all SMs work, a tile that comes late counts: with wide
// tiles a combine of 4096 tokens took twice as long. There wide tiles are those that the warps of a dispatch begin
// with; in a dispatch of rows alone they are all but the last rows (plan/tiles.h).
struct WideTiles {
  Divider per_row;
  uint32_t parts;  // tiles of Tiles in one
  uint32_t rows;   // rows that are shared out so

  constexpr uint32_t tiles() const { return rows * per_row.divisor; }
};

// Gives what WindowMap::packet does for one channel, without what a kernel need not compute.
struct PacketsAt {
  uint64_t bank[2];
  uint64_t source;  // bytes from one source's packets to the next
  uint32_t row;     // bytes from one slot's packets to the next

  static PacketsAt make(const WindowMap& map, int channel) {
    return {{map.packet(channel, 0, 0, 0), map.packet(channel, 1, 0, 0)},
            map.packet_source(),
            static_cast<uint32_t>(map.packet_row())};
  }
};

// How a grid's blocks divide the work: the first `sending` blocks send, the others receive or sum. They are apart
// because what an SM loads waits behind what it has stored to a link that is full: sums took three times as long where
// all SMs sent. In a grid that is not apart every block does both, sending first (S7), or the call needs only one of
// the two.
struct Roles {
  int32_t apart;
  int32_t sending;  // in blocks
  int32_t receiving;

  static constexpr Roles two(int sending, int receiving) { return {1, sending, receiving}; }
  static constexpr Roles one(int blocks) { return {0, blocks, blocks}; }
  constexpr int grid() const { return apart != 0 ? sending + receiving : sending; }
};

// Each kind of call has a kernel of its own. Instructions that a kernel meets for the first time take five to ten
// cycles each, so those that only other calls need must not stand between.
//
// Generic serves every call that the other kinds do not.
//
// Usual serves dispatches of up to two payloads, of 16 bytes at a time; up to 8 ids, which lie as whole vectors of 16
// bytes; up to 32 ranks; a table of experts in shared memory. It serves combines of rows of the wire's type, 16 bytes
// at a time, as they are; sums of that type; own rows where the caller has them or, of a bank of the window, in the
// inbox.
//
// LowSm serves usual calls by up to a quarter of the device's SMs (plan/budget.h, low_sm). Its tiles are whole rows, or
// large parts, so that a warp does its other work while part of a tile is on its way.
//
// Packets serves usual calls with a bound of up to two rounds of tokens, and up to 32 ranks, so that all that is sent
// or received are packets. It also serves combines of rows by expert, whose sums are made on the way.
enum class Kind : int32_t { kGeneric, kUsual, kLowSm, kPackets };
// The kinds that a bulk kernel is compiled for. with_kind calls `use` with the std::integral_constant<Kind, ...> of
// one.
inline constexpr Kind kBulkKinds[] = {Kind::kGeneric, Kind::kUsual, Kind::kLowSm};
template <class Use>
int with_kind(Kind kind, Use&& use) {
  if (kind == Kind::kLowSm) return use(std::integral_constant<Kind, Kind::kLowSm>{});
  if (kind == Kind::kUsual) return use(std::integral_constant<Kind, Kind::kUsual>{});
  return use(std::integral_constant<Kind, Kind::kGeneric>{});
}

}  // namespace tw::cuda
