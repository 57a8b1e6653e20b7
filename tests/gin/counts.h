// What ranks of this process have posted to a network that stands for a real one, counted for tests: by source and
// peer, over all networks. Ranks beyond kCountedRanks are not counted.
//
// With TOKENWAY_GIN_COUNT_ONLY=1 such a network counts puts of more than kMoved bytes and does no more: they have ended
// at once, without a byte moved, as over a network that has no limit. Words, notes and numbers of rows come as ever, so
// steps end, and what is computed is wrong.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <string_view>

namespace tw::gin {

// kUntold: puts behind the last add.
enum PostKind { kPuts, kPutBytes, kAdds, kUntold, kPostKinds };
inline constexpr int kCountedRanks = 16;
inline constexpr uint64_t kMoved = 4096;

inline bool counts_alone() {
  const char* const said = std::getenv("TOKENWAY_GIN_COUNT_ONLY");
  return said != nullptr && std::string_view(said) == "1";
}

class PostCounts {
 public:
  void put(int source, int peer, uint64_t bytes) {
    if (!counts(source, peer)) return;
    auto& found = posted_[source][peer];
    found[kPuts].fetch_add(1, std::memory_order_relaxed);
    found[kPutBytes].fetch_add(bytes, std::memory_order_relaxed);
    found[kUntold].fetch_add(1, std::memory_order_relaxed);
  }
  void add(int source, int peer) {
    if (!counts(source, peer)) return;
    posted_[source][peer][kAdds].fetch_add(1, std::memory_order_relaxed);
    posted_[source][peer][kUntold].store(0, std::memory_order_relaxed);
  }
  // Gives what was posted since it was last asked: [ranks, ranks, kPostKinds].
  void take(int ranks, uint64_t* found) {
    for (int source = 0; source < ranks; ++source) {
      for (int peer = 0; peer < ranks; ++peer) {
        for (int kind = 0; kind < kPostKinds; ++kind) {
          *found++ = counts(source, peer) ? posted_[source][peer][kind].exchange(0) : 0;
        }
      }
    }
  }

 private:
  static bool counts(int source, int peer) { return source < kCountedRanks && peer < kCountedRanks; }
  std::atomic<uint64_t> posted_[kCountedRanks][kCountedRanks][kPostKinds]{};
};

inline PostCounts& post_counts() {
  static PostCounts counts;
  return counts;
}

}  // namespace tw::gin
