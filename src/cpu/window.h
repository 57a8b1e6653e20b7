// Windows on the CPU: memory that every peer maps.
#pragma once

#include <memory>
#include <vector>

#include "bootstrap/shared_memory.h"
#include "core/backend.h"

namespace tw::cpu {

struct Windows {
  std::vector<std::shared_ptr<Mapping>> by_rank;  // of the group
  int cores = 1;                                  // that the ranks may run on, all together
};

// Makes this rank's window and maps those of all members. Collective.
Status map_windows(const BackendInit& init, Windows* windows);

}  // namespace tw::cpu
