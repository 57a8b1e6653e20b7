// How the ranks of a group connect over a carrier. open_carrier_channel takes what a backend is made with, and gives a
// carrier channel: one connection of these ranks through the carrier, with a queue for each channel of the group. A
// carrier does not say who holds it up, so the ranks meet over the bootstrap when it has ended (CarrierMeeting). A
// change here breaks which rank is blamed for a group that cannot be created, and S6 if a wait loses its deadline.
#pragma once

#include "core/make_backend.h"

namespace tw {

inline constexpr char kConnecting[] = "connecting a group over its carrier";

// Milliseconds from now to the deadline; at least 1.
int milliseconds_to(TimePoint deadline);

// The meeting of ranks that connect over a carrier. While each connects it looks for peers that are gone or have failed
// (over). When it has connected, or not, all meet, so that a rank that is missing is known by name.
class CarrierMeeting {
 public:
  // `tag`: that of the meeting, and of what is posted before it.
  CarrierMeeting(const BackendInit& init, uint64_t tag)
      : init_(init), tag_(tag), me_(init.members[static_cast<size_t>(init.context->me)]) {}

  // Whether what is waited for will not come.
  bool over() const;
  // Tells how it went on all ranks, with the bytes that each has to say: gone ranks are named first, then those that do
  // not answer, then what a rank has failed by. `mine`: twTimeout if this rank waited in vain.
  Status meet(const Status& mine, const std::string& bytes, std::vector<std::string>* all) const;

 private:
  const BackendInit& init_;
  uint64_t tag_;
  int me_;
};

// Opens this group's carrier channel. Collective; uses `tag` and the next. `ready`: what this rank could not do, which
// is returned and which the others hear of. `device`: -1 for host memory. A rank that is alone has none: -1.
Status open_carrier_channel(const BackendInit& init, uint64_t tag, int device, const Status& ready,
                            int64_t* carrier_channel);

}  // namespace tw
