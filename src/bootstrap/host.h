// The host that a rank runs on. name_boot names this boot of this host, by which ranks see whether they share one: two
// hosts with one name would try to share memory and fail, one host with two names would be refused.
#pragma once

#include <cstddef>

#include "core/status.h"

namespace tw {

// Names this boot of this host, which ranks must have in common to use Unix sockets. `ranks`: how many there are, for
// the sentence if there is no descriptor.
Status name_boot(int ranks, char (&name)[48]);

}  // namespace tw
