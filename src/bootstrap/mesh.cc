// Every rank is connected to every other, so that each sees for itself when one is gone, and survivors can talk without
// asking anybody. A star through rank 0 would need fewer sockets and would end with rank 0.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <numeric>

#include "bootstrap/socket.h"
#include "core/interrupt.h"

namespace tw {
namespace {

constexpr int kRetryMs = 2;
constexpr int kPollMs = kInterruptLook.count();
constexpr int kLookMs = 10;  // for members that have left
constexpr uint64_t kHelloTag = 0;
constexpr uint64_t kGivenUpTag = uint64_t{1} << 62;  // of posts: with the occasion
constexpr std::chrono::seconds kAnswerTime{3};       // of who was dialled: another program may listen there

int milliseconds_to(TimePoint deadline, int at_most) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, at_most));
}

struct Hello {
  int32_t version;
  int32_t rank;
  int32_t size;
  uint64_t secret;
};

class Mesh : public Bootstrap {
 public:
  Mesh(std::unique_ptr<Way> way, int rank, int size) : way_(std::move(way)), rank_(rank), size_(size), peers_(size) {}
  ~Mesh() override {
    // Closing alone would not tell the peers while a forked child holds the sockets too.
    for (Peer& peer : peers_) {
      if (peer.connection.fd() >= 0) ::shutdown(peer.connection.fd(), SHUT_RDWR);
    }
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool in_process() const override { return false; }

  Status connect(TimePoint deadline);

  // Asked by threads that wait in other groups, while one may be in exchange(): reads nothing that exchange() changes.
  bool alive(int peer) override {
    if (peer == rank_) return true;
    Peer& other = peers_[peer];
    if (other.ended) return false;
    // The process descriptor, where there is one, tells of death even while a forked child holds the socket open.
    pollfd watched[2] = {{other.connection.fd(), POLLRDHUP, 0}, {other.process.get(), POLLIN, 0}};
    ::poll(watched, other.process ? 2 : 1, 0);
    if ((watched[0].revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0 || (watched[1].revents & POLLIN) != 0) {
      other.ended = true;
    }
    return !other.ended;
  }

  std::vector<Presence> exchange(std::span<const int> members, uint64_t tag, const Parcel& mine, TimePoint deadline,
                                 std::vector<Parcel>* all, const Left& left) override;

  void post(int peer, uint64_t tag, const std::string& bytes) override {
    const std::lock_guard lock(connections_mutex_);
    peers_[peer].connection.queue(kPostTag | tag, bytes, -1);
    pump_beside_meeting(peers_[peer].connection);
  }
  bool posted(int peer, uint64_t tag, std::string* bytes) override {
    const std::lock_guard lock(connections_mutex_);
    pump_beside_meeting(peers_[peer].connection);
    return peers_[peer].connection.find(kPostTag | tag, bytes);
  }
  void give_up(std::span<const int> members, uint64_t occasion) override {
    for (const int member : members) {
      if (member != rank_ && peers_[member].connection.fd() >= 0) post(member, kGivenUpTag | occasion, {});
    }
  }
  void addresses(int peer, std::string* own, std::string* theirs) override;

 private:
  struct Peer {
    Connection connection;
    Fd process;  // pidfd
    std::atomic<bool> ended = false;
  };

  Status meet_all(TimePoint deadline);
  Status dial(int peer, TimePoint deadline);
  bool answers(Connection& connection, TimePoint deadline);
  Status greet(Fd socket, TimePoint deadline);
  Status adopt(int peer, Connection connection, int pid);
  Status missing() const;
  Status interrupted() const;
  struct Meeting;
  bool advance(Meeting& meeting, std::vector<pollfd>* watched);
  bool is_given_up(Meeting& meeting);
  bool take(Meeting& meeting, size_t i);
  void pump_beside_meeting(Connection& connection);

  std::unique_ptr<Way> way_;
  int rank_;
  int size_;
  std::vector<Peer> peers_;
  std::mutex meeting_mutex_;      // of exchange() alone, which waits with it
  std::mutex connections_mutex_;  // nobody waits with it
  Fd wake_;                       // an eventfd: another thread has taken from a socket what a meeting waits for
};

Status Mesh::adopt(int peer, Connection connection, int pid) {
  if (peers_[peer].connection.fd() >= 0) {
    return fail(twInvalidArgument, "two processes say that they are rank %d", peer);
  }
  peers_[peer].connection = std::move(connection);
#ifdef SYS_pidfd_open
  if (pid == 0) pid = way_->process(peer);
  if (pid > 0) peers_[peer].process = Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
#endif
  return {};
}

Status Mesh::missing() const {
  std::vector<int> ranks;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_ && peers_[peer].connection.fd() < 0) ranks.push_back(peer);
  }
  return fail(twTimeout, "rank %s of %d did not arrive in time to connect with rank %d", ranks_text(ranks).c_str(),
              size_, rank_);
}

Status Mesh::interrupted() const { return {twInterrupted, "interrupted: " + missing().text}; }

// Whether who was dialled has the secret too.
bool Mesh::answers(Connection& connection, TimePoint deadline) {
  const TimePoint until = std::min(deadline, std::chrono::steady_clock::now() + kAnswerTime);
  Parcel parcel;
  while (!connection.take(kHelloTag, &parcel)) {
    const int wait = milliseconds_to(until, kPollMs);
    if (!connection.open() || wait == 0 || is_interrupted()) return false;
    pollfd readable{connection.fd(), POLLIN, 0};
    ::poll(&readable, 1, wait);
    connection.pump();
  }
  return Unpacker(parcel.bytes).get<Hello>().secret == way_->secret();
}

// Connects to a lower rank, which may not listen yet, and says who we are.
Status Mesh::dial(int peer, TimePoint deadline) {
  for (int attempt = 0;; ++attempt) {
    Fd socket;
    Status status = way_->dial(peer, attempt, &socket);
    if (!status.ok() && status.code != twTimeout) return status;
    int pid = 0;
    if (status.ok()) {
      TW_RETURN_IF_FAILED(way_->check(socket.get(), &pid));
      Connection connection(std::move(socket));
      const Hello hello{TW_VERSION, rank_, size_, way_->secret()};
      connection.queue(kHelloTag, Packer().add(hello).take(), -1);
      connection.pump();
      if (way_->secret() == 0 || answers(connection, deadline)) return adopt(peer, std::move(connection), pid);
    }
    if (is_interrupted()) return interrupted();
    if (std::chrono::steady_clock::now() >= deadline) return missing();
    ::usleep(kRetryMs * 1000);
  }
}

// Takes a connection from a higher rank, once it has said who it is.
Status Mesh::greet(Fd socket, TimePoint deadline) {
  int pid = 0;
  if (!way_->check(socket.get(), &pid).ok()) return {};  // turned away; ours may still come
  const int fd = socket.get();
  Connection connection(std::move(socket));
  Parcel parcel;
  // Where anybody can connect, one that says nothing must not hold up the others.
  const bool public_way = way_->secret() != 0;
  const TimePoint until = public_way ? std::min(deadline, std::chrono::steady_clock::now() + kAnswerTime) : deadline;
  while (!connection.take(kHelloTag, &parcel)) {
    if (!connection.open()) return {};
    pollfd readable{fd, POLLIN, 0};
    const int wait = milliseconds_to(until, kPollMs);
    if (is_interrupted()) return interrupted();
    if (wait == 0) return public_way ? Status{} : missing();
    ::poll(&readable, 1, wait);
    connection.pump();
  }
  const Hello hello = Unpacker(parcel.bytes).get<Hello>();
  if (hello.secret != way_->secret()) return {};
  if (hello.version != TW_VERSION) {
    return fail(twConfigMismatch, "library version: rank %d has %d, rank %d has %d", rank_, TW_VERSION, hello.rank,
                hello.version);
  }
  if (hello.size != size_) {
    return fail(twConfigMismatch, "nranks: rank %d has %d, rank %d has %d", rank_, size_, hello.rank, hello.size);
  }
  if (hello.rank <= rank_ || hello.rank >= size_) {
    return fail(twInvalidArgument, "a process says that it is rank %d; rank %d expected %d..%d", hello.rank, rank_,
                rank_ + 1, size_ - 1);
  }
  if (public_way) {
    const Hello answer{TW_VERSION, rank_, size_, way_->secret()};
    connection.queue(kHelloTag, Packer().add(answer).take(), -1);
    connection.pump();
  }
  return adopt(hello.rank, std::move(connection), pid);
}

Status Mesh::connect(TimePoint deadline) {
  Status connected = meet_all(deadline);
  if (connected.code == twInterrupted) {
    std::vector<int> everyone(size_);
    std::iota(everyone.begin(), everyone.end(), 0);
    give_up(everyone, occasion_of(kHelloTag));
  }
  return connected;
}

Status Mesh::meet_all(TimePoint deadline) {
  wake_ = Fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_) return fail_errno("cannot make an eventfd");
  Fd listener;
  TW_RETURN_IF_FAILED(way_->listen(rank_, size_, &listener));
  for (int peer = 0; peer < rank_; ++peer) TW_RETURN_IF_FAILED(dial(peer, deadline));
  const auto arrived = [&] {
    return std::count_if(peers_.begin(), peers_.end(), [](const Peer& p) { return p.connection.fd() >= 0; });
  };
  while (arrived() < size_ - 1) {
    pollfd readable{listener.get(), POLLIN, 0};
    const int wait = milliseconds_to(deadline, kPollMs);
    if (is_interrupted()) return interrupted();
    if (wait == 0) return missing();
    if (::poll(&readable, 1, wait) <= 0) continue;
    Fd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket) TW_RETURN_IF_FAILED(greet(std::move(socket), deadline));
  }
  // A rank whose own connections stand may leave before others have theirs; so all wait for all.
  std::vector<int> everyone(size_);
  std::iota(everyone.begin(), everyone.end(), 0);
  std::vector<Parcel> parcels;
  return gather(*this, everyone, kHelloTag + 1, {}, deadline, "connecting", &parcels);
}

// What exchange() has so far.
struct Mesh::Meeting {
  std::span<const int> members;
  uint64_t tag;
  std::vector<Presence> presence;
  std::vector<Parcel>* all;
};

// A thread that looks for posts also takes what a meeting, which waits in poll, will then not see there.
void Mesh::pump_beside_meeting(Connection& connection) {
  if (!connection.pump() && !connection.has_output()) return;
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
}

bool Mesh::take(Meeting& meeting, size_t i) {
  if (!peers_[meeting.members[i]].connection.take(meeting.tag, &(*meeting.all)[i])) return false;
  meeting.presence[i] = Presence::kHere;
  return true;
}

// Sends and takes what can be; returns whether more is to be sent. *watched: the sockets to wait for.
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
      peer.connection.pump();  // its last words may have come in between
      if (!take(meeting, i)) presence = Presence::kGone;
    }
    const bool output = peer.connection.open() && !peer.ended && peer.connection.has_output();
    sending |= output;
    if (presence == Presence::kLate || output) {
      watched->push_back({peer.connection.fd(), static_cast<short>(POLLIN | (output ? POLLOUT : 0)), 0});
    }
  }
  return sending;
}

// Where all are here, the next meeting tells.
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
                                     std::vector<Parcel>* all, const Left& left) {
  std::unique_lock one_at_a_time(meeting_mutex_);
  Meeting meeting{members, tag, std::vector<Presence>(members.size(), Presence::kLate), all};
  all->clear();
  all->resize(members.size());
  for (size_t i = 0; i < members.size(); ++i) {
    if (members[i] == rank_) {
      (*all)[i].bytes = mine.bytes;
      if (mine.fd) (*all)[i].fd = Fd(::fcntl(mine.fd.get(), F_DUPFD_CLOEXEC, 0));
      meeting.presence[i] = Presence::kHere;
    } else {
      const std::lock_guard lock(connections_mutex_);
      peers_[members[i]].connection.queue(tag, mine.bytes, mine.fd.get());
    }
  }
  for (;;) {
    std::vector<pollfd> watched{{wake_.get(), POLLIN, 0}};
    const bool sending = advance(meeting, &watched);
    bool waiting = false;
    bool all_here = true;
    for (size_t i = 0; i < members.size(); ++i) {
      if (meeting.presence[i] != Presence::kLate) continue;
      if (left && left(members[i])) {
        const std::lock_guard lock(connections_mutex_);
        peers_[members[i]].connection.pump();  // given before it left
        if (!take(meeting, i)) meeting.presence[i] = Presence::kGone;
      }
      waiting = waiting || meeting.presence[i] == Presence::kLate;
    }
    for (const Presence presence : meeting.presence) all_here = all_here && presence == Presence::kHere;
    if (!all_here && is_given_up(meeting)) return meeting.presence;
    const int wait = milliseconds_to(deadline, left ? kLookMs : kPollMs);
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
  sockaddr_storage at{};
  socklen_t length = sizeof at;
  if (::getsockname(peers_[peer].connection.fd(), reinterpret_cast<sockaddr*>(&at), &length) == 0) *own = text(at);
  length = sizeof at;
  if (::getpeername(peers_[peer].connection.fd(), reinterpret_cast<sockaddr*>(&at), &length) == 0) *theirs = text(at);
}

// Unix sockets of one host.
class UnixWay : public Way {
 public:
  explicit UnixWay(std::string address) : address_(std::move(address)) {}
  ~UnixWay() override {
    if (!socket_file_.empty()) ::unlink(socket_file_.c_str());
  }
  Status listen(int rank, int size, Fd* listener) override {
    TW_RETURN_IF_FAILED(listen_at(address_, rank, size, listener));
    if (address_[0] == '/') socket_file_ = address_ + "." + std::to_string(rank);
    return {};
  }
  Status dial(int peer, int, Fd* socket) override { return connect_to(address_, peer, socket); }
  Status check(int socket, int* pid) override { return check_peer(socket, pid); }

 private:
  std::string address_;
  std::string socket_file_;
};

}  // namespace

Status connect_over(std::unique_ptr<Way> way, int rank, int size, TimePoint deadline,
                    std::unique_ptr<Bootstrap>* bootstrap) {
  auto mesh = std::make_unique<Mesh>(std::move(way), rank, size);
  TW_RETURN_IF_FAILED(mesh->connect(deadline));
  *bootstrap = std::move(mesh);
  return {};
}

Status connect_mesh(int rank, int size, const std::string& address, TimePoint deadline,
                    std::unique_ptr<Bootstrap>* bootstrap) {
  return connect_over(std::make_unique<UnixWay>(address), rank, size, deadline, bootstrap);
}

}  // namespace tw
