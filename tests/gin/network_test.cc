// The host side of the network over NCCL (src/cuda/transport/gin.cc), with an NCCL that the test leads
// (fake_nccl.h): that every step ends on all ranks by the deadline, that an error of one rank is every rank's, and what
// is given back in which way.
#include "cuda/transport/network.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cuda/transport/gin.h"
#include "fake_nccl.h"

namespace tw::cuda {
namespace {

using gin::fake_nccl;
using gin::Step;
using Clock = std::chrono::steady_clock;

constexpr int kRanks = 3;
constexpr int kContexts = 2;
constexpr uint64_t kBytes = 4096;
constexpr std::chrono::seconds kFarOff{60};

struct Rank {
  int rank;
  Bootstrap* bootstrap;
  std::unique_ptr<Network> network;
  std::vector<std::vector<std::byte>> memories;
  uint64_t tag = 0;

  net::Meeting meeting(Clock::duration time) {
    static const std::vector<int> members{0, 1, 2};
    return {bootstrap, members, tag += 4, Clock::now() + time};
  }
  Status connect(Clock::duration time = kFarOff) {
    BackendInit init;
    init.device = 0;
    return connect_network(init, meeting(time), kContexts, &network);
  }
  Status add(int* number, Clock::duration time = kFarOff) {
    memories.emplace_back(kBytes);
    return network->add_memory(meeting(time), memories.back().data(), kBytes, number);
  }
  const GinState& state() const { return *static_cast<const GinState*>(network->view().state); }
};

class NetworkTest : public testing::Test {
 protected:
  void SetUp() override {
    gin::FakeNccl& nccl = fake_nccl();
    nccl.type = NCCL_GIN_TYPE_PROXY;
    nccl.most_contexts = kContexts;
    nccl.faulty = Step::kNone;
    nccl.cut_off = -1;
    nccl.destroyed = nccl.aborted = nccl.windows = nccl.device_comms = 0;
    bootstraps_ = make_local_bootstraps(kRanks);
    for (int rank = 0; rank < kRanks; ++rank) ranks_.push_back({rank, bootstraps_[rank].get(), nullptr, {}, 0});
  }
  // Networks end together, as ranks of one process would.
  void TearDown() override {
    for (Rank& rank : ranks_) rank.network.reset();
  }
  void blame(Step step, int rank, bool fails) {
    fake_nccl().faulty = step;
    fake_nccl().faulty_rank = rank;
    fake_nccl().fails = fails;
  }
  // Does the same on all ranks at once, and gives their results.
  std::vector<Status> on_all(const std::function<Status(Rank&)>& work) {
    std::vector<Status> results(kRanks);
    std::vector<std::thread> threads;
    for (Rank& rank : ranks_) threads.emplace_back([&] { results[rank.rank] = work(rank); });
    for (std::thread& thread : threads) thread.join();
    return results;
  }
  void connect_all() {
    for (const Status& each : on_all([](Rank& rank) { return rank.connect(); })) ASSERT_TRUE(each.ok()) << each.text();
  }

  std::vector<std::unique_ptr<Bootstrap>> bootstraps_;
  std::vector<Rank> ranks_;
};

bool has(const Status& status, const std::string& text) { return status.text().find(text) != std::string::npos; }

TEST_F(NetworkTest, NumbersMemoriesAlikeAndTellsKernels) {
  connect_all();
  for (int wanted = 0; wanted < 3; ++wanted) {
    const std::vector<const void*> before{ranks_[0].network->view().state, ranks_[2].network->view().state};
    for (const Status& each : on_all([&](Rank& rank) {
           int number = -1;
           const Status added = rank.add(&number);
           return added.ok() && number != wanted ? fail(twSystemError, "number {}", number) : added;
         })) {
      EXPECT_TRUE(each.ok()) << each.text();
    }
    EXPECT_EQ(ranks_[0].network->view().state, before[0]);
    EXPECT_EQ(ranks_[2].network->view().state, before[1]);
  }
  for (const Rank& rank : ranks_) {
    EXPECT_EQ(rank.state().comm.rank, rank.rank);
    EXPECT_EQ(rank.state().comm.nRanks, kRanks);
    EXPECT_EQ(rank.state().stopped, 0U);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(static_cast<void*>(rank.state().windows[i]), rank.memories[i].data());
    EXPECT_TRUE(rank.network->failure().ok());
  }
  TearDown();
  EXPECT_EQ(fake_nccl().destroyed, kRanks);
  EXPECT_EQ(fake_nccl().aborted, 0);
  EXPECT_EQ(fake_nccl().windows, 0);
  EXPECT_EQ(fake_nccl().device_comms, 0);
}

TEST_F(NetworkTest, RefusesWhereNcclHasNoGin) {
  fake_nccl().type = NCCL_GIN_TYPE_NONE;
  for (const Status& each : on_all([](Rank& rank) { return rank.connect(); })) {
    EXPECT_EQ(each.code, twUnsupported);
    EXPECT_TRUE(has(each, "GIN: none")) << each.text();
  }
  EXPECT_EQ(fake_nccl().destroyed + fake_nccl().aborted, kRanks);
}

TEST_F(NetworkTest, RefusesTooFewContexts) {
  fake_nccl().most_contexts = kContexts - 1;
  for (const Status& each : on_all([](Rank& rank) { return rank.connect(); })) EXPECT_EQ(each.code, twUnsupported);
  EXPECT_EQ(fake_nccl().device_comms, 0);
}

TEST_F(NetworkTest, ARankThatNeverComesCostsNoMoreThanTheDeadline) {
  for (const Step step : {Step::kInit, Step::kDevice}) {
    blame(step, 1, false);
    for (const Status& each : on_all([](Rank& rank) { return rank.connect(std::chrono::milliseconds(200)); })) {
      EXPECT_EQ(each.code, twTimeout) << each.text();
    }
    EXPECT_EQ(fake_nccl().aborted, kRanks);
    EXPECT_EQ(fake_nccl().destroyed, 0);
    fake_nccl().aborted = 0;
  }
  blame(Step::kNone, 0, false);
  connect_all();
}

TEST_F(NetworkTest, AnErrorOfOneRankIsEveryRanks) {
  connect_all();
  blame(Step::kWindow, 1, true);
  const auto add = [](Rank& rank) {
    int number = -1;
    return rank.add(&number, std::chrono::seconds(1));
  };
  std::vector<Status> results = on_all(add);
  EXPECT_TRUE(has(results[1], "NCCL cannot register memory")) << results[1].text();
  for (const Status& each : results) EXPECT_FALSE(each.ok());
  // NCCL makes no further step, and the others hear of it before they begin one. Puts have not failed for that.
  blame(Step::kNone, 0, false);
  for (const Rank& rank : ranks_) EXPECT_TRUE(rank.network->failure().ok());
  results = on_all(add);
  for (const Status& each : results) EXPECT_TRUE(has(each, "register memory")) << each.text();
}

// It is told while nothing is added, and stays the reason when the network has been ended.
TEST_F(NetworkTest, PutsThatFailAreTold) {
  connect_all();
  fake_nccl().cut_off = 1;
  for (int look = 0; look < 2; ++look) {
    EXPECT_TRUE(has(ranks_[1].network->failure(), "NCCL cannot put to all peers"));
    EXPECT_TRUE(ranks_[0].network->failure().ok());
    ranks_[1].network->abort();
  }
  fake_nccl().cut_off = -1;
  for (const Status& each : on_all([](Rank& rank) {
         int number = -1;
         return rank.add(&number);
       })) {
    EXPECT_TRUE(has(each, "put to all peers")) << each.text();
  }
}

// A step that does not end says nothing of puts, neither while others look nor afterwards.
TEST_F(NetworkTest, AStepThatFailsIsNoFailureOfPuts) {
  connect_all();
  blame(Step::kWindow, 1, true);
  std::atomic<bool> ended = false;
  std::atomic<int> told = 0;
  std::thread watcher([&] {
    while (!ended) told += ranks_[1].network->failure().ok() ? 0 : 1;
  });
  for (const Status& each : on_all([](Rank& rank) {
         int number = -1;
         return rank.add(&number, std::chrono::milliseconds(200));
       })) {
    EXPECT_FALSE(each.ok());
  }
  ended = true;
  watcher.join();
  EXPECT_EQ(told, 0);
}

TEST_F(NetworkTest, TakesNoMoreMemoriesThanKernelsHavePlacesFor) {
  connect_all();
  for (int i = 0; i <= kNetMemories; ++i) {
    for (const Status& each : on_all([](Rank& rank) {
           int number = -1;
           return rank.add(&number);
         })) {
      EXPECT_EQ(each.code, i < kNetMemories ? twSuccess : twOutOfMemory) << each.text();
    }
  }
}

TEST_F(NetworkTest, AnAbortStopsKernelsAndLeavesWhatTheyUse) {
  connect_all();
  std::thread([this] { ranks_[0].network->abort(); }).join();
  ranks_[0].network->abort();
  EXPECT_NE(ranks_[0].state().stopped, 0U);
  EXPECT_EQ(ranks_[1].state().stopped, 0U);
  EXPECT_FALSE(ranks_[0].network->failure().ok());
  EXPECT_TRUE(ranks_[1].network->failure().ok());
  EXPECT_EQ(fake_nccl().aborted, 0);
  for (const Status& each : on_all([](Rank& rank) {
         int number = -1;
         return rank.add(&number);
       })) {
    EXPECT_TRUE(has(each, "the network was ended on")) << each.text();
  }
  ranks_[0].network.reset();
  EXPECT_EQ(fake_nccl().aborted, 1);
  EXPECT_EQ(fake_nccl().destroyed, 0);
}

// The library is looked for once in a process, so another one asks.
TEST(NetworkDeathTest, RefusesAnNcclThatIsOlderThanTheHeaders) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const auto connect = [] {
    ::setenv("TOKENWAY_FAKE_NCCL", "22809", 1);
    const std::unique_ptr<Bootstrap> alone = std::move(make_local_bootstraps(1)[0]);
    const int me = 0;
    std::unique_ptr<Network> network;
    const Status status =
        connect_network({}, {alone.get(), std::span(&me, 1), 4, Clock::now() + kFarOff}, kContexts, &network);
    std::fprintf(stderr, "%d: %s\n", static_cast<int>(status.code), status.text().c_str());
    std::_Exit(status.code == twUnsupported ? 0 : 1);
  };
  EXPECT_EXIT(connect(), testing::ExitedWithCode(0), "the NCCL of this process is 2.28.9; 2.[0-9]+.[0-9]+ or newer");
}

}  // namespace
}  // namespace tw::cuda
