// Staged transport by a carrier: its collectives move a step's blocks, behind the kernels on their stream.
//
// create() is collective. start() and join() only enqueue on the caller's stream; abort() may come from any thread.
//
// What breaks if this changes: S1 (the host names the bank) and S4 (the stream's order stands for the fence).
#pragma once

#include <atomic>

#include "cuda/transport/staged.h"

namespace tw::cuda {

class CarrierTransport final : public StagedTransport {
 public:
  // Makes the transport of a group. Collective; uses `tag`. `window` is this rank's. A failed `ready` is told to the
  // peers, and every rank fails.
  static Status create(const BackendInit& init, uint64_t tag, const Status& ready,
                       std::shared_ptr<DeviceMapping> window, std::unique_ptr<StagedTransport>* made);
  ~CarrierTransport() override;
  CarrierTransport(const CarrierTransport&) = delete;
  CarrierTransport& operator=(const CarrierTransport&) = delete;

  void place(StepPlace at, const WindowMap& map, GroupView* view) const override;
  Status make_arrivals(const BackendInit& init) override;
  const std::byte* receive_offset(StepPlace at) const override { return arrivals_at(at.channel); }

  Status begin(const GroupView&, const MovedStep&) override { return {}; }
  Status start(const GroupView& view, const MovedStep& step, const Blocks& blocks, bool at_once) override;
  Status join(const GroupView& view, const MovedStep& step, const Blocks& blocks) override;
  bool over_carrier() const override { return true; }
  // *grown becomes a map of room apart from the window.
  Status prepare_growth(const BackendInit& init, WindowMap* grown) override;
  void end_growth(bool grown, bool certain) override;
  int64_t carrier_channel() const override { return carrier_channel_; }
  void abort() override;

 private:
  explicit CarrierTransport(const BackendInit& init);
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
