// Lanes of a group: which handle holds which, and the step each has reached.
//
// S5: leasing is a function of the calls made so far and of nothing else, so ranks that make the same calls in the same
// order lease the same lanes.
#pragma once

#include <cstdint>
#include <vector>

#include "exchange/words.h"

struct twHandle;

namespace tw {

struct Lane {
  uint32_t step = 0;                 // of the last step that this rank began
  const twHandle* holder = nullptr;  // from dispatch to combine
  bool draining = false;             // this rank refused its last step, and has not waited for the peers' words of it
};

class Lanes {
 public:
  Lanes(int count, uint32_t first_step) : lanes_(count) {
    for (Lane& lane : lanes_) lane.step = first_step;
  }

  int size() const { return static_cast<int>(lanes_.size()); }
  Lane& operator[](int lane) { return lanes_[lane]; }

  // The next lane that nobody holds, round robin; -1 if there is none.
  int next_free() {
    for (int i = 0; i < size(); ++i) {
      const int lane = (cursor_ + i) % size();
      if (lanes_[lane].holder != nullptr) continue;
      cursor_ = (lane + 1) % size();
      return lane;
    }
    return -1;
  }

  // Begins a step: S1 follows from the place. S2 is the callers': a handle with a step pending begins no other, and a
  // refused step is drained first.
  StepPlace begin(int lane) { return {lane, ++lanes_[lane].step}; }

 private:
  std::vector<Lane> lanes_;
  int cursor_ = 0;
};

}  // namespace tw
