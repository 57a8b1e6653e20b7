// Turns: which call is in a comm or group that callers hold. One call at a time has it for itself (Turn), and calls
// that may come from any thread are guests beside it (Guest). A turn is taken at once or refused with twInvalidUsage.
// If it waited instead, a call would be made later than its caller thinks, and ranks would make steps in different
// orders (S5).
#pragma once

#include <atomic>
#include <thread>

#include "core/status.h"

namespace tw {

// A variable whose address tells threads apart.
inline thread_local const char this_thread_mark = 0;

struct Occupied {
  std::atomic<const char*> call = nullptr;    // the name of the call that is under way
  std::atomic<const void*> thread = nullptr;  // its this_thread_mark
  std::atomic<int> guests = 0;
};

// A call's turn. It is taken at once or not at all: a call that waited here would be made later than its caller thinks,
// behind another step than the peers make it.
class Turn {
 public:
  Turn() = default;
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  ~Turn() {
    if (of_ != nullptr) of_->call.store(nullptr, std::memory_order_release);
  }

  // Takes the turn. `what` names the object, and `why` gives the reason why it is for one call at a time.
  Status take(Occupied& of, const char* call, const char* what, Sentence (*why)()) {
    const char* other = nullptr;
    if (of.call.compare_exchange_strong(other, call, std::memory_order_acquire, std::memory_order_relaxed)) {
      of.thread.store(&this_thread_mark, std::memory_order_relaxed);
      of_ = &of;
      return {};
    }
    // A signal's handler, an allocator or a carrier of the caller's may run within a call.
    const bool here = of.thread.load(std::memory_order_relaxed) == &this_thread_mark;
    return fail(twInvalidUsage, "{} is under way on the {}, in {}: {}", UnderWay{other}, what,
                here ? "this very thread" : "another thread", why());
  }

  // Forgets the object, which ends with this call.
  void forget() { of_ = nullptr; }

 private:
  Occupied* of_ = nullptr;
};

// The presence of a call from any thread, beside the one that has the turn.
class Guest {
 public:
  Guest() = default;
  Guest(const Guest&) = delete;
  Guest& operator=(const Guest&) = delete;
  ~Guest() {
    if (of_ == nullptr) return;
    here_ = before_;
    of_->guests.fetch_sub(1, std::memory_order_release);
  }

  void come(Occupied& of) {
    of.guests.fetch_add(1, std::memory_order_relaxed);
    before_ = here_;
    here_ = of_ = &of;
  }

  // Whether this thread is within such a call, in a callback of it.
  static bool is_here(const Occupied& of) { return here_ == &of; }

  // Waits until no guest is left; no more must come. Guests wait for nobody.
  static void see_off(const Occupied& of) {
    while (of.guests.load(std::memory_order_acquire) > 0) std::this_thread::yield();
  }

 private:
  static inline thread_local const Occupied* here_ = nullptr;
  Occupied* of_ = nullptr;
  const Occupied* before_ = nullptr;
};

}  // namespace tw
