// e4m3 against a search in the table of its values, scales against double, whole calls against both, and refusals.
#include "quantize/fp8.h"

#include <array>
#include <cstring>

#include "harness.h"

namespace tw::quantize {
namespace {

using test::says;
using test::tensor;

// The value of a code without its sign, from the definition: 4 bits of exponent with bias 7, 3 of fraction.
double decoded(int code) {
  const int exponent = code >> 3;
  const int fraction = code & 7;
  return exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
}

// The nearest code, the even one of two that are as near; past the middle to what would be 480, NaN.
int nearest(float value) {
  const int sign = std::signbit(value) ? 0x80 : 0;
  const double size = std::fabs(static_cast<double>(value));
  if (!(size <= 464)) return sign | 0x7f;
  int best = 0;
  for (int code = 1; code < 0x7f; ++code) {
    const double nearer = std::fabs(decoded(best) - size) - std::fabs(decoded(code) - size);
    if (nearer > 0 || (nearer == 0 && code % 2 == 0)) best = code;
  }
  return sign | best;
}

void expect_e4m3(uint32_t bits) {
  const auto value = std::bit_cast<float>(bits);
  ASSERT_EQ(int{e4m3(value)}, nearest(value)) << std::hex << bits;
}

TEST(Quantize, E4m3OfAllHalves) {
  for (uint32_t high = 0; high <= 0xffff; ++high) {
    ASSERT_NO_FATAL_FAILURE(expect_e4m3(high << 16));  // every bfloat16
    ASSERT_NO_FATAL_FAILURE(expect_e4m3(high << 16 | 0x8000u));
    ASSERT_NO_FATAL_FAILURE(
        expect_e4m3((high & 0x8000u) << 16 | (((high & 0x7fffu) << 13) + (112u << 23))));  // float16
  }
}

TEST(Quantize, E4m3WhereRoundingTurns) {
  for (int code = 0; code < 0x7f; ++code) {
    const double next = code == 0x7e ? 480 : decoded(code + 1);
    for (const double exact : {decoded(code), (decoded(code) + next) / 2}) {
      const auto bits = std::bit_cast<uint32_t>(static_cast<float>(exact));
      for (const uint32_t near : {bits, bits + 1, bits - (bits > 0)}) {
        ASSERT_NO_FATAL_FAILURE(expect_e4m3(near));
        ASSERT_NO_FATAL_FAILURE(expect_e4m3(near | 0x80000000u));
      }
    }
  }
  for (const uint32_t special : {0x7f800000u, 0xff800000u, 0x7f800001u, 0xffffffffu, 0x7f7fffffu, 1u, 0x80000001u}) {
    ASSERT_NO_FATAL_FAILURE(expect_e4m3(special));
  }
  for (uint32_t i = 0; i < 100000; ++i) {
    // Exponents of e4m3 and a few beside them: others are all 0 or all NaN.
    const uint32_t random = test::mix({i});
    ASSERT_NO_FATAL_FAILURE(expect_e4m3((random & 0x807fffffu) | (114 + (random >> 23 & 0xff) % 24) << 23));
  }
}

TEST(Quantize, Scales) {
  for (const bool power_of_two : {false, true}) {
    EXPECT_EQ(scale_of(0, power_of_two), 1.0f);
    EXPECT_EQ(std::bit_cast<uint32_t>(scale_of(0x7f800000u, power_of_two)), 0x7fc00000u);
    EXPECT_EQ(std::bit_cast<uint32_t>(scale_of(0x7fffffffu, power_of_two)), 0x7fc00000u);
    EXPECT_EQ(scale_of(1, power_of_two), kLeastScale);
    EXPECT_EQ(scale_of(std::bit_cast<uint32_t>(448.0f), power_of_two), 1.0f);
    EXPECT_EQ(scale_of(std::bit_cast<uint32_t>(448.0f * kLeastScale), power_of_two), kLeastScale);
  }
}

TEST(Quantize, PowersOfTwoAreTheSmallestThatAreEnough) {
  const auto check = [](uint32_t bits) {
    const double exact = static_cast<double>(std::bit_cast<float>(bits)) / 448;
    const float scale = scale_of(bits, true);
    int exponent = 0;
    ASSERT_EQ(std::frexp(scale, &exponent), 0.5f) << bits;
    ASSERT_GE(scale, exact) << bits;
    ASSERT_TRUE(scale == kLeastScale || scale / 2 < exact) << bits;
  };
  for (uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (const uint32_t fraction : {0u, 1u, 0x5fffffu, 0x600000u, 0x600001u, 0x7fffffu}) {
      if (exponent + fraction == 0) continue;
      ASSERT_NO_FATAL_FAILURE(check(exponent << 23 | fraction));
    }
  }
  for (uint32_t i = 0; i < 100000; ++i) {
    const uint32_t bits = test::mix({i}) & kMagnitude;
    if (bits >= kInfinity || bits == 0) continue;
    ASSERT_NO_FATAL_FAILURE(check(bits));
  }
}

// A kernel may divide by a power of two by multiplying with its reciprocal, and no quotient may leave the range in
// which the device's instruction, which saturates, and e4m3() agree.
TEST(Quantize, QuotientsStayInRange) {
  for (uint32_t i = 0; i < 300000; ++i) {
    const uint32_t largest = (test::mix({i, 1}) & kMagnitude) % kInfinity;
    const uint32_t magnitude = i % 3 == 0 ? largest : largest > 0 ? test::mix({i, 2}) % largest : 0;
    const auto x = std::bit_cast<float>(magnitude);
    for (const bool power_of_two : {false, true}) {
      const float scale = scale_of(largest, power_of_two);
      ASSERT_LE(divide(x, scale), 448.0f * (1 + 0x1p-22f)) << largest;
      if (power_of_two) {
        ASSERT_EQ(x * divide(1.0f, scale), divide(x, scale)) << largest << ' ' << magnitude;
      }
    }
  }
}

double value_at(twDtype_t dtype, const std::vector<uint8_t>& memory, int64_t at) {
  uint16_t half = 0;
  float single = 0;
  if (dtype == twFloat32) return std::memcpy(&single, memory.data() + 4 * at, 4), single;
  std::memcpy(&half, memory.data() + 2 * at, 2);
  return test::decode(test::format_of(dtype), half);
}

// A call on rows [tokens, elements] of random bits with a gap between rows, every value compared.
void expect_call(twDtype_t dtype, int64_t tokens, int64_t elements, bool power_of_two, bool backwards) {
  const int64_t stride = elements + 3;
  const int64_t blocks = (elements + 127) / 128;
  std::vector<uint8_t> memory(static_cast<size_t>(4 * (tokens * stride + 1)));
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<uint8_t>(test::mix({i, 7}));
  std::vector<uint8_t> values(static_cast<size_t>(tokens * elements + 1), 0xaa);
  std::vector<float> scales(static_cast<size_t>(tokens * blocks + 1), -5.0f);
  twTensor_t rows = tensor(memory.data(), dtype, {tokens, elements});
  rows.stride[0] = backwards ? -stride : stride;
  const int64_t width = dtype == twFloat32 ? 4 : 2;
  if (backwards) rows.data = memory.data() + width * (tokens - 1) * stride;
  const twTensor_t to = tensor(values.data(), twFloat8e4m3, {tokens, elements});
  const twTensor_t by = tensor(scales.data(), twFloat32, {tokens, blocks});
  ASSERT_TW(twSuccess, twQuantizeFp8(&rows, nullptr, &to, &by, power_of_two, -1, nullptr));
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t row = (backwards ? tokens - 1 - t : t) * stride;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = block * 128;
      const int64_t last = std::min(first + 128, elements);
      double largest = 0;
      bool spoilt = false;
      for (int64_t i = first; i < last; ++i) {
        const double x = value_at(dtype, memory, row + i);
        spoilt |= !std::isfinite(x);
        largest = std::max(largest, std::fabs(x));
      }
      const float scale = scales[static_cast<size_t>(t * blocks + block)];
      const auto magnitude = std::bit_cast<uint32_t>(static_cast<float>(largest));
      ASSERT_EQ(std::bit_cast<uint32_t>(scale),
                spoilt ? 0x7fc00000u : std::bit_cast<uint32_t>(scale_of(magnitude, power_of_two)));
      for (int64_t i = first; i < last; ++i) {
        const auto x = static_cast<float>(value_at(dtype, memory, row + i));
        const int want = spoilt ? 0x7f : nearest(x / scale);
        ASSERT_EQ(int{values[static_cast<size_t>(t * elements + i)]}, want)
            << t << ' ' << i << ' ' << x << ' ' << scale;
      }
    }
  }
  EXPECT_EQ(values.back(), 0xaa);
  EXPECT_EQ(scales.back(), -5.0f);
}

TEST(Quantize, Calls) {
  for (const twDtype_t dtype : {twFloat32, twBfloat16, twFloat16}) {
    for (const int64_t elements : {1, 7, 127, 128, 129, 256, 391}) {
      for (const bool power_of_two : {false, true}) {
        ASSERT_NO_FATAL_FAILURE(expect_call(dtype, 3, elements, power_of_two, elements % 2 == 0));
      }
    }
  }
  ASSERT_NO_FATAL_FAILURE(expect_call(twBfloat16, 0, 128, false, false));
  ASSERT_NO_FATAL_FAILURE(expect_call(twBfloat16, 1, 1, false, false));
}

TEST(Quantize, SpecialBlocks) {
  const float inf = INFINITY;
  // zeros of both signs; one NaN; one infinity; the smallest subnormal; the largest finite
  std::vector<float> memory(5 * 128, 0.25f);
  std::fill_n(memory.begin(), 128, 0.0f);
  memory[1] = -0.0f;
  memory[128 + 77] = std::bit_cast<float>(0xff800001u);
  memory[256 + 127] = -inf;
  std::fill_n(memory.begin() + 384, 128, std::bit_cast<float>(1u));
  memory[512] = std::numeric_limits<float>::max();
  for (const int power_of_two : {0, 1}) {
    std::vector<uint8_t> values(memory.size());
    std::array<float, 5> scales{};
    const twTensor_t rows = tensor(memory.data(), twFloat32, {1, 640});
    const twTensor_t to = tensor(values.data(), twFloat8e4m3, {1, 640});
    const twTensor_t by = tensor(scales.data(), twFloat32, {1, 5});
    ASSERT_TW(twSuccess, twQuantizeFp8(&rows, nullptr, &to, &by, power_of_two, -1, nullptr));
    EXPECT_EQ(scales[0], 1.0f);
    EXPECT_EQ(values[0], 0);
    EXPECT_EQ(values[1], 0x80);
    for (int i = 128; i < 384; ++i) ASSERT_EQ(values[static_cast<size_t>(i)], 0x7f) << i;
    EXPECT_TRUE(std::isnan(scales[1]));
    EXPECT_TRUE(std::isnan(scales[2]));
    EXPECT_EQ(scales[3], kLeastScale);
    EXPECT_EQ(values[384], 0);
    EXPECT_EQ(values[512], power_of_two ? 0x78 : 0x7e);  // 256 * 2^120 (the input is a rounding below 2^128), or 448
    EXPECT_EQ(values[513], 0);
  }
}

TEST(Quantize, PackedScales) {
  std::vector<float> memory(2 * 640);
  for (size_t block = 0; block < 10; ++block) {
    memory[128 * block + 5] = std::ldexp(-448.0f, static_cast<int>(block));
    if (block == 3) memory[128 * block] = NAN;
  }
  std::fill_n(memory.begin() + 7 * 128, 128, 0.0f);
  const twTensor_t rows = tensor(memory.data(), twFloat32, {2, 640});
  std::vector<uint8_t> values(memory.size());
  const twTensor_t to = tensor(values.data(), twFloat8e4m3, {2, 640});
  std::array<int32_t, 8> words{};
  for (const bool by_column : {false, true}) {
    words.fill(-1);
    twTensor_t by = tensor(words.data(), twInt32, {2, 2});
    if (by_column) by.stride[0] = 1, by.stride[1] = 4;
    ASSERT_TW(twSuccess, twQuantizeFp8(&rows, nullptr, &to, &by, 1, -1, nullptr));
    const auto word = [&](int row, int i) { return words[static_cast<size_t>(by_column ? 4 * i + row : 2 * row + i)]; };
    EXPECT_EQ(word(0, 0), static_cast<int32_t>(0xff81807fu));  // the scales 1, 2, 4, NaN
    EXPECT_EQ(word(0, 1), 0x00000083);
    EXPECT_EQ(word(1, 0), static_cast<int32_t>(0x877f8584u));  // 32, 64, 1 of zeros, 256
    EXPECT_EQ(word(1, 1), 0x00000088);
  }
}

// Of 6 rows in 2 blocks the first 2 and the first 1: they are as without counts, and the others are as they were.
TEST(Quantize, ValidRows) {
  std::vector<float> memory(6 * 200);
  for (size_t i = 0; i < memory.size(); ++i)
    memory[i] = static_cast<float>(i % 37) - 11.0f * static_cast<float>(i / 200);
  const twTensor_t rows = tensor(memory.data(), twFloat32, {6, 200});
  std::vector<uint8_t> all(memory.size()), some(memory.size(), 0xa5);
  std::array<float, 12> scales{}, some_scales{};
  some_scales.fill(-7.0f);
  std::array<int32_t, 2> counted{2, 1};
  const twTensor_t counts = tensor(counted.data(), twInt32, {2});
  const twTensor_t to[] = {tensor(all.data(), twFloat8e4m3, {6, 200}), tensor(some.data(), twFloat8e4m3, {6, 200})};
  const twTensor_t by[] = {tensor(scales.data(), twFloat32, {6, 2}), tensor(some_scales.data(), twFloat32, {6, 2})};
  ASSERT_TW(twSuccess, twQuantizeFp8(&rows, nullptr, &to[0], &by[0], 0, -1, nullptr));
  ASSERT_TW(twSuccess, twQuantizeFp8(&rows, &counts, &to[1], &by[1], 0, -1, nullptr));
  for (size_t row = 0; row < 6; ++row) {
    const bool valid = row < 2 || row == 3;
    for (size_t i = 200 * row; i < 200 * (row + 1); ++i) ASSERT_EQ(some[i], valid ? all[i] : 0xa5) << i;
    for (size_t i = 2 * row; i < 2 * (row + 1); ++i) EXPECT_EQ(some_scales[i], valid ? scales[i] : -7.0f) << i;
  }
}

// A right call, to be spoilt.
struct QuantizeRefusals : ::testing::Test {
  std::array<float, 600> memory{};
  std::array<uint8_t, 600> bytes{};
  std::array<float, 8> floats{};
  twTensor_t rows = tensor(memory.data(), twFloat32, {3, 200});
  twTensor_t values = tensor(bytes.data(), twFloat8e4m3, {3, 200});
  twTensor_t scales = tensor(floats.data(), twFloat32, {3, 2});
  int32_t power_of_two = 0;
  int32_t device = -1;
  void* stream = nullptr;

  twResult_t call() { return twQuantizeFp8(&rows, nullptr, &values, &scales, power_of_two, device, stream); }
  // What `spoil` has done is refused with a sentence; then it is undone.
  template <class Spoil>
  void refuses(const char* sentence, Spoil&& spoil) {
    const twTensor_t before[] = {rows, values, scales};
    spoil();
    EXPECT_TW(twInvalidArgument, call());
    EXPECT_TRUE(says(sentence));
    rows = before[0], values = before[1], scales = before[2];
    power_of_two = 0, device = -1, stream = nullptr;
    EXPECT_TW(twSuccess, call());
  }
};

TEST_F(QuantizeRefusals, Shapes) {
  EXPECT_TW(twInvalidArgument, twQuantizeFp8(nullptr, nullptr, &values, &scales, 0, -1, nullptr));
  EXPECT_TRUE(says("rows is NULL"));
  EXPECT_TW(twInvalidArgument, twQuantizeFp8(&rows, nullptr, nullptr, &scales, 0, -1, nullptr));
  EXPECT_TRUE(says("values is NULL"));
  EXPECT_TW(twInvalidArgument, twQuantizeFp8(&rows, nullptr, &values, nullptr, 0, -1, nullptr));
  EXPECT_TRUE(says("scales is NULL"));
  refuses("rows has 1 dimensions; it must have 2, [T, H]", [&] { rows.ndim = 1; });
  refuses("scales has 3 dimensions; it must have 2, [T, ceil(H / 128)]", [&] { scales.ndim = 3; });
  refuses("rows has shape [-1, 200]", [&] { rows.shape[0] = -1; });
  refuses("rows has shape [3, 9223372036854775807]", [&] { rows.shape[1] = INT64_MAX; });
  refuses("values has shape [3, 199]; it must be [3, 200]", [&] { values.shape[1] = 199; });
  refuses("values has shape [2, 200]; it must be [3, 200]", [&] { values.shape[0] = 2; });
  refuses("scales has shape [3, 1]; it must be [3, 2]", [&] { scales.shape[1] = 1; });
}

TEST_F(QuantizeRefusals, TypesAndMemory) {
  refuses("rows has dtype float64 (12); it must be float32, bfloat16 or float16", [&] { rows.dtype = twFloat64; });
  refuses("values has dtype uint8 (1); it must be float8_e4m3", [&] { values.dtype = twUint8; });
  refuses("scales has dtype float16 (9); it must be float32", [&] { scales.dtype = twFloat16; });
  refuses("rows has data NULL", [&] { rows.data = nullptr; });
  refuses("values has data NULL", [&] { values.data = nullptr; });
  refuses("scales has data NULL", [&] { scales.data = nullptr; });
  refuses("it must be aligned to 4 bytes", [&] { rows.data = reinterpret_cast<char*>(memory.data()) + 2; });
  refuses("rows has stride 2 in dimension 1 of shape [3, 200]; it must be 1", [&] { rows.stride[1] = 2; });
  refuses("rows has stride 9223372036854775807 in dimension 0; it must be from -", [&] { rows.stride[0] = INT64_MAX; });
  refuses("values has stride 201 in dimension 0 of shape [3, 200]; it must be 200", [&] { values.stride[0] = 201; });
  refuses("scales has strides [1, 1]; rows or columns must be contiguous", [&] { scales.stride[0] = 1; });
  refuses("scales has strides [9223372036854775807, 1]; rows or", [&] { scales.stride[0] = INT64_MAX; });
  refuses("scales has dtype int32, of packed powers of two, but power_of_two is 0; it must be 1",
          [&] { scales = tensor(floats.data(), twInt32, {3, 1}); });
  refuses("overlaps rows", [&] { values.data = memory.data(); });
  refuses("overlaps rows", [&] { scales.data = memory.data() + 599; });
  refuses("scales at", [&] { scales.data = bytes.data() + 596; });
}

TEST_F(QuantizeRefusals, Numbers) {
  refuses("power_of_two is 2; it must be 0 or 1", [&] { power_of_two = 2; });
  refuses("device is -2; it must be -1 (host memory) or a CUDA device", [&] { device = -2; });
  refuses("it must be NULL for host memory (device -1)", [&] { stream = this; });
}

TEST_F(QuantizeRefusals, DevicesThatAreNotThere) {
  rows.shape[0] = values.shape[0] = scales.shape[0] = 0;  // nothing of it may be touched
  device = 4711;
  const twResult_t result = call();
  EXPECT_TRUE(result == twUnsupported || result == twInvalidArgument) << twResultString(result);
  EXPECT_TRUE(says("CUDA") || says("device is 4711; it must be from -1")) << twLastError();
}

}  // namespace
}  // namespace tw::quantize
