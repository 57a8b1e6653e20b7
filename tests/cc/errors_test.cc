// Errors of one call: it fails on every rank, at once, and the group works afterwards.
#include <chrono>
#include <cstring>
#include <thread>

#include "core/group.h"
#include "harness.h"

namespace tw::test {
namespace {

using std::chrono::milliseconds;

// The group still does what it should.
void expect_usable(const World& world, uint32_t seed) {
  Style style{twExpertMajor, twWeightTopk};
  style.own_memory = true;
  Exchange exchange(world, make_traffic(world.config, std::vector<int>(world.size(), 3), seed), style, seed);
  exchange.dispatch();
  exchange.combine();
}

// A failed send_only dispatch keeps its channel, on all ranks alike.
void release(const World& world, Exchange& exchange) {
  for (int rank = 0; rank < world.size(); ++rank) EXPECT_TW(twSuccess, twHandleRelease(exchange[rank].handle));
}

void expect_all_zero_counts(const Side& side, int source) {
  ASSERT_NE(side.received.counts.data, nullptr);
  EXPECT_EQ(static_cast<const int32_t*>(side.received.counts.data)[source], 0);
}

TEST(Errors, RefusedDispatchIsToldAtOnce) {
  const twGroupConfig_t config = make_config(6, 2, 4);
  World world(3, config);
  for (uint32_t round = 0; round < 3; ++round) {
    Exchange exchange(world, make_traffic(config, {4, 4, 4}, round), {}, round);
    exchange[1].input.bound = 99;
    EXPECT_TW(twSuccess, exchange[0].dispatch(true));
    EXPECT_TW(twInvalidArgument, exchange[1].dispatch(true));
    EXPECT_NE(std::strstr(twLastError(), "99"), nullptr) << twLastError();
    EXPECT_TW(twSuccess, exchange[2].dispatch(true));
    for (const int rank : {0, 2}) {
      EXPECT_TW(twPeerRefused, exchange[rank].complete());
      EXPECT_EQ(error_of(world[rank]).peer, 1);
      EXPECT_EQ(error_of(world[rank]).sticky, 0);
      EXPECT_EQ(error_of(world[rank]).phase, twPhaseDispatch);
      expect_all_zero_counts(exchange[rank], 1);
      EXPECT_TW(twInvalidUsage, exchange[rank].combine()) << "nothing was dispatched";
    }
    exchange[1].input.bound = 0;
    exchange.dispatch();
    exchange.combine();
  }
  expect_usable(world, 5);
}

TEST(Errors, RefusedCombineIsToldAtOnceAndCanBeTriedAgain) {
  const twGroupConfig_t config = make_config(6, 2, 4);
  World world(3, config);
  Exchange exchange(world, make_traffic(config, {4, 4, 4}, 1), {}, 1);
  exchange.dispatch();
  const int64_t elements = exchange[2].sums.tokens.shape[1];
  exchange[2].sums.tokens.shape[1] = 3;
  EXPECT_TW(twInvalidArgument, exchange[2].combine(true));
  for (const int rank : {0, 1}) EXPECT_TW(twSuccess, exchange[rank].combine(true));
  for (const int rank : {0, 1}) {
    EXPECT_TW(twPeerRefused, exchange[rank].complete());
    EXPECT_EQ(error_of(world[rank]).peer, 2);
    const auto* const sums = static_cast<const float*>(exchange[rank].sums.tokens.data);
    for (int64_t i = 0; i < 4 * elements; ++i) ASSERT_TRUE(std::isnan(sums[i])) << "rank " << rank;
  }
  exchange[2].sums.tokens.shape[1] = elements;
  exchange.combine();
  expect_usable(world, 5);
}

// The refused combine was a step: a second one writes its inbox over the bank that the dispatch's view lies in. So
// rows in the view must be refused there, or come out right; never silently wrong.
TEST(Errors, RetriedCombineFromTheViewIsNotSilentlyWrong) {
  const twGroupConfig_t config = make_config(6, 2, 4, 16);
  World world(2, config);
  const Style style{twRankMajor, twWeightNone, twBfloat16, twFloat32, 0, -1, false, true};
  Exchange exchange(world, make_traffic(config, {4, 4}, 1), style, 1);
  exchange.dispatch();
  exchange[1].sums.tokens.shape[1] = 3;
  EXPECT_TW(twInvalidArgument, exchange[1].combine(true));
  EXPECT_TW(twSuccess, exchange[0].combine(true));
  EXPECT_TW(twPeerRefused, exchange[0].complete());
  exchange[1].sums.tokens.shape[1] = 16;
  const twResult_t retried[] = {exchange[0].combine(true), exchange[1].combine(true)};
  EXPECT_EQ(retried[0], retried[1]);
  for (int rank = 0; rank < 2; ++rank) {
    if (retried[rank] != twSuccess) continue;
    EXPECT_TW(twSuccess, exchange[rank].complete());
    exchange[rank].expect_tokens();
  }
}

// With real waiting: the peers are asleep in the call when the refusal comes.
TEST(Errors, RefusalWakesSleepers) {
  const twGroupConfig_t config = make_config(6, 2, 4);
  World world(3, config);
  const Traffic traffic = make_traffic(config, {4, 4, 4}, 2);
  on_all_ranks(3, [&](int rank) {
    Side side(world, traffic, rank, {}, 2);
    if (rank == 1) {
      std::this_thread::sleep_for(milliseconds(30));
      side.input.stream = &side;
    }
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_TW(rank == 1 ? twInvalidArgument : twPeerRefused, side.dispatch());
    EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(config.timeout_ms / 2));
    side.input.stream = nullptr;
    EXPECT_TW(twSuccess, side.dispatch());
    side.expect_received();
    EXPECT_TW(twSuccess, side.combine());
    side.expect_tokens();
  });
}

// A rank that refuses again and again must not run ahead: its peers may still look at the refused step (S2).
TEST(Errors, RefusingRankDoesNotRunAhead) {
  twGroupConfig_t config = make_config(6, 2, 4);
  World world(2, config);
  const Traffic traffic = make_traffic(config, {4, 4}, 2);
  on_all_ranks(2, [&](int rank) {
    Side side(world, traffic, rank, {}, 2);
    for (int round = 0; round < 4; ++round) {
      if (rank == 0) side.input.bound = 99;
      EXPECT_TW(rank == 0 ? twInvalidArgument : twSuccess, side.dispatch(true));
      if (rank == 1) std::this_thread::sleep_for(milliseconds(20));
      if (rank == 1) {
        EXPECT_TW(twPeerRefused, side.complete());
      }
    }
    side.input.bound = 0;
    EXPECT_TW(twSuccess, side.dispatch());
    side.expect_received();
    EXPECT_TW(twSuccess, side.combine());
    side.expect_tokens();
  });
}

// Nobody else sends, so the second refusal has to wait for the first one's signals, and says so.
TEST(Errors, RefusedStepIsWaitedOut) {
  twGroupConfig_t config = make_config(6, 2, 4);
  config.timeout_ms = 60;
  World world(2, config);
  const Traffic traffic = make_traffic(config, {4, 4}, 2);
  Side side(world, traffic, 0, {}, 2);
  side.input.bound = 99;
  EXPECT_TW(twInvalidArgument, side.dispatch());
  EXPECT_TW(twTimeout, side.dispatch());
}

// A refused dispatch fails alike everywhere: no rank may combine what the handle dispatched before it.
TEST(Errors, RefusedDispatchForgetsTheEarlierOne) {
  twGroupConfig_t config = make_config(6, 2, 4);
  config.timeout_ms = 500;
  World world(2, config);
  Exchange exchange(world, make_traffic(config, {4, 4}, 1), {}, 1);
  exchange.dispatch();
  exchange[1].input.bound = 99;
  EXPECT_TW(twSuccess, exchange[0].dispatch(true));
  EXPECT_TW(twInvalidArgument, exchange[1].dispatch(true));
  EXPECT_TW(twPeerRefused, exchange[0].complete());
  EXPECT_TW(twInvalidUsage, exchange[0].combine(true));
  EXPECT_TW(twInvalidUsage, exchange[1].combine(true));
}

// Which channel is leased depends on the calls alone (S5), those that failed included, and not on when they were
// completed.
TEST(Errors, RefusalLeavesChannelsAlike) {
  twGroupConfig_t config = make_config(6, 2, 4);
  config.lanes = 2;
  config.timeout_ms = 500;
  World world(2, config);
  Exchange a(world, make_traffic(config, {4, 4}, 1), {}, 1);
  Exchange b(world, make_traffic(config, {4, 4}, 2), {}, 2);
  Exchange c(world, make_traffic(config, {4, 4}, 3), {}, 3);
  a[1].input.bound = 99;
  EXPECT_TW(twSuccess, a[0].dispatch(true));
  EXPECT_TW(twInvalidArgument, a[1].dispatch(true));
  b.send_dispatch();
  const twResult_t third[] = {c[0].dispatch(true), c[1].dispatch(true)};
  EXPECT_EQ(third[0], third[1]) << "the same call in the same order found a free channel on one rank only";
  EXPECT_TW(twPeerRefused, a[0].complete());
  b.complete_dispatch();
  release(world, a);
  c.dispatch();
}

// A call that waits fails in the same place on all ranks too, and its channel is free at once.
TEST(Errors, RefusalOfABlockingDispatchFreesTheChannel) {
  const twGroupConfig_t config = make_config(6, 2, 4);
  World world(2, config);
  Exchange a(world, make_traffic(config, {4, 4}, 1), {}, 1);
  Exchange b(world, make_traffic(config, {4, 4}, 2), {}, 2);
  a[1].input.bound = 99;
  on_all_ranks(2, [&](int rank) { EXPECT_TW(rank == 0 ? twPeerRefused : twInvalidArgument, a[rank].dispatch()); });
  b.dispatch();
}

// A refusal goes to the channel that the call named, even if its handle is no handle.
TEST(Errors, RefusalWithoutAHandleReachesTheNamedChannel) {
  twGroupConfig_t config = make_config(6, 2, 4);
  config.lanes = 3;
  config.timeout_ms = 500;
  World world(2, config);
  Exchange exchange(world, make_traffic(config, {4, 4}, 1), {}, 1);
  for (int rank = 0; rank < 2; ++rank) exchange[rank].input.lane = 2;
  EXPECT_TW(twSuccess, exchange[0].dispatch(true));
  EXPECT_TW(twInvalidArgument, twDispatch(world[1], nullptr, &exchange[1].input, &exchange[1].received));
  EXPECT_TW(twPeerRefused, exchange[0].complete());
  EXPECT_EQ(error_of(world[0]).lane, 2);
}

TEST(Errors, BoundMismatch) {
  const twGroupConfig_t config = make_config(6, 2, 4);
  World world(3, config);
  Exchange exchange(world, make_traffic(config, {2, 2, 2}, 1), {}, 1);
  const int bounds[] = {3, 4, 3};
  for (int rank = 0; rank < 3; ++rank) {
    exchange[rank].input.bound = bounds[rank];
    EXPECT_TW(twSuccess, exchange[rank].dispatch(true));
  }
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_TW(twBoundMismatch, exchange[rank].complete());
    EXPECT_EQ(error_of(world[rank]).peer, rank == 1 ? 2 : 1);
    EXPECT_NE(std::strstr(error_of(world[rank]).message, "4"), nullptr);
    EXPECT_NE(std::strstr(error_of(world[rank]).message, "3"), nullptr);
  }
  release(world, exchange);
  expect_usable(world, 3);
}

// More rows than this rank's bound allows are a mismatch of bounds too, not a broken promise.
TEST(Errors, BoundMismatchWithMoreRowsThanTheBound) {
  const twGroupConfig_t config = make_config(2, 2, 8);
  World world(2, config);
  Traffic traffic = make_traffic(config, {1, 8}, 1);
  for (auto& ids : traffic.ids) {
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i % 2);  // every token to both ranks
  }
  Exchange exchange(world, traffic, {}, 1);
  exchange[0].input.bound = 1;
  exchange[1].input.bound = 8;
  for (int rank = 0; rank < 2; ++rank) EXPECT_TW(twSuccess, exchange[rank].dispatch(true));
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_TW(twBoundMismatch, exchange[rank].complete());
    EXPECT_EQ(error_of(world[rank]).sticky, 0);
  }
  release(world, exchange);
  expect_usable(world, 3);
}

TEST(Errors, NoFreeChannel) {
  twGroupConfig_t config = make_config(6, 2, 4);
  config.lanes = 2;
  World world(2, config);
  Exchange a(world, make_traffic(config, {4, 4}, 1), {}, 1);
  Exchange b(world, make_traffic(config, {4, 4}, 2), {}, 2);
  Exchange c(world, make_traffic(config, {4, 4}, 3), {}, 3);
  a.dispatch();
  b.dispatch();
  const std::vector<uint8_t> before = world.window(1);
  for (int rank = 0; rank < 2; ++rank) EXPECT_TW(twInvalidUsage, c[rank].dispatch());
  EXPECT_NE(std::strstr(twLastError(), "no free lane"), nullptr) << twLastError();
  c[0].input.lane = 1;
  EXPECT_TW(twInvalidUsage, c[0].dispatch()) << "held by another handle";
  c[0].input.lane = 2;
  EXPECT_TW(twInvalidArgument, c[0].dispatch());
  c[0].input.lane = -1;
  EXPECT_EQ(world.window(1), before) << "refused alike everywhere: nothing is sent";
  a.combine();
  c.dispatch();
  b.combine();
  c.combine();
}

TEST(Errors, WrongOrderOfCalls) {
  const twGroupConfig_t config = make_config(6, 2, 4);
  World world(2, config);
  Exchange exchange(world, make_traffic(config, {4, 4}, 1), {}, 1);
  const std::vector<uint8_t> before = world.window(1);
  exchange[0].received.payloads[0] = {};
  EXPECT_TW(twInvalidUsage, exchange[0].combine());
  EXPECT_NE(std::strstr(twLastError(), "combine before dispatch"), nullptr) << twLastError();
  EXPECT_TW(twInvalidUsage, exchange[0].complete());
  EXPECT_EQ(world.window(1), before);
  exchange.dispatch();
  EXPECT_TW(twInvalidUsage, exchange[0].complete());
  exchange.combine();
}

// S2: a rank that has not finished its step starts no other, whatever the caller asks.
TEST(Errors, NothingIsSentWhileAStepIsPending) {
  const twGroupConfig_t config = make_config(6, 2, 4);
  World world(2, config);
  Exchange exchange(world, make_traffic(config, {4, 4}, 1), {}, 1);
  exchange.send_dispatch();
  const std::vector<uint8_t> before = world.window(1);
  Side& side = exchange[0];
  twDispatchOutput_t ignored{};
  ignored.size = sizeof ignored;
  EXPECT_TW(twInvalidUsage, twDispatch(world[0], side.handle, &side.input, &ignored));
  EXPECT_TW(twInvalidUsage, side.combine(true));
  EXPECT_TW(twInvalidUsage, twHandleRelease(side.handle));
  EXPECT_TW(twInvalidUsage, twHandleDestroy(side.handle));
  EXPECT_EQ(world.window(1), before);
  exchange.complete_dispatch();
  exchange.send_combine();
  EXPECT_TW(twInvalidUsage, side.combine(true));
  EXPECT_TW(twInvalidUsage, twDispatch(world[0], side.handle, &side.input, &ignored));
  exchange.complete_combine();
}

}  // namespace
}  // namespace tw::test
