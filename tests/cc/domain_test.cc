// Sums by domain: which partials a fold has, that it is rounded once, in which order folds are summed, and what the C
// API refuses. tests/py has the behaviour of the whole (test_domain.py).
#include <array>
#include <cstddef>

#include "exchange/domains.h"
#include "harness.h"

namespace tw::test {
namespace {

constexpr int kChoicesOfToken = 6;
constexpr int64_t kElementsOfSum = 9;

twGroupConfig_t by_domain(int32_t domain, twDtype_t wire = twBfloat16) {
  twGroupConfig_t config = make_config(11, kChoicesOfToken, 5, kElementsOfSum);
  config.combine_dtype = wire;
  config.domain = domain;
  return config;
}

// Rows and results of several types, layouts by source and by expert, a rank without tokens, with a bias and without.
TEST(Domain, FoldsAreSummed) {
  for (const twDtype_t wire : {twBfloat16, twFloat16, twFloat32}) {
    for (const int32_t domain : {0, 1, 2, 3, 4, 5, 64}) {
      World world(5, by_domain(domain, wire));
      for (uint32_t round = 1; round <= 4; ++round) {
        Style style;
        style.layout = round % 2 == 0 ? twRankMajor : twExpertMajor;
        style.own_memory = style.layout == twExpertMajor;
        style.out = round == 1 ? wire : round == 2 ? twFloat16 : twFloat32;
        style.weighting = twWeightTopk;
        Exchange exchange(world, make_traffic(world.config, {5, round == 3 ? 0 : 4, 3, 5, 5}, round), style, round);
        if (round == 4) exchange[2].give_bias(twFloat32, true);
        if (round == 4) exchange[4].give_bias(twFloat32, false);
        exchange.dispatch();
        exchange.combine();
      }
    }
  }
}

// One element of one token, the sum of its ranks' partials, by hand.
float sum_of(int32_t domain, std::vector<float> partials) {
  const auto ranks = static_cast<int>(partials.size());
  twGroupConfig_t config = make_config(ranks, ranks, 1, 1);
  config.domain = domain;
  World world(ranks, config);
  std::array<std::vector<float>, 8> sums;
  on_all_ranks(ranks, [&](int rank) {
    std::vector<int32_t> ids(ranks);
    for (int k = 0; k < ranks; ++k) ids[k] = k;
    const twTensor_t given = tensor(ids.data(), twInt32, {1, ranks});
    twHandle_t handle = nullptr;
    ASSERT_TW(twSuccess, twHandleCreate(&handle, world[rank], &given, nullptr, nullptr));
    uint16_t token = 0;
    twDispatchInput_t input = TW_DISPATCH_INPUT_INIT;
    input.payloads[0] = tensor(&token, twBfloat16, {1, 1});
    twDispatchOutput_t received = TW_DISPATCH_OUTPUT_INIT;
    ASSERT_TW(twSuccess, twDispatch(world[rank], handle, &input, &received));
    std::vector<float> rows(ranks, partials[rank]);
    twCombineInput_t back = TW_COMBINE_INPUT_INIT;
    back.rows = tensor(rows.data(), twFloat32, {ranks, 1, 1});
    sums[rank].resize(1);
    twCombineOutput_t output = TW_COMBINE_OUTPUT_INIT;
    output.tokens = tensor(sums[rank].data(), twFloat32, {1, 1});
    ASSERT_TW(twSuccess, twCombine(world[rank], handle, &back, &output));
    EXPECT_TW(twSuccess, twHandleDestroy(handle));
  });
  for (int rank = 1; rank < ranks; ++rank) EXPECT_EQ(sums[rank], sums[0]) << "the sum depends on its owner";
  return sums[0].empty() ? 0 : sums[0][0];
}

// Whoever owns the token. bfloat16 has 8 significant bits, float32 24.
TEST(Domain, OrderAndRoundingAreTheDefinition) {
  // A fold of 256 + 1 is 256, as that is even; without a rounding, 257.
  EXPECT_EQ(sum_of(0, {256, 1, 256, 1}), 514);
  EXPECT_EQ(sum_of(2, {256, 1, 256, 1}), 512);
  EXPECT_EQ(sum_of(3, {256, 1, 1, 1}), 259);  // 258, and 1 of the last domain, which is smaller
  EXPECT_EQ(sum_of(4, {256, 1, 256, 1}), 514);
  EXPECT_EQ(sum_of(1, {256, 1, 256, 1}), 514);
  // Domains ascending, whoever owns the token: (2^24 + 1) + 1 stays 2^24, and (1 + 1) + 2^24 does not.
  EXPECT_EQ(sum_of(2, {16777216, 0, 1, 0, 1, 0}), 16777216);
  EXPECT_EQ(sum_of(2, {1, 0, 1, 0, 16777216, 0}), 16777218);
}

// The fold as whoever folds uses it: names of terms, and sums that say of which.
TEST(Domain, TermsAreFoldedInTheirPlace) {
  const auto fold = [](int32_t domain, int32_t ranks_of_group, std::vector<int32_t> ranks) {
    std::vector<std::vector<int32_t>> made;
    std::vector<const void*> terms;
    for (int32_t& rank : ranks) terms.push_back(&rank);
    std::vector<std::byte> room(ranks.size() + 1);
    const Domains domains = Domains::make(domain, ranks_of_group);
    int32_t used = 0;
    const int32_t folds = fold_terms(domains, terms.data(), ranks.data(), static_cast<int32_t>(ranks.size()),
                                     room.data(), 1, [&](std::byte* to, const void* const* of, int count) {
                                       EXPECT_EQ(to, room.data() + used++);
                                       made.emplace_back();
                                       for (int i = 0; i < count; ++i) {
                                         made.back().push_back(*static_cast<const int32_t*>(of[i]));
                                       }
                                     });
    EXPECT_LE(used, domains.most_folds(static_cast<int32_t>(ranks.size())));
    std::vector<std::vector<int32_t>> all;
    for (int32_t i = 0; i < folds; ++i) {
      const auto at = static_cast<const std::byte*>(terms[i]) - room.data();
      const bool is_made = at >= 0 && at < used;
      all.push_back(is_made ? made[at] : std::vector<int32_t>{*static_cast<const int32_t*>(terms[i])});
    }
    return all;
  };
  using Folds = std::vector<std::vector<int32_t>>;
  EXPECT_EQ(fold(2, 7, {}), Folds{});
  EXPECT_EQ(fold(2, 7, {5}), Folds{{5}});
  EXPECT_EQ(fold(2, 7, {0, 1, 2, 3, 4, 5, 6}), (Folds{{0, 1}, {2, 3}, {4, 5}, {6}}));
  EXPECT_EQ(fold(2, 7, {1, 2, 3, 6}), (Folds{{1}, {2, 3}, {6}}));
  EXPECT_EQ(fold(3, 7, {0, 2, 3, 5, 6}), (Folds{{0, 2}, {3, 5}, {6}}));
  EXPECT_EQ(fold(6, 7, {0, 5, 6}), (Folds{{0, 5}, {6}}));
  for (const int32_t none : {0, 1, 7, 8, 1024}) EXPECT_FALSE(Domains::make(none, 7).fold()) << none;
  EXPECT_EQ(Domains::make(2, 7).of(5), 2);
}

TEST(Domain, WhatIsWrongIsRefused) {
  twGroupConfig_t config = by_domain(0);
  twWindowBytes_t bytes{};
  bytes.size = sizeof bytes;
  for (const int32_t domain : {-1, TW_MAX_RANKS + 1}) {
    config.domain = domain;
    EXPECT_TW(twInvalidArgument, twGroupWindowBytes(&config, 2, &bytes));
    EXPECT_TRUE(says("config.domain is " + std::to_string(domain) + "; it must be from 0 to 1024"));
  }
  config.domain = TW_MAX_RANKS;
  EXPECT_TW(twSuccess, twGroupWindowBytes(&config, 2, &bytes));
  config.domain = 2;
  config.combine_rows = twRowPerExpert;
  EXPECT_TW(twInvalidArgument, twGroupWindowBytes(&config, 4, &bytes));
  EXPECT_TRUE(says("config.domain is 2; with config.combine_rows of twRowPerExpert (1) it must be 0"));
  // An older caller's struct ends before it.
  config.domain = -1;
  config.combine_rows = twRowPerRank;
  config.size = offsetof(twGroupConfig_t, domain);
  EXPECT_TW(twSuccess, twGroupWindowBytes(&config, 2, &bytes));
}

TEST(Domain, RowsOfFp8AreRefused) {
  World world(3, by_domain(2));
  Exchange exchange(world, make_traffic(world.config, {5, 4, 3}, 3), Style{}, 3);
  exchange.dispatch();
  twCombineInput_t& rows = exchange[1].rows;
  rows.wire_dtype = twFloat8e4m3;
  rows.elements = 1;
  rows.wire_scales = twScalesTensor;
  rows.wire_scale = 1.0f;
  EXPECT_TW(twSuccess, exchange[0].combine(true));
  EXPECT_TW(twSuccess, exchange[2].combine(true));
  EXPECT_TW(twInvalidArgument, exchange[1].combine(true));
  EXPECT_TRUE(says("input.wire_dtype is float8_e4m3 "));
  EXPECT_TRUE(says("in a group whose config.domain is 2 it must be float32, bfloat16 or float16"));
  EXPECT_TW(twPeerRefused, exchange[0].complete());
  EXPECT_TW(twPeerRefused, exchange[2].complete());
  rows.wire_dtype = twDtypeNone;
  rows.elements = 0;
  rows.wire_scales = twScalesNone;
  rows.wire_scale = 0.0f;
  exchange.combine();
}

TEST(Domain, RanksAgreeOnIt) {
  std::vector<twComm_t> comms(2);
  ASSERT_TW(twSuccess, twCommCreateLocal(comms.data(), 2, nullptr));
  on_all_ranks(2, [&](int rank) {
    const twGroupConfig_t config = by_domain(rank == 0 ? 0 : 2);  // which two ranks would not notice in their sums
    twGroup_t group = nullptr;
    EXPECT_TW(twConfigMismatch, twGroupCreate(&group, comms[rank], &config));
    EXPECT_TRUE(says("config.domain differs: rank 0 has 0, rank 1 has 2"));
  });
  for (twComm_t comm : comms) EXPECT_TW(twSuccess, twCommDestroy(comm));
}

// What a group tells, and its sums when rows have grown: the room for folds grows with them.
TEST(Domain, GrowsWithItsRows) {
  World world(3, by_domain(2, twFloat32));
  twGroupInfo_t info{};
  info.size = sizeof info;
  ASSERT_TW(twSuccess, twGroupInfo(world[0], &info));
  EXPECT_EQ(info.domain, 2);
  constexpr int kWide = 4096;
  on_all_ranks(3, [&](int rank) {
    twReserve_t reserve = TW_RESERVE_INIT;
    reserve.combine_room = kWide * sizeof(float);
    ASSERT_TW(twSuccess, twGroupReserve(world[rank], &reserve));
    int32_t ids[kChoicesOfToken] = {0, 4, 8, -1, -1, -1};  // one of each rank
    const twTensor_t given = tensor(ids, twInt32, {1, kChoicesOfToken});
    twHandle_t handle = nullptr;
    ASSERT_TW(twSuccess, twHandleCreate(&handle, world[rank], &given, nullptr, nullptr));
    std::vector<uint16_t> token(kElementsOfSum, 0);
    twDispatchInput_t input = TW_DISPATCH_INPUT_INIT;
    input.payloads[0] = tensor(token.data(), twBfloat16, {1, kElementsOfSum});
    twDispatchOutput_t received = TW_DISPATCH_OUTPUT_INIT;
    ASSERT_TW(twSuccess, twDispatch(world[rank], handle, &input, &received));
    std::vector<float> rows(3 * 5 * kWide);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(rank * 10000) + static_cast<float>(i % kWide);
    twCombineInput_t back = TW_COMBINE_INPUT_INIT;
    back.wire_dtype = twFloat32;
    back.elements = kWide;
    back.rows = tensor(rows.data(), twFloat32, {3, 5, kWide});
    std::vector<float> sums(kWide);
    twCombineOutput_t output = TW_COMBINE_OUTPUT_INIT;
    output.tokens = tensor(sums.data(), twFloat32, {1, kWide});
    ASSERT_TW(twSuccess, twCombine(world[rank], handle, &back, &output));
    for (int i = 0; i < kWide; ++i) ASSERT_EQ(sums[i], 30000.0f + 3.0f * static_cast<float>(i)) << i;
    EXPECT_TW(twSuccess, twHandleDestroy(handle));
  });
}

}  // namespace
}  // namespace tw::test
