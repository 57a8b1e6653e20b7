// The exchange's Transport between processes, or threads, of one host: a put is a copy into the peer's mapped window, a
// signal is an atomic store, and waiting is a short spin and then a futex on the signal's step half. flush and publish
// together are S4; streaming stores need the fence in flush, or peers read rows that are not there. When to stream and
// spin is speed alone.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "core/make_backend.h"
#include "cpu/outline.h"
#include "cpu/vector.h"
#include "cpu/window.h"
#include "exchange/transport.h"

namespace tw::cpu {

// What a sleeper looks at, of a signal or a word.
inline uint32_t* step_half(std::byte* signal) { return reinterpret_cast<uint32_t*>(signal + kStepHalf); }

class CpuTransport {
 public:
  CpuTransport(const BackendInit& init, Windows windows);

  int rank() const { return me_; }
  int ranks() const { return static_cast<int>(windows_.size()); }

  // Chooses how to put, by the bytes that all ranks together would put if they were all like this one.
  void begin(StepPlace, const Outline& outline, bool /*send_only*/) {
    streaming_ = outline.all_rows(ranks()) * outline.bytes * static_cast<uint64_t>(ranks()) > cache_bytes_;
  }

  void put(int peer, uint64_t offset, const void* source, size_t n) {
    copy(windows_[peer]->data() + offset, source, n);
  }

  void put_row(int peer, uint64_t offset, const void* source, size_t n) { put(peer, offset, source, n); }

  // Plain stores are ordered by the release in publish; streaming ones are not.
  void flush() {
    if (streaming_) stream_fence();
  }

  void publish(int peer, uint64_t offset, Signal signal, uint64_t note);

  Signal load(uint64_t offset) const { return unpack(at(me_, offset).load(std::memory_order_acquire)); }

  std::byte* local(uint64_t offset) const { return windows_[me_]->data() + offset; }
  const std::byte* returned(StepPlace, uint64_t offset) const { return local(offset); }
  std::shared_ptr<void> window() const { return windows_[me_]; }
  std::byte* window_of(int rank) const { return windows_[rank]->data(); }

  // Maps room for the channels of a larger map. Collective.
  Status prepare_growth(const BackendInit& init, const WindowMap& grown) {
    return grow_memory(*init.bootstrap, init.members, init.tag, init.deadline, grown.channels(), grown.channels_bytes(),
                       windows_);
  }
  void end_growth(bool /*grown*/) {}

  Waited wait(int peer, uint64_t offset, uint32_t step, TimePoint deadline);

  void announce_abort(AbortSignal reason);
  AbortSignal find_abort() const;
  AbortSignal abort_of(int writer) const;

 protected:
  // A sleeper looks up this often, for peers that died or gave up: they cannot wake it.
  static constexpr std::chrono::milliseconds kLongestSleep{10};

  std::atomic_ref<uint64_t> at(int peer, uint64_t offset) const {
    return std::atomic_ref(*reinterpret_cast<uint64_t*>(windows_[peer]->data() + offset));
  }
  // What it has written is published behind a flush alone. Inlined, so that puts of one host pay nothing for it.
  [[gnu::always_inline]] void copy(std::byte* to, const void* from, size_t n) const {
    if (streaming_ && n >= kStreamedRow) {
      stream_copy(to, from, n);
    } else {
      std::memcpy(to, from, n);
    }
  }
  bool spin(uint64_t offset, uint32_t step, TimePoint deadline) const;
  void sleep(uint64_t offset, uint32_t step, TimePoint deadline);

  // Time for what others have sent to arrive behind the abort of a rank that may have come through the step.
  std::chrono::milliseconds grace_{200};
  std::vector<std::shared_ptr<Mapping>> windows_;  // [N]; those of ranks of other hosts are NULL
  Bootstrap* bootstrap_;
  std::vector<int> members_;
  int me_;
  std::chrono::microseconds spin_;

 private:
  static constexpr size_t kStreamedRow = 512;  // below this there are too few whole cache lines to pay

  std::atomic_ref<uint32_t> sleepers(int peer) const {
    return std::atomic_ref(*reinterpret_cast<uint32_t*>(windows_[peer]->data() + WindowMap::waiters()));
  }
  // Where the signal of `rank` lies if peer's lies at `offset`.
  static uint64_t signal_of(int rank, int peer, uint64_t offset) {
    return offset + kSignalStride * static_cast<uint64_t>(rank) - kSignalStride * static_cast<uint64_t>(peer);
  }
  int find_dead(int peer, uint64_t offset, uint32_t step) const;
  TimePoint given_up_at(int peer, uint64_t offset, uint32_t step) const;

  uint64_t cache_bytes_;  // bytes of the last-level cache
  bool streaming_ = false;
};

static_assert(Transport<CpuTransport>);

}  // namespace tw::cpu
