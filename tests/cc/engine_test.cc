// What src/net/engine.h promises, of every engine that there is.
#include <algorithm>
#include <cstring>

#include "engines.h"

namespace tw::test {
namespace {

constexpr uint64_t kWords = 4096;  // where data begin: words are before them
constexpr uint64_t kWindow = uint64_t{1} << 21;

class Engines : public ::testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    if (!is_libfabric(GetParam())) return;
    if (const std::string missing = libfabric_missing(); !missing.empty()) GTEST_SKIP() << missing;
  }
};
INSTANTIATE_TEST_SUITE_P(All, Engines, ::testing::Values(Kind::kPretended, Kind::kScripted, Kind::kTcp, Kind::kShm),
                         [](const auto& tested) { return name_of(tested.param); });

// Those that survive one that ends without a word. shm is not of them: in one process endpoints share what goes.
class Survivors : public Engines {};
INSTANTIATE_TEST_SUITE_P(All, Survivors, ::testing::Values(Kind::kPretended, Kind::kScripted, Kind::kTcp),
                         [](const auto& tested) { return name_of(tested.param); });

std::byte pattern(uint64_t round, uint64_t i) {
  return static_cast<std::byte>((round * 131 + i * 7 + (i >> 8)) & 0xff);
}

void fill(std::vector<std::byte>& memory, uint64_t at, uint64_t bytes, uint64_t round) {
  for (uint64_t i = 0; i < bytes; ++i) memory[at + i] = pattern(round, i);
}

// How many bytes at a place are not those of the round.
uint64_t wrong(const std::vector<std::byte>& memory, uint64_t at, uint64_t bytes, uint64_t round) {
  uint64_t count = 0;
  for (uint64_t i = 0; i < bytes; ++i) count += memory[at + i] != pattern(round, i);
  return count;
}

// Two ranks play ping-pong with data of all sizes, at odd places, in two banks.
TEST_P(Engines, AWordComesBehindItsData) {
  EnginesOf world(GetParam(), 2, kWindow, {.chunk_bytes = 50000});
  constexpr uint64_t kSizes[] = {0, 1, 7, 8, 4097, 65536, 333333, 900001, 3};
  on_all_ranks(2, [&](int rank) {
    const int peer = 1 - rank;
    uint64_t round = 0;
    for (const uint64_t bytes : kSizes) {
      ++round;
      const uint64_t at = kWords + round % 2 * 1000000 + round;
      for (const int turn : {0, 1}) {
        if (turn != rank) {
          ASSERT_TRUE(world.await_word(rank, 8, round));
          EXPECT_EQ(wrong(world.targets[rank], at, bytes, 2 * round + peer), 0u) << bytes;
          continue;
        }
        fill(world.sources[rank], at, bytes, 2 * round + rank);
        ASSERT_EQ(world[rank].put(peer, world.put(at, at, bytes), world.word(8, 1)), Posted::kTaken);
      }
    }
  });
  world.close();
}

TEST_P(Engines, AWordComesBehindAllEarlierPuts) {
  EnginesOf world(GetParam(), 2, kWindow, {.depth = 500});
  constexpr uint64_t kRow = 3001;
  constexpr uint64_t kRows = 300;
  for (uint64_t row = 0; row < kRows; ++row) {
    fill(world.sources[0], kWords + row * kRow, kRow, row);
    ASSERT_EQ(world[0].put(1, world.put(kWords + row * kRow, kWords + row * kRow, kRow)), Posted::kTaken);
  }
  ASSERT_EQ(world[0].put(1, world.put(0, 0, 0), world.word(16, 5)), Posted::kTaken);
  ASSERT_TRUE(world.await_word(1, 16, 5));
  uint64_t bad = 0;
  for (uint64_t row = 0; row < kRows; ++row) bad += wrong(world.targets[1], kWords + row * kRow, kRow, row);
  EXPECT_EQ(bad, 0u);
  EXPECT_EQ(world[0].taken(1), kRows + 1);
  EXPECT_TRUE(world.await_done(0, 1, kRows + 1));
  world.close();
}

// Two threads a rank, all to one word of rank 0, and to one each; sums pass 2^64.
TEST_P(Engines, AddsOfManyPeersAddUp) {
  EnginesOf world(GetParam(), 4, kWindow);
  constexpr uint64_t kAdds = 150;
  constexpr uint64_t kHuge = ~uint64_t{0} / 3;
  on_all_ranks(6, [&](int thread) {
    const int rank = 1 + thread / 2;
    for (uint64_t i = 0; i < kAdds; ++i) {
      ASSERT_EQ(world.insist(rank, 0, world.put(0, 0, 0), world.word(8, kHuge)), Posted::kTaken);
      ASSERT_EQ(world.insist(rank, 0, world.put(0, 0, 0), world.word(64 + 8 * rank, i)), Posted::kTaken);
    }
  });
  EXPECT_TRUE(world.await_word(0, 8, 6 * kAdds * kHuge));
  for (int rank = 1; rank < 4; ++rank) EXPECT_TRUE(world.await_word(0, 64 + 8 * rank, kAdds * (kAdds - 1)));
  world.close();
}

// A source is written anew as soon as its put is done; each put's bytes must be its own.
TEST_P(Engines, ASourceIsFreeWhenItsPutIsDone) {
  EnginesOf world(GetParam(), 2, kWindow, {.chunk_bytes = 10000});
  constexpr uint64_t kRow = 30001;
  constexpr uint64_t kRounds = 40;
  for (uint64_t round = 0; round < kRounds; ++round) {
    fill(world.sources[0], 0, kRow, round);
    ASSERT_EQ(world[0].put(1, world.put(0, kWords + round * kRow, kRow)), Posted::kTaken);
    ASSERT_TRUE(world.await_done(0, 1, world[0].taken(1)));
  }
  fill(world.sources[0], 0, kRow, 99);
  ASSERT_EQ(world[0].put(1, world.put(0, 0, 0), world.word(0, 1)), Posted::kTaken);
  ASSERT_TRUE(world.await_word(1, 0, 1));
  for (uint64_t round = 0; round < kRounds; ++round) {
    ASSERT_EQ(wrong(world.targets[1], kWords + round * kRow, kRow, round), 0u) << round;
  }
  world.close();
}

// More than a peer may have: what was taken arrives, and nothing else does.
TEST_P(Engines, NoMoreIsTakenThanThereIsRoomFor) {
  EnginesOf world(GetParam(), 3, kWindow, {.depth = 3, .chunk_bytes = 4096});
  uint64_t taken = 0;
  for (int i = 0; i < 2000; ++i) {
    const Posted posted = world[0].put(1, world.put(kWords, kWords, 20000), world.word(8, 1));
    ASSERT_TRUE(posted == Posted::kTaken || posted == Posted::kFull);
    taken += posted == Posted::kTaken;
    ASSERT_LE(world[0].taken(1) - world[0].done(1), 3u);
  }
  EXPECT_EQ(world[0].taken(1), taken);
  EXPECT_TRUE(world.await_word(1, 8, taken));
  EXPECT_TRUE(world.await_done(0, 1, taken));
  world.close();
  EXPECT_EQ(world.load(1, 8), taken);
  EXPECT_EQ(world[0].put(1, world.put(0, 0, 0)), Posted::kGone) << "after close";
}

TEST_P(Engines, WhatIsNowhereIsRefused) {
  EnginesOf world(GetParam(), 2, kWindow);
  net::Engine& engine = world[0];
  const net::Put whole = world.put(0, 0, kWindow - 8);
  EXPECT_EQ(engine.put(2, whole), Posted::kRefused);
  EXPECT_EQ(engine.put(-1, whole), Posted::kRefused);
  EXPECT_EQ(engine.put(0, whole), Posted::kRefused) << "to itself";
  EXPECT_EQ(engine.put(1, world.put(1, 0, kWindow)), Posted::kRefused);
  EXPECT_EQ(engine.put(1, world.put(0, 1, kWindow)), Posted::kRefused);
  EXPECT_EQ(engine.put(1, world.put(~uint64_t{0}, 0, 2)), Posted::kRefused) << "the end wraps around";
  EXPECT_EQ(engine.put(1, {{0, 0}, {2, 0}, 8}), Posted::kRefused) << "no such window";
  EXPECT_EQ(engine.put(1, {{-1, 0}, {1, 0}, 8}), Posted::kRefused);
  EXPECT_EQ(engine.put(1, whole, world.word(12, 1)), Posted::kRefused) << "a word that is not aligned";
  EXPECT_EQ(engine.put(1, whole, world.word(kWindow, 1)), Posted::kRefused);
  EXPECT_EQ(engine.put(1, whole, world.word(kWindow - 8, 1)), Posted::kTaken);
  EXPECT_EQ(engine.taken(1), 1u);
  EXPECT_TRUE(world.await_word(1, kWindow - 8, 1));
  world.close();
}

TEST_P(Engines, AWindowThatFailsOnARankFailsOnAll) {
  EnginesOf world(GetParam(), 3, kWindow);
  std::vector<std::vector<std::byte>> more(3, std::vector<std::byte>(64));
  on_all_ranks(3, [&](int rank) {
    int window = -1;
    const Status failed =
        world[rank].add_window(world.meeting(rank, 100), rank == 1 ? nullptr : more[rank].data(), 64, &window);
    EXPECT_EQ(failed.code, twInvalidArgument);
    EXPECT_EQ(window, -1);
    if (rank != 1) {
      EXPECT_NE(failed.text().find("rank 1"), std::string::npos) << failed.text();
    }
    const Status made = world[rank].add_window(world.meeting(rank, 110), more[rank].data(), 64, &window);
    EXPECT_TRUE(made.ok()) << made.text();
    EXPECT_EQ(window, 2);
    EXPECT_EQ(world[rank].put((rank + 1) % 3, {{0, 0}, {2, 0}, 0}, {{2, 8}, 4}), Posted::kTaken);
    const std::atomic_ref word(*reinterpret_cast<uint64_t*>(more[rank].data() + 8));
    EXPECT_TRUE(world.await([&] { return word.load(std::memory_order_acquire) == 4; }, rank));
  });
  world.close();
}

// Threads of all ranks put to all peers at once, and poll; every row arrives whole.
TEST_P(Engines, ThreadsPutAtOnce) {
  constexpr int kRanks = 3;
  constexpr int kThreads = 2;
  constexpr uint64_t kRow = 777;
  constexpr uint64_t kRows = 60;
  EnginesOf world(GetParam(), kRanks, kWindow, {.depth = 8});
  const auto place = [](int from, int thread, uint64_t row) {
    return kWords + ((from * kThreads + thread) * kRows + row) * kRow;
  };
  for (int rank = 0; rank < kRanks; ++rank) {
    for (int thread = 0; thread < kThreads; ++thread) {
      for (uint64_t row = 0; row < kRows; ++row) {
        fill(world.sources[rank], place(rank, thread, row), kRow, 100 * rank + 10 * thread + row);
      }
    }
  }
  on_all_ranks(kRanks * kThreads, [&](int at) {
    const int rank = at / kThreads;
    const int thread = at % kThreads;
    for (uint64_t row = 0; row < kRows; ++row) {
      for (int step = 1; step < kRanks; ++step) {
        const uint64_t where = place(rank, thread, row);
        ASSERT_EQ(world.insist(rank, (rank + step) % kRanks, world.put(where, where, kRow), world.word(8 * rank, 1)),
                  Posted::kTaken);
      }
    }
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    for (int from = 0; from < kRanks; ++from) {
      if (from == rank) continue;
      ASSERT_TRUE(world.await_word(rank, 8 * from, kThreads * kRows));
      uint64_t bad = 0;
      for (int thread = 0; thread < kThreads; ++thread) {
        for (uint64_t row = 0; row < kRows; ++row) {
          bad += wrong(world.targets[rank], place(from, thread, row), kRow, 100 * from + 10 * thread + row);
        }
      }
      EXPECT_EQ(bad, 0u);
    }
  }
  world.close();
}

// All close at once behind more than the network takes at a time: everything has arrived when close returns.
TEST_P(Engines, WhatIsUnderWayArrivesBeforeTheEnd) {
  EnginesOf world(GetParam(), 3, kWindow, {.depth = 200, .chunk_bytes = 9999});
  constexpr uint64_t kRow = 60001;
  on_all_ranks(3, [&](int rank) {
    for (uint64_t i = 0; i < 10; ++i) {
      fill(world.sources[rank], kWords + i * kRow, kRow, 10 * rank + i);
      const uint64_t to = kWords + (rank * 10 + i) * kRow;
      for (int step = 1; step < 3; ++step) {
        ASSERT_EQ(world[rank].put((rank + step) % 3, world.put(kWords + i * kRow, to, kRow)), Posted::kTaken);
      }
    }
    const Status closed = world[rank].close(world.meeting(rank, 30));
    EXPECT_TRUE(closed.ok()) << closed.text();
    for (int from = 0; from < 3; ++from) {
      if (from == rank) continue;
      for (uint64_t i = 0; i < 10; ++i) {
        EXPECT_EQ(wrong(world.targets[rank], kWords + (from * 10 + i) * kRow, kRow, 10 * from + i), 0u);
      }
    }
  });
}

// Rank 2 ends without a word. What is put to it fails in bounded time, the others' puts arrive, and they close.
TEST_P(Survivors, OfAPeerThatIsGoneHaveARecord) {
  EnginesOf world(GetParam(), 3, kWindow);
  ASSERT_EQ(world[0].put(2, world.put(0, kWords, 100), world.word(8, 1)), Posted::kTaken);
  ASSERT_TRUE(world.await_word(2, 8, 1));
  world.engines[2].reset();
  world.bootstraps[2].reset();
  on_all_ranks(2, [&](int rank) {
    const auto until = Clock::now() + kNobodyWaitsAsLong;
    while (world[rank].put(2, world.put(0, kWords, 100), world.word(8, 1)) != Posted::kGone && Clock::now() < until) {
      if (!world[rank].poll()) std::this_thread::sleep_for(1ms);
    }
    const Status failure = world[rank].failure(2);
    EXPECT_EQ(failure.code, twPeerDied);
    EXPECT_NE(failure.text().find("rank 2"), std::string::npos) << failure.text();
    const int other = 1 - rank;
    for (uint64_t i = 0; i < 50; ++i) {
      ASSERT_EQ(world.insist(rank, other, world.put(0, kWords, 5000), world.word(16, 1)), Posted::kTaken);
    }
    EXPECT_TRUE(world.await_word(rank, 16, 50));
    EXPECT_TRUE(world[rank].failure(other).ok());
    EXPECT_EQ(world[rank].close(world.meeting(rank, 30)).code, twPeerDied);
  });
}

TEST_P(Engines, APeerMayBeGivenUp) {
  EnginesOf world(GetParam(), 3, kWindow);
  EXPECT_TRUE(world[0].failure(1).ok());
  world[0].give_up(1, fail(twPeerAborted, "a test gave rank {} up", 1));
  world[0].give_up(1, fail(twTimeout, "a second reason"));
  EXPECT_EQ(world[0].failure(1).text(), "a test gave rank 1 up");
  EXPECT_EQ(world[0].put(1, world.put(0, 0, 8)), Posted::kGone);
  EXPECT_EQ(world[0].put(2, world.put(0, 0, 8), world.word(8, 2)), Posted::kTaken);
  EXPECT_TRUE(world.await_word(2, 8, 2));
}

// The pretended engine's own mishaps.

TEST(PretendedEngine, AWordIsLostAndAnotherDoubled) {
  EnginesOf world(Kind::kPretended, 2, kWindow);
  world.pretended.lose_word(0, 1, 1);
  world.pretended.double_word(0, 1, 3);
  for (uint64_t i = 0; i < 5; ++i) {
    ASSERT_EQ(world[0].put(1, world.put(0, 0, 0), world.word(8, uint64_t{1} << 8 * i)), Posted::kTaken);
  }
  EXPECT_TRUE(world.await_word(1, 8, 0x0102010001));
  world.close();
}

TEST(PretendedEngine, ARankIsLostBehindSoManyOperations) {
  EnginesOf world(Kind::kPretended, 3, kWindow);
  world.pretended.lose_rank(1, 3);
  for (uint64_t i = 0; i < 5; ++i) (void)world[1].put(0, world.put(0, 0, 0), world.word(8, 1));
  EXPECT_TRUE(world.await([&] { return !world[0].failure(1).ok(); }, 0));
  EXPECT_EQ(world.load(0, 8), 3u);
  EXPECT_EQ(world[2].put(1, world.put(0, 0, 0)), Posted::kGone);
  EXPECT_EQ(world[2].put(0, world.put(0, 0, 0), world.word(16, 1)), Posted::kTaken);
  EXPECT_TRUE(world.await_word(0, 16, 1));
}

// By one seed operations to different peers overtake each other in one way, and by another in another.
TEST(PretendedEngine, TheSeedDecidesWhoIsServed) {
  const auto order = [](uint64_t seed) {
    PretendedNet between(3, seed, 4);
    const auto bootstraps = make_local_bootstraps(3);
    std::vector<std::unique_ptr<net::Engine>> engines;
    for (int rank = 0; rank < 3; ++rank) engines.push_back(between.engine(rank));
    std::vector<std::vector<std::byte>> windows(3, std::vector<std::byte>(64));
    const std::vector<int> members{0, 1, 2};
    on_all_ranks(3, [&](int rank) {
      int window = -1;
      const net::Meeting meeting{bootstraps[rank].get(), members, 1, Clock::now() + kNobodyWaitsAsLong};
      ASSERT_TRUE(engines[rank]->add_window(meeting, windows[rank].data(), 64, &window).ok());
    });
    between.hold(true);
    for (int i = 0; i < 20; ++i) {
      for (const int peer : {1, 2}) EXPECT_EQ(engines[0]->put(peer, {{0, 0}, {0, 8}, 8}), Posted::kTaken);
    }
    between.hold(false);
    while (engines[0]->done(1) + engines[0]->done(2) < 40) std::this_thread::yield();
    return between.served();
  };
  EXPECT_EQ(order(5), order(5));
  EXPECT_NE(order(5), order(6));
  std::vector<std::pair<int, int>> in_turns;
  for (int i = 0; i < 40; ++i) in_turns.emplace_back(0, 1 + i % 2);
  EXPECT_NE(order(5), in_turns);
}

}  // namespace
}  // namespace tw::test
