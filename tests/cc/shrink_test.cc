// Survivors must agree on who they are, whenever each of them comes: whoever gets a group gets the same one.
#include <chrono>
#include <limits>
#include <mutex>
#include <thread>

#include "core/group.h"
#include "harness.h"

namespace tw::test {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kPatience{300};
constexpr int kNever = -1;  // alive, but does not come

struct Outcome {
  twResult_t result = twSuccess;
  std::vector<int> members;  // of the new group, as ranks of the comm
  milliseconds waited{0};
};

std::vector<int> members_of(twGroup_t group) {
  twGroupInfo_t info{};
  info.size = sizeof info;
  EXPECT_TW(twSuccess, twGroupInfo(group, &info));
  return {info.comm_ranks, info.comm_ranks + info.nranks};
}

Outcome shrink(twGroup_t group) {
  Outcome outcome;
  twGroup_t survivors = nullptr;
  const auto begin = Clock::now();
  outcome.result = twGroupShrink(group, nullptr, &survivors);
  outcome.waited = std::chrono::duration_cast<milliseconds>(Clock::now() - begin);
  EXPECT_EQ(outcome.result == twSuccess, survivors != nullptr);
  if (survivors == nullptr) return outcome;
  outcome.members = members_of(survivors);
  // A group that its other members do not have cannot be used, nor ended in a barrier.
  const twErrorRecord_t old = error_of(group);
  EXPECT_EQ(old.sticky, 1);
  dispatch_nothing(survivors, impatient(100));
  EXPECT_TW(twSuccess, twGroupDestroy(survivors));
  return outcome;
}

// Ranks enter shrink at these times, in milliseconds; the last one beyond them is dead.
std::vector<Outcome> shrink_at(const std::vector<int>& entries) {
  const int alive = static_cast<int>(entries.size());
  World world(alive + 1, impatient(100));
  world.kill(alive);
  std::vector<Outcome> outcomes(alive);
  const auto begin = Clock::now();
  on_all_ranks(alive, [&](int rank) {
    if (entries[rank] == kNever) return;
    std::this_thread::sleep_until(begin + milliseconds(entries[rank]));
    outcomes[rank] = shrink(world[rank]);
  });
  for (int rank = 0; rank < alive; ++rank) {
    if (entries[rank] == kNever) world.abandon(rank);
  }
  return outcomes;
}

std::string text(const std::vector<int>& numbers) {
  std::string all;
  for (const int number : numbers) all += (all.empty() ? "" : ", ") + std::to_string(number);
  return "{" + all + "}";
}

// Whoever has a group has the same, and is in it; all its members have it; nobody waits for ever.
void expect_agreement(const std::vector<int>& entries, const std::vector<Outcome>& outcomes) {
  const std::vector<int>* members = nullptr;
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (entries[rank] == kNever) continue;
    EXPECT_LT(outcomes[rank].waited, 3 * kPatience + milliseconds(300)) << "rank " << rank;
    if (outcomes[rank].result != twSuccess) continue;
    if (members == nullptr) members = &outcomes[rank].members;
    EXPECT_EQ(*members, outcomes[rank].members) << "rank " << rank << " has another group";
  }
  for (size_t i = 0; members != nullptr && i < members->size(); ++i) {
    EXPECT_EQ(outcomes[(*members)[i]].result, twSuccess)
        << "rank " << (*members)[i] << " is missed by " << text(*members);
  }
}

std::vector<Outcome> check(const std::vector<int>& entries) {
  SCOPED_TRACE("ranks come after ms: " + text(entries));
  const std::vector<Outcome> outcomes = shrink_at(entries);
  expect_agreement(entries, outcomes);
  return outcomes;
}

struct Shrink : ::testing::Test {
  const Env patience{"TOKENWAY_SHRINK_MS", "300"};
  const Env creation{"TOKENWAY_TIMEOUT_MS", "3000"};  // of a group whose members differ: that nobody finds it
};

TEST_F(Shrink, AllComeInTime) {
  for (const auto& entries : {std::vector<int>{0, 0, 0}, {0, 100, 150}, {150, 0, 100}, {0}}) {
    for (const Outcome& outcome : check(entries)) {
      EXPECT_TW(twSuccess, outcome.result);
      EXPECT_EQ(outcome.members.size(), entries.size());
    }
  }
}

// The last one comes after the first has given it up, and before the second has.
TEST_F(Shrink, LaterThanThePatienceOfOne) { check({0, 150, 370}); }
TEST_F(Shrink, LaterThanThePatienceOfOneInAnyOrder) {
  check({370, 0, 150});
  check({150, 370, 0});
}

// One of six is late: it is left out, or taken in, but by all alike.
TEST_F(Shrink, OneOfSixIsLate) {
  for (const int late : {340, 370, 430}) {
    const std::vector<Outcome> outcomes = check({0, 40, 80, 120, 150, late});
    int successes = 0;
    for (const Outcome& outcome : outcomes) successes += outcome.result == twSuccess ? 1 : 0;
    EXPECT_GE(successes, 5) << "the five who came in time go on";
  }
}

TEST_F(Shrink, MuchTooLate) {
  const std::vector<Outcome> outcomes = check({0, 0, 900});
  EXPECT_TW(twSuccess, outcomes[0].result);
  EXPECT_EQ(outcomes[0].members, (std::vector<int>{0, 1}));
  EXPECT_NE(outcomes[2].result, twSuccess);
}

TEST_F(Shrink, OneNeverComes) {
  const std::vector<Outcome> outcomes = check({0, 100, kNever, 50});
  for (const int rank : {0, 1, 3}) {
    EXPECT_TW(twSuccess, outcomes[rank].result);
    EXPECT_EQ(outcomes[rank].members, (std::vector<int>{0, 1, 3}));
  }
}

// Many worlds at once, since they mostly sleep.
TEST_F(Shrink, AnyTimes) {
  constexpr int kWorlds = 24;
  std::vector<std::vector<int>> entries(kWorlds);
  std::vector<std::vector<Outcome>> outcomes(kWorlds);
  for (uint32_t i = 0; i < kWorlds; ++i) {
    const uint32_t ranks = 2 + i % 4;
    for (uint64_t rank = 0; rank < ranks; ++rank) entries[i].push_back(static_cast<int>(mix({i, rank}) % 700));
  }
  on_all_ranks(kWorlds, [&](int i) { outcomes[i] = shrink_at(entries[i]); });
  for (int i = 0; i < kWorlds; ++i) {
    SCOPED_TRACE("ranks come after ms: " + text(entries[i]));
    expect_agreement(entries[i], outcomes[i]);
  }
}

// An exception often hits several ranks alike: they give the group up at once, and the others need not wait for them.
void shrink_without(int ranks, const std::vector<int>& aborters, bool noticed) {
  SCOPED_TRACE(::testing::Message() << ranks << " ranks, aborters " << text(aborters) << ", noticed " << noticed);
  World world(ranks, impatient(100));
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
  on_all_ranks(ranks, [&](int rank) {
    twGroup_t none = nullptr;
    if (std::find(healthy.begin(), healthy.end(), rank) == healthy.end()) {
      EXPECT_TW(twExcluded, twGroupShrink(world[rank], nullptr, &none));
      return;
    }
    if (noticed) {
      Side side(world, traffic, rank, {}, 1);
      EXPECT_TW(twPeerAborted, side.dispatch());
    }
    const Outcome outcome = shrink(world[rank]);
    EXPECT_TW(twSuccess, outcome.result) << "rank " << rank;
    EXPECT_EQ(outcome.members, healthy) << "rank " << rank;
    EXPECT_LT(outcome.waited, kPatience) << "nobody is waited for";
  });
}

TEST_F(Shrink, TwoAborters) {
  for (const bool noticed : {true, false}) {
    shrink_without(3, {0, 1}, noticed);
    shrink_without(3, {2, 0}, noticed);
    shrink_without(4, {1, 3}, noticed);
    shrink_without(4, {0, 1}, noticed);
  }
}

TEST_F(Shrink, ThreeAbortersOfFour) { shrink_without(4, {1, 2, 3}, true); }

// What was under way ends at once when the group was shrunk, though it had no error.
TEST_F(Shrink, PendingOperationsEnd) {
  twGroupConfig_t config = impatient(100);
  config.timeout_ms = 4000;
  World world(3, config);
  Exchange exchange(world, make_traffic(config, {4, 4, 4}, 1), {}, 1);
  ASSERT_TW(twSuccess, exchange[0].dispatch(true));
  on_all_ranks(3, [&](int rank) { EXPECT_TW(twSuccess, shrink(world[rank]).result); });
  const auto begin = Clock::now();
  EXPECT_NE(exchange[0].complete(), twSuccess);
  EXPECT_LT(Clock::now() - begin, milliseconds(1500));
}

// The room for received rows is that of all ranks, by default or by name; survivors need less.
TEST_F(Shrink, HighThroughputKeepsItsConfiguration) {
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
