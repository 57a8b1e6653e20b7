// Window memory on the CPU: a memfd that every peer maps, or, between ranks of one process, the same memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/backend.h"

namespace tw::cpu {

// A mapping, unmapped once.
class Mapping {
 public:
  Mapping(std::byte* data, size_t bytes) : data_(data), bytes_(bytes) {}
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const { return data_; }

 private:
  std::byte* data_;
  size_t bytes_;
};

struct Windows {
  std::vector<std::shared_ptr<Mapping>> by_rank;  // of the group
  int cores = 1;                                  // that the ranks may run on, all together
};

// Makes this rank's window and maps those of all members. Collective.
Status map_windows(const BackendInit& init, Windows* windows);

}  // namespace tw::cpu
