// Ranks of a group that meet between steps (twGroupMeet): what each is told, what becomes of ranks that come late or
// not at all, and the address that ranks of other hosts are told (twGroupAddress).
#include <algorithm>
#include <thread>

#include "core/group.h"
#include "harness.h"
#include "survivors.h"

namespace tw::test {
namespace {

constexpr int kBytes = 5;

// What a rank gives.
std::vector<uint8_t> given(int rank) {
  std::vector<uint8_t> bytes(kBytes);
  for (int i = 0; i < kBytes; ++i) bytes[static_cast<size_t>(i)] = static_cast<uint8_t>(1 + 16 * rank + i);
  return bytes;
}

// Has a rank meet the others: they may take their time.
twResult_t meet(World& world, int rank, std::vector<uint8_t>* all, int32_t timeout_ms = 0) {
  const std::vector<uint8_t> mine = given(rank);
  all->assign(mine.size() * static_cast<size_t>(world.size()), 0);
  return twGroupMeet(world[rank], mine.data(), mine.size(), timeout_ms, all->data());
}

// All come, and each has what all have given.
void expect_meeting(World& world) {
  std::vector<uint8_t> want;
  for (int rank = 0; rank < world.size(); ++rank) {
    const std::vector<uint8_t> bytes = given(rank);
    want.insert(want.end(), bytes.begin(), bytes.end());
  }
  on_all_ranks(world.size(), [&](int rank) {
    std::vector<uint8_t> all;
    EXPECT_TW(twSuccess, meet(world, rank, &all));
    EXPECT_EQ(all, want);
  });
}

TEST(Meet, EachHasWhatAllHaveGiven) {
  for (const int ranks : {1, 2, 5}) {
    World world(ranks, make_config(10, 2, 4));
    expect_meeting(world);
    on_all_ranks(ranks, [&](int rank) { EXPECT_TW(twSuccess, twGroupMeet(world[rank], nullptr, 0, 0, nullptr)); });
    std::vector<std::vector<uint8_t>> much(static_cast<size_t>(ranks), std::vector<uint8_t>(65536, 7));
    on_all_ranks(ranks, [&](int rank) {
      std::vector<uint8_t> all(size_t{65536} * static_cast<size_t>(ranks));
      EXPECT_TW(twSuccess, twGroupMeet(world[rank], much[static_cast<size_t>(rank)].data(), 65536, 0, all.data()));
      EXPECT_EQ(std::ranges::count(all, 7), static_cast<int64_t>(all.size()));
    });
  }
}

// What one rank cannot give is an error on all of them, and they meet again.
TEST(Meet, ARefusalIsToldToAll) {
  World world(3, make_config(6, 2, 4));
  uint8_t byte = 0;
  struct Refused {
    const void* mine;
    uint64_t bytes;
    int32_t timeout_ms;
    void* all;
    const char* sentence;
  };
  for (const Refused& each : {Refused{nullptr, kBytes, 0, &byte, "mine is NULL"},
                              {&byte, kBytes, 0, nullptr, "all is NULL"},
                              {&byte, 65537, 0, &byte, "bytes is 65537; it must be from 0 to 65536"},
                              {&byte, UINT64_MAX, 0, &byte, "bytes is 9223372036854775807; it must be from 0 to 65536"},
                              {&byte, 1, -1, &byte, "timeout_ms is -1; it must be from 0"}}) {
    on_all_ranks(3, [&](int rank) {
      std::vector<uint8_t> all;
      const twResult_t result = rank == 1 ? twGroupMeet(world[rank], each.mine, each.bytes, each.timeout_ms, each.all)
                                          : meet(world, rank, &all);
      EXPECT_TW(twInvalidArgument, result);
      EXPECT_TRUE(says(rank == 1 ? each.sentence : std::string("rank 1: ") + each.sentence));
      EXPECT_EQ(std::ranges::count(all, 0), static_cast<int64_t>(all.size()));
    });
  }
  expect_meeting(world);
}

TEST(Meet, RanksGiveAsMuch) {
  World world(3, make_config(6, 2, 4));
  on_all_ranks(3, [&](int rank) {
    std::vector<uint8_t> mine(rank == 2 ? 4 : 5, 1);
    std::vector<uint8_t> all(3 * mine.size(), 0);
    EXPECT_TW(twConfigMismatch, twGroupMeet(world[rank], mine.data(), mine.size(), 0, all.data()));
    EXPECT_TRUE(says("bytes differs: rank 0 has 5, rank 2 has 4"));
    EXPECT_EQ(std::ranges::count(all, 0), static_cast<int64_t>(all.size()));
  });
  expect_meeting(world);
}

// A rank that the others have given up finds what they gave, and hears that they no longer stand by it. All have used
// up the occasion then.
TEST(Meet, WhoComesLateHearsThatTheOthersHaveGivenUp) {
  for (const bool sockets : {false, true}) {
    std::vector<twComm_t> comms(2);
    if (sockets) {
      comms = connect(2);
    } else {
      ASSERT_TW(twSuccess, twCommCreateLocal(comms.data(), 2, nullptr));
    }
    World world(comms, make_config(6, 2, 4));
    std::vector<uint8_t> all;
    EXPECT_TW(twTimeout, meet(world, 0, &all, 30));
    EXPECT_TRUE(says("meeting in a group: rank 1 did not arrive in time"));
    EXPECT_TW(twTimeout, meet(world, 1, &all));
    EXPECT_TRUE(says("rank 0: meeting in a group: rank 1 did not arrive in time"));
    expect_meeting(world);
  }
}

TEST(Meet, RanksThatMakeAnotherCallAreNoticed) {
  World world(2, make_config(6, 2, 4));
  twReserve_t reserve = TW_RESERVE_INIT;
  reserve.max_tokens = 9;
  on_all_ranks(2, [&](int rank) {
    std::vector<uint8_t> all;
    EXPECT_TW(twCallMismatch, rank == 0 ? meet(world, 0, &all) : twGroupReserve(world[1], &reserve));
    EXPECT_TRUE(
        says("rank 0 meets in a group while rank 1 grows one; all ranks of a comm must create, grow, shrink and "
             "destroy its groups, and meet in them, in the same order"));
  });
  expect_meeting(world);
  std::vector<twGroup_t> second(2);
  on_all_ranks(2, [&](int rank) {
    const size_t at = static_cast<size_t>(rank);
    EXPECT_TW(twSuccess, twGroupCreate(&second[at], world.comms[at], &world.config));
    std::vector<uint8_t> all(2);
    EXPECT_TW(twCallMismatch, twGroupMeet(rank == 0 ? second[at] : world[rank], "a", 1, 0, all.data()));
    EXPECT_TRUE(says("rank 1 meets in the one that call 1 of the comm made"));
    EXPECT_TW(twSuccess, twGroupDestroy(second[at]));
  });
}

TEST(Meet, ARankThatEndsIsNoticed) {
  World world(3, make_config(6, 2, 4));
  world.kill(2);
  on_all_ranks(2, [&](int rank) {
    std::vector<uint8_t> all;
    EXPECT_TW(twCallMismatch, meet(world, rank, &all));  // its end is a call at this occasion
    EXPECT_EQ(std::ranges::count(all, 0), static_cast<int64_t>(all.size()));
  });
}

// Where a rank has given the group up, those that meet in it are told so, as by any other call.
TEST(Meet, AGroupThatIsGivenUpHasNoMeetings) {
  World world(2, make_config(6, 2, 4));
  std::thread aborts([&] { EXPECT_TW(twSuccess, twGroupAbort(world[1])); });
  std::vector<uint8_t> all;
  EXPECT_TW(twPeerAborted, meet(world, 0, &all));
  aborts.join();
  EXPECT_TW(twPeerAborted, meet(world, 1, &all));
}

// ---- addresses -----------------------------------------------------------------------------------

// Ranks that are connected by these addresses: of each peer this rank's own, and the peer's.
class Addressed : public Bootstrap {
 public:
  using Pair = std::pair<std::string, std::string>;
  Addressed(int rank, std::vector<Pair> of) : rank_(rank), of_(std::move(of)) {}
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(of_.size()); }
  bool in_process() const override { return false; }
  bool shares_memory() const override { return false; }
  bool alive(int) override { return true; }
  std::vector<Presence> exchange(std::span<const int>, uint64_t, const Parcel&, TimePoint, std::vector<Parcel>*,
                                 const Left&, Needs) override {
    return {};
  }
  void give(std::span<const int>, uint64_t, const std::string&) override {}
  void give_up(std::span<const int>, uint64_t) override {}
  void addresses(int peer, std::string* own, std::string* theirs) override {
    *own = of_[static_cast<size_t>(peer)].first;
    *theirs = of_[static_cast<size_t>(peer)].second;
  }

 private:
  int rank_;
  std::vector<Pair> of_;
};

TEST(Meet, RanksOfOtherHostsAreToldNoLocalhost) {
  const Addressed::Pair near{"127.0.0.1", "127.0.0.1"}, near6{"::1", "::1"}, far{"10.0.0.2", "10.0.0.5"}, none;
  const std::vector<int> all{0, 1, 2, 3};
  const auto told = [&](int rank, std::vector<Addressed::Pair> of) {
    Addressed between(rank, std::move(of));
    return own_address(between, all);
  };
  EXPECT_EQ(told(0, {none, near, far, far}), "10.0.0.2");
  EXPECT_EQ(told(3, {far, near, near6, none}), "10.0.0.2");
  EXPECT_EQ(told(1, {near6, none, near, {"fd00::2", "fd00::3"}}), "fd00::2");
  EXPECT_EQ(told(0, {none, near, near, near}), "127.0.0.1");
  EXPECT_EQ(told(0, {none, none, none, none}), "127.0.0.1");  // ranks that are connected by no address
  Addressed between(0, {none, far, near, near});
  const std::vector<int> mates{0, 2, 3};
  EXPECT_EQ(own_address(between, mates), "127.0.0.1");  // as far as they are concerned
}

TEST(Meet, RanksOfOneProcessAreLocal) {
  World world(2, make_config(6, 2, 4));
  const char* address = nullptr;
  EXPECT_TW(twSuccess, twGroupAddress(world[1], &address));
  EXPECT_STREQ(address, "127.0.0.1");
  EXPECT_TW(twInvalidArgument, twGroupAddress(world[1], nullptr));
}

}  // namespace
}  // namespace tw::test
