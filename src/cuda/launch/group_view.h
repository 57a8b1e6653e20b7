// A group and a handle as kernels see them.
#pragma once

#include <cstddef>
#include <cstdint>
#include "cuda/launch/blocks.h"
#include "cuda/launch/expert_tables.h"
#include "cuda/launch/state.h"
#include "exchange/routing.h"
#include "layout/window_map.h"

namespace tw::cuda {

// Everything about a group, for a kernel.
struct GroupView {
  WindowMap map;
  int32_t me;
  int32_t local_experts;
  int32_t packet_tokens;  // 0: packets are not in use
  int32_t no_wait;
  int32_t by_shares;               // slots are chosen by their shares
  int32_t note_bits;               // exchange/notes.h
  const uint32_t* experts;         // [E] pack_expert; of a group with a placement its slots, [P]
  std::byte* near_windows[kNear];  // of the first ranks: a kernel has its parameters before it can load anything
  std::byte* const* windows;       // [N]
  ControlPage* const* pages;       // [N]
  // Over a carrier, else NULL: what goes out to all ranks, a block for each, instead of their windows. As the bank of
  // the step in a window would begin, that of a window's beginning; and this rank's words, [N].
  std::byte* out;
  std::byte* out_signals;
  int32_t waits;  // the end of the step follows at once
  DeviceState* state;
  LaneState* lanes;
  uint32_t* marks;  // [lanes, mark_words] which tokens of each 32 go to each rank (device/routing.cuh)
  uint64_t timeout_ns;
  LoadsView loads;
};

// [groups of tokens, N] of a lane; the first round's stay where they are made. Of an exact layout handles have them.
constexpr int64_t mark_words(const Shape& shape) {
  const bool later = shape.max_tokens > kRound && !shape.exact();
  return later ? int64_t{(shape.max_tokens + kGroup - 1) / kGroup} * shape.ranks : 0;
}

// A handle's arrays. Destinations of token t begin at t * fan_out(); meta rows lie as slots do, [N, b].
struct HandleView {
  int32_t* ids;
  float* weights;
  int32_t* fan;  // [T]
  Destination* destinations;
  int32_t* send_counts;
  int32_t* counts;
  uint64_t* meta;
  ExpertRow* places;
  int32_t* expert_counts;
  int32_t* status;
  int32_t* choices;  // [E] of its tokens, of a group that counts
  uint32_t* digest;  // of the map that the slots in `ids` are from
  // High throughput alone: exchange/counts.h.
  int32_t* sent_rows;        // [N, N]
  int32_t* experts;          // [L]
  int64_t* begin;            // [N]
  int64_t* source;           // [N + 1]
  int64_t* expert_begin;     // [L + 1]
  int32_t* offsets;          // [L + 1]
  int32_t* overflow;         // 1: a rank would receive too many rows, and none goes to any
  GroupMarks* marks;         // [groups, N]; NULL: a dispatch makes its own
  uint32_t* metadata_step;   // low half of the step that brought what travels beside rows; 0: none. NULL: each
                             // brings it
  uint64_t* receive_offset;  // [N, payloads] as of Counts
};

// How received ids are shown; NULL: not wanted.
struct Shown {
  void* ids;
  float* weights;
  int32_t* counts;  // [N]
  int32_t wide;
  int32_t local;
  int32_t invalid;
};

}  // namespace tw::cuda
