// Groups that share a window: where their maps have what, that their steps are one sequence on each lane, and what
// becomes of a lane when one of them ends. tests/py/test_arena.py has the behaviour of the whole.
#include <algorithm>

#include "core/group.h"
#include "harness.h"

namespace tw::test {
namespace {

WindowMap made(const Shape& shape, const Room& least = {}) {
  WindowMap map;
  EXPECT_TRUE(WindowMap::make(shape, &map, least));
  return map;
}

Shape device_shape(int32_t max_tokens, int32_t top_k, uint64_t row, int32_t packet_tokens, int32_t chunk_rows) {
  Shape shape;
  shape.ranks = 3, shape.experts = 6, shape.top_k = top_k, shape.max_tokens = max_tokens, shape.channels = 2;
  shape.payloads = 1, shape.payload_bytes[0] = row, shape.combine_bytes = row;
  shape.packet_tokens = packet_tokens, shape.chunk_rows = chunk_rows;
  return shape;
}

// Where a map has what a step writes, kind by kind: the first byte and the one behind the last.
struct Extent {
  uint64_t begin;
  uint64_t end;
};
std::vector<Extent> extents(const WindowMap& map, int channel, int bank) {
  const Shape& shape = map.shape();
  const auto rows = static_cast<uint64_t>(shape.most_rows());
  const int chunks = (shape.max_tokens + shape.chunk_rows - 1) / shape.chunk_rows;
  return {
      {map.bank(channel, bank),
       std::max(map.meta_row(channel, bank, rows), map.inbox(channel, bank, shape.max_tokens, 0))},
      {map.chunk_signal(channel, bank, 0, 0), map.chunk_signal(channel, bank, shape.ranks - 1, chunks)},
      {map.packet(channel, bank, 0, 0), map.meta_packet(channel, bank, rows)},
      {map.unpacked().payload_row(channel, bank, 0, 0),
       map.unpacked().payload_row(channel, bank, 0, static_cast<uint64_t>(shape.ranks) * shape.packet_tokens)},
  };
}

// S2: what a step writes by one map lies where no step of the other bank writes by any map, and no kind of place lies
// across another.
TEST(Arena, BanksOfAllMapsCoincide) {
  const Shape large = device_shape(40, 4, 700, 16, 8);
  const Shape few = device_shape(9, 1, 12, 9, 64);
  const Shape wide = device_shape(64, 2, 20, 64, 1);
  Room room = made(large).room();
  for (const Shape& other : {few, wide}) {
    const Room needed = made(other).room();
    room.bank = std::max(room.bank, needed.bank);
    room.unpacked = std::max(room.unpacked, needed.unpacked);
    room.chunk_signals = std::max(room.chunk_signals, needed.chunk_signals);
    room.packets = std::max(room.packets, needed.packets);
  }
  const WindowMap arena = made(large, room);
  EXPECT_TRUE(arena.room().holds(made(few).room()));
  std::vector<WindowMap> maps{arena};
  for (const Shape& shape : {few, wide}) maps.push_back(made(shape).share(arena, 0));
  for (int channel = 0; channel < 2; ++channel) {
    for (int bank = 0; bank < 2; ++bank) {
      const std::vector<Extent> there{
          {arena.bank(channel, bank), arena.bank(channel, bank) + room.bank},
          {arena.chunk_signal(channel, bank, 0, 0), arena.chunk_signal(channel, bank, 0, 0) + room.chunk_signals},
          {arena.packet(channel, bank, 0, 0), arena.packet(channel, bank, 0, 0) + room.packets},
          {arena.bank(channel, bank) + room.bank, arena.bank(channel, bank) + room.bank + room.unpacked}};
      for (const WindowMap& map : maps) {
        EXPECT_EQ(map.signal(channel, bank, 2), arena.signal(channel, bank, 2));
        EXPECT_EQ(map.bytes(), arena.bytes());
        EXPECT_TRUE(map.in_channel(channel, arena.bank(channel, bank) + room.bank - 1));
        const std::vector<Extent> own = extents(map, channel, bank);
        for (size_t kind = 0; kind < own.size(); ++kind) {
          EXPECT_EQ(own[kind].begin, there[kind].begin) << "kind " << kind;
          EXPECT_LE(own[kind].end, there[kind].end) << "kind " << kind;
        }
      }
    }
  }
}

twGroupConfig_t first_config() {
  twGroupConfig_t config = make_config(7, 3, 5, 24);
  config.lanes = 2;
  return config;
}
twGroupConfig_t second_config() { return make_config(5, 2, 4, 16); }

TEST(Arena, StepsAreOneSequence) {
  World first(3, first_config());
  World second(first, second_config());
  Style lane;
  lane.lane = 1;
  for (uint32_t round = 0; round < 6; ++round) {
    World& world = round % 3 == 1 ? second : first;
    Exchange exchange(world, make_traffic(world.config, {4, 1, 3}, round), lane, round);
    exchange.dispatch();
    if (round % 2 == 0) exchange.combine();
    for (int rank = 0; rank < 3; ++rank) {
      uint32_t steps[2] = {};
      uint32_t same[2] = {};
      ASSERT_TW(twSuccess, twGroupSteps(first[rank], 2, steps));
      ASSERT_TW(twSuccess, twGroupSteps(second[rank], 2, same));
      EXPECT_EQ(steps[1], same[1]);
    }
  }
}

// Both groups have one shape: only the digest of a step's note tells them apart.
TEST(Arena, CallsOfTwoGroupsDoNotMeet) {
  World first(2, first_config());
  World second(first, first_config());
  for (uint32_t round = 0; round < 2; ++round) {
    Exchange here(first, make_traffic(first.config, {4, 3}, round), {}, round);
    Exchange there(second, make_traffic(first.config, {4, 3}, round), {}, round);
    EXPECT_TW(twSuccess, here[0].dispatch(true));
    EXPECT_TW(twSuccess, there[1].dispatch(true));
    EXPECT_TW(twBoundMismatch, here[0].complete());
    EXPECT_TRUE(says("differ in the group, the layer"));
    EXPECT_TW(twBoundMismatch, there[1].complete());
    EXPECT_TW(twSuccess, twHandleRelease(here[0].handle));
    EXPECT_TW(twSuccess, twHandleRelease(there[1].handle));
    Exchange good(second, make_traffic(second.config, {4, 3}, round), {}, round);
    good.dispatch();
    good.combine();
  }
}

// S2: what a group has under way when it ends is waited for, and its lanes are free for the others.
TEST(Arena, AGroupThatEndsLeavesItsLanes) {
  World first(2, first_config());
  for (uint32_t round = 0; round < 3; ++round) {
    World second(first, second_config());
    Exchange held(second, make_traffic(second.config, {4, 3}, round), {}, round);
    Exchange sent(second, make_traffic(second.config, {1, 4}, round), {}, round);
    held.dispatch();
    sent.send_dispatch();
    for (int rank = 0; rank < 2; ++rank) held[rank].handle = sent[rank].handle = nullptr;  // freed with the group
    second.destroy_groups();
    for (int lane = 0; lane < 2; ++lane) {
      Style style;
      style.lane = lane;
      Exchange exchange(first, make_traffic(first.config, {4, 5}, round), style, round);
      exchange.dispatch();
      exchange.combine();
    }
  }
}

// Each group that counts has a place of its own, which is free again when it ends.
TEST(Arena, LoadStatisticsLieApart) {
  twPlacement_t placement = TW_PLACEMENT_INIT;
  const std::vector<int32_t> slots{0, 1, 2, 3, 4};
  placement.num_slots = 5;
  placement.slot_expert = slots.data();
  placement.count_loads = 1;
  twGroupConfig_t counting = second_config();
  counting.placement = &placement;
  const twGroupConfig_t* const others[] = {&counting, &counting};
  twGroupConfig_t config = first_config();
  config.room_for = others;
  config.num_room_for = 2;
  World first(2, config);
  const auto loads = [](const World& world) { return world[0]->context.map.loads(1, 0, 0); };
  const uint64_t bytes = WindowMap::kLoadsBanks * 2 * sizeof(uint64_t) * (1 + 5);
  World one(first, counting);
  World two(first, counting);
  EXPECT_GE(loads(two), loads(one) + bytes);
  EXPECT_LE(loads(two) + bytes, first[0]->context.map.bytes());
  const uint64_t was = loads(one);
  one.destroy_groups();
  World three(first, counting);
  EXPECT_EQ(loads(three), was);
  three.destroy_groups();
  two.destroy_groups();
}

TEST(Arena, WhatIsGivenIsChecked) {
  World world(2, first_config());
  const auto refused = [&](twResult_t result, const std::string& part, const twGroupConfig_t& config) {
    on_all_ranks(2, [&](int rank) {
      twGroupConfig_t mine = config;
      if (config.arena != nullptr) mine.arena = world[rank];
      twGroup_t group = nullptr;
      EXPECT_TW(result, twGroupCreate(&group, world.comms[rank], &mine));
      EXPECT_TRUE(says(part));
    });
  };
  twGroupConfig_t config = second_config();
  config.lanes = 3;
  config.arena = world[0];
  refused(twInvalidArgument, "config.lanes is 3; in the window of config.arena it must be 2, or 0", config);
  config.lanes = 2;
  config.max_tokens = 500;
  refused(twOutOfMemory, "bytes are missing; name this configuration in config.room_for", config);
  config = second_config();
  config.num_room_for = -1;
  refused(twInvalidArgument, "config.num_room_for is -1", config);
  config.num_room_for = 1;
  refused(twInvalidArgument, "config.room_for is NULL", config);
  twGroupConfig_t other = second_config();
  other.size = 3;
  const twGroupConfig_t* const others[] = {&other};
  config.room_for = others;
  refused(twInvalidArgument, "config.room_for[0]->size is 3", config);
  on_all_ranks(2, [&](int rank) {
    twGroup_t group = nullptr;
    twGroupConfig_t mine = second_config();
    mine.arena = world[rank];
    EXPECT_TW(twInvalidArgument, twGroupShrink(world[rank], &mine, &group));
  });
}

// Groups of one window are for one thread at a time; another comm's window is not to be had.
TEST(Arena, TheTurnIsOfAllGroups) {
  World first(1, first_config());
  World second(first, second_config());
  Turn turn;
  ASSERT_TRUE(turn.take(first[0]->arena->occupied, "twDispatch", "group", [] { return Sentence("x"); }).ok());
  uint32_t steps[2] = {};
  EXPECT_TW(twInvalidUsage, twGroupSteps(second[0], 2, steps));
  World other(1, first_config());
  twGroupConfig_t config = second_config();
  config.arena = first[0];
  twGroup_t group = nullptr;
  EXPECT_TW(twInvalidUsage, twGroupCreate(&group, first.comms[0], &config));
  config.arena = other[0];
  EXPECT_TW(twInvalidArgument, twGroupCreate(&group, first.comms[0], &config));
  EXPECT_TRUE(says("config.arena is a group of another comm"));
}

}  // namespace
}  // namespace tw::test
