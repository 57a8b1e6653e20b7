// An engine between threads of this process, whose mishaps a test chooses: operations that are late, so that those to
// different peers overtake each other (never those of one engine to one peer), words that are lost or added twice, and
// ranks that are lost. A seed and the test's own order of calls decide what happens, and no clock: two runs leave the
// same bytes, however fast their threads are.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <tuple>
#include <vector>

#include "net/engine.h"
#include "net/windows.h"

namespace tw::test {

// What stands between the ranks, and the thread that delivers.
class PretendedNet {
 public:
  // late: an operation may have to let so many others go first, 0: none has to.
  PretendedNet(int ranks, uint64_t seed, int late = 0);
  ~PretendedNet();
  PretendedNet(const PretendedNet&) = delete;
  PretendedNet& operator=(const PretendedNet&) = delete;

  // The engine of a rank, with at most `depth` operations to a peer that are not done.
  std::unique_ptr<net::Engine> engine(int rank, int depth = 128);

  // The n-th word, counted from 0, that a rank adds to another is lost, or added twice.
  void lose_word(int from, int to, uint64_t n);
  void double_word(int from, int to, uint64_t n);
  // When so many operations of the rank have been delivered, it is gone, with all that is under way to it and from it.
  void lose_rank(int rank, uint64_t operations);

  // Nothing is delivered while it is held.
  void hold(bool held);

  // Who was served, in order: (from, to).
  std::vector<std::pair<int, int>> served() const;

 private:
  friend class PretendedEngine;
  struct Operation {
    net::Put put;
    bool has_word = false;
    net::Word word;
  };
  struct Way {
    std::deque<Operation> waiting;
    uint64_t taken = 0;
    uint64_t done = 0;
    uint64_t words = 0;       // that were delivered, or lost
    int64_t not_before = -1;  // the turn before which the first must wait; -1: not drawn yet
  };

  Way& way(int from, int to) { return ways_[{from, to}]; }
  net::Posted take(int from, int to, const Operation& operation, int depth);
  void run();
  bool turn();
  void deliver(int from, int to, Way& way);
  void lose(int rank);
  uint64_t drawn(int from, int to, uint64_t number) const;

  const int ranks_;
  const uint64_t seed_;
  const int late_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<int, int>, Way> ways_;
  std::vector<net::Windows> windows_;  // of each rank
  std::vector<bool> gone_;
  std::vector<uint64_t> delivered_;  // operations of each rank
  std::map<int, uint64_t> to_lose_;
  std::set<std::tuple<int, int, uint64_t>> lost_words_;
  std::set<std::tuple<int, int, uint64_t>> doubled_words_;
  std::vector<std::pair<int, int>> served_;
  int64_t turns_ = 0;
  bool held_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace tw::test
