// Dispatch and combine of local ranks, staged in one thread, against the oracle: every layout, weighting and type,
// and the corners that break exchanges.
#include <cstring>

#include "harness.h"

namespace tw::test {
namespace {

// One exchange, once.
void run(const twGroupConfig_t& config, const std::vector<int>& tokens, const Style& style, uint32_t seed) {
  World world(static_cast<int>(tokens.size()), config);
  Exchange exchange(world, make_traffic(config, tokens, seed), style, seed);
  exchange.dispatch();
  exchange.combine();
}

TEST(Exchange, LayoutsWeightingsTypes) {
  const twDtype_t types[] = {twFloat32, twBfloat16, twFloat16};
  uint32_t seed = 0;
  for (const twDtype_t wire : types) {
    twGroupConfig_t config = make_config(8, 3, 6, 5);
    config.combine_dtype = wire;
    World world(3, config);
    for (const twLayout_t layout : {twRankMajor, twExpertMajor}) {
      for (const twWeighting_t weighting : {twWeightNone, twWeightTopk}) {
        for (const twDtype_t rows : types) {
          for (const twDtype_t out : types) {
            SCOPED_TRACE(::testing::Message() << "wire " << wire << ", layout " << layout << ", weighting " << weighting
                                              << ", rows " << rows << ", out " << out);
            const Style style{layout, weighting, rows, out, 0, -1, ++seed % 2 == 0, false};
            Exchange exchange(world, make_traffic(config, {6, 2, 5}, seed), style, seed);
            exchange.dispatch();
            exchange.combine();
            if (::testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// The sums may go where the rows were: rows that were not sent yet, or not summed, are not lost.
TEST(Exchange, SumsOverTheirRows) {
  for (const int ranks : {1, 2}) {
    const twGroupConfig_t config = make_config(2, 1, 16);
    World world(ranks, config);
    Traffic traffic;
    for (int rank = 0; rank < ranks; ++rank) {
      traffic.tokens.push_back(4);
      traffic.ids.push_back({-1, -1, 1, 0});  // out row 0 is written first, and row 0 is the third token's
      traffic.weights.emplace_back(4, 1.0f);
    }
    for (const twDtype_t out : {twBfloat16, twFloat32}) {
      Exchange exchange(world, traffic, {twRankMajor, twWeightNone, twBfloat16, out}, 5);
      exchange.dispatch();
      exchange.combine();
      const size_t bytes = 4 * 8 * (out == twFloat32 ? 4 : 2);
      for (const size_t shift : {0, 4, 16, 32}) {
        SCOPED_TRACE(::testing::Message() << ranks << " ranks, out " << out << ", " << shift << " bytes in");
        std::vector<std::vector<uint8_t>> want;
        for (int rank = 0; rank < ranks; ++rank) {
          Side& side = exchange[rank];
          const auto* const sums = static_cast<const uint8_t*>(side.sums.tokens.data);
          want.emplace_back(sums, sums + bytes);
        }
        std::vector<void*> own;
        for (int rank = 0; rank < ranks; ++rank) {
          Side& side = exchange[rank];
          own.push_back(side.sums.tokens.data);
          side.sums.tokens.data = static_cast<uint8_t*>(side.rows.rows.data) + shift;
          ASSERT_TW(twSuccess, side.combine(true));
        }
        for (int rank = 0; rank < ranks; ++rank) {
          Side& side = exchange[rank];
          ASSERT_TW(twSuccess, side.complete());
          EXPECT_EQ(std::memcmp(side.sums.tokens.data, want[rank].data(), bytes), 0) << "rank " << rank;
          side.sums.tokens.data = own[rank];
          ASSERT_TW(twSuccess, side.combine(true));  // the sums' own place holds them again
        }
        for (int rank = 0; rank < ranks; ++rank) ASSERT_TW(twSuccess, exchange[rank].complete());
      }
    }
  }
}

TEST(Exchange, RanksAndUnevenTokens) {
  for (int ranks = 1; ranks <= 5; ++ranks) {
    std::vector<int> tokens;
    for (int rank = 0; rank < ranks; ++rank) tokens.push_back(rank * 3 % 8);
    for (const twLayout_t layout : {twRankMajor, twExpertMajor}) {
      SCOPED_TRACE(ranks);
      run(make_config(11, 4, 7), tokens, {layout, twWeightTopk}, ranks);  // 11 is divisible by none but 1
    }
  }
}

TEST(Exchange, NoTokensOnSomeOrAllRanks) {
  const std::vector<std::vector<int>> cases = {{0, 4, 0}, {0, 0, 0}, {4, 0, 0}, {0, 0, 1}};
  for (const auto& tokens : cases) {
    for (const twLayout_t layout : {twRankMajor, twExpertMajor}) run(make_config(6, 2, 4), tokens, {layout}, 3);
  }
}

TEST(Exchange, TokensThatGoNowhere) {
  const twGroupConfig_t config = make_config(6, 2, 4);
  World world(2, config);
  Traffic traffic = make_traffic(config, {4, 4}, 1);
  std::fill(traffic.ids[0].begin(), traffic.ids[0].end(), -1);
  Exchange exchange(world, traffic, {}, 1);
  exchange.dispatch();
  exchange.combine();  // zeros for rank 0: the oracle's empty sum
}

// Fewer experts than ranks: some hold none, and must still take part.
TEST(Exchange, RanksWithoutExperts) {
  for (const twLayout_t layout : {twRankMajor, twExpertMajor}) {
    run(make_config(2, 2, 3), {3, 3, 3, 1}, {layout, twWeightTopk}, 8);
    run(make_config(2, 2, 3), {3, 3, 3, 1}, {layout, twWeightTopk, twFloat32, twFloat32, 0, -1, true}, 8);
  }
}

TEST(Exchange, ExplicitPlacement) {
  const std::vector<int32_t> rank = {2, 0, 2, 2, 0, 3, 2};
  const std::vector<int32_t> slot = {3, 1, 0, 2, 0, 0, 1};  // rank 1 holds none
  twGroupConfig_t config = make_config(7, 3, 5);
  config.expert_rank = rank.data();
  config.expert_slot = slot.data();
  for (const twLayout_t layout : {twRankMajor, twExpertMajor}) {
    run(config, {5, 5, 4, 5}, {layout, twWeightTopk, twFloat32, twFloat32, 0, -1, true}, 4);
  }
}

TEST(Exchange, EightPayloadsOfOddSizes) {
  twGroupConfig_t config = make_config(6, 2, 5, 7);
  config.num_payloads = 8;
  const twPayload_t payloads[8] = {{twUint8, 1},    {twInt8, 13}, {twFloat8e4m3, 257}, {twInt64, 3},
                                   {twBfloat16, 5}, {twBool, 31}, {twFloat64, 1},      {twUint16, 1001}};
  std::copy(payloads, payloads + 8, config.payloads);
  for (const twLayout_t layout : {twRankMajor, twExpertMajor}) {
    for (const bool own : {false, true}) {
      run(config, {5, 3, 4}, {layout, twWeightNone, twFloat32, twFloat32, 0, -1, own}, 5);
    }
  }
}

TEST(Exchange, TopK64) {
  for (const twLayout_t layout : {twRankMajor, twExpertMajor}) {
    run(make_config(64, 64, 3), {3, 2, 3}, {layout, twWeightTopk}, 6);
    run(make_config(100, 64, 3), {3, 2, 3, 1, 1, 2, 3}, {layout, twWeightTopk}, 6);
  }
}

TEST(Exchange, IdsShownGlobalOrLocalWideOrNarrow) {
  for (const twIdSpace_t space : {twIdLocal, twIdGlobal}) {
    for (const twDtype_t dtype : {twInt32, twInt64}) {
      for (const int32_t invalid : {-1, -5, 1000}) {
        twGroupConfig_t config = make_config(7, 3, 4);
        config.id_space = space;
        config.id_dtype = dtype;
        config.invalid_id = invalid;
        run(config, {4, 1}, {twRankMajor, twWeightNone, twFloat32, twFloat32, 0, -1, false}, 7);
        run(config, {4, 1}, {twExpertMajor, twWeightNone, twFloat32, twFloat32, 0, -1, true}, 7);
      }
    }
  }
}

// The combine's rows may be the dispatch's view itself: no copy on either side.
TEST(Exchange, InPlaceFromTheView) {
  const twGroupConfig_t config = make_config(8, 3, 6, 16);
  World world(3, config);
  for (uint32_t step = 0; step < 6; ++step) {
    const Style style{twRankMajor, step % 2 ? twWeightTopk : twWeightNone, twBfloat16, twBfloat16, 0, -1, false, true};
    Exchange exchange(world, make_traffic(config, {6, 5, 6}, step), style, step);
    exchange.dispatch();
    exchange.combine();
  }
}

// S10 at work: every call another bound, the outputs sized by it.
TEST(Exchange, BoundsVaryBetweenCalls) {
  const twGroupConfig_t config = make_config(8, 3, 9);
  World world(3, config);
  for (uint32_t step = 0; step < 18; ++step) {
    const int bound = 1 + static_cast<int>(step * 5 % 9);
    const std::vector<int> tokens = {bound, static_cast<int>(step % bound), bound - 1};
    const Style style{
        step % 3 ? twRankMajor : twExpertMajor, twWeightTopk, twFloat32, twFloat32, bound, -1, step % 2 == 0};
    Exchange exchange(world, make_traffic(config, tokens, step), style, step);
    exchange.dispatch();
    exchange.combine();
  }
}

TEST(Exchange, InputsMayBeStrided) {
  const twGroupConfig_t config = make_config(6, 2, 4);
  World world(2, config);
  Exchange exchange(world, make_traffic(config, {4, 4}, 2), {}, 2);
  std::vector<std::vector<uint8_t>> wide(2);
  for (int rank = 0; rank < 2; ++rank) {  // rows backwards, with gaps
    twTensor_t& rows = exchange[rank].input.payloads[0];
    wide[rank].resize(4 * 40);
    for (int t = 0; t < 4; ++t) {
      std::memcpy(wide[rank].data() + (3 - t) * 40, static_cast<uint8_t*>(rows.data) + t * 16, 16);
    }
    rows.data = wide[rank].data() + 3 * 40;
    rows.stride[0] = -20;
  }
  exchange.dispatch();
  exchange.combine();
}

}  // namespace
}  // namespace tw::test
