// Ranks as threads of their own, nothing staged, random delays: what ThreadSanitizer watches.
#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "harness.h"

namespace tw::test {
namespace {

void dawdle(std::mt19937& random) {
  switch (random() % 8) {
    case 0:
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 400));
      break;
    case 1:
      std::this_thread::yield();
      break;
    default:
      break;
  }
}

// Each thread holds its own traffic, seeded alike: ranks share nothing but the window.
void one_rank(const World& world, int rank, int steps, uint32_t seed) {
  std::mt19937 random(seed * 97 + static_cast<uint32_t>(rank));
  for (int step = 0; step < steps; ++step) {
    const uint32_t salt = seed + static_cast<uint32_t>(step);
    std::vector<int> tokens;
    for (int r = 0; r < world.size(); ++r) {
      tokens.push_back(static_cast<int>(mix({salt, static_cast<uint64_t>(r)}) % (world.config.max_tokens + 1)));
    }
    const Traffic traffic = make_traffic(world.config, tokens, salt);
    Style style{step % 3 == 2 ? twExpertMajor : twRankMajor, twWeightTopk, twBfloat16, twFloat32};
    style.own_memory = step % 3 == 2;
    style.in_place = step % 3 == 0;
    Side side(world, traffic, rank, style, salt);
    for (int again = 0; again <= step % 2; ++again) {
      dawdle(random);
      const bool split = random() % 2 == 0;
      EXPECT_TW(twSuccess, side.dispatch(split));
      dawdle(random);
      if (split) {
        EXPECT_TW(twSuccess, side.complete());
      }
      side.expect_received();
    }
    dawdle(random);
    const bool split = random() % 2 == 0;
    EXPECT_TW(twSuccess, side.combine(split));
    dawdle(random);
    if (split) {
      EXPECT_TW(twSuccess, side.complete());
    }
    side.expect_tokens();
    if (::testing::Test::HasFailure()) return;
  }
}

void run_threads(int ranks, int lanes, int steps, const char* spin) {
  const Env env("TOKENWAY_SPIN_US", spin);
  twGroupConfig_t config = make_config(7, 3, 6, 24);
  config.lanes = lanes;
  World world(ranks, config);
  on_all_ranks(ranks, [&](int rank) { one_rank(world, rank, steps, 5); });
}

TEST(Threads, Sleeping) { run_threads(4, 1, 120, "0"); }
TEST(Threads, Spinning) { run_threads(2, 3, 120, "50"); }
TEST(Threads, MoreRanksThanCores) { run_threads(9, 2, 12, "-1"); }

// A wait at the wrap must take neither an old word for a new one nor the other way round.
TEST(Threads, StepsWrap) {
  const Env first("TOKENWAY_FIRST_STEP", "4294967290");
  run_threads(3, 2, 24, "0");
}

// Several groups on one comm, each driven by threads of its own.
TEST(Threads, TwoGroupsOnOneComm) {
  const int ranks = 3;
  std::vector<twComm_t> comms(ranks);
  ASSERT_TW(twSuccess, twCommCreateLocal(comms.data(), ranks, nullptr));
  const twGroupConfig_t config = make_config(7, 3, 6);
  on_all_ranks(ranks, [&](int rank) {
    twGroup_t groups[2];
    for (twGroup_t& group : groups) EXPECT_TW(twSuccess, twGroupCreate(&group, comms[rank], &config));
    std::vector<std::thread> uses;
    for (twGroup_t group : groups) {
      uses.emplace_back([&, group] {
        for (int step = 0; step < 30; ++step) {
          const twTensor_t ids = tensor(nullptr, twInt32, {0, 3});
          twHandle_t handle = nullptr;
          EXPECT_TW(twSuccess, twHandleCreate(&handle, group, &ids, nullptr, nullptr));
          twDispatchInput_t input{};
          input.size = sizeof input;
          input.lane = -1;
          input.payloads[0] = tensor(nullptr, twBfloat16, {0, 8});
          twDispatchOutput_t output{};
          output.size = sizeof output;
          EXPECT_TW(twSuccess, twDispatch(group, handle, &input, &output));
          EXPECT_TW(twSuccess, twHandleDestroy(handle));
        }
      });
    }
    for (std::thread& use : uses) use.join();
    for (twGroup_t group : groups) EXPECT_TW(twSuccess, twGroupDestroy(group));
  });
  for (twComm_t comm : comms) EXPECT_TW(twSuccess, twCommDestroy(comm));
}

// An error record may be read from any thread, while the group works.
TEST(Threads, ErrorRecordFromAnotherThread) {
  World world(2, make_config(7, 3, 6));
  std::atomic<bool> stop = false;
  std::thread reader([&] {
    while (!stop) EXPECT_EQ(error_of(world[0]).sticky, 0);
  });
  on_all_ranks(2, [&](int rank) { one_rank(world, rank, 20, 8); });
  stop = true;
  reader.join();
}

}  // namespace
}  // namespace tw::test
