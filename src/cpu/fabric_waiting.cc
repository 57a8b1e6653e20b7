// Waiting between hosts (cpu/fabric_transport.h): for signals of this host's ranks and words of others, until they come
// or somebody is to blame (S6, T9). A word that is missing has not always its source to blame: its way ends in the
// engine of the rail peer. So a rank looks for abort signals first, then for ranks that are gone, its own signal or the
// words that come through it; at its deadline it asks all ranks how far they are.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "core/interrupt.h"
#include "cpu/fabric_transport.h"

namespace tw::cpu {
namespace {

constexpr std::chrono::milliseconds kLastWords{200};   // for what a rank that died or gave up has sent to arrive
constexpr std::chrono::milliseconds kBetweenLooks{1};  // a call looks for posts no more often than this

}  // namespace

StepPlace FabricTransport::place_of(uint64_t offset, int source, uint32_t step) const {
  for (int32_t channel = 0; channel < map_.shape().channels; ++channel) {
    if (signal_at(source, {channel, step}) == offset) return {channel, step};
  }
  return {0, step};  // no offset of a signal
}

// Looks for a moment whether a rank's step comes.
bool FabricTransport::look(int rank, StepPlace at, TimePoint deadline) {
  if (is_here(rank, at)) return true;
  if (engine_ == nullptr) return spin(signal_at(rank, at), at.step, deadline);
  const TimePoint end = std::min(std::chrono::steady_clock::now() + spin_, deadline);
  do {
    while (engine_->poll()) {
      if (is_here(rank, at)) return true;
    }
    if (is_here(rank, at)) return true;
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

// Sleeps until a signal or word moves, or a moment is over.
void FabricTransport::sleep_for(int rank, StepPlace at, TimePoint deadline) {
  if (is_near(rank)) return sleep(signal_at(rank, at), at.step, deadline);
  std::byte* word = word_of(rank, at);
  uint64_t seen = read_word(word);
  if (reached(unpack(seen).step, at.step)) {  // rows come straight, and theirs has not
    word = rows_word_of(rank, at);
    seen = read_word(word);
  }
  if (is_here(rank, at)) return;
  const auto left = std::min<std::chrono::nanoseconds>(deadline - std::chrono::steady_clock::now(), kLongestSleep);
  if (left.count() <= 0) return;
  const timespec limit{0, static_cast<long>(left.count())};
  // The engine of whoever has the word wakes those who sleep on it (net/windows.h).
  ::syscall(SYS_futex, step_half(word), FUTEX_WAIT, static_cast<uint32_t>(seen >> 32), &limit, nullptr, 0);
}

Waited FabricTransport::wait(int peer, uint64_t offset, uint32_t step, TimePoint deadline) {
  const StepPlace at = place_of(offset, peer, step);
  if (look(peer, at, deadline)) return Wake::kArrived;
  TimePoint given_up = TimePoint::max();
  TimePoint dead_until = TimePoint::max();
  for (;;) {
    sleep_for(peer, at, deadline);
    if (look(peer, at, deadline)) return Wake::kArrived;
    if (given_up == TimePoint::max()) given_up = given_up_at(at);
    const int dead = find_dead(at);
    if (is_here(peer, at)) return Wake::kArrived;  // looked at behind an abort, as behind a death
    const TimePoint now = std::chrono::steady_clock::now();
    if (given_up != TimePoint::max()) {  // so it has said who is to blame
      if (now >= std::min(given_up, deadline)) return Wake::kAborted;
    } else if (dead >= 0) {
      dead_until = std::min(dead_until, now + kLastWords);
      if (now >= dead_until) return {Wake::kDied, dead};
    }
    if (is_interrupted()) return Wake::kInterrupted;
    if (now >= deadline) return dead >= 0 ? Waited{Wake::kDied, dead} : blame(peer, at, now);
  }
}

// When a step ends because a rank has given the group up, as CpuTransport::given_up_at says.
TimePoint FabricTransport::given_up_at(StepPlace at) {
  TimePoint when = TimePoint::max();
  for (int writer = 0; writer < ranks(); ++writer) {
    if (abort_of(writer).kind == 0) continue;
    if (writer == me_ || !is_here(writer, at)) return TimePoint::min();
    when = std::chrono::steady_clock::now() + grace_;
  }
  return when;
}

// Finds a rank that is gone, or that nothing goes to any more, and whose step is not here, or through whom another's
// does not come; -1 if there is none.
int FabricTransport::find_dead(StepPlace at) {
  for (int rank = 0; rank < ranks(); ++rank) {
    const bool fails = rank != me_ && !is_near(rank) && !engine_->failure(rank).ok();
    if (!fails && bootstrap_->alive(members_[rank])) continue;
    if (!is_here(rank, at)) return rank;
    for (int source = 0; source < ranks() && is_near(rank); ++source) {
      if (!is_near(source) && inbound_[source].mate == rank && !is_here(source, at)) return rank;
    }
  }
  return -1;
}

// Asks all ranks how many steps they have sent, and blames who has stopped, else who has sent the fewest (S5: who waits
// has sent at least what it waits for), else the rank in whose memory the word is missing.
Waited FabricTransport::blame(int peer, StepPlace at, TimePoint now) {
  if (!asks_) return Wake::kLate;
  const auto over = [&] { return is_here(peer, at) || given_up_at(at) != TimePoint::max(); };
  const std::vector<int64_t> sent = asking_->ask(now + Asking::kPatience, over);
  if (is_here(peer, at)) return Wake::kArrived;
  if (given_up_at(at) != TimePoint::max()) return Wake::kAborted;
  const int through = is_near(peer) ? peer : inbound_[peer].mate;
  for (const int rank : {peer, through}) {
    if (sent[rank] < 0) return {Wake::kLate, rank};
  }
  int least = me_;
  for (int rank = 0; rank < ranks(); ++rank) {
    if (sent[rank] < 0) return {Wake::kLate, rank};
    if (sent[rank] < sent[least]) least = rank;
  }
  if (least != me_) return {Wake::kLate, least};
  return {Wake::kLate, through != me_ ? through : peer};
}

void FabricTransport::announce_abort(AbortSignal reason) {
  const uint64_t bits = pack(reason);
  const std::string bytes(reinterpret_cast<const char*>(&bits), sizeof bits);
  for (int peer = 0; peer < ranks(); ++peer) {
    if (is_near(peer)) {
      CpuTransport::at(peer, WindowMap::abort_signal(me_)).store(bits, std::memory_order_release);
    } else {
      bootstrap_->post(members_[peer], tag_ + kAbortPost, bytes);
    }
  }
}

AbortSignal FabricTransport::abort_of(int writer) {
  const auto own = CpuTransport::at(me_, WindowMap::abort_signal(writer));
  std::string bytes;
  if (!is_near(writer) && bootstrap_->posted(members_[writer], tag_ + kAbortPost, &bytes) &&
      bytes.size() == sizeof(uint64_t)) {
    uint64_t bits = 0;
    std::memcpy(&bits, bytes.data(), sizeof bits);
    own.store(bits, std::memory_order_release);
  }
  return unpack_abort(own.load(std::memory_order_acquire));
}

AbortSignal FabricTransport::find_abort() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  const bool rarely = now - TimePoint::duration(looked_.load(std::memory_order_relaxed)) >= kBetweenLooks;
  if (rarely) looked_.store(now.count(), std::memory_order_relaxed);
  for (int writer = 0; writer < ranks(); ++writer) {
    if (!is_near(writer) && !rarely) continue;
    const AbortSignal signal = abort_of(writer);
    if (signal.kind == 0) continue;
    looked_.store(0, std::memory_order_relaxed);  // a caller that asks again is told again
    return signal;
  }
  return {};
}

}  // namespace tw::cpu
