// Whether the caller wants a wait to end: asked by the threads that wait, while they wait (twSetInterrupt).
#pragma once

#include <chrono>
#include <cstdint>

#include "core/status.h"

namespace tw {

// No single sleep of a wait is longer, so that it looks up in time.
inline constexpr std::chrono::milliseconds kInterruptLook{50};

// Of the process. NULL: nobody is asked. `thread`: the only one to ask, 0 for every one.
void set_interrupt(int (*asked)(void*), void* context, int64_t thread);

// For loops that wait, each time round: whether the call under way is to end. Asks every 50 ms, first when 50 ms have
// passed since the call's first look, so that one that hardly waits pays for nothing. Yes once is yes to the end of the
// call: whatever else it waits for ends too. What is asked may be code that calls the library, so no lock may be held.
bool is_interrupted();

// The same, but asks now: behind a function of the caller's that has failed, perhaps by what it is asked for.
bool is_interrupted_now();

// The same without asking.
bool was_interrupted();

// Whether this thread would be asked: else a wait that has to look up for that may sleep to its end.
bool is_interruptible();

// A call of the API: what an earlier one of this thread was told does not concern it, nor does what this one is told
// concern a call that it was made from (in a carrier's function, or in what is asked).
class Interruptible {
 public:
  Interruptible();
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

 private:
  bool yes_;
  std::chrono::steady_clock::time_point next_;
};

}  // namespace tw
