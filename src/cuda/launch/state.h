// What outlives a kernel: pages of host memory by which kernels and hosts tell each other of errors and counts, and how
// far a device's lanes are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tokenway/tokenway.h"

namespace tw::cuda {

inline constexpr int kWorkCounters = 4;  // steps that have counters of their own
inline constexpr int kMaxBlocks = 1024;

// An error as kernels report it; host memory, mapped. The serial is written last.
struct Report {
  uint32_t serial;
  int32_t result;  // twResult_t
  int32_t peer;
  int32_t phase;
  int32_t lane;
  uint32_t step;
  uint32_t seen;
  uint32_t note;   // of a bound mismatch: the peer's bound
  uint32_t bound;  // and this rank's
  int32_t token;
  int32_t k;
  int64_t value;
};

// What the host learns of an exchange of counts; host memory, mapped. The serial is written last, and tells exchanges
// of a handle apart.
struct CountsOnHost {
  uint64_t serial;
  int32_t overflow_rank;  // the first rank that would receive too many rows; -1: none
  int32_t failed;         // 1: they did not come
  int64_t overflow_rows;
  int64_t grouped_rows;
  int32_t received[TW_MAX_RANKS];  // from each rank, what is dropped left out
};

// How far a lane's steps over a carrier are, low halves of their numbers. A collective that does not end says nothing,
// so the host watches these.
struct CarriedLane {
  uint32_t sent;   // the last step that was laid out to go
  uint32_t waits;  // the last whose end this rank has begun to wait for
  uint32_t ended;
  int32_t phase;  // of the one that was sent
  uint32_t call;  // a digest of what ranks must give alike to it; 0: not known
};

// A page of host memory per rank that all ranks' hosts and devices map. Abort words lie here, not in the window, so
// that hosts can read and write them without a device.
struct ControlPage {
  uint64_t abort[TW_MAX_RANKS];  // by writer: exchange/signals.h
  uint32_t stop;                 // something is wrong: kernels end their waits
  uint32_t pad;
  CarriedLane carried[TW_MAX_LANES];
  Report failure;  // sticky, by this rank's kernels alone
  Report late;     // likewise, by its host, where it watches
  Report call;     // of one call
  Report stopped;  // what a kernel waited for when it was told to stop
  Report bad_id;
};

// Of one lane, on its own device: what its steps hand to each other. Steps of a lane are stream-ordered (S5), so one
// kernel at a time uses this.
struct alignas(64) LaneState {
  uint64_t step;                   // of the last step that ended
  uint32_t arrived;                // blocks that have read `step`, counted down from 0
  uint32_t sent;                   // blocks whose rows are all sent, but for packets
  uint32_t bad_step;               // low half of the last step with a bad id, which is reported once
  uint32_t dispatches;             // of a group that counts: those that ended, refused ones too
  uint32_t marked[kWorkCounters];  // by step: groups of tokens whose marks are there (device/routing.cuh)
  uint32_t
      work_counters[kWorkCounters];  // by step: work beyond what everybody begins with, drawn downwards; chunks upwards
  uint32_t sums[kWorkCounters];      // by step: tiles of a bulk combine's sums beyond those, drawn downwards
  uint32_t done[kMaxBlocks];         // by block: low half of the last step that it has finished
};

struct DeviceState {
  uint32_t sticky;    // the group is finished: kernels write nothing to peers any more
  uint32_t reported;  // a failure has been reported
  uint32_t lock;      // around Report call
  uint32_t stopped;   // what was waited for has been reported
};

}  // namespace tw::cuda
