// What callers hold pointers to.
#pragma once

#include <mutex>
#include <unordered_set>

#include "core/group.h"

namespace tw::api {

// Objects that callers hold. A pointer is looked up before it is followed, so a stale one is an error, not a crash.
template <class Object>
class Registry {
 public:
  void add(Object* object) {
    const std::lock_guard lock(mutex_);
    objects_.insert(object);
  }
  bool remove(Object* object) {
    const std::lock_guard lock(mutex_);
    return objects_.erase(object) > 0;
  }
  Status check(const char* name, Object* object) {
    const std::lock_guard lock(mutex_);
    if (objects_.count(object) > 0) return {};
    return object == nullptr ? fail(twInvalidArgument, "%s is NULL", name)
                             : fail(twInvalidArgument, "%s is %p, which does not exist, or no longer", name,
                                    static_cast<void*>(object));
  }

  // Around fork(), so that no other thread holds the lock in the child.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }
  void clear() { objects_.clear(); }

 private:
  std::mutex mutex_;
  std::unordered_set<Object*> objects_;
};

inline Registry<twComm> comms;
inline Registry<twGroup> groups;
inline Registry<twHandle> handles;

#define TW_CHECK_NOT_NULL(pointer) \
  if ((pointer) == nullptr) return ::tw::fail(twInvalidArgument, #pointer " is NULL")

}  // namespace tw::api
