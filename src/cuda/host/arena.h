// What the groups of an arena (core/arena.h) have in common on a device: how far each channel's steps are, whether all
// is over, the control pages, and the staged transport.
//
// Takes windows and control pages of the group that makes the window; fills the pointers of the GroupView of each
// group. Made once, and kept by whichever group ends last.
//
// What breaks if this changes: S2 and S5: ChannelState must begin at the first step value and all counters at 0, and
// there is one for each channel, whichever group makes its steps. The order of destruction matters: the watching thread
// uses the states and the transport, kernels the pages.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/driver/driver.h"
#include "cuda/host/control.h"
#include "cuda/launch/group_view.h"
#include "cuda/transport/staged.h"

namespace tw::cuda {

class DeviceArena {
 public:
  ~DeviceArena();

  // Makes the states, and begins to look after the peers; `control` and `staged` are set before.
  Status make(const Context& context, const std::vector<std::byte*>& windows);
  // Fills the pointers of a group's view that are the arena's.
  void fill(GroupView* view) const;

  // Runs something on the arena's stream with a counter that is 0, waits for it and gives what it counted.
  Status with_counter(uint32_t* count, const std::function<Status(uint32_t*, cudaStream_t)>& run);

  // Makes every kernel that starts from now on do nothing. May be called from any thread.
  void stop_kernels();

  // Give what kernels have reported of the calls of one group, which `view` is, and forget it. What they have reported
  // of another group waits for that.
  bool next_call(const GroupView& view, Report* report) {
    while (control->next_call(report)) calls_[report->group] = *report;
    return take(calls_, view, report);
  }
  bool next_bad_id(const GroupView& view, Report* report) {
    while (control->next_bad_id(report)) bad_ids_[report->group] = *report;
    return take(bad_ids_, view, report);
  }

  // Forgets all reports of a group that ends, whose kernels have ended.
  void forget(const GroupView& view) {
    Report none;
    const std::lock_guard lock(reports);
    (void)next_call(view, &none);
    (void)next_bad_id(view, &none);
  }

  std::unique_ptr<Control> control;
  std::unique_ptr<StagedTransport> staged;  // NULL: devices write into each other's windows
  bool packets = false;                     // every pair of ranks has seen that packets arrive whole
  std::mutex reports;                       // held to take reports, which calls do, and whoever asks for an error

 private:
  using Reports = std::map<uint64_t, Report>;
  static bool take(Reports& from, const GroupView& view, Report* report);

  cudaStream_t stream_ = nullptr;
  std::byte* memory_ = nullptr;
  uint32_t* counter_ = nullptr;
  GroupView shared_{};  // with the arena's pointers alone
  Reports calls_;       // by Report::group
  Reports bad_ids_;
};

}  // namespace tw::cuda
