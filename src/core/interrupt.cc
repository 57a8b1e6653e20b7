// Asks the caller's function whether a wait shall end (core/interrupt.h). The process has one function; each thread has
// the state of the call that it is in. An earlier function is never freed, since a thread may be about to call it. If a
// wait does not ask, Ctrl-C does not end it; if it asks while it holds a lock, the function may deadlock.
#include "core/interrupt.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <csignal>

namespace tw {
namespace {

using TimePoint = std::chrono::steady_clock::time_point;

// Never freed, but chained: a thread may be about to ask an earlier one.
struct Asked {
  int (*asked)(void*);
  void* context;
  int64_t thread;
  const Asked* before;
};
std::atomic<const Asked*> current = nullptr;

struct State {
  TimePoint next;  // {}: the call has not waited yet
  bool yes = false;
  bool asking = false;
};
thread_local State state;

// A signal's handler may wait in the library itself, in calls that are not interrupted in turn.
bool may_ask(const Asked& whom) {
  if (whom.asked == nullptr || state.asking) return false;
  return whom.thread == 0 || whom.thread == ::syscall(SYS_gettid);
}

bool ask(const Asked& whom) {
  if (!may_ask(whom)) return false;
  state.asking = true;
  const bool yes = whom.asked(whom.context) != 0;
  state.asking = false;
  return yes;
}

}  // namespace

void set_interrupt(int (*asked)(void*), void* context, int64_t thread) {
  auto* const made = new Asked{asked, context, thread, current.load()};
  while (!current.compare_exchange_weak(made->before, made)) {
  }
}

bool is_interrupted() {
  if (state.yes) return true;
  const Asked* const whom = current.load(std::memory_order_acquire);
  if (whom == nullptr) return false;
  const TimePoint now = std::chrono::steady_clock::now();
  if (state.next == TimePoint{}) state.next = now + kInterruptLook;
  if (now < state.next) return false;
  state.yes = ask(*whom);
  state.next = std::chrono::steady_clock::now() + kInterruptLook;
  return state.yes;
}

bool is_interrupted_now() {
  state.next = TimePoint::min();
  return is_interrupted();
}

bool is_interruptible() {
  const Asked* const whom = current.load(std::memory_order_acquire);
  return whom != nullptr && may_ask(*whom);
}

bool was_interrupted() { return state.yes; }

std::thread start_thread(std::function<void()> run) {
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread started;
  try {
    started = std::thread(std::move(run));
  } catch (...) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

Interruptible::Interruptible() : yes_(state.yes), next_(state.next) {
  state.yes = false;
  state.next = {};
}

Interruptible::~Interruptible() {
  state.yes = yes_;
  state.next = next_;
}

}  // namespace tw
