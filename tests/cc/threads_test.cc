// Ranks as threads of their own, nothing staged, random delays: what ThreadSanitizer watches.
#include <unistd.h>

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

// A wait at the wrap must take neither an old signal for a new one nor the other way round.
TEST(Threads, StepsWrap) {
  const Env first("TOKENWAY_FIRST_STEP", "4294967290");
  run_threads(3, 2, 24, "0");
}

// Dispatches without tokens. With `nap`, this rank is late now and then, so that its peers sleep and look around.
void use_group(twGroup_t group, int steps, bool nap) {
  for (int step = 0; step < steps; ++step) {
    if (nap && step % 8 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(15));
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
}

// Several groups on one comm, each driven by a thread of its own, while others are made and ended.
void use_groups(twComm_t comm, int rank) {
  const twGroupConfig_t config = make_config(7, 3, 6);
  twGroup_t groups[2] = {};
  for (twGroup_t& group : groups) ASSERT_TW(twSuccess, twGroupCreate(&group, comm, &config));
  std::vector<std::thread> uses;
  for (twGroup_t group : groups) uses.emplace_back(use_group, group, 30, rank == 1);
  for (int round = 0; round < 5; ++round) {
    twGroup_t brief = nullptr;
    EXPECT_TW(twSuccess, twGroupCreate(&brief, comm, &config));
    if (brief == nullptr) break;
    use_group(brief, 2, false);
    EXPECT_TW(twSuccess, twGroupDestroy(brief));
  }
  for (std::thread& use : uses) use.join();
  for (twGroup_t group : groups) EXPECT_TW(twSuccess, twGroupDestroy(group));
}

TEST(Threads, TwoGroupsOnOneComm) {
  std::vector<twComm_t> comms(3);
  ASSERT_TW(twSuccess, twCommCreateLocal(comms.data(), 3, nullptr));
  on_all_ranks(3, [&](int rank) { use_groups(comms[rank], rank); });
  for (twComm_t comm : comms) EXPECT_TW(twSuccess, twCommDestroy(comm));
}

// The same over sockets, as between processes.
TEST(Threads, TwoGroupsOnOneCommOverSockets) {
  const std::string address = "tokenway-threads-" + std::to_string(::getpid());
  on_all_ranks(2, [&](int rank) {
    twCommConfig_t config = TW_COMM_CONFIG_INIT;
    config.address = address.c_str();
    config.timeout_ms = 20000;
    twComm_t comm = nullptr;
    ASSERT_TW(twSuccess, twCommCreateShm(&comm, rank, 2, &config));
    use_groups(comm, rank);
    EXPECT_TW(twSuccess, twCommDestroy(comm));
  });
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
