// What a backend does for maps that move (core/moving.h) and the weights behind them; a part of core/backend.h. On
// hosts most of it is nothing: core/ has the maps, and memory is memory.
//
// What breaks if this changes: kernels choose between a layer's two maps by stage_map and close_map alone. A map that
// is staged where a kernel of this rank still reads the one before gives other physical experts in each block (S9).
#pragma once

#include <cstring>

#include "core/placement.h"
#include "core/status.h"
#include "exchange/epochs.h"

namespace tw {

class MovingBackend {
 public:
  // Makes a layer's next map known beside the one that it has.
  virtual Status stage_map(int32_t /*layer*/, uint32_t /*epoch*/, const ExpertMap& /*map*/) { return {}; }
  // The layer's epoch is decided on all lanes; `used`: its map is the one in force.
  virtual Status close_map(int32_t /*layer*/, bool /*used*/) { return {}; }
  // Sets what this rank tells in each dispatch from now on, or from a later one (exchange/epochs.h, ready_word): not
  // before maps that were staged until now are there.
  virtual Status tell_ready(uint32_t /*word*/) { return {}; }
  // Gives a channel's version: for its next dispatch, as far as the host knows.
  virtual MapVersion version(int32_t /*channel*/) { return {}; }

  // Gives where a rank's window is mapped here; NULL where ranks have no memory in common.
  virtual std::byte* window_of(int rank) = 0;
  // Copies from such memory to this rank's own, on a device in stream order.
  virtual Status copy(std::byte* to, const std::byte* from, uint64_t bytes, void* /*stream*/) {
    std::memcpy(to, from, bytes);
    return {};
  }

 protected:
  ~MovingBackend() = default;
};

}  // namespace tw
