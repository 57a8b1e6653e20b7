// Signals: packing, the serial comparison of steps, banks across the wrap.
#include "exchange/signals.h"

#include <gtest/gtest.h>

#include <cstring>

namespace tw {
namespace {

static_assert(unpack(pack(Signal{7, Mode::kCombine, 5})) == Signal{7, Mode::kCombine, 5});
static_assert(reached(0, 0xffffffff) && !reached(0xffffffff, 0));
static_assert(bank_of(0xffffffff) == 1 && bank_of(0) == 0);

TEST(Signals, RoundTrip) {
  for (const uint32_t step : {0u, 1u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
    for (const Mode mode : {Mode::kNone, Mode::kDispatch, Mode::kCombine, Mode::kRefused, Mode::kDispatchPackets,
                            Mode::kSkip, Mode::kDispatchRows}) {
      for (const uint32_t n : {0u, 1u, 12345u, kMaxCount}) {
        const Signal signal{step, mode, n};
        EXPECT_EQ(unpack(pack(signal)), signal);
      }
    }
  }
  EXPECT_EQ(pack(Signal{}), 0u);  // fresh memory is a signal
}

// A sleeper waits on this half alone. On a part that n changes too it would wake, or not wake, for the wrong reason.
TEST(Signals, StepHalfIsTheSteps) {
  const uint64_t bits = pack(Signal{0x12345678, Mode::kRefused, kMaxCount});
  uint32_t half = 0;
  std::memcpy(&half, reinterpret_cast<const char*>(&bits) + kStepHalf, sizeof half);
  EXPECT_EQ(half, 0x12345678u);
}

TEST(Signals, ComparisonAcrossTheWrap) {
  for (uint32_t i = 0; i < 16; ++i) {
    const uint32_t step = 0xfffffff8u + i;
    EXPECT_TRUE(reached(step, step));
    EXPECT_TRUE(reached(step + 1, step));
    EXPECT_TRUE(reached(step + 2, step));
    EXPECT_FALSE(reached(step - 1, step));
    EXPECT_FALSE(reached(step - 2, step));
    EXPECT_FALSE(reached(step - 0x7fffffffu, step));
    EXPECT_TRUE(reached(step + 0x7fffffffu, step));
  }
}

TEST(Signals, BanksAlternateAcrossTheWrap) {
  for (uint32_t i = 0; i < 16; ++i) {
    const uint32_t step = 0xfffffff8u + i;
    EXPECT_NE(bank_of(step), bank_of(step + 1)) << step;
    EXPECT_EQ((StepPlace{3, step}.bank()), static_cast<int>(i & 1)) << step;
  }
}

TEST(Signals, AbortRoundTrip) {
  for (const uint32_t kind : {1u, 9u, 255u}) {
    for (const uint32_t reporter : {0u, 1u, 1023u, 65535u}) {
      for (const uint32_t culprit : {0u, 513u, 65535u}) {
        const AbortSignal signal = unpack_abort(pack(AbortSignal{kind, reporter, culprit}));
        EXPECT_EQ(signal.kind, kind);
        EXPECT_EQ(signal.reporter, reporter);
        EXPECT_EQ(signal.culprit, culprit);
        EXPECT_NE(pack(signal), 0u);  // 0 says that nobody gave up
      }
    }
  }
}

}  // namespace
}  // namespace tw
