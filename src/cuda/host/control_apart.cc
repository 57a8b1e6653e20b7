// Errors between ranks whose hosts share no memory: what is told travels over their connections, whether rows go over a
// carrier, over a network or over NVLink. A collective that does not end does not say who holds it up. So over a
// carrier a rank's thread watches how far its steps are, tells the peers when one takes long, and blames the first rank
// that has not said that it has sent its own. Kernels that write into their peers' windows see for themselves who is
// late.
//
// Nor does a network that fails say whose fault that is: one peer that is gone may end what goes to all
// (transport/net.cuh). So a rank whose network has failed asks the others, and blames who does not answer, or itself
// (docs/PROTOCOL_ON_DEVICES.md, T9).
//
// Takes StagedChannel, which kernels write, the peers' notices and answers; gives abort signals and the report `late`.
//
// What breaks if this changes: S6: who is blamed, and after how long. Notices have no part in a step, so no other
// invariant depends on them.
#include <algorithm>
#include <cstring>
#include <utility>

#include "cuda/host/control.h"

namespace tw::cuda {
namespace {

enum Post { kAbortPost, kNoticePost, kAskingPost };  // asking has two

constexpr std::chrono::milliseconds kNotice{50};  // a step under way for so long is told to the peers
constexpr std::chrono::milliseconds kGrace{60};   // time for the last notices, behind the timeout
constexpr std::chrono::milliseconds kSettling{100};
// Time for a death to be told by a connection, and for an abort to come: these say more than a network that fails.
constexpr std::chrono::milliseconds kMoment{300};
// Time for other networks to fail as this one has: at most a part of the timeout, behind which steps blame somebody.
constexpr std::chrono::milliseconds kAgain{1000};
constexpr int kPartOfTimeout = 4;
// What ranks answer: steps sent, and whether their network has failed.
constexpr int64_t kFailed = 1;
constexpr int64_t kOneStep = 2;

uint32_t load(const uint32_t& word) {
  return std::atomic_ref(const_cast<uint32_t&>(word)).load(std::memory_order_acquire);
}

}  // namespace

Control::Notice Control::notice_of(int channel) const {
  uint64_t& word = page(me_).staged[channel].sent;
  const uint64_t sent = std::atomic_ref(word).load(std::memory_order_acquire);
  return {static_cast<uint32_t>(sent), static_cast<uint32_t>(sent >> 32)};
}

void Control::tell(AbortSignal reason) {
  const std::lock_guard lock(telling_);  // peers keep what is posted last
  const uint64_t bits = pack(reason);
  if (std::exchange(told_, bits) == bits) return;
  const std::string bytes(reinterpret_cast<const char*>(&bits), sizeof bits);
  for (int rank = 0; rank < static_cast<int>(members_.size()); ++rank) {
    if (rank != me_) bootstrap_->post(members_[rank], tag(kAbortPost), bytes);
  }
}

// Gives the abort signals that peers have posted; whether one of them is news.
bool Control::hear(std::vector<uint64_t>* heard) {
  heard->assign(members_.size(), 0);
  bool any = false;
  for (int rank = 0; rank < static_cast<int>(members_.size()); ++rank) {
    std::string bytes;
    if (rank == me_ || !bootstrap_->posted(members_[rank], tag(kAbortPost), &bytes)) continue;
    if (bytes.size() != sizeof(uint64_t)) continue;
    uint64_t& signal = (*heard)[static_cast<size_t>(rank)];
    std::memcpy(&signal, bytes.data(), sizeof signal);
    any = any || signal != pack(abort_of(rank));
  }
  return any;
}

// Takes what peers have posted, and tells what this rank's kernels want told; by the watching thread. A rank that gives
// up may have sent rows before, which come by another way, so its abort signal counts a little later.
void Control::listen(std::unique_lock<std::mutex>& lock) {
  std::vector<uint64_t> heard;
  const bool any = hear(&heard);
  if (any) ended_.wait_for(lock, kSettling, [this] { return ending_; });
  for (int rank = 0; rank < static_cast<int>(members_.size()) && any; ++rank) {
    if (rank == me_) continue;
    std::atomic_ref(page(me_).abort[rank]).store(heard[static_cast<size_t>(rank)], std::memory_order_release);
  }
  if (const AbortSignal own = abort_of(me_); own.kind != 0) return tell(judge_late(own, lock));
  if (staged_ && find_abort().kind == 0 && dead() < 0) watch_steps(std::chrono::steady_clock::now());
}

void Control::watch_steps(TimePoint now) {
  bool slow = false;
  std::vector<Notice> notices(watched_.size());
  for (int channel = 0; channel < static_cast<int>(watched_.size()); ++channel) {
    const StagedChannel& at = page(me_).staged[channel];
    Watched& watched = watched_[static_cast<size_t>(channel)];
    const uint32_t ended = load(at.ended);
    const uint32_t waits = load(at.waits);
    const Notice notice = notices[static_cast<size_t>(channel)] = notice_of(channel);
    if (notice.sent != watched.sent || notice.sent == ended) watched.sent = notice.sent, watched.sent_at = now;
    if (waits != watched.waits || waits == ended) watched.waits = waits, watched.waits_at = now;
    if (now - watched.sent_at < kNotice) continue;
    slow = true;
    const int different = find_different(channel);
    if (different >= 0) return end_on(channel, twCallMismatch, different);
    const std::chrono::milliseconds patience(load(at.patience));
    if (now - watched.waits_at >= patience + kGrace) return end_on(channel, twTimeout, find_behind(channel, waits));
  }
  const std::string bytes(reinterpret_cast<const char*>(notices.data()), notices.size() * sizeof(Notice));
  if (!slow || bytes == noticed_) return;
  noticed_ = bytes;
  for (int rank = 0; rank < static_cast<int>(members_.size()); ++rank) {
    if (rank != me_) bootstrap_->post(members_[rank], tag(kNoticePost), bytes);
  }
}

bool Control::noticed(int rank, int channel, Notice* notice) const {
  std::string bytes;
  const auto at = static_cast<size_t>(channel) * sizeof *notice;
  if (rank == me_ || !bootstrap_->posted(members_[rank], tag(kNoticePost), &bytes)) return false;
  if (bytes.size() < at + sizeof *notice) return false;
  std::memcpy(notice, bytes.data() + at, sizeof *notice);
  return true;
}

// Gives a rank that is in the same step of a channel and has not made the same call, so that its collective never ends;
// -1 if there is none.
int Control::find_different(int channel) const {
  const Notice mine = notice_of(channel);
  for (int rank = 0; rank < static_cast<int>(members_.size()); ++rank) {
    Notice notice{};
    if (!noticed(rank, channel, &notice) || notice.sent != mine.sent) continue;
    if (notice.call != mine.call && notice.call != 0 && mine.call != 0) return rank;
  }
  return -1;
}

// Gives the first rank that has not said that it has sent a step; the next rank if all have.
int Control::find_behind(int channel, uint32_t step) const {
  const auto ranks = static_cast<int>(members_.size());
  for (int i = 1; i < ranks; ++i) {
    const int rank = (me_ + i) % ranks;
    Notice notice{first_step_, 0};
    (void)noticed(rank, channel, &notice);
    if (!reached(notice.sent, step)) return rank;
  }
  return (me_ + 1) % ranks;
}

void Control::end_on(int channel, twResult_t result, int peer) {
  const StagedChannel& at = page(me_).staged[channel];
  Report& report = page(me_).late;
  report.result = result;
  report.peer = peer;
  report.phase = at.phase;
  report.channel = channel;
  report.step = notice_of(channel).sent;
  report.seen = report.step - 1;
  report.token = report.k = -1;
  report.group = 0;  // it finishes all
  std::atomic_ref(report.serial).store(report.serial + 1, std::memory_order_release);
  announce_abort({static_cast<uint32_t>(result), static_cast<uint32_t>(me_), static_cast<uint32_t>(peer), false});
}

void Control::watch_network(std::function<Status()> failure, std::chrono::milliseconds timeout) {
  network_ = std::move(failure);
  again_ = std::min(kAgain, timeout / kPartOfTimeout);
  const auto counts = [this] {
    const uint32_t posted = load(page(me_).posted);
    return kOneStep * posted + (network_failed_ ? kFailed : 0);
  };
  asking_ = std::make_unique<Asking>(bootstrap_, members_, tag(kAskingPost), Asking::Answers::kByCaller, counts);
}

// Gives whom to blame where this rank's device has waited too long, and changes what it has reported. It knows whose
// signal is missing; that one may itself wait, on another channel, for one that has stopped or has not made its calls.
// So all ranks are asked, as on CPUs: who is gone, or else does not answer, is to blame; else who has posted the fewest
// steps, fewer than this rank. Devices count them, as hosts run ahead and know of no replays. By the watching thread.
AbortSignal Control::judge_late(AbortSignal own, std::unique_lock<std::mutex>& lock) {
  // What this rank tells of others' findings is judged already.
  if (asking_ == nullptr || own.kind != twTimeout || static_cast<int>(own.reporter) != me_ || judged_) return own;
  lock.unlock();
  const TimePoint until = std::chrono::steady_clock::now() + Asking::kPatience;
  const std::vector<int64_t> answers = asking_->ask(until, [&] { return find_gone() >= 0; });
  const int gone = find_gone();
  lock.lock();
  const int culprit = gone >= 0 ? gone : find_late(answers, static_cast<int>(own.culprit));
  AbortSignal judged = own;
  judged.culprit = static_cast<uint32_t>(culprit);
  uint64_t known = pack(own);
  // Unless this rank has told more meanwhile, that it leaves the group for instance.
  if (std::atomic_ref(page(me_).abort[me_]).compare_exchange_strong(known, pack(judged))) {
    page(me_).failure.peer = culprit;
    own = judged;
  } else {
    own = unpack_abort(known);
  }
  judged_ = true;
  return own;
}

// Gives whom the answers of all ranks blame; `culprit`: whom the device blames, which stands where they do not tell.
int Control::find_late(const std::vector<int64_t>& answers, int culprit) const {
  const auto steps = [&](int rank) { return answers[static_cast<size_t>(rank)] / kOneStep; };
  const auto silent = [&](int rank) { return answers[static_cast<size_t>(rank)] < 0; };
  for (int rank = 0; rank < static_cast<int>(members_.size()); ++rank) {
    if (silent(culprit) || rank == me_) continue;
    if (silent(rank) || (steps(rank) < steps(me_) && steps(rank) < steps(culprit))) culprit = rank;
  }
  return culprit;
}

// Until it is known whom to blame for a timeout that this rank's device has reported.
void Control::await_verdict() const {
  constexpr std::chrono::milliseconds kLooks{1};
  const TimePoint until = std::chrono::steady_clock::now() + 2 * Asking::kPatience;
  while (!judged_ && watcher_.joinable() && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(kLooks);
  }
}

Status Control::network_failure() {
  const std::lock_guard lock(mutex_);
  return failed_;
}

// Gives a rank whose connections have closed, -1 if there is none.
int Control::find_gone() const {
  const auto gone = std::ranges::find_if(members_, [&](int member) { return !bootstrap_->alive(member); });
  return gone == members_.end() ? -1 : static_cast<int>(gone - members_.begin());
}

// Whether it is known what is wrong, or about to be: there is nothing to ask then.
bool Control::is_settled() {
  {
    const std::lock_guard lock(mutex_);
    if (ending_) return true;
  }
  std::vector<uint64_t> heard;
  if (find_abort().kind != 0 || hear(&heard)) return true;
  for (int rank = 0; rank < static_cast<int>(members_.size()); ++rank) {
    if (const AbortSignal said = abort_of(rank); said.left || said.went_on) return true;  // and does not answer
  }
  return find_gone() >= 0;
}

// Asks the others once the network has failed and nothing else tells why; by the watching thread, of which nothing else
// is wanted meanwhile.
void Control::ask(std::unique_lock<std::mutex>& lock) {
  if (failed_.ok()) {
    Status found = network_();
    if (found.ok() || find_abort().kind != 0) return;  // an abort ends networks too
    failed_ = std::move(found);
    network_failed_ = true;  // whoever asks is told
    ask_at_ = std::chrono::steady_clock::now() + kMoment;
  }
  if (std::chrono::steady_clock::now() < ask_at_) return;
  lock.unlock();
  const TimePoint until = std::chrono::steady_clock::now() + Asking::kPatience;
  const std::vector<int64_t> answers = asking_->ask(until, [this] { return is_settled(); });
  const bool settled = is_settled();
  lock.lock();
  if (!settled) judge(answers);
}

// Blames who does not answer: it has stopped, or nothing reaches it. Where all answer, and no other network has failed,
// it is this rank that reaches nobody, so it gives itself up before it blames who waits for it. Where others' have
// failed too nobody can tell, and a step's timeout says who is missing. What is said must be so twice: another network
// may fail a little later than this one, and an answer may be late.
void Control::judge(const std::vector<int64_t>& answers) {
  const auto silent = std::ranges::find(answers, -1);
  const auto goes = [](int64_t answer) { return answer % kOneStep != kFailed; };
  const bool alone = std::ranges::count_if(answers, goes) + 1 == std::ssize(answers);
  const int before = suspect_;
  suspect_ = silent != answers.end() ? static_cast<int>(silent - answers.begin()) : alone ? me_ : -1;
  ask_at_ = std::chrono::steady_clock::now() + (silent != answers.end() ? std::chrono::milliseconds(0) : again_);
  if (suspect_ < 0 || suspect_ != before) return;
  const twResult_t why = suspect_ == me_ ? twPeerAborted : twPeerDied;
  announce_abort({static_cast<uint32_t>(why), static_cast<uint32_t>(me_), static_cast<uint32_t>(suspect_), false});
}

}  // namespace tw::cuda
