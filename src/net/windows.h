// The windows of an engine, this rank's and its peers': which ranges are in them. Both engines ask here before anything
// is sent, so a put beyond a window is refused alike everywhere.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "net/engine.h"

namespace tw::net {

inline constexpr uint64_t kWordBytes = sizeof(uint64_t);

// A window as one rank has it. `base` and `key` are what the network calls it by.
struct Extent {
  uint64_t bytes = 0;
  uint64_t base = 0;
  uint64_t key = 0;
};

class Windows {
 public:
  struct Window {
    std::byte* memory = nullptr;  // this rank's
    uint64_t bytes = 0;
    void* tag = nullptr;          // what the network calls this rank's memory by where it reads from it
    std::vector<Extent> extents;  // of all ranks; empty until they are known
  };

  int add(Window window) {
    windows_.push_back(std::move(window));
    return static_cast<int>(windows_.size()) - 1;
  }
  void take_back() { windows_.pop_back(); }
  Window& operator[](int window) { return windows_[static_cast<size_t>(window)]; }
  const Extent& extent(int window, int rank) const {
    return windows_[static_cast<size_t>(window)].extents[static_cast<size_t>(rank)];
  }

  bool has(const Put& put, int peer) const {
    return has_here(put.from, put.bytes) && has_there(put.to, put.bytes, peer);
  }
  bool has(const Word& word, int peer) const {
    return word.at.offset % kWordBytes == 0 && has_there(word.at, kWordBytes, peer);
  }
  bool has_here(const Place& place, uint64_t bytes) const {
    return knows(place.window) && fits(place.offset, bytes, windows_[static_cast<size_t>(place.window)].bytes);
  }
  std::byte* at(const Place& place) const { return windows_[static_cast<size_t>(place.window)].memory + place.offset; }

  // Adds to a word of this rank. The release is what an acquire load of the word meets. Wakes threads, of any process,
  // that sleep by a futex on the word's upper half.
  void add_to(const Place& place, uint64_t add) const {
    std::byte* const word = at(place);
    std::atomic_ref(*reinterpret_cast<uint64_t*>(word)).fetch_add(add, std::memory_order_release);
    ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(word + kWordBytes / 2), FUTEX_WAKE, INT32_MAX, nullptr, nullptr,
              0);
  }

 private:
  static bool fits(uint64_t offset, uint64_t bytes, uint64_t room) { return offset <= room && bytes <= room - offset; }
  bool knows(int window) const { return window >= 0 && static_cast<size_t>(window) < windows_.size(); }
  bool has_there(const Place& place, uint64_t bytes, int peer) const {
    if (!knows(place.window)) return false;
    const auto& extents = windows_[static_cast<size_t>(place.window)].extents;
    return !extents.empty() && fits(place.offset, bytes, extents[static_cast<size_t>(peer)].bytes);
  }

  std::vector<Window> windows_;
};

}  // namespace tw::net
