// A caller who wants waits to end.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "harness.h"

namespace tw::test {

// The waits of the thread that makes it, for as long as it lives, end when the library asks for the n-th time.
class Interrupt {
 public:
  explicit Interrupt(int at) : at_(at) {
    const auto ask = [](void* context) { return static_cast<Interrupt*>(context)->answer(); };
    EXPECT_TW(twSuccess, twSetInterrupt(ask, this, ::syscall(SYS_gettid)));
  }
  ~Interrupt() { twSetInterrupt(nullptr, nullptr, 0); }
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  std::atomic<int> asked = 0;

 private:
  int answer() { return ++asked >= at_ ? 1 : 0; }
  const int at_;
};

}  // namespace tw::test
