// Transport: what the exchange asks of a backend's memory, on hosts; kernels have loops of their own. A type that
// satisfies this concept carries every step that is written against it (dispatch, combine, counts, gathers and
// reduces). S4 is its promise: whoever sees a signal sees all that its writer put before. S6 is the promise of wait: it
// ends.
#pragma once

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>

#include "exchange/signals.h"

namespace tw {

using TimePoint = std::chrono::steady_clock::time_point;

// How a wait for a signal ended.
enum class Wake {
  kArrived,      // the signal has the step; everything its writer wrote before is visible (S4)
  kLate,         // the deadline passed
  kDied,         // a rank is gone and had not published the step
  kAborted,      // some peer gave the group up
  kInterrupted,  // the caller wants this call to end
};

struct Waited {
  Wake wake;
  int culprit;  // for kDied: the rank that is gone, which may be another one than the rank waited for

  Waited(Wake how, int who = -1) : wake(how), culprit(who) {}  // NOLINT: a Wake alone is an answer too
};

// Offsets are those of WindowMap, the same in every window.
//   put       copies n bytes to a peer's window; unordered until flush
//   put_row   the same of memory that stays as it is until flush: what goes to several peers may travel once for all
//   flush     everything put so far happens before what is published next
//   publish   one release store of the note, then of the signal
//   load      one acquire load of a signal in this rank's window
//   local     this rank's window
//   returned  the row of a combine's inbox whose place is that offset of this rank's window: there, or where it came
//   wait      until the signal at an offset of this rank's window, written by `peer`, reaches a step; ends at once when
//             any rank is gone whose signal of that step is not here
template <class T>
concept Transport = requires(T& t, int peer, uint64_t offset, const void* source, size_t n, Signal signal,
                             uint64_t note, uint32_t step, StepPlace at, TimePoint deadline) {
  { t.rank() } -> std::same_as<int>;
  { t.ranks() } -> std::same_as<int>;
  { t.put(peer, offset, source, n) } -> std::same_as<void>;
  { t.put_row(peer, offset, source, n) } -> std::same_as<void>;
  { t.flush() } -> std::same_as<void>;
  { t.publish(peer, offset, signal, note) } -> std::same_as<void>;
  { t.load(offset) } -> std::same_as<Signal>;
  { t.local(offset) } -> std::same_as<std::byte*>;
  { t.returned(at, offset) } -> std::same_as<const std::byte*>;
  { t.wait(peer, offset, step, deadline) } -> std::convertible_to<Waited>;
};

}  // namespace tw
