// How much memory of the host new windows may take.
#pragma once

#include <cstdint>
#include <string>

namespace tw {

struct FreeMemory {
  uint64_t bytes = UINT64_MAX;  // if nothing is known
  std::string why;              // which limit leaves no more, and the file that told it
};

// What the host has, and what the control groups of this process leave of their limits: its own and all above it, of
// version 2, 1, or both side by side. root: a folder that stands for "/", for tests.
FreeMemory find_free_memory(const std::string& root = "");

}  // namespace tw
