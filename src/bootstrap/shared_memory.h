// Memory that ranks of one host have in common: a memfd of each that all map, or, between ranks of one process, the
// same memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "bootstrap/bootstrap.h"

namespace tw {

// A mapping, unmapped once.
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
  std::vector<std::shared_ptr<Mapping>> by_rank;  // of the members
  std::vector<std::string> notes;                 // what each member said along with it
};

// Makes this rank's memory, zero but for what `fill` writes, and maps those of all members. Collective among members; a
// rank that fails on its own tells the others before it returns. `note`: a few bytes for everybody.
Status share_memory(Bootstrap& bootstrap, std::span<const int> members, uint64_t tag, TimePoint deadline,
                    uint64_t bytes, const std::function<void(std::byte*)>& fill, const std::string& note,
                    SharedMemory* memory);

}  // namespace tw
