// How every entry point runs: what a call returns or throws becomes a result, and the thread's sentence (twLastError).
// enter() takes a callable that returns a Status, and also begins a new scope of interrupts. An entry point outside of
// enter() lets an exception into C code, and one call's interrupt into the next.
#pragma once

#include <exception>
#include <new>
#include <string>
#include <utility>

#include "core/interrupt.h"
#include "core/status.h"

namespace tw::api {

// A sentence as callers read it: whole, and in parts.
struct Told {
  Sentence sentence;
  std::string text;
};
inline thread_local Told last_error;

inline twResult_t report(Status status) {
  if (!status.ok()) last_error = {status.sentence, status.text()};
  return status.code;
}

// Reports what a call has thrown. Where there is no memory for a sentence the result alone tells.
template <class Fail>
twResult_t report_thrown(twResult_t code, Fail&& fail) noexcept {
  try {
    return report(fail());
  } catch (...) {
    return code;
  }
}

template <class Call>
twResult_t enter(Call&& call) {
  const Interruptible interruptible;
  try {
    return report(call());
  } catch (const std::bad_alloc&) {
    return report_thrown(twOutOfMemory,
                         [] { return fail(twOutOfMemory, "out of memory for the library's own tables"); });
  } catch (const std::exception& error) {
    return report_thrown(twInternalError, [&] { return fail(twInternalError, "unexpected: {}", error.what()); });
  }
}

}  // namespace tw::api
