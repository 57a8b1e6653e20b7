// Combines per expert: what an owner sums, where its rows lie, and what the C API refuses. tests/py has the behaviour
// of the whole (test_per_expert.py, test_any_placement.py).
#include <cmath>
#include <cstddef>
#include <cstring>

#include "harness.h"

namespace tw::test {
namespace {

constexpr int kChoices = 4;
constexpr int64_t kElements = 9;
constexpr int32_t kMost = 5;

twGroupConfig_t by_choice(twDtype_t wire = twBfloat16) {
  twGroupConfig_t config = make_config(7, kChoices, kMost, kElements);
  config.combine_rows = twRowPerExpert;
  config.combine_dtype = wire;
  return config;
}

Style by_expert(twDtype_t rows = twFloat32, twWeighting_t weighting = twWeightNone) {
  Style style;
  style.layout = twExpertMajor;
  style.own_memory = true;
  style.rows = rows;
  style.weighting = weighting;
  return style;
}

// Weights that come with a combine; a token's lie a place apart from the next one's.
struct Late {
  std::vector<float> all;

  Late(int tokens, uint32_t salt) : all(tokens * (kChoices + 1)) {
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<float>(mix({salt, i}) % 1000) / 300.0f - 1.0f;
  }
  twTensor_t given() {
    twTensor_t weights = tensor(all.data(), twFloat32, {static_cast<int64_t>(all.size()) / (kChoices + 1), kChoices});
    weights.stride[0] = kChoices + 1;
    return weights;
  }
};

TEST(PerExpert, TheOwnerSumsOverChoices) {
  for (const twDtype_t wire : {twFloat32, twBfloat16}) {
    World world(3, by_choice(wire));
    for (uint32_t round = 1; round <= 6; ++round) {
      const Traffic traffic = make_traffic(world.config, {5, 4, 0}, round);
      const bool topk = round % 3 == 1;
      Exchange exchange(world, traffic,
                        by_expert(round % 2 == 0 ? twFloat32 : twFloat16, topk ? twWeightTopk : twWeightNone), round);
      exchange.dispatch();
      std::vector<Late> late;
      for (int rank = 0; rank < 3; ++rank) late.emplace_back(traffic.tokens[rank], round);
      for (int rank = 0; rank < 3 && round % 3 == 2; ++rank) exchange[rank].rows.weights = late[rank].given();
      exchange.combine();
    }
  }
}

// Nothing of a combine is kept: neither weights nor rows.
TEST(PerExpert, ADispatchIsCombinedAgain) {
  World world(2, by_choice());
  const Traffic traffic = make_traffic(world.config, {5, 5}, 7);
  Exchange exchange(world, traffic, by_expert(), 7);
  exchange.dispatch();
  for (uint32_t turn = 0; turn < 3; ++turn) {
    Late first(5, turn);
    Late second(5, turn + 10);
    exchange[0].rows.weights = first.given();
    exchange[1].rows.weights = turn == 1 ? twTensor_t TW_TENSOR_INIT : second.given();
    exchange.combine();
  }
}

// An older caller's struct ends before the weights.
TEST(PerExpert, OlderCallersHaveNoWeights) {
  World world(2, by_choice());
  Exchange exchange(world, make_traffic(world.config, {5, 4}, 1), by_expert(), 1);
  exchange.dispatch();
  for (int rank = 0; rank < 2; ++rank) exchange[rank].rows.size = offsetof(twCombineInput_t, weights);
  exchange.combine();
}

TEST(PerExpert, RefusedCallsAreToldAtOnce) {
  World world(2, by_choice());
  const Traffic traffic = make_traffic(world.config, {5, 4}, 3);
  Exchange exchange(world, traffic, by_expert(), 3);
  exchange.dispatch();
  Side& side = exchange[1];
  Late late(4, 1);
  const twTensor_t good = late.given();
  struct Bad {
    twTensor_t weights;
    const char* what;
  };
  std::vector<float> memory(100);
  side.sums.tokens.data = memory.data();
  const Bad bad[] = {
      {tensor(late.all.data(), twFloat32, {4, kChoices + 1}), "input.weights has shape [4, 5]; it must be [4, 4]"},
      {tensor(late.all.data(), twInt32, {4, kChoices}), "input.weights has dtype int32"},
      {tensor(memory.data() + 30, twFloat32, {4, kChoices}), "output.tokens at"},
  };
  for (const Bad& each : bad) {
    side.rows.weights = each.weights;
    EXPECT_TW(twSuccess, exchange[0].combine(true));
    EXPECT_TW(twInvalidArgument, side.combine(true));
    EXPECT_TRUE(says(each.what));
    EXPECT_TW(twPeerRefused, exchange[0].complete());
  }
  side.rows.weights = good;
  EXPECT_TW(twSuccess, exchange[0].combine(true));
  EXPECT_TW(twSuccess, side.combine(true));
  EXPECT_TW(twSuccess, exchange[0].complete());
  EXPECT_TW(twSuccess, side.complete());
}

TEST(PerExpert, RowsBySourceAreRefused) {
  World world(1, by_choice());
  Style style;
  Exchange exchange(world, make_traffic(world.config, {3}, 5), style, 5);
  exchange.dispatch();
  EXPECT_TW(twInvalidArgument, exchange[0].combine());
  EXPECT_TRUE(says("input.layout is 0; with config.combine_rows of twRowPerExpert (1) it must be twExpertMajor (1)"));
}

TEST(PerExpert, PartialsTakeNoWeights) {
  twGroupConfig_t config = by_choice();
  config.combine_rows = twRowPerRank;
  World world(1, config);
  Exchange exchange(world, make_traffic(world.config, {5}, 6), by_expert(), 6);
  exchange.dispatch();
  Late late(5, 1);
  exchange[0].rows.weights = late.given();
  EXPECT_TW(twInvalidArgument, exchange[0].combine());
  EXPECT_TRUE(says("input.weights is given, which config.combine_rows of twRowPerExpert (1) alone takes"));
}

// The places of a part's tokens are those of the first part's.
TEST(PerExpert, OfCombinesInParts) {
  constexpr int kTokens = 23;
  twGroupConfig_t config = make_config(2, 2, kTokens, kElements);
  config.mode = twHighThroughput;
  config.inbox_tokens = 5;
  config.combine_rows = twRowPerExpert;
  config.combine_dtype = twFloat32;
  World world(2, config);
  on_all_ranks(2, [&](int rank) {
    std::vector<int32_t> ids(2 * kTokens);
    for (int i = 0; i < 2 * kTokens; ++i) ids[i] = i % 2;  // each rank has one of the two experts
    const twTensor_t given = tensor(ids.data(), twInt32, {kTokens, 2});
    twHandle_t handle = nullptr;
    ASSERT_TW(twSuccess, twHandleCreate(&handle, world[rank], &given, nullptr, nullptr));
    const twCountsInput_t counts = TW_COUNTS_INPUT_INIT;
    ASSERT_TW(twSuccess, twExchangeCounts(world[rank], handle, &counts));
    std::vector<uint16_t> tokens(kTokens * kElements, 0);
    std::vector<uint16_t> came(2 * kTokens * kElements);
    twDispatchInput_t input = TW_DISPATCH_INPUT_INIT;
    input.payloads[0] = tensor(tokens.data(), twBfloat16, {kTokens, kElements});
    twDispatchOutput_t received = TW_DISPATCH_OUTPUT_INIT;
    received.layout = twGrouped;
    received.payloads[0] = tensor(came.data(), twBfloat16, {2 * kTokens, kElements});
    ASSERT_TW(twSuccess, twDispatch(world[rank], handle, &input, &received));
    const auto row_of = [](int of, int row) { return static_cast<float>(1 + row + 1000 * of); };
    std::vector<float> rows(2 * kTokens * kElements);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = row_of(rank, static_cast<int>(i / kElements));
    std::vector<float> weights(2 * kTokens);
    for (int i = 0; i < 2 * kTokens; ++i) weights[i] = static_cast<float>(i % 7 - 3);
    std::vector<float> sums(kTokens * kElements);
    twCombineInput_t back = TW_COMBINE_INPUT_INIT;
    back.layout = twGrouped;
    back.rows = tensor(rows.data(), twFloat32, {2 * kTokens, kElements});
    back.weights = tensor(weights.data(), twFloat32, {kTokens, 2});
    twCombineOutput_t output = TW_COMBINE_OUTPUT_INIT;
    output.tokens = tensor(sums.data(), twFloat32, {kTokens, kElements});
    ASSERT_TW(twSuccess, twCombine(world[rank], handle, &back, &output));
    for (int t = 0; t < kTokens; ++t) {
      const int row = rank * kTokens + t;
      const float want = weights[2 * t] * row_of(0, row) + weights[2 * t + 1] * row_of(1, row);
      for (int i = 0; i < kElements; ++i) EXPECT_EQ(sums[t * kElements + i], want) << rank << ": " << t;
    }
    EXPECT_TW(twSuccess, twHandleDestroy(handle));
  });
}

// An inbox has K rows for a token, in both banks, however few ranks there are.
TEST(PerExpert, TheWindowHasRoomForEveryChoice) {
  twGroupConfig_t config = make_config(64, 8, 64, 1024);
  config.combine_dtype = twFloat32;
  for (const int ranks : {1, 3, 8, 9}) {
    twWindowBytes_t partials{};
    twWindowBytes_t choices{};
    partials.size = choices.size = sizeof partials;
    config.combine_rows = twRowPerRank;
    ASSERT_TW(twSuccess, twGroupWindowBytes(&config, ranks, &partials));
    config.combine_rows = twRowPerExpert;
    ASSERT_TW(twSuccess, twGroupWindowBytes(&config, ranks, &choices));
    EXPECT_EQ(choices.window - partials.window, 2u * 64 * (8 - std::min(ranks, 8)) * 1024 * sizeof(float)) << ranks;
  }
  config.combine_rows = static_cast<twCombineRows_t>(2);
  twWindowBytes_t bytes{};
  bytes.size = sizeof bytes;
  EXPECT_TW(twInvalidArgument, twGroupWindowBytes(&config, 2, &bytes));
  EXPECT_TRUE(says("config.combine_rows is 2; it must be from 0 to 1"));
}

}  // namespace
}  // namespace tw::test
