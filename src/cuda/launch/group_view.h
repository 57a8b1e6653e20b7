// A group and a handle as kernels see them: plain structs that are passed by value and hold device pointers.
//
// GroupView is filled once at creation (host/), its staged part anew for each step; HandleView follows from the
// handle's shape. Kernels read GroupView and write through it; none of it is owned here.
//
// What breaks if this changes: `map` decides where everything lies in a window and must be alike on all ranks (S10);
// near_windows and the order of fields are speed alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include "cuda/launch/blocks.h"
#include "cuda/launch/expert_tables.h"
#include "cuda/launch/state.h"
#include "exchange/routing.h"
#include "layout/posts_map.h"
#include "layout/window_map.h"

namespace tw::cuda {

// All that a kernel needs to know of its group.
struct GroupView {
  WindowMap map;
  int32_t me;
  int32_t local_experts;
  int32_t packet_tokens;  // packet bound; 0: packets are not in use
  int32_t no_wait;
  int32_t by_shares;               // 1: physical experts are chosen by their shares
  int32_t note_bits;               // exchange/notes.h
  const uint32_t* experts;         // [E] pack_expert; in a group with a placement [P], by physical expert
  std::byte* near_windows[kNear];  // windows of the first ranks: a kernel has its parameters before it can load
  std::byte* const* windows;       // [N]
  ControlPage* const* pages;       // [N]
  // The next two are for a staged transport, else NULL. `out`: the memory for what goes out, with a block for each rank
  // in place of its window. It is given as the address at which a window would begin whose bank of this step is that
  // memory; where blocks are posted, whose two banks are. `out_signals`: this rank's signals, [N], and behind them, at
  // outgoing_loads, what it tells of loads; where blocks are posted, those of bank 0.
  std::byte* out;
  std::byte* out_signals;
  int32_t waits;  // 1: the wait for the end of the step follows at once
  int32_t posts;  // bytes from one bank's out_signals to the next, where blocks are posted; 0: a carrier moves them
  DeviceState* state;
  ChannelState* channels;
  uint32_t* marks;  // [channels, mark_words] which tokens of each 32 go to each rank (device/routing.cuh)
  uint64_t timeout_ns;
  LoadsView loads;
};

// Gives how many words of marks a channel has, [groups of tokens, N]. It is 0 if there is one round alone, whose marks
// stay in the block that makes them. Exact layouts keep theirs in handles. (The shape of a group of both modes and that
// of its low-latency calls give the same.)
constexpr int64_t mark_words(const Shape& shape) {
  const int32_t tokens = shape.exact() ? shape.low_latency_tokens : shape.max_tokens;
  return tokens > kRound ? int64_t{(tokens + kGroup - 1) / kGroup} * shape.ranks : 0;
}

// A handle's arrays. The destinations of token t begin at t * fan_out(); rows of metadata lie as slots do, [N, b].
struct HandleView {
  int32_t* ids;
  float* weights;
  int32_t* fan;  // [T]
  Destination* destinations;
  int32_t* send_counts;  // [N] rows that go to each rank; in exact layouts this rank's row of sent_rows
  int32_t* counts;
  uint64_t* meta;
  ExpertRow* places;
  int32_t* expert_counts;
  int32_t* status;
  int32_t* choices;  // [E] how often its tokens choose each expert, in a group that counts
  uint32_t* digest;  // digest of the map from which the physical experts in `ids` come
  // The rest serves high throughput alone: exchange/counts.h.
  int32_t* sent_rows;        // [N, N]
  int32_t* experts;          // [L]
  int64_t* begin;            // [N]
  int64_t* source;           // [N + 1]
  int64_t* expert_begin;     // [L + 1]
  int32_t* offsets;          // [L + 1]
  int32_t* overflow;         // 1: a rank would receive too many rows, and none goes to any
  GroupMarks* marks;         // [groups, N]; NULL: a dispatch makes its own
  uint32_t* metadata_step;   // low half of the step that brought the rows' metadata; 0: none has. NULL: every dispatch
                             // brings it
  uint64_t* receive_offset;  // [N, payloads], as in Counts
};

// How received ids are shown to the caller; NULL: not wanted.
struct Shown {
  void* ids;
  float* weights;
  int32_t* counts;  // [N]
  int32_t wide;
  int32_t local;
  int32_t invalid;
};

}  // namespace tw::cuda
