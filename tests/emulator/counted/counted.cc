// The counters of counted/counted.h, and how tests read them.
#include "counted/counted.h"

#include <atomic>

namespace tw::counted {
namespace {

std::atomic<uint64_t> counters[kKinds];

}  // namespace

void add(Kind kind, uint64_t by) { counters[kind].fetch_add(by, std::memory_order_relaxed); }

// Gives {bytes, words, pairs} since it was last asked.
extern "C" __attribute__((visibility("default"))) void tokenway_counted_stores(uint64_t* found) {
  for (int kind = 0; kind < kKinds; ++kind) found[kind] = counters[kind].exchange(0);
}

}  // namespace tw::counted
