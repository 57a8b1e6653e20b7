// Each turn of the thread serves one of the queues whose first operation is not late any more; which, the seed says.
#include "pretended_engine.h"

#include <algorithm>
#include <cstring>

#include "core/interrupt.h"

namespace tw::test {

using net::Meeting;
using net::Posted;

class PretendedEngine final : public net::Engine {
 public:
  PretendedEngine(PretendedNet& between, int rank, int depth)
      : net_(between), me_(rank), depth_(depth), failures_(static_cast<size_t>(between.ranks_)) {}

  ~PretendedEngine() override {
    const std::lock_guard lock(net_.mutex_);
    if (!closed_) net_.lose(me_);
  }

  int rank() const override { return me_; }
  int size() const override { return net_.ranks_; }

  Status add_window(const Meeting& meeting, std::byte* memory, uint64_t bytes, int* window) override {
    const Status made = memory != nullptr && bytes > 0 ? Status{} : fail(twInvalidArgument, "a window of nothing");
    int number = -1;
    {
      const std::lock_guard lock(net_.mutex_);
      number = mine().add({memory, bytes, nullptr, {}});
    }
    std::vector<Parcel> cards;
    Packer card = pack_result(made);
    card.add(bytes);
    Status met = gather(*meeting.bootstrap, meeting.members, meeting.tag, {card.take(), {}}, meeting.deadline,
                        "adding a window", &cards);
    std::vector<net::Extent> extents;
    for (size_t i = 0; i < cards.size() && met.ok(); ++i) {
      Unpacker reader(cards[i].bytes);
      met = read_result(static_cast<int>(i), reader);
      extents.push_back({reader.get<uint64_t>(), 0, 0});
    }
    const std::lock_guard lock(net_.mutex_);
    if (!met.ok()) {
      mine().take_back();
      return made.ok() ? met : made;
    }
    mine()[number].extents = std::move(extents);
    *window = number;
    return {};
  }

  Posted put(int peer, const net::Put& put) override { return take(peer, {put, false, {}}); }
  Posted put(int peer, const net::Put& put, const net::Word& word) override { return take(peer, {put, true, word}); }

  uint64_t taken(int peer) const override {
    const std::lock_guard lock(net_.mutex_);
    return net_.way(me_, peer).taken;
  }
  uint64_t done(int peer) const override {
    const std::lock_guard lock(net_.mutex_);
    return net_.way(me_, peer).done;
  }
  bool poll() override { return false; }
  Status failure(int peer) const override {
    const std::lock_guard lock(net_.mutex_);
    return failure_of(peer);
  }
  void give_up(int peer, const Status& why) override {
    const std::lock_guard lock(net_.mutex_);
    if (failure_of(peer).ok()) failures_[static_cast<size_t>(peer)] = why;
    net_.changed_.notify_all();
  }

  Status close(const Meeting& meeting) override {
    std::unique_lock lock(net_.mutex_);
    refuses_ = true;
    for (int peer = 0; peer < size(); ++peer) {
      const auto over = [&] { return !failure_of(peer).ok() || net_.way(me_, peer).waiting.empty(); };
      if (!net_.changed_.wait_until(lock, meeting.deadline, over)) {
        failures_[static_cast<size_t>(peer)] = fail(twTimeout, "rank {} is late", peer);
      }
    }
    lock.unlock();
    std::vector<Parcel> all;
    const auto presence = meeting.bootstrap->exchange(meeting.members, meeting.tag, {}, meeting.deadline, &all);
    lock.lock();
    closed_ = true;
    for (int peer = 0; peer < size(); ++peer) {
      if (Status failed = failure_of(peer); !failed.ok()) return failed;
      if (presence[static_cast<size_t>(peer)] != Presence::kHere) return fail(twPeerDied, "rank {} is gone", peer);
    }
    return {};
  }

 private:
  net::Windows& mine() const { return net_.windows_[static_cast<size_t>(me_)]; }
  Status failure_of(int peer) const {
    const auto at = static_cast<size_t>(peer);
    if (!failures_[at].ok()) return failures_[at];
    return net_.gone_[at] ? fail(twPeerDied, "rank {} is gone", peer) : Status{};
  }
  Posted take(int peer, const PretendedNet::Operation& operation) {
    const std::lock_guard lock(net_.mutex_);
    if (peer < 0 || peer >= size() || peer == me_ || !mine().has(operation.put, peer) ||
        (operation.has_word && !mine().has(operation.word, peer))) {
      return Posted::kRefused;
    }
    if (refuses_ || net_.gone_[static_cast<size_t>(me_)] || !failure_of(peer).ok()) return Posted::kGone;
    return net_.take(me_, peer, operation, depth_);
  }

  PretendedNet& net_;
  const int me_;
  const int depth_;
  bool refuses_ = false;
  bool closed_ = false;
  std::vector<Status> failures_;
};

PretendedNet::PretendedNet(int ranks, uint64_t seed, int late)
    : ranks_(ranks), seed_(seed), late_(late), windows_(ranks), gone_(ranks), delivered_(ranks) {
  thread_ = std::thread([this] { run(); });
}

PretendedNet::~PretendedNet() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::unique_ptr<net::Engine> PretendedNet::engine(int rank, int depth) {
  return std::make_unique<PretendedEngine>(*this, rank, depth);
}

void PretendedNet::lose_word(int from, int to, uint64_t n) {
  const std::lock_guard lock(mutex_);
  lost_words_.insert({from, to, n});
}

void PretendedNet::double_word(int from, int to, uint64_t n) {
  const std::lock_guard lock(mutex_);
  doubled_words_.insert({from, to, n});
}

void PretendedNet::lose_rank(int rank, uint64_t operations) {
  const std::lock_guard lock(mutex_);
  to_lose_[rank] = operations;
  if (delivered_[static_cast<size_t>(rank)] >= operations) lose(rank);
}

void PretendedNet::hold(bool held) {
  const std::lock_guard lock(mutex_);
  held_ = held;
  changed_.notify_all();
}

std::vector<std::pair<int, int>> PretendedNet::served() const {
  const std::lock_guard lock(mutex_);
  return served_;
}

Posted PretendedNet::take(int from, int to, const Operation& operation, int depth) {
  Way& taken = way(from, to);
  if (taken.taken - taken.done >= static_cast<uint64_t>(depth)) return Posted::kFull;
  ++taken.taken;
  taken.waiting.push_back(operation);
  changed_.notify_all();
  return Posted::kTaken;
}

// SplitMix64 of what tells an operation from all others.
uint64_t PretendedNet::drawn(int from, int to, uint64_t number) const {
  uint64_t x =
      seed_ + 0x9e3779b97f4a7c15 * (number * 4096 + static_cast<uint64_t>(from) * 64 + static_cast<uint64_t>(to) + 1);
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

void PretendedNet::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (held_ || !turn()) changed_.wait(lock);
  }
}

// False if nothing is under way.
bool PretendedNet::turn() {
  std::pair<int, int> chosen;
  uint64_t least = UINT64_MAX;
  bool any = false;
  for (auto& [ranks, way] : ways_) {
    if (way.waiting.empty()) continue;
    any = true;
    const uint64_t draw = drawn(ranks.first, ranks.second, way.done);
    if (way.not_before < 0) way.not_before = turns_ + (late_ > 0 ? static_cast<int64_t>(draw % (late_ + 1)) : 0);
    if (way.not_before > turns_ || draw >= least) continue;
    least = draw;
    chosen = ranks;
  }
  ++turns_;
  if (least != UINT64_MAX) deliver(chosen.first, chosen.second, way(chosen.first, chosen.second));
  return any;
}

void PretendedNet::deliver(int from, int to, Way& way) {
  const Operation operation = way.waiting.front();
  way.waiting.pop_front();
  way.not_before = -1;
  const net::Windows& target = windows_[static_cast<size_t>(to)];
  if (operation.put.bytes > 0) {
    std::memcpy(target.at(operation.put.to), windows_[static_cast<size_t>(from)].at(operation.put.from),
                operation.put.bytes);
  }
  if (operation.has_word) {
    const std::tuple word{from, to, way.words++};
    const uint64_t times = lost_words_.contains(word) ? 0 : doubled_words_.contains(word) ? 2 : 1;  // at once
    target.add_to(operation.word.at, times * operation.word.add);
  }
  ++way.done;
  served_.emplace_back(from, to);
  const uint64_t count = ++delivered_[static_cast<size_t>(from)];
  if (const auto lost = to_lose_.find(from); lost != to_lose_.end() && count >= lost->second) lose(from);
  changed_.notify_all();
}

void PretendedNet::lose(int rank) {
  gone_[static_cast<size_t>(rank)] = true;
  for (auto& [ranks, way] : ways_) {
    if (ranks.first == rank || ranks.second == rank) way.waiting.clear();
  }
  changed_.notify_all();
}

}  // namespace tw::test
