// Sums that start from rows of the caller: that these are the first term, whose they are, and what the C API refuses.
// tests/py has the behaviour of the whole (test_bias.py).
#include <cstddef>

#include "harness.h"

namespace tw::test {
namespace {

constexpr int kChoices = 3;
constexpr int64_t kElements = 9;

twGroupConfig_t config_of(twCombineRows_t rows = twRowPerRank) {
  twGroupConfig_t config = make_config(7, kChoices, 5, kElements);
  config.combine_rows = rows;
  return config;
}

Style style_of(twLayout_t layout, twDtype_t out = twFloat32, twWeighting_t weighting = twWeightTopk) {
  Style style;
  style.layout = layout;
  style.own_memory = layout == twExpertMajor;
  style.out = out;
  style.weighting = weighting;
  return style;
}

// Each rank gives another kind, the last none; a token without partials gets its bias.
TEST(Bias, IsTheFirstTerm) {
  for (const twCombineRows_t returning : {twRowPerRank, twRowPerExpert}) {
    World world(3, config_of(returning));
    for (uint32_t round = 1; round <= 6; ++round) {
      const Traffic traffic = make_traffic(world.config, {5, round == 4 ? 0 : 4, 3}, round);
      const twLayout_t layout = round % 2 == 0 && returning == twRowPerRank ? twRankMajor : twExpertMajor;
      const twDtype_t out = round % 3 == 0 ? twFloat16 : round % 3 == 1 ? twFloat32 : twBfloat16;
      Exchange exchange(world, traffic, style_of(layout, out, round < 4 ? twWeightTopk : twWeightNone), round);
      exchange[0].give_bias(out, true);
      exchange[1].give_bias(round == 5 ? out : twFloat32, false);
      exchange.dispatch();
      exchange.combine();
    }
  }
}

// Nothing of a combine is kept.
TEST(Bias, IsThatOfTheCall) {
  World world(2, config_of());
  Exchange exchange(world, make_traffic(world.config, {5, 5}, 7), style_of(twRankMajor), 7);
  exchange.dispatch();
  exchange.combine();
  exchange[1].give_bias(twFloat32, false);
  exchange.combine();
}

// An older caller's struct ends before it.
TEST(Bias, OlderCallersHaveNone) {
  World world(1, config_of());
  Exchange exchange(world, make_traffic(world.config, {5}, 2), style_of(twRankMajor), 2);
  exchange.dispatch();
  exchange[0].rows.size = offsetof(twCombineInput_t, bias);
  std::vector<float> memory(5 * kElements, 1.0f);
  exchange[0].rows.bias = tensor(memory.data(), twFloat32, {5, kElements});
  exchange.combine();
}

TEST(Bias, RefusedOnesAreToldAtOnce) {
  World world(2, config_of());
  Exchange exchange(world, make_traffic(world.config, {5, 4}, 3), style_of(twRankMajor), 3);
  exchange.dispatch();
  Side& side = exchange[1];
  std::vector<float> memory(200);
  auto* const sums = static_cast<float*>(side.sums.tokens.data);
  twTensor_t apart = tensor(sums, twFloat32, {4, kElements});
  apart.stride[0] = -kElements;
  struct Bad {
    twTensor_t bias;
    const char* what;
  };
  const Bad bad[] = {
      {tensor(memory.data(), twFloat32, {4, kElements - 1}), "input.bias has shape [4, 8]; it must be [4, 9]"},
      {tensor(memory.data(), twFloat32, {5, kElements}), "input.bias has shape [5, 9]; it must be [4, 9]"},
      {tensor(nullptr, twFloat32, {4, kElements}), "input.bias has data NULL"},
      {tensor(memory.data(), twInt32, {4, kElements}),
       "input.bias has dtype int32 (5); it must be float32, as output.tokens has"},
      {tensor(sums + 1, twFloat32, {4, kElements}), "output.tokens at"},
      {apart, "output.tokens at"},
  };
  for (const Bad& each : bad) {
    side.rows.bias = each.bias;
    EXPECT_TW(twSuccess, exchange[0].combine(true));
    EXPECT_TW(twInvalidArgument, side.combine(true));
    EXPECT_TRUE(says(each.what)) << each.what;
    EXPECT_TW(twPeerRefused, exchange[0].complete());
  }
  side.give_bias(twFloat32, false);
  exchange.combine();
}

}  // namespace
}  // namespace tw::test
