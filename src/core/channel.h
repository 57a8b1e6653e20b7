// How the ranks of a group connect over a carrier.
#pragma once

#include "core/backend.h"

namespace tw {

inline constexpr char kConnecting[] = "connecting a group over its carrier";

// Milliseconds from now on; at least 1.
int milliseconds_to(TimePoint deadline);

// Ranks that connect over a carrier, which says of nobody who holds it up. Each looks for peers that are gone, or have
// failed; and when it has connected, or not, all meet, so that who is missing there is known by name.
class ChannelMeeting {
 public:
  // `tag`: of the meeting, and of what is posted before.
  ChannelMeeting(const BackendInit& init, uint64_t tag)
      : init_(init), tag_(tag), me_(init.members[static_cast<size_t>(init.context->me)]) {}

  // Whether what is waited for will not come.
  bool over() const;
  // How it went on all ranks, with what each has to say: gone ranks are named first, then those that do not answer,
  // then what a rank has failed by. `mine`: twTimeout if this rank waited in vain.
  Status meet(const Status& mine, const std::string& bytes, std::vector<std::string>* all) const;

 private:
  const BackendInit& init_;
  uint64_t tag_;
  int me_;
};

// Opens this group's channel, with a queue for each lane. Collective, uses `tag` and the next. `ready`: what this rank
// could not do, which the others hear of and which comes back. `device`: -1 for host memory. One rank alone has no
// channel: -1.
Status open_channel(const BackendInit& init, uint64_t tag, int device, const Status& ready, int64_t* channel);

}  // namespace tw
