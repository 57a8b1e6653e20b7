// The bootstrap of ranks that are all in one process: a table of parcels under a mutex, with the meaning of
// bootstrap.h. Tests drive many ranks with it, so it must end meetings, name presences and give up occasions exactly as
// the mesh does. No lock may be held while `left` or the interrupt is asked, as both may call the library.
#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>

#include "bootstrap/bootstrap.h"
#include "core/interrupt.h"

namespace tw {
namespace {

struct Table {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<bool> gone;
  struct Given {
    std::string bytes;
    std::vector<int> to;  // ascending; nobody else sees it, as between processes
  };
  // By (tag, rank). A rank's last parcels stay here, since peers may take them late.
  std::map<std::pair<uint64_t, int>, Given> parcels;
  std::set<std::pair<uint64_t, int>> given_up;                  // (occasion, rank)
  std::map<std::tuple<uint64_t, int, int>, std::string> posts;  // by (tag, from, to)
};

class LocalBootstrap : public Bootstrap {
 public:
  LocalBootstrap(std::shared_ptr<Table> table, int rank, int size)
      : table_(std::move(table)), rank_(rank), size_(size) {}

  ~LocalBootstrap() override {
    const std::lock_guard lock(table_->mutex);
    table_->gone[rank_] = true;
    table_->changed.notify_all();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool in_process() const override { return true; }
  bool shares_memory() const override { return true; }

  bool alive(int peer) override {
    const std::lock_guard lock(table_->mutex);
    return !table_->gone[peer];
  }

  void give_up(std::span<const int>, uint64_t occasion) override {
    const std::lock_guard lock(table_->mutex);
    table_->given_up.insert({occasion, rank_});
    table_->changed.notify_all();
  }

  void post(int peer, uint64_t tag, const std::string& bytes) override {
    const std::lock_guard lock(table_->mutex);
    table_->posts[{tag, rank_, peer}] = bytes;
  }
  bool posted(int peer, uint64_t tag, std::string* bytes) override {
    const std::lock_guard lock(table_->mutex);
    const auto found = table_->posts.find({tag, peer, rank_});
    if (found == table_->posts.end()) return false;
    *bytes = found->second;
    return true;
  }

  std::vector<Presence> exchange(std::span<const int> members, uint64_t tag, const Parcel& mine, TimePoint deadline,
                                 std::vector<Parcel>* all, const Left& left, Needs needs) override {
    std::unique_lock lock(table_->mutex);
    lay_down(members, tag, mine.bytes);
    std::vector<Presence> presence(members.size(), Presence::kLate);
    all->clear();
    all->resize(members.size());
    bool over = false;  // the meeting has failed: a member is gone, or has given up (if all are here, the next meeting
                        // tells that)
    const auto complete = [&] {
      bool done = true;
      bool all_here = true;
      for (size_t i = 0; i < members.size(); ++i) {
        if (presence[i] == Presence::kHere) continue;
        const auto found = table_->parcels.find({tag, members[i]});
        if (found != table_->parcels.end() && std::ranges::binary_search(found->second.to, rank_)) {
          (*all)[i].bytes = found->second.bytes;
          presence[i] = Presence::kHere;
          continue;
        }
        all_here = false;
        if (table_->gone[members[i]]) {
          presence[i] = Presence::kGone;
          over = over || needs == Needs::kAll;
        } else if (presence[i] == Presence::kLate) {
          done = false;
        }
      }
      for (size_t i = 0; !all_here && i < members.size(); ++i) {
        if (!table_->given_up.contains({occasion_of(tag), members[i]})) continue;
        presence[i] = Presence::kGaveUp;
        over = true;
      }
      return done || over;
    };
    for (;;) {
      const TimePoint look = std::min(deadline, std::chrono::steady_clock::now() + (left ? kLook : kInterruptLook));
      if (table_->changed.wait_until(lock, look, complete) || look == deadline) break;
      lock.unlock();
      const bool interrupted = is_interrupted();
      for (size_t i = 0; left && i < members.size(); ++i) {
        if (presence[i] == Presence::kLate && left(members[i])) presence[i] = Presence::kGone;
      }
      lock.lock();  // what a member gave before it left is here now
      if (interrupted) {
        (void)complete();
        break;
      }
    }
    return presence;
  }

  void give(std::span<const int> members, uint64_t tag, const std::string& bytes) override {
    const std::lock_guard lock(table_->mutex);
    lay_down(members, tag, bytes);
  }

 private:
  void lay_down(std::span<const int> members, uint64_t tag, const std::string& bytes) {
    table_->parcels[{tag, rank_}] = {bytes, {members.begin(), members.end()}};
    table_->changed.notify_all();
    // A rank that gives its parcel of tag t+2 has seen the parcels of t+1 of all, given after they took those of t:
    // older ones can go.
    sent_.push_back(tag);
    if (sent_.size() > kKept) {
      table_->parcels.erase({sent_.front(), rank_});
      sent_.erase(sent_.begin());
    }
  }

  static constexpr std::chrono::milliseconds kLook{10};  // how often members that have left are looked for
  static constexpr size_t kKept = 64;                    // two would do in theory; shrinking asks some members only

  std::shared_ptr<Table> table_;
  std::vector<uint64_t> sent_;
  int rank_;
  int size_;
};

}  // namespace

std::vector<std::unique_ptr<Bootstrap>> make_local_bootstraps(int size) {
  auto table = std::make_shared<Table>();
  table->gone.assign(size, false);
  std::vector<std::unique_ptr<Bootstrap>> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(std::make_unique<LocalBootstrap>(table, rank, size));
  return ranks;
}

}  // namespace tw
