// Leases: pieces of the window that callers own, and rows that land there.
#include <gtest/gtest.h>

#include "counted.h"

namespace tw::test {
namespace {

constexpr uint64_t kPage = 4096;

twGroupConfig_t leasing(uint64_t bytes) {
  twGroupConfig_t config = counting(7, 3, 9);
  config.lease_bytes = bytes;
  return config;
}

void* lease(twGroup_t group, uint64_t bytes) {
  void* memory = nullptr;
  EXPECT_TW(twSuccess, twWindowAlloc(group, bytes, &memory));
  return memory;
}

twLeaseInfo_t info_of(twGroup_t group) {
  twLeaseInfo_t info{};
  info.size = sizeof info;
  EXPECT_TW(twSuccess, twGroupLeaseInfo(group, &info));
  return info;
}

TEST(Leases, FirstGapThatIsLargeEnough) {
  World world(1, leasing(4 * kPage));
  twGroup_t group = world[0];
  std::byte* const a = static_cast<std::byte*>(lease(group, kPage));
  std::byte* const b = static_cast<std::byte*>(lease(group, 1));
  std::byte* const c = static_cast<std::byte*>(lease(group, 3 * kPage - 256));
  EXPECT_EQ(b, a + kPage);
  EXPECT_EQ(c, b + 256);
  void* none = nullptr;
  EXPECT_TW(twOutOfMemory, twWindowAlloc(group, 1, &none));
  EXPECT_NE(std::string(twLastError()).find("3 leases have 16.0 KiB, and the largest gap is 0"), std::string::npos);
  EXPECT_TW(twSuccess, twWindowTrim(a, kPage / 2));
  EXPECT_EQ(info_of(group).largest, kPage / 2);
  EXPECT_TW(twOutOfMemory, twWindowAlloc(group, kPage / 2 + 1, &none));
  EXPECT_EQ(lease(group, kPage / 2), a + kPage / 2);
  EXPECT_TW(twSuccess, twWindowFree(b));
  EXPECT_TW(twInvalidArgument, twWindowFree(b));
  EXPECT_EQ(lease(group, 256), b);
  EXPECT_EQ(info_of(group).used, 4 * kPage);
  for (void* memory :
       {static_cast<void*>(a), static_cast<void*>(a + kPage / 2), static_cast<void*>(b), static_cast<void*>(c)}) {
    EXPECT_TW(twSuccess, twWindowFree(memory));
  }
  EXPECT_EQ(info_of(group).largest, 4 * kPage);
  EXPECT_EQ(info_of(group).leases, 0);
}

// Rows go to leases, steps of other handles leave them alone, and those who have none are copied out as before.
TEST(Leases, RowsLandAndStay) {
  constexpr int kSides = 3;
  World world(kSides, leasing(8 * kPage));
  const uint64_t bytes = static_cast<uint64_t>(kSides) * 9 * 8;
  struct Kept {
    int rank;
    void* memory;
    std::vector<std::byte> was;
  };
  std::vector<Kept> kept;
  const std::vector<int> tokens{9, 0, 5};
  for (uint32_t seed = 0; seed < 6; ++seed) {
    Counted counted(world, tokens, seed);
    counted.exchange();
    counted.use(twFlat);
    std::vector<void*> leases(kSides);
    for (int rank = 0; rank < kSides; ++rank) {
      if ((rank + seed) % 3 != 0) leases[rank] = lease(world[rank], bytes);  // others have none
      twCountsInput_t input = TW_COUNTS_INPUT_INIT;
      input.send_only = 1;
      input.landing[0] = leases[rank];
      EXPECT_TW(twSuccess, twExchangeCounts(world[rank], counted.handles[rank], &input));
    }
    for (int rank = 0; rank < kSides; ++rank) EXPECT_TW(twSuccess, counted.complete(rank));
    counted.use(seed % 2 == 0 ? twFlat : twGrouped);  // whose outputs are copies of what has landed
    for (int rank = 0; rank < kSides; ++rank) {
      if (leases[rank] == nullptr) continue;
      int64_t rows = 0;
      EXPECT_TW(twSuccess, twHandleNumRecvRows(counted.handles[rank], twFlat, &rows));
      const auto* const at = static_cast<const std::byte*>(leases[rank]);
      kept.push_back({rank, leases[rank], {at, at + rows * 8}});
      // {source, token} of each row, in order.
      const auto* const row = static_cast<const int32_t*>(leases[rank]);
      for (int64_t i = 1; i < rows; ++i) {
        EXPECT_TRUE(row[2 * i] > row[2 * i - 2] || (row[2 * i] == row[2 * i - 2] && row[2 * i + 1] > row[2 * i - 1]));
      }
    }
    counted.use(twFlat);  // the receive offsets were for one dispatch
  }
  for (const Kept& one : kept) {
    EXPECT_EQ(std::memcmp(one.memory, one.was.data(), one.was.size()), 0) << "rank " << one.rank;
    EXPECT_TW(twSuccess, twWindowFree(one.memory));
  }
}

// Announces a lease of rank 0 for a handle whose counts are known.
void announce(const World& world, Counted& counted, void* memory) {
  for (int rank = 0; rank < world.size(); ++rank) {
    twCountsInput_t input = TW_COUNTS_INPUT_INIT;
    input.send_only = 1;
    input.landing[0] = rank == 0 ? memory : nullptr;
    EXPECT_TW(twSuccess, twExchangeCounts(world[rank], counted.handles[rank], &input));
  }
  for (int rank = 0; rank < world.size(); ++rank) EXPECT_TW(twSuccess, counted.complete(rank));
}

// The next dispatch alone: what has landed is not written to by others of the same routing.
TEST(Leases, LandsOnce) {
  World world(2, leasing(kPage));
  Counted counted(world, {9, 9}, 3);
  counted.exchange();
  void* const memory = lease(world[0], kPage);
  announce(world, counted, memory);
  counted.use(twFlat);
  std::memset(memory, 0x5a, kPage);
  counted.use(twFlat);
  const auto* const bytes = static_cast<const unsigned char*>(memory);
  EXPECT_EQ(std::count(bytes, bytes + kPage, 0x5a), static_cast<int64_t>(kPage));
  EXPECT_TW(twSuccess, twWindowFree(memory));
}

// It belongs to the peers until its dispatch has ended: nobody else gets it before.
TEST(Leases, FreedWhileAnnounced) {
  World world(2, leasing(kPage));
  Counted counted(world, {5, 9}, 4);
  counted.exchange();
  void* const memory = lease(world[0], kPage);
  announce(world, counted, memory);
  EXPECT_TW(twInvalidUsage, twWindowTrim(memory, 1));
  EXPECT_TW(twSuccess, twWindowFree(memory));
  EXPECT_EQ(info_of(world[0]).used, kPage);
  void* other = nullptr;
  EXPECT_TW(twOutOfMemory, twWindowAlloc(world[0], 1, &other));
  counted.use(twFlat);  // whose copies are right
  EXPECT_EQ(info_of(world[0]).used, 0u);
  // Nor is it anybody's who never dispatches.
  void* const again = lease(world[0], kPage);
  announce(world, counted, again);
  EXPECT_TW(twSuccess, twWindowFree(again));
  announce(world, counted, nullptr);
  EXPECT_EQ(info_of(world[0]).used, 0u);
}

// One rank thinks that its receive offsets were used, and one does not: all fail alike, and the group goes on.
TEST(Leases, RanksMustAgree) {
  World world(2, leasing(kPage));
  Counted counted(world, {5, 9}, 5);
  counted.exchange();
  counted.handles[1]->has_offsets = false;
  std::vector<int32_t> tokens(2 * 9), rows(2 * 18);
  for (int rank : {0, 1}) {
    twDispatchInput_t input = TW_DISPATCH_INPUT_INIT;
    input.send_only = 1;
    input.payloads[0] = tensor(tokens.data(), twInt32, {rank == 0 ? 5 : 9, 2});
    twDispatchOutput_t output = TW_DISPATCH_OUTPUT_INIT;
    output.layout = twFlat;
    EXPECT_TW(twSuccess, twDispatch(world[rank], counted.handles[rank], &input, &output));
  }
  for (int rank : {0, 1}) {
    EXPECT_TW(twBoundMismatch, counted.complete(rank));
    EXPECT_NE(std::string(twLastError()).find("different exchanges of counts"), std::string::npos) << twLastError();
    EXPECT_TW(twSuccess, twHandleRelease(counted.handles[rank]));
  }
  counted.use(twFlat);
}

TEST(Leases, LivesOnWithoutItsGroup) {
  void* memory = nullptr;
  {
    World world(2, leasing(kPage));
    memory = lease(world[1], kPage);
    std::memset(memory, 7, kPage);
  }
  EXPECT_EQ(static_cast<unsigned char*>(memory)[kPage - 1], 7);
  EXPECT_TW(twSuccess, twWindowFree(memory));
}

TEST(Leases, PlacesAreChecked) {
  World world(2, leasing(2 * kPage));
  Counted counted(world, {3, 4}, 1);
  counted.exchange();
  const twGroup& group = *world[0];
  Counts& counts = counted.handles[0]->counts;
  const uint64_t first = group.config.map.leases();
  for (const auto& [at, right] : {std::pair<uint64_t, bool>{0, true},
                                  {first, true},
                                  {first - 256, false},
                                  {first + 2 * kPage - 2 * 9 * 8, true},
                                  {first + 2 * kPage - 2 * 9 * 8 + 1, false},
                                  {UINT64_MAX - 8, false}}) {
    counts.receive_offset[1] = at;
    EXPECT_EQ(within_leases(group.config.map, counts, 2 * 9), right) << at;
  }
}

}  // namespace
}  // namespace tw::test
