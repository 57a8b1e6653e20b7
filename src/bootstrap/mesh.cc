// The mesh: a Bootstrap over one stream connection to each peer (bootstrap/socket.h), for processes. Every rank is
// connected to every other, so that each sees for itself when one is gone, and survivors can talk without asking
// anybody. A star through rank 0 would need fewer sockets and would end with rank 0.
//
// One thread waits in a meeting while others post, look for posts and ask who is alive; none of these may block, or a
// wait in another group does not end (S6). What a rank sent before it died still counts: it decides which rank is
// blamed.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>

#include "bootstrap/socket.h"
#include "core/interrupt.h"

namespace tw {
namespace {

constexpr int kPollMs = kInterruptLook.count();
constexpr int kLookMs = 10;                          // how often members that have left are looked for
constexpr uint64_t kGivenUpTag = uint64_t{1} << 62;  // tag bit of posts that give an occasion up

int milliseconds_to(TimePoint deadline, int at_most) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, at_most));
}

class Mesh : public Bootstrap {
 public:
  Mesh(int rank, std::vector<Link> links, Fd wake, bool carries)
      : rank_(rank), carries_(carries), peers_(links.size()), wake_(std::move(wake)) {
    for (size_t peer = 0; peer < links.size(); ++peer) static_cast<Link&>(peers_[peer]) = std::move(links[peer]);
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(peers_.size()); }
  bool in_process() const override { return false; }
  bool shares_memory() const override { return carries_; }

  // It reads nothing that exchange() changes, because threads that wait in other groups ask this while one may be in
  // exchange().
  bool alive(int peer) override {
    if (peer == rank_) return true;
    Peer& other = peers_[peer];
    if (other.ended) return false;
    if (other.has_ended()) other.ended = true;
    return !other.ended;
  }

  std::vector<Presence> exchange(std::span<const int> members, uint64_t tag, const Parcel& mine, TimePoint deadline,
                                 std::vector<Parcel>* all, const Left& left, Needs needs) override;

  void give(std::span<const int> members, uint64_t tag, const std::string& bytes) override {
    const std::lock_guard lock(connections_mutex_);
    for (const int member : members) {
      if (member == rank_) continue;
      peers_[member].connection.queue(tag, bytes);
      pump_outside_meeting(peers_[member].connection);
    }
  }

  void post(int peer, uint64_t tag, const std::string& bytes) override {
    const std::lock_guard lock(connections_mutex_);
    peers_[peer].connection.queue(kPostTag | tag, bytes);
    pump_outside_meeting(peers_[peer].connection);
  }
  bool posted(int peer, uint64_t tag, std::string* bytes) override {
    const std::lock_guard lock(connections_mutex_);
    pump_outside_meeting(peers_[peer].connection);
    return peers_[peer].connection.find(kPostTag | tag, bytes);
  }
  void give_up(std::span<const int> members, uint64_t occasion) override {
    for (const int member : members) {
      if (member != rank_ && peers_[member].connection.fd() >= 0) post(member, kGivenUpTag | occasion, {});
    }
  }
  Status last_words(int peer) override {
    const std::lock_guard lock(connections_mutex_);
    std::string news;
    return peers_[peer].connection.find(kNewsTag, &news) ? read_news(news) : Status{};
  }
  void addresses(int peer, std::string* own, std::string* theirs) override;

 private:
  struct Peer : Link {
    std::atomic<bool> ended = false;
  };

  struct Meeting;
  bool advance(Meeting& meeting, std::vector<pollfd>* watched);
  bool is_given_up(Meeting& meeting);
  bool take(Meeting& meeting, size_t i);
  void pump_outside_meeting(Connection& connection);

  int rank_;
  const bool carries_;
  std::vector<Peer> peers_;
  std::mutex meeting_mutex_;      // held by exchange() alone, which waits with it
  std::mutex connections_mutex_;  // nobody waits while holding it
  Fd wake_;                       // an eventfd: another thread has taken from a socket what a meeting waits for
};

// What exchange() has so far.
struct Mesh::Meeting {
  std::span<const int> members;
  uint64_t tag;
  std::vector<Presence> presence;
  std::vector<Parcel>* all;
  bool crowded = false;  // something cannot be sent now, and no socket will tell when it can
};

// Moves data outside of a meeting. A thread that looks for posts also takes what a meeting, which waits in poll, will
// then not see in the socket; so it wakes the meeting.
void Mesh::pump_outside_meeting(Connection& connection) {
  if (!connection.pump() && !connection.has_output()) return;
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
}

bool Mesh::take(Meeting& meeting, size_t i) {
  if (!peers_[meeting.members[i]].connection.take(meeting.tag, &(*meeting.all)[i])) return false;
  meeting.presence[i] = Presence::kHere;
  return true;
}

// Sends and takes what can be sent and taken now; returns whether more is to be sent. *watched: the sockets to wait
// for.
bool Mesh::advance(Meeting& meeting, std::vector<pollfd>* watched) {
  const std::lock_guard lock(connections_mutex_);
  bool sending = false;
  for (size_t i = 0; i < meeting.members.size(); ++i) {
    const int member = meeting.members[i];
    if (member == rank_) continue;
    Peer& peer = peers_[member];
    peer.connection.pump();
    Presence& presence = meeting.presence[i];
    if (presence == Presence::kLate && !take(meeting, i) && (!peer.connection.open() || !alive(member))) {
      peer.connection.pump();  // its last parcel may have come in between
      if (!take(meeting, i)) presence = Presence::kGone;
    }
    const bool output = peer.connection.open() && !peer.ended && peer.connection.has_output();
    sending |= output;
    const bool crowded = peer.connection.crowded();
    meeting.crowded |= output && crowded;
    if (presence == Presence::kLate || output) {
      const short takes = output && !crowded ? POLLOUT : 0;
      watched->push_back({peer.connection.fd(), static_cast<short>(POLLIN | takes), 0});
    }
  }
  return sending;
}

// Whether a member has given the occasion up. If all are here, it is the next meeting that tells.
bool Mesh::is_given_up(Meeting& meeting) {
  const std::lock_guard lock(connections_mutex_);
  bool any = false;
  std::string none;
  for (size_t i = 0; i < meeting.members.size(); ++i) {
    const int member = meeting.members[i];
    const uint64_t tag = kPostTag | kGivenUpTag | occasion_of(meeting.tag);
    if (member == rank_ || !peers_[member].connection.find(tag, &none)) continue;
    meeting.presence[i] = Presence::kGaveUp;
    any = true;
  }
  return any;
}

std::vector<Presence> Mesh::exchange(std::span<const int> members, uint64_t tag, const Parcel& mine, TimePoint deadline,
                                     std::vector<Parcel>* all, const Left& left, Needs needs) {
  std::unique_lock one_at_a_time(meeting_mutex_);
  Meeting meeting{members, tag, std::vector<Presence>(members.size(), Presence::kLate), all};
  all->clear();
  all->resize(members.size());
  for (size_t i = 0; i < members.size(); ++i) {
    if (members[i] == rank_) {
      (*all)[i].bytes = mine.bytes;
      (*all)[i].fd = mine.fd;
      meeting.presence[i] = Presence::kHere;
    } else {
      const std::lock_guard lock(connections_mutex_);
      peers_[members[i]].connection.queue(tag, mine.bytes, mine.fd);
    }
  }
  for (;;) {
    std::vector<pollfd> watched{{wake_.get(), POLLIN, 0}};
    meeting.crowded = false;
    const bool sending = advance(meeting, &watched);
    bool waiting = false;
    bool all_here = true;
    bool failed = false;
    for (size_t i = 0; i < members.size(); ++i) {
      if (meeting.presence[i] != Presence::kLate) continue;
      if (left && left(members[i])) {
        const std::lock_guard lock(connections_mutex_);
        peers_[members[i]].connection.pump();  // what it gave before it left
        if (!take(meeting, i)) meeting.presence[i] = Presence::kGone;
      }
      waiting = waiting || meeting.presence[i] == Presence::kLate;
    }
    for (const Presence presence : meeting.presence) {
      all_here = all_here && presence == Presence::kHere;
      failed = failed || (needs == Needs::kAll && presence == Presence::kGone);
    }
    if (failed || (!all_here && is_given_up(meeting))) return meeting.presence;
    const int wait = milliseconds_to(deadline, left || meeting.crowded ? kLookMs : kPollMs);
    if ((!waiting && !sending) || wait == 0) return meeting.presence;
    one_at_a_time.unlock();  // a signal's handler may close another group of this comm
    if (is_interrupted()) return meeting.presence;
    one_at_a_time.lock();
    ::poll(watched.data(), watched.size(), wait);
    uint64_t woken = 0;
    (void)!::read(wake_.get(), &woken, sizeof woken);
  }
}

void Mesh::addresses(int peer, std::string* own, std::string* theirs) {
  const auto text = [](const sockaddr_storage& at) {
    char name[INET6_ADDRSTRLEN] = "";
    if (at.ss_family == AF_INET) {
      ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in&>(at).sin_addr, name, sizeof name);
    } else if (at.ss_family == AF_INET6) {
      ::inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6&>(at).sin6_addr, name, sizeof name);
    }
    constexpr char kMapped[] = "::ffff:";  // an IPv4 address, on a socket that takes both
    const std::string found = name;
    return found.starts_with(kMapped) && found.find('.') != std::string::npos ? found.substr(sizeof kMapped - 1)
                                                                              : found;
  };
  const std::lock_guard lock(connections_mutex_);
  sockaddr_storage at{};
  socklen_t length = sizeof at;
  if (::getsockname(peers_[peer].connection.fd(), reinterpret_cast<sockaddr*>(&at), &length) == 0) *own = text(at);
  length = sizeof at;
  if (::getpeername(peers_[peer].connection.fd(), reinterpret_cast<sockaddr*>(&at), &length) == 0) *theirs = text(at);
}

}  // namespace

std::unique_ptr<Bootstrap> make_mesh(int rank, std::vector<Link> links, Fd wake, bool carries) {
  return std::make_unique<Mesh>(rank, std::move(links), std::move(wake), carries);
}

}  // namespace tw
