// The host that a rank runs on. name_boot gives a name of this boot of this host, by which ranks see whether they share
// one. If two hosts had one name, their ranks would try to share memory and fail; if one host had two names, its ranks
// would be refused.
#pragma once

#include <cstddef>

#include "core/status.h"

namespace tw {

constexpr size_t kBootBytes = 48;  // of such a name, its end included

// Names this boot of this host, which ranks must have in common to use Unix sockets. `ranks`: how many there are, for
// the sentence if there is no descriptor.
Status name_boot(int ranks, char (&name)[kBootBytes]);

// Names this process's network namespace, which ranks must have in common beside the boot: abstract sockets are of one
// namespace. "" where the kernel has no names for them.
void name_network(char (&name)[40]);

}  // namespace tw
