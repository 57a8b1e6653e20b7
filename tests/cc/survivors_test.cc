// What survivors of a group whose maps move begin with: whose slots remain, where lost experts go, and by which
// version.
#include "core/survivors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "harness.h"

namespace tw {
namespace {

using Table = std::vector<int32_t>;

PlacementSpec spec_of(int32_t experts, int32_t layers, Table table, std::vector<float> shares = {}) {
  PlacementSpec spec;
  spec.given = spec.moves = spec.counts_loads = true;
  spec.layers = layers;
  spec.experts = experts;
  spec.slots = static_cast<int32_t>(table.size()) / layers;
  spec.slot_expert = std::move(table);
  spec.slot_shares = std::move(shares);
  if (!spec.slot_shares.empty()) spec.policy = twReplicaShares;
  spec.weight_bytes = 3 * 4096;
  return spec;
}

TEST(Survivors, KeepTheirSlots) {
  const Table rank{0, 0, 0, 1, 1, 1, 2, 2, 2}, slot{0, 1, 2, 0, 1, 2, 0, 1, 2};
  const PlacementSpec before = spec_of(4, 2, {0, 1, -1, 2, 3, -1, 0, 2, -1, /**/ -1, 0, 1, 3, -1, 2, 1, 0, -1});
  const Remains found = remains_of(before, {rank.data(), slot.data()}, 3, {0, 2});
  EXPECT_EQ(found.expert_rank, (Table{0, 0, 0, 0, 1, 1, 1, 1}));
  EXPECT_EQ(found.expert_slot, (Table{0, 1, 2, 3, 0, 1, 2, 3}));
  // Layer 1 loses two experts, so each rank gets a slot: one of each stays empty.
  EXPECT_EQ(found.placement.slot_expert, (Table{0, 1, 3, -1, 0, 2, -1, -1, /**/ 2, 0, 1, -1, 1, 0, 3, -1}));
  EXPECT_EQ(found.lost, (std::vector<uint8_t>{0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0}));
  EXPECT_EQ(found.placement.weight_bytes, 4u * 4096);
  EXPECT_EQ(found.placement.slots, 8);
}

TEST(Survivors, NothingIsLostWhereAllLive) {
  const Table rank{1, 0, 1, 0}, slot{1, 1, 0, 0};
  const PlacementSpec before = spec_of(4, 1, {0, 1, 2, 3});
  const Remains found = remains_of(before, {rank.data(), slot.data()}, 2, {0, 1});
  EXPECT_EQ(found.expert_rank, (Table{0, 0, 1, 1}));
  EXPECT_EQ(found.placement.slot_expert, (Table{3, 1, 2, 0}));
  EXPECT_EQ(found.lost, std::vector<uint8_t>(4, 0));
  EXPECT_EQ(found.placement.weight_bytes, before.weight_bytes);
}

TEST(Survivors, SharesOfTheDeadGoToWhoIsLeft) {
  const Table rank{0, 0, 1, 1}, slot{0, 1, 0, 1};
  const PlacementSpec before = spec_of(2, 1, {0, -1, 0, 1}, {0.0f, 0.5f, 3.0f, 0.25f});
  const Remains found = remains_of(before, {rank.data(), slot.data()}, 2, {0});
  EXPECT_EQ(found.placement.slot_expert, (Table{0, 1, -1}));
  EXPECT_EQ(found.placement.slot_shares[0], 1.0f);
  EXPECT_GT(found.placement.slot_shares[1], 0.0f);
  PlacementSpec after;
  const twPlacement_t given = found.placement.as_given();
  EXPECT_TRUE(check_placement(&given, 2, &after).ok());
}

// Whatever dies: each survivor's slots hold what they held, all experts are somewhere, lost are those that were nowhere
// else, no rank is full, and nobody has more slots than that takes.
TEST(Survivors, Any) {
  for (uint32_t seed = 0; seed < 500; ++seed) {
    std::mt19937 random(seed);
    const auto drawn = [&](int32_t least, int32_t most) {
      return std::uniform_int_distribution<int32_t>(least, most)(random);
    };
    const int32_t ranks = drawn(1, 5);
    Table rank, slot;
    for (int32_t r = 0; r < ranks; ++r) {
      for (int32_t i = 0, own = drawn(0, 4); i < own; ++i) rank.push_back(r), slot.push_back(i);
    }
    const auto slots = static_cast<int32_t>(rank.size());
    if (slots == 0) continue;
    Table order(slots);
    for (int32_t p = 0; p < slots; ++p) order[p] = p;
    std::shuffle(order.begin(), order.end(), random);
    Table ranks_of(slots), places(slots);
    for (int32_t p = 0; p < slots; ++p) ranks_of[p] = rank[order[p]], places[p] = slot[order[p]];
    const int32_t experts = drawn(1, slots);
    const int32_t layers = drawn(1, 3);
    Table tables;
    for (int32_t layer = 0; layer < layers; ++layer) {
      Table table(slots);
      for (int32_t p = 0; p < slots; ++p) table[p] = p < experts ? p : drawn(-1, experts - 1);
      std::shuffle(table.begin(), table.end(), random);
      tables.insert(tables.end(), table.begin(), table.end());
    }
    std::vector<int> members;
    for (int32_t r = 0; r < ranks; ++r) {
      if (drawn(0, 2) != 0) members.push_back(r);
    }
    if (members.empty()) members.push_back(drawn(0, ranks - 1));
    const PlacementSpec before = spec_of(experts, layers, tables);
    const Remains found = remains_of(before, {ranks_of.data(), places.data()}, ranks, members);
    const PlacementSpec& after = found.placement;
    PlacementSpec checked;
    const twPlacement_t given = after.as_given();
    ASSERT_TRUE(check_placement(&given, experts, &checked).ok()) << seed;
    const int32_t more = after.slots - static_cast<int32_t>(std::count_if(ranks_of.begin(), ranks_of.end(), [&](int r) {
                           return std::count(members.begin(), members.end(), r) != 0;
                         }));
    int64_t short_of = 0;  // places that would have been missing with one slot less each
    for (int32_t layer = 0; layer < layers; ++layer) {
      std::set<int32_t> kept;
      int64_t lost = 0, room = 0;
      for (size_t m = 0; m < members.size(); ++m) {
        int32_t empty = 0;
        for (int32_t p = 0; p < after.slots; ++p) {
          if (found.expert_rank[p] != static_cast<int32_t>(m)) continue;
          int32_t was = -1;
          for (int32_t q = 0; q < slots; ++q) {
            if (ranks_of[q] == members[m] && places[q] == found.expert_slot[p]) was = before.map(layer)[q];
          }
          const bool is_lost = found.lost[layer * after.slots + p] != 0;
          lost += is_lost ? 1 : 0;
          if (was >= 0) kept.insert(was);
          ASSERT_EQ(is_lost ? -1 : after.map(layer)[p], was) << seed;
          empty += after.map(layer)[p] < 0 || is_lost ? 1 : 0;
        }
        room += std::max(0, empty - 1 - more / static_cast<int32_t>(members.size()));
      }
      ASSERT_EQ(lost, experts - static_cast<int64_t>(kept.size())) << seed;
      short_of = std::max(short_of, lost - room);
    }
    ASSERT_EQ(more % static_cast<int32_t>(members.size()), 0) << seed;
    ASSERT_EQ(more > 0, short_of > 0) << seed;
  }
}

// ---- in a group

constexpr int32_t kFirst[] = {0, 1, -1, 2, -1, -1, 0, 3, -1};
constexpr int32_t kNext[] = {0, 1, -1, 2, 3, -1, -1, 3, 0};

class Shrunk : public ::testing::Test {
 protected:
  Shrunk() {
    for (int layer = 0; layer < 2; ++layer) tables_.insert(tables_.end(), kFirst, std::end(kFirst));
    placement_.num_layers = 2;
    placement_.num_slots = 9;
    placement_.slot_expert = tables_.data();
    placement_.count_loads = placement_.moves = 1;
    placement_.weight_bytes = 4096;
    config_.placement = &placement_;
    config_.lanes = 2;
  }

  // A dispatch of nothing, which is completed if this rank is one of those.
  static void tell(twGroup_t group, int32_t lane, bool completes) {
    const twTensor_t ids = test::tensor(nullptr, twInt32, {0, 2});
    twHandle_t handle = nullptr;
    ASSERT_TW(twSuccess, twHandleCreate(&handle, group, &ids, nullptr, nullptr));
    twDispatchInput_t input = TW_DISPATCH_INPUT_INIT;
    input.payloads[0] = test::tensor(nullptr, twBfloat16, {0, 8});
    input.lane = lane;
    input.send_only = input.uncounted = 1;
    twDispatchOutput_t output = TW_DISPATCH_OUTPUT_INIT;
    ASSERT_TW(twSuccess, twDispatch(group, handle, &input, &output));
    if (!completes) return;
    ASSERT_TW(twSuccess, twComplete(group, handle, nullptr));
    ASSERT_TW(twSuccess, twHandleDestroy(handle));
  }
  static Table map_of(twGroup_t group, int32_t layer) {
    twGroupInfo_t info{};
    info.size = sizeof info;
    EXPECT_TW(twSuccess, twGroupInfo(group, &info));
    Table table(info.nranks * info.num_local_experts);
    EXPECT_TW(twSuccess, twGroupMap(group, layer, table.data(), nullptr));
    return table;
  }
  static Table lost_of(twGroup_t group, int32_t layer, size_t slots) {
    Table lost(slots, 7);
    EXPECT_TW(twSuccess, twGroupLost(group, layer, lost.data()));
    return lost;
  }

  Table tables_;
  twPlacement_t placement_ = TW_PLACEMENT_INIT;
  twGroupConfig_t config_ = test::make_config(4, 2, 4);
};

// Rank `ahead` has completed the dispatch that decides on its last lane, the other survivor on none: both begin with
// the later version's maps, void epochs included.
TEST_F(Shrunk, BeginsWithTheLatestVersionThatAnySurvivorHas) {
  for (int ahead : {0, 1, 2}) {  // 2: it dies with what it knows
    for (bool given : {false, true}) {
      test::World world(3, config_);
      test::on_all_ranks(3, [&](int rank) {
        uint32_t epoch = 0;
        EXPECT_TW(twSuccess, twGroupStageMap(world[rank], 0, kNext, nullptr, &epoch));
        EXPECT_TW(twSuccess, twGroupReady(world[rank], 1, 0));
        EXPECT_TW(twSuccess, twGroupStageMap(world[rank], 1, kNext, nullptr, &epoch));
        EXPECT_TW(twSuccess, twGroupReady(world[rank], 2, rank == 1 ? 1 : 0));
        tell(world[rank], 1, rank == ahead);
      });
      world.kill(2);
      std::vector<twGroup_t> shrunk(2);
      test::on_all_ranks(2, [&](int rank) {
        twGroupConfig_t config = config_;
        twPlacement_t kept = placement_;
        kept.slot_expert = nullptr;
        config.placement = &kept;
        ASSERT_TW(twSuccess, twGroupShrink(world[rank], given ? &config : nullptr, &shrunk[rank]));
      });
      for (twGroup_t group : shrunk) {
        ASSERT_NE(group, nullptr);
        // Expert 3 is lost by the first map, and none by the next one.
        const Table first{0, 1, -1, 2, 3, -1};
        EXPECT_EQ(map_of(group, 0), first) << ahead;
        EXPECT_EQ(map_of(group, 1), first) << "its epoch was void, or nobody had it";
        EXPECT_EQ(lost_of(group, 0, 6), ahead == 2 ? (Table{0, 0, 0, 0, 1, 0}) : Table(6, 0)) << ahead;
        EXPECT_EQ(lost_of(group, 1, 6), (Table{0, 0, 0, 0, 1, 0}));
        twEpochs_t epochs{};
        epochs.size = sizeof epochs;
        EXPECT_TW(twSuccess, twGroupEpochs(group, &epochs, nullptr));
        EXPECT_EQ(epochs.staged, 0u);
        int32_t none = 0;
        EXPECT_TW(twInvalidArgument, twGroupLost(group, 2, &none));
        EXPECT_TW(twInvalidArgument, twGroupLost(group, 0, nullptr));
      }
      test::on_all_ranks(2, [&](int rank) { EXPECT_TW(twSuccess, twGroupDestroy(shrunk[rank])); });
    }
  }
}

TEST_F(Shrunk, RefusesOtherExpertsAndLayers) {
  test::World world(3, config_);
  world.kill(2);
  std::vector<twGroup_t> shrunk(2);
  test::on_all_ranks(2, [&](int rank) {
    twGroupConfig_t config = config_;
    twPlacement_t kept = placement_;
    kept.slot_expert = nullptr;
    config.placement = &kept;
    kept.num_layers = 1;
    EXPECT_TW(twInvalidArgument, twGroupShrink(world[rank], &config, &shrunk[rank]));
    EXPECT_TRUE(test::says("config.placement->num_layers is 1; survivors keep the maps of the group, so it must be 2"));
    kept.num_layers = 2;
    config.num_experts = 3;
    EXPECT_TW(twInvalidArgument, twGroupShrink(world[rank], &config, &shrunk[rank]));
    EXPECT_TRUE(test::says("config.num_experts is 3; survivors keep the maps"));
    config.num_experts = 4;
    ASSERT_TW(twSuccess, twGroupShrink(world[rank], &config, &shrunk[rank]));
    EXPECT_TW(twSuccess, twGroupDestroy(shrunk[rank]));
  });
}

TEST_F(Shrunk, OtherGroupsHaveLostNothing) {
  placement_.moves = 0;
  const test::World still(1, config_);
  int32_t lost[9] = {};
  EXPECT_TW(twInvalidUsage, twGroupLost(still[0], 0, lost));
  placement_.moves = 1;
  const test::World fresh(1, config_);
  EXPECT_EQ(lost_of(fresh[0], 1, 9), Table(9, 0));
}

}  // namespace
}  // namespace tw
