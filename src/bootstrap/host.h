// The host that a rank runs on.
#pragma once

#include <cstddef>

#include "core/status.h"

namespace tw {

// Names this boot of this host: what Unix sockets need ranks to have in common. For a rank of so many.
Status name_boot(int ranks, char (&name)[48]);

}  // namespace tw
