// The channels of an arena (lanes in the API): which handle holds which, and the step each has reached. Calls ask it
// for a free channel and for the place of their next step.
//
// S5: leasing is a function of the calls made so far and of nothing else, so ranks that make the same calls in the same
// order lease the same channels. S1 follows from the place that begin gives; begin_dispatch decides the bank of a view
// on devices. A rule that depends on timing or on who fails makes ranks wait for each other across channels. So does
// one that depends on how a lease has ended: a rank that was refused a dispatch may leave out the combine that its
// peers, on devices, make before they learn of it. A lease leaves its channel alike whether a combine ended it or not.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "exchange/signals.h"

struct twGroup;
struct twHandle;

namespace tw {

struct Channel {
  uint32_t step = 0;              // the last step that this rank began
  twHandle* holder = nullptr;     // from dispatch to combine
  bool draining = false;          // this rank refused its last step, and has not waited for the peers' signals of it
  uint32_t viewed = 0;            // the last step whose window the caller was shown
  int64_t request = 0;            // the gather or reduce that is sent and not finished; 0: none
  twGroup* requester = nullptr;   // whose that is
  bool second = false;            // the holder has dispatched an odd number of times on its lease
  bool odd = false;               // stands before kCombineBank, as far as all ranks see that alike
  std::optional<bool> odd_after;  // what `odd` is when the lease ends
  bool refused = false;         // the lease is of a dispatch that this rank was refused, and its peers do not know yet
  bool refused_before = false;  // it is of one that came behind that, by the same handle or in the place of its lease
};

// Where the first dispatch of a lease goes on a device, and the combine after it.
inline constexpr int kDispatchBank = 1, kCombineBank = 0;

class Channels {
 public:
  Channels(int count, uint32_t first_step) : channels_(count) {
    for (Channel& channel : channels_) {
      channel.step = first_step;
      channel.odd = bank_of(first_step + 1) == kCombineBank;
    }
  }

  int size() const { return static_cast<int>(channels_.size()); }
  Channel& operator[](int channel) { return channels_[channel]; }

  // Takes the next channel that nobody holds, round robin; -1 if there is none. `bank`: the step's, if it has one (else
  // -1): a channel that stands before it comes first, so that fewer dispatches have to skip. All ranks count the steps
  // of their calls alike (S5).
  int next_free(int bank) { return take(find(bank)); }
  // Lends a channel to a combine whose handle has released the one of its dispatch: that one, if nobody holds it, so
  // that no later dispatch there has to skip. Whose turn it is stays as it was, for ranks that leave the combine out.
  int lend(int of_dispatch) const {
    return channels_[of_dispatch].holder == nullptr ? of_dispatch : find(kCombineBank);
  }
  // The next channel, round robin, that is leased by a handle of a refused dispatch; -1 if there is none.
  int next_refused() const {
    for (int i = 0; i < size(); ++i) {
      const int channel = (cursor_ + i) % size();
      if (channels_[channel].refused) return channel;
    }
    return -1;
  }

  // Has a dispatch, or its refusal, lease a channel, and lends one to a combine.
  void lease(int channel) { channels_[channel].odd_after = false; }
  void borrow(int channel) { channels_[channel].odd_after = channels_[channel].odd; }
  // Makes a channel free again.
  void give_back(int channel) {
    Channel& state = channels_[channel];
    state.holder = nullptr;
    state.second = state.refused = state.refused_before = false;
    state.odd = state.odd_after.value_or(state.odd);
    state.odd_after.reset();
  }

  // Whether there is a step that this rank refused and has not waited for.
  bool drains() const {
    return std::any_of(channels_.begin(), channels_.end(), [](const Channel& channel) { return channel.draining; });
  }

  // Begins a step: S1 follows from the place. S2 is for the callers to keep: a handle with a step pending begins no
  // other, and a refused step is drained first.
  StepPlace begin(int channel) {
    channels_[channel].odd = !channels_[channel].odd;
    return {channel, ++channels_[channel].step};
  }

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
    state.odd = bank == kDispatchBank;
    return {channel, state.step};
  }

 private:
  int find(int bank) const {
    int any = -1;
    for (int i = 0; i < size(); ++i) {
      const int channel = (cursor_ + i) % size();
      if (channels_[channel].holder != nullptr) continue;
      if (bank < 0 || channels_[channel].odd == (bank == kCombineBank)) return channel;
      if (any < 0) any = channel;
    }
    return any;
  }
  int take(int channel) {
    if (channel >= 0) cursor_ = (channel + 1) % size();
    return channel;
  }

  std::vector<Channel> channels_;
  int cursor_ = 0;
};

}  // namespace tw
