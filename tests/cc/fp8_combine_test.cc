// Rows that return as fp8: values and scales against twQuantizeFp8 and plain arithmetic, what the C API refuses, and
// what ranks that differ hear. tests/py has the behaviour of the whole (test_fp8_combine.py).
#include <cmath>
#include <cstddef>
#include <limits>

#include "harness.h"

namespace tw::test {
namespace {

constexpr int kTopK = 3;
constexpr int64_t kWidth = 200;  // two blocks, the last one shorter
constexpr int32_t kBound = 5;
constexpr int kRanks = 3;

twGroupConfig_t config_of_rows() { return make_config(7, kTopK, kBound, kWidth); }

float value_of(uint8_t code) {
  const int exponent = code >> 3 & 15;
  const int fraction = code & 7;
  if ((code & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                        : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

// Rows as their owners take them: quantised by the library's own function, and multiplied with their scales.
std::vector<float> in_blocks(const std::vector<float>& rows) {
  const auto count = static_cast<int64_t>(rows.size()) / kWidth;
  std::vector<uint8_t> values(rows.size());
  std::vector<float> scales(2 * count);
  const twTensor_t from = tensor(const_cast<float*>(rows.data()), twFloat32, {count, kWidth});
  const twTensor_t to = tensor(values.data(), twFloat8e4m3, {count, kWidth});
  const twTensor_t by = tensor(scales.data(), twFloat32, {count, 2});
  EXPECT_TW(twSuccess, twQuantizeFp8(&from, nullptr, &to, &by, 0, -1, nullptr));
  std::vector<float> taken(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    taken[i] = value_of(values[i]) * scales[i / kWidth * 2 + i % kWidth / 128];
  }
  return taken;
}

// The same by one scale: the nearest of all values, the even one of two.
std::vector<float> by_one(const std::vector<float>& rows, float scale) {
  std::vector<float> taken(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const float wanted = std::fabs(rows[i] / scale);
    int best = 0;
    for (int code = 1; code < 0x7f; ++code) {
      const float error = std::fabs(value_of(static_cast<uint8_t>(code)) - wanted);
      const float least = std::fabs(value_of(static_cast<uint8_t>(best)) - wanted);
      if (error < least || (error == least && code % 2 == 0)) best = code;
    }
    if (!std::isfinite(rows[i])) best = 0x7f;
    taken[i] = std::copysign(value_of(static_cast<uint8_t>(best)), rows[i]) * scale;
  }
  return taken;
}

void name(Exchange& exchange, twScales_t scales, float scale) {
  for (int rank = 0; rank < exchange.size(); ++rank) {
    exchange[rank].rows.wire_dtype = twFloat8e4m3;
    exchange[rank].rows.elements = kWidth;
    exchange[rank].rows.wire_scales = scales;
    exchange[rank].rows.wire_scale = scale;
  }
}
void name_none(Exchange& exchange, int rank) {
  exchange[rank].rows.wire_dtype = twDtypeNone;
  exchange[rank].rows.elements = 0;
  exchange[rank].rows.wire_scales = twScalesNone;
  exchange[rank].rows.wire_scale = 0;
}

// What each rank returns, [N, b, H]: other numbers for each of its elements.
using Rows = std::vector<std::vector<float>>;
Rows make_rows(uint64_t seed) {
  Rows rows(kRanks, std::vector<float>(kRanks * kBound * kWidth));
  for (uint64_t rank = 0; rank < kRanks; ++rank) {
    for (uint64_t i = 0; i < rows[rank].size(); ++i) {
      rows[rank][i] = static_cast<float>(mix({seed, rank, i}) % (1 << 20)) / (1 << 17) - 4.0f;
    }
  }
  return rows;
}

// What an owner must get, by the routing alone. taken: of each rank, its rows as their owners take them.
std::vector<float> wanted(const World& world, const Traffic& traffic, const std::vector<std::vector<float>>& taken,
                          int owner) {
  std::vector<float> sums;
  std::vector<int> sent(world.size(), 0);
  for (int token = 0; token < traffic.tokens[owner]; ++token) {
    std::vector<float> sum(kWidth, 0.0f);
    bool any = false;
    for (int rank = 0; rank < world.size(); ++rank) {
      bool goes = false;
      for (int k = 0; k < kTopK; ++k) goes |= world.homes.here(traffic.ids[owner][token * kTopK + k], rank);
      if (!goes) continue;
      const float* const row = taken[rank].data() + (owner * kBound + sent[rank]++) * kWidth;
      for (int64_t i = 0; i < kWidth; ++i) sum[i] = any ? sum[i] + row[i] : row[i];
      any = true;
    }
    sums.insert(sums.end(), sum.begin(), sum.end());
  }
  return sums;
}

// Combines such rows, and compares every bit; a NaN equals any NaN.
template <class Taken>
void expect_sums(const World& world, uint32_t round, Rows rows, twScales_t scales, float scale, Taken&& taken_of) {
  const Traffic traffic = make_traffic(world.config, {5, 4, static_cast<int>(round % 2)}, round);
  Exchange exchange(world, traffic, {}, round);
  exchange.dispatch();
  Rows taken;
  Rows sums;
  for (int rank = 0; rank < kRanks; ++rank) {
    taken.push_back(taken_of(rows[rank]));
    sums.emplace_back(traffic.tokens[rank] * kWidth + 1, -1.0f);
    twCombineInput_t input = TW_COMBINE_INPUT_INIT;
    input.rows = tensor(rows[rank].data(), twFloat32, {kRanks, kBound, kWidth});
    input.send_only = 1;
    input.wire_dtype = twFloat8e4m3;
    input.elements = kWidth;
    input.wire_scales = scales;
    input.wire_scale = scale;
    twCombineOutput_t output = TW_COMBINE_OUTPUT_INIT;
    output.tokens = tensor(sums[rank].data(), twFloat32, {traffic.tokens[rank], kWidth});
    ASSERT_TW(twSuccess, twCombine(world[rank], exchange[rank].handle, &input, &output));
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_TW(twSuccess, exchange[rank].complete());
    const std::vector<float> want = wanted(world, traffic, taken, rank);
    for (size_t i = 0; i < want.size(); ++i) {
      const float got = sums[rank][i];
      const bool same = std::isnan(want[i]) ? std::isnan(got) : got == want[i];
      ASSERT_TRUE(same) << "rank " << rank << ", element " << i << ": " << got << ", not " << want[i];
    }
    EXPECT_EQ(sums[rank].back(), -1.0f);
  }
}

TEST(Fp8Combine, BlocksHaveScalesOfTheirOwn) {
  World world(kRanks, config_of_rows());
  for (uint32_t round = 1; round <= 3; ++round) {
    Rows rows = make_rows(round);
    for (std::vector<float>& each : rows) {
      for (size_t i = 0; i < each.size(); ++i) each[i] *= i % kWidth < 128 ? 1.0f : 1000.0f;
    }
    expect_sums(world, round, rows, twScalesBlocks, 0, in_blocks);
  }
}

TEST(Fp8Combine, OneScaleSaturates) {
  World world(kRanks, config_of_rows());
  constexpr float kScale = 0.0078125f;
  Rows rows = make_rows(1);
  for (std::vector<float>& each : rows) {
    for (size_t i = 0; i < each.size(); i += 7) each[i] = i % 2 == 0 ? 3e38f : -4.0f;
    for (size_t i = 3; i < each.size(); i += 67) each[i] = std::numeric_limits<float>::infinity();
  }
  expect_sums(world, 1, rows, twScalesTensor, kScale, [](const auto& each) { return by_one(each, kScale); });
}

TEST(Fp8Combine, RanksThatDifferAreTold) {
  World world(2, config_of_rows());
  struct Other {
    twDtype_t dtype;
    twScales_t scales;
    float scale;
  };
  uint32_t round = 0;
  for (const Other& other : {Other{twFloat8e4m3, twScalesTensor, 0.25f},
                             {twFloat8e4m3, twScalesBlocks, 0},
                             {twDtypeNone, twScalesNone, 0}}) {
    ++round;
    Exchange exchange(world, make_traffic(world.config, {5, 4}, round), {}, round);
    exchange.dispatch();
    name(exchange, twScalesTensor, 0.5f);
    exchange[1].rows.wire_dtype = other.dtype;
    exchange[1].rows.elements = other.dtype == twDtypeNone ? 0 : kWidth;
    exchange[1].rows.wire_scales = other.scales;
    exchange[1].rows.wire_scale = other.scale;
    for (int rank = 0; rank < 2; ++rank) EXPECT_TW(twSuccess, exchange[rank].combine(true));
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_TW(twBoundMismatch, exchange[rank].complete());
      EXPECT_TRUE(says("differ in the group or the rows of twCombine"));
    }
    for (int rank = 0; rank < 2; ++rank) name_none(exchange, rank);
    exchange.combine();
  }
}

TEST(Fp8Combine, RefusedScalesAreToldAtOnce) {
  World world(2, config_of_rows());
  const float infinite = std::numeric_limits<float>::infinity();
  struct Bad {
    twDtype_t dtype;
    int64_t elements;
    twScales_t scales;
    float scale;
    const char* what;
  };
  uint32_t round = 0;
  for (const Bad& each : {
           Bad{twFloat8e4m3, kWidth, twScalesNone, 0,
               "input.wire_scales is 0; with rows of float8_e4m3 (13) it must be"},
           {twFloat8e4m3, kWidth, static_cast<twScales_t>(3), 0, "input.wire_scales is 3"},
           {twFloat8e4m3, kWidth, twScalesTensor, 0, "input.wire_scale is 0; it must be from 2^-116 to 2^116"},
           {twFloat8e4m3, kWidth, twScalesTensor, -1, "input.wire_scale is -1"},
           {twFloat8e4m3, kWidth, twScalesTensor, infinite, "input.wire_scale is inf"},
           {twFloat8e4m3, kWidth, twScalesTensor, std::nanf(""), "it must be from 2^-116 to 2^116"},
           {twFloat8e4m3, kWidth, twScalesBlocks, 2, "input.wire_scale is 2; with a scale for each block it must be 0"},
           {twFloat8e4m3, 400, twScalesBlocks, 0,
            "input.elements is 400, which takes rows of 416 bytes; config.combine_room has room for 400"},
           {twFloat8e4m3, 401, twScalesTensor, 1, "input.elements is 401; it must be from 1 to 400"},
           {twBfloat16, kWidth, twScalesBlocks, 0, "input.wire_scales is 1; rows of bfloat16 (10) have no scales"},
           {twFloat16, kWidth, twScalesNone, 2, "input.wire_scale is 2; rows of float16 (9) have no scale"},
           {twDtypeNone, 0, twScalesTensor, 1, "input.wire_scale is 1; rows of bfloat16 (10) have no scale"},
           {twFloat8e5m2, kWidth, twScalesBlocks, 0, "it must be float32, bfloat16, float16 or float8_e4m3"},
       }) {
    ++round;
    Exchange exchange(world, make_traffic(world.config, {5, 4}, round), {}, round);
    exchange.dispatch();
    exchange[1].rows.wire_dtype = each.dtype;
    exchange[1].rows.elements = each.elements;
    exchange[1].rows.wire_scales = each.scales;
    exchange[1].rows.wire_scale = each.scale;
    twCombineInput_t combined = exchange[1].rows;
    twDispatchInput_t dispatched = TW_DISPATCH_INPUT_INIT;
    EXPECT_TW(twInvalidArgument, twGroupCheckRows(world[1], &dispatched, &combined));
    EXPECT_TW(twSuccess, exchange[0].combine(true));
    EXPECT_TW(twInvalidArgument, exchange[1].combine(true));
    EXPECT_TRUE(says(each.what));
    EXPECT_TW(twPeerRefused, exchange[0].complete());
    name_none(exchange, 1);
    exchange.combine();
  }
}

// An older caller's struct ends before the scales.
TEST(Fp8Combine, OlderCallersHaveNone) {
  World world(2, config_of_rows());
  Exchange exchange(world, make_traffic(world.config, {5, 4}, 1), {}, 1);
  exchange.dispatch();
  exchange[0].rows.wire_scales = static_cast<twScales_t>(0x5a5a);
  exchange[0].rows.size = offsetof(twCombineInput_t, wire_scales);
  exchange.combine();
}

}  // namespace
}  // namespace tw::test
