// Every rank is connected to every other, so that each sees for itself when one is gone, and survivors can talk without
// asking anybody. A star through rank 0 would need fewer sockets and would end with rank 0.
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>

#include "bootstrap/socket.h"

namespace tw {
namespace {

constexpr int kRetryMs = 2;
constexpr int kPollMs = 100;
constexpr uint64_t kHelloTag = 0;

int milliseconds_to(TimePoint deadline, int at_most) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, at_most));
}

struct Hello {
  int32_t version;
  int32_t rank;
  int32_t size;
};

class Mesh : public Bootstrap {
 public:
  Mesh(int rank, int size) : rank_(rank), size_(size), peers_(size) {}
  ~Mesh() override {
    // Closing alone would not tell the peers while a forked child holds the sockets too.
    for (Peer& peer : peers_) {
      if (peer.connection.fd() >= 0) ::shutdown(peer.connection.fd(), SHUT_RDWR);
    }
    if (!socket_file_.empty()) ::unlink(socket_file_.c_str());
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool in_process() const override { return false; }

  Status connect(const std::string& address, TimePoint deadline);

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
                                 std::vector<Parcel>* all) override;

 private:
  struct Peer {
    Connection connection;
    Fd process;  // pidfd
    std::atomic<bool> ended = false;
  };

  Status dial(const std::string& address, int peer, TimePoint deadline);
  Status greet(Fd socket, TimePoint deadline);
  Status adopt(int peer, Connection connection, int pid);
  Status missing() const;

  int rank_;
  int size_;
  std::vector<Peer> peers_;
  std::mutex exchange_mutex_;
  std::string socket_file_;
};

Status Mesh::adopt(int peer, Connection connection, int pid) {
  if (peers_[peer].connection.fd() >= 0) {
    return fail(twInvalidArgument, "two processes say that they are rank %d", peer);
  }
  peers_[peer].connection = std::move(connection);
#ifdef SYS_pidfd_open
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

// Connects to a lower rank, which may not listen yet, and says who we are.
Status Mesh::dial(const std::string& address, int peer, TimePoint deadline) {
  Fd socket;
  for (;;) {
    const Status status = connect_to(address, peer, &socket);
    if (status.ok()) break;
    if (status.code != twTimeout) return status;
    if (std::chrono::steady_clock::now() >= deadline) return missing();
    ::usleep(kRetryMs * 1000);
  }
  int pid = 0;
  TW_RETURN_IF_FAILED(check_peer(socket.get(), &pid));
  Connection connection(std::move(socket));
  const Hello hello{TW_VERSION, rank_, size_};
  connection.queue(kHelloTag, Packer().add(hello).take(), -1);
  connection.pump();
  return adopt(peer, std::move(connection), pid);
}

// Takes a connection from a higher rank, once it has said who it is.
Status Mesh::greet(Fd socket, TimePoint deadline) {
  int pid = 0;
  if (!check_peer(socket.get(), &pid).ok()) return {};  // turned away; ours may still come
  const int fd = socket.get();
  Connection connection(std::move(socket));
  Parcel parcel;
  while (!connection.take(kHelloTag, &parcel)) {
    if (!connection.open()) return {};
    pollfd readable{fd, POLLIN, 0};
    const int wait = milliseconds_to(deadline, kPollMs);
    if (wait == 0) return missing();
    ::poll(&readable, 1, wait);
    connection.pump();
  }
  const Hello hello = Unpacker(parcel.bytes).get<Hello>();
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
  return adopt(hello.rank, std::move(connection), pid);
}

Status Mesh::connect(const std::string& address, TimePoint deadline) {
  Fd listener;
  TW_RETURN_IF_FAILED(listen_at(address, rank_, size_, &listener));
  if (address[0] == '/') socket_file_ = address + "." + std::to_string(rank_);
  for (int peer = 0; peer < rank_; ++peer) TW_RETURN_IF_FAILED(dial(address, peer, deadline));
  const auto arrived = [&] {
    return std::count_if(peers_.begin(), peers_.end(), [](const Peer& p) { return p.connection.fd() >= 0; });
  };
  while (arrived() < size_ - 1) {
    pollfd readable{listener.get(), POLLIN, 0};
    const int wait = milliseconds_to(deadline, kPollMs);
    if (wait == 0) return missing();
    if (::poll(&readable, 1, wait) <= 0) continue;
    Fd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket) TW_RETURN_IF_FAILED(greet(std::move(socket), deadline));
  }
  // A rank whose own connections stand may leave before others have theirs; so all wait for all.
  std::vector<int> everyone(size_);
  for (int i = 0; i < size_; ++i) everyone[i] = i;
  std::vector<Parcel> parcels;
  return gather(*this, everyone, kHelloTag + 1, {}, deadline, "connecting", &parcels);
}

std::vector<Presence> Mesh::exchange(std::span<const int> members, uint64_t tag, const Parcel& mine, TimePoint deadline,
                                     std::vector<Parcel>* all) {
  const std::lock_guard lock(exchange_mutex_);
  std::vector<Presence> presence(members.size(), Presence::kLate);
  all->clear();
  all->resize(members.size());
  for (size_t i = 0; i < members.size(); ++i) {
    if (members[i] == rank_) {
      (*all)[i].bytes = mine.bytes;
      if (mine.fd) (*all)[i].fd = Fd(::fcntl(mine.fd.get(), F_DUPFD_CLOEXEC, 0));
      presence[i] = Presence::kHere;
    } else {
      peers_[members[i]].connection.queue(tag, mine.bytes, mine.fd.get());
    }
  }
  for (;;) {
    std::vector<pollfd> watched;
    bool sending = false;
    for (size_t i = 0; i < members.size(); ++i) {
      if (members[i] == rank_) continue;
      Peer& peer = peers_[members[i]];
      peer.connection.pump();
      if (presence[i] == Presence::kLate) {
        if (peer.connection.take(tag, &(*all)[i])) {
          presence[i] = Presence::kHere;
        } else if (!peer.connection.open() || !alive(members[i])) {
          peer.connection.pump();  // its last words may have come in between
          presence[i] = peer.connection.take(tag, &(*all)[i]) ? Presence::kHere : Presence::kGone;
        }
      }
      const bool output = peer.connection.open() && !peer.ended && peer.connection.has_output();
      sending |= output;
      if (presence[i] == Presence::kLate || output) {
        watched.push_back({peer.connection.fd(), static_cast<short>(POLLIN | (output ? POLLOUT : 0)), 0});
      }
    }
    const bool waiting = std::count(presence.begin(), presence.end(), Presence::kLate) > 0;
    const int wait = milliseconds_to(deadline, kPollMs);
    if ((!waiting && !sending) || wait == 0) return presence;
    ::poll(watched.data(), watched.size(), wait);
  }
}

}  // namespace

Status connect_mesh(int rank, int size, const std::string& address, TimePoint deadline,
                    std::unique_ptr<Bootstrap>* bootstrap) {
  auto mesh = std::make_unique<Mesh>(rank, size);
  TW_RETURN_IF_FAILED(mesh->connect(address, deadline));
  *bootstrap = std::move(mesh);
  return {};
}

}  // namespace tw
