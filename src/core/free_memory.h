// How much memory of the host new windows may take: find_free_memory gives bytes, and the limit that leaves no more.
// core/group.cc refuses a group by it (twOutOfMemory) before anything is mapped. Where nothing is known, nothing is
// refused.
#pragma once

#include <cstdint>
#include <string>

namespace tw {

struct FreeMemory {
  uint64_t bytes = UINT64_MAX;  // UINT64_MAX if nothing is known
  std::string why;              // which limit leaves no more, and the file that told it
};

// Gives the memory that this process can still have: the least of what the host has and of what each of its control
// groups leaves of its limit. These are its own group and all above it, in version 2, version 1, or both side by side.
// root: a folder that stands for "/", for tests.
FreeMemory find_free_memory(const std::string& root = "");

}  // namespace tw
