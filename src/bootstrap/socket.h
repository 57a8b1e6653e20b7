// Stream sockets as the mesh needs them: framed parcels, descriptors along with them, and no blocking but in poll.
// Connection moves frames, Link adds the peer's process, and Way is how the ranks of a mesh reach each other (Unix
// sockets or TCP). Parcels of one connection come in the order of their tags, which take relies on; a Way that blocks
// in dial or check stalls all ranks that connect.
#pragma once

#include <deque>
#include <map>
#include <string>

#include "bootstrap/bootstrap.h"

namespace tw {

// A frame on the wire: this header, then `length` bytes. A descriptor, if any, is attached to the header's first byte.
struct FrameHeader {
  uint32_t magic;
  uint32_t has_fd;
  uint64_t tag;
  uint64_t length;
};

// The tag under which a rank says why it has failed to connect, and what it says: its result and its sentence. A rank
// that is connected already finds it by Bootstrap::last_words.
inline constexpr uint64_t kNewsTag = ~uint64_t{0};
std::string pack_news(const Status& why);
Status read_news(const std::string& news);

// One connection to a peer.
class Connection {
 public:
  Connection() = default;
  explicit Connection(Fd socket) : socket_(std::move(socket)) {}

  int fd() const { return socket_.get(); }
  bool open() const { return static_cast<bool>(socket_) && !closed_; }
  // Limits what a peer may send at once; sending more counts as closing the connection. At first there is no limit.
  void limit(size_t bytes) { limit_ = bytes; }
  bool has_output() const { return !output_.empty(); }
  // Whether output waits for something else than this socket: until peers of this user take descriptors that are under
  // way to them.
  bool crowded() const { return crowded_ && has_output(); }

  // Queues a parcel, with a descriptor, if any.
  void queue(uint64_t tag, const std::string& bytes, const std::shared_ptr<const Fd>& fd = nullptr);
  // Moves what the socket takes or gives without blocking. Marks the connection closed when the peer has closed it.
  // Returns whether a parcel of a meeting has come.
  bool pump();
  // Removes and returns the parcel of a tag; false if it is not here. Parcels of lower tags are dropped.
  bool take(uint64_t tag, Parcel* parcel);
  // Gives the bytes that came last under a tag of kPostTag; they stay.
  bool find(uint64_t tag, std::string* bytes) const;

 private:
  struct Outgoing {
    std::string bytes;
    size_t sent = 0;
    std::shared_ptr<const Fd> fd;
  };

  bool send_some();
  bool receive_some();
  bool parse();

  Fd socket_;
  bool closed_ = false;
  bool crowded_ = false;
  size_t limit_ = SIZE_MAX;
  std::deque<Outgoing> output_;
  std::string input_;
  std::deque<Fd> descriptors_;
  std::map<uint64_t, Parcel> parcels_;
  std::map<uint64_t, std::string> posts_;
};

// A peer: the connection to it and, where the kernel can give it, its process.
struct Link {
  Link() = default;
  explicit Link(Connection to) : connection(std::move(to)) {}
  Link(Link&&) = default;
  Link& operator=(Link&& other) noexcept {
    std::swap(connection, other.connection);
    std::swap(process, other.process);
    return *this;
  }
  // Shuts the connection down: closing alone would not tell the peer while a forked child holds the socket too.
  ~Link();

  bool made() const { return connection.fd() >= 0; }
  // Whether the peer has closed the connection, or its process has ended: a forked child may hold the socket open.
  // Never blocks.
  bool has_ended() const;

  Connection connection;
  Fd process;  // pidfd
};

// How the ranks of a mesh reach each other.
class Way {
 public:
  virtual ~Way() = default;
  virtual Status listen(int rank, int size, TimePoint deadline, Fd* listener) = 0;
  // Takes away what listen() made for others to find this rank. Called before the listener is closed.
  virtual void stop_listening() {}
  // Begins to connect to a rank, which may have several addresses: `attempt` goes through them. No socket: not now, or
  // not there. Never blocks: the connection stands when the socket can be written to.
  virtual Status dial(int peer, int attempt, Fd* socket) = 0;
  // Refuses a process that cannot be a peer; gives its process id, 0 if that is unknown here.
  virtual Status check(int socket, int* pid) = 0;
  // The process of a rank, where check() cannot tell; 0 if it is unknown here.
  virtual int process(int /*peer*/) const { return 0; }
  // A number that all ranks know and nobody else; 0 where only the right processes can reach the sockets.
  virtual uint64_t secret() const { return 0; }
  // Whether the sockets carry file descriptors.
  virtual bool carries_descriptors() const = 0;
  // Where a rank listens, if another attempt may want the same place; else "".
  virtual std::string place(int /*rank*/) const { return {}; }
};

// Makes the mesh of a rank that is connected to all. wake: an eventfd. carries: whether the sockets carry descriptors.
std::unique_ptr<Bootstrap> make_mesh(int rank, std::vector<Link> links, Fd wake, bool carries);

// Connects ranks by a Way; as connect_mesh.
Status connect_over(std::unique_ptr<Way> way, int rank, int size, TimePoint deadline,
                    std::unique_ptr<Bootstrap>* bootstrap);

}  // namespace tw
