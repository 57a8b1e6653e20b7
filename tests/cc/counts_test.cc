// The exchange of counts: what every rank knows after it, what goes to its place because of it, and what ends it.
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "counted.h"

namespace tw::test {
namespace {

using std::chrono::milliseconds;

twGroupConfig_t impatient_counting(int timeout_ms = 60) {
  twGroupConfig_t config = counting(6, 2, 4);
  config.timeout_ms = timeout_ms;
  return config;
}

// The group still does what it should.
void expect_counts(const World& world, uint32_t seed) {
  Counted counted(world, std::vector<int>(world.size(), 3), seed);
  counted.exchange();
  counted.use(twFlat);
}

// ---- what is known, and where rows go ------------------------------------------------------------------------------

TEST(Counts, UnevenRanks) {
  const std::vector<std::vector<int>> all = {{5}, {5, 0}, {0, 7}, {7, 0, 3}, {1, 2, 7, 0}, {3, 0, 0, 6, 7}};
  uint32_t seed = 0;
  for (const std::vector<int>& tokens : all) {
    SCOPED_TRACE(tokens.size());
    twGroupConfig_t config = counting(7, 3, 7);
    config.row_alignment = 4;
    World world(static_cast<int>(tokens.size()), config);
    for (const twLayout_t layout : {twFlat, twGrouped, twFlat}) {
      Counted counted(world, tokens, ++seed);
      counted.exchange();
      counted.use(layout);
    }
  }
}

TEST(Counts, NoTokensAnywhere) {
  World world(3, counting(6, 2, 4));
  for (uint32_t seed = 1; seed < 4; ++seed) {
    Counted counted(world, {0, 0, 0}, seed);
    counted.exchange();
    counted.use(seed % 2 == 0 ? twFlat : twGrouped);
  }
  expect_counts(world, 4);
}

// A rank may hold no expert at all, and then receives nothing.
TEST(Counts, RanksWithoutExperts) {
  const int32_t homes[] = {2, 0, 2};
  const int32_t slots[] = {1, 0, 0};
  twGroupConfig_t config = counting(3, 2, 4);
  config.expert_rank = homes;
  config.expert_slot = slots;
  World world(4, config);
  for (const twLayout_t layout : {twFlat, twGrouped}) {
    Counted counted(world, {4, 3, 0, 2}, 3);
    counted.exchange();
    counted.use(layout);
  }
}

TEST(Counts, DroppedRows) {
  for (const int32_t room : {1, 3, 5, 8, 12}) {
    SCOPED_TRACE(room);
    twGroupConfig_t config = counting(4, 2, 4);
    config.max_recv_tokens = room;
    config.overflow = twOverflowDrop;
    config.row_alignment = 2;
    World world(3, config);
    for (const twLayout_t layout : {twFlat, twGrouped}) {
      Counted counted(world, {4, 4, 4}, 9);
      counted.exchange();
      counted.use(layout);
    }
  }
}

TEST(Counts, ManyInFlight) {
  const Env first("TOKENWAY_FIRST_STEP", "4294967292");  // steps wrap under way
  twGroupConfig_t config = counting(8, 3, 5);
  config.lanes = 3;
  World world(3, config);
  for (uint32_t round = 0; round < 4; ++round) {
    Counted a(world, {5, 3, 4}, 10 * round + 1);
    Counted b(world, {0, 5, 1}, 10 * round + 2);
    Counted c(world, {4, 4, 0}, 10 * round + 3);
    a.send(), b.send(), c.send();
    if (round % 2 == 0) {
      c.complete(), a.complete(), b.complete();
    } else {
      b.complete(), c.complete(), a.complete();
    }
    b.use(twGrouped), a.use(twFlat), c.use(twFlat);
  }
}

// Counts need a channel for their own step alone: many routings may be counted before the first is dispatched.
TEST(Counts, GiveTheirChannelBack) {
  World world(2, counting(8, 3, 5));
  std::vector<std::unique_ptr<Counted>> all;
  for (uint32_t seed = 1; seed < 7; ++seed) {
    all.push_back(std::make_unique<Counted>(world, std::vector<int>{5, 2}, seed));
    all.back()->exchange();
  }
  for (auto& counted : all) counted->use(twFlat);
  for (auto& counted : all) counted->use(twGrouped);
}

// With real waiting. The others' next exchange is in the other bank while the slow rank still reads the first.
TEST(Counts, SlowRank) {
  const twGroupConfig_t config = counting(6, 2, 4);
  World world(3, config);
  std::vector<std::unique_ptr<Counted>> all;
  for (uint32_t seed = 1; seed < 9; ++seed) {
    all.push_back(std::make_unique<Counted>(world, std::vector<int>{4, 3, 2}, seed));
  }
  on_all_ranks(3, [&](int rank) {
    for (auto& counted : all) {
      if (rank == 1) std::this_thread::sleep_for(milliseconds(5));
      EXPECT_TW(twSuccess, counted->exchange(rank));
      counted->expect_counts(rank);
    }
  });
}

TEST(Counts, UpdateForgetsThem) {
  World world(2, counting(6, 2, 4));
  Counted counted(world, {4, 3}, 1);
  counted.exchange();
  const twTensor_t ids = tensor(nullptr, twInt32, {0, 2});
  int64_t rows = 0;
  std::vector<int32_t> by_expert(6, -7);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_TW(twSuccess, twHandleUpdate(counted.handles[rank], &ids, nullptr));
    EXPECT_TW(twInvalidUsage, twHandleNumRecvRows(counted.handles[rank], twFlat, &rows));
    EXPECT_TW(twInvalidUsage, twHandleNumRecvTokens(counted.handles[rank], nullptr, nullptr));
    EXPECT_TW(twInvalidUsage, twHandleNumExpertRows(counted.handles[rank], by_expert.data()));
    EXPECT_TW(twSuccess, counted.exchange(rank, true));
    EXPECT_TW(twInvalidUsage, twHandleUpdate(counted.handles[rank], &ids, nullptr)) << "they are on their way";
  }
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_TW(twSuccess, counted.complete(rank));
    EXPECT_TW(twSuccess, twHandleNumRecvRows(counted.handles[rank], twFlat, &rows));
    EXPECT_EQ(rows, 0);
    EXPECT_TW(twInvalidArgument, twHandleNumExpertRows(counted.handles[rank], nullptr));
    EXPECT_NE(std::strstr(twLastError(), "rows is NULL"), nullptr) << twLastError();
    EXPECT_TW(twSuccess, twHandleNumExpertRows(counted.handles[rank], by_expert.data()));
    EXPECT_EQ(by_expert, (std::vector<int32_t>{0, 0, 0, -7, -7, -7}));
  }
}

// ---- errors of one call --------------------------------------------------------------------------------------------

// Every rank refuses, whether it would receive too much, send too much, or neither.
TEST(Counts, OverflowIsRefusedAlike) {
  twGroupConfig_t config = counting(3, 1, 4);
  config.max_recv_tokens = 7;
  World world(3, config);
  std::vector<int32_t> ids(4, 1);
  const twTensor_t crowd = tensor(ids.data(), twInt32, {4, 1});
  const twTensor_t nobody = tensor(nullptr, twInt32, {0, 1});
  Counted counted(world, {0, 0, 0}, 1);
  for (const int rank : {0, 2}) EXPECT_TW(twSuccess, twHandleUpdate(counted.handles[rank], &crowd, nullptr));
  EXPECT_TW(twSuccess, twHandleUpdate(counted.handles[1], &nobody, nullptr));
  counted.send();
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_TW(twRecvOverflow, counted.complete(rank));
    EXPECT_NE(std::strstr(twLastError(), "rank 1 would receive 8 rows; config.max_recv_tokens is 7"), nullptr)
        << twLastError();
    const twErrorRecord_t record = error_of(world[rank]);
    EXPECT_EQ(record.result, twRecvOverflow);
    EXPECT_EQ(record.peer, 1);
    EXPECT_EQ(record.phase, twPhaseCounts);
    EXPECT_EQ(record.sticky, 0);
    int64_t rows = 0;
    EXPECT_TW(twInvalidUsage, twHandleNumRecvRows(counted.handles[rank], twFlat, &rows)) << "there are none";
    int32_t by_expert = 0;
    EXPECT_TW(twInvalidUsage, twHandleNumExpertRows(counted.handles[rank], &by_expert));
  }
  expect_counts(world, 4);
}

TEST(Counts, RefusalIsToldAtOnce) {
  World world(3, counting(6, 2, 4));
  for (uint32_t round = 0; round < 3; ++round) {
    Counted counted(world, {4, 4, 4}, round + 1);
    twCountsInput_t wrong = TW_COUNTS_INPUT_INIT;
    wrong.send_only = 2;
    EXPECT_TW(twInvalidArgument, twExchangeCounts(world[1], counted.handles[1], &wrong));
    EXPECT_NE(std::strstr(twLastError(), "input.send_only is 2; it must be 0 or 1"), nullptr) << twLastError();
    for (const int rank : {0, 2}) EXPECT_TW(twSuccess, counted.exchange(rank, true));
    for (const int rank : {0, 2}) {
      EXPECT_TW(twPeerRefused, counted.complete(rank));
      EXPECT_EQ(error_of(world[rank]).peer, 1);
      EXPECT_EQ(error_of(world[rank]).phase, twPhaseCounts);
      EXPECT_EQ(error_of(world[rank]).sticky, 0);
    }
    for (const int rank : {0, 2}) EXPECT_TW(twSuccess, twHandleRelease(counted.handles[rank]));
    counted.exchange();
    counted.use(twFlat);
  }
}

// A wrong stream, which leaves send_only as it was.
twResult_t refuse(const World& world, const Counted& counted, int rank, bool send_only) {
  twCountsInput_t wrong = TW_COUNTS_INPUT_INIT;
  wrong.send_only = send_only ? 1 : 0;
  wrong.stream = &wrong;
  return twExchangeCounts(world[rank], counted.handles[rank], &wrong);
}

// Which channel is leased follows from the calls alone (S5), those that failed included, and not from when they were
// completed.
TEST(Counts, RefusalLeavesChannelsAlike) {
  twGroupConfig_t config = counting(6, 2, 4);
  config.lanes = 2;
  config.timeout_ms = 500;
  World world(2, config);
  Counted a(world, {4, 4}, 1), b(world, {4, 4}, 2), c(world, {4, 4}, 3);
  EXPECT_TW(twSuccess, a.exchange(0, true));
  EXPECT_TW(twInvalidArgument, refuse(world, a, 1, true));
  b.send();
  const twResult_t third[] = {c.exchange(0, true), c.exchange(1, true)};
  EXPECT_EQ(third[0], third[1]) << "the same call in the same order found a free channel on one rank only";
  EXPECT_TW(twPeerRefused, a.complete(0));
  b.complete();
  a.exchange();  // on the channel that it holds
  c.exchange();
  a.use(twFlat);
}

// Calls that wait fail in the same place on all ranks too, and their channel is free at once.
TEST(Counts, RefusalOfABlockingCallFreesTheChannel) {
  World world(2, counting(6, 2, 4));
  Counted a(world, {4, 4}, 1), b(world, {4, 4}, 2);
  on_all_ranks(2, [&](int rank) {
    EXPECT_TW(rank == 0 ? twPeerRefused : twInvalidArgument, rank == 0 ? a.exchange(0) : refuse(world, a, 1, false));
  });
  b.exchange();
  a.exchange();
}

// What fails is the call, not what the handle knows.
TEST(Counts, RefusalKeepsWhatTheHandleHas) {
  World world(2, counting(6, 2, 4));
  Counted counted(world, {4, 4}, 1);
  counted.exchange();
  for (int rank = 0; rank < 2; ++rank) EXPECT_TW(twInvalidUsage, counted.exchange(rank)) << "they are known";
  for (int rank = 0; rank < 2; ++rank) counted.expect_counts(rank);
  counted.use(twGrouped);
}

// Nobody else sends, so the next step on the channel has to wait for the refused one's signals, and says so (S2).
TEST(Counts, RefusedStepIsWaitedOut) {
  World world(2, impatient_counting());
  Counted counted(world, {4, 4}, 1);
  twCountsInput_t wrong = TW_COUNTS_INPUT_INIT;
  wrong.send_only = 2;
  EXPECT_TW(twInvalidArgument, twExchangeCounts(world[0], counted.handles[0], &wrong));
  EXPECT_TW(twTimeout, counted.exchange(0, true));
}

// ---- errors that finish the group ----------------------------------------------------------------------------------

void expect_finished(const World& world, int rank, Counted& counted, twResult_t how) {
  EXPECT_EQ(error_of(world[rank]).sticky, 1);
  int64_t rows = 0;
  EXPECT_TW(twInvalidUsage, twHandleNumRecvRows(counted.handles[rank], twFlat, &rows)) << "they did not come";
  const std::vector<uint8_t> before = world.window(rank);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TW(how, counted.exchange(rank));
  EXPECT_TW(how, counted.exchange(rank, true));
  twDispatchInput_t input = TW_DISPATCH_INPUT_INIT;
  twDispatchOutput_t output = TW_DISPATCH_OUTPUT_INIT;
  EXPECT_TW(how, twDispatch(world[rank], counted.handles[rank], &input, &output));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(world.config.timeout_ms)) << "without waiting";
  EXPECT_EQ(world.window(rank), before) << "S6: nothing is sent any more";
}

TEST(Counts, TimeoutNamesTheLateRank) {
  World world(3, impatient_counting(kOneWaitMs));
  Counted counted(world, {4, 4, 4}, 1);
  EXPECT_TW(twSuccess, counted.exchange(0, true));
  EXPECT_TW(twSuccess, counted.exchange(1, true));
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TW(twTimeout, counted.complete(0));
  EXPECT_GE(std::chrono::steady_clock::now() - begin, milliseconds(kOneWaitMs - 5));
  EXPECT_NE(std::strstr(twLastError(), "rank 2 did not arrive in time in the exchange of counts"), nullptr)
      << twLastError();
  const twErrorRecord_t record = error_of(world[0]);
  EXPECT_EQ(record.peer, 2);
  EXPECT_EQ(record.reporter, 0);
  EXPECT_EQ(record.phase, twPhaseCounts);
  EXPECT_EQ(record.lane, 0);
  EXPECT_EQ(record.expected, 1u);
  EXPECT_EQ(record.seen, 0u);
  expect_finished(world, 0, counted, twTimeout);
  // Rank 1 hears of it, at once, and blames the same rank.
  EXPECT_TW(twTimeout, counted.complete(1));
  EXPECT_EQ(error_of(world[1]).peer, 2);
  expect_finished(world, 1, counted, twTimeout);
  EXPECT_TW(twExcluded, counted.exchange(2)) << "the late rank is told";
}

// One exchanges counts where the others dispatch what they have counted. Whoever looks finds out; nobody goes on.
TEST(Counts, CallMismatch) {
  World world(3, counting(6, 2, 4));
  Counted counted(world, {0, 0, 0}, 1);
  counted.exchange();
  Counted other(world, {0, 0, 0}, 2);
  twDispatchInput_t input = TW_DISPATCH_INPUT_INIT;
  input.payloads[0] = tensor(nullptr, twInt32, {0, 2});
  input.send_only = 1;
  twDispatchOutput_t output = TW_DISPATCH_OUTPUT_INIT;
  output.layout = twFlat;
  EXPECT_TW(twSuccess, twDispatch(world[0], counted.handles[0], &input, &output));
  EXPECT_TW(twSuccess, other.exchange(1, true));
  EXPECT_TW(twSuccess, twDispatch(world[2], counted.handles[2], &input, &output));
  EXPECT_TW(twCallMismatch, other.complete(1));
  EXPECT_TW(twCallMismatch, counted.complete(0));
  EXPECT_TW(twCallMismatch, counted.complete(2));
  EXPECT_EQ(error_of(world[1]).phase, twPhaseCounts);
  expect_finished(world, 1, other, twCallMismatch);
}

// Counts of one routing and rows of another: n of the signal is not what was announced.
TEST(Counts, RowsThatWereNotAnnounced) {
  World world(2, counting(2, 1, 4));
  std::vector<int32_t> ids = {1, 1, 0};
  const twTensor_t more = tensor(ids.data(), twInt32, {3, 1});
  Counted a(world, {0, 0}, 1);
  Counted b(world, {0, 0}, 1);
  EXPECT_TW(twSuccess, twHandleUpdate(b.handles[1], &more, nullptr));
  for (Counted* const counted : {&a, &b}) {
    counted->send();
    for (int rank = 0; rank < 2; ++rank) EXPECT_TW(twSuccess, counted->complete(rank));
  }
  std::vector<int32_t> tokens(6);
  for (int rank = 0; rank < 2; ++rank) {
    twDispatchInput_t input = TW_DISPATCH_INPUT_INIT;
    input.payloads[0] = tensor(tokens.data(), twInt32, {rank == 0 ? 0 : 3, 2});
    input.send_only = 1;
    twDispatchOutput_t output = TW_DISPATCH_OUTPUT_INIT;
    output.layout = twFlat;
    EXPECT_TW(twSuccess, twDispatch(world[rank], (rank == 0 ? a : b).handles[rank], &input, &output));
  }
  EXPECT_TW(twCallMismatch, a.complete(0));
  EXPECT_EQ(error_of(world[0]).peer, 1);
  until_looked_again();
  EXPECT_TW(twCallMismatch, b.complete(1));
}

TEST(Counts, DeadRank) {
  const twGroupConfig_t config = counting(6, 2, 4);
  World world(3, config);
  Counted counted(world, {4, 4, 4}, 1);
  world.kill(2);
  on_all_ranks(2, [&](int rank) {
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_TW(twPeerDied, counted.exchange(rank));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(config.timeout_ms / 2));
    EXPECT_EQ(error_of(world[rank]).peer, 2);
    EXPECT_EQ(error_of(world[rank]).phase, twPhaseCounts);
    expect_finished(world, rank, counted, twPeerDied);
    twGroup_t survivors = nullptr;
    ASSERT_TW(twSuccess, twGroupShrink(world[rank], nullptr, &survivors));
    const twTensor_t ids = tensor(nullptr, twInt32, {0, 2});
    twHandle_t handle = nullptr;
    EXPECT_TW(twSuccess, twHandleCreate(&handle, survivors, &ids, nullptr, nullptr));
    const twCountsInput_t input = TW_COUNTS_INPUT_INIT;
    EXPECT_TW(twSuccess, twExchangeCounts(survivors, handle, &input));
    int64_t rows = -1;
    EXPECT_TW(twSuccess, twHandleNumRecvRows(handle, twFlat, &rows));
    EXPECT_EQ(rows, 0);
    EXPECT_TW(twSuccess, twGroupDestroy(survivors));
  });
}

// Its counts are here: the exchange needs nothing more of it, the dispatch does.
TEST(Counts, DeathAfterTheSignal) {
  World world(3, counting(6, 2, 4));
  Counted counted(world, {4, 4, 4}, 1);
  counted.send();
  world.kill(2);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_TW(twSuccess, counted.complete(rank));
    counted.expect_counts(rank);
  }
  Counted next(world, {4, 4, 4}, 2);
  on_all_ranks(2, [&](int rank) { EXPECT_TW(twPeerDied, next.exchange(rank)); });
}

}  // namespace
}  // namespace tw::test
