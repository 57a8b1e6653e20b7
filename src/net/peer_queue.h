// The operations to one peer: taken in order, posted in order as far as the network takes them, retired in order.
//
// A put is one write, or several where it is longer than a chunk. The word behind it is a message (Note): the target's
// engine adds, and may do so when it has the message, because the message comes behind the data:
//   * where the endpoint is `ordered`, messages do not overtake writes, so the note is posted right behind them;
//   * else writes end only when their data have arrived (`delivered`), and the note is posted when all before it have
//     ended. What is behind a note that is held back waits too, so that notes keep their order.
//
// Not for several threads at once.
//
// What breaks if this changes: post() is where S4 between hosts is decided. An item that is retired while a part of it
// flies frees a source that the network still reads.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <vector>

#include "net/endpoint.h"
#include "net/engine.h"

namespace tw::net {

// A message of an engine to another.
struct Note {
  enum Kind : uint32_t { kHello = 1, kAdd = 2, kBye = 3 };
  uint64_t secret;  // of the engines that were connected together: whatever else comes is dropped
  uint32_t kind;
  uint32_t from;
  int64_t window;  // of kAdd
  uint64_t offset;
  uint64_t add;
};

class PeerQueue;

// What is posted to the network and has not ended. `context` comes first: the network gives its address back.
struct Operation {
  Context context;
  PeerQueue* queue = nullptr;  // NULL: it receives
  uint64_t item = 0;           // the number of the item that it belongs to
  bool writes = false;         // data, not a note
  Note note{};                 // in memory that the network knows
};

// Where writes and notes go out, the same for all peers.
struct Outlet {
  Endpoint* endpoint;
  Windows* windows;
  void* notes_tag;  // of the memory that operations lie in
  uint64_t chunk;
};

class PeerQueue {
 public:
  // peer: the network's number of it; rank: that of sentences; operations: as many as may fly, and no others.
  PeerQueue(int peer, int rank, std::span<Operation> operations);

  int rank() const { return rank_; }
  uint64_t taken() const { return puts_taken_; }  // by put()
  uint64_t done() const { return puts_done_; }    // of these, in order
  // Whether there is something that post() could try.
  bool waits() const { return !failed() && next_ < items_.size(); }
  bool idle() const { return items_.empty(); }
  bool failed() const { return !failure_.ok(); }
  const Status& failure() const { return failure_; }

  void take(const Put& put);
  void take(const Put& put, const Note& note);
  void take(const Note& note);  // the engine's own: no put() counts it

  // Posts what the network takes now. True if it took something. What the network refuses is the peer's failure.
  bool post(const Outlet& outlet);

  // Takes back an operation that has ended.
  void end(Operation& operation);

  // From now on nothing is posted or retired. The first reason stays.
  void fail(Status why);

  // Whether nothing has ended for longer than that, though there are items.
  bool stands(TimePoint now, std::chrono::milliseconds longer) const {
    return !failed() && !items_.empty() && now - moved_ > longer;
  }
  TimePoint looked{};  // when it was last asked whether the peer lives

 private:
  struct Item {
    Put put;
    bool counts = false;  // it came by put()
    bool has_note = false;
    Note note{};
    uint64_t sent = 0;    // bytes that are posted
    int flying = 0;       // operations that have not ended
    bool posted = false;  // wholly
  };

  Sent post_data(const Outlet& outlet, Item& item, int* error);
  Sent post_note(const Outlet& outlet, Item& item, int* error);
  void begin(Operation* operation, Item& item, bool writes);
  void append(Item item);
  void retire();

  const int peer_;
  const int rank_;
  std::deque<Item> items_;
  uint64_t first_ = 0;  // the number of items_.front()
  size_t next_ = 0;     // the first item that is not wholly posted
  std::vector<Operation*> free_;
  int writes_flying_ = 0;
  TimePoint moved_{};  // when an operation ended last, or the first item came
  uint64_t puts_taken_ = 0;
  uint64_t puts_done_ = 0;
  Status failure_;
};

}  // namespace tw::net
