// Which rows of a combine's inbox lie in a message (cpu/host_message.h) instead of at their places in the window: sums
// read those there, in the memory of the rail peer, and save a copy. The message stays as it is until this rank
// publishes its next step on the channel, as a row in the window would (T2, T3).
//
// It has to do with one step, of one channel and bank: each step begins it anew, also one that brings no partials.
//
// What breaks if this changes: a place that still has the row of an earlier step gives that one to a sum; a row that is
// taken and not found is nowhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "layout/window_map.h"

namespace tw::cpu {

class RowsInPlace {
 public:
  // Begins a combine with that map, in that bank: no row is known yet, and those of its inbox may be taken.
  void begin(const WindowMap& map, int channel, int bank) {
    const Shape& shape = map.shape();
    inbox_ = map.inbox(channel, bank, 0, 0);
    row_bytes_ = shape.combine_bytes;
    rows_.assign(static_cast<size_t>(shape.part_tokens()) * static_cast<size_t>(shape.returning()), nullptr);
  }
  // Begins a step of another kind, whose rows all go to their places.
  void end() { rows_.clear(); }

  // Takes the whole rows with which n bytes for that offset of the window begin, and gives how many bytes these are.
  // What is behind them is no row of the inbox: a value of a choice may follow.
  uint64_t take(uint64_t offset, const std::byte* data, uint64_t n) {
    if (rows_.empty() || offset < inbox_ || (offset - inbox_) % row_bytes_ != 0) return 0;
    uint64_t taken = 0;
    for (uint64_t place = place_of(offset); place < rows_.size() && n - taken >= row_bytes_; ++place) {
      rows_[place] = data + taken;
      taken += row_bytes_;
    }
    return taken;
  }

  // The row whose place is that offset of the window; NULL if it lies there.
  const std::byte* find(uint64_t offset) const {
    const uint64_t place = rows_.empty() ? 0 : place_of(offset);
    return place < rows_.size() ? rows_[place] : nullptr;
  }

 private:
  uint64_t place_of(uint64_t offset) const { return (offset - inbox_) / row_bytes_; }

  uint64_t inbox_ = 0;  // where the first place is in the window
  uint64_t row_bytes_ = 1;
  std::vector<const std::byte*> rows_;  // by place
};

}  // namespace tw::cpu
