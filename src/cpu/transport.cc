// Publishing and waiting over shared memory (cpu/transport.h): a release store, a short spin, then a futex. The order
// of the store and the look at sleepers, seq_cst on both sides, keeps wake-ups from being lost; the release in publish
// is S4; deadline, abort signals and dead peers end a wait (S6). A dead rank is looked for before its signal is looked
// at again, since its last act may have been that signal: that decides which rank is blamed.
#include "cpu/transport.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <string>

#include "core/interrupt.h"

namespace tw::cpu {
namespace {

// Asks the kernel: sysconf reads the processor's own table, which virtual machines leave as it was on a larger host.
uint64_t last_level_cache() {
  constexpr uint64_t kUsual = 32u << 20;
  uint64_t largest = 0;
  for (int index = 0; index < 8; ++index) {
    const std::string path = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/size";
    std::FILE* const file = std::fopen(path.c_str(), "r");
    if (file == nullptr) break;
    unsigned long long kib = 0;
    if (std::fscanf(file, "%lluK", &kib) == 1) largest = std::max<uint64_t>(largest, kib << 10);
    std::fclose(file);
  }
  return largest > 0 ? largest : kUsual;
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

CpuTransport::CpuTransport(const BackendInit& init, Windows windows)
    : windows_(std::move(windows.by_rank)),
      bootstrap_(init.bootstrap),
      members_(init.members.begin(), init.members.end()),
      me_(init.context->me),
      spin_(init.spin_us),
      cache_bytes_(init.cache_bytes != 0 ? init.cache_bytes : last_level_cache()) {
  // Spinning pays where the peer runs meanwhile. With fewer cores than ranks it keeps the peer from running.
  if (init.spin_us < 0) spin_ = std::chrono::microseconds(windows.cores >= ranks() ? 20 : 0);
}

void CpuTransport::publish(int peer, uint64_t offset, Signal signal, uint64_t note) {
  std::byte* const place = windows_[peer]->data() + offset;
  std::memcpy(place + kNoteOffset, &note, sizeof note);
  // S4: releases every put. It is seq_cst, as are the load of the sleepers and their counterparts in sleep(): otherwise
  // the store and the load could pass each other and a wake-up be lost.
  at(peer, offset).store(pack(signal), std::memory_order_seq_cst);
  if (peer == me_ || sleepers(peer).load(std::memory_order_seq_cst) == 0) return;
  ::syscall(SYS_futex, step_half(place), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

bool CpuTransport::spin(uint64_t offset, uint32_t step, TimePoint deadline) const {
  if (reached(load(offset).step, step)) return true;
  if (spin_.count() == 0) return false;
  const TimePoint end = std::min(std::chrono::steady_clock::now() + spin_, deadline);
  while (std::chrono::steady_clock::now() < end) {
    for (int i = 0; i < 32; ++i) {
      pause();
      if (reached(load(offset).step, step)) return true;
    }
  }
  return false;
}

void CpuTransport::sleep(uint64_t offset, uint32_t step, TimePoint deadline) {
  sleepers(me_).fetch_add(1, std::memory_order_seq_cst);
  const Signal seen = unpack(at(me_, offset).load(std::memory_order_seq_cst));
  if (!reached(seen.step, step)) {
    const auto left = std::min<std::chrono::nanoseconds>(deadline - std::chrono::steady_clock::now(), kLongestSleep);
    if (left.count() > 0) {
      const timespec limit{0, static_cast<long>(left.count())};
      ::syscall(SYS_futex, step_half(local(offset)), FUTEX_WAIT, seen.step, &limit, nullptr, 0);
    }
  }
  sleepers(me_).fetch_sub(1, std::memory_order_seq_cst);
}

// Finds a rank that is gone and whose signal of the step is not here; -1 if there is none. `offset` is the place of
// peer's signal.
int CpuTransport::find_dead(int peer, uint64_t offset, uint32_t step) const {
  for (int rank = 0; rank < ranks(); ++rank) {
    if (bootstrap_->alive(members_[rank])) continue;
    // Looked at after its death: its last act may have been this signal.
    if (!reached(load(signal_of(rank, peer, offset)).step, step)) return rank;
  }
  return -1;
}

// When a step ends because a rank has given the group up: the largest time if none has. At once, unless those that have
// sent the step: they may have come through it and given up when they were done. Signals of others, which they had, may
// still be on their way to this rank.
TimePoint CpuTransport::given_up_at(int peer, uint64_t offset, uint32_t step) const {
  TimePoint when = TimePoint::max();
  for (int writer = 0; writer < ranks(); ++writer) {
    if (abort_of(writer).kind == 0) continue;
    if (writer == me_ || !reached(load(signal_of(writer, peer, offset)).step, step)) return TimePoint::min();
    when = std::chrono::steady_clock::now() + grace_;
  }
  return when;
}

Waited CpuTransport::wait(int peer, uint64_t offset, uint32_t step, TimePoint deadline) {
  if (spin(offset, step, deadline)) return Wake::kArrived;
  TimePoint given_up = TimePoint::max();
  for (;;) {
    sleep(offset, step, deadline);
    if (given_up == TimePoint::max()) given_up = given_up_at(peer, offset, step);
    if (reached(load(offset).step, step)) return Wake::kArrived;  // looked at behind an abort, as behind a death
    const TimePoint now = std::chrono::steady_clock::now();
    if (given_up != TimePoint::max()) {  // so it has said who is to blame
      if (now >= std::min(given_up, deadline)) return Wake::kAborted;
    } else if (const int dead = find_dead(peer, offset, step); dead >= 0) {
      return {Wake::kDied, dead};
    }
    if (is_interrupted()) return Wake::kInterrupted;
    if (now >= deadline) return Wake::kLate;
  }
}

void CpuTransport::announce_abort(AbortSignal reason) {
  for (int peer = 0; peer < ranks(); ++peer) {
    at(peer, WindowMap::abort_signal(me_)).store(pack(reason), std::memory_order_release);
  }
}

AbortSignal CpuTransport::abort_of(int writer) const {
  return unpack_abort(at(me_, WindowMap::abort_signal(writer)).load(std::memory_order_acquire));
}

AbortSignal CpuTransport::find_abort() const {
  for (int writer = 0; writer < ranks(); ++writer) {
    const AbortSignal signal = abort_of(writer);
    if (signal.kind != 0) return signal;
  }
  return {};
}

}  // namespace tw::cpu
