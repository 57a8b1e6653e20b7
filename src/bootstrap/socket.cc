#include "bootstrap/socket.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

namespace tw {
namespace {

constexpr uint32_t kMagic = 0x54574d31;  // "TWM1"
constexpr size_t kChunk = 1 << 16;

// Fills a socket address. The length counts: an abstract name is not terminated.
Status fill_address(const std::string& address, int rank, sockaddr_un* place, socklen_t* length) {
  const bool path = address[0] == '/';
  const std::string name = path ? address + "." + std::to_string(rank)
                                : std::string(1, '\0') + "tokenway/" + address + "/" + std::to_string(rank);
  if (name.size() + (path ? 1 : 0) > sizeof place->sun_path) {
    return fail(twInvalidArgument, "config.address \"%s\" is too long: a socket name has at most %zu bytes",
                address.c_str(), sizeof place->sun_path - (name.size() - address.size()) - (path ? 1 : 0));
  }
  std::memset(place, 0, sizeof *place);
  place->sun_family = AF_UNIX;
  std::memcpy(place->sun_path, name.data(), name.size());
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size() + (path ? 1 : 0));
  return {};
}

}  // namespace

Status listen_at(const std::string& address, int rank, int backlog, Fd* listener) {
  sockaddr_un place;
  socklen_t length = 0;
  TW_RETURN_IF_FAILED(fill_address(address, rank, &place, &length));
  *listener = Fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!*listener) return fail_errno("cannot make a socket");
  if (address[0] == '/') ::unlink(place.sun_path);  // what a killed run left behind
  if (::bind(listener->get(), reinterpret_cast<sockaddr*>(&place), length) != 0) {
    if (errno == EADDRINUSE) {
      return fail(twInvalidArgument,
                  "config.address \"%s\" is in use for rank %d: it must be unique to one comm on this host, and each "
                  "rank taken once",
                  address.c_str(), rank);
    }
    return fail_errno("cannot bind the socket of config.address \"%s\", rank %d", address.c_str(), rank);
  }
  if (::listen(listener->get(), backlog) != 0) return fail_errno("cannot listen");
  return {};
}

Status connect_to(const std::string& address, int rank, Fd* socket) {
  sockaddr_un place;
  socklen_t length = 0;
  TW_RETURN_IF_FAILED(fill_address(address, rank, &place, &length));
  *socket = Fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!*socket) return fail_errno("cannot make a socket");
  if (::connect(socket->get(), reinterpret_cast<sockaddr*>(&place), length) != 0) {
    if (errno == ECONNREFUSED || errno == ENOENT || errno == EAGAIN || errno == EINTR)
      return fail(twTimeout, "nobody listens yet");
    return fail_errno("cannot connect to rank %d at config.address \"%s\"", rank, address.c_str());
  }
  if (::fcntl(socket->get(), F_SETFL, O_NONBLOCK) != 0) return fail_errno("cannot set a socket non-blocking");
  return {};
}

Status check_peer(int socket, int* pid) {
  ucred peer{};
  socklen_t length = sizeof peer;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return fail_errno("SO_PEERCRED");
  if (peer.uid != ::geteuid()) {
    return fail(twInvalidArgument, "a process of user %u tried to join a comm of user %u", peer.uid, ::geteuid());
  }
  *pid = peer.pid;
  return {};
}

void Connection::queue(uint64_t tag, const std::string& bytes, int fd) {
  Outgoing frame;
  if (fd >= 0) frame.fd = Fd(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  const FrameHeader header{kMagic, frame.fd ? 1u : 0u, tag, bytes.size()};
  frame.bytes.assign(reinterpret_cast<const char*>(&header), sizeof header);
  frame.bytes += bytes;
  output_.push_back(std::move(frame));
}

bool Connection::pump() {
  while (open() && send_some()) {
  }
  while (open() && receive_some()) {
  }
  return parse();
}

bool Connection::send_some() {
  if (output_.empty()) return false;
  Outgoing& frame = output_.front();
  iovec data{frame.bytes.data() + frame.sent, frame.bytes.size() - frame.sent};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (frame.fd && frame.sent == 0) {
    const int fd = frame.fd.get();
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* const attached = CMSG_FIRSTHDR(&message);
    attached->cmsg_level = SOL_SOCKET;
    attached->cmsg_type = SCM_RIGHTS;
    attached->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(attached), &fd, sizeof fd);
  }
  const ssize_t n = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n < 0) {
    // A peer that is gone may have sent something before: reading, not writing, decides that it is closed.
    if (errno == EPIPE || errno == ECONNRESET) output_.clear();
    return errno == EINTR;  // else later: there is no room now
  }
  frame.sent += static_cast<size_t>(n);
  if (frame.sent == frame.bytes.size()) output_.pop_front();
  return true;
}

bool Connection::receive_some() {
  char chunk[kChunk];
  iovec data{chunk, sizeof chunk};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 4)] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t n = ::recvmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (n < 0 && errno == EINTR) return true;
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
  if (n <= 0 || (message.msg_flags & MSG_CTRUNC) != 0) {  // cut: a descriptor was lost, and with it which is whose
    closed_ = true;
    return false;
  }
  for (cmsghdr* each = CMSG_FIRSTHDR(&message); each != nullptr; each = CMSG_NXTHDR(&message, each)) {
    if (each->cmsg_level != SOL_SOCKET || each->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (each->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(each) + i * sizeof(int), sizeof(int));
      descriptors_.emplace_back(fd);
    }
  }
  input_.append(chunk, static_cast<size_t>(n));
  return true;
}

bool Connection::parse() {
  FrameHeader header;
  bool came = false;
  while (input_.size() >= sizeof header) {
    std::memcpy(&header, input_.data(), sizeof header);
    if (header.magic != kMagic) {
      closed_ = true;  // not one of us
      return came;
    }
    if (input_.size() - sizeof header < header.length) return came;
    Parcel parcel;
    parcel.bytes = input_.substr(sizeof header, header.length);
    if (header.has_fd != 0 && !descriptors_.empty()) {
      parcel.fd = std::move(descriptors_.front());
      descriptors_.pop_front();
    }
    input_.erase(0, sizeof header + header.length);
    if ((header.tag & kPostTag) != 0) {
      posts_[header.tag] = std::move(parcel.bytes);
    } else {
      parcels_[header.tag] = std::move(parcel);
      came = true;
    }
  }
  return came;
}

bool Connection::take(uint64_t tag, Parcel* parcel) {
  parcels_.erase(parcels_.begin(), parcels_.lower_bound(tag));
  const auto found = parcels_.find(tag);
  if (found == parcels_.end()) return false;
  *parcel = std::move(found->second);
  parcels_.erase(found);
  return true;
}

bool Connection::find(uint64_t tag, std::string* bytes) const {
  const auto found = posts_.find(tag);
  if (found == posts_.end()) return false;
  *bytes = found->second;
  return true;
}

}  // namespace tw
