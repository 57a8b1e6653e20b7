// The engine between hosts: what moves bytes to ranks that share no memory. An engine has windows (memory of this
// process that peers may write), puts (copies into a peer's window), and words: 64-bit integers in a window to which a
// peer adds. A protocol above tells by words which rows have come; nobody above knows what the network is.
//
// fabric.h makes the engine over libfabric. tests/cc/pretended_engine.h makes one between threads, whose mishaps a test
// chooses. tests/cc/engine_test.cc holds both to this page.
//
// Order. Puts and words of one engine to one peer form a queue, in the order in which put() took them. Whoever reads a
// word by an acquire load, in any process that maps the window, and finds what an operation has added, sees the data of
// that operation and of all earlier ones in its queue, and all earlier words. Nothing else is ordered: not the bytes of
// a put, not puts without a word behind them, not operations to or from different peers.
//
// Words. An add is atomic: several peers, and threads of the owner by std::atomic_ref, may add to one word. The usual
// use is one writer, which adds (new - old), so that the word has `new` then. A word is 8 bytes, aligned to 8. Threads
// that sleep on its upper half by a futex (FUTEX_WAIT, not private) are woken.
//
// Progress is a thread of the engine's own, in every process: a put lands while the target computes or sleeps. A thread
// that waits for a word may also call poll() in its loop, which saves the way through that thread.
//
// Memory. The source of a put may change when done(peer) has reached the put's number, taken(peer) just behind it. That
// tells nothing of the target: only words do. Nobody may write where a put is under way, nor may a put cover a word.
//
// Bounds. No call but those that are collective waits for a peer, and these end by their deadline. A peer has at most
// `depth` operations that are not done; a put beyond is kFull and changes nothing. What one peer does not take does not
// keep puts to others from going.
//
// Errors are kept per peer, and are final. failure(peer) says why nothing more goes to a peer, and put() to it is
// kGone, once an operation to it has failed, or once nothing moves though some are under way: because the peer's
// process has ended (Bootstrap::alive), or for as long as the engine's patience. Other peers go on. Behind a failure
// done(peer) stands still, and what was under way may have landed or not; its sources are free when the engine has been
// destroyed. An engine that has nothing to send to a peer does not learn of its end: ask alive(), and tell it by
// give_up.
//
// Threads. Every call but the collective ones may come from any thread at any time until close(). Those, and the
// destructor, come from one thread at a time.
//
// What breaks if this changes: the order is S4 between hosts; a word that overtakes data is a wrong row. The bound and
// the patience are S6 and S7.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "bootstrap/bootstrap.h"
#include "core/status.h"

namespace tw::net {

// A place in a window: the window's number, which is the same on all ranks, and bytes from where it begins.
struct Place {
  int window = 0;
  uint64_t offset = 0;
};

// Copies `bytes` bytes, 0 too, from a window of this rank to a window of the peer.
struct Put {
  Place from;
  Place to;
  uint64_t bytes = 0;
};

// Adds to the word at a place of the peer's window, modulo 2^64.
struct Word {
  Place at;
  uint64_t add = 0;
};

enum class Posted {
  kTaken,
  kFull,     // the peer has as many operations as it may have: come again
  kGone,     // failure(peer) says why; or the engine is closed
  kRefused,  // no such peer, no such place, or a word that is not aligned: the caller's fault, nothing was sent
};

// A meeting of all ranks of an engine: each call that takes one is collective, uses the tags from `tag` to `tag + 2`,
// and ends by the deadline. Peers are numbered as `members` are, from 0. The bootstrap outlives the engine.
struct Meeting {
  Bootstrap* bootstrap;
  std::span<const int> members;
  uint64_t tag;
  TimePoint deadline;
};

class Engine {
 public:
  // Ends without asking anybody, as the end of the process would: peers that put to this rank then get a failure.
  virtual ~Engine() = default;

  virtual int rank() const = 0;  // this rank's number among the members
  virtual int size() const = 0;

  // Makes memory a window, the same on all ranks but for its place and size. Collective. It must outlive the engine. If
  // it fails on one rank it fails on all, the sentence says on which, and there is no new window.
  virtual Status add_window(const Meeting& meeting, std::byte* memory, uint64_t bytes, int* window) = 0;

  // Takes an operation to a peer: a put, or a put and a word behind it. Never waits.
  virtual Posted put(int peer, const Put& put) = 0;
  virtual Posted put(int peer, const Put& put, const Word& word) = 0;

  // How many operations to a peer were taken so far, and how many of the first of them are done.
  virtual uint64_t taken(int peer) const = 0;
  virtual uint64_t done(int peer) const = 0;

  // Makes progress if no other thread does just now. True if something moved. Never waits.
  virtual bool poll() = 0;

  // Why nothing more goes to a peer; twSuccess while it does.
  virtual Status failure(int peer) const = 0;

  // Treats a peer as failed, for that reason. Does nothing if it has failed already.
  virtual void give_up(int peer, const Status& why) = 0;

  // Takes no more operations, brings those under way to their end, and meets the peers, so that nobody's window goes
  // while puts to it are under way. Collective. A peer that is gone, or late, or has failed before is left out, and
  // named by what is returned; this rank's end is orderly even then.
  virtual Status close(const Meeting& meeting) = 0;
};

}  // namespace tw::net
