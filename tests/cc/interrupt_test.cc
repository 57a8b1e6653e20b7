// Waits that the caller wants to end: each kind of them ends, and peers, whether they wait already or come later, hear
// that this rank gave up. No time is asserted: what waits on ends in twTimeout, a minute later.
#include <unistd.h>

#include <atomic>
#include <latch>
#include <string>

#include "bootstrap/bootstrap.h"
#include "counted.h"
#include "interrupt.h"

namespace tw::test {
namespace {

using std::chrono::minutes;

twGroupConfig_t patient(twGroupConfig_t config) {
  config.timeout_ms = 60000;
  return config;
}

// Three ranks make a call, of which rank 0 is interrupted while rank 1, which comes when that is over, does not come.
// Rank 2 waits all the time.
void interrupt_first(const std::function<twResult_t(int rank)>& call, const char* sentence,
                     twResult_t peers = twPeerAborted) {
  std::latch over(1);
  on_all_ranks(3, [&](int rank) {
    if (rank == 0) {
      const Interrupt interrupt(2);
      EXPECT_TW(twInterrupted, call(0));
      EXPECT_TRUE(says(sentence));
      EXPECT_EQ(interrupt.asked, 2) << "yes once is yes";
      over.count_down();
      return;
    }
    if (rank == 1) over.wait();
    EXPECT_TW(peers, call(rank)) << "rank " << rank;
  });
}

TEST(Interrupt, Dispatch) {
  World world(3, patient(make_config(6, 2, 4)));
  const Traffic traffic = make_traffic(world.config, {2, 0, 4}, 1);
  std::vector<std::unique_ptr<Side>> sides;
  for (int rank = 0; rank < 3; ++rank) sides.push_back(std::make_unique<Side>(world, traffic, rank, Style{}, 1));
  interrupt_first([&](int rank) { return sides[rank]->dispatch(); }, "interrupted in dispatch of step");
  EXPECT_TRUE(error_of(world[0]).sticky);
  EXPECT_EQ(error_of(world[0]).result, twPeerAborted);
  EXPECT_EQ(error_of(world[2]).peer, 0) << "who gave up";
}

TEST(Interrupt, AMeetingInAGroup) {
  World world(3, patient(make_config(6, 2, 4)));
  interrupt_first([&](int rank) { return twGroupMeet(world[rank], nullptr, 0, 0, nullptr); },
                  "meeting in a group was interrupted while rank 1 had not arrived");
}

TEST(Interrupt, Combine) {
  World world(3, patient(make_config(6, 2, 4)));
  Exchange exchange(world, make_traffic(world.config, {2, 0, 4}, 1), {}, 1);
  exchange.dispatch();
  interrupt_first([&](int rank) { return exchange[rank].combine(); }, "interrupted in combine of step");
}

TEST(Interrupt, Complete) {
  World world(3, patient(make_config(6, 2, 4)));
  Exchange exchange(world, make_traffic(world.config, {2, 0, 4}, 1), {}, 1);
  for (const int rank : {0, 2}) EXPECT_TW(twSuccess, exchange[rank].dispatch(true));
  interrupt_first([&](int rank) { return rank == 1 ? exchange[1].dispatch() : exchange[rank].complete(); },
                  "interrupted in dispatch of step");
}

TEST(Interrupt, ExchangeOfCounts) {
  World world(3, patient(counting(6, 2, 4)));
  Counted counted(world, {4, 0, 3}, 1);
  interrupt_first([&](int rank) { return counted.exchange(rank); }, "interrupted in the exchange of counts");
}

TEST(Interrupt, AskingForCounts) {
  World world(3, patient(counting(6, 2, 4)));
  Counted counted(world, {4, 0, 3}, 1);
  for (const int rank : {0, 2}) EXPECT_TW(twSuccess, counted.exchange(rank, true));
  interrupt_first(
      [&](int rank) {
        int32_t ready = 0;
        if (rank == 0) return twHandleCountsReady(counted.handles[0], -1, &ready);
        return rank == 1 ? counted.exchange(1) : twComplete(world[2], counted.handles[2], nullptr);
      },
      "interrupted in the exchange of counts");
}

TEST(Interrupt, Gather) {
  World world(3, patient(make_config(6, 2, 4)));
  interrupt_first(
      [&](int rank) {
        std::vector<float> rows(8);
        std::vector<float> all(24);
        const int32_t sizes[3] = {1, 1, 1};
        twAllGatherVInput_t input = TW_ALL_GATHER_V_INPUT_INIT;
        twAllGatherVOutput_t output = TW_ALL_GATHER_V_OUTPUT_INIT;
        input.num_tensors = 1;
        input.tensors[0] = tensor(rows.data(), twFloat32, {1, 4});
        input.host_sizes = sizes;
        output.layout = twFlat;
        output.tensors[0] = tensor(all.data(), twFloat32, {3, 4});
        return twAllGatherV(world[rank], &input, &output);
      },
      "interrupted in twAllGatherV of step");
}

// A group of the same comms afterwards is like any other.
void expect_usable(const std::vector<twComm_t>& comms, const twGroupConfig_t& config) {
  on_all_ranks(static_cast<int>(comms.size()), [&](int rank) {
    twGroup_t group = nullptr;
    ASSERT_TW(twSuccess, twGroupCreate(&group, comms[rank], &config));
    EXPECT_EQ(dispatch_nothing(group, config), static_cast<int64_t>(comms.size()));
    EXPECT_TW(twSuccess, twGroupDestroy(group));
  });
}

void interrupt_creation(const std::vector<twComm_t>& comms) {
  const twGroupConfig_t config = patient(make_config(6, 2, 4));
  interrupt_first(
      [&](int rank) {
        twGroup_t group = nullptr;
        return twGroupCreate(&group, comms[rank], &config);
      },
      "creating a group was interrupted while rank 1 had not arrived");
  expect_usable(comms, config);
  for (const twComm_t comm : comms) EXPECT_TW(twSuccess, twCommDestroy(comm));
}

TEST(Interrupt, CreationAmongThreads) {
  std::vector<twComm_t> comms(3);
  ASSERT_TW(twSuccess, twCommCreateLocal(comms.data(), 3, nullptr));
  interrupt_creation(comms);
}

std::string an_address() {
  static std::atomic<int> serial = 0;
  return "interrupt-test-" + std::to_string(::getpid()) + "-" + std::to_string(serial++);
}

twResult_t connect_rank(twComm_t* comm, int rank, int nranks, const std::string& address) {
  twCommConfig_t config = TW_COMM_CONFIG_INIT;
  config.address = address.c_str();
  config.timeout_ms = 60000;
  return twCommCreateShm(comm, rank, nranks, &config);
}

TEST(Interrupt, CreationOverSockets) {
  std::vector<twComm_t> comms(3);
  const std::string address = an_address();
  on_all_ranks(3, [&](int rank) { ASSERT_TW(twSuccess, connect_rank(&comms[rank], rank, 3, address)); });
  interrupt_creation(comms);
}

// Both who dials and who waits to be dialled.
TEST(Interrupt, Connecting) {
  for (const int rank : {0, 1}) {
    const Interrupt interrupt(2);
    twComm_t comm = nullptr;
    EXPECT_TW(twInterrupted, connect_rank(&comm, rank, 2, an_address()));
    EXPECT_TRUE(says("interrupted: rank " + std::to_string(1 - rank)));
    EXPECT_EQ(comm, nullptr);
  }
}

// A later meeting of a call that a rank has given up ends at once too, but not that of another call, nor one to which
// all have come.
void give_up_between(Bootstrap& first, Bootstrap& second) {
  constexpr uint64_t kCall = 7 << 16;
  const std::vector<int> members{0, 1};
  std::vector<Parcel> all;
  const auto soon = [] { return std::chrono::steady_clock::now() + std::chrono::milliseconds(20); };
  const auto meet = [&](uint64_t tag, TimePoint deadline) {
    return second.exchange(members, tag, {"theirs", {}}, deadline, &all)[0];
  };
  (void)first.exchange(members, kCall, {"mine", {}}, soon(), &all);
  first.give_up(members, occasion_of(kCall));
  const TimePoint late = std::chrono::steady_clock::now() + minutes(1);
  EXPECT_EQ(meet(kCall, late), Presence::kHere) << "it had come before";
  EXPECT_EQ(meet(kCall + 1, late), Presence::kGaveUp);
  EXPECT_EQ(meet(kCall + (1 << 15), soon()), Presence::kLate) << "the creation behind an agreement is another occasion";
  EXPECT_EQ(meet(kCall + (1 << 16), soon()), Presence::kLate);
}

TEST(Interrupt, GivingACallUp) {
  const auto local = make_local_bootstraps(2);
  give_up_between(*local[0], *local[1]);
  std::vector<std::unique_ptr<Bootstrap>> mesh(2);
  const std::string address = an_address();
  on_all_ranks(2, [&](int rank) {
    const TimePoint late = std::chrono::steady_clock::now() + minutes(1);
    ASSERT_TRUE(connect_mesh(rank, 2, address, late, &mesh[rank]).ok());
  });
  give_up_between(*mesh[0], *mesh[1]);
}

// The group is gone all the same, and its peers neither wait nor fail.
TEST(Interrupt, Destroying) {
  World world(3, patient(make_config(6, 2, 4)));
  std::latch over(1);
  on_all_ranks(3, [&](int rank) {
    if (rank == 0) {
      const Interrupt interrupt(2);
      EXPECT_TW(twInterrupted, twGroupDestroy(world.groups[0]));
      EXPECT_TRUE(says("interrupted while peers had not come to destroy the group"));
      EXPECT_TW(twInvalidArgument, twGroupAbort(world.groups[0])) << "it is no group any more";
      over.count_down();
    } else if (rank == 1) {
      over.wait();
      const Traffic traffic = make_traffic(world.config, {1, 1, 1}, 1);
      auto side = std::make_unique<Side>(world, traffic, 1, Style{}, 1);
      EXPECT_TW(twPeerAborted, side->dispatch());
      side.reset();
      EXPECT_TW(twSuccess, twGroupDestroy(world.groups[1]));
    } else {
      EXPECT_TW(twSuccess, twGroupDestroy(world.groups[2]));
    }
    world.groups[rank] = nullptr;
  });
}

// Who shrinks goes on without the rank that was interrupted in it.
TEST(Interrupt, Shrinking) {
  World world(4, patient(make_config(6, 2, 4)));
  world.kill(3);
  std::latch over(1);
  on_all_ranks(3, [&](int rank) {
    twGroup_t survivors = nullptr;
    if (rank == 0) {
      const Interrupt interrupt(2);
      EXPECT_TW(twInterrupted, twGroupShrink(world[0], nullptr, &survivors));
      EXPECT_TRUE(says("interrupted while survivors had not answered"));
      over.count_down();
      return;
    }
    if (rank == 1) over.wait();
    ASSERT_TW(twSuccess, twGroupShrink(world[rank], nullptr, &survivors));
    twGroupInfo_t info{};
    info.size = sizeof info;
    EXPECT_TW(twSuccess, twGroupInfo(survivors, &info));
    EXPECT_EQ(info.nranks, 2);
    EXPECT_TW(twSuccess, twGroupDestroy(survivors));
  });
}

// As long as the answer is no, a wait goes on; nobody asks who hardly waits, nor in a thread that was not named.
TEST(Interrupt, OnlyWhoWaitsIsAsked) {
  World world(2, patient(make_config(6, 2, 4)));
  Exchange exchange(world, make_traffic(world.config, {2, 3}, 1), {}, 1);
  constexpr int kNever = 1 << 30;
  {
    const Interrupt interrupt(kNever);
    for (int i = 0; i < 3; ++i) exchange.dispatch(), exchange.combine();
    EXPECT_EQ(interrupt.asked, 0);
  }
  std::latch asked(1);
  on_all_ranks(2, [&](int rank) {
    if (rank == 1) {
      asked.wait();
      EXPECT_TW(twSuccess, exchange[1].dispatch());
      return;
    }
    struct Question {
      std::latch& third;
      int count = 0;
    } question{asked};
    const auto count = [](void* context) {
      auto& counted = *static_cast<Question*>(context);
      if (++counted.count == 3) counted.third.count_down();
      return 0;
    };
    EXPECT_TW(twSuccess, twSetInterrupt(count, &question, 0));
    EXPECT_TW(twSuccess, exchange[0].dispatch());
    EXPECT_TW(twSuccess, twSetInterrupt(nullptr, nullptr, 0));
    EXPECT_GE(question.count, 3);
  });
}

TEST(Interrupt, ThreadsThatAreNotNamedWaitOn) {
  twGroupConfig_t config = make_config(6, 2, 4);
  config.timeout_ms = 300;
  World world(2, config);
  Exchange exchange(world, make_traffic(config, {2, 3}, 1), {}, 1);
  const Interrupt interrupt(1);  // of this thread
  on_all_ranks(2, [&](int rank) {
    if (rank == 0) {
      EXPECT_TW(twTimeout, exchange[0].dispatch());
    }
  });
  EXPECT_EQ(interrupt.asked, 0);
}

TEST(Interrupt, BadThread) {
  EXPECT_TW(twInvalidArgument, twSetInterrupt(nullptr, nullptr, -1));
  EXPECT_TRUE(says("thread is -1"));
}

}  // namespace
}  // namespace tw::test
