// Memory that the ranks of one host have in common: each rank makes a memfd that all map, or, between ranks of one
// process, one mapping is shared. share_memory takes a size, a function that fills this rank's memory, and a note; it
// gives all members' mappings and notes. A mapping is unmapped by its last holder, so views may outlive a group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "bootstrap/bootstrap.h"

namespace tw {

// A mapping, which is unmapped once.
class Mapping {
 public:
  Mapping(std::byte* data, size_t bytes) : data_(data), bytes_(bytes) {}
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* data_;
  size_t bytes_;
};

struct SharedMemory {
  std::vector<std::shared_ptr<Mapping>> by_rank;  // [members]
  std::vector<std::string> notes;                 // [members] the note that each gave along with it
};

// Makes this rank's memory, zero except for what `fill` writes, and maps those of all members. Collective among
// members; a rank that fails on its own tells the others before it returns. `note`: a few bytes for everybody.
Status share_memory(Bootstrap& bootstrap, std::span<const int> members, uint64_t tag, TimePoint deadline,
                    uint64_t bytes, const std::function<void(std::byte*)>& fill, const std::string& note,
                    SharedMemory* memory);

}  // namespace tw
