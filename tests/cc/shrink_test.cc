// Survivors must agree on who they are, whenever each of them comes: whoever gets a group gets the same one.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <latch>
#include <limits>
#include <mutex>
#include <thread>

#include "survivors.h"

namespace tw::test {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// What ranks wait at most where nobody has to be waited for.
constexpr milliseconds kSoon{10000};
constexpr int kNever = -1;  // alive, but does not come

// Ranks enter shrink at these times, and survivors wait `kPatience` for each other. One more rank, the last, is dead.
// Tells what becomes of each.
struct Entries {
  static constexpr int kPatience = 300;  // in the unit of `times`
  static constexpr int kMargin = 30;     // a rank may come so much later than it was to

  std::vector<int> times;
  std::string (*judge)(const std::vector<Outcome>&) = nullptr;  // what is wrong, beyond what always is
  std::vector<Outcome> outcomes = {};

  void play(milliseconds unit) {
    const int alive = static_cast<int>(times.size());
    World world(alive + 1, impatient(static_cast<int>(kPatience * unit.count())));
    world.kill(alive);
    outcomes.assign(alive, {});
    const auto begin = Clock::now();
    on_all_ranks(alive, [&](int rank) {
      if (times[rank] == kNever) return;
      std::this_thread::sleep_until(begin + times[rank] * unit);
      outcomes[rank] = shrink(world[rank]);
    });
    for (int rank = 0; rank < alive; ++rank) {
      if (times[rank] == kNever) world.abandon(rank);
    }
  }

  // Says what is wrong, if anything is. All ranks that have a group must have the same one and be in it; all its
  // members must have it; the others must be told that they are left out. Any other end, as by waiting for a rank that
  // does not come, is wrong.
  std::string wrong() const {
    const std::vector<int>* members = nullptr;
    for (size_t rank = 0; rank < outcomes.size(); ++rank) {
      if (times[rank] == kNever) continue;
      const Outcome& outcome = outcomes[rank];
      const std::string who = "rank " + std::to_string(rank);
      if (outcome.result == twExcluded) continue;
      if (outcome.result != twSuccess) {  // as a rank that waits for one that does not come, until that is given up
        return who + " ended in " + twResultString(outcome.result) + " (" + outcome.sentence + ")";
      }
      if (members == nullptr) members = &outcome.members;
      if (*members != outcome.members) return who + " has " + text(outcome.members) + ", another " + text(*members);
    }
    for (size_t i = 0; members != nullptr && i < members->size(); ++i) {
      if (outcomes[(*members)[i]].result != twSuccess) return text(*members) + " miss one";
    }
    return judge != nullptr ? judge(outcomes) : "";
  }
};

// Looks all the time how late a thread comes that wants to run, on each core.
class Stalls {
 public:
  Stalls() {
    const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
    for (unsigned core = 0; core < cores; ++core) threads_.emplace_back([this] { look(); });
  }
  milliseconds longest() {
    ended_ = true;
    for (std::thread& thread : threads_) thread.join();
    return std::chrono::duration_cast<milliseconds>(longest_);
  }

 private:
  void look() {
    while (!ended_) {
      const auto due = Clock::now() + milliseconds(2);
      std::this_thread::sleep_until(due);
      const auto late = Clock::now() - due;
      const std::lock_guard lock(mutex_);
      longest_ = std::max(longest_, late);
    }
  }
  std::atomic<bool> ended_ = false;
  std::mutex mutex_;
  Clock::duration longest_{};
  std::vector<std::thread> threads_;
};

// All at once, since they mostly sleep. Times are milliseconds; what goes wrong where the machine was too busy for that
// is played again at half the speed.
void play(std::vector<Entries> all) {
  for (int unit = 1;; unit *= 2) {
    const Env patience("TOKENWAY_SHRINK_MS", std::to_string(Entries::kPatience * unit).c_str());
    Stalls stalls;
    on_all_ranks(static_cast<int>(all.size()), [&](int i) { all[i].play(milliseconds(unit)); });
    const milliseconds stalled = stalls.longest();
    std::string wrong;
    for (const Entries& each : all) {
      const std::string what = each.wrong();
      if (!what.empty()) wrong += "\nranks come at " + text(each.times) + ": " + what;
    }
    if (wrong.empty()) return;
    if (unit < 16 && stalled > milliseconds(Entries::kMargin * unit)) continue;
    ADD_FAILURE() << "1 is " << unit << " ms, of which a thread was " << stalled.count() << " late" << wrong;
    return;
  }
}

// Ranks that disagree would meet in vain, for so long, and then end in twTimeout.
struct Shrink : ::testing::Test {
  const Env creation{"TOKENWAY_TIMEOUT_MS", "5000"};
};

// The last one comes after the first has given it up, and before the second has.
TEST_F(Shrink, LaterThanThePatienceOfOne) { play({{{0, 150, 370}}}); }
TEST_F(Shrink, LaterThanThePatienceOfOneInAnyOrder) { play({{{370, 0, 150}}, {{150, 370, 0}}}); }

// One of six is late: it is left out, or taken in, but by all alike.
TEST_F(Shrink, OneOfSixIsLate) {
  const auto judge = [](const std::vector<Outcome>& outcomes) -> std::string {
    const auto done = std::count_if(outcomes.begin(), outcomes.end(), [](auto& o) { return o.result == twSuccess; });
    return done >= 5 ? "" : "not all five who came in time go on";
  };
  play({{{0, 40, 80, 120, 150, 340}, judge}, {{0, 40, 80, 120, 150, 370}, judge}, {{0, 40, 80, 120, 150, 430}, judge}});
}

TEST_F(Shrink, MuchTooLate) {
  play({{{0, 0, 900}, [](const std::vector<Outcome>& outcomes) -> std::string {
           if (outcomes[0].result != twSuccess || outcomes[2].result == twSuccess)
             return "not the one who was late is out";
           return outcomes[0].members == std::vector{0, 1} ? "" : text(outcomes[0].members) + " go on";
         }}});
}

TEST_F(Shrink, OneNeverComes) {
  play({{{0, 100, kNever, 50}, [](const std::vector<Outcome>& outcomes) -> std::string {
           for (const int rank : {0, 1, 3}) {
             if (outcomes[rank].members != std::vector{0, 1, 3}) return text(outcomes[rank].members) + " go on";
           }
           return "";
         }}});
}

TEST_F(Shrink, AnyTimes) {
  std::vector<Entries> all(24);
  for (uint32_t i = 0; i < all.size(); ++i) {
    for (uint64_t rank = 0; rank < 2 + i % 4; ++rank) all[i].times.push_back(static_cast<int>(mix({i, rank}) % 700));
  }
  play(all);
}

// Nobody comes too late here, however busy the machine.
struct Patient : ::testing::Test {
  const Env patience{"TOKENWAY_SHRINK_MS", std::to_string(kLong.count()).c_str()};
};

TEST_F(Patient, AllCome) {
  for (const auto& times : {std::vector<int>{0, 0, 0}, {0, 30, 50}, {50, 0, 30}, {0}}) {
    SCOPED_TRACE("ranks come after ms: " + text(times));
    Entries entries{times};
    entries.play(milliseconds(1));
    for (const Outcome& outcome : entries.outcomes) {
      EXPECT_TW(twSuccess, outcome.result);
      EXPECT_EQ(outcome.members.size(), times.size());
      EXPECT_LT(outcome.waited, kSoon);
    }
  }
}

// An exception often hits several ranks alike: they give the group up at once, and the others need not wait for them.
void shrink_without(int ranks, const std::vector<int>& aborters, bool noticed) {
  if (::testing::Test::HasFailure()) return;  // each takes long then
  SCOPED_TRACE(::testing::Message() << ranks << " ranks, aborters " << text(aborters) << ", noticed " << noticed);
  World world(ranks, impatient(kLong.count()));
  const Traffic traffic = make_traffic(world.config, std::vector<int>(ranks, 4), 1);
  for (const int rank : aborters) {
    if (noticed && rank != aborters.front()) {  // it gives up a group that is finished already
      Side side(world, traffic, rank, {}, 1);
      EXPECT_TW(twPeerAborted, side.dispatch());
    }
    EXPECT_TW(twSuccess, twGroupAbort(world[rank]));
  }
  std::vector<int> healthy;
  for (int rank = 0; rank < ranks; ++rank) {
    if (std::find(aborters.begin(), aborters.end(), rank) == aborters.end()) healthy.push_back(rank);
  }
  on_all_ranks(static_cast<int>(healthy.size()), [&](int i) {
    const int rank = healthy[i];
    if (noticed) {
      Side side(world, traffic, rank, {}, 1);
      EXPECT_TW(twPeerAborted, side.dispatch());
    }
    const Outcome outcome = shrink(world[rank]);
    EXPECT_TW(twSuccess, outcome.result) << "rank " << rank;
    EXPECT_EQ(outcome.members, healthy) << "rank " << rank;
    EXPECT_LT(outcome.waited, kSoon) << "nobody is waited for";
  });
  for (const int rank : aborters) {
    twGroup_t none = nullptr;
    EXPECT_TW(twExcluded, twGroupShrink(world[rank], nullptr, &none));
  }
}

TEST_F(Patient, TwoAborters) {
  for (const bool noticed : {true, false}) {
    shrink_without(3, {0, 1}, noticed);
    shrink_without(3, {2, 0}, noticed);
    shrink_without(4, {1, 3}, noticed);
    shrink_without(4, {0, 1}, noticed);
  }
}

// Rank 2 leaves when the others wait for its answer already: they hear of it then, not at the end of their patience.
struct LeftWaiting : Patient {
  static void check(const std::function<void(World&)>& leave) {
    World world(3, impatient(kLong.count()));
    std::latch waiting(2);
    on_all_ranks(3, [&](int rank) {
      if (rank == 2) {
        waiting.wait();
        std::this_thread::sleep_for(milliseconds(50));
        const auto begin = Clock::now();
        leave(world);
        EXPECT_LT(Clock::now() - begin, kSoon);
        return;
      }
      waiting.count_down();
      expect_pair(shrink(world[rank]));
    });
  }
  static void expect_pair(const Outcome& outcome) {
    EXPECT_TW(twSuccess, outcome.result);
    EXPECT_EQ(outcome.members, (std::vector<int>{0, 1}));
    EXPECT_LT(outcome.waited, kSoon);
  }
  static void destroy(World& world) {
    EXPECT_TW(twSuccess, twGroupDestroy(world[2]));
    world.groups[2] = nullptr;
  }
};

TEST_F(LeftWaiting, ForOneThatGivesUp) {
  check([](World& world) { EXPECT_TW(twSuccess, twGroupAbort(world[2])); });
}
TEST_F(LeftWaiting, ForOneThatIsGone) {
  check([](World& world) { world.kill(2); });
}
TEST_F(LeftWaiting, ForOneThatDestroysABrokenGroup) {
  check([](World& world) { world.abandon(2), destroy(world); });
}
// It meets the others where it expects their destroying the group, too.
TEST_F(LeftWaiting, ForOneThatDestroysAWholeGroup) { check(destroy); }

// Rank 2 is stuck. Rank 1 finds that out in a dispatch; rank 0, which has not waited for that, hears it in its shrink.
TEST_F(LeftWaiting, ForOneThatAnErrorBlames) {
  World world(3, impatient(kLong.count()));
  world.groups[1]->config.given.timeout_ms = 100;
  const Traffic traffic = make_traffic(world.config, {4, 4, 4}, 1);
  Side first(world, traffic, 0, {}, 1);
  ASSERT_TW(twSuccess, first.dispatch(true));
  on_all_ranks(2, [&](int rank) {
    if (rank == 1) {
      Side side(world, traffic, 1, {}, 1);
      EXPECT_TW(twTimeout, side.dispatch());
      world.groups[1]->config.given.timeout_ms = world.config.timeout_ms;
    }
    expect_pair(shrink(world[rank]));
  });
  twGroup_t none = nullptr;
  EXPECT_TW(twExcluded, twGroupShrink(world[2], nullptr, &none));
}

// Rank 2 hears that it made a different call, which need not be true: it asks the others, who do not ask it.
TEST_F(LeftWaiting, OneThatOthersGaveUpForAnotherReason) {
  World world(connect(3), impatient(kLong.count()));
  for (const int rank : {0, 1}) world[rank]->backend->announce_abort({twCallMismatch, 0, 2, false});
  std::barrier ended(3);
  on_all_ranks(3, [&](int rank) {
    if (rank != 2) {
      expect_pair(shrink(world[rank]));
      EXPECT_TW(twSuccess, twGroupDestroy(world[rank]));  // says nothing new
      world.groups[rank] = nullptr;
    } else {
      const Outcome outcome = shrink(world[rank]);
      EXPECT_TW(twExcluded, outcome.result);
      EXPECT_LT(outcome.waited, kSoon);
    }
    ended.arrive_and_wait();
  });
}

// Whom an error blames is told that it is left out, and says that it will not answer, to those who waited for it.
TEST_F(LeftWaiting, OneThatIsBlamedMeanwhile) {
  World world(3, impatient(kLong.count()));
  std::latch waiting(1);
  on_all_ranks(2, [&](int rank) {
    if (rank == 1) {
      waiting.wait();
      std::this_thread::sleep_for(milliseconds(50));
      world[2]->backend->announce_abort({twTimeout, 2, 0, false});
      return;
    }
    waiting.count_down();
    const Outcome outcome = shrink(world[0]);
    EXPECT_TW(twExcluded, outcome.result);
    EXPECT_LT(outcome.waited, kSoon);
    EXPECT_TRUE(world[1]->backend->abort_of(0).left);
  });
}

TEST_F(Patient, ThreeAbortersOfFour) { shrink_without(4, {1, 2, 3}, true); }

// What was under way ends at once when the group was shrunk, though it had no error.
TEST_F(Patient, PendingOperationsEnd) {
  const twGroupConfig_t config = impatient(kLong.count());
  World world(3, config);
  Exchange exchange(world, make_traffic(config, {4, 4, 4}, 1), {}, 1);
  ASSERT_TW(twSuccess, exchange[0].dispatch(true));
  on_all_ranks(3, [&](int rank) { EXPECT_TW(twSuccess, shrink(world[rank]).result); });
  const auto begin = Clock::now();
  EXPECT_NE(exchange[0].complete(), twSuccess);
  EXPECT_LT(Clock::now() - begin, kSoon);
}

// The room for received rows is that of all ranks, by default or by name; survivors need less.
TEST_F(Patient, HighThroughputKeepsItsConfiguration) {
  for (const int32_t room : {0, 12, 5}) {
    SCOPED_TRACE(room);
    twGroupConfig_t config = make_config(6, 2, 4);
    config.mode = twHighThroughput;
    config.max_recv_tokens = room;
    World world(3, config);
    world.kill(2);
    on_all_ranks(2, [&](int rank) {
      twGroup_t survivors = nullptr;
      ASSERT_TW(twSuccess, twGroupShrink(world[rank], room == 12 ? &config : nullptr, &survivors));
      EXPECT_EQ(survivors->config.given.max_recv_tokens, room == 5 ? 5 : 8);
      EXPECT_TW(twSuccess, twGroupDestroy(survivors));
    });
  }
}

}  // namespace
}  // namespace tw::test
