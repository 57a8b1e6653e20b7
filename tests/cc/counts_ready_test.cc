// Asking for counts instead of waiting for them: what the answer means, what it changes (nothing), what ends it.
#include <chrono>
#include <cstring>
#include <thread>

#include "counted.h"

namespace tw::test {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// Between hosts what has been sent takes a while; where it is here, nothing is waited for.
constexpr int32_t kSoon = 10000;

int32_t ready(const Counted& counted, int rank, int32_t timeout_ms = 0) {
  int32_t answer = -1;
  EXPECT_TW(twSuccess, twHandleCountsReady(counted.handles[rank], timeout_ms, &answer)) << "rank " << rank;
  return answer;
}

twResult_t ask(twHandle_t handle) {
  int32_t ignored = 0;
  return twHandleCountsReady(handle, 0, &ignored);
}

TEST(CountsReady, OnceAllHaveCome) {
  World world(3, counting(6, 2, 4));
  Counted counted(world, {4, 0, 3}, 1);
  for (int rank = 0; rank < 3; ++rank) EXPECT_TW(twInvalidUsage, ask(counted.handles[rank])) << "nothing was asked for";
  for (const int last : {0, 1, 2}) {
    Counted other(world, {1, 4, 2}, 2);
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == last) continue;
      EXPECT_TW(twSuccess, other.exchange(rank, true));
    }
    const auto begin = Clock::now();
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == last) continue;
      EXPECT_EQ(ready(other, rank), 0) << "rank " << last << " has not sent";
    }
    EXPECT_LT(Clock::now() - begin, milliseconds(world.config.timeout_ms / 2)) << "to ask is not to wait";
    EXPECT_TW(twSuccess, other.exchange(last, true));
    for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(ready(other, rank, kSoon), 1);
    other.complete();
    for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(ready(other, rank, kSoon), 1) << "they are known";
    other.use(twFlat);
    const twTensor_t ids = tensor(nullptr, twInt32, {0, 2});
    EXPECT_TW(twSuccess, twHandleUpdate(other.handles[0], &ids, nullptr));
    EXPECT_TW(twInvalidUsage, ask(other.handles[0])) << "those of another routing are";
  }
}

// Leases follow from the calls alone (S5): however often a rank has asked, its channel is held until twComplete.
TEST(CountsReady, ChangesNothing) {
  World world(2, counting(6, 2, 4));
  Counted counted(world, {4, 3}, 1), other(world, {2, 4}, 2);
  counted.send();
  const std::vector<uint8_t> before = world.window(1);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(ready(counted, 0, kSoon), 1);
  EXPECT_EQ(world.window(1), before);
  int64_t rows = 0;
  EXPECT_TW(twInvalidUsage, twHandleNumRecvRows(counted.handles[0], twFlat, &rows));
  for (int rank = 0; rank < 2; ++rank) EXPECT_TW(twInvalidUsage, other.exchange(rank, true)) << "no free lane";
  counted.complete();
  other.exchange();
}

TEST(CountsReady, WaitsAtMostSoLong) {
  World world(2, counting(6, 2, 4));
  Counted counted(world, {4, 3}, 1);
  EXPECT_TW(twSuccess, counted.exchange(0, true));
  const auto begin = Clock::now();
  EXPECT_EQ(ready(counted, 0, 40), 0);
  EXPECT_GE(Clock::now() - begin, milliseconds(35));
  EXPECT_LT(Clock::now() - begin, milliseconds(world.config.timeout_ms / 2));
  EXPECT_EQ(error_of(world[0]).result, twSuccess) << "nobody is late yet";
  EXPECT_TW(twSuccess, counted.exchange(1, true));
  EXPECT_EQ(ready(counted, 0, 5000), 1);
  counted.complete();
}

TEST(CountsReady, WaitEndsWhenTheyCome) {
  World world(3, counting(6, 2, 4));
  Counted counted(world, {4, 3, 1}, 1);
  on_all_ranks(3, [&](int rank) {
    if (rank == 1) std::this_thread::sleep_for(milliseconds(30));
    EXPECT_TW(twSuccess, counted.exchange(rank, true));
    EXPECT_EQ(ready(counted, rank, rank == 0 ? -1 : 10000), 1);
    EXPECT_TW(twSuccess, counted.complete(rank));
    counted.expect_counts(rank);
  });
}

// What one channel waits for holds up no other.
TEST(CountsReady, OtherChannelsGoOn) {
  twGroupConfig_t config = counting(6, 2, 4);
  config.lanes = 2;
  World world(2, config);
  Counted slow(world, {4, 3}, 1);
  EXPECT_TW(twSuccess, slow.exchange(0, true, 0));
  for (uint32_t seed = 2; seed < 5; ++seed) {
    Counted other(world, {2, 4}, seed);
    for (int rank = 0; rank < 2; ++rank) EXPECT_TW(twSuccess, other.exchange(rank, true, 1));
    EXPECT_EQ(ready(slow, 0), 0);
    other.complete();
  }
  EXPECT_TW(twSuccess, slow.exchange(1, true, 0));
  EXPECT_EQ(ready(slow, 0, kSoon), 1);
  slow.complete();
}

// ---- what ends the asking (S6) -------------------------------------------------------------------------------------

// Asks until it is ready, but not for ever. A wait of the whole timeout would follow where asking had not begun it.
void expect_end(const World& world, Counted& counted, twResult_t how, int peer) {
  const auto begin = Clock::now();
  while (ready(counted, 0) == 0 && Clock::now() - begin < milliseconds(20000)) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_EQ(ready(counted, 0, kSoon), 1);
  EXPECT_EQ(ready(counted, 0, -1), 1);
  const auto known = Clock::now();
  EXPECT_TW(how, counted.complete(0));
  EXPECT_LT(Clock::now() - known, milliseconds(kOneWaitMs)) << "it does not wait again";
  EXPECT_EQ(error_of(world[0]).peer, peer);
  EXPECT_EQ(error_of(world[0]).phase, twPhaseCounts);
}

TEST(CountsReady, LateRank) {
  twGroupConfig_t config = counting(6, 2, 4);
  config.timeout_ms = kOneWaitMs;
  World world(3, config);
  Counted counted(world, {4, 3, 1}, 1);
  for (const int rank : {0, 1}) EXPECT_TW(twSuccess, counted.exchange(rank, true));
  const auto begin = Clock::now();
  expect_end(world, counted, twTimeout, 2);
  EXPECT_GE(Clock::now() - begin, milliseconds(kOneWaitMs - 10)) << "it was not given up before its time";
  EXPECT_EQ(ready(counted, 1, kSoon), 1) << "a finished group waits for nobody";
  EXPECT_TW(twTimeout, counted.complete(1));
}

TEST(CountsReady, DeadRank) {
  World world(3, counting(6, 2, 4));
  Counted counted(world, {4, 3, 1}, 1);
  for (const int rank : {0, 1}) EXPECT_TW(twSuccess, counted.exchange(rank, true));
  EXPECT_EQ(ready(counted, 0), 0);
  world.kill(2);
  expect_end(world, counted, twPeerDied, 2);
  EXPECT_TW(twPeerDied, counted.complete(1));
}

TEST(CountsReady, RankThatGivesUp) {
  World world(3, counting(6, 2, 4));
  Counted counted(world, {4, 3, 1}, 1);
  for (const int rank : {0, 1}) EXPECT_TW(twSuccess, counted.exchange(rank, true));
  EXPECT_TW(twSuccess, twGroupAbort(world[2]));
  expect_end(world, counted, twPeerAborted, 2);
  EXPECT_TW(twPeerAborted, counted.complete(1));
}

TEST(CountsReady, RankThatRefuses) {
  World world(2, counting(6, 2, 4));
  Counted counted(world, {4, 3}, 1);
  EXPECT_TW(twSuccess, counted.exchange(0, true));
  twCountsInput_t wrong = TW_COUNTS_INPUT_INIT;
  wrong.send_only = 2;
  EXPECT_TW(twInvalidArgument, twExchangeCounts(world[1], counted.handles[1], &wrong));
  expect_end(world, counted, twPeerRefused, 1);
}

TEST(CountsReady, Arguments) {
  World world(1, counting(6, 2, 4));
  Counted counted(world, {4}, 1);
  EXPECT_TW(twSuccess, counted.exchange(0, true));
  int32_t answer = 7;
  EXPECT_TW(twInvalidArgument, twHandleCountsReady(nullptr, 0, &answer));
  EXPECT_TW(twInvalidArgument, twHandleCountsReady(counted.handles[0], 0, nullptr));
  EXPECT_TW(twInvalidArgument, twHandleCountsReady(counted.handles[0], -2, &answer));
  EXPECT_NE(std::strstr(twLastError(), "timeout_ms is -2; it must be -1"), nullptr) << twLastError();
  EXPECT_EQ(answer, 7);
  EXPECT_EQ(ready(counted, 0, kSoon), 1);
  counted.complete();
  World low(1, make_config(6, 2, 4));
  const twTensor_t ids = tensor(nullptr, twInt32, {0, 2});
  twHandle_t handle = nullptr;
  EXPECT_TW(twSuccess, twHandleCreate(&handle, low[0], &ids, nullptr, nullptr));
  EXPECT_TW(twInvalidUsage, ask(handle));
  EXPECT_NE(std::strstr(twLastError(), "twLowLatency"), nullptr) << twLastError();
}

}  // namespace
}  // namespace tw::test
