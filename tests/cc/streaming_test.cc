// Rows that go past the caches: the copy itself, at every offset and length, and whole exchanges that use it.
#include <cstring>

#include "cpu/vector.h"
#include "harness.h"

namespace tw::test {
namespace {

constexpr size_t kRoom = 64;  // more than any offset
constexpr uint8_t kUntouched = 0xa5;

std::vector<uint8_t> noise(size_t n) {
  std::vector<uint8_t> bytes(n);
  for (size_t i = 0; i < n; ++i) bytes[i] = static_cast<uint8_t>(mix({i, n}) >> 5 | 1);
  return bytes;
}

// Copies n bytes between places `to` and `from` bytes past a cache line; nothing around the target may change.
void expect_copied(const std::vector<uint8_t>& source, size_t to, size_t from, size_t n) {
  alignas(64) static uint8_t target[kRoom + (4u << 20) + 2 * kRoom];
  const size_t touched = to + n + kRoom;
  std::memset(target, kUntouched, touched);
  const uint8_t* const in = source.data() + (kRoom - reinterpret_cast<uintptr_t>(source.data()) % kRoom) + from;
  cpu::stream_copy(target + to, in, n);
  cpu::stream_fence();
  ASSERT_EQ(std::memcmp(target + to, in, n), 0) << n << " bytes from +" << from << " to +" << to;
  for (size_t i = 0; i < to; ++i) ASSERT_EQ(target[i], kUntouched) << i << " before +" << to << ", " << n << " bytes";
  for (size_t i = to + n; i < touched; ++i) ASSERT_EQ(target[i], kUntouched) << i << " after +" << to << ", n " << n;
}

TEST(Streaming, EveryOffsetAndLength) {
  const std::vector<uint8_t> source = noise(600);
  for (size_t to = 0; to <= 64; ++to) {
    for (size_t n = 0; n <= 300; ++n) {
      for (const size_t from : {size_t{0}, size_t{1}, to % 65, (to * 7 + n) % 65, size_t{64}}) {
        ASSERT_NO_FATAL_FAILURE(expect_copied(source, to, from, n));
      }
    }
  }
}

TEST(Streaming, EveryPairOfOffsets) {
  const std::vector<uint8_t> source = noise(600);
  for (size_t to = 0; to <= 64; ++to) {
    for (size_t from = 0; from <= 64; ++from) {
      for (const size_t n : {0, 1, 63, 64, 65, 128, 191, 300}) {
        ASSERT_NO_FATAL_FAILURE(expect_copied(source, to, from, n));
      }
    }
  }
}

TEST(Streaming, LargeRows) {
  const std::vector<uint8_t> source = noise((4u << 20) + 3 * kRoom);
  for (const size_t n : {4095ul, 4096ul, 4097ul, 14336ul, 1ul << 20, (1ul << 20) + 17, 4ul << 20}) {
    for (const size_t to : {0, 2, 33, 63}) {
      for (const size_t from : {0, 1, 48}) ASSERT_NO_FATAL_FAILURE(expect_copied(source, to, from, n));
    }
  }
}

// A cache of one byte: every row of 512 bytes and more streams. Rows end within a line and begin anywhere in one.
TEST(Streaming, Exchanges) {
  const Env cache("TOKENWAY_CACHE_BYTES", "1");
  for (const int64_t elements : {255, 256, 300, 1021}) {
    twGroupConfig_t config = make_config(8, 3, 6, elements);
    config.num_payloads = 2;
    config.payloads[1] = {twUint8, 777};
    config.combine_dtype = elements == 300 ? twFloat32 : twBfloat16;
    World world(3, config);
    for (const twLayout_t layout : {twRankMajor, twExpertMajor}) {
      SCOPED_TRACE(::testing::Message() << elements << " elements, layout " << layout);
      const Style style{layout, twWeightTopk, twBfloat16, twFloat32, 0, -1, true, false};
      Exchange exchange(world, make_traffic(config, {6, 2, 5}, 3), style, 3);
      for (uint32_t round = 0; round < 3; ++round) {
        exchange.renew(round);
        exchange.dispatch();
        exchange.combine();
      }
    }
  }
}

// Signals must not pass the rows that they stand for: each rank has a thread, and nothing is staged.
TEST(Streaming, RowsAreThereBeforeTheirSignal) {
  const Env cache("TOKENWAY_CACHE_BYTES", "1");
  const Env spin("TOKENWAY_SPIN_US", "50");
  const twGroupConfig_t config = make_config(6, 2, 8, 2048);
  World world(2, config);
  const Traffic traffic = make_traffic(config, {8, 7}, 4);
  on_all_ranks(2, [&](int rank) {
    Side side(world, traffic, rank, {twRankMajor, twWeightNone, twBfloat16, twBfloat16}, 1);
    for (uint32_t round = 0; round < 20; ++round) {
      side.renew(round);
      EXPECT_TW(twSuccess, side.dispatch());
      side.expect_received();
      EXPECT_TW(twSuccess, side.combine());
      side.expect_tokens();
      if (::testing::Test::HasFailure()) return;
    }
  });
}

}  // namespace
}  // namespace tw::test
