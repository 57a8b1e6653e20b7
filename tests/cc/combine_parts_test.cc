// Combines in parts: the bank of a view is read in all of them, and every rank makes the same steps. tests/py has the
// behaviour of the whole (test_parts.py).
#include <cstring>
#include <set>

#include "core/group.h"
#include "harness.h"

namespace tw::test {
namespace {

constexpr int64_t kPartElements = 8;

uint16_t bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}

// Small whole numbers, so that sums are exact; another one for each token.
float value_of(int rank, int token) { return static_cast<float>(1 + (rank * 13 + token * 3) % 40); }

twGroupConfig_t parted(int32_t max_tokens, int32_t inbox_tokens) {
  twGroupConfig_t config = make_config(6, 2, max_tokens, kPartElements);
  config.mode = twHighThroughput;
  config.inbox_tokens = inbox_tokens;
  return config;
}

// Dispatches, and combines the view of the window itself; gives how many sums of a rank are wrong. `bound`: 0: none.
int pair(const World& world, const Traffic& traffic, int rank, int32_t bound, bool release) {
  const int tokens = traffic.tokens[rank];
  const twTensor_t ids = tensor(const_cast<int32_t*>(traffic.ids[rank].data()), twInt32, {tokens, world.config.top_k});
  twHandle_t handle = nullptr;
  EXPECT_TW(twSuccess, twHandleCreate(&handle, world[rank], &ids, nullptr, nullptr));
  const twCountsInput_t counts = TW_COUNTS_INPUT_INIT;
  EXPECT_TW(twSuccess, twExchangeCounts(world[rank], handle, &counts));
  std::vector<uint16_t> rows(tokens * kPartElements + 1);
  for (int i = 0; i < tokens * kPartElements; ++i)
    rows[i] = bfloat16(value_of(rank, static_cast<int>(i / kPartElements)));
  twDispatchInput_t input = TW_DISPATCH_INPUT_INIT;
  input.bound = bound;
  input.payloads[0] = tensor(rows.data(), twBfloat16, {tokens, kPartElements});
  twDispatchOutput_t received = TW_DISPATCH_OUTPUT_INIT;
  received.layout = twFlat;
  EXPECT_TW(twSuccess, twDispatch(world[rank], handle, &input, &received));
  if (release) EXPECT_TW(twSuccess, twHandleRelease(handle));  // makes no step, so the view lives on
  std::vector<float> sums(tokens * kPartElements + 1, -1.0f);
  twCombineInput_t back = TW_COMBINE_INPUT_INIT;
  back.layout = twFlat;
  back.rows = received.payloads[0];
  twCombineOutput_t output = TW_COMBINE_OUTPUT_INIT;
  output.tokens = tensor(sums.data(), twFloat32, {tokens, kPartElements});
  EXPECT_TW(twSuccess, twCombine(world[rank], handle, &back, &output));
  int wrong = 0;
  for (int i = 0; i < tokens * kPartElements; ++i) {
    const int token = static_cast<int>(i / kPartElements);
    std::set<int> ranks;
    for (int k = 0; k < world.config.top_k; ++k) {
      const int32_t id = traffic.ids[rank][token * world.config.top_k + k];
      for (int to = 0; to < world.size(); ++to) {
        if (world.homes.here(id, to)) ranks.insert(to);
      }
    }
    wrong += sums[i] == value_of(rank, token) * static_cast<float>(ranks.size()) ? 0 : 1;
  }
  EXPECT_TW(twSuccess, twHandleDestroy(handle));
  return wrong;
}

// The next part's rows go to the bank of the part before, not to that of the view, which this rank and its peers read.
TEST(CombineParts, TheViewOutlivesAllParts) {
  World world(3, parted(40, 7));
  for (uint32_t seed = 1; seed <= 4; ++seed) {
    const Traffic traffic = make_traffic(world.config, {40, 23, 0}, seed);
    on_all_ranks(3, [&](int rank) { EXPECT_EQ(pair(world, traffic, rank, 0, seed == 3), 0) << "rank " << rank; });
  }
}

TEST(CombineParts, ABoundSaysHowMany) {
  World world(2, parted(32, 4));
  const Traffic few = make_traffic(world.config, {3, 4}, 1);
  for (const int32_t bound : {4, 5, 0}) {
    const uint32_t before = world[0]->channels[0].step;
    on_all_ranks(2, [&](int rank) { EXPECT_EQ(pair(world, few, rank, bound, false), 0) << "rank " << rank; });
    const int parts = bound == 4 ? 1 : bound == 5 ? 2 : 8;
    EXPECT_EQ(world[0]->channels[0].step - before, 2 + 1 + 2 * (parts - 1)) << "counts, dispatch, parts, skips";
  }
}

// The rows may be a view whose lane is released, and that the combine takes again.
TEST(CombineParts, AReleasedViewOutlivesAllParts) {
  World world(3, parted(40, 7));
  for (uint32_t seed = 1; seed <= 4; ++seed) {
    const Traffic traffic = make_traffic(world.config, {40, 40, 33}, seed);
    on_all_ranks(3, [&](int rank) { EXPECT_EQ(pair(world, traffic, rank, 0, true), 0) << "rank " << rank; });
  }
}

}  // namespace
}  // namespace tw::test
