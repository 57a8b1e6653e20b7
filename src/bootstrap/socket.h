// Unix stream sockets as the mesh needs them: framed parcels, descriptors along with them, no blocking but in poll.
#pragma once

#include <deque>
#include <map>
#include <string>

#include "bootstrap/bootstrap.h"

namespace tw {

// A frame on the wire: header, then `length` bytes. A descriptor, if any, is attached to the header's first byte.
struct FrameHeader {
  uint32_t magic;
  uint32_t has_fd;
  uint64_t tag;
  uint64_t length;
};

// One connection to a peer.
class Connection {
 public:
  Connection() = default;
  explicit Connection(Fd socket) : socket_(std::move(socket)) {}

  int fd() const { return socket_.get(); }
  bool open() const { return static_cast<bool>(socket_) && !closed_; }
  bool has_output() const { return !output_.empty(); }

  // Queues a parcel, with a duplicate of the descriptor, if any.
  void queue(uint64_t tag, const std::string& bytes, int fd);
  // Moves what the socket takes or gives without blocking. Marks the connection closed when the peer has closed it.
  void pump();
  // Removes and returns the parcel of a tag; false if it is not here. Parcels of older tags are dropped.
  bool take(uint64_t tag, Parcel* parcel);

 private:
  struct Outgoing {
    std::string bytes;
    size_t sent = 0;
    Fd fd;
  };

  bool send_some();
  bool receive_some();
  void parse();

  Fd socket_;
  bool closed_ = false;
  std::deque<Outgoing> output_;
  std::string input_;
  std::deque<Fd> descriptors_;
  std::map<uint64_t, Parcel> parcels_;
};

// A listening socket for `address` + rank, and a connection to one. An address is the name of abstract sockets, or,
// with a '/' in front, a path prefix.
Status listen_at(const std::string& address, int rank, int backlog, Fd* listener);
// twTimeout with nothing else wrong means that nobody listens there yet.
Status connect_to(const std::string& address, int rank, Fd* socket);

// Refuses peers of other users; gives the peer's process id (0 if it is in another pid namespace).
Status check_peer(int socket, int* pid);

}  // namespace tw
