// Values of choices beside the rows of a combine: which rank's value a token's owner gets, what the C API refuses, and
// what ranks that differ hear. tests/py has the behaviour of the whole (test_choice_values.py).
#include <cmath>
#include <cstddef>
#include <cstring>

#include "harness.h"

namespace tw::test {
namespace {

constexpr int kTopK = 3;
constexpr int64_t kWidth = 8;
constexpr int32_t kBound = 5;

twGroupConfig_t roomy() {
  twGroupConfig_t config = make_config(7, kTopK, kBound, kWidth);
  config.combine_room = kWidth * sizeof(uint16_t) + kTopK * sizeof(float);
  return config;
}

// Another value for each (rank, source, slot, k), whether or not the rank serves that choice.
float value_of(int rank, int source, int slot, int k) {
  return static_cast<float>(1 + mix({static_cast<uint64_t>(rank), static_cast<uint64_t>(source),
                                     static_cast<uint64_t>(slot), static_cast<uint64_t>(k)}) %
                                    (1 << 20));
}

// The values of one rank's part in an exchange.
struct Values {
  std::vector<float> in;
  std::vector<float> out;

  Values(const World& world, int rank, int tokens) : in(world.size() * kBound * kTopK), out(tokens * kTopK + 1, -1.0f) {
    for (int64_t i = 0; i < static_cast<int64_t>(in.size()); ++i) {
      const auto row = static_cast<int>(i / kTopK);
      in[i] = value_of(rank, row / kBound, row % kBound, static_cast<int>(i % kTopK));
    }
  }
  void give(const World& world, Side& side) {
    const auto tokens = static_cast<int64_t>(out.size()) / kTopK;
    side.rows.choice_values = tensor(in.data(), twFloat32, {world.size(), kBound, kTopK});
    side.sums.choice_values = tensor(out.data(), twFloat32, {tokens, kTopK});
  }
};

std::vector<Values> give_all(const World& world, const Traffic& traffic, Exchange& exchange) {
  std::vector<Values> values;
  for (int rank = 0; rank < world.size(); ++rank) values.emplace_back(world, rank, traffic.tokens[rank]);
  for (int rank = 0; rank < world.size(); ++rank) values[rank].give(world, exchange[rank]);
  return values;
}

// What an owner must get, by the routing alone.
std::vector<float> wanted(const World& world, const Traffic& traffic, int owner) {
  std::vector<float> values;
  std::vector<int> sent(world.size(), 0);
  for (int token = 0; token < traffic.tokens[owner]; ++token) {
    const int32_t* const ids = traffic.ids[owner].data() + static_cast<ptrdiff_t>(token) * kTopK;
    for (int k = 0; k < kTopK; ++k) {
      float value = 0.0f;
      for (int rank = 0; rank < world.size(); ++rank) {
        if (world.homes.here(ids[k], rank)) value = value_of(rank, owner, sent[rank], k);
      }
      values.push_back(value);
    }
    for (int rank = 0; rank < world.size(); ++rank) {
      bool goes = false;
      for (int k = 0; k < kTopK; ++k) goes |= world.homes.here(ids[k], rank);
      sent[rank] += goes ? 1 : 0;
    }
  }
  return values;
}

TEST(ChoiceValues, EachIsOfTheRankThatServedTheChoice) {
  for (const twDtype_t rows :
       {twFloat32, twBfloat16}) {  // own rows are summed where they lie if they are of the wire's
    World world(3, roomy());
    for (uint32_t round = 1; round <= 4; ++round) {
      const Traffic traffic = make_traffic(world.config, {5, 4, 0}, round);
      Style style;
      style.rows = rows;
      Exchange exchange(world, traffic, style, round);
      exchange.dispatch();
      const std::vector<Values> values = give_all(world, traffic, exchange);
      exchange.combine();
      for (int rank = 0; rank < 3; ++rank) {
        std::vector<float> got = values[rank].out;
        EXPECT_EQ(got.back(), -1.0f);
        got.pop_back();
        EXPECT_EQ(got, wanted(world, traffic, rank)) << "rank " << rank << ", round " << round;
      }
    }
  }
}

// An older caller's structs end before the values.
TEST(ChoiceValues, OlderCallersHaveNone) {
  World world(2, roomy());
  Exchange exchange(world, make_traffic(world.config, {5, 4}, 1), {}, 1);
  exchange.dispatch();
  std::memset(&exchange[0].rows.choice_values, 0x5a, sizeof(twTensor_t));
  exchange[0].rows.size = offsetof(twCombineInput_t, choice_values);
  exchange[0].sums.size = offsetof(twCombineOutput_t, choice_values);
  exchange.combine();
}

// All of them hear of it, values of the step that failed are NaN, and the group goes on.
TEST(ChoiceValues, RanksThatDifferAreTold) {
  World world(2, roomy());
  const Traffic traffic = make_traffic(world.config, {5, 4}, 2);
  Exchange exchange(world, traffic, {}, 2);
  exchange.dispatch();
  std::vector<Values> values = give_all(world, traffic, exchange);
  exchange[1].rows.choice_values = exchange[1].sums.choice_values = TW_TENSOR_INIT;
  for (int rank = 0; rank < 2; ++rank) EXPECT_TW(twSuccess, exchange[rank].combine(true));
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_TW(twBoundMismatch, exchange[rank].complete());
    EXPECT_TRUE(says("whether it has choice values"));
  }
  for (int i = 0; i < 5 * kTopK; ++i) EXPECT_TRUE(std::isnan(values[0].out[i])) << i;
  values[1].give(world, exchange[1]);
  exchange.combine();
}

TEST(ChoiceValues, RefusedOnesAreToldAtOnce) {
  World world(2, roomy());
  const Traffic traffic = make_traffic(world.config, {5, 4}, 3);
  Exchange exchange(world, traffic, {}, 3);
  exchange.dispatch();
  std::vector<Values> values = give_all(world, traffic, exchange);
  Side& side = exchange[1];
  const twTensor_t in = side.rows.choice_values;
  const twTensor_t out = side.sums.choice_values;
  struct Bad {
    twTensor_t in;
    twTensor_t out;
    const char* what;
  };
  twTensor_t inside = out;
  inside.data = static_cast<float*>(in.data) + 2;
  const Bad bad[] = {
      {in, TW_TENSOR_INIT, "input.choice_values is given, and output.choice_values is not given"},
      {tensor(in.data, twFloat32, {2, kBound, kTopK + 1}), out, "input.choice_values has shape [2, 5, 4]"},
      {tensor(in.data, twInt32, {2, kBound, kTopK}), out, "input.choice_values has dtype int32"},
      {in, tensor(out.data, twFloat32, {5, kTopK}), "output.choice_values has shape [5, 3]; it must be [4, 3]"},
      {in, inside, "overlaps input.choice_values"},
      {in, tensor(side.sums.tokens.data, twFloat32, {4, kTopK}), "overlaps output.tokens"},
  };
  for (const Bad& each : bad) {
    side.rows.choice_values = each.in;
    side.sums.choice_values = each.out;
    EXPECT_TW(twSuccess, exchange[0].combine(true));
    EXPECT_TW(twInvalidArgument, side.combine(true));
    EXPECT_TRUE(says(each.what));
    EXPECT_TW(twPeerRefused, exchange[0].complete());
  }
  values[1].give(world, side);
  exchange.combine();
}

TEST(ChoiceValues, ThereMustBeRoomForBoth) {
  twGroupConfig_t config = roomy();
  --config.combine_room;
  World world(1, config);
  const Traffic traffic = make_traffic(config, {5}, 4);
  Exchange exchange(world, traffic, {}, 4);
  exchange.dispatch();
  const std::vector<Values> values = give_all(world, traffic, exchange);
  EXPECT_TW(twInvalidArgument, exchange[0].combine());
  EXPECT_TRUE(says("takes 12 bytes beside a row, 28 together; config.combine_room has room for 27"));
}

// Values of the tokens of all parts, at (token, k) of rows that lie without gaps. Every rank has all experts' choices
// of one rank, so that its slots are its tokens.
TEST(ChoiceValues, OfCombinesInParts) {
  constexpr int kTokens = 23;
  twGroupConfig_t config = make_config(4, 2, kTokens, kWidth);
  config.mode = twHighThroughput;
  config.inbox_tokens = 5;
  config.combine_room = kWidth * sizeof(uint16_t) + 2 * sizeof(float);
  World world(2, config);
  on_all_ranks(2, [&](int rank) {
    std::vector<int32_t> ids(2 * kTokens);
    for (int i = 0; i < 2 * kTokens; ++i) ids[i] = i % 2 == 0 ? 2 : (i / 2 % 3 == 0 ? -1 : 3);  // of rank 1
    const twTensor_t given = tensor(ids.data(), twInt32, {kTokens, 2});
    twHandle_t handle = nullptr;
    ASSERT_TW(twSuccess, twHandleCreate(&handle, world[rank], &given, nullptr, nullptr));
    const twCountsInput_t counts = TW_COUNTS_INPUT_INIT;
    ASSERT_TW(twSuccess, twExchangeCounts(world[rank], handle, &counts));
    std::vector<uint16_t> tokens(kTokens * kWidth, 0);
    twDispatchInput_t input = TW_DISPATCH_INPUT_INIT;
    input.payloads[0] = tensor(tokens.data(), twBfloat16, {kTokens, kWidth});
    twDispatchOutput_t received = TW_DISPATCH_OUTPUT_INIT;
    received.layout = twFlat;
    ASSERT_TW(twSuccess, twDispatch(world[rank], handle, &input, &received));
    const int rows = rank == 1 ? 2 * kTokens : 0;
    std::vector<float> values(2 * rows + 1);
    for (int i = 0; i < 2 * rows; ++i) values[i] = static_cast<float>(i + 1);
    std::vector<float> sums(kTokens * kWidth);
    std::vector<float> got(2 * kTokens, -1.0f);
    twCombineInput_t back = TW_COMBINE_INPUT_INIT;
    back.layout = twFlat;
    back.rows = received.payloads[0];
    back.choice_values = tensor(values.data(), twFloat32, {rows, 2});
    twCombineOutput_t output = TW_COMBINE_OUTPUT_INIT;
    output.tokens = tensor(sums.data(), twFloat32, {kTokens, kWidth});
    output.choice_values = tensor(got.data(), twFloat32, {kTokens, 2});
    ASSERT_TW(twSuccess, twCombine(world[rank], handle, &back, &output));
    for (int i = 0; i < 2 * kTokens; ++i) {
      EXPECT_EQ(got[i], ids[i] < 0 ? 0.0f : static_cast<float>(2 * kTokens * rank + i + 1)) << rank << ": " << i;
    }
    EXPECT_TW(twSuccess, twHandleDestroy(handle));
  });
}

}  // namespace
}  // namespace tw::test
