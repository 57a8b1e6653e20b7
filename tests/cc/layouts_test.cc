// The table of layouts: what twGroupLayout tells is what a dispatch fills in, and a mode has its own layouts alone.
#include "layout/layouts.h"

#include "counted.h"

namespace tw::test {
namespace {

struct Told {
  twLayout_t layout;
  bool exact, by_expert, views;
  int64_t blocks, rows_per_bound, ids_per_row, offsets;
  int32_t default_bound;
  bool packed = false;
  int32_t row_alignment = 1;
};

// 7 experts on 3 ranks (3, 2 and 2), top 2, at most 4 tokens of a rank.
constexpr int kRanks = 3;
std::vector<Told> told_of(twMode_t mode, int64_t local) {
  if (mode == twHighThroughput) {
    return {{twFlat, true, false, true, kRanks, 0, 2, 0, 0, true},
            {twGrouped, true, true, false, local, 0, 1, local + 1, 0, true, 4}};
  }
  const int32_t bound = mode == twAutomatic ? 3 : 4;
  std::vector<Told> told{{twRankMajor, false, false, true, kRanks, 1, 2, 0, bound},
                         {twExpertMajor, false, true, false, local, kRanks, 1, 0, bound},
                         {twGroupedByBound, false, true, false, local, 2 * kRanks, 1, local + 1, bound, true, 4}};
  if (mode != twAutomatic) return told;
  for (const Told& exact : told_of(twHighThroughput, local)) told.push_back(exact);
  return told;
}

void expect_told(twGroup_t group, const Told& want) {
  twLayoutInfo_t info{};
  info.size = sizeof info;
  ASSERT_TW(twSuccess, twGroupLayout(group, want.layout, &info));
  EXPECT_EQ(info.exact, want.exact);
  EXPECT_EQ(info.by_expert, want.by_expert);
  EXPECT_EQ(info.views, want.views);
  EXPECT_EQ(info.blocks, want.blocks);
  EXPECT_EQ(info.rows_per_bound, want.rows_per_bound);
  EXPECT_EQ(info.ids_per_row, want.ids_per_row);
  EXPECT_EQ(info.offsets, want.offsets);
  EXPECT_EQ(info.default_bound, want.default_bound);
  EXPECT_EQ(info.packed, want.packed);
  EXPECT_EQ(info.row_alignment, want.row_alignment);
}

twGroupConfig_t aligned() {
  twGroupConfig_t config = make_config(7, 2, 4);
  config.row_alignment = 4;
  return config;
}

TEST(Layouts, AreToldByMode) {
  for (const twMode_t mode : {twLowLatency, twHighThroughput}) {
    twGroupConfig_t config = aligned();
    config.mode = mode;
    World world(kRanks, config);
    for (int rank = 0; rank < kRanks; ++rank) {
      for (const Told& want : told_of(mode, rank == 0 ? 3 : 2)) expect_told(world[rank], want);
      const twMode_t other = mode == twLowLatency ? twHighThroughput : twLowLatency;
      for (const Told& absent : told_of(other, 2)) {
        twLayoutInfo_t info{};
        info.size = sizeof info;
        EXPECT_TW(twInvalidArgument, twGroupLayout(world[rank], absent.layout, &info));
        EXPECT_TRUE(says(mode == twLowLatency ? "it must be twRankMajor (0), twExpertMajor (1) or twGroupedByBound (4)"
                                              : "in high throughput it must be twFlat (2) or twGrouped (3)"));
      }
    }
  }
}

TEST(Layouts, AGroupOfBothModesHasAll) {
  twGroupConfig_t config = aligned();
  config.mode = twAutomatic;
  config.low_latency_tokens = 3;
  World world(kRanks, config);
  for (int rank = 0; rank < kRanks; ++rank) {
    for (const Told& want : told_of(twAutomatic, rank == 0 ? 3 : 2)) expect_told(world[rank], want);
  }
  twLayoutInfo_t info{};
  info.size = sizeof info;
  EXPECT_TW(twInvalidArgument, twGroupLayout(world[0], static_cast<twLayout_t>(5), &info));
  EXPECT_TRUE(says("it must be twRankMajor (0), twExpertMajor (1), twGroupedByBound (4), twFlat (2) or twGrouped (3)"));
}

TEST(Layouts, NoOtherIsKnown) {
  World world(1, make_config(6, 2, 4));
  twLayoutInfo_t info{};
  info.size = sizeof info;
  for (const int id : {-1, 5, 1 << 20}) {
    EXPECT_EQ(find_layout(static_cast<twLayout_t>(id)), nullptr);
    EXPECT_TW(twInvalidArgument, twGroupLayout(world[0], static_cast<twLayout_t>(id), &info));
  }
  EXPECT_TW(twInvalidArgument, twGroupLayout(world[0], twRankMajor, nullptr));
}

// The leading dimensions and counts of a dispatch's outputs follow from what is told.
TEST(Layouts, OutputsHaveTheShapesThatAreTold) {
  World world(kRanks, make_config(7, 2, 4));
  for (const twLayout_t layout : {twRankMajor, twExpertMajor}) {
    Style style;
    style.layout = layout;
    Exchange exchange(world, make_traffic(world.config, {4, 0, 3}, 1), style, 1);
    on_all_ranks(kRanks, [&](int rank) {
      Side& side = exchange[rank];
      twLayoutInfo_t info{};
      info.size = sizeof info;
      ASSERT_TW(twSuccess, twGroupLayout(world[rank], layout, &info));
      ASSERT_TW(twSuccess, side.dispatch());
      for (const twTensor_t* tensor : {&side.received.payloads[0], &side.received.weights}) {
        EXPECT_EQ(tensor->shape[0], info.blocks);
        EXPECT_EQ(tensor->shape[1], info.rows_per_bound * info.default_bound);
      }
      EXPECT_EQ(side.received.counts.shape[0], info.blocks);
      EXPECT_EQ(side.received.ids.ndim, info.by_expert != 0 ? 2 : 3);
    });
  }
}

// In the grouped of low latency they have as many rows as can come, of which offsets tell whose each is.
TEST(Layouts, GroupedByBoundTellsWhereExpertsBegin) {
  for (const int32_t alignment : {1, 4}) {
    twGroupConfig_t config = make_config(7, 2, 4);
    config.row_alignment = alignment;
    World world(kRanks, config);
    Style style;
    style.layout = twGroupedByBound;
    Exchange exchange(world, make_traffic(world.config, {4, 0, 3}, 1), style, 1);
    const auto padded = [&](int64_t rows) { return (rows + alignment - 1) / alignment * alignment; };
    on_all_ranks(kRanks, [&](int rank) {
      Side& side = exchange[rank];
      ASSERT_TW(twSuccess, side.dispatch());
      const int64_t local = world.homes.held[rank];
      const int64_t rows = (kRanks * 4 * 2 + local * (alignment - 1)) / alignment * alignment;
      for (const twTensor_t* tensor : {&side.received.payloads[0], &side.received.weights, &side.received.ids}) {
        EXPECT_EQ(tensor->shape[0], rows);
      }
      EXPECT_EQ(side.received.ids.ndim, 1);
      ASSERT_EQ(side.received.offsets.shape[0], local + 1);
      const auto* const counts = static_cast<const int32_t*>(side.received.counts.data);
      const auto* const offsets = static_cast<const int32_t*>(side.received.offsets.data);
      EXPECT_EQ(offsets[0], 0);
      for (int64_t expert = 0; expert < local; ++expert) {
        EXPECT_EQ(offsets[expert + 1], offsets[expert] + padded(counts[expert]));
      }
      EXPECT_LE(offsets[local], rows);
      EXPECT_TW(twSuccess, twHandleRelease(side.handle));
    });
  }
}

}  // namespace
}  // namespace tw::test
