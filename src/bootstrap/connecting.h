// Connecting: how a rank gets a link to every other. It dials the lower ranks and listens for the higher ones, all at
// once, and looks at everything that can end the wait: ranks that arrive, what they say, and ranks that die meanwhile.
// It takes a Way (how peers are reached) and gives a link for each peer, once all ranks have all links.
//
// If it succeeded on one rank and failed on another, the first would wait in its next meeting; so a rank that fails
// tells all others why, also those that come later (tell, tell_late). What it takes for a death decides which rank is
// blamed.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "bootstrap/socket.h"

namespace tw {

class Connecting {
 public:
  Connecting(std::unique_ptr<Way> way, int rank, int size, TimePoint deadline);
  ~Connecting();

  // Returns with links to all peers, once each of them has links to all.
  Status run();
  std::vector<Link> take_links();
  Fd take_wake() { return std::move(wake_); }  // an eventfd for the mesh; made before meeting, so that its lack is told

  // After a failure: tells the ranks that have come, and lets go of them. Returns whether others may still come that
  // would wait for this rank.
  bool tell(const Status& why);
  // Tells the other ranks as they come, until the deadline, or until `stop`.
  void tell_late(const std::atomic<bool>& stop);

 private:
  // What is known of the end of a process that this rank has no link to.
  enum class Death { kNone, kSeen, kSure };  // kSeen: another process may have taken its place
  struct Peer {
    Link link;
    bool stirred = false;  // the link has something to say
    bool ready = false;    // has links to all
    bool over = false;     // has said that it sees all ready: it may go
    Death death = Death::kNone;
    bool owed = false;  // is still to be told why this rank has failed
    // The attempt to dial it.
    Link dialled;
    int attempts = 0;
    bool greeted = false;  // it has been told who dials
    bool told = false;
    TimePoint next{};   // time of the next attempt
    TimePoint until{};  // deadline of this one
  };
  // A rank, or another program, that has dialled this rank.
  struct Caller {
    Link link;
    int pid = 0;
    TimePoint until{};
    int rank = -1;
    bool answered = false;
    bool done = false;
  };

  Status open();
  Status meet();
  Status step();
  bool complete();
  void tell_all(uint64_t tag, const std::string& bytes = {});
  bool dials(int rank) const;
  // Whether callers are waited for: not once all links stand, unless they are to be told.
  bool expects_callers() const { return !ready_ || !news_.empty(); }
  Status dial(int rank);
  Status greet(int rank);
  void hang_up(Peer& peer);
  Status accept_all();
  Status hear_caller(Caller& caller);
  Status answer(Caller& caller, const std::string& hello);
  void adopt(int rank, Link link);
  Status hear(int rank);
  Status heard(const std::string& news);
  Status missing() const;
  Status watch(int pid, Link* link, bool* dead) const;
  void wait();

  std::unique_ptr<Way> way_;
  int rank_;
  int size_;
  TimePoint deadline_;
  Fd wake_;
  Fd listener_;
  bool may_tell_ = false;  // this rank got so far that others may wait for it
  std::vector<Peer> peers_;
  std::vector<Caller> callers_;
  bool ready_ = false;  // this rank has links to all, and has said so
  std::string news_;    // why this rank has failed, once it has
  bool heard_ = false;  // the reason is a peer's, passed on as it came
};

}  // namespace tw
