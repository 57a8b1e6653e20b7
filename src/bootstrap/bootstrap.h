// Bootstrap: how ranks find each other, exchange small things before there is a window, and see that one of them is
// gone. It is slow and robust: nothing here is on the path of a token.
//
// A meeting (exchange) takes members, a tag and a parcel, and gives each member's parcel or says that it is late or
// gone. Every meeting ends (S6): by parcels, a deadline, a death, a give-up or an interrupt. Tags must be used in the
// same order on all ranks, and never twice; `alive` and `presence` decide which rank is blamed.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/status.h"

namespace tw {

using TimePoint = std::chrono::steady_clock::time_point;

// A file descriptor that is closed once.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
};

// What one rank gives to the others: bytes, and, where ranks are processes, perhaps a descriptor. A descriptor that was
// sent but found no room in this process is present, but not open.
struct Parcel {
  std::string bytes;
  std::shared_ptr<const Fd> fd;
};

enum class Presence { kHere, kLate, kGone, kGaveUp };

// The occasion of a tag. All tags of one collective call have the same, and all its meetings end when a member gives it
// up.
inline uint64_t occasion_of(uint64_t tag) { return tag >> 15; }

// Whether a member will not come, though its process lives.
using Left = std::function<bool(int member)>;

// Whom a meeting needs once a member is gone. kPresent: those that are left, which go on without it. kAll: every
// member, so it has failed, and waits for nobody who is late.
enum class Needs { kPresent, kAll };

class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // True if all ranks live in this process, so that pointers may be exchanged.
  virtual bool in_process() const = 0;

  // True if ranks can share memory of this host: they live in one process, or parcels carry descriptors.
  virtual bool shares_memory() const = 0;

  // Gives `mine` to every member and takes theirs: (*all)[i] is members[i]'s. Collective among members, which include
  // this rank, ascending, the same everywhere; `tag` names the meeting, the same everywhere and never used twice.
  // Returns when each member's parcel is here, or the member is gone, or the deadline has passed: presence[i] says
  // which.
  //
  // This thread asks `left` every few milliseconds about members that are not here; it may look into *all for what has
  // come. A member that has left is gone, but what it gave before still counts. The meeting also ends at once when a
  // member has given the occasion up, when one is gone and `needs` wants all, or when this rank's call is interrupted.
  // One meeting at a time.
  virtual std::vector<Presence> exchange(std::span<const int> members, uint64_t tag, const Parcel& mine,
                                         TimePoint deadline, std::vector<Parcel>* all, const Left& left = {},
                                         Needs needs = Needs::kPresent) = 0;

  // Gives a parcel to every member, and takes none: for a rank that does not wait for a meeting, but tells the ranks
  // that do what it does instead. From any thread, also while another is in a meeting; never blocks.
  virtual void give(std::span<const int> members, uint64_t tag, const std::string& bytes) = 0;

  // Tells the members that this rank takes no further part in a call, whose meetings have that occasion: they get
  // kGaveUp in this meeting and in every later one of it.
  virtual void give_up(std::span<const int> members, uint64_t occasion) = 0;

  // Gives what a peer that is gone has said of its end: why it could not connect after all, if it failed when this rank
  // was already connected to it. twSuccess if it said nothing.
  virtual Status last_words(int /*peer*/) { return {}; }

  // False once a peer's process has ended or has destroyed its comm. Never blocks.
  virtual bool alive(int peer) = 0;

  // ---- For processes that share no memory; from any thread, also while another is in a meeting. None of these waits
  // for anything but a socket to take or give what it can at once. What a rank posts to a peer under a tag replaces
  // what it posted there before.
  virtual void post(int /*peer*/, uint64_t /*tag*/, const std::string& /*bytes*/) {}
  // Gives what has come from a peer under a tag; false if nothing has.
  virtual bool posted(int /*peer*/, uint64_t /*tag*/, std::string* /*bytes*/) { return false; }
  // Gives the IP addresses of the connection to a peer: this rank's own, and the peer's.
  virtual void addresses(int /*peer*/, std::string* /*own*/, std::string* /*theirs*/) {}
};

// A bit that tells the tags of posts from those of exchanges.
inline constexpr uint64_t kPostTag = uint64_t{1} << 63;

// Writes ranks for a sentence: "1, 2, 5", or "1, 2, 3, 4, 5, 6, 7, 8 and 90 others".
std::string ranks_text(std::span<const int> ranks);

// Gives the address by which members reach this rank: peers on this host may know it as localhost, others cannot.
// Where nobody tells one, as between ranks of one host, it is that of localhost.
std::string own_address(Bootstrap& bootstrap, std::span<const int> members);

// An exchange() where every member must be there: the error names the members that are not, or that gave up.
Status gather(Bootstrap& bootstrap, std::span<const int> members, uint64_t tag, const Parcel& mine, TimePoint deadline,
              const char* occasion, std::vector<Parcel>* all);

// Shares every rank's result of something that each did alone: all fail if one did, and say which. Collective.
Status agree(Bootstrap& bootstrap, std::span<const int> members, uint64_t tag, TimePoint deadline, const char* occasion,
             const Status& mine);

// Makes a mesh of Unix sockets between processes of one host. `address` as in twCommConfig_t. If it fails after others
// may have come to this rank, all of them hear why; so do ranks that come later, until the deadline.
Status connect_mesh(int rank, int size, const std::string& address, TimePoint deadline,
                    std::unique_ptr<Bootstrap>* bootstrap);

// Makes a mesh of TCP connections, for ranks on any hosts: they tell each other their addresses by the caller's own
// allgather(mine, all, bytes). Refuses ranks whose `note` differs; `what` names it in the error.
Status connect_tcp(int rank, int size, const std::function<int(const void*, void*, size_t)>& allgather,
                   const std::string& note, const Sentence& what, TimePoint deadline,
                   std::unique_ptr<Bootstrap>* bootstrap);

// Gathers `bytes` bytes of every rank by the caller's own allgather(mine, all, bytes), which returns 0 on success.
Status gather_bytes(int rank, const std::function<int(const void*, void*, size_t)>& allgather, const void* mine,
                    void* all, size_t bytes);

// Agrees on an address, which rank 0 makes and tells by the caller's own allgather. `ready`: why this rank cannot take
// part; the others are told. Ranks on several hosts, or in several network namespaces, are refused or, with `apart`,
// get no address, and the sentence which says where two of them are.
Status agree_on_address(int rank, int size, const std::function<int(const void*, void*, size_t)>& allgather,
                        const Status& ready, std::string* address, Sentence* apart = nullptr);

// Finds out which ranks are on one host, by the caller's own allgather. of: [size] the host of each rank, numbered in
// the order of their first ranks. ranks_per_host > 0: a host's ranks count as hosts of so many each. address: for the
// mesh of this rank's host, made by the first of its ranks.
Status agree_on_hosts(int rank, int size, const std::function<int(const void*, void*, size_t)>& allgather,
                      int ranks_per_host, std::vector<int>* of, std::string* address);

// Makes the bootstraps of ranks that are all in this process.
std::vector<std::unique_ptr<Bootstrap>> make_local_bootstraps(int size);

// Packs integers and strings into a parcel's bytes, and reads them back; a parcel that is too short reads as zeros,
// with ok() false.
class Packer {
 public:
  template <class T>
  Packer& add(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Packer& add_bytes(const void* data, size_t n) {
    add<uint64_t>(n);
    bytes_.append(static_cast<const char*>(data), n);
    return *this;
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class Unpacker {
 public:
  explicit Unpacker(const std::string& bytes) : bytes_(bytes) {}
  template <class T>
  T get() {
    T value{};
    if (bytes_.size() - at_ < sizeof value) {
      ok_ = false;
      return value;
    }
    bytes_.copy(reinterpret_cast<char*>(&value), sizeof value, at_);
    at_ += sizeof value;
    return value;
  }
  std::string get_bytes() {
    const uint64_t n = get<uint64_t>();
    if (bytes_.size() - at_ < n) {
      ok_ = false;
      return {};
    }
    at_ += n;
    return bytes_.substr(at_ - n, n);
  }
  bool ok() const { return ok_; }

 private:
  const std::string& bytes_;
  size_t at_ = 0;
  bool ok_ = true;
};

// These put how a rank's own part went in front of what it gives. A peer reads that, fails in the same way and names
// the rank.
Packer pack_result(const Status& mine);
Status read_result(int rank, Unpacker& reader);
// Reads the same as it was given: the sentence in parts, without the rank. It may be cut: reader.ok() says so.
Status read_status(Unpacker& reader);

}  // namespace tw
