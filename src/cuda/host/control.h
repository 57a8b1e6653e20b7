// The host's side of errors (S6): the pages that all ranks' hosts and devices share, and a thread that looks after
// peers while nobody else does.
//
// Takes a bootstrap whose connections tell who is alive; gives abort signals, what kernels have reported, and
// on_stop(), by which kernels end when the group is finished. announce_abort() and the find functions may be called
// from any thread.
//
// What breaks if this changes: S6. A rank that is not told waits until its deadline and then blames the wrong rank; and
// the abort signal must be stored before `stop` is, so that whoever sees `stop` finds the reason.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "bootstrap/asking.h"
#include "bootstrap/shared_memory.h"
#include "core/make_backend.h"
#include "cuda/driver/driver.h"
#include "cuda/launch/state.h"

namespace tw::cuda {

// A page's mapping, registered with CUDA once in a process, however many of its ranks use it; devices see it so.
class Registered;

class Control {
 public:
  ~Control();

  // Shares a page of every member with all of them. Collective; uses `tag`. on_stop() then begins to look after the
  // peers.
  static Status create(const BackendInit& init, uint64_t tag, std::unique_ptr<Control>* control);

  // Makes the control of a rank whose host shares no memory with those of all others: one page stands for those of all,
  // and what is to be told to peers is posted to them over their connections. Over the staged transport this rank's
  // thread also watches how long its steps take.
  static Status create_apart(const BackendInit& init, std::unique_ptr<Control>* control);

  // Gives the pages as this rank's device sees them, by rank.
  const std::vector<ControlPage*>& on_device() const { return on_device_; }

  void announce_abort(AbortSignal reason);
  AbortSignal abort_of(int writer) const;
  AbortSignal find_abort() const;

  // Give what kernels have reported since the last look; failure comes first. False if there is nothing new.
  bool next_failure(Report* report);
  bool next_call(Report* report);
  bool next_bad_id(Report* report);
  // Gives what a kernel waited for when it was stopped; false if none was.
  bool stopped(Report* report) const;
  // Gives the rank whose process is gone, -1 if all live.
  int dead() const { return dead_.load(std::memory_order_acquire); }
  // Sets what is called when kernels must stop, on the watching thread too. Begins to watch.
  void on_stop(std::function<void()> stop);
  // Has that thread look at a network too, which names nobody when it fails, and answer peers whose network has.
  // `failure`: why, from any thread, until the watch ends. `timeout`: a step's. Before on_stop(); on all ranks or none.
  void watch_network(std::function<Status()> failure, std::chrono::milliseconds timeout);
  // Why this rank's network has failed, if it has: then that is why this rank gave the group up.
  Status network_failure();
  // Ends the watch. The pages stay: kernels may still look at them.
  void end_watch();

 private:
  Control() = default;
  ControlPage& page(int rank) const { return *reinterpret_cast<ControlPage*>(pages_[rank]->data()); }
  void watch();
  void stop();
  static bool take(const Report& from, uint32_t* seen, Report* to);
  Status add_page(const std::shared_ptr<Mapping>& page);
  // For ranks that share no memory: host/control_apart.cc.
  void tell(AbortSignal reason);
  bool hear(std::vector<uint64_t>* heard);
  void listen(std::unique_lock<std::mutex>& lock);
  int find_gone() const;
  bool is_settled();
  void ask(std::unique_lock<std::mutex>& lock);
  void judge(const std::vector<int64_t>& answers);
  AbortSignal judge_late(AbortSignal own, std::unique_lock<std::mutex>& lock);
  int find_late(const std::vector<int64_t>& answers, int culprit) const;
  void await_verdict() const;
  void watch_steps(TimePoint now);
  // What a rank tells of a channel: the last step it has sent, and the digest of that call, as one load brings them.
  struct Notice {
    uint32_t sent;
    uint32_t call;
  };
  Notice notice_of(int channel) const;
  bool noticed(int rank, int channel, Notice* notice) const;
  int find_different(int channel) const;
  int find_behind(int channel, uint32_t step) const;
  void end_on(int channel, twResult_t result, int peer);
  uint64_t tag(int post) const { return tag_ + static_cast<uint64_t>(post); }

  Bootstrap* bootstrap_ = nullptr;
  std::vector<int> members_;
  int me_ = 0;
  // How long a channel's step has been under way, and waited for.
  struct Watched {
    uint32_t sent = 0;
    uint32_t waits = 0;
    TimePoint sent_at{};
    TimePoint waits_at{};
  };
  bool apart_ = false;
  bool staged_ = false;
  uint64_t tag_ = 0;
  uint32_t first_step_ = 0;
  std::vector<Watched> watched_;  // by channel
  std::string noticed_;           // what the peers know of this rank's steps
  std::function<Status()> network_;
  std::unique_ptr<Asking> asking_;  // NULL: nobody asks
  std::atomic<bool> network_failed_ = false;
  Status failed_;  // why it has
  TimePoint ask_at_{};
  std::chrono::milliseconds again_{};
  int suspect_ = -1;                  // by the last question
  std::atomic<bool> judged_ = false;  // who is to blame for this rank's timeout
  std::mutex telling_;
  uint64_t told_ = 0;  // the abort signal that the peers know
  std::vector<std::shared_ptr<Mapping>> pages_;
  std::vector<std::shared_ptr<Registered>> registered_;
  std::vector<ControlPage*> on_device_;
  uint32_t failures_seen_ = 0;
  uint32_t late_seen_ = 0;
  uint32_t calls_seen_ = 0;
  uint32_t bad_ids_seen_ = 0;
  std::atomic<int> dead_ = -1;
  std::function<void()> stop_;

  std::mutex mutex_;
  std::condition_variable ended_;
  bool ending_ = false;
  std::thread watcher_;
};

}  // namespace tw::cuda
