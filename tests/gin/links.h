// Connections among ranks that stand for a network with RDMA: bytes of devices go through memory of the host and a
// socket for each pair of ranks, and a thread at the target moves them to where they belong. For function, not speed.
//
// Order is what NCCL promises of strong signals and no more: a word is added to behind all earlier puts of its lane (a
// context, to one rank). Lanes overtake each other; where TOKENWAY_GIN_SEED is not 0, puts of a lane do too. Each
// operation is held back for up to TOKENWAY_GIN_DELAY_US.
//
// What is posted is counted, and large puts are perhaps that alone (counts.h).
//
// Nothing blocks but connect. Where a rank's process has ended, what is under way to it fails, and whatever comes
// later; other ranks go on. The destructor ends without asking anybody.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace tw::gin {

// Memory that all ranks have added in the same order: its number is alike everywhere.
struct Memory {
  std::byte* data;
  uint64_t size;
  int kind;
  uint32_t number;
  bool dropped = false;
};

// Of one operation; whoever has asked for it lets go of it when it is not waiting any more.
struct Request {
  enum State { kWaiting, kDone, kFailed };
  std::atomic<State> state = kWaiting;
};

struct Operation {
  const Memory* from = nullptr;  // nothing is put: nullptr
  uint64_t from_offset = 0;
  uint64_t size = 0;
  uint32_t to = 0;
  uint64_t to_offset = 0;
  bool signals = false;
  uint32_t word = 0;
  uint64_t word_offset = 0;
  uint64_t add = 0;
  std::shared_ptr<Request> request;
};

// A lane: a context, and its number within it.
using Lane = std::pair<const void*, int>;

class Links {
 public:
  Links(int rank, int ranks);
  ~Links();
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;

  // Connects to all ranks, by the handles that they have made, on the current device. False: it failed.
  bool connect(void* const handles[], int listening);

  Memory* add_memory(void* data, uint64_t size, int kind);
  void drop(Memory* memory);

  // Takes an operation to a rank.
  std::shared_ptr<Request> post(int rank, const Lane& lane, Operation operation);

  // Whether anything has failed.
  bool failed() const { return failed_; }

  // Opens a socket to be connected to, and writes its handle. -1: it failed.
  static int listen(void* handle);

 private:
  struct Stage;  // what a thread moves bytes with
  struct Peer {
    int fd = -1;
    std::shared_ptr<Stage> out;  // of the thread that sends
    std::shared_ptr<Stage> in;   // of that which receives
    std::mutex mutex;
    std::condition_variable more;
    std::map<Lane, std::deque<Operation>> lanes;
    bool gone = false;
    std::thread sending;
    std::thread receiving;
  };
  struct Header;

  void send(int rank);
  void receive(int rank);
  Operation take(Peer& peer, std::unique_lock<std::mutex>& lock, std::mt19937_64& random);
  bool move_here(Stage& stage, const Operation& operation);
  bool move_out(Stage& stage, int fd, const Operation& operation);
  bool move_in(Stage& stage, int fd, const Header& header);
  bool add(Stage& stage, uint32_t number, uint64_t offset, uint64_t value);
  std::byte* find(uint32_t number, uint64_t offset, uint64_t size, int* kind);
  void lose(int rank);
  void refuse(int rank, Request& request);

  const int rank_;
  const int ranks_;
  int device_ = 0;
  uint64_t seed_ = 0;
  uint64_t delay_us_ = 0;
  bool counts_alone_ = false;
  std::atomic<bool> stopping_ = false;
  std::atomic<bool> failed_ = false;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::mutex memories_mutex_;
  std::condition_variable memory_added_;
  std::vector<std::unique_ptr<Memory>> memories_;
  std::mutex words_;
};

}  // namespace tw::gin
