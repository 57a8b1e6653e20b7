// How the ranks of a group connect over a carrier.
#pragma once

#include "core/backend.h"

namespace tw {

inline constexpr char kConnecting[] = "connecting a group over its carrier";

// Milliseconds from now on; at least 1.
int milliseconds_to(TimePoint deadline);

// Opens this group's channel, with a queue for each lane. Collective, uses `tag`. `ready`: what this rank could not do,
// which the others hear of and which comes back. `device`: -1 for host memory. One rank alone has no channel: -1.
Status open_channel(const BackendInit& init, uint64_t tag, int device, const Status& ready, int64_t* channel);

}  // namespace tw
