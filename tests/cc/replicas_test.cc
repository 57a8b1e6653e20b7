// Experts in several slots: which slot serves a choice, quotas that level loads, what tells ranks whose maps differ.
#include "exchange/replicas.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "core/placement.h"
#include "exchange/loads.h"
#include "exchange/notes.h"
#include "harness.h"

namespace tw {
namespace {

// A map: the slots by expert, and the rank of each slot.
class Slots {
 public:
  Slots(const std::vector<std::vector<int32_t>>& by_expert, std::vector<int32_t> ranks, int32_t me)
      : rank_of(std::move(ranks)) {
    for (const std::vector<int32_t>& mine : by_expert) {
      if (mine.size() > 1) several.push_back(static_cast<int32_t>(first.size()));
      first.push_back(static_cast<int32_t>(slots.size()));
      slots.insert(slots.end(), mine.begin(), mine.end());
    }
    first.push_back(static_cast<int32_t>(slots.size()));
    replicas.first = first.data();
    replicas.slots = slots.data();
    replicas.several = several.data();
    replicas.several_count = static_cast<int32_t>(several.size());
    replicas.rank = me;
  }
  std::vector<int32_t> quotas(const std::vector<int32_t>& counts, std::vector<int32_t>* load) {
    std::vector<int32_t> quota(slots.size(), -7);
    level_loads(replicas, [this](int32_t slot) { return rank_of[slot]; }, counts.data(), load->data(), quota.data());
    return quota;
  }

  std::vector<int32_t> rank_of;
  std::vector<int32_t> first;
  std::vector<int32_t> slots;
  std::vector<int32_t> several;
  Replicas replicas;
};

TEST(Replicas, InTurn) {
  const Slots owned({{0, 3, 5}, {1}}, {0, 0, 0, 1, 1, 2}, 2);
  const Replicas& of = owned.replicas;
  EXPECT_EQ(of.choose(0, 0), 5);  // the (rank + token)-th
  EXPECT_EQ(of.choose(0, 1), 0);
  EXPECT_EQ(of.choose(0, 2), 3);
  EXPECT_EQ(of.choose(1, 2), 1);
  EXPECT_EQ(of.choose(0, INT32_MAX), of.choose(0, INT32_MAX % 3));  // no sign is lost on the way
}

TEST(Replicas, SharesByInterval) {
  Slots owned({{0, 1, 2}}, {0, 1, 2}, 0);
  const std::vector<uint32_t> lower = {0, 1u << 31, 3u << 30};  // a half, a quarter, a quarter
  owned.replicas.lower = lower.data();
  std::vector<int> got(3, 0);
  for (int32_t token = 0; token < 4000; ++token) ++got[owned.replicas.choose(0, token)];
  EXPECT_NEAR(got[0], 2000, 3);
  EXPECT_NEAR(got[1], 1000, 3);
  EXPECT_NEAR(got[2], 1000, 3);
}

// The least largest load there is, by trying all.
int32_t best(const Slots& owned, const std::vector<int32_t>& counts, const std::vector<int32_t>& load, size_t at) {
  if (at == owned.several.size()) return *std::max_element(load.begin(), load.end());
  const int32_t expert = owned.several[at];
  const int32_t begin = owned.first[expert];
  const int32_t end = owned.first[expert + 1];
  int32_t least = INT32_MAX;
  std::vector<int32_t> tried = load;
  const auto give = [&](auto&& self, int32_t place, int32_t left) -> void {
    if (place + 1 == end) {
      tried[owned.rank_of[owned.slots[place]]] += left;
      least = std::min(least, best(owned, counts, tried, at + 1));
      tried[owned.rank_of[owned.slots[place]]] -= left;
      return;
    }
    for (int32_t n = 0; n <= left; ++n) {
      tried[owned.rank_of[owned.slots[place]]] += n;
      self(self, place + 1, left - n);
      tried[owned.rank_of[owned.slots[place]]] -= n;
    }
  };
  give(give, begin, counts[expert]);
  return least;
}

TEST(Replicas, QuotasAddUpAndLevel) {
  for (uint32_t seed = 0; seed < 400; ++seed) {
    // Three experts with several slots on four ranks, and one on each rank alone.
    std::vector<std::vector<int32_t>> by_expert(7);
    std::vector<int32_t> rank_of;
    for (int32_t e = 0; e < 7; ++e) {
      std::vector<int32_t> homes = {0, 1, 2, 3};
      const uint32_t h = test::mix({seed, static_cast<uint64_t>(e)});
      if (e >= 3) homes = {e - 3};
      if (e < 3) homes.erase(homes.begin() + h % 4);
      if (e < 3 && h % 3 == 0) homes.pop_back();
      for (const int32_t home : homes) {
        by_expert[e].push_back(static_cast<int32_t>(rank_of.size()));
        rank_of.push_back(home);
      }
    }
    Slots owned(by_expert, rank_of, static_cast<int32_t>(seed % 4));
    std::vector<int32_t> counts(7);
    std::vector<int32_t> load(4, 0);
    for (int32_t e = 0; e < 7; ++e)
      counts[e] = static_cast<int32_t>(test::mix({seed, 99, static_cast<uint64_t>(e)}) % 7);
    for (int32_t e = 3; e < 7; ++e) load[e - 3] = counts[e];
    const int32_t least = best(owned, counts, load, 0);
    const std::vector<int32_t> quota = owned.quotas(counts, &load);
    for (int32_t e = 0; e < 3; ++e) {
      if (counts[e] == 0) continue;
      int32_t sum = 0;
      for (int32_t i = owned.first[e]; i < owned.first[e + 1]; ++i) {
        EXPECT_GE(quota[i], 0);
        sum += quota[i];
      }
      EXPECT_EQ(sum, counts[e]);
      // Who comes first gets the first slots' quotas, none more than that.
      std::vector<int32_t> served(owned.slots.size(), 0);
      for (int32_t n = 0; n < counts[e]; ++n) {
        const int32_t slot = quota_slot(owned.replicas, quota.data(), e, n);
        ++served[std::find(owned.slots.begin(), owned.slots.end(), slot) - owned.slots.begin()];
      }
      for (int32_t i = owned.first[e]; i < owned.first[e + 1]; ++i) EXPECT_EQ(served[i], quota[i]);
    }
    EXPECT_LE(*std::max_element(load.begin(), load.end()), least + 1) << "seed " << seed;
  }
}

TEST(Replicas, WhatIsLeftGoesElsewhereOnEachRank) {
  std::vector<int32_t> sum(3, 0);
  for (int32_t me = 0; me < 3; ++me) {
    Slots owned({{0, 1, 2}}, {0, 1, 2}, me);
    std::vector<int32_t> load(3, 0);
    owned.quotas({1}, &load);
    for (int rank = 0; rank < 3; ++rank) sum[rank] += load[rank];
  }
  EXPECT_EQ(sum, (std::vector<int32_t>{1, 1, 1}));
}

TEST(Replicas, NotesHoldAllOfADigestThatHasRoom) {
  for (const int32_t most : {1, 24, 512, 65535, (1 << 28) - 1}) {
    const int bits = note_bits(most);
    const auto limit = (uint64_t{1} << bits) - 1;
    EXPECT_LE(2 * static_cast<uint64_t>(most), limit);
    const uint64_t note = dispatch_note(most, most, 0xdeadbeefu, bits);
    EXPECT_EQ(noted_bound(note, bits), static_cast<uint32_t>(most));
    EXPECT_EQ(noted(static_cast<uint32_t>(note >> 32), bits), static_cast<uint32_t>(most));
    EXPECT_EQ(dispatch_note(most, 0, 0, bits), static_cast<uint64_t>(most));
    for (const bool has_offsets : {false, true}) {
      const uint64_t of_rows = dispatch_note(with_receive_offsets(most, has_offsets), most, 0xdeadbeefu, bits);
      EXPECT_EQ(noted_bound(of_rows, bits), with_receive_offsets(most, has_offsets)) << most;
      EXPECT_EQ(noted(static_cast<uint32_t>(of_rows >> 32), bits), static_cast<uint32_t>(most));
      EXPECT_EQ(of_rows == note, !has_offsets) << most;
    }
    // A bit of the digest that differs is a bit of the note that does, where 2 * bits <= 32.
    for (int bit = 0; bit < 32 && 2 * bits <= 32; ++bit) {
      EXPECT_NE(dispatch_note(most, most, 0xdeadbeefu ^ 1u << bit, bits), note) << most << " bit " << bit;
    }
  }
}

TEST(Loads, Average) {
  float load = 0.0f;
  for (int i = 0; i < 400; ++i) load = average_load(load, 0.9f, 10);
  EXPECT_NEAR(load, 10.0f, 1e-4f);
  EXPECT_EQ(told_tag(told_word(0xfffffffeu, 77)), 0xfffffffeu);
  EXPECT_EQ(told_value(told_word(0xfffffffeu, 77)), 77u);
}

// ---- Through the C API

constexpr int32_t kTable[] = {0, 1, 2, 0};
constexpr int32_t kOther[] = {0, 1, 2, 1};

twPlacement_t placed() {
  twPlacement_t placement = TW_PLACEMENT_INIT;
  placement.num_slots = 4;
  placement.slot_expert = kTable;
  placement.count_loads = 1;
  placement.load_decay = 0.5f;
  return placement;
}

// Two ranks with three experts in four slots, counted.
test::World make_world() {
  static const twPlacement_t placement = placed();  // the world's configuration goes on pointing to it
  twGroupConfig_t config = test::make_config(3, 2, 4);
  config.placement = &placement;
  return {2, config};
}

twResult_t dispatch_two(twGroup_t group, twHandle_t handle, int32_t uncounted = 0) {
  static std::vector<uint16_t> rows(16, 0);
  twDispatchInput_t input = TW_DISPATCH_INPUT_INIT;
  input.payloads[0] = test::tensor(rows.data(), twBfloat16, {2, 8});
  input.uncounted = uncounted;
  twDispatchOutput_t output = TW_DISPATCH_OUTPUT_INIT;
  return twDispatch(group, handle, &input, &output);
}

twHandle_t route_two(twGroup_t group, std::vector<int32_t> ids) {
  const twTensor_t given = test::tensor(ids.data(), twInt32, {2, 2});
  twHandle_t handle = nullptr;
  EXPECT_TW(twSuccess, twHandleCreate(&handle, group, &given, nullptr, nullptr));
  return handle;
}

TEST(Replicas, RanksThatDifferAreTold) {
  const test::World world = make_world();
  test::on_all_ranks(2, [&](int rank) {
    if (rank == 1) {
      EXPECT_TW(twSuccess, twGroupReplaceMap(world[rank], 0, kOther, nullptr, nullptr));
    }
    twHandle_t handle = route_two(world[rank], {0, 1, 2, 0});
    EXPECT_TW(twBoundMismatch, dispatch_two(world[rank], handle));
    EXPECT_TRUE(test::says("differ in the group, the layer, its map, the counting or the types of rows of twDispatch"));
    if (rank == 0) {
      EXPECT_TW(twSuccess, twGroupReplaceMap(world[rank], 0, kOther, nullptr, nullptr));
    }
    EXPECT_TW(twSuccess, twHandleDestroy(handle));
    handle = route_two(world[rank], {0, 1, 2, 0});
    EXPECT_TW(twSuccess, dispatch_two(world[rank], handle));
    EXPECT_TW(twSuccess, twHandleDestroy(handle));
  });
}

// A placement has a size of its own, as configs have, and what it does not hold is the default.
TEST(Replicas, PlacementsOfOtherVersions) {
  twGroupConfig_t config = test::make_config(3, 2, 4);
  twPlacement_t placement = TW_PLACEMENT_INIT;
  config.placement = &placement;
  twWindowBytes_t bytes{};
  bytes.size = sizeof bytes;
  placement.size = 8;
  placement.num_layers = -5;  // beyond what the caller's version has
  EXPECT_TW(twSuccess, twGroupWindowBytes(&config, 2, &bytes));
  placement.size = 0;
  EXPECT_TW(twInvalidArgument, twGroupWindowBytes(&config, 2, &bytes));
  EXPECT_TRUE(test::says("config.placement->size is 0"));
  placement = TW_PLACEMENT_INIT;
  placement.num_layers = TW_MAX_LAYERS;
  placement.num_slots = TW_MAX_EXPERTS;
  EXPECT_TW(twInvalidArgument, twGroupWindowBytes(&config, 2, &bytes));
  EXPECT_TRUE(test::says("config.placement->num_layers is 4096; with 1048576 slots it must be from 1 to 16"));
}

// A channel's average is aged by its distance to the channel that has counted last, also where clocks begin anew.
TEST(Loads, ChannelsThatStandStillAge) {
  PlacementSpec spec;
  spec.layers = 1;
  spec.experts = 2;
  spec.decay = 0.5f;
  Shape shape;
  shape.channels = 2;
  const float averages[] = {8, 4, 2, 6};
  const int64_t dispatches[] = {5, 2};
  for (const uint32_t first : {5u, CountedCall::kTurns - 1, CountedCall::kTurns - 2, ~0u}) {
    for (const bool swapped : {false, true}) {
      const uint32_t clocks[] = {swapped ? first + 2 : first, swapped ? first : first + 2};
      float loads[2] = {-1, -1};
      int64_t counted = -1;
      sum_channels(spec, shape, {averages, dispatches, clocks}, loads, &counted);
      EXPECT_EQ(loads[0], swapped ? 8.5f : 4.0f) << first;
      EXPECT_EQ(loads[1], swapped ? 5.5f : 7.0f) << first;
      EXPECT_EQ(counted, 7);
    }
  }
  EXPECT_EQ(aged_load(3.0f, 0.5f, 0), 3.0f);
  EXPECT_EQ(aged_load(3.0f, 0.5f, 5), 3.0f / 32);
  const uint32_t value = CountedCall::value(TW_MAX_LAYERS - 1, 77);
  EXPECT_EQ(CountedCall::layer(value), TW_MAX_LAYERS - 1);
  EXPECT_EQ(CountedCall::clock(value), 77u);
}

TEST(Loads, AllRanksAlike) {
  const test::World world = make_world();
  test::on_all_ranks(2, [&](int rank) {
    twHandle_t handle =
        route_two(world[rank], rank == 0 ? std::vector<int32_t>{0, 1, 2, 0} : std::vector<int32_t>{0, -1, -1, 0});
    EXPECT_TW(twSuccess, dispatch_two(world[rank], handle));
    EXPECT_TW(twSuccess, dispatch_two(world[rank], handle, 1));  // not counted
    EXPECT_TW(twSuccess, dispatch_two(world[rank], handle));
    EXPECT_TW(twSuccess, twHandleRelease(handle));
    float loads[3] = {};
    int64_t dispatches = 0;
    EXPECT_TW(twSuccess, twGroupLoads(world[rank], loads, &dispatches));
    EXPECT_EQ(dispatches, 2);
    EXPECT_EQ(loads[0], 0.75f * 4);
    EXPECT_EQ(loads[1], 0.75f * 1);
    EXPECT_EQ(loads[2], 0.75f * 1);
  });
}

}  // namespace
}  // namespace tw
