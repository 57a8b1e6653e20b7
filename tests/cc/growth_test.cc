// Groups that grow: where a grown window has what, what ranks must have alike, and what becomes of calls that are under
// way. tests/py has the behaviour of the whole.
#include <algorithm>

#include "core/group.h"
#include "harness.h"

namespace tw::test {
namespace {

twReserve_t tokens_of(int32_t max_tokens) {
  twReserve_t reserve = TW_RESERVE_INIT;
  reserve.max_tokens = max_tokens;
  return reserve;
}

// Grows all ranks alike; gives what each was told.
std::vector<twResult_t> grow(World& world, int32_t max_tokens) {
  std::vector<twResult_t> results(world.size());
  const twReserve_t reserve = tokens_of(max_tokens);
  on_all_ranks(world.size(), [&](int rank) { results[rank] = twGroupReserve(world[rank], &reserve); });
  world.config.max_tokens = std::max(world.config.max_tokens, max_tokens);
  return results;
}

bool all(const std::vector<twResult_t>& results, twResult_t wanted) {
  return std::all_of(results.begin(), results.end(), [&](twResult_t result) { return result == wanted; });
}

WindowMap map_of(const Shape& shape) {
  WindowMap map;
  EXPECT_TRUE(WindowMap::make(shape, &map));
  return map;
}

// What outlives steps stays where it was, and what a step leaves lies apart from that of every earlier map.
TEST(Growth, AMapKeepsWhatOutlivesSteps) {
  Shape shape;
  shape.ranks = 3, shape.experts = 6, shape.top_k = 2, shape.max_tokens = 4, shape.channels = 2;
  shape.payloads = 1, shape.payload_bytes[0] = 48, shape.combine_bytes = 48;
  shape.logical_experts = 5, shape.counts_loads = 1;
  shape.recv_rows = 12, shape.most_local_experts = 2, shape.lease_bytes = 8192;
  const WindowMap first = map_of(shape);
  std::vector<WindowMap> maps{first};
  for (const int32_t tokens : {5, 64, 1000}) {
    shape.max_tokens = tokens;
    shape.recv_rows = 3 * tokens;
    WindowMap grown;
    ASSERT_TRUE(maps.back().grow(shape, &grown));
    EXPECT_EQ(grown.leases(), first.leases());
    for (int channel = 0; channel < 2; ++channel) {
      for (int source = 0; source < 3; ++source) {
        EXPECT_EQ(grown.signal(channel, 1, source), first.signal(channel, 1, source));
        EXPECT_EQ(grown.loads(channel, 3, source), first.loads(channel, 3, source));
      }
    }
    for (const WindowMap& before : maps) {
      EXPECT_GE(grown.channels(), before.channels() + before.channels_bytes());
      EXPECT_GE(grown.channels(), before.leases() + shape.lease_bytes);
    }
    EXPECT_EQ(grown.bytes(), grown.channels() + grown.channels_bytes());
    EXPECT_TRUE(grown.in_channel(1, grown.bank(1, 0)));
    EXPECT_FALSE(grown.in_channel(0, grown.bank(1, 0)));
    EXPECT_FALSE(grown.in_channels(first.bank(1, 0)));
    EXPECT_FALSE(grown.in_channels(0));
    maps.push_back(grown);
  }
  Shape large = shape;
  large.max_tokens = INT32_MAX;
  large.payload_bytes[0] = UINT64_MAX / 4;
  WindowMap none;
  EXPECT_FALSE(first.grow(large, &none));
}

TEST(Growth, HandlesGoOnAndNewOnesAreLarger) {
  World world(3, make_config(6, 2, 4));
  Style small;
  small.bound = 4;
  Exchange before(world, make_traffic(world.config, {4, 0, 3}, 1), small, 1);
  before.dispatch();
  size_t bytes = 0;
  ASSERT_TW(twSuccess, twHandleMemBytes(world[0], &bytes));
  EXPECT_TRUE(all(grow(world, 40), twSuccess));
  size_t larger = 0;
  ASSERT_TW(twSuccess, twHandleMemBytes(world[0], &larger));
  EXPECT_GT(larger, bytes);
  before.combine();
  before.renew(2);
  before.dispatch();
  EXPECT_TRUE(all(grow(world, 41), twSuccess));
  Exchange after(world, make_traffic(world.config, {41, 17, 0}, 3), {}, 3);
  before.combine();
  after.dispatch();
  after.combine();
  EXPECT_TRUE(all(grow(world, 7), twSuccess));  // no more than there is
  twGroupInfo_t info = {};
  info.size = sizeof info;
  ASSERT_TW(twSuccess, twGroupInfo(world[1], &info));
  EXPECT_EQ(info.max_tokens, 41);
  EXPECT_EQ(info.combine_room, 16u);
}

// A rank that lost its peers in the last meeting, or that replays a graph of before, makes calls of another growth.
TEST(Growth, CallsOfAnotherGrowthAreRefused) {
  World world(2, make_config(6, 2, 4));
  EXPECT_TRUE(all(grow(world, 6), twSuccess));
  Context& context = world[1]->context;
  const Context grown = context;
  context.growth = 0;
  context.map = context.former.back();
  Style style;
  style.bound = 4;
  Exchange exchange(world, make_traffic(world.config, {4, 3}, 1), style, 1);
  for (int rank = 0; rank < 2; ++rank) EXPECT_TW(twSuccess, exchange[rank].dispatch(true));
  for (int rank = 0; rank < 2; ++rank) EXPECT_TW(twBoundMismatch, exchange[rank].complete());
  context = grown;
  exchange.dispatch();
  context.growth = 0;
  context.map = context.former.back();
  for (int rank = 0; rank < 2; ++rank) EXPECT_TW(twSuccess, exchange[rank].combine(true));
  for (int rank = 0; rank < 2; ++rank) EXPECT_TW(twBoundMismatch, exchange[rank].complete());
  context = grown;
  exchange.combine();
}

// It has no room for more rows than the group's sizes then let come.
TEST(Growth, AHandleKeepsItsSize) {
  World world(2, make_config(6, 2, 4));
  Style style;
  style.bound = 4;
  Exchange exchange(world, make_traffic(world.config, {4, 3}, 1), style, 1);
  EXPECT_TRUE(all(grow(world, 6), twSuccess));
  exchange[1].input.bound = 6;
  EXPECT_TW(twSuccess, exchange[0].dispatch(true));
  EXPECT_TW(twInvalidArgument, exchange[1].dispatch(true));
  EXPECT_TRUE(says("input.bound is 6; the handle was made when max_tokens was 4"));
  EXPECT_TW(twPeerRefused, exchange[0].complete());
  exchange[1].input.bound = 0;  // what it has room for
  exchange.dispatch();
  exchange.combine();
}

TEST(Growth, ARankThatEndsIsToldAndNothingChanges) {
  World world(3, make_config(6, 2, 4));
  world.kill(2);
  const twReserve_t reserve = tokens_of(9);
  on_all_ranks(2, [&](int rank) {
    EXPECT_TW(twCallMismatch, twGroupReserve(world[rank], &reserve));  // its end is a call at this occasion
    twGroupInfo_t info = {};
    info.size = sizeof info;
    EXPECT_TW(twSuccess, twGroupInfo(world[rank], &info));
    EXPECT_EQ(info.max_tokens, 4);
  });
}

TEST(Growth, ALateRankIsAnErrorInTime) {
  World world(2, impatient());
  const twReserve_t reserve = tokens_of(9);
  EXPECT_TW(twTimeout, twGroupReserve(world[0], &reserve));
  EXPECT_TRUE(says("growing a group: rank 1 did not arrive in time"));
  EXPECT_EQ(world[0]->shape().max_tokens, 4);
  world.abandon(0);
  world.abandon(1);
}

TEST(Growth, WhatCannotBeReadIsToldToAll) {
  World world(2, make_config(6, 2, 4));
  const twReserve_t reserve = tokens_of(9);
  on_all_ranks(2, [&](int rank) {
    EXPECT_TW(twInvalidArgument, twGroupReserve(world[rank], rank == 0 ? &reserve : nullptr));
    EXPECT_TRUE(says("reserve is NULL"));
  });
  twReserve_t room = TW_RESERVE_INIT;
  room.dispatch_room = UINT64_MAX;
  on_all_ranks(2, [&](int rank) { EXPECT_TW(twInvalidArgument, twGroupReserve(world[rank], &room)); });
  EXPECT_TRUE(all(grow(world, 9), twSuccess));
}

}  // namespace
}  // namespace tw::test
