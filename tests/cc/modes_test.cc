// Groups of both modes: calls of either in turns by one group and one routing, ranks that differ in it, and the
// configuration. tests/py has their behaviour on all backends.
#include "counted.h"

namespace tw::test {
namespace {

twGroupConfig_t both_modes(int max_tokens, int low_latency_tokens) {
  twGroupConfig_t config = counting(6, 2, max_tokens);
  config.mode = twAutomatic;
  config.low_latency_tokens = low_latency_tokens;
  return config;
}

// An exchange of low latency whose handles' counts are exchanged in between.
void count(const World& world, Exchange& exchange) {
  for (int rank = 0; rank < exchange.size(); ++rank) {
    twCountsInput_t input = TW_COUNTS_INPUT_INIT;
    input.send_only = 1;
    ASSERT_TW(twSuccess, twExchangeCounts(world[rank], exchange[rank].handle, &input));
  }
  for (int rank = 0; rank < exchange.size(); ++rank) {
    ASSERT_TW(twSuccess, twComplete(world[rank], exchange[rank].handle, nullptr));
  }
}

TEST(Modes, TakeTurns) {
  World world(3, both_modes(8, 3));
  uint32_t seed = 0;
  for (const twLayout_t layout : {twRankMajor, twExpertMajor, twRankMajor}) {
    Style style;
    style.layout = layout;
    style.bound = 3;
    ++seed;
    Exchange few(world, make_traffic(world.config, {3, 0, 2}, seed), style, seed);
    few.dispatch(), few.combine();
    Counted many(world, {8, 1, 0}, ++seed);
    many.exchange();
    many.use(layout == twRankMajor ? twFlat : twGrouped);
    few.renew(seed + 100);
    few.dispatch(), few.combine();
  }
}

// Rows that high throughput leaves out, of the same routing, are there in low latency, before and after.
TEST(Modes, LowLatencyDropsNothing) {
  twGroupConfig_t config = both_modes(4, 4);
  config.max_recv_tokens = 2;
  config.overflow = twOverflowDrop;
  World world(3, config);
  Style style;
  style.bound = 4;
  Exchange exchange(world, make_traffic(config, {4, 4, 4}, 9), style, 1);
  exchange.dispatch(), exchange.combine();
  count(world, exchange);
  exchange.renew(2);
  exchange.dispatch(), exchange.combine();
  Counted counted(world, {4, 4, 4}, 9);
  counted.exchange();
  counted.use(twFlat);
}

// Also where a low-latency call has the bound that is compared in high throughput.
TEST(Modes, RanksThatDifferAreTold) {
  World world(2, both_modes(4, 4));
  Style style;
  style.bound = 4;
  Exchange few(world, make_traffic(world.config, {4, 4}, 1), style, 1);
  Counted many(world, {4, 4}, 1);
  many.exchange();
  EXPECT_TW(twSuccess, few[0].dispatch(true));
  std::vector<int32_t> tokens(8);
  twDispatchInput_t input = TW_DISPATCH_INPUT_INIT;
  input.send_only = 1;
  input.payloads[0] = tensor(tokens.data(), twInt32, {4, 2});
  twDispatchOutput_t output = TW_DISPATCH_OUTPUT_INIT;
  output.layout = twFlat;
  EXPECT_TW(twSuccess, twDispatch(world[1], many.handles[1], &input, &output));
  for (const int rank : {0, 1}) {
    const twHandle_t handle = rank == 0 ? few[0].handle : many.handles[1];
    EXPECT_TW(twBoundMismatch, twComplete(world[rank], handle, nullptr));
    EXPECT_TRUE(
        says("differ in the group, the layer, its map, the counting, the mode or the types of rows of twDispatch"));
    EXPECT_TW(twSuccess, twHandleRelease(handle));
  }
  many.use(twGrouped);
  few.renew(2);
  few.dispatch(), few.combine();
}

TEST(Modes, ACombineIsAsItsDispatch) {
  World world(1, both_modes(4, 2));
  Style style;
  style.bound = 2;
  Exchange few(world, make_traffic(world.config, {2}, 1), style, 1);
  few.dispatch();
  std::vector<float> rows(64);
  twCombineInput_t input = TW_COMBINE_INPUT_INIT;
  input.layout = twFlat;
  input.rows = tensor(rows.data(), twFloat32, {2, 1});
  twCombineOutput_t output = TW_COMBINE_OUTPUT_INIT;
  output.tokens = tensor(rows.data() + 32, twFloat32, {2, 1});
  EXPECT_TW(twInvalidArgument, twCombine(world[0], few[0].handle, &input, &output));
  EXPECT_TRUE(
      says("after a dispatch of low latency it must be twRankMajor (0), twExpertMajor (1) or twGroupedByBound (4)"));
  EXPECT_TW(twSuccess, twHandleRelease(few[0].handle));
}

TEST(Modes, TheConfigurationIsChecked) {
  twWindowBytes_t bytes{};
  bytes.size = sizeof bytes;
  for (const auto& [mode, most, sentence] : {std::tuple(twAutomatic, 9, "it must be from 1 to 8"),
                                             {twAutomatic, -1, "it must be from 1 to 8"},
                                             {twLowLatency, 1, "only twAutomatic (2) has it, elsewhere it must be 0"},
                                             {twHighThroughput, 4, "only twAutomatic (2) has it"}}) {
    twGroupConfig_t config = both_modes(8, most);
    config.mode = mode;
    EXPECT_TW(twInvalidArgument, twGroupWindowBytes(&config, 2, &bytes));
    EXPECT_TRUE(says("config.low_latency_tokens is")) << most;
    EXPECT_TRUE(says(sentence)) << most;
  }
  for (const auto& [most, want] : {std::pair(0, 8), {8, 8}, {3, 3}}) {
    World world(1, both_modes(8, most));
    twGroupInfo_t info{};
    info.size = sizeof info;
    ASSERT_TW(twSuccess, twGroupInfo(world[0], &info));
    EXPECT_EQ(info.low_latency_tokens, want);
  }
}

}  // namespace
}  // namespace tw::test
