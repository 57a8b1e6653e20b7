// The staged transport: how a step's rows move where a group's devices do not reach each other's memory. Kernels write
// a block for each rank into memory of their own device, laid out as a bank of a window is, and the carrier's
// collectives move the blocks into the windows, behind the kernels on their stream.
//
// Takes a step's place and the parts of its bank that hold something; gives a window in which they lie when what join()
// has put on the stream is done. Blocks of one step have one size, which follows from the call's bound and the group's
// rows, so the host need not know how many rows there are.
//
// What breaks if this changes: S1 (the host names the bank) and S4 (the stream's order stands for the fence).
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "core/backend.h"
#include "cuda/driver/driver.h"
#include "cuda/launch/group_view.h"
#include "cuda/transport/window.h"

namespace tw::cuda {

// A part of a bank that a step moves: its offset in the bank, and the bytes of one rank's block.
struct Region {
  uint64_t begin;
  uint64_t bytes;
};

// What the moves of a step bring: regions of its bank or, if they `land`, of where rows arrive that are put together
// afterwards; and load statistics, a block for each rank to where `loads` begins in the window.
struct Blocks {
  std::vector<Region> regions;
  bool land = false;
  Region loads{};
};

class StagedTransport {
 public:
  // Makes the transport of a group. Collective; uses `tag`. `window` is this rank's. A failed `ready` is told to the
  // peers, and every rank fails.
  static Status create(const BackendInit& init, uint64_t tag, const Status& ready,
                       std::shared_ptr<DeviceMapping> window, std::unique_ptr<StagedTransport>* made);
  ~StagedTransport();
  StagedTransport(const StagedTransport&) = delete;
  StagedTransport& operator=(const StagedTransport&) = delete;

  // Tells the kernels of a step where to write: sets view->out and view->out_signals.
  // `map`: that of the step's rows.
  void place(StepPlace at, const WindowMap& map, GroupView* view) const;
  // Makes memory for receive_offset(), for a group in high throughput; if there is some, nothing.
  Status make_arrivals();
  // Where rows of a dispatch arrive that are put together afterwards, in high throughput alone.
  const std::byte* receive_offset(int channel) const { return arrivals_at(channel); }

  // Begins to move the signals and the blocks of a step, into the bank at that offset of the window or, if they `land`,
  // to receive_offset().
  Status start(StepPlace at, uint64_t bank, const Blocks& blocks, bool at_once, void* stream);
  // Makes whatever comes next on the stream follow that move.
  Status join(int channel, void* stream);
  // Makes memory for what goes out by a larger map, and room for what comes in by it, apart from the window: *grown
  // becomes a map of there. What graphs and moves of before use stays until the group ends. end_growth: see Backend.
  Status prepare_growth(const BackendInit& init, WindowMap* grown);
  void end_growth(bool grown);
  // What the carrier has given for these ranks; -1: one rank alone.
  int64_t carrier_channel() const { return carrier_channel_; }
  // Ends the moves that are under way, soon; may be called from any thread.
  void abort();

 private:
  explicit StagedTransport(const BackendInit& init);
  uint64_t channel_bytes_of(const WindowMap& map) const { return bank_at_ + map.bank_bytes(); }
  bool ended() const { return calls_.ended != nullptr && __atomic_load_n(calls_.ended, __ATOMIC_ACQUIRE) != 0; }
  std::byte* channel_at(int channel) const { return memory_ + channel_bytes_ * static_cast<uint64_t>(channel); }
  std::byte* loads_of(int channel) const { return channel_at(channel) + outgoing_loads(map_.shape().ranks); }
  std::byte* bank_of(int channel) const { return channel_at(channel) + bank_at_; }
  std::byte* arrivals_at(int channel) const { return arrivals_ + map_.bank_bytes() * static_cast<uint64_t>(channel); }

  WindowMap map_;  // the arena's: its groups may end before this does
  WindowMap next_map_;
  const twCarrier_t calls_;
  const int device_;
  int64_t carrier_channel_ = -1;
  std::shared_ptr<DeviceMapping> window_;
  std::byte* memory_ = nullptr;
  std::byte* arrivals_ = nullptr;   // NULL: no group has needed it yet
  std::vector<std::byte*> former_;  // such memory of smaller maps
  std::byte* next_memory_ = nullptr;
  std::byte* next_arrivals_ = nullptr;
  std::shared_ptr<DeviceMapping> next_region_;
  uint64_t bank_at_ = 0;  // in a channel, behind signals and load statistics
  uint64_t channel_bytes_ = 0;
  std::atomic<bool> aborted_ = false;
};

}  // namespace tw::cuda
