// Staged transport: the exchange's Transport where ranks have no memory in common. What is put for a peer goes into a
// message, a carrier moves all messages of a step, and each rank unpacks them into its own window when it waits for the
// step. Everything else of an exchange is as on shared memory, so layouts, sums and bits are too.
//
//   message   puts: {offset in the peer's window, bytes}, then the bytes; or, gathered, ids, weights and payloads of
//             all of this rank's tokens
//   block     a frame, and as much of the message as it holds: one for each peer, all of one size, in the first move
//             of a step
//   rest      what is left of longer messages, if there are any between any two ranks: the second move
//
// A block's size is the group's, whatever the step is. So the first move is the same call on all ranks even where they
// call different things, or one was given bad arguments, and its frames tell all of them. The second move happens only
// where all ranks agree on what they do. Each channel of the group has a queue of moves of its own: its steps follow
// each other, and a rank begins those of other channels in whatever order it likes. S1 to S6 hold by the order of
// messages (docs/PROTOCOL.md has the argument); a first move whose size depends on the call would hang all ranks.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "bootstrap/shared_memory.h"
#include "core/carrier.h"
#include "core/carrier_channel.h"
#include "core/make_backend.h"
#include "cpu/cost_model.h"
#include "cpu/outline.h"
#include "exchange/dispatch.h"
#include "exchange/transport.h"

namespace tw::cpu {

// A wait looks up this often, for peers that died or gave up.
inline constexpr std::chrono::milliseconds kLook{10};

// The beginning of each block.
struct Frame {
  uint64_t magic;
  uint64_t signal;  // a signal of exchange/signals.h
  uint64_t note;
  uint64_t bytes;  // bytes of the message to this receiver
  uint64_t most;   // bytes of this sender's longest message to anybody
  uint32_t channel;
  uint32_t gathered;
  uint64_t tokens;  // gathered alone
  uint64_t unused;
};
static_assert(sizeof(Frame) == 64);

// Memory that grows, and keeps what it has.
class Buffer {
 public:
  std::byte* data() { return data_; }
  void resize(size_t bytes);
  void leak();  // keeps the memory for ever: a move may still write there

 private:
  std::unique_ptr<std::byte[]> memory_;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// The part of a message that has come, in two pieces, read from its beginning.
struct Message {
  const std::byte* first;
  uint64_t first_bytes;
  const std::byte* rest;
  uint64_t rest_bytes;

  uint64_t left() const { return first_bytes + rest_bytes; }
  void take(void* to, uint64_t n) {  // n <= left()
    const uint64_t here = std::min(n, first_bytes);
    if (here > 0) std::memcpy(to, first, here);
    if (here < n) std::memcpy(static_cast<std::byte*>(to) + here, rest, n - here);
    first += here, first_bytes -= here;
    rest += n - here, rest_bytes -= n - here;
  }
};

class StagedTransport {
 public:
  // A function that unpacks a gathered message of a source.
  using Unpack = std::function<void(int source, const Frame& frame, const std::byte* message)>;

  // Collective among members.
  static Status make(const BackendInit& init, std::shared_ptr<StagedTransport>* made);
  ~StagedTransport();
  StagedTransport(const StagedTransport&) = delete;
  StagedTransport& operator=(const StagedTransport&) = delete;

  int rank() const { return me_; }
  int ranks() const { return ranks_; }

  // Begins a step; `send_only`: the caller will not wait at once.
  void begin(StepPlace at, const Outline& outline, bool send_only);
  // gathers: whether a dispatch of this bound is gathered, in a group of this shape. begin_gathered then begins the
  // step and returns its message, to be filled before publishing: tokens of `row` bytes, and `more` bytes behind them.
  bool gathers(const Shape& shape, int bound) const;
  std::byte* begin_gathered(StepPlace at, int tokens, uint64_t row, uint64_t more, bool send_only, Unpack unpack);

  void put(int peer, uint64_t offset, const void* source, size_t n);
  void put_row(int peer, uint64_t offset, const void* source, size_t n) { put(peer, offset, source, n); }
  void flush() {}
  void publish(int peer, uint64_t offset, Signal signal, uint64_t note);
  Signal load(uint64_t offset) const;
  std::byte* local(uint64_t offset) const { return window_->data() + offset; }
  const std::byte* returned(StepPlace, uint64_t offset) const { return local(offset); }
  std::shared_ptr<void> window() const { return window_; }
  std::byte* window_of(int) const { return nullptr; }
  // Stores a signal in this rank's own window.
  void store(uint64_t offset, Signal signal, uint64_t note);

  // Maps room for the channels of a larger map, in this rank's window: nobody else maps it. No step is under way.
  Status prepare_growth(const BackendInit&, const WindowMap& grown) {
    next_map_ = grown;
    return window_->map(-1, grown.channels(), grown.channels_bytes());
  }
  // Where the group has grown, blocks do too, alike on all ranks.
  void end_growth(bool grown) {
    if (!grown) return;
    map_ = next_map_;
    choose_blocks();
  }

  Waited wait(int peer, uint64_t offset, uint32_t step, TimePoint deadline);

  void announce_abort(AbortSignal reason);
  AbortSignal find_abort();
  AbortSignal abort_of(int writer);

  void describe(twPortableInfo_t* info) const;

 private:
  enum class Stage { kBlocks, kRest, kLanded, kFailed };

  // A step that has been sent, and whose messages are not unpacked yet.
  struct Flight {
    StepPlace at;
    Stage stage = Stage::kBlocks;
    int64_t move = -1;
    bool gathered = false;
    bool send_only = false;
    bool noticed = false;  // the peers have been told that the step was sent
    Unpack unpack;
    Buffer send, recv;
    Buffer rest_send;               // gathered: the whole message; its rest goes out from here
    Buffer rest_recv;               // rests, behind room for the beginning of a gathered message
    std::vector<Frame> mine;        // [N]
    std::vector<uint64_t> begin;    // [N + 1] where each rest begins in rest_send
    std::vector<uint64_t> filled;   // [N] bytes of each message so far
    std::vector<uint64_t> arrived;  // [N + 1] where each rest begins in rest_recv
  };

  explicit StagedTransport(const BackendInit& init);
  Status open(const BackendInit& init);
  Status measure(const BackendInit& init);
  void choose_blocks();
  Status measure_moves(const BackendInit& init, const CarrierMeeting& meeting, std::vector<TimedRound>* rounds);
  double time_move(twMoveKind_t kind, uint64_t bytes, Buffer& from, Buffer& to, TimePoint deadline,
                   const CarrierMeeting& meeting);

  Flight& new_flight(StepPlace at);
  Flight* find(uint64_t offset, int source);
  uint64_t rest_of(uint64_t message) const { return message > inline_bytes_ ? message - inline_bytes_ : 0; }
  std::byte* block(Buffer& buffer, int rank) const {
    return buffer.data() + static_cast<uint64_t>(rank) * (sizeof(Frame) + inline_bytes_);
  }
  void append(Flight& flight, int peer, const void* from, uint64_t n);
  void ship(Flight& flight);
  int64_t start(int queue, twMoveKind_t kind, const std::byte* from, std::byte* to, const uint64_t* send,
                const uint64_t* recv);
  void advance(Flight& flight, int timeout_ms);
  bool advance_others(const Flight* flight);
  void read_frames(Flight& flight);
  void land(Flight& flight, bool agreed);
  void unpack(Message message);
  void notice(Flight& flight);
  Waited blame(int peer, StepPlace at, Wake how);
  int find_dead(uint32_t step, StepPlace at);
  uint64_t tag(int kind) const { return tag_ + static_cast<uint64_t>(kind); }

  // The arena's: its groups may end before this does, so none of it is theirs.
  WindowMap map_;
  WindowMap next_map_;
  uint32_t first_step_;
  Bootstrap* bootstrap_;
  Carrier* carrier_;
  std::vector<int> members_;
  uint64_t tag_;
  int me_;
  int ranks_;
  std::shared_ptr<Mapping> window_;
  int64_t carrier_channel_ = -1;
  bool stuck_ = false;  // a move that was to be timed has not ended
  uint64_t inline_bytes_ = 0;
  Flight* sending_ = nullptr;
  std::vector<std::unique_ptr<Flight>> flights_;
  std::vector<std::unique_ptr<Flight>> spare_;
  std::vector<uint32_t> sent_;  // [channels] last step sent
  TimePoint looked_{};          // when peers' posts were looked at last
};

static_assert(Transport<StagedTransport>);

}  // namespace tw::cpu
