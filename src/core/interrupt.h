// Interrupts: whether the caller wants a wait to end (twSetInterrupt). Every loop that waits, in any backend or in the
// bootstrap, asks is_interrupted each time round; once the answer is yes, the call ends with twInterrupted and gives
// the group up (S6). A loop that forgets to ask cannot be ended before its deadline.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>

#include "core/status.h"

namespace tw {

// No single sleep of a wait is longer, so that it looks up in time.
inline constexpr std::chrono::milliseconds kInterruptLook{50};

// Sets the process's function. NULL: nobody is asked. `thread`: the only one to ask, 0 for every one.
void set_interrupt(int (*asked)(void*), void* context, int64_t thread);

// Whether the call under way is to end; loops that wait call it each time round. It asks every 50 ms, first when 50 ms
// have passed since the call's first look, so that a call that hardly waits pays nothing. Once it is yes, it stays yes
// to the end of the call: whatever else the call waits for ends too. The function that is asked may call the library,
// so no lock may be held.
bool is_interrupted();

// As is_interrupted, but asks now: for use after a function of the caller's has failed, perhaps because of the
// interrupt.
bool is_interrupted_now();

// As is_interrupted, without asking.
bool was_interrupted();

// Whether this thread would be asked; if not, a wait that need not look up for that may sleep to its end.
bool is_interruptible();

// Starts a thread of the library's own. Signals are for the program's threads: one that came here would be handled
// while those sleep on.
std::thread start_thread(std::function<void()> run);

// The scope of one call of the API. It forgets what an earlier call of this thread was told. And a call that it was
// made from (in a carrier's function, or in the function that is asked) does not learn what this one is told.
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
