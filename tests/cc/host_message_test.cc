// Messages between hosts: what a rank takes out of one is what was put for it, whatever else is in it, and rows that
// several ranks get are in it once.
#include "cpu/host_message.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace tw::cpu {
namespace {

constexpr uint64_t kWindow = 4096;
constexpr int kRails = 3;

struct Windows {
  std::vector<std::vector<std::byte>> of{kRails, std::vector<std::byte>(kWindow)};
  void put(int rail, uint64_t offset, const std::byte* from, size_t n) {
    std::copy_n(from, n, of[static_cast<size_t>(rail)].begin() + static_cast<long>(offset));
  }
  bool take(const std::vector<std::byte>& message, uint64_t bytes) {
    bool good = true;
    for (int rail = 0; rail < kRails; ++rail) {
      good &= deliver(message.data(), bytes, rail, kWindow,
                      [&](uint64_t offset, const std::byte* data, uint64_t n) { put(rail, offset, data, n); });
    }
    return good;
  }
  bool operator==(const Windows&) const = default;
};

std::vector<std::byte> random_bytes(std::mt19937& draw, size_t n) {
  std::vector<std::byte> made(n);
  for (std::byte& byte : made) byte = static_cast<std::byte>(draw());
  return made;
}

TEST(HostMessage, BringsWhatWasPut) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 draw(seed);
    const std::vector<std::byte> rows = random_bytes(draw, 2048);
    std::vector<std::byte> memory(1 << 18);
    HostMessage message;
    message.begin(memory.data(), memory.size());
    Windows wanted;
    uint64_t next[kRails] = {0, 1024, 2048};  // puts do not overlap
    uint64_t shipped = 0;
    std::vector<std::byte> there(memory.size());
    for (int i = 0; i < 40; ++i) {
      const size_t n = draw() % 3 == 0 ? 0 : 1 + draw() % 50;
      const std::byte* const row = rows.data() + draw() % 1900;
      const bool copied = draw() % 4 == 0;
      for (int rail = 0; rail < kRails; ++rail) {
        if (draw() % 2 == 0) continue;
        if (draw() % 5 == 0) next[rail] += draw() % 9;
        if (copied) {
          std::vector<std::byte> brief(row, row + n);
          message.put(rail, next[rail], brief.data(), n);
          std::fill(brief.begin(), brief.end(), std::byte{0xee});
        } else {
          message.put_row(rail, next[rail], row, n);
        }
        wanted.put(rail, next[rail], row, n);
        next[rail] += n;
      }
      // What is sealed may be on its way already.
      std::copy_n(memory.begin() + static_cast<long>(shipped), message.sealed() - shipped,
                  there.begin() + static_cast<long>(shipped));
      shipped = message.sealed();
    }
    const uint64_t bytes = message.finish();
    std::copy_n(memory.begin() + static_cast<long>(shipped), bytes - shipped,
                there.begin() + static_cast<long>(shipped));
    EXPECT_FALSE(message.overflowed());
    Windows got;
    EXPECT_TRUE(got.take(there, bytes)) << seed;
    EXPECT_EQ(got, wanted) << seed;
  }
}

TEST(HostMessage, HasARowOnceForAllWhoGetIt) {
  std::vector<std::byte> memory(1 << 16);
  const std::vector<std::byte> rows(4 * 512);
  HostMessage message;
  message.begin(memory.data(), memory.size());
  for (int token = 0; token < 4; ++token) {
    const int32_t header[2] = {token, 0};
    for (int rail = 0; rail < kRails; ++rail) {
      message.put(rail, 16 * static_cast<uint64_t>(token), header, sizeof header);
      message.put_row(rail, 100 + 520 * static_cast<uint64_t>(token), rows.data() + 512 * token, 512);
    }
  }
  EXPECT_EQ(message.finish(), 4 * (Record::room(512, kRails) + kRails * Record::room(8, 1)));
}

// A gather's rows, and a rank's own, follow each other at their places: one record.
TEST(HostMessage, RowsThatFollowEachOtherAreOneRecord) {
  std::vector<std::byte> memory(1 << 16);
  const std::vector<std::byte> rows(100 * 3);
  HostMessage message;
  message.begin(memory.data(), memory.size());
  for (uint64_t i = 0; i < 100; ++i) {
    for (int rail = 0; rail < kRails; ++rail) message.put_row(rail, 7 + 3 * i, rows.data() + 3 * i, 3);
  }
  EXPECT_EQ(message.finish(), Record::head(kRails) + 300);
}

// Rows that are one memory, as those of an expanded tensor: as many bytes as of others.
TEST(HostMessage, RowsOfOneMemory) {
  std::vector<std::byte> memory(1 << 16);
  const std::vector<std::byte> row(4, std::byte{9});
  HostMessage message;
  message.begin(memory.data(), memory.size());
  for (uint64_t i = 0; i < 200; ++i) {
    for (int rail = 0; rail < kRails; ++rail) message.put_row(rail, 4 * i, row.data(), 4);
  }
  EXPECT_LE(message.finish(), Record::head(kRails) + 4 * 200 + 8 * Record::room(4, kRails));
  Windows got;
  EXPECT_TRUE(got.take(memory, message.bytes()));
  for (int rail = 0; rail < kRails; ++rail) {
    for (uint64_t i = 0; i < 800; ++i) EXPECT_EQ(got.of[static_cast<size_t>(rail)][i], std::byte{9});
  }
}

TEST(HostMessage, WritesNothingBeyondItsRoom) {
  std::vector<std::byte> memory(256, std::byte{7});
  const std::vector<std::byte> row(100);
  HostMessage message;
  message.begin(memory.data(), 128);
  message.put(0, 0, row.data(), 100);
  message.put(0, 200, row.data(), 100);
  (void)message.finish();
  EXPECT_TRUE(message.overflowed());
  for (size_t i = 128; i < 256; ++i) EXPECT_EQ(memory[i], std::byte{7});
}

// Whatever stands in a message, nothing is read or written beyond it and the window (run under sanitizers too).
TEST(HostMessage, RefusesWhatIsNone) {
  const std::vector<std::byte> row(64);
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    std::mt19937 draw(seed);
    std::vector<std::byte> memory(512);
    HostMessage message;
    message.begin(memory.data(), memory.size());
    for (int i = 0; i < 4; ++i) message.put(static_cast<int>(draw() % kRails), 100 * i, row.data(), 1 + draw() % 64);
    const uint64_t bytes = message.finish();
    for (int i = 0; i < 3; ++i) memory[draw() % bytes] = static_cast<std::byte>(draw());
    std::vector<std::byte> exact(memory.begin(), memory.begin() + static_cast<long>(bytes));
    Windows got;
    (void)got.take(exact, bytes);
    (void)got.take(exact, draw() % bytes);
  }
  Windows got;
  std::vector<std::byte> beyond(64);
  HostMessage message;
  message.begin(beyond.data(), beyond.size());
  message.put(0, kWindow - 2, row.data(), 3);
  EXPECT_FALSE(got.take(beyond, message.finish()));
  message.begin(beyond.data(), beyond.size());
  message.put(0, 0, row.data(), 24);
  const uint64_t bytes = message.finish();
  for (uint64_t less = 1; less < bytes; ++less) EXPECT_FALSE(got.take(beyond, bytes - less)) << less;
  EXPECT_TRUE(got.take(beyond, bytes));
}

}  // namespace
}  // namespace tw::cpu
