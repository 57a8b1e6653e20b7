// What an engine does between its collective calls (connect.cc has those): taking operations, progress, and its thread.
#include "net/fabric_engine.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

#include "core/interrupt.h"

namespace tw::net {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kReceives = 64;    // notes that may come before the engine looks at one
constexpr int kMostFlying = 32;  // operations of a peer in the network: beyond, they only wait elsewhere
constexpr int kHarvest = 16;     // operations that are taken back at a time
constexpr int kShortSleepUs = 50;
constexpr int kLongSleepUs = 1000;
constexpr int kSleepOnDescriptorUs = 10000;  // patience is looked at as often

}  // namespace

FabricEngine::FabricEngine(const FabricOptions& options, const Meeting& meeting, std::unique_ptr<Endpoint> endpoint)
    : options_(options),
      bootstrap_(*meeting.bootstrap),
      members_(meeting.members.begin(), meeting.members.end()),
      me_(static_cast<int>(std::ranges::find(members_, meeting.bootstrap->rank()) - members_.begin())),
      chunk_(std::min(options.chunk_bytes, endpoint->largest())),
      endpoint_(std::move(endpoint)),
      peers_(members_.size()) {}

FabricEngine::~FabricEngine() {
  if (!thread_.joinable()) return;
  stopping_ = true;
  wake();
  thread_.join();
}

Status FabricEngine::start(const std::vector<std::string>& names, uint64_t secret) {
  secret_ = secret;
  alarm_ = Fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!alarm_) return fail_errno("the engine's thread has no eventfd");
  // No peer gets more of the network's operations than its share, so that one that takes nothing leaves the others
  // theirs.
  const auto others = std::max<size_t>(members_.size() - 1, 1);
  const size_t share = std::clamp<size_t>(endpoint_->depth() / others, 1, kMostFlying);
  const size_t count = kReceives + share * members_.size();
  operations_ = std::make_unique<Operation[]>(count);
  Registered notes;
  TW_RETURN_IF_FAILED(
      endpoint_->add_memory(reinterpret_cast<std::byte*>(operations_.get()), count * sizeof(Operation), &notes));
  notes_tag_ = notes.tag;
  for (size_t peer = 0; peer < members_.size(); ++peer) {
    TW_RETURN_IF_FAILED(endpoint_->add_peer(names[peer]));
    if (static_cast<int>(peer) == me_) continue;
    peers_[peer].queue = std::make_unique<PeerQueue>(static_cast<int>(peer), members_[peer],
                                                     std::span(&operations_[kReceives + share * peer], share));
  }
  for (size_t i = 0; i < kReceives; ++i) receive(operations_[i]);
  thread_ = start_thread([this] { run(); });
  return {};
}

Posted FabricEngine::take(int peer, const Put& put, const Word* word) {
  const std::lock_guard lock(mutex_);
  if (!is_peer(peer) || !windows_.has(put, peer) || (word != nullptr && !windows_.has(*word, peer))) {
    return Posted::kRefused;
  }
  PeerQueue& queue = *peer_at(peer).queue;
  if (closed_ || queue.failed()) return Posted::kGone;
  if (queue.taken() - queue.done() >= static_cast<uint64_t>(options_.depth)) return Posted::kFull;
  if (word == nullptr) {
    queue.take(put);
  } else {
    Note note = note_of(Note::kAdd);
    note.window = word->at.window;
    note.offset = word->at.offset;
    note.add = word->add;
    queue.take(put, note);
  }
  (void)queue.post(outlet());
  if (queue.waits()) wake();
  return Posted::kTaken;
}

uint64_t FabricEngine::taken(int peer) const {
  const std::lock_guard lock(mutex_);
  return is_peer(peer) ? peer_at(peer).queue->taken() : 0;
}

uint64_t FabricEngine::done(int peer) const {
  const std::lock_guard lock(mutex_);
  return is_peer(peer) ? peer_at(peer).queue->done() : 0;
}

Status FabricEngine::failure(int peer) const {
  const std::lock_guard lock(mutex_);
  return is_peer(peer) ? peer_at(peer).queue->failure() : Status{};
}

void FabricEngine::give_up(int peer, const Status& why) {
  const std::lock_guard lock(mutex_);
  if (is_peer(peer)) peer_at(peer).queue->fail(why);
}

bool FabricEngine::poll() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  return lock.owns_lock() && pass();
}

bool FabricEngine::pass() {
  bool moved = harvest();
  const auto now = Clock::now();
  for (Peer& peer : peers_) {
    if (peer.queue == nullptr) continue;
    PeerQueue& queue = *peer.queue;
    if (queue.waits()) moved |= queue.post(outlet());
    if (queue.stands(now, kLookForLife)) judge(queue, now);
  }
  return moved;
}

// tcp does not always say that a peer has ended: some versions connect to it again and again.
void FabricEngine::judge(PeerQueue& queue, TimePoint now) {
  if (queue.stands(now, options_.patience)) {
    queue.fail(fail(twTimeout, "libfabric's {}: no operation to rank {} has ended for {} ms", endpoint_->provider(),
                    queue.rank(), options_.patience.count()));
  } else if (now - queue.looked > kLookForLife) {
    queue.looked = now;
    if (!bootstrap_.alive(queue.rank())) queue.fail(fail(twPeerDied, "rank {} is gone", queue.rank()));
  }
}

bool FabricEngine::harvest() {
  Completion ended[kHarvest];
  int error = 0;
  const int count = endpoint_->progress(ended, &error);
  if (count < 0) {
    for (Peer& peer : peers_) {
      if (peer.queue == nullptr) continue;
      peer.queue->fail(
          fail(twSystemError, "libfabric's {} has failed: {}", endpoint_->provider(), endpoint_->text_of(error)));
    }
    return false;
  }
  for (int i = 0; i < count; ++i) end(ended[i]);
  if (!idle_receives_.empty()) {
    const std::vector<Operation*> idle = std::move(idle_receives_);
    idle_receives_.clear();
    for (Operation* operation : idle) receive(*operation);
  }
  return count > 0;
}

void FabricEngine::end(const Completion& ended) {
  if (ended.context == nullptr) return;  // of a connection, not of an operation
  Operation& operation = *reinterpret_cast<Operation*>(ended.context);
  if (operation.queue == nullptr) {
    if (ended.error == 0) look_at(operation.note);
    receive(operation);
    return;
  }
  PeerQueue& queue = *operation.queue;
  if (ended.error != 0) {
    queue.fail(fail(twPeerDied, "libfabric's {} lost what went to rank {}: {}", endpoint_->provider(), queue.rank(),
                    endpoint_->text_of(ended.error)));
  }
  queue.end(operation);
}

void FabricEngine::receive(Operation& operation) {
  int error = 0;
  const Sent sent = endpoint_->receive(&operation.note, sizeof operation.note, notes_tag_, &operation.context, &error);
  if (sent != Sent::kSent) idle_receives_.push_back(&operation);
}

void FabricEngine::look_at(const Note& note) {
  if (note.secret != secret_ || note.from >= peers_.size() || !is_peer(static_cast<int>(note.from))) return;
  Peer& peer = peers_[note.from];
  const Place at{static_cast<int>(note.window), note.offset};
  switch (note.kind) {
    case Note::kHello:
      peer.greeted = true;
      return;
    case Note::kBye:
      peer.left = true;
      return;
    case Note::kAdd:
      if (note.offset % kWordBytes == 0 && windows_.has_here(at, kWordBytes)) return windows_.add_to(at, note.add);
      break;
  }
  peer.queue->fail(fail(twInternalError, "rank {} sent a word that is nowhere", peer.queue->rank()));
}

bool FabricEngine::has_more() const {
  return !idle_receives_.empty() ||
         std::ranges::any_of(peers_, [](const Peer& peer) { return peer.queue != nullptr && peer.queue->waits(); });
}

void FabricEngine::run() {
  int sleep_us = kShortSleepUs;
  while (!stopping_) {
    bool moved = false;
    {
      const std::lock_guard lock(mutex_);
      moved = pass();
    }
    if (moved) {
      sleep_us = kShortSleepUs;
    } else {
      sleep(sleep_us);
      sleep_us = std::min(2 * sleep_us, kLongSleepUs);
    }
  }
}

// What could not be posted is tried again soon, whatever the descriptor says: it is readable when something has come or
// gone, and a provider may refuse for other reasons.
void FabricEngine::sleep(int for_us) {
  int descriptor = -1;
  {
    const std::lock_guard lock(mutex_);
    if (has_more()) {
      for_us = kShortSleepUs;
    } else if ((descriptor = endpoint_->sleep_on()) >= 0) {
      for_us = kSleepOnDescriptorUs;
    }
    asleep_ = true;
  }
  pollfd watched[] = {{alarm_.get(), POLLIN, 0}, {descriptor, POLLIN, 0}};
  const timespec time{for_us / 1000000, for_us % 1000000 * 1000};
  (void)::ppoll(watched, 2, &time, nullptr);
  asleep_ = false;
  uint64_t count = 0;
  if ((watched[0].revents & POLLIN) != 0 && ::read(alarm_.get(), &count, sizeof count) < 0) return;
}

void FabricEngine::wake() {
  const uint64_t one = 1;
  if ((asleep_ || stopping_) && ::write(alarm_.get(), &one, sizeof one) < 0) return;
}

}  // namespace tw::net
