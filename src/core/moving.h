// Maps that move: the epochs of a group whose layers get new maps while steps run (tokenway/moving.h). It keeps what
// this rank has staged, what it tells its peers and which of two maps a routing of a version goes by; the version
// itself comes of the words of all ranks (exchange/epochs.h), which a backend takes.
//
// What breaks if this changes: a layer has one open epoch at a time (M1) and two maps (M5). One that is staged while a
// lane of this rank still chooses by the map before the last would take that lane's map away.
#pragma once

#include <optional>
#include <vector>

#include "core/placement.h"
#include "core/status.h"
#include "exchange/epochs.h"

struct twGroup;
struct twHandle;

namespace tw {

class Moving {
 public:
  // An epoch of a layer that is not decided on all lanes of this rank.
  struct Open {
    uint32_t epoch;
    ExpertMap map;
    std::vector<int32_t> slot_expert;  // [P]
    std::vector<float> slot_shares;    // [P], or empty
  };

  explicit Moving(int32_t layers) : open_(static_cast<size_t>(layers)) {}

  uint32_t staged() const { return staged_; }
  uint32_t ready() const { return ready_; }
  const std::optional<Open>& open(int32_t layer) const { return open_[static_cast<size_t>(layer)]; }
  std::vector<std::optional<Open>>& all() { return open_; }

  // Opens the next epoch, for a layer that has none open.
  void stage(int32_t layer, Open open);
  // Takes epochs up to this one as ready, and gives what is to be told (ready_word).
  uint32_t make_ready(uint32_t epoch, bool failed);

 private:
  uint32_t staged_ = 0;
  uint32_t ready_ = 0;
  uint32_t voids_ = 0;                     // bit i: ready_ - i has failed here
  std::vector<std::optional<Open>> open_;  // [layers]
};

// Takes epochs that are decided on all lanes: their layers have one map again. Gives the least version of the lanes of
// this rank, which it went by (a device may have another one a moment later), and that of each, [channels]; NULL: not
// wanted.
Status close_epochs(twGroup& group, MapVersion* agreed = nullptr, uint32_t* versions = nullptr);
// The least version that a handle of the group may have which is not destroyed, if it is before `agreed`.
uint32_t oldest_of(const twGroup& group, uint32_t agreed);
// Gives a routing its slots, in the first step of it on a channel, before anything of it is sent (M3).
void bind_routing(twGroup& group, twHandle& handle, int channel, const void* stream);

}  // namespace tw
