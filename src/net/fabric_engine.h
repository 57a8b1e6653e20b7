// The engine over an endpoint: a queue for each peer (peer_queue.h), receives for notes, and a thread that makes
// progress. One lock guards all of it. Nobody waits in it: libfabric's calls return at once.
//
// The thread sleeps on the endpoint's descriptor where the provider has one, else for a while that grows. put() posts
// by itself, so that a message leaves without a change of threads, and wakes the thread only if something is left over.
//
// What breaks if this changes: a note is looked at under the lock, behind the completion that brought it, and added by
// a release: that is how whoever acquires the word sees the data.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "net/fabric.h"
#include "net/peer_queue.h"

namespace tw::net {

// Where nothing moves, it is asked as often whether the peer's process has ended.
inline constexpr std::chrono::milliseconds kLookForLife{20};

class FabricEngine final : public Engine {
 public:
  // The endpoint has no peers yet.
  FabricEngine(const FabricOptions& options, const Meeting& meeting, std::unique_ptr<Endpoint> endpoint);
  ~FabricEngine() override;

  // Allocates what peers are served with, and begins to receive. `names` are those of all ranks' endpoints.
  Status start(const std::vector<std::string>& names, uint64_t secret);
  // Sends every peer a message; the other waits for theirs. twUnsupported if a peer is not reached.
  Status greet(const Meeting& meeting);
  Status await_greetings(const Meeting& meeting);

  int rank() const override { return me_; }
  int size() const override { return static_cast<int>(members_.size()); }
  Status add_window(const Meeting& meeting, std::byte* memory, uint64_t bytes, int* window) override;
  Posted put(int peer, const Put& put) override { return take(peer, put, nullptr); }
  Posted put(int peer, const Put& put, const Word& word) override { return take(peer, put, &word); }
  uint64_t taken(int peer) const override;
  uint64_t done(int peer) const override;
  bool poll() override;
  Status failure(int peer) const override;
  void give_up(int peer, const Status& why) override;
  Status close(const Meeting& meeting) override;

 private:
  struct Peer {
    std::unique_ptr<PeerQueue> queue;  // none of this rank
    bool greeted = false;              // its hello is here
    bool left = false;                 // its bye is here
  };

  Posted take(int peer, const Put& put, const Word* word);
  Status unreached() const;
  bool is_peer(int peer) const { return peer >= 0 && peer < size() && peer != me_; }
  Peer& peer_at(int peer) { return peers_[static_cast<size_t>(peer)]; }
  const Peer& peer_at(int peer) const { return peers_[static_cast<size_t>(peer)]; }
  Outlet outlet() { return {endpoint_.get(), &windows_, notes_tag_, chunk_}; }
  Note note_of(Note::Kind kind) const { return {secret_, kind, static_cast<uint32_t>(me_), 0, 0, 0}; }

  // Waits until no peer is awaited any more, as `awaited` says under the lock. Peers that die meanwhile fail; so do,
  // with `what` in the sentence, those that are awaited at the deadline.
  template <class Awaited>
  Status await(const Meeting& meeting, const char* what, const Awaited& awaited);

  // All under the lock.
  bool pass();
  void judge(PeerQueue& queue, TimePoint now);
  bool harvest();
  void end(const Completion& ended);
  void receive(Operation& operation);
  void look_at(const Note& note);
  bool has_more() const;

  void run();
  void sleep(int for_us);
  void wake();

  const FabricOptions options_;
  Bootstrap& bootstrap_;
  const std::vector<int> members_;
  const int me_;
  const uint64_t chunk_;  // bytes of a write
  uint64_t secret_ = 0;
  mutable std::mutex mutex_;
  std::unique_ptr<Operation[]> operations_;  // outlives the endpoint, which may write to them
  std::unique_ptr<Endpoint> endpoint_;
  void* notes_tag_ = nullptr;
  Windows windows_;
  std::vector<Peer> peers_;
  std::vector<Operation*> idle_receives_;  // that the network did not take
  bool closed_ = false;
  Fd alarm_;  // an eventfd, which wakes the thread
  std::atomic<bool> asleep_ = false;
  std::atomic<bool> stopping_ = false;
  std::thread thread_;
};

}  // namespace tw::net
