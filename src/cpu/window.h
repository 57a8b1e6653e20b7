// Windows on the CPU: map_windows takes what a backend is made with and gives memory that every peer maps, this rank's
// filled with the signals of a new window. Every rank maps every other rank's window at its full size
// (WindowMap::bytes); a different size is an internal error.
#pragma once

#include <memory>
#include <vector>

#include "bootstrap/shared_memory.h"
#include "core/make_backend.h"

namespace tw::cpu {

struct Windows {
  std::vector<std::shared_ptr<Mapping>> by_rank;  // [N] by rank of the group
  int cores = 1;                                  // cores that the ranks may run on, all together
};

// Makes this rank's window and maps those of all members. Collective.
Status map_windows(const BackendInit& init, Windows* windows);

}  // namespace tw::cpu
