// File descriptors, of which a process may run out: the sentence for it, and what can be done before.
#pragma once

#include "core/status.h"

namespace tw {

// Raises this process's soft limit to its hard one, the first time that it is called.
void raise_descriptor_limit();

// What a rank has open at the most, beside what its program has: while a group is created, of each peer a connection,
// its process and its window, and a few of its own.
constexpr int descriptors_needed(int ranks) { return 3 * ranks + 8; }

// EMFILE or ENFILE if no descriptor can be had now, else 0.
int descriptor_shortage();

// As fail_errno("cannot %s"), for a call that makes a descriptor: where there are none left, it tells the limit, what a
// rank of so many needs and the remedy.
Status fail_to_open(int ranks, const char* what);
// The same for a descriptor that a peer sent and that found no room here.
Status fail_to_receive(int ranks, const char* what);

}  // namespace tw
