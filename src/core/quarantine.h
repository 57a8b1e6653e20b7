// Memory of objects that callers may still hold pointers to.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <new>

namespace tw {

// A base whose memory is used again only after many other objects have come and gone. A stale pointer is then found to
// be none, where otherwise it could name a new object at the same address.
template <class Object>
class Quarantined {
 public:
  // Not inlined: compilers would pair malloc with a delete that is not free.
  [[gnu::noinline]] static void* operator new(size_t size) {
    if (void* const block = std::malloc(size)) return block;
    throw std::bad_alloc();
  }
  [[gnu::noinline]] static void operator delete(void* block) {
    constexpr size_t kKept = 256;
    const std::lock_guard lock(mutex());
    blocks().push_back(block);
    if (blocks().size() <= kKept) return;
    std::free(blocks().front());
    blocks().pop_front();
  }

 private:
  // Never destroyed: objects may be deleted while the process ends.
  static std::mutex& mutex() {
    static auto* const mutex = new std::mutex;
    return *mutex;
  }
  static std::deque<void*>& blocks() {
    static auto* const blocks = new std::deque<void*>;
    return *blocks;
  }
};

}  // namespace tw
