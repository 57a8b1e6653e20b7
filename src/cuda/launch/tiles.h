// How a call's rows are shared out to blocks and warps: decided on the host (plan/), carried out by kernels.
#pragma once

#include <cstdint>
#include <type_traits>
#include "cuda/launch/blocks.h"
#include "layout/window_map.h"

namespace tw::cuda {

// x / d for x < 2^31, without a division. Granlund and Montgomery, "Division by invariant integers using
// multiplication", PLDI 1994.
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

// How rows are shared out: a tile is a warp's, some groups of four packets of a row, or as large a part of the row as
// it lies.
struct Tiles {
  Divider per_row;
  uint32_t tile_groups;   // groups of packets in a tile, the last of a row excepted
  uint32_t groups;        // of a row
  uint32_t words;         // of a row as a stream
  uint32_t packet_bytes;  // of a row's packets
};

// The first rows in wider tiles, of several of the others each. Where few SMs work all rows that are no packets: there,
// what a tile costs beside its bytes counts. (Where all SMs do, a tile that comes late does: a combine of 4096
// tokens took twice as long.) Else those that warps of a dispatch begin with; of rows alone all but the last
// (plan/tiles.h).
struct WideTiles {
  Divider per_row;
  uint32_t parts;  // of the others in one
  uint32_t rows;   // that are shared out so

  constexpr uint32_t tiles() const { return rows * per_row.divisor; }
};

// WindowMap::packet of a lane, without what a kernel need not compute.
struct PacketsAt {
  uint64_t bank[2];
  uint64_t source;  // bytes from one source's packets to the next
  uint32_t row;     // and from one slot's

  static PacketsAt make(const WindowMap& map, int lane) {
    return {{map.packet(lane, 0, 0, 0), map.packet(lane, 1, 0, 0)},
            map.packet_row() * static_cast<uint64_t>(map.shape().packet_tokens),
            static_cast<uint32_t>(map.packet_row())};
  }
};

// A grid's work: the first blocks send, the others receive or sum. What an SM loads waits behind what it has stored to
// a link that is full: sums took three times as long where all SMs sent. A grid that is not apart does both in every
// block, sending first (S7), or only one of the two.
struct Roles {
  int32_t apart;
  int32_t sending;  // blocks
  int32_t receiving;

  static constexpr Roles two(int sending, int receiving) { return {1, sending, receiving}; }
  static constexpr Roles one(int blocks) { return {0, blocks, blocks}; }
  constexpr int grid() const { return apart != 0 ? sending + receiving : sending; }
};

// Each kind of call has a kernel: instructions that a kernel meets for the first time take five to ten cycles each, so
// what other calls need may not stand between.
//
// Usual: of a dispatch, up to two payloads, of 16 bytes at a time; up to 8 ids, which lie as whole vectors of 16 bytes;
// up to 32 ranks; a table of experts in shared memory. Of a combine, rows of the wire's type, 16 bytes at a time, as
// they are; sums of that type; own rows where the caller has them.
//
// LowSm: usual, by up to a quarter of the device's SMs (plan/budget.h, low_sm). Tiles are whole rows, or large parts:
// what a warp does beside moving one is done while something of it is on its way.
//
// Packets: usual, with a bound of up to two rounds of tokens, and up to 32 ranks; so all that is sent or received are
// packets. Of a combine also rows by expert, whose sums are made on the way.
enum class Kind : int32_t { kGeneric, kUsual, kLowSm, kPackets };
// Those that a bulk kernel is made for; `use(std::integral_constant<Kind, ...>)`: of one of them.
inline constexpr Kind kBulkKinds[] = {Kind::kGeneric, Kind::kUsual, Kind::kLowSm};
template <class Use>
int with_kind(Kind kind, Use&& use) {
  if (kind == Kind::kLowSm) return use(std::integral_constant<Kind, Kind::kLowSm>{});
  if (kind == Kind::kUsual) return use(std::integral_constant<Kind, Kind::kUsual>{});
  return use(std::integral_constant<Kind, Kind::kGeneric>{});
}

}  // namespace tw::cuda
