// Framed parcels over stream sockets (bootstrap/socket.h): sends and receives what a socket takes at once, with
// descriptors attached, and sorts what comes into parcels and posts. The format is the wire's: both ends must agree.
// Closing is decided by reading, not by writing, so that what a dead peer sent before still counts.
#include "bootstrap/socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace tw {
namespace {

constexpr uint32_t kMagic = 0x54574d31;  // "TWM1"
constexpr size_t kChunk = 1 << 16;

}  // namespace

// The text comes first: a rank of another version, to which this tells just that, may know parts of another kind.
std::string pack_news(const Status& why) {
  const std::string text = why.text();
  return Packer().add<int32_t>(why.code).add_bytes(text.data(), text.size()).take() + pack_result(why).take();
}

Status read_news(const std::string& news) {
  Unpacker reader(news);
  const auto code = static_cast<twResult_t>(reader.get<int32_t>());
  const std::string text = reader.get_bytes();
  if (!reader.ok() || code == twSuccess) return fail(twInternalError, "a peer failed to say why it cannot connect");
  Status why = read_status(reader);
  if (reader.ok() && why.code == code && why.text() == text) return why;
  return {code, Sentence(text)};
}

Link::~Link() {
  if (made()) ::shutdown(connection.fd(), SHUT_RDWR);
}

bool Link::has_ended() const {
  pollfd watched[2] = {{connection.fd(), POLLRDHUP, 0}, {process.get(), POLLIN, 0}};
  ::poll(watched, process ? 2 : 1, 0);
  return (watched[0].revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0 || (watched[1].revents & POLLIN) != 0;
}

void Connection::queue(uint64_t tag, const std::string& bytes, const std::shared_ptr<const Fd>& fd) {
  Outgoing frame;
  if (fd != nullptr && *fd) frame.fd = fd;
  const FrameHeader header{kMagic, frame.fd != nullptr ? 1u : 0u, tag, bytes.size()};
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
  if (frame.fd != nullptr && frame.sent == 0) {
    const int fd = frame.fd->get();
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* const attached = CMSG_FIRSTHDR(&message);
    attached->cmsg_level = SOL_SOCKET;
    attached->cmsg_type = SCM_RIGHTS;
    attached->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(attached), &fd, sizeof fd);
  }
  const ssize_t n = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  crowded_ = n < 0 && errno == ETOOMANYREFS;
  if (n < 0) {
    // A peer that is gone may have sent something before: reading, not writing, decides that it is closed.
    if (errno == EPIPE || errno == ECONNRESET) output_.clear();
    return errno == EINTR;  // else it is sent later: there is no room now
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
  if (n <= 0) {
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
  // There was no room in this process for the descriptor that came along; a message has one, and a read ends with it.
  // An empty one takes its place, so that no other descriptor does.
  if ((message.msg_flags & MSG_CTRUNC) != 0) descriptors_.emplace_back();
  input_.append(chunk, static_cast<size_t>(n));
  if (input_.size() > limit_) closed_ = true;
  return true;
}

bool Connection::parse() {
  FrameHeader header;
  bool came = false;
  while (input_.size() >= sizeof header) {
    std::memcpy(&header, input_.data(), sizeof header);
    if (header.magic != kMagic) {
      closed_ = true;  // the sender is not one of us
      return came;
    }
    if (input_.size() - sizeof header < header.length) return came;
    Parcel parcel;
    parcel.bytes = input_.substr(sizeof header, header.length);
    if (header.has_fd != 0 && !descriptors_.empty()) {
      parcel.fd = std::make_shared<const Fd>(std::move(descriptors_.front()));
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
