// The mesh over Unix sockets, for processes of one host: how a rank listens at an abstract name or a path, dials a peer
// there and refuses processes of other users. It removes only a socket on which nobody listens. If the folder's lock or
// that test is weakened, two ranks that start together take each other's sockets away and wait until their timeout.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>

#include "bootstrap/descriptors.h"
#include "bootstrap/socket.h"

namespace tw {
namespace {

constexpr std::chrono::seconds kFolderTime{1};  // time for others to make their sockets in the folder

// A socket's address. The length counts: an abstract name is not terminated.
struct Place {
  sockaddr_un at{};
  socklen_t length = 0;
  bool path = false;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&at); }
};

Status find_place(const std::string& address, int rank, Place* place) {
  place->path = address[0] == '/';
  const std::string name = place->path ? address + "." + std::to_string(rank)
                                       : std::string(1, '\0') + "tokenway/" + address + "/" + std::to_string(rank);
  const size_t end = place->path ? 1 : 0;
  if (name.size() + end > sizeof place->at.sun_path) {
    return fail(twInvalidArgument, "{} \"{}\" is too long: a socket name has at most {} bytes",
                Argument("config.address"), address, sizeof place->at.sun_path - (name.size() - address.size()) - end);
  }
  place->at.sun_family = AF_UNIX;
  std::memcpy(place->at.sun_path, name.data(), name.size());
  place->length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size() + end);
  return {};
}

Fd make_socket() { return Fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

Status in_use(const std::string& address, int rank) {
  return fail(twInvalidArgument,
              "{} \"{}\" is in use for rank {}: it must be unique to one comm on this host, and each rank taken once",
              Argument("config.address"), address, rank);
}

// The error that something else stands where a socket should.
Status not_a_socket(const std::string& address, const Place& place) {
  return fail(twInvalidArgument, "{} \"{}\": {} exists and is not a socket; nothing was removed, choose another path",
              Argument("config.address"), address, place.at.sun_path);
}

bool is_there(const Place& place, struct stat* found) { return ::lstat(place.at.sun_path, found) == 0; }

// A lock on a socket's folder. A process holds it while it takes a stale socket away, or while it has one that is bound
// and does not listen yet, which looks like a stale one. The folder itself is locked, as a file for it would stay
// behind. If it cannot be locked, or another process keeps it locked, we go on without.
class FolderLock {
 public:
  Status lock(const Place& place, int size, TimePoint deadline) {
    const std::string path = place.at.sun_path;
    const std::string folder = path.substr(0, std::max<size_t>(path.rfind('/'), 1));
    folder_ = Fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NONBLOCK));
    if (!folder_) return errno == EMFILE || errno == ENFILE ? fail_to_open(size, "open a socket's folder") : Status{};
    const TimePoint until = std::min(deadline, std::chrono::steady_clock::now() + kFolderTime);
    while (::flock(folder_.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK && errno != EINTR) return {};
      if (std::chrono::steady_clock::now() >= until) return {};
      ::usleep(1000);
    }
    return {};
  }

 private:
  Fd folder_;  // closing it unlocks it: nobody else has its open file, unless a fork held it for a moment
};

// Takes away what a killed run left at a path: a socket on which nobody listens, and nothing else.
Status remove_stale(const std::string& address, int rank, int size, const Place& place) {
  struct stat found {};
  if (!is_there(place, &found)) return {};
  if (!S_ISSOCK(found.st_mode)) return not_a_socket(address, place);
  const Fd socket = make_socket();
  if (!socket) return fail_to_open(size, "make a socket");
  if (::connect(socket.get(), place.get(), place.length) == 0 || errno == EAGAIN) return in_use(address, rank);
  if (errno == ENOENT) return {};
  if (errno != ECONNREFUSED) {
    return fail_errno("cannot tell whether anybody listens at {} \"{}\", rank {}", Argument("config.address"), address,
                      rank);
  }
  if (::unlink(place.at.sun_path) == 0 || errno == ENOENT) return {};
  return fail_errno("cannot remove the stale socket {}", place.at.sun_path);
}

class UnixWay : public Way {
 public:
  explicit UnixWay(std::string address) : address_(std::move(address)) {}
  ~UnixWay() override { stop_listening(); }

  Status listen(int rank, int size, TimePoint deadline, Fd* listener) override {
    size_ = size;
    Place place;
    TW_RETURN_IF_FAILED(find_place(address_, rank, &place));
    FolderLock folder;
    if (place.path) {
      TW_RETURN_IF_FAILED(folder.lock(place, size, deadline));
      TW_RETURN_IF_FAILED(remove_stale(address_, rank, size, place));
    }
    *listener = make_socket();
    if (!*listener) return fail_to_open(size, "make a socket");
    if (::bind(listener->get(), place.get(), place.length) != 0) {
      Status status = errno == EADDRINUSE ? in_use(address_, rank)
                                          : fail_errno("cannot bind the socket of {} \"{}\", rank {}",
                                                       Argument("config.address"), address_, rank);
      listener->reset();
      return status;
    }
    if (place.path && is_there(place, &made_)) socket_file_ = place.at.sun_path;
    if (::listen(listener->get(), size) != 0) return fail_errno("cannot listen");
    return {};
  }

  // While the listener still listens, nobody takes its file for a stale one; so a file with our inode number is ours.
  void stop_listening() override {
    struct stat found {};
    if (!socket_file_.empty() && ::lstat(socket_file_.c_str(), &found) == 0 && found.st_dev == made_.st_dev &&
        found.st_ino == made_.st_ino) {
      ::unlink(socket_file_.c_str());
    }
    socket_file_.clear();
  }

  Status dial(int peer, int, Fd* socket) override {
    Place place;
    TW_RETURN_IF_FAILED(find_place(address_, peer, &place));
    *socket = make_socket();
    if (!*socket) return fail_to_open(size_, "make a socket");
    // Non-blocking: where the queue of a listener is full, connect() would wait for it without limit.
    if (::connect(socket->get(), place.get(), place.length) == 0) return {};
    const int error = errno;
    socket->reset();
    struct stat found {};
    if (error == ECONNREFUSED && place.path && is_there(place, &found) && !S_ISSOCK(found.st_mode)) {
      return not_a_socket(address_, place);
    }
    if (error == ECONNREFUSED || error == ENOENT || error == EAGAIN || error == EINTR) return {};
    errno = error;
    return fail_errno("cannot connect to rank {} at {} \"{}\"", peer, Argument("config.address"), address_);
  }

  Status check(int socket, int* pid) override {
    ucred peer{};
    socklen_t length = sizeof peer;
    if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return fail_errno("SO_PEERCRED");
    if (peer.uid != ::geteuid()) {
      return fail(twInvalidArgument, "a process of user {} tried to join a comm of user {}", peer.uid, ::geteuid());
    }
    *pid = peer.pid;
    return {};
  }

  bool carries_descriptors() const override { return true; }
  std::string place(int rank) const override { return address_ + "." + std::to_string(rank); }

 private:
  std::string address_;
  int size_ = 0;
  std::string socket_file_;
  struct stat made_ {};
};

}  // namespace

Status connect_mesh(int rank, int size, const std::string& address, TimePoint deadline,
                    std::unique_ptr<Bootstrap>* bootstrap) {
  return connect_over(std::make_unique<UnixWay>(address), rank, size, deadline, bootstrap);
}

}  // namespace tw
