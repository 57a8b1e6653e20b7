// What goes out over a carrier, where a group's devices do not reach each other's memory: kernels write a block for
// each rank into memory of their own device, laid out as a bank of a window is, and the carrier's collectives move the
// blocks into the windows, behind the kernels on their stream. Blocks of one step have one size, which follows from the
// call's bound and the group's rows, so the host need not know how many rows there are.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "core/backend.h"
#include "cuda/driver/driver.h"
#include "cuda/launch/group_view.h"
#include "cuda/transport/window.h"

namespace tw::cuda {

// A part of a bank that a step moves: from where in it, and bytes of a rank's block.
struct Region {
  uint64_t begin;
  uint64_t bytes;
};

class StagedTransport {
 public:
  // Collective; uses `tag`. `window`: of this rank.
  static Status create(const BackendInit& init, uint64_t tag, const Status& ready,
                       std::shared_ptr<DeviceMapping> window, std::unique_ptr<StagedTransport>* made);
  ~StagedTransport();
  StagedTransport(const StagedTransport&) = delete;
  StagedTransport& operator=(const StagedTransport&) = delete;

  // Where the kernels of a step write.
  void place(StepPlace at, GroupView* view) const;
  // Where rows of a dispatch land that are put together afterwards: high throughput alone.
  const std::byte* receive_offset(int lane) const { return bank_of(lane, 1); }

  // Begins to move words and regions of a step, into the window or, if they `land`, to receive_offset().
  Status start(StepPlace at, const std::vector<Region>& regions, bool land, bool at_once, void* stream);
  // What comes next on the stream comes behind that.
  Status join(int lane, void* stream);
  // Ends what is under way, in a moment; from any thread.
  void abort();

 private:
  explicit StagedTransport(const BackendInit& init);
  bool ended() const { return calls_.ended != nullptr && __atomic_load_n(calls_.ended, __ATOMIC_ACQUIRE) != 0; }
  std::byte* lane_at(int lane) const { return memory_ + lane_bytes_ * static_cast<uint64_t>(lane); }
  std::byte* bank_of(int lane, int which) const {
    return lane_at(lane) + signals_bytes_ + map_.bank_bytes() * static_cast<uint64_t>(which);
  }

  const WindowMap& map_;
  const twCarrier_t calls_;
  const int device_;
  int64_t channel_ = -1;
  std::shared_ptr<DeviceMapping> window_;
  std::byte* memory_ = nullptr;
  uint64_t signals_bytes_ = 0;
  uint64_t lane_bytes_ = 0;
  std::atomic<bool> aborted_ = false;
};

}  // namespace tw::cuda
