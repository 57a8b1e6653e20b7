// File descriptors, of which a process may run out: how many a rank needs, how the limit is raised, and the sentences
// for a shortage. Callers use these where a call makes or takes a descriptor. The number must be right, or the advice
// in the error is wrong; nothing else depends on it.
#pragma once

#include "core/status.h"

namespace tw {

// Raises this process's soft limit to its hard one, the first time that it is called.
void raise_descriptor_limit();

// How many descriptors a rank has open at most, beside those of its program: while a group is created, for each peer a
// connection, its process and its window, and a few of its own.
constexpr int descriptors_needed(int ranks) { return 3 * ranks + 8; }

// EMFILE or ENFILE if no descriptor can be had now, else 0.
int descriptor_shortage();

// Does what fail_errno("cannot {}") does, for a call that makes a descriptor. If none are left, the sentence also has
// the limit, how many a rank of so many needs, and the remedy.
Status fail_to_open(int ranks, const char* what);
// Does that for a descriptor that a peer sent and that found no room here.
Status fail_to_receive(int ranks, const char* what);

}  // namespace tw
