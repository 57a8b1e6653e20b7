// Staged transport between ranks without common memory (cpu/staged.h): fills messages, starts the moves of a step,
// unpacks what comes, and finds whom to blame when a move does not end. Rows are unpacked before the signal that stands
// for them is stored (S4), and only by the rank that waits for the step, so S2 and S3 hold. If the ranks' frames
// differ, nothing is unpacked.
//
// All decisions about a second move follow from frames that all ranks have: if one rank decided otherwise, the others
// would wait in a collective that never ends. blame and notice decide which rank is blamed.
#include "cpu/staged.h"

#include <algorithm>
#include <mutex>
#include <thread>

#include "bootstrap/shared_memory.h"
#include "core/interrupt.h"

namespace tw::cpu {
namespace {

constexpr uint64_t kMagic = 0x314d524643575431;
constexpr std::chrono::milliseconds kRarely{1};    // calls look for posts no more often than this
constexpr std::chrono::milliseconds kNotice{50};   // after so much waiting the peers are told how far this rank is
constexpr std::chrono::milliseconds kGrace{200};   // time for what a rank that died or gave up has sent to arrive
constexpr std::chrono::milliseconds kBroken{900};  // time for it to be known which rank broke a move

enum Post { kAbortPost, kNoticePost };

struct PutHeader {
  uint64_t offset;
  uint64_t bytes;
};
static_assert(sizeof(PutHeader) == kPutHeader);

int milliseconds(TimePoint::duration duration) {
  return static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(duration).count());
}

}  // namespace

void Buffer::resize(size_t bytes) {
  constexpr size_t kAlignment = 64;
  if (bytes <= bytes_) return;
  auto memory = std::make_unique<std::byte[]>(bytes + kAlignment);  // zeros: messages must not show old memory
  auto* const data = memory.get() + (kAlignment - reinterpret_cast<uintptr_t>(memory.get()) % kAlignment);
  if (bytes_ > 0) std::memcpy(data, data_, bytes_);
  memory_ = std::move(memory);
  data_ = data;
  bytes_ = bytes;
}

void Buffer::leak() {
  static std::mutex mutex;
  static auto* const leaked = new std::vector<std::unique_ptr<std::byte[]>>;
  const std::lock_guard lock(mutex);
  leaked->push_back(std::move(memory_));
}

StagedTransport::StagedTransport(const BackendInit& init)
    : map_(init.context->map),
      first_step_(init.context->first_step),
      bootstrap_(init.bootstrap),
      carrier_(init.carrier),
      members_(init.members.begin(), init.members.end()),
      tag_(init.tag),
      me_(init.context->me),
      ranks_(static_cast<int>(init.members.size())),
      sent_(static_cast<size_t>(init.context->map.shape().channels), init.context->first_step) {}

StagedTransport::~StagedTransport() {
  bool idle = !stuck_;
  for (const auto& flight : flights_) {
    if (flight->move < 0) continue;
    idle = false;
    for (Buffer* buffer : {&flight->send, &flight->recv, &flight->rest_send, &flight->rest_recv}) buffer->leak();
  }
  if (carrier_channel_ >= 0) carrier_->calls.close(carrier_->calls.context, carrier_channel_, idle ? 1 : 0);
}

// ------------------------------------------------------------------------------------------------------------ sending

StagedTransport::Flight& StagedTransport::new_flight(StepPlace at) {
  (void)advance_others(nullptr);
  if (spare_.empty()) spare_.push_back(std::make_unique<Flight>());
  flights_.push_back(std::move(spare_.back()));
  spare_.pop_back();
  Flight& flight = *flights_.back();
  flight.at = at;
  flight.stage = Stage::kBlocks;
  flight.move = -1;
  flight.gathered = flight.noticed = false;
  flight.unpack = nullptr;
  const size_t n = static_cast<size_t>(ranks_);
  flight.send.resize(n * (sizeof(Frame) + inline_bytes_));
  flight.recv.resize(n * (sizeof(Frame) + inline_bytes_));
  flight.mine.assign(n, Frame{});
  flight.begin.assign(n + 1, 0);
  flight.filled.assign(n, 0);
  flight.arrived.assign(n + 1, 0);
  sending_ = &flight;
  return flight;
}

void StagedTransport::begin(StepPlace at, const Outline& outline, bool send_only) {
  Flight& flight = new_flight(at);
  flight.send_only = send_only;
  uint64_t most = 0;
  for (int peer = 0; peer < ranks_; ++peer) {
    const auto rows = static_cast<uint64_t>(outline.rows == nullptr ? 1 : outline.rows[peer]);
    const uint64_t once = outline.once > 0 ? outline.once + kPutHeader : 0;
    const uint64_t bytes =
        peer == me_ ? 0 : rows * (outline.bytes + static_cast<uint64_t>(outline.puts) * kPutHeader) + once;
    flight.mine[peer].bytes = bytes;
    flight.begin[peer + 1] = flight.begin[peer] + rest_of(bytes);
    most = std::max(most, bytes);
  }
  for (Frame& frame : flight.mine) frame.most = most;
  flight.rest_send.resize(flight.begin[ranks_]);
}

bool StagedTransport::gathers(const Shape& shape, int bound) const {
  return ranks_ > 1 && choose_gathered(shape, carrier_->costs, carrier_->strategy, inline_bytes_, bound);
}

std::byte* StagedTransport::begin_gathered(StepPlace at, int tokens, uint64_t row, uint64_t more, bool send_only,
                                           Unpack unpack) {
  Flight& flight = new_flight(at);
  flight.send_only = send_only;
  flight.gathered = true;
  flight.unpack = std::move(unpack);
  const uint64_t bytes = static_cast<uint64_t>(tokens) * row + more;
  for (Frame& frame : flight.mine) {
    frame.bytes = frame.most = bytes;
    frame.tokens = static_cast<uint64_t>(tokens);
    frame.gathered = 1;
  }
  flight.rest_send.resize(std::max<uint64_t>(bytes, 1));
  return flight.rest_send.data();
}

// Appends bytes to a message: first what fits into its block, then the rest.
void StagedTransport::append(Flight& flight, int peer, const void* from, uint64_t n) {
  const uint64_t at = flight.filled[peer];
  const uint64_t first = std::min(n, inline_bytes_ - std::min(at, inline_bytes_));
  if (first > 0) std::memcpy(block(flight.send, peer) + sizeof(Frame) + at, from, first);
  if (first < n) {
    std::byte* const rest = flight.rest_send.data() + flight.begin[peer];
    std::memcpy(rest + (at + first - inline_bytes_), static_cast<const std::byte*>(from) + first, n - first);
  }
  flight.filled[peer] += n;
}

void StagedTransport::put(int peer, uint64_t offset, const void* source, size_t n) {
  if (peer == me_) {
    std::memcpy(local(offset), source, n);
    return;
  }
  const PutHeader header{offset, n};
  append(*sending_, peer, &header, sizeof header);
  append(*sending_, peer, source, n);
}

void StagedTransport::publish(int peer, uint64_t offset, Signal signal, uint64_t note) {
  Frame& frame = sending_->mine[peer];
  frame.magic = kMagic;
  frame.signal = pack(signal);
  frame.note = note;
  frame.channel = static_cast<uint32_t>(sending_->at.channel);
  if (peer != me_) return;
  store(offset, signal, note);  // own signal comes last: publish_step begins with the next rank
  ship(*sending_);
}

void StagedTransport::ship(Flight& flight) {
  sending_ = nullptr;
  sent_[static_cast<size_t>(flight.at.channel)] = flight.at.step;
  if (ranks_ == 1) {
    spare_.push_back(std::move(flights_.back()));
    flights_.pop_back();
    return;
  }
  for (int peer = 0; peer < ranks_; ++peer) {
    std::memcpy(block(flight.send, peer), &flight.mine[peer], sizeof(Frame));
    if (!flight.gathered || peer == me_) continue;
    append(flight, peer, flight.rest_send.data(), std::min(flight.mine[me_].bytes, inline_bytes_));
  }
  const uint64_t bytes = sizeof(Frame) + inline_bytes_;
  flight.move = start(flight.at.channel, twMoveBlocks, flight.send.data(), flight.recv.data(), &bytes, &bytes);
  if (flight.move < 0) flight.stage = Stage::kFailed;
  // A rank that does not wait now must tell its progress now: later, while it computes, it cannot say that it is not
  // the late one.
  if (flight.send_only) notice(flight);
}

int64_t StagedTransport::start(int queue, twMoveKind_t kind, const std::byte* from, std::byte* to, const uint64_t* send,
                               const uint64_t* recv) {
  const twMove_t move{sizeof(twMove_t), kind, queue, from, to, send, recv};
  return carrier_->calls.start(carrier_->calls.context, carrier_channel_, &move);
}

// ---------------------------------------------------------------------------------------------------------- receiving

Signal StagedTransport::load(uint64_t offset) const {
  uint64_t bits = 0;
  std::memcpy(&bits, local(offset), sizeof bits);
  return tw::unpack(bits);
}

void StagedTransport::store(uint64_t offset, Signal signal, uint64_t note) {
  const uint64_t bits = pack(signal);
  std::memcpy(local(offset + kNoteOffset), &note, sizeof note);
  std::memcpy(local(offset), &bits, sizeof bits);
}

StagedTransport::Flight* StagedTransport::find(uint64_t offset, int source) {
  for (const auto& flight : flights_) {
    if (map_.signal(flight->at.channel, flight->at.bank(), source) == offset) return flight.get();
  }
  return nullptr;
}

// Takes a step further. Waits for at most one move.
void StagedTransport::advance(Flight& flight, int timeout_ms) {
  if (flight.move < 0) return;
  const int32_t ended = carrier_->calls.wait(carrier_->calls.context, carrier_channel_, flight.move, timeout_ms);
  if (ended == 0) return;
  flight.move = -1;
  if (ended < 0) {
    flight.stage = Stage::kFailed;
  } else if (flight.stage == Stage::kBlocks) {
    read_frames(flight);
  } else {
    land(flight, true);
  }
}

// Begins the second moves of steps on other channels where the first have ended: the peers wait for them, and ranks
// complete in whatever order they like. Returns whether any step is still in its first move.
bool StagedTransport::advance_others(const Flight* flight) {
  bool any = false;
  for (const auto& each : flights_) {
    if (each.get() == flight || each->stage != Stage::kBlocks) continue;
    advance(*each, 0);
    any = any || each->stage == Stage::kBlocks;
  }
  return any;
}

// Reads the frames, which are all here. What follows from them is the same on all ranks: whether they agree, and
// whether there is a second move.
void StagedTransport::read_frames(Flight& flight) {
  const Frame& mine = flight.mine[me_];
  bool agreed = true;
  uint64_t most = 0;
  for (int source = 0; source < ranks_; ++source) {
    Frame frame;
    std::memcpy(&frame, block(flight.recv, source), sizeof frame);
    const Signal signal = tw::unpack(frame.signal);
    const Signal own = tw::unpack(mine.signal);
    agreed = agreed && frame.magic == kMagic && frame.channel == mine.channel && signal.step == own.step &&
             signal.mode == own.mode && frame.note == mine.note && frame.gathered == mine.gathered &&
             frame.bytes <= frame.most;
    most = std::max(most, frame.most);
    flight.arrived[source + 1] = flight.arrived[source] + rest_of(frame.bytes);
  }
  if (!agreed || most <= inline_bytes_) {
    land(flight, agreed);
    return;
  }
  flight.stage = Stage::kRest;
  if (flight.gathered) {
    const uint64_t each = rest_of(most);
    for (int source = 0; source < ranks_; ++source) flight.arrived[source + 1] = flight.arrived[source] + each;
    flight.rest_send.resize(most);
    flight.rest_recv.resize(inline_bytes_ + flight.arrived[ranks_]);
    flight.move = start(flight.at.channel, twMoveGather, flight.rest_send.data() + inline_bytes_,
                        flight.rest_recv.data() + inline_bytes_, &each, &each);
  } else {
    std::vector<uint64_t> send(ranks_);
    std::vector<uint64_t> recv(ranks_);
    for (int peer = 0; peer < ranks_; ++peer) {
      send[peer] = flight.begin[peer + 1] - flight.begin[peer];
      recv[peer] = flight.arrived[peer + 1] - flight.arrived[peer];
    }
    flight.rest_recv.resize(inline_bytes_ + flight.arrived[ranks_]);
    flight.move = start(flight.at.channel, twMoveExact, flight.rest_send.data(),
                        flight.rest_recv.data() + inline_bytes_, send.data(), recv.data());
  }
  if (flight.move < 0) flight.stage = Stage::kFailed;
}

// Unpacks rows into this rank's own window, then stores the signals that stand for them. Where ranks do not agree there
// are no rows.
void StagedTransport::land(Flight& flight, bool agreed) {
  flight.stage = Stage::kLanded;
  for (int source = 0; source < ranks_; ++source) {
    if (source == me_) continue;
    Frame frame;
    std::memcpy(&frame, block(flight.recv, source), sizeof frame);
    Signal signal = tw::unpack(frame.signal);
    const uint64_t offset = map_.signal(flight.at.channel, flight.at.bank(), source);
    if (!agreed) {
      // A frame of another step or channel comes from another call.
      const bool here = frame.magic == kMagic && signal.step == flight.at.step &&
                        frame.channel == static_cast<uint32_t>(flight.at.channel);
      signal = here ? Signal{signal.step, signal.mode, 0} : Signal{flight.at.step, Mode::kNone, 0};
      store(offset, signal, frame.note);
      continue;
    }
    const std::byte* const beginning = block(flight.recv, source) + sizeof(Frame);
    const uint64_t rest = rest_of(frame.bytes);
    std::byte* const whole = flight.rest_recv.data() + flight.arrived[source];
    if (!flight.gathered) {
      unpack({beginning, frame.bytes - rest, rest > 0 ? whole + inline_bytes_ : nullptr, rest});
      store(offset, signal, frame.note);
    } else if (rest == 0) {
      flight.unpack(source, frame, beginning);  // which stores the signal
    } else {
      // Before the rest lie the rests of sources that are unpacked already, or room that was left for this.
      std::memcpy(whole, beginning, inline_bytes_);
      flight.unpack(source, frame, whole);
    }
  }
}

void StagedTransport::unpack(Message message) {
  PutHeader header;
  while (message.left() >= sizeof header) {
    message.take(&header, sizeof header);
    if (header.bytes > message.left() || header.bytes > map_.bytes()) return;
    if (header.offset > map_.bytes() - header.bytes) return;
    message.take(local(header.offset), header.bytes);
  }
}

// ------------------------------------------------------------------------------------------------------------- errors

Waited StagedTransport::wait(int peer, uint64_t offset, uint32_t step, TimePoint deadline) {
  Flight* const flight = find(offset, peer);
  if (flight == nullptr) return reached(load(offset).step, step) ? Wake::kArrived : Wake::kLate;
  const StepPlace at = flight->at;
  const TimePoint began = std::chrono::steady_clock::now();
  TimePoint now = began;
  TimePoint dead_until = TimePoint::max();
  TimePoint given_up_until = TimePoint::max();
  for (;;) {
    const auto look = advance_others(flight) ? kRarely : kLook;
    advance(*flight, std::clamp(milliseconds(deadline - now), 0, milliseconds(look)));
    if (flight->stage == Stage::kLanded) {
      const auto place = std::find_if(flights_.begin(), flights_.end(), [&](auto& f) { return f.get() == flight; });
      spare_.push_back(std::move(*place));
      flights_.erase(place);
      return Wake::kArrived;
    }
    now = std::chrono::steady_clock::now();
    looked_ = {};
    if (find_abort().kind != 0) {  // by a rank that may have come through the step, with all that it needs on its way
      given_up_until = std::min({given_up_until, now + kGrace, deadline});
      if (now >= given_up_until) return Wake::kAborted;
      if (flight->stage == Stage::kFailed) std::this_thread::sleep_for(kRarely);
      continue;
    }
    const int dead = find_dead(step, at);
    if (flight->stage == Stage::kFailed) {
      if (dead >= 0) return {Wake::kDied, dead};
      dead_until = std::min(dead_until, now + kBroken);
      if (now >= dead_until) return blame(peer, at, Wake::kDied);
      std::this_thread::sleep_for(kRarely);
    } else if (dead >= 0) {
      dead_until = std::min(dead_until, now + kGrace);
      if (now >= dead_until) return {Wake::kDied, dead};
    }
    if (is_interrupted()) return Wake::kInterrupted;
    if (now >= deadline) return dead >= 0 ? Waited{Wake::kDied, dead} : blame(peer, at, Wake::kLate);
    if (!flight->noticed && now - began >= kNotice) notice(*flight);
  }
}

// Tells the peers how far this rank is on each channel, as a move that does not end does not say who holds it up.
void StagedTransport::notice(Flight& flight) {
  flight.noticed = true;
  const std::string steps(reinterpret_cast<const char*>(sent_.data()), sent_.size() * sizeof(uint32_t));
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer != me_) bootstrap_->post(members_[peer], tag(kNoticePost), steps);
  }
}

// Blames the first rank that has not said that it has sent the step; `peer` if all have.
Waited StagedTransport::blame(int peer, StepPlace at, Wake how) {
  for (int i = 1; i < ranks_; ++i) {
    const int rank = (me_ + i) % ranks_;
    std::string steps;
    uint32_t sent = first_step_;
    const auto channel = static_cast<size_t>(at.channel);
    if (bootstrap_->posted(members_[rank], tag(kNoticePost), &steps) && steps.size() >= (channel + 1) * sizeof sent) {
      std::memcpy(&sent, steps.data() + channel * sizeof sent, sizeof sent);
    }
    if (!reached(sent, at.step)) return {how, rank};
  }
  return {how, peer};
}

// Finds a rank that is gone and whose signal of the step is not here, -1 if there is none.
int StagedTransport::find_dead(uint32_t step, StepPlace at) {
  for (int rank = 0; rank < ranks_; ++rank) {
    if (bootstrap_->alive(members_[rank])) continue;
    if (!reached(load(map_.signal(at.channel, at.bank(), rank)).step, step)) return rank;
  }
  return -1;
}

void StagedTransport::announce_abort(AbortSignal reason) {
  const uint64_t bits = pack(reason);
  const std::string bytes(reinterpret_cast<const char*>(&bits), sizeof bits);
  std::memcpy(local(WindowMap::abort_signal(me_)), &bits, sizeof bits);
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer != me_) bootstrap_->post(members_[peer], tag(kAbortPost), bytes);
  }
}

AbortSignal StagedTransport::abort_of(int writer) {
  uint64_t bits = 0;
  std::string bytes;
  if (writer != me_ && bootstrap_->posted(members_[writer], tag(kAbortPost), &bytes) && bytes.size() == sizeof bits) {
    std::memcpy(local(WindowMap::abort_signal(writer)), bytes.data(), sizeof bits);
  }
  std::memcpy(&bits, local(WindowMap::abort_signal(writer)), sizeof bits);
  return unpack_abort(bits);
}

AbortSignal StagedTransport::find_abort() {
  const TimePoint now = std::chrono::steady_clock::now();
  if (now - looked_ < kRarely) return {};
  looked_ = now;
  for (int writer = 0; writer < ranks_; ++writer) {
    const AbortSignal signal = abort_of(writer);
    if (signal.kind != 0) {
      looked_ = {};  // a caller that asks again is told again
      return signal;
    }
  }
  return {};
}

void StagedTransport::describe(twPortableInfo_t* info) const {
  info->strategy = carrier_->strategy;
  info->inline_bytes = static_cast<int64_t>(inline_bytes_);
  info->exchange_us = carrier_->costs.exchange_us;
  info->exchange_rate = carrier_->costs.exchange_rate;
  info->gather_us = carrier_->costs.gather_us;
  info->gather_rate = carrier_->costs.gather_rate;
  info->channel = carrier_channel_;
}

}  // namespace tw::cpu
