// The objects that callers hold pointers to, and how calls get at them: a pointer is looked up and its object occupied
// in one step, so that no other thread ends an object between its being found and its being used. enter_group and
// enter_handle take the turn; visit is for calls from any thread. An entry point that goes around them makes a stale
// pointer a crash, and two calls at once a data race.
#pragma once

#include <mutex>
#include <unordered_set>
#include <utility>

#include "api/enter.h"
#include "core/group.h"

// A window that is kept; it may outlive its group.
struct twWindowKeeper : tw::Quarantined<twWindowKeeper> {
  std::shared_ptr<void> window;
};

namespace tw::api {

// The objects of one kind. A pointer is looked up before it is followed, so a stale one is an error, not a crash.
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
  // Returns what `use` returns, for an object that exists: none is removed meanwhile.
  template <class Use>
  Status find(const Argument& name, Object* object, Use&& use) {
    const std::lock_guard lock(mutex_);
    if (objects_.count(object) > 0) return use();
    return object == nullptr ? fail(twInvalidArgument, "{} is NULL", name)
                             : fail(twInvalidArgument, "{} is {}, which does not exist, or no longer", name, object);
  }

  // For fork(), so that no other thread holds the lock in the child.
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
inline Registry<twWindowKeeper> keepers;

inline Status take_turn(twGroup& group, const char* call, Turn* turn) {
  return turn->take(group.arena->occupied, call, "group", [] {
    return compose(
        "a group is for one thread at a time, with all groups of its window. Give each thread a group of its own, or "
        "hold a lock around all its calls; "
        "{}, from any thread, ends one that waits",
        Function{"twGroupAbort"});
  });
}
// The comm's turn is for calls in which its ranks meet, which they must make in the same order.
inline Status take_turn(twComm& comm, const char* call, Turn* turn) {
  return turn->take(comm.occupied, call, "comm", [] {
    return Sentence(
        "ranks make, grow, shrink and destroy the groups of a comm, and meet in them, in the same order, one after the "
        "other. Hold a lock around these calls, or give each thread a comm of its own");
  });
}

// Runs an entry point of a group: `call` is its name, and `body` runs while no other call is in the group.
template <class Body>
twResult_t enter_group(const char* call, twGroup_t group, Body&& body) {
  return enter([&]() -> Status {
    Turn turn;
    TW_RETURN_IF_FAILED(groups.find("group", group, [&] { return take_turn(*group, call, &turn); }));
    return body();
  });
}

// Runs an entry point of a handle: its group is occupied.
template <class Body>
twResult_t enter_handle(const char* call, twHandle_t handle, Body&& body) {
  return enter([&]() -> Status {
    Turn turn;
    TW_RETURN_IF_FAILED(handles.find("handle", handle, [&] { return take_turn(*handle->group, call, &turn); }));
    return body();
  });
}

// Runs an entry point that may be called from any thread, beside another call. It touches only what never changes or
// has a lock of its own.
template <class Object, class Body>
twResult_t visit(Registry<Object>& registry, const Argument& name, Object* object, Body&& body) {
  return enter([&]() -> Status {
    Guest guest;
    TW_RETURN_IF_FAILED(registry.find(name, object, [&] { return guest.come(object->occupied), Status{}; }));
    return body();
  });
}

// Takes an object that this call occupies from its registry: the object ends here.
template <class Object>
void withdraw(Registry<Object>& registry, Object* object) {
  registry.remove(object);
  Guest::see_off(object->occupied);
}

#define TW_CHECK_NOT_NULL(pointer) \
  if ((pointer) == nullptr) return ::tw::fail(twInvalidArgument, "{} is NULL", ::tw::Argument(#pointer))

}  // namespace tw::api
