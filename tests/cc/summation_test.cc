// Conversions over every 16-bit value, and the vectorised sums against a scalar loop.
#include "exchange/summation.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "cpu/vector.h"
#include "reference.h"

namespace tw {
namespace {

uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }

template <class T>
void expect_widen(const test::Format& format) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const float got = widen(T{static_cast<uint16_t>(bits)});
    const double want = test::decode(format, static_cast<uint16_t>(bits));
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(got)) << bits;
    } else {
      ASSERT_EQ(bits_of(got), bits_of(static_cast<float>(want))) << bits;
    }
  }
}

template <class T>
void expect_narrow(const test::Format& format, float value) {
  const uint16_t got = narrow<T>(value).bits;
  if (std::isnan(value)) {
    ASSERT_TRUE(std::isnan(test::decode(format, got))) << std::hex << bits_of(value);
  } else {
    ASSERT_EQ(got, test::encode(format, test::round_to(format, value))) << std::hex << bits_of(value);
  }
}

// Every value itself, every midpoint between neighbours, and the floats right beside it: all that rounding turns on.
template <class T>
void expect_narrow_everywhere(const test::Format& format) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const double value = test::decode(format, static_cast<uint16_t>(bits));
    ASSERT_NO_FATAL_FAILURE(expect_narrow<T>(format, static_cast<float>(value)));
    if (!std::isfinite(value)) continue;
    // Beyond the largest value the next step would be as far again: the overflow threshold is its midpoint.
    const uint32_t up = bits + 1;
    double next = test::decode(format, static_cast<uint16_t>(up));
    if (std::isinf(next))
      next = std::copysign(format.largest + std::ldexp(1.0, std::ilogb(format.largest) - format.fraction), value);
    if ((up & 0x7fff) == 0) continue;
    const double middle = value / 2 + next / 2;
    const auto exact = static_cast<float>(middle);
    ASSERT_EQ(static_cast<double>(exact), middle);
    for (const float near : {exact, std::nextafterf(exact, INFINITY), std::nextafterf(exact, -INFINITY)}) {
      ASSERT_NO_FATAL_FAILURE(expect_narrow<T>(format, near));
    }
  }
  for (uint32_t i = 0; i < 200000; ++i) {
    ASSERT_NO_FATAL_FAILURE(expect_narrow<T>(format, std::bit_cast<float>(test::mix({i}))));
  }
  for (const uint32_t nan : {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffffffffu, 0x7f80ffffu}) {
    ASSERT_NO_FATAL_FAILURE(expect_narrow<T>(format, std::bit_cast<float>(nan)));
  }
}

TEST(Summation, WidenBf16) { expect_widen<Bf16>(test::kBf16); }
TEST(Summation, WidenF16) { expect_widen<F16>(test::kF16); }
TEST(Summation, NarrowBf16) { expect_narrow_everywhere<Bf16>(test::kBf16); }
TEST(Summation, NarrowF16) { expect_narrow_everywhere<F16>(test::kF16); }

float load(twDtype_t dtype, const void* row, int64_t i) {
  if (dtype == twFloat32) return static_cast<const float*>(row)[i];
  return static_cast<float>(test::decode(test::format_of(dtype), static_cast<const uint16_t*>(row)[i]));
}

struct Case {
  twDtype_t from;
  twDtype_t to;
  bool weighted;
  int count;
  int64_t n;
};

// Values of very different sizes, so that another order or a fused multiply-add would show; specials among them.
std::vector<std::vector<uint8_t>> random_rows(const Case& c) {
  std::vector<std::vector<uint8_t>> rows;
  for (int j = 0; j < c.count; ++j) {
    rows.emplace_back(c.n * test::float_bytes(c.from) + 4);
    for (int64_t i = 0; i < c.n; ++i) {
      const uint32_t h = test::mix({static_cast<uint64_t>(j), static_cast<uint64_t>(i), static_cast<uint64_t>(c.n)});
      float value = std::ldexp(static_cast<float>(static_cast<int32_t>(h)), static_cast<int>(h % 29) - 45);
      if (h % 61 == 0) value = -0.0f;
      if (h % 251 == 0) value = INFINITY;
      if (h % 257 == 0) value = NAN;
      if (h % 67 == 0) value = std::ldexp(value, -30);  // subnormal in float16
      test::store(c.from, rows.back().data(), i, value);
    }
  }
  return rows;
}

void expect_sum(const Case& c) {
  const auto rows = random_rows(c);
  std::vector<const void*> pointers;
  std::vector<float> weights;
  for (int j = 0; j < c.count; ++j) {
    pointers.push_back(rows[j].data());
    weights.push_back(static_cast<float>(test::mix({static_cast<uint64_t>(j), 99}) & 0xffff) / 65537.0f);
  }
  std::vector<uint8_t> out(c.n * test::float_bytes(c.to) + 8, 0x5a);
  cpu::sum_rows(out.data(), pointers.data(), c.weighted ? weights.data() : nullptr, c.count,
                RowTypes{c.from, c.to, c.n, c.weighted});
  for (int64_t i = 0; i < c.n; ++i) {
    test::Total total;
    for (int j = 0; j < c.count; ++j) {
      const volatile float product = (c.weighted ? weights[j] : 1.0f) * load(c.from, rows[j].data(), i);
      total.add(c.weighted ? product : load(c.from, rows[j].data(), i));
    }
    uint32_t want = 0;
    uint32_t got = 0;
    test::store(c.to, &want, 0, total.value());
    std::memcpy(&got, out.data() + i * test::float_bytes(c.to), test::float_bytes(c.to));
    if (std::isnan(total.value())) {
      ASSERT_TRUE(std::isnan(load(c.to, &got, 0))) << i;
    } else {
      ASSERT_EQ(got, want) << c.from << " to " << c.to << ", " << c.count << " rows of " << c.n << ", element " << i;
    }
  }
  for (size_t i = c.n * test::float_bytes(c.to); i < out.size(); ++i) ASSERT_EQ(out[i], 0x5a) << "beyond the row";
}

TEST(Summation, VectorisedEqualsScalar) {
  const twDtype_t types[] = {twFloat32, twBfloat16, twFloat16};
  for (const twDtype_t from : types) {
    for (const twDtype_t to : types) {
      for (const bool weighted : {false, true}) {
        for (const int count : {0, 1, 2, 3, 8, 64}) {
          for (const int64_t n : {1, 7, 127, 128, 129, 300}) {
            ASSERT_NO_FATAL_FAILURE(expect_sum({from, to, weighted, count, n}));
          }
        }
      }
    }
  }
}

// A sum that started from 0 would turn -0 into 0.
TEST(Summation, StartsFromTheFirstTerm) {
  const float minus_zero = -0.0f;
  const void* rows[] = {&minus_zero, &minus_zero};
  const float weights[] = {1.0f, 1.0f};
  for (const float* w : {static_cast<const float*>(nullptr), weights}) {
    for (const int count : {1, 2}) {
      float out = 1.0f;
      cpu::sum_rows(&out, rows, w, count, RowTypes{twFloat32, twFloat32, 1, w != nullptr});
      EXPECT_EQ(bits_of(out), bits_of(-0.0f)) << count;
    }
  }
  float out = 1.0f;
  cpu::sum_rows(&out, rows, nullptr, 0, RowTypes{twFloat32, twFloat32, 1, false});
  EXPECT_EQ(bits_of(out), bits_of(0.0f));
}

// Order and rounding are part of the result: these terms give another sum in any other order.
TEST(Summation, TermsAreAddedAscending) {
  const float terms[] = {1e8f, 1.0f, -1e8f, 1.0f};
  const void* rows[] = {&terms[0], &terms[1], &terms[2], &terms[3]};
  float out = 0;
  cpu::sum_rows(&out, rows, nullptr, 4, RowTypes{twFloat32, twFloat32, 1, false});
  EXPECT_EQ(out, 1.0f);
}

TEST(Summation, FillNan) {
  for (const twDtype_t dtype : {twFloat32, twBfloat16, twFloat16}) {
    std::vector<uint8_t> out(5 * test::float_bytes(dtype) + 1, 0x11);
    cpu::fill_nan(out.data(), dtype, 5);
    for (int i = 0; i < 5; ++i) EXPECT_TRUE(std::isnan(load(dtype, out.data(), i))) << dtype;
    EXPECT_EQ(out.back(), 0x11);
  }
}

}  // namespace
}  // namespace tw
