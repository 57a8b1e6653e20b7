// mxfp8 and nvfp4: conversions against a search in the tables of their values, the rule of the shared exponent, what
// processors flush, valid rows, and refusals. The bits of whole calls are compared with NumPy in
// tests/py/test_microscaling.py.
#include <array>
#include <cmath>
#include <random>
#include <vector>

#include "harness.h"
#include "quantize/mxfp8.h"
#include "quantize/nvfp4.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace tw::quantize {
namespace {

using test::says;
using test::tensor;

// The value of a code without a sign, from the definition.
double decoded(int code, int fraction, int bias) {
  const int exponent = code >> fraction;
  const int rest = code & ((1 << fraction) - 1);
  const double one = 1 << fraction;
  return exponent == 0 ? std::ldexp(rest / one, 1 - bias) : std::ldexp(1 + rest / one, exponent - bias);
}

// Checks every code up to `last`, the middle to the next, and what is just beside both.
template <int kFraction, int kBias>
void expect_narrow(int last) {
  for (int code = 0; code <= last; ++code) {
    const double value = decoded(code, kFraction, kBias);
    EXPECT_EQ((narrow_magnitude<kFraction, kBias>(std::bit_cast<uint32_t>(static_cast<float>(value)))), code);
    if (code == last) return;
    const auto middle = static_cast<float>((value + decoded(code + 1, kFraction, kBias)) / 2);
    const auto bits = std::bit_cast<uint32_t>(middle);
    EXPECT_EQ((narrow_magnitude<kFraction, kBias>(bits)), code + code % 2) << middle;
    EXPECT_EQ((narrow_magnitude<kFraction, kBias>(bits - 1)), code) << middle;
    EXPECT_EQ((narrow_magnitude<kFraction, kBias>(bits + 1)), code + 1) << middle;
  }
}

TEST(Microscaling, Conversions) {
  expect_narrow<3, 7>(0x7e);
  expect_narrow<2, 15>(0x7b);
  expect_narrow<1, 1>(7);
  for (int code = 0; code < 0x7f; ++code) EXPECT_EQ(e4m3_value(static_cast<uint8_t>(code)), decoded(code, 3, 7));
  EXPECT_TRUE(std::isnan(e4m3_value(0x7f)));
}

// A block of mxfp8: its scale, and the value of the first element.
struct Block {
  int scale, value;
  bool operator==(const Block&) const = default;
  friend std::ostream& operator<<(std::ostream& out, const Block& b) { return out << b.scale << ' ' << b.value; }
};
Block block_of(float first, twDtype_t dtype) {
  std::array<float, kMxBlock> row{first};
  std::array<uint8_t, kMxBlock> values{};
  uint8_t scale = 1;
  const twTensor_t rows = tensor(row.data(), twFloat32, {1, kMxBlock});
  const twTensor_t to = tensor(values.data(), dtype, {1, kMxBlock});
  const twTensor_t by = tensor(&scale, twUint8, {1, 1});
  EXPECT_TW(twSuccess, twQuantizeMxfp8(&rows, nullptr, &to, &by, -1, nullptr));
  return {scale, values[0]};
}

TEST(Microscaling, FloorsAndSaturates) {
  const auto just_below = [](float x) { return std::nextafter(x, 0.0f); };
  EXPECT_EQ(block_of(1.0f, twFloat8e4m3), (Block{127 - 8, 0x78}));  // 256
  EXPECT_EQ(block_of(1.75f, twFloat8e4m3), (Block{127 - 8, 0x7e}));
  EXPECT_EQ(block_of(just_below(2.0f), twFloat8e4m3), (Block{127 - 8, 0x7e}));  // 511.99 becomes 448
  EXPECT_EQ(block_of(-2.0f, twFloat8e4m3), (Block{128 - 8, 0xf8}));
  EXPECT_EQ(block_of(1.0f, twFloat8e5m2), (Block{127 - 15, 0x78}));  // 2^15
  EXPECT_EQ(block_of(just_below(2.0f), twFloat8e5m2), (Block{127 - 15, 0x7b}));
  EXPECT_EQ(block_of(0.0f, twFloat8e4m3), (Block{0, 0}));
  EXPECT_EQ(block_of(-0.0f, twFloat8e5m2), (Block{0, 0x80}));
  EXPECT_EQ(block_of(std::bit_cast<float>(1u), twFloat8e5m2), (Block{0, 0}));  // 2^-22 after scaling
  EXPECT_EQ(block_of(0x1p-130f, twFloat8e4m3), (Block{0, 0x20}));              // 2^-3
  EXPECT_EQ(block_of(std::numeric_limits<float>::max(), twFloat8e4m3), (Block{254 - 8, 0x7e}));
  EXPECT_EQ(block_of(-INFINITY, twFloat8e4m3), (Block{255, 0x7f}));
  EXPECT_EQ(block_of(NAN, twFloat8e5m2), (Block{255, 0x7f}));
}

// Outputs of both formats from 8 rows of 64 floats, with canaries where nothing is written.
struct Made {
  std::vector<uint8_t> mx = std::vector<uint8_t>(512, 0xa5), mx_scales = std::vector<uint8_t>(16, 0xa5);
  std::vector<uint8_t> nv = std::vector<uint8_t>(256, 0xa5), nv_scales = std::vector<uint8_t>(32, 0xa5);
  float global_scale = -1;
  bool operator==(const Made&) const = default;
};
Made make(std::vector<float>& memory, std::vector<int32_t> counted) {
  Made made;
  const twTensor_t rows = tensor(memory.data(), twFloat32, {8, 64});
  const twTensor_t counts = tensor(counted.data(), twInt32, {static_cast<int64_t>(counted.size())});
  const twTensor_t mx = tensor(made.mx.data(), twFloat8e4m3, {8, 64});
  const twTensor_t mx_scales = tensor(made.mx_scales.data(), twUint8, {8, 2});
  EXPECT_TW(twSuccess, twQuantizeMxfp8(&rows, &counts, &mx, &mx_scales, -1, nullptr));
  const twTensor_t nv = tensor(made.nv.data(), twUint8, {8, 32});
  const twTensor_t nv_scales = tensor(made.nv_scales.data(), twFloat8e4m3, {8, 4});
  const twTensor_t global_scale = tensor(&made.global_scale, twFloat32, {1});
  EXPECT_TW(twSuccess, twQuantizeNvfp4(&rows, &counts, &nv, &nv_scales, &global_scale, 1, -1, nullptr));
  return made;
}

// Scales in tiles are those by row, at the places that the header names, with zeros behind a row's last; of 2 blocks of
// 200 rows, of which 131 and 1 are valid.
TEST(Microscaling, Tiles) {
  constexpr int64_t kRows = 400, kScales = 5, kElements = 32 * kScales;
  std::vector<float> memory(kRows * kElements);
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = std::ldexp(1.0f, static_cast<int>(i / 32 % 97) - 40);
  const twTensor_t rows = tensor(memory.data(), twFloat32, {kRows, kElements});
  std::vector<uint8_t> values(memory.size()), plain(kRows * kScales), tiled(2 * 2 * 2 * 512 + 1, 0xa5);
  const twTensor_t to = tensor(values.data(), twFloat8e4m3, {kRows, kElements});
  const twTensor_t by_row = tensor(plain.data(), twUint8, {kRows, kScales});
  twTensor_t by_tile = tensor(tiled.data(), twUint8, {2, 2, 2, 32, 4, 4});
  int32_t counted[] = {131, 1};
  const twTensor_t counts = tensor(counted, twInt32, {2});
  ASSERT_TW(twSuccess, twQuantizeMxfp8(&rows, nullptr, &to, &by_row, -1, nullptr));
  ASSERT_TW(twSuccess, twQuantizeMxfp8(&rows, &counts, &to, &by_tile, -1, nullptr));
  std::vector<uint8_t> want(tiled.size(), 0xa5);
  for (int64_t block = 0; block < 2; ++block) {
    for (int64_t r = 0; r < counted[block]; ++r) {
      for (int64_t c = 0; c < 8; ++c) {
        const int64_t tile = (block * 2 + r / 128) * 2 + c / 4;
        const size_t at = static_cast<size_t>(tile * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4);
        want[at] = c < kScales ? plain[static_cast<size_t>((block * 200 + r) * kScales + c)] : 0;
      }
    }
  }
  EXPECT_EQ(tiled, want);
  by_tile.shape[1] = 1;
  EXPECT_TW(twInvalidArgument, twQuantizeMxfp8(&rows, &counts, &to, &by_tile, -1, nullptr));
  EXPECT_TRUE(says("scales has shape [2, 1, 2, 32, 4, 4]; in tiles it must be [2, 2, 2, 32, 4, 4], as rows has it"));
  by_tile.shape[1] = 2;
  by_tile.stride[1] += 512;
  EXPECT_TW(twInvalidArgument, twQuantizeMxfp8(&rows, &counts, &to, &by_tile, -1, nullptr));
  EXPECT_TRUE(says("scales has stride 1536 in dimension 1 of shape [2, 2, 2, 32, 4, 4]; it must be 1024"));
  by_tile.stride[1] -= 512;
  by_tile.data = values.data() + 64;
  EXPECT_TW(twInvalidArgument, twQuantizeMxfp8(&rows, &counts, &to, &by_tile, -1, nullptr));
  EXPECT_TRUE(says("overlaps values"));
}

TEST(Microscaling, FlushedOrNot) {
#if !defined(__SSE2__)
  GTEST_SKIP() << "knows how to make this processor flush subnormal numbers only where it has SSE";
#else
  std::mt19937 random(7);
  std::vector<float> memory(512);
  for (const float least : {0x1p-149f, 0x1p-130f, 0x1p-126f, 0x1p-119f, 0x1p-108f}) {
    for (float& x : memory) {
      const auto drawn = static_cast<uint32_t>(random());
      const uint32_t bits = std::bit_cast<uint32_t>(least) + drawn % 0x01800000u;
      x = std::bit_cast<float>(bits | (drawn & 0x80000000u));
    }
    const Made honest = make(memory, {8});
    constexpr unsigned kFlush = 0x8040;  // results and operands
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | kFlush);
    const Made flushed = make(memory, {8});
    _mm_setcsr(before);
    EXPECT_EQ(honest, flushed) << least;
  }
#endif
}

TEST(Microscaling, ValidRowsAlone) {
  std::vector<float> memory(512);
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<float>(i % 64) / 8;
  memory[0] = INFINITY;                    // spoils its block, and no global scale
  memory[2 * 64] = memory[7 * 64] = 1e9f;  // of rows that are not valid
  const Made made = make(memory, {2, 3});
  EXPECT_EQ(made.global_scale, 63.0f / 8 / (6 * 448));
  for (size_t row = 0; row < 8; ++row) {
    const bool valid = row < 2 || (row >= 4 && row < 7);
    EXPECT_EQ(made.mx[64 * row + 3] != 0xa5, valid) << row;
    EXPECT_EQ(made.mx_scales[2 * row + 1] != 0xa5, valid) << row;
    EXPECT_EQ(made.nv[32 * row + 17] != 0xa5, valid) << row;
    EXPECT_EQ(made.nv_scales[4 * row + 3] != 0xa5, valid) << row;
  }
  EXPECT_EQ(made.mx_scales[0], 255);
  EXPECT_EQ(made.nv_scales[0], 0x7f);
  EXPECT_EQ(make(memory, {-1, 0}), Made{.global_scale = 1});
}

TEST(Microscaling, Refusals) {
  std::array<float, 64> row{};
  std::array<uint8_t, 64> values{};
  std::array<uint8_t, 4> scales{};
  float global_scale = 1;
  twTensor_t rows = tensor(row.data(), twFloat32, {1, 64});
  const twTensor_t mx = tensor(values.data(), twFloat8e4m3, {1, 64});
  const twTensor_t mx_by = tensor(scales.data(), twUint8, {1, 2});
  const twTensor_t nv = tensor(values.data(), twUint8, {1, 32});
  const twTensor_t nv_by = tensor(scales.data(), twFloat8e4m3, {1, 4});
  twTensor_t global = tensor(&global_scale, twFloat32, {1, 1});
  const auto refuses = [](const char* sentence, twResult_t result) {
    EXPECT_TW(twInvalidArgument, result);
    EXPECT_TRUE(says(sentence));
  };
  refuses("rows is NULL", twQuantizeMxfp8(nullptr, nullptr, &mx, &mx_by, -1, nullptr));
  refuses("values is NULL", twQuantizeMxfp8(&rows, nullptr, nullptr, &mx_by, -1, nullptr));
  refuses("scales is NULL", twQuantizeMxfp8(&rows, nullptr, &mx, nullptr, -1, nullptr));
  refuses("values has dtype uint8 (1); it must be float8_e4m3",
          twQuantizeMxfp8(&rows, nullptr, &nv, &mx_by, -1, nullptr));
  refuses("device is -2", twQuantizeMxfp8(&rows, nullptr, &mx, &mx_by, -2, nullptr));
  refuses("values has dtype float8_e4m3", twQuantizeNvfp4(&rows, nullptr, &mx, &nv_by, &global, 0, -1, nullptr));
  refuses("global_scale is NULL", twQuantizeNvfp4(&rows, nullptr, &nv, &nv_by, nullptr, 1, -1, nullptr));
  refuses("find_global_scale is 2; it must be 0 or 1",
          twQuantizeNvfp4(&rows, nullptr, &nv, &nv_by, &global, 2, -1, nullptr));
  global.data = row.data();
  refuses("global_scale at", twQuantizeNvfp4(&rows, nullptr, &nv, &nv_by, &global, 1, -1, nullptr));
  global.data = nullptr;
  refuses("global_scale has data NULL", twQuantizeNvfp4(&rows, nullptr, &nv, &nv_by, &global, 0, -1, nullptr));
  global = tensor(&global_scale, twFloat32, {1, 4});
  refuses("global_scale has size 4; one that is to be found is one number",
          twQuantizeNvfp4(&rows, nullptr, &nv, &nv_by, &global, 1, -1, nullptr));
  global.dtype = twFloat64;
  refuses("global_scale has dtype float64 (12); it must be float32",
          twQuantizeNvfp4(&rows, nullptr, &nv, &nv_by, &global, 0, -1, nullptr));
  rows.shape[1] = 48;
  refuses("rows has shape [1, 48]; 32 elements share a scale, so a row must have a multiple of 32",
          twQuantizeMxfp8(&rows, nullptr, &mx, &mx_by, -1, nullptr));
}

}  // namespace
}  // namespace tw::quantize
