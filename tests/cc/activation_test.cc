// SwiGLU against double, whichever rows are valid; its gradient's sum in the promised order; refusals. The bits are
// compared with NumPy in tests/py/test_activation.py.
#include "activation/swiglu.h"

#include <array>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "harness.h"

namespace tw::activation {
namespace {

using test::says;
using test::tensor;

double silu(double gate) { return gate / (1 + std::exp(-gate)); }

TEST(Activation, ExponentialIsWithinAUnit) {
  for (double x = -103; x < 88.7; x += 0.00137) {
    const auto argument = static_cast<float>(x);
    const double exact = std::exp(static_cast<double>(argument));
    const auto near = static_cast<float>(exact);
    const double unit = std::nextafter(near, INFINITY) - static_cast<double>(near);
    ASSERT_LT(std::fabs(exponential(argument) - exact), std::max(unit, 0x1p-149 * 2)) << argument;
  }
  EXPECT_EQ(exponential(0.0f), 1.0f);
  EXPECT_EQ(exponential(200.0f), INFINITY);
  EXPECT_LT(exponential(-200.0f), 0x1p-148f);
  EXPECT_TRUE(std::isnan(exponential(NAN)));
}

// 12 rows of 2 * 5 floats, weights and counts for blocks of them; outputs that are 9 where nothing is written.
struct Case {
  std::vector<float> gate_up = std::vector<float>(120);
  std::vector<float> weights = std::vector<float>(12);
  std::vector<float> gradient = std::vector<float>(60);
  std::vector<int32_t> counts;
  std::vector<float> out = std::vector<float>(60, 9);
  std::vector<float> of_gate_up = std::vector<float>(120, 9);
  std::vector<float> of_weights = std::vector<float>(12, 9);

  explicit Case(std::vector<int32_t> given) : counts(std::move(given)) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (auto* values : {&gate_up, &weights, &gradient}) {
      for (float& value : *values) value = 3 * normal(random);
    }
  }
  bool valid(int row) const {
    const int each = 12 / static_cast<int>(counts.size());
    return row % each < counts[static_cast<size_t>(row / each)];
  }
};

void run(Case& c) {
  const twTensor_t gate_up = tensor(c.gate_up.data(), twFloat32, {12, 10});
  const twTensor_t counts = tensor(c.counts.data(), twInt32, {static_cast<int64_t>(c.counts.size())});
  const twTensor_t weights = tensor(c.weights.data(), twFloat32, {12});
  const twTensor_t out = tensor(c.out.data(), twFloat32, {12, 5});
  const twTensor_t gradient = tensor(c.gradient.data(), twFloat32, {12, 5});
  const twTensor_t of_gate_up = tensor(c.of_gate_up.data(), twFloat32, {12, 10});
  const twTensor_t of_weights = tensor(c.of_weights.data(), twFloat32, {12});
  ASSERT_TW(twSuccess, twSwiGlu(&gate_up, &counts, &weights, &out, nullptr, 0, -1, nullptr));
  ASSERT_TW(twSuccess, twSwiGluBackward(&gate_up, &counts, &weights, &gradient, &of_gate_up, &of_weights, -1, nullptr));
}

TEST(Activation, ValidRowsAlone) {
  for (const auto& counts :
       {std::vector<int32_t>{12}, {0}, {5}, {99}, {-4}, {3, 0, 4}, {1, 1, 1, 1, 1, 1}, {9, -1, 1}}) {
    Case c(counts);
    ASSERT_NO_FATAL_FAILURE(run(c));
    for (int row = 0; row < 12; ++row) {
      double sum = 0;
      for (int i = 0; i < 5; ++i) {
        const auto at = static_cast<size_t>(row * 10 + i);
        const auto to = static_cast<size_t>(row * 5 + i);
        const double gate = c.gate_up[at];
        const double up = c.gate_up[at + 5];
        const double weight = c.weights[static_cast<size_t>(row)];
        const double s = 1 / (1 + std::exp(-gate));
        const double t = c.gradient[to] * weight;
        sum += c.gradient[to] * silu(gate) * up;
        ASSERT_NEAR(c.out[to], c.valid(row) ? silu(gate) * up * weight : 9, 1e-4);
        ASSERT_NEAR(c.of_gate_up[at], c.valid(row) ? t * up * s * (1 + gate * (1 - s)) : 9, 1e-3);
        ASSERT_NEAR(c.of_gate_up[at + 5], c.valid(row) ? t * silu(gate) : 9, 1e-3);
      }
      ASSERT_NEAR(c.of_weights[static_cast<size_t>(row)], c.valid(row) ? sum : 9, 1e-3);
    }
  }
}

// Terms that no other order sums alike: 600 elements of very different sizes.
TEST(Activation, TheOrderOfASum) {
  constexpr int kElements = 600;
  std::vector<float> gate_up(2 * kElements, 1.0f);
  std::vector<float> gradient(kElements);
  std::mt19937 random(3);
  for (int i = 0; i < kElements; ++i) {
    gradient[static_cast<size_t>(i)] =
        std::ldexp(static_cast<float>(random() % 4096) - 2048, static_cast<int>(random() % 20));
  }
  std::vector<float> of_gate_up(2 * kElements);
  float got = 0;
  const twTensor_t rows = tensor(gate_up.data(), twFloat32, {1, 2 * kElements});
  const twTensor_t of_rows = tensor(of_gate_up.data(), twFloat32, {1, 2 * kElements});
  const twTensor_t out = tensor(gradient.data(), twFloat32, {1, kElements});
  const twTensor_t sum = tensor(&got, twFloat32, {1});
  ASSERT_TW(twSuccess, twSwiGluBackward(&rows, nullptr, nullptr, &out, &of_rows, &sum, -1, nullptr));
  std::array<float, kAccumulators> sums{};
  for (int i = 0; i < kElements; ++i) {
    const float value = gradient[static_cast<size_t>(i)];
    sums[static_cast<size_t>(i % kAccumulators)] += swiglu_gradient(1, 1, value, value).weight;
  }
  const auto halve = [&](int from, int by, int step) {
    for (int i = from; i < from + by; i += step) sums[static_cast<size_t>(i)] += sums[static_cast<size_t>(i + by)];
  };
  for (int group = 0; group < kAccumulators; group += kGroup) {
    for (const int by : {4, 2, 1}) halve(group, by, 1);
  }
  for (const int by : {128, 64, 32, 16, 8}) halve(0, by, kGroup);
  EXPECT_EQ(got, sums[0]);
  EXPECT_NE(got, std::accumulate(gradient.begin(), gradient.end(), 0.0f) * swiglu_gradient(1, 1, 1, 1).weight);
}

// A right call, to be spoilt.
struct ActivationRefusals : ::testing::Test {
  std::array<float, 24> memory{};
  std::array<uint8_t, 12> bytes{};
  std::array<float, 16> floats{};
  std::array<int32_t, 2> numbers{2, 2};
  twTensor_t gate_up = tensor(memory.data(), twFloat32, {4, 6});
  twTensor_t counts = tensor(numbers.data(), twInt32, {2});
  twTensor_t out = tensor(bytes.data(), twFloat8e4m3, {4, 3});
  twTensor_t scales = tensor(floats.data(), twFloat32, {4, 1});
  int32_t power_of_two = 0;
  int32_t device = -1;

  template <class Spoil>
  void refuses(const char* sentence, Spoil&& spoil) {
    const twTensor_t before[] = {gate_up, counts, out, scales};
    spoil();
    EXPECT_TW(twInvalidArgument, twSwiGlu(&gate_up, &counts, nullptr, &out, &scales, power_of_two, device, nullptr));
    EXPECT_TRUE(says(sentence));
    gate_up = before[0], counts = before[1], out = before[2], scales = before[3];
    power_of_two = 0, device = -1;
    EXPECT_TW(twSuccess, twSwiGlu(&gate_up, &counts, nullptr, &out, &scales, 0, -1, nullptr));
  }
};

TEST_F(ActivationRefusals, Arguments) {
  EXPECT_TW(twInvalidArgument, twSwiGlu(nullptr, nullptr, nullptr, &out, &scales, 0, -1, nullptr));
  EXPECT_TRUE(says("gate_up is NULL"));
  EXPECT_TW(twInvalidArgument, twSwiGlu(&gate_up, nullptr, nullptr, nullptr, nullptr, 0, -1, nullptr));
  EXPECT_TRUE(says("out is NULL"));
  EXPECT_TW(twInvalidArgument, twSwiGlu(&gate_up, nullptr, nullptr, &out, nullptr, 0, -1, nullptr));
  EXPECT_TRUE(says("scales is NULL; out of dtype float8_e4m3fn has scales"));
  refuses("gate_up has shape [4, 5]; a row is gate and up", [&] { gate_up.shape[1] = 5; });
  refuses("gate_up has stride 2 in dimension 1", [&] { gate_up.stride[1] = 2; });
  refuses("counts has 3 elements; their number must divide that of the rows, 4", [&] { counts.shape[0] = 3; });
  refuses("counts has stride 2; it must be 1", [&] { counts.stride[0] = 2; });
  refuses("counts has data NULL", [&] { counts.data = nullptr; });
  refuses("out has shape [4, 2]; it must be [4, 3]", [&] { out.shape[1] = 2; });
  refuses("out has stride 4 in dimension 0", [&] { out.stride[0] = 4; });
  refuses("scales is float32 [4, 2]; it must be float32 [4, 1], or packed int32 [4, 1]", [&] { scales.shape[1] = 2; });
  refuses("scales has strides [0, 1]", [&] { scales.stride[0] = 0; });
  refuses("scales at", [&] { scales.data = memory.data() + 20; });
  refuses("out at", [&] { out.data = memory.data(); });
  refuses("power_of_two is 3; it must be 0 or 1", [&] { power_of_two = 3; });
  refuses("device is -2; it must be -1", [&] { device = -2; });
}

TEST_F(ActivationRefusals, Backward) {
  std::array<float, 12> gradients{};
  std::array<float, 24> results{};
  twTensor_t gradient = tensor(gradients.data(), twFloat32, {4, 3});
  twTensor_t of_gate_up = tensor(results.data(), twFloat32, {4, 6});
  const auto call = [&] {
    return twSwiGluBackward(&gate_up, nullptr, nullptr, &gradient, &of_gate_up, nullptr, -1, nullptr);
  };
  EXPECT_TW(twSuccess, call());
  of_gate_up.data = memory.data();
  EXPECT_TW(twInvalidArgument, call());
  EXPECT_TRUE(says("of_gate_up at"));
  of_gate_up.data = results.data();
  gradient.dtype = twFloat16;
  EXPECT_TW(twInvalidArgument, call());
  EXPECT_TRUE(says("gradient has dtype float16 (9); it must be float32, as gate_up has it"));
  gradient = tensor(gradients.data(), twFloat32, {3, 3});
  EXPECT_TW(twInvalidArgument, call());
  EXPECT_TRUE(says("gradient has shape [3, 3]; it must be [4, 3], as gate_up has it"));
}

}  // namespace
}  // namespace tw::activation
