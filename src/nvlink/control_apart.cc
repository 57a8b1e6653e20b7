// Errors between ranks that share no memory: what is told travels over their connections. And since a collective that
// does not end says of nobody who holds it up, a rank's thread watches how far its steps are, tells the peers when one
// takes long, and blames the first who has not said that it has sent its own.
#include <cstring>

#include "nvlink/control.h"

namespace tw::nvlink {
namespace {

enum Post { kAbortPost, kNoticePost };

constexpr std::chrono::milliseconds kNotice{50};  // under way, before the peers are told how far this rank is
constexpr std::chrono::milliseconds kGrace{60};   // for the last notices, behind the timeout

uint32_t load(const uint32_t& word) {
  return std::atomic_ref(const_cast<uint32_t&>(word)).load(std::memory_order_acquire);
}

}  // namespace

void Control::tell(AbortWord reason) {
  const uint64_t bits = pack(reason);
  if (told_.exchange(bits) == bits) return;
  const std::string bytes(reinterpret_cast<const char*>(&bits), sizeof bits);
  for (int rank = 0; rank < static_cast<int>(members_.size()); ++rank) {
    if (rank != me_) bootstrap_->post(members_[rank], tag(kAbortPost), bytes);
  }
}

// What peers have posted, and what this rank's kernels want told; by the watching thread.
void Control::listen() {
  for (int rank = 0; rank < static_cast<int>(members_.size()); ++rank) {
    uint64_t bits = 0;
    std::string bytes;
    if (rank == me_ || !bootstrap_->posted(members_[rank], tag(kAbortPost), &bytes) || bytes.size() != sizeof bits) {
      continue;
    }
    std::memcpy(&bits, bytes.data(), sizeof bits);
    std::atomic_ref(page(me_).abort[rank]).store(bits, std::memory_order_release);
  }
  if (const AbortWord own = abort_of(me_); own.kind != 0) return tell(own);
  if (find_abort().kind == 0) watch_steps(std::chrono::steady_clock::now());
}

void Control::watch_steps(TimePoint now) {
  bool slow = false;
  std::vector<uint32_t> sent(watched_.size());
  for (size_t lane = 0; lane < watched_.size(); ++lane) {
    const CarriedLane& at = page(me_).carried[lane];
    Watched& watched = watched_[lane];
    const uint32_t ended = load(at.ended);
    const uint32_t waits = load(at.waits);
    sent[lane] = load(at.sent);
    if (sent[lane] != watched.sent || sent[lane] == ended) watched.sent = sent[lane], watched.sent_at = now;
    if (waits != watched.waits || sent[lane] == ended) watched.waits = waits, watched.waits_at = now;
    slow = slow || now - watched.sent_at >= kNotice;
    if (waits == sent[lane] && now - watched.waits_at >= timeout_ + kGrace) {
      return find_late(static_cast<int>(lane), waits);
    }
  }
  const std::string notice(reinterpret_cast<const char*>(sent.data()), sent.size() * sizeof(uint32_t));
  if (!slow || notice == noticed_) return;
  noticed_ = notice;
  for (int rank = 0; rank < static_cast<int>(members_.size()); ++rank) {
    if (rank != me_) bootstrap_->post(members_[rank], tag(kNoticePost), notice);
  }
}

// The first rank that has not said that it has sent a step; the next one if all have.
int Control::behind(int lane, uint32_t step) const {
  const auto ranks = static_cast<int>(members_.size());
  for (int i = 1; i < ranks; ++i) {
    const int rank = (me_ + i) % ranks;
    const auto at = static_cast<size_t>(lane) * sizeof(uint32_t);
    uint32_t sent = first_step_;
    std::string steps;
    if (bootstrap_->posted(members_[rank], tag(kNoticePost), &steps) && steps.size() >= at + sizeof sent) {
      std::memcpy(&sent, steps.data() + at, sizeof sent);
    }
    if (!reached(sent, step)) return rank;
  }
  return (me_ + 1) % ranks;
}

void Control::find_late(int lane, uint32_t step) {
  const int late = behind(lane, step);
  Report& report = page(me_).late;
  report.result = twTimeout;
  report.peer = late;
  report.phase = page(me_).carried[lane].phase;
  report.lane = lane;
  report.step = step;
  report.seen = step - 1;
  report.token = report.k = -1;
  std::atomic_ref(report.serial).store(report.serial + 1, std::memory_order_release);
  announce_abort({static_cast<uint32_t>(twTimeout), static_cast<uint32_t>(me_), static_cast<uint32_t>(late), false});
}

}  // namespace tw::nvlink
