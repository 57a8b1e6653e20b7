// PostsMap: where blocks lie that a rank posts to devices of other hosts, and where rows of exact layouts arrive,
// beside its window. It takes a window's map and gives bytes and offsets, once for the host and for how much memory a
// group needs.
//
//   outgoing, for each channel: bank 0, bank 1, as far from each other as the window's; then, for each bank, the
//   signals
//             of this rank for all ranks, a line each, and what it tells of loads
//   arrivals, for each channel: bank 0, bank 1
//
// All of it follows from what all ranks have alike (S10): a rank's block is looked for where its peer puts it.
#pragma once

#include <cstdint>

#include "layout/window_map.h"

namespace tw {

// Gives where a rank's outgoing load statistics begin behind its outgoing signals, over staged transport between
// devices: words of exchange/loads.h for each rank, [N, loads_words].
constexpr uint64_t outgoing_loads(int ranks) {
  const uint64_t signals = kSignalStride * static_cast<uint64_t>(ranks);
  return (signals + kPageAlignment - 1) / kPageAlignment * kPageAlignment;
}

struct PostsMap {
  uint64_t channels = 0;
  uint64_t stride = 0;   // from bank to bank of what goes out
  uint64_t told = 0;     // bytes of a bank's signals and load statistics
  uint64_t arrival = 0;  // bytes of a bank of arrivals
  bool exact = false;

  // room: bytes of load statistics that there is room for, of all groups that a window may have.
  static constexpr PostsMap make(const WindowMap& map, uint64_t room) {
    PostsMap made;
    made.channels = static_cast<uint64_t>(map.shape().channels);
    made.stride = stride_of(map);
    made.told = outgoing_loads(map.shape().ranks) + (room + kPageAlignment - 1) / kPageAlignment * kPageAlignment;
    made.arrival = map.bank_bytes();
    made.exact = map.shape().exact();
    return made;
  }
  static constexpr uint64_t stride_of(const WindowMap& map) { return map.bank(0, 1) - map.bank(0, 0); }

  constexpr uint64_t channel() const { return 2 * (stride + told); }
  constexpr uint64_t outgoing_bytes() const { return channels * channel(); }
  constexpr uint64_t arrival_bytes() const { return channels * 2 * arrival; }
  // What a group needs beside its window.
  constexpr uint64_t bytes() const { return outgoing_bytes() + (exact ? arrival_bytes() : 0); }

  constexpr uint64_t banks_at(int at) const { return channel() * static_cast<uint64_t>(at); }
  // Where banks of a group's map begin, the channel's own or a smaller one of before growth. Those of the smaller lie
  // against each other in the middle: each within the larger bank of the same number, and so free when that is (T3).
  constexpr uint64_t banks_at(int at, const WindowMap& map) const { return banks_at(at) + stride - stride_of(map); }
  constexpr uint64_t told_at(int at) const { return banks_at(at) + 2 * stride; }
  constexpr uint64_t arrivals_at(int at) const { return 2 * arrival * static_cast<uint64_t>(at); }
};

}  // namespace tw
