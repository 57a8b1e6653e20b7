// Stream sockets as the mesh needs them: framed parcels, descriptors along with them, no blocking but in poll.
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
  // Returns whether a parcel of a meeting has come.
  bool pump();
  // Removes and returns the parcel of a tag; false if it is not here. Parcels of older tags are dropped.
  bool take(uint64_t tag, Parcel* parcel);
  // The bytes that came last under a tag of kPostTag; they stay.
  bool find(uint64_t tag, std::string* bytes) const;

 private:
  struct Outgoing {
    std::string bytes;
    size_t sent = 0;
    Fd fd;
  };

  bool send_some();
  bool receive_some();
  bool parse();

  Fd socket_;
  bool closed_ = false;
  std::deque<Outgoing> output_;
  std::string input_;
  std::deque<Fd> descriptors_;
  std::map<uint64_t, Parcel> parcels_;
  std::map<uint64_t, std::string> posts_;
};

// A listening socket for `address` + rank, and a connection to one. An address is the name of abstract sockets, or,
// with a '/' in front, a path prefix.
Status listen_at(const std::string& address, int rank, int backlog, Fd* listener);
// twTimeout with nothing else wrong means that nobody listens there yet.
Status connect_to(const std::string& address, int rank, Fd* socket);

// Refuses peers of other users; gives the peer's process id (0 if it is in another pid namespace).
Status check_peer(int socket, int* pid);

// How the ranks of a mesh reach each other.
class Way {
 public:
  virtual ~Way() = default;
  virtual Status listen(int rank, int size, Fd* listener) = 0;
  // Connects to a rank, which may have several addresses: `attempt` goes through them. twTimeout: not now, or not
  // there.
  virtual Status dial(int peer, int attempt, Fd* socket) = 0;
  // Refuses a peer that is none; gives its process id, 0 if that is unknown here.
  virtual Status check(int socket, int* pid) = 0;
  // The process of a rank, where check() cannot tell; 0 if it is unknown here.
  virtual int process(int /*peer*/) const { return 0; }
  // What all ranks know and nobody else; 0 where sockets can be reached by the right ones alone. If there is one, who
  // is dialled answers.
  virtual uint64_t secret() const { return 0; }
};

Status connect_over(std::unique_ptr<Way> way, int rank, int size, TimePoint deadline,
                    std::unique_ptr<Bootstrap>* bootstrap);

}  // namespace tw
