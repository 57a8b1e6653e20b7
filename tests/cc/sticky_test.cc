// Errors that finish a group: late peers, dead peers, different calls; what follows, and the way out (S6).
#include <barrier>
#include <chrono>
#include <latch>
#include <thread>

#include "core/group.h"
#include "harness.h"

namespace tw::test {
namespace {

using std::chrono::milliseconds;

// What a failed dispatch leaves: nothing from whom it did not hear.
void expect_nothing_from(const World& world, const Side& side, int source) {
  ASSERT_NE(side.received.counts.data, nullptr);
  EXPECT_EQ(static_cast<const int32_t*>(side.received.counts.data)[source], 0);
  const int64_t begin = static_cast<int64_t>(source) * world.config.max_tokens * world.config.top_k;
  for (int64_t i = 0; i < world.config.max_tokens * world.config.top_k; ++i) {
    EXPECT_EQ(static_cast<const int32_t*>(side.received.ids.data)[begin + i], -1);
    EXPECT_EQ(static_cast<const float*>(side.received.weights.data)[begin + i], 0.0f);
  }
}

TEST(Sticky, TimeoutNamesTheLateRank) {
  World world(3, impatient());
  Exchange exchange(world, make_traffic(world.config, {4, 4, 4}, 1), {}, 1);
  EXPECT_TW(twSuccess, exchange[0].dispatch(true));
  EXPECT_TW(twSuccess, exchange[1].dispatch(true));
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TW(twTimeout, exchange[0].complete());
  EXPECT_GE(std::chrono::steady_clock::now() - begin, milliseconds(55));
  const twErrorRecord_t record = error_of(world[0]);
  EXPECT_EQ(record.result, twTimeout);
  EXPECT_EQ(record.sticky, 1);
  EXPECT_EQ(record.peer, 2);
  EXPECT_EQ(record.reporter, 0);
  EXPECT_EQ(record.phase, twPhaseDispatch);
  EXPECT_EQ(record.lane, 0);
  EXPECT_EQ(record.step, 1u);
  EXPECT_EQ(record.expected, 1u);
  EXPECT_EQ(record.seen, 0u);
  expect_nothing_from(world, exchange[0], 2);
  // Rank 1 hears of it, at once, and blames the same rank.
  EXPECT_TW(twTimeout, exchange[1].complete());
  EXPECT_EQ(error_of(world[1]).peer, 2);
  EXPECT_EQ(error_of(world[1]).reporter, 0);
  EXPECT_EQ(static_cast<const int32_t*>(exchange[1].received.counts.data)[0] > 0, true) << "what arrived is shown";
}

// S6: after an error nothing is sent any more, even when the late peer comes at last.
TEST(Sticky, LaterCallsSendNothing) {
  twGroupConfig_t config = impatient(kOneWaitMs);
  config.lanes = 2;
  World world(2, config);
  Exchange exchange(world, make_traffic(config, {4, 4}, 1), {}, 1);
  Exchange other(world, make_traffic(config, {4, 4}, 2), {}, 2);
  EXPECT_TW(twTimeout, exchange[0].dispatch());
  const std::vector<uint8_t> before = world.window(1);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TW(twTimeout, exchange[0].dispatch());
  EXPECT_TW(twTimeout, other[0].dispatch()) << "on any lane";
  EXPECT_TW(twTimeout, other[0].combine());
  other[0].input.bound = 99;
  EXPECT_TW(twTimeout, other[0].dispatch()) << "nor a refusal";
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(kOneWaitMs)) << "without waiting";
  EXPECT_EQ(world.window(1), before);
  // The late rank is told that it was given up, and sends nothing either.
  const std::vector<uint8_t> mine = world.window(0);
  EXPECT_TW(twExcluded, exchange[1].dispatch());
  EXPECT_EQ(error_of(world[1]).sticky, 1);
  EXPECT_EQ(error_of(world[1]).reporter, 0);
  EXPECT_EQ(world.window(1), before);
  EXPECT_EQ(world.window(0), mine);
}

TEST(Sticky, CombineTimeoutGivesNan) {
  World world(2, impatient());
  Exchange exchange(world, make_traffic(world.config, {4, 4}, 1), {}, 1);
  exchange.dispatch();
  EXPECT_TW(twTimeout, exchange[0].combine());
  const auto* const sums = static_cast<const float*>(exchange[0].sums.tokens.data);
  for (int i = 0; i < 4 * 8; ++i) ASSERT_TRUE(std::isnan(sums[i]));
  EXPECT_EQ(error_of(world[0]).phase, twPhaseCombine);
  EXPECT_EQ(error_of(world[0]).step, 2u);
}

// A rank that was late, with its call already under way: its wait ends too, by what rank 0 reports.
TEST(Sticky, WaitEndsWhenPeersGiveUp) {
  const twGroupConfig_t config = impatient(2 * kOneWaitMs);
  World world(3, config);
  const Traffic traffic = make_traffic(config, {4, 4, 4}, 1);
  std::latch begun(1);
  on_all_ranks(3, [&](int rank) {
    if (rank == 2) return;
    Side side(world, traffic, rank, {}, 1);
    if (rank == 0) begun.count_down();
    if (rank == 1) {
      begun.wait();
      std::this_thread::sleep_for(milliseconds(kOneWaitMs));
    }
    EXPECT_TW(twTimeout, side.dispatch());
    EXPECT_EQ(error_of(world[rank]).peer, 2);
    EXPECT_EQ(error_of(world[rank]).reporter, 0) << "its own timeout is half over when rank 0 has waited for the whole";
  });
}

// One dispatches where the others combine. Whoever looks finds a mismatch or hears of it; nobody goes on.
TEST(Sticky, CallMismatch) {
  World world(3, make_config(6, 2, 4));
  Exchange a(world, make_traffic(world.config, {4, 4, 4}, 1), {}, 1);
  a.dispatch();
  a.combine();
  Exchange b(world, make_traffic(world.config, {4, 4, 4}, 2), {}, 2);
  EXPECT_TW(twSuccess, a[0].combine(true));
  EXPECT_TW(twSuccess, b[1].dispatch(true));
  EXPECT_TW(twSuccess, a[2].combine(true));
  EXPECT_TW(twCallMismatch, a[0].complete());
  EXPECT_TW(twCallMismatch, b[1].complete());
  EXPECT_TW(twCallMismatch, a[2].complete());
  EXPECT_EQ(error_of(world[0]).peer, 1);
  EXPECT_EQ(error_of(world[2]).peer, 1);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(error_of(world[rank]).sticky, 1);
    EXPECT_TW(twCallMismatch, b[rank].dispatch());
  }
}

// A rank that hears of a mismatch from its peers, before it could see it, is told the same.
TEST(Sticky, CallMismatchHeardFromAPeer) {
  World world(3, make_config(6, 2, 4));
  Exchange a(world, make_traffic(world.config, {4, 4, 4}, 1), {}, 1);
  a.dispatch();
  a.combine();
  Exchange b(world, make_traffic(world.config, {4, 4, 4}, 2), {}, 2);
  EXPECT_TW(twSuccess, b[1].dispatch(true));
  EXPECT_TW(twSuccess, a[0].combine(true));
  EXPECT_TW(twSuccess, a[2].combine(true));
  EXPECT_TW(twCallMismatch, a[0].complete());
  until_looked_again();
  EXPECT_TW(twCallMismatch, a[1].combine()) << "the next call of the rank that is blamed";
  EXPECT_TW(twCallMismatch, a[2].complete());
}

TEST(Sticky, DeadPeerIsSeenLongBeforeTheTimeout) {
  const twGroupConfig_t config = make_config(6, 2, 4);
  World world(3, config);
  const Traffic traffic = make_traffic(config, {4, 4, 4}, 1);
  world.kill(2);
  on_all_ranks(2, [&](int rank) {
    Side side(world, traffic, rank, {}, 1);
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_TW(twPeerDied, side.dispatch());
    EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(config.timeout_ms / 2));
    EXPECT_EQ(error_of(world[rank]).peer, 2);
    expect_nothing_from(world, side, 2);
    twGroup_t survivors = nullptr;
    EXPECT_TW(twSuccess, twGroupShrink(world[rank], nullptr, &survivors));
    if (survivors == nullptr) return;
    twGroupInfo_t info{};
    info.size = sizeof info;
    EXPECT_TW(twSuccess, twGroupInfo(survivors, &info));
    EXPECT_EQ(info.nranks, 2);
    EXPECT_TW(twSuccess, twGroupDestroy(survivors));
  });
}

// A dead rank is noticed whichever rank is waited for: here one that lives and has much to do.
TEST(Sticky, DeathBehindASlowRank) {
  for (int waiter = 0; waiter < 3; ++waiter) {
    for (const int dead : {(waiter + 1) % 3, (waiter + 2) % 3}) {
      SCOPED_TRACE(::testing::Message() << "rank " << waiter << " waits, rank " << dead << " dies");
      World world(3, make_config(6, 2, 4));
      Exchange exchange(world, make_traffic(world.config, {4, 4, 4}, 1), {}, 1);
      std::thread death([&] {
        std::this_thread::sleep_for(milliseconds(50));
        world.kill(dead);
      });
      const auto begin = std::chrono::steady_clock::now();
      EXPECT_TW(twPeerDied, exchange[waiter].dispatch());
      EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(world.config.timeout_ms / 2));
      EXPECT_EQ(error_of(world[waiter]).peer, dead);
      death.join();
      EXPECT_TW(twPeerDied, exchange[3 - waiter - dead].dispatch()) << "the slow one hears of it in its next call";
    }
  }
}

// A rank whose rows are there may die: the step needs nothing more of it.
TEST(Sticky, DeathAfterTheSignal) {
  World world(3, make_config(6, 2, 4));
  Exchange exchange(world, make_traffic(world.config, {4, 4, 4}, 1), {}, 1);
  EXPECT_TW(twSuccess, exchange[1].dispatch(true));
  EXPECT_TW(twSuccess, exchange[2].dispatch(true));
  world.kill(2);
  EXPECT_TW(twSuccess, exchange[0].dispatch());
  exchange[0].expect_received();
  EXPECT_TW(twSuccess, exchange[1].complete());
  on_all_ranks(2, [&](int rank) { EXPECT_TW(twPeerDied, exchange[rank].combine()); });
}

// The survivors' new group works, over ranks renumbered.
void use_survivors(twGroup_t group, int rank, int ranks, const twGroupConfig_t& config) {
  EXPECT_EQ(dispatch_nothing(group, config), ranks);
  twGroupInfo_t info{};
  info.size = sizeof info;
  EXPECT_TW(twSuccess, twGroupInfo(group, &info));
  EXPECT_EQ(info.rank, rank);
  EXPECT_EQ(info.nranks, ranks);
}

TEST(Sticky, ShrinkAfterATimeout) {
  World world(3, impatient(kOneWaitMs));  // in which ranks 0 and 2 must meet
  const Traffic traffic = make_traffic(world.config, {4, 4, 4}, 1);
  const twGroupConfig_t patient = make_config(6, 2, 4);
  std::barrier together(2);
  std::latch late(2);
  on_all_ranks(3, [&](int rank) {
    twGroup_t survivors = nullptr;
    if (rank == 1) {
      late.wait();
      EXPECT_TW(twExcluded, twGroupShrink(world[rank], nullptr, &survivors));
      EXPECT_EQ(survivors, nullptr);
      return;
    }
    Side side(world, traffic, rank, {}, 1);
    together.arrive_and_wait();
    EXPECT_TW(twTimeout, side.dispatch());
    late.count_down();
    ASSERT_TW(twSuccess, twGroupShrink(world[rank], &patient, &survivors));
    EXPECT_TW(twTimeout, side.dispatch()) << "the old group stays finished";
    use_survivors(survivors, rank == 0 ? 0 : 1, 2, world.config);
    twGroupInfo_t info{};
    info.size = sizeof info;
    EXPECT_TW(twSuccess, twGroupInfo(survivors, &info));
    EXPECT_EQ(info.comm_ranks[1], 2);
    EXPECT_TW(twSuccess, twGroupDestroy(survivors));
  });
}

TEST(Sticky, ShrinkWithoutAnError) {
  World world(2, make_config(6, 2, 4));
  on_all_ranks(2, [&](int rank) {
    twGroup_t survivors = nullptr;
    ASSERT_TW(twSuccess, twGroupShrink(world[rank], nullptr, &survivors));
    use_survivors(survivors, rank, 2, world.config);
    EXPECT_TW(twSuccess, twGroupDestroy(survivors));
    EXPECT_EQ(error_of(world[rank]).sticky, 1);
  });
}

// Steps that begin near the wrap change nothing about errors: fresh signals are before the first step.
TEST(Sticky, TimeoutAtTheWrap) {
  const Env first("TOKENWAY_FIRST_STEP", "4294967295");
  World world(2, impatient());
  Exchange exchange(world, make_traffic(world.config, {4, 4}, 1), {}, 1);
  EXPECT_TW(twTimeout, exchange[0].dispatch());
  EXPECT_EQ(error_of(world[0]).expected, 0u);
  EXPECT_EQ(error_of(world[0]).seen, 0xffffffffu);
}

// Both combine, under the same bound, but different handles: their rows are not each other's.
TEST(Sticky, CombinesOfDifferentHandles) {
  const twGroupConfig_t config = make_config(2, 1, 4);
  World world(2, config);
  Traffic few = make_traffic(config, {4, 4}, 1);
  Traffic many = few;
  for (auto& ids : few.ids) ids = {0, 1, -1, -1};
  for (auto& ids : many.ids) ids = {0, 1, 1, 0};
  Exchange a(world, few, {}, 1);
  Exchange b(world, many, {}, 2);
  a.dispatch(), a.combine();
  b.dispatch(), b.combine();
  EXPECT_TW(twSuccess, a[0].combine(true));
  EXPECT_TW(twSuccess, b[1].combine(true));
  EXPECT_TW(twCallMismatch, a[0].complete());
  EXPECT_TW(twCallMismatch, b[1].complete());
}

// A rank that cannot go on says so: peers that wait for it need no timeout.
TEST(Sticky, AbortEndsThePeersWait) {
  const twGroupConfig_t config = make_config(2, 1, 4);
  World world(2, config);
  Exchange exchange(world, make_traffic(config, {4, 4}, 1), {}, 1);
  ASSERT_TW(twSuccess, exchange[0].dispatch(true));
  ASSERT_TW(twSuccess, twGroupAbort(world[1]));
  ASSERT_TW(twSuccess, twGroupAbort(world[1]));  // once more does nothing
  EXPECT_TW(twPeerAborted, exchange[0].complete());
  EXPECT_TW(twPeerAborted, exchange[1].dispatch());
  for (const int rank : {0, 1}) {
    EXPECT_EQ(error_of(world[rank]).peer, 1);
    EXPECT_EQ(error_of(world[rank]).sticky, 1);
  }
  twGroup_t survivors = nullptr;
  EXPECT_TW(twExcluded, twGroupShrink(world[1], nullptr, &survivors));
  ASSERT_TW(twSuccess, twGroupShrink(world[0], nullptr, &survivors));
  EXPECT_TW(twSuccess, twGroupDestroy(survivors));
}

}  // namespace
}  // namespace tw::test
