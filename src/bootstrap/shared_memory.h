// Memory that the ranks of one host have in common: each rank makes a memfd that all map, or, between ranks of one
// process, one mapping is shared. share_memory takes a size, a function that fills this rank's memory, and a note; it
// gives all members' mappings and notes. grow_memory adds to them, at the addresses behind what is there. A mapping is
// unmapped by its last holder, so views may outlive a group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "bootstrap/bootstrap.h"

namespace tw {

// A range of addresses, which is given back once, and memory that is mapped there piece by piece.
class Mapping {
 public:
  Mapping(std::byte* data, size_t bytes) : data_(data), bytes_(bytes) {}
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  // Reserves addresses for so many bytes or, for memory that may grow, for many times that where the process may have
  // them: they cost nothing until memory is mapped there.
  static Status reserve(uint64_t bytes, bool grows, std::shared_ptr<Mapping>* mapping);
  // Maps memory `at` bytes from the begin: a memfd's, or for -1 memory of this process alone, zero.
  Status map(int fd, uint64_t at, uint64_t bytes) const;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }  // of addresses

 private:
  std::byte* data_;
  size_t bytes_;
};

struct SharedMemory {
  std::vector<std::shared_ptr<Mapping>> by_rank;  // [members]
  std::vector<std::string> notes;                 // [members] the note that each gave along with it
};

// Makes this rank's memory, zero except for what `fill` writes, and maps those of all members. Collective among
// members; a rank that fails on its own tells the others before it returns. `grows`: grow_memory may follow. `note`: a
// few bytes for everybody. `ready`: what this rank could not do before, which the others then hear here.
Status share_memory(Bootstrap& bootstrap, std::span<const int> members, uint64_t tag, TimePoint deadline,
                    uint64_t bytes, bool grows, const std::function<void(std::byte*)>& fill, const std::string& note,
                    SharedMemory* memory, const Status& ready = {});

// Adds `bytes` to each member's memory, `at` bytes from its begin, zero. Collective, and as share_memory about ranks
// that fail; what a rank has added then stays mapped, and costs nothing.
Status grow_memory(Bootstrap& bootstrap, std::span<const int> members, uint64_t tag, TimePoint deadline, uint64_t at,
                   uint64_t bytes, const std::vector<std::shared_ptr<Mapping>>& by_rank);

}  // namespace tw
