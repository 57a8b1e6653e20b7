// The channels of an arena (lanes in the API): which handle holds which, and the step each has reached. Calls ask it
// for a free channel and for the place of their next step.
//
// S5: leasing is a function of the calls made so far and of nothing else, so ranks that make the same calls in the same
// order lease the same channels. S1 follows from the place that begin gives; begin_dispatch decides the bank of a view
// on devices. A rule that depends on timing or on who fails makes ranks wait for each other across channels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "exchange/signals.h"

struct twGroup;
struct twHandle;

namespace tw {

struct Channel {
  uint32_t step = 0;                 // the last step that this rank began
  const twHandle* holder = nullptr;  // from dispatch to combine
  bool draining = false;             // this rank refused its last step, and has not waited for the peers' signals of it
  uint32_t viewed = 0;               // the last step whose window the caller was shown
  int64_t request = 0;               // the gather or reduce that is sent and not finished; 0: none
  twGroup* requester = nullptr;      // whose that is
  bool second = false;               // the holder has dispatched an odd number of times on its lease
};

// Where the first dispatch of a lease goes on a device, and the combine after it.
inline constexpr int kDispatchBank = 1, kCombineBank = 0;

class Channels {
 public:
  Channels(int count, uint32_t first_step) : channels_(count) {
    for (Channel& channel : channels_) channel.step = first_step;
  }

  int size() const { return static_cast<int>(channels_.size()); }
  Channel& operator[](int channel) { return channels_[channel]; }

  // Takes the next channel that nobody holds, round robin; -1 if there is none. `bank`: the step's, if it has one (else
  // -1): a channel that stands before it comes first. So a combine whose handle has released its lane follows the
  // dispatch there, and no later dispatch has to skip. All ranks count the steps of their calls alike (S5).
  int next_free(int bank) {
    int any = -1;
    for (int i = 0; i < size(); ++i) {
      const int channel = (cursor_ + i) % size();
      if (channels_[channel].holder != nullptr) continue;
      if (bank < 0 || bank_of(channels_[channel].step + 1) == bank) return take(channel);
      if (any < 0) any = channel;
    }
    return any < 0 ? -1 : take(any);
  }

  // Makes a channel free again.
  void give_back(int channel) {
    channels_[channel].holder = nullptr;
    channels_[channel].second = false;
  }

  // Whether there is a step that this rank refused and has not waited for.
  bool drains() const {
    return std::any_of(channels_.begin(), channels_.end(), [](const Channel& channel) { return channel.draining; });
  }

  // Begins a step: S1 follows from the place. S2 is for the callers to keep: a handle with a step pending begins no
  // other, and a refused step is drained first.
  StepPlace begin(int channel) { return {channel, ++channels_[channel].step}; }

  // Begins a dispatch on a device. Steps are counted there, and graphs replay them unseen. The host must know a
  // dispatch's bank alone, for views: the first of a lease goes to bank 1, where it is anyway after pairs of dispatch
  // and combine, the next to bank 0 and so on. The device skips a step where its counter stands elsewhere
  // (docs/PROTOCOL.md, «Views»). The step given here only tells uses of the channel apart.
  StepPlace begin_dispatch(int channel) {
    const StepPlace at = begin_refusal(channel);
    channels_[channel].second = !channels_[channel].second;
    return at;
  }
  // Begins that step without the dispatch: for a refusal, or a gather that is seen in the window.
  StepPlace begin_refusal(int channel) {
    Channel& state = channels_[channel];
    const int bank = state.second ? kCombineBank : kDispatchBank;
    state.step += bank_of(state.step + 1) == bank ? 1 : 2;
    return {channel, state.step};
  }

 private:
  int take(int channel) {
    cursor_ = (channel + 1) % size();
    return channel;
  }

  std::vector<Channel> channels_;
  int cursor_ = 0;
};

}  // namespace tw
