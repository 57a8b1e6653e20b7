// Leases: the part of a window that the caller takes pieces of, for rows that outlive their step (docs/PROTOCOL.md,
// «Leases»). Each rank manages its own area: peers learn of a place by the exchange of counts that announces it, so
// nothing here has to be the same elsewhere, and a piece may be given back by garbage collection (S5). What must hold:
// a piece that is announced is not leased to anybody else before its dispatch has ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/status.h"

namespace tw {

class LeaseArea {
 public:
  // The area is `bytes` at `base`, which `memory` keeps mapped.
  LeaseArea(std::byte* base, uint64_t bytes, std::shared_ptr<void> memory)
      : base_(base), bytes_(bytes), memory_(std::move(memory)) {}

  struct Info {
    uint64_t bytes = 0;
    uint64_t used = 0;
    uint64_t largest = 0;
    int32_t leases = 0;
  };
  Info info();

  // Takes a piece, in the first gap that is large enough.
  Status take(uint64_t bytes, std::byte** memory);
  Status trim(std::byte* memory, uint64_t bytes);
  // Gives a piece back: at once, or when the dispatch that it was announced for has ended.
  Status give(std::byte* memory);

  // Whether these bytes may be announced. *lease: the lease that they lie in.
  Status may_announce(const Argument& name, const void* memory, uint64_t bytes, std::byte** lease);
  // claim: peers may write there from now on. release: no peer does any more.
  void claim(const std::vector<std::byte*>& leases);
  void release(const std::vector<std::byte*>& leases);

 private:
  struct Lease {
    uint64_t bytes;
    bool announced = false;
    bool given = false;
  };
  static constexpr uint64_t kAlignment = 256;
  static uint64_t whole(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  std::byte* base_;
  uint64_t bytes_;
  std::shared_ptr<void> memory_;
  std::mutex mutex_;
  std::map<std::byte*, Lease> leases_;
};

}  // namespace tw
