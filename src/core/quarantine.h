// Quarantined: a base for objects that callers hold pointers to (comms, groups, handles, keepers). Its memory is used
// again only after 256 other objects have gone. So a stale pointer is found not to exist (src/api/registry.h), where
// otherwise it could name a new object at the same address. Results and speed do not depend on it.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <new>

namespace tw {

// A base class: the memory of its objects is used again only after many others have come and gone.
template <class Object>
class Quarantined {
 public:
  // Not inlined: compilers would complain about malloc paired with a delete that is not free.
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
