// What outlives a kernel: pages of host memory over which kernels and hosts tell each other of errors and counts, and
// how far the channels of a device are.
//
// ControlPage is shared by all ranks' hosts and devices, possibly of different processes; ChannelState and DeviceState
// belong to one device. Fields that others poll are written last, behind a fence (`serial`, `stop`).
//
// What breaks if this changes: S2 (ChannelState::step and `arrived` decide which step comes next), S5 (work counters
// serve every fourth step), S6 (stop, abort, failure). All processes of a group must be built from one layout of
// ControlPage.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tokenway/tokenway.h"

namespace tw::cuda {

inline constexpr int kWorkCounters = 4;  // steps in a row that have counters of their own
inline constexpr int kMaxBlocks = 1024;

// An error as kernels report it, in mapped host memory. `serial` is written last.
struct Report {
  uint32_t serial;
  int32_t result;  // twResult_t
  int32_t peer;
  int32_t phase;
  int32_t channel;
  uint32_t step;
  uint32_t seen;
  uint32_t note;   // the peer's bound, if the bounds differ
  uint32_t bound;  // this rank's bound
  int32_t token;
  int32_t k;
  int64_t value;
  uint64_t group;  // whose call it was: the address of its GroupView::experts, which no other group has
};

// What the host learns of an exchange of counts, in mapped host memory, with the rows for each local expert behind it.
// `serial` is written last; it tells the exchanges of a handle apart.
struct CountsOnHost {
  uint64_t serial;
  int32_t overflow_rank;  // the first rank that would receive too many rows; -1: none
  int32_t failed;         // 1: the counts did not come
  int64_t overflow_rows;
  int64_t grouped_rows;
  int32_t received[TW_MAX_RANKS];  // rows from each rank, without those that are dropped

  // [L], those that are dropped too. For the host, which tells kernels where that is.
  int32_t* expert_rows() { return reinterpret_cast<int32_t*>(this + 1); }
  const int32_t* expert_rows() const { return reinterpret_cast<const int32_t*>(this + 1); }
  static size_t bytes(int32_t local_experts) {
    const size_t all = sizeof(CountsOnHost) + sizeof(int32_t) * static_cast<size_t>(local_experts);
    return (all + alignof(CountsOnHost) - 1) / alignof(CountsOnHost) * alignof(CountsOnHost);
  }
};

// How far a channel's steps over a staged transport are: low halves of their numbers. A collective that does not end
// says nothing, so the host watches these.
struct StagedChannel {
  // The last step whose blocks were written; in the high half the digest of what ranks must give alike to that call, 0
  // if it is not known. They are one word, so that the host never pairs a step with the digest of another: two words
  // made ranks in the same call look different to a host that was stopped between its loads.
  uint64_t sent;
  uint32_t waits;  // the last step whose end this rank has begun to wait for
  uint32_t ended;
  int32_t phase;      // phase of the step in `sent`
  uint32_t patience;  // milliseconds that the group of that step waits
};

// A rank's page of host memory, which the hosts and devices of all ranks map. Abort signals lie here, not in the
// window, so that hosts can read and write them without a device.
struct ControlPage {
  uint64_t abort[TW_MAX_RANKS];  // by writer: exchange/signals.h
  uint32_t stop;                 // something is wrong: kernels end their waits
  uint32_t posted;               // steps that this rank's device has posted, on all channels together (T9)
  StagedChannel staged[TW_MAX_LANES];
  Report failure;  // the error that finished the group, by this rank's kernels alone
  Report late;     // the same, by its host, where that watches
  Report call;     // an error that ended one call and left the group usable
  Report stopped;  // what a kernel waited for when it was told to stop
  Report bad_id;
};

// What the steps of one channel hand to each other, on their own device. Steps of a channel are stream-ordered (S5), so
// one kernel at a time uses this.
struct alignas(64) ChannelState {
  uint64_t step;                          // the last step that ended
  uint32_t arrived;                       // blocks that have read `step`, counted down from 0
  uint32_t sent;                          // blocks whose Simple rows are all sent
  uint32_t bad_step;                      // low half of the last step with a bad id, which is reported once
  uint32_t marked[kWorkCounters];         // by step: groups of tokens whose marks are there (device/routing.cuh)
  uint32_t work_counters[kWorkCounters];  // by step: work beyond what every warp begins with, drawn downwards; chunks
                                          // upwards
  uint32_t sums[kWorkCounters];  // by step: tiles of a bulk combine's sums beyond what every warp begins with, drawn
                                 // downwards
  uint32_t done[kMaxBlocks];     // by block: low half of the last step that it has finished
  uint64_t failed;               // the last part of a combine that failed: the parts behind it are no steps
};

struct DeviceState {
  uint32_t sticky;       // 1: the group is finished, and kernels write nothing to peers any more
  uint32_t reported;     // a failure has been reported
  uint32_t lock;         // held by who writes Report call
  uint32_t stopped;      // 1: what was waited for has been reported
  uint32_t bad_layouts;  // reports of bad ids of layouts: the step of such a report, which tells it from the one before
};

}  // namespace tw::cuda
