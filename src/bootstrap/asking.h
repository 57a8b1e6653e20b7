// Asking ranks how they are (docs/PROTOCOL.md, "Blame between hosts"): a rank that must blame somebody asks all others
// for a number that each counts: how many steps a rank has sent, on all channels together, and on devices also whether
// its network has failed. A thread of each answers, also while its host computes: so who does not answer has
// stopped, and what a rank has told before is not taken for its answer.
//
// Questions and answers are posts of the bootstrap. What breaks if this changes: blame falls on a rank that waits
// itself.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "bootstrap/bootstrap.h"

namespace tw {

class Asking {
 public:
  static constexpr std::chrono::milliseconds kPatience{600};  // for an answer to come

  // Answers until it is destroyed: by a thread of its own, or of the caller's, which calls answer() often. Uses `tag`
  // and the next, for posts. The bootstrap outlives it.
  enum class Answers { kByThread, kByCaller };
  // `counts`: gives the number, from any thread; without it, what count() has counted.
  Asking(Bootstrap* bootstrap, std::vector<int> members, uint64_t tag, Answers answers = Answers::kByThread,
         std::function<int64_t()> counts = {});
  ~Asking();
  Asking(const Asking&) = delete;
  Asking& operator=(const Asking&) = delete;

  // One more of what this rank counts.
  void count() { counted_.fetch_add(1, std::memory_order_release); }
  int64_t counted() const { return counts_ ? counts_() : counted_.load(std::memory_order_acquire); }

  // Answers what has been asked.
  void answer();

  // Asks all others: what each has counted, [members], -1 for who has not answered until then. Ends early where all
  // have, or `over` says so.
  std::vector<int64_t> ask(TimePoint until, const std::function<bool()>& over);

 private:
  struct Answer {
    int64_t question;
    int64_t counted;
  };
  enum Post { kQuestion, kAnswer };

  void answer_until_end();
  void answer_others();
  template <class T>
  bool read(int member, Post post, T* value);
  template <class T>
  void tell(int member, Post post, const T& value);

  Bootstrap* bootstrap_;
  const std::vector<int> members_;
  const uint64_t tag_;
  const std::function<int64_t()> counts_;
  std::atomic<int64_t> counted_ = 0;
  int64_t asked_ = 0;
  std::vector<int64_t> answered_;  // the last question of each
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace tw
