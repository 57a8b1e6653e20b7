// Comms: ranks that find each other through the caller's own allgather, and CUDA devices where there are none.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstring>

#include "bootstrap/bootstrap.h"
#include "harness.h"

namespace tw::test {
namespace {

// An allgather of threads. `touch` may change what a rank gave before all see it.
class Meeting {
 public:
  explicit Meeting(int ranks) : ranks_(ranks), barrier_(ranks) {}

  int allgather(int rank, const void* mine, void* all, size_t bytes) {
    {
      const std::lock_guard lock(mutex_);
      given_.resize(ranks_ * bytes);
      std::memcpy(given_.data() + rank * bytes, mine, bytes);
      if (touch) touch(rank, given_.data() + rank * bytes);
      ++calls;
    }
    barrier_.arrive_and_wait();
    std::memcpy(all, given_.data(), given_.size());
    barrier_.arrive_and_wait();
    return 0;
  }

  std::function<void(int, char*)> touch;
  int calls = 0;

 private:
  int ranks_;
  std::barrier<> barrier_;
  std::mutex mutex_;
  std::vector<char> given_;
};

std::vector<Status> agree_all(Meeting& meeting, int ranks, std::vector<std::string>* addresses) {
  std::vector<Status> outcomes(ranks);
  addresses->assign(ranks, "");
  on_all_ranks(ranks, [&](int rank) {
    const auto gather = [&](const void* mine, void* all, size_t bytes) {
      return meeting.allgather(rank, mine, all, bytes);
    };
    outcomes[rank] = agree_on_address(rank, ranks, gather, {}, &(*addresses)[rank]);
  });
  return outcomes;
}

TEST(Comm, RanksAgreeOnAnAddress) {
  std::vector<std::string> seen;
  for (const int ranks : {1, 2, 5}) {
    Meeting meeting(ranks);
    std::vector<std::string> addresses;
    for (const Status& outcome : agree_all(meeting, ranks, &addresses)) EXPECT_TRUE(outcome.ok()) << outcome.text();
    EXPECT_EQ(std::count(addresses.begin(), addresses.end(), addresses[0]), ranks);
    EXPECT_GE(addresses[0].size(), 32u) << "nobody else must come upon it";
    EXPECT_LE(addresses[0].size(), 80u);
    EXPECT_EQ(meeting.calls, ranks) << "one allgather";
    seen.push_back(addresses[0]);
  }
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(std::unique(seen.begin(), seen.end()), seen.end());
}

TEST(Comm, RanksOnDifferentHostsAreRefused) {
  Meeting meeting(3);
  meeting.touch = [](int rank, char* given) {
    if (rank == 2) given[0] = '#';  // a card begins with the host's name
  };
  std::vector<std::string> addresses;
  const std::vector<Status> outcomes = agree_all(meeting, 3, &addresses);
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == 2) continue;  // its own card has been changed behind its back
    EXPECT_EQ(outcomes[rank].code, twUnsupported) << rank;
    EXPECT_EQ(outcomes[rank].text(), "rank 0 and rank 2 run on different hosts; ranks of a comm must share one");
  }
}

TEST(Comm, RanksThatAreApartMayBeTold) {
  constexpr size_t kNetwork = 48;  // of a card: behind the host's name
  Meeting meeting(3);
  meeting.touch = [](int rank, char* given) {
    if (rank == 1) given[kNetwork] = '#';
  };
  for (const bool told : {true, false}) {
    std::vector<Status> outcomes(3);
    std::vector<std::string> addresses(3, "none yet");
    std::vector<Sentence> where(3);
    on_all_ranks(3, [&](int rank) {
      const auto gather = [&](const void* mine, void* all, size_t bytes) {
        return meeting.allgather(rank, mine, all, bytes);
      };
      outcomes[rank] = agree_on_address(rank, 3, gather, {}, &addresses[rank], told ? &where[rank] : nullptr);
    });
    const std::string apart = "rank 0 and rank 1 run in different network namespaces of a host";
    for (const int rank : {0, 2}) {
      EXPECT_EQ(outcomes[rank].code, told ? twSuccess : twUnsupported);
      EXPECT_EQ(told ? where[rank].text() : outcomes[rank].text(),
                told ? apart : apart + "; ranks of a comm must share one");
      EXPECT_EQ(addresses[rank], told ? "" : "none yet");
    }
  }
}

TEST(Comm, ARankThatCannotTakePartSaysWhy) {
  Meeting meeting(2);
  std::vector<Status> outcomes(2);
  on_all_ranks(2, [&](int rank) {
    const auto gather = [&](const void* mine, void* all, size_t bytes) {
      return meeting.allgather(rank, mine, all, bytes);
    };
    std::string address;
    const Status ready = rank == 1 ? fail(twInvalidArgument, "it has no device") : Status{};
    outcomes[rank] = agree_on_address(rank, 2, gather, ready, &address);
  });
  EXPECT_EQ(outcomes[0].code, twPeerRefused);
  EXPECT_EQ(outcomes[0].text(), "rank 1: it has no device");
  EXPECT_EQ(outcomes[1].code, twInvalidArgument);
}

struct Seat {
  Meeting* meeting;
  int rank;
  int answer = 0;
};

int gather_at(const void* mine, void* all, size_t bytes, void* context) {
  const auto* const seat = static_cast<const Seat*>(context);
  if (seat->answer != 0) return seat->answer;
  return seat->meeting->allgather(seat->rank, mine, all, bytes);
}

twCommConfig_t config_of(Seat* seat) {
  twCommConfig_t config = TW_COMM_CONFIG_INIT;
  config.timeout_ms = 20000;
  config.allgather = gather_at;
  config.allgather_context = seat;
  return config;
}

// The allgather is enough: no address is given, and what comes of it is a comm like any other.
TEST(Comm, CreatedThroughAnAllgather) {
  constexpr int kRanks = 3;
  Meeting meeting(kRanks);
  on_all_ranks(kRanks, [&](int rank) {
    Seat seat{&meeting, rank};
    const twCommConfig_t config = config_of(&seat);
    twComm_t comm = nullptr;
    ASSERT_TW(twSuccess, twCommCreateShm(&comm, rank, kRanks, &config));
    int32_t number = -2;
    EXPECT_TW(twSuccess, twCommDevice(comm, &number));
    EXPECT_EQ(number, -1) << "the CPU";
    EXPECT_TW(twInvalidArgument, twCommDevice(comm, nullptr));
    int32_t size = 0;
    EXPECT_TW(twSuccess, twCommRank(comm, &number, &size));
    EXPECT_EQ(number, rank);
    EXPECT_EQ(size, kRanks);
    const twGroupConfig_t group_config = make_config(6, 2, 4);
    twGroup_t group = nullptr;
    EXPECT_TW(twSuccess, twGroupCreate(&group, comm, &group_config));
    EXPECT_EQ(dispatch_nothing(group, group_config), kRanks);
    EXPECT_TW(twSuccess, twGroupDestroy(group));
    EXPECT_TW(twSuccess, twCommDestroy(comm));
  });
}

TEST(Comm, AnAllgatherThatFails) {
  Meeting meeting(1);
  Seat seat{&meeting, 0, 7};
  const twCommConfig_t config = config_of(&seat);
  twComm_t comm = nullptr;
  EXPECT_TW(twSystemError, twCommCreateShm(&comm, 0, 1, &config));
  EXPECT_TRUE(says("config.allgather returned 7; it must return 0"));
  EXPECT_EQ(comm, nullptr);
}

// A carrier whose functions are there and are not called.
twCarrier_t idle_carrier() {
  return {sizeof(twCarrier_t),
          nullptr,
          [](void*, int32_t*) { return -1; },
          [](void*, const twChannelConfig_t*, int64_t*, char*) { return -1; },
          [](void*, int64_t, int32_t) {},
          [](void*, int64_t, const twMove_t*) { return int64_t{-1}; },
          [](void*, int64_t, int64_t, int32_t) { return -1; },
          nullptr,
          nullptr,
          nullptr,
          nullptr};
}

// Rank 1 tells where it is, and never comes: rank 0 waits as long as it was told to, whatever the environment says.
TEST(Comm, PortableWaitsForAsLongAsItIsTold) {
  const Env usual("TOKENWAY_TIMEOUT_MS", "600000");
  const twCarrier_t carrier = idle_carrier();
  twPortableConfig_t config = TW_PORTABLE_CONFIG_INIT;
  config.carrier = &carrier;
  config.allgather = [](const void* mine, void* all, size_t bytes, void*) {
    std::memcpy(all, mine, bytes);
    std::memcpy(static_cast<char*>(all) + bytes, mine, bytes);
    return 0;
  };
  twComm_t comm = nullptr;
  config.timeout_ms = 50;
  const auto began = std::chrono::steady_clock::now();
  EXPECT_TW(twTimeout, twCommCreatePortable(&comm, 0, 2, &config));
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(60));
  config.timeout_ms = -5;
  EXPECT_TW(twInvalidArgument, twCommCreatePortable(&comm, 0, 2, &config));
  EXPECT_TRUE(says("config.timeout_ms is -5; it must be from 0 to"));
  EXPECT_EQ(comm, nullptr);
}

// One that claims success is not believed: what it did not write is no address.
TEST(Comm, AnAllgatherThatDoesNothing) {
  std::string address;
  const Status status = agree_on_address(1, 2, [](const void*, void*, size_t) { return 0; }, {}, &address);
  EXPECT_EQ(status.code, twSystemError);
  EXPECT_NE(status.text().find("what rank 1 gave is not at its place"), std::string::npos) << status.text();
  EXPECT_EQ(address, "");
}

TEST(Comm, NeitherAddressNorAllgather) {
  twComm_t comm = nullptr;
  EXPECT_TW(twInvalidArgument, twCommCreateShm(&comm, 0, 1, nullptr));
  EXPECT_TRUE(says("config.address is empty"));
  EXPECT_TRUE(says("config.allgather"));
}

TEST(Comm, BadRanksOfCuda) {
  twComm_t comm = nullptr;
  for (const auto& [rank, nranks] : {std::pair{2, 2}, {-1, 2}, {0, 0}, {0, TW_MAX_RANKS + 1}}) {
    EXPECT_TW(twInvalidArgument, twCommCreateCuda(&comm, rank, nranks, nullptr));
    EXPECT_TRUE(says("it must be from"));
  }
  EXPECT_EQ(comm, nullptr);
}

TEST(Comm, LocalDevicesHaveNumbers) {
  twCommConfig_t config = TW_COMM_CONFIG_INIT;
  const int32_t devices[] = {-1, 0};
  config.devices = devices;
  twComm_t comms[2] = {};
  EXPECT_TW(twInvalidArgument, twCommCreateLocal(comms, 2, &config));
  EXPECT_TRUE(says("config.devices[0] is -1; it must be from 0 on"));
}

#if !TOKENWAY_WITH_CUDA
// Whoever asks for a device gets a sentence, at once, and nothing else.
TEST(Comm, WithoutCuda) {
  twCommConfig_t config = TW_COMM_CONFIG_INIT;
  config.address = "comm-test-without-cuda";
  const int32_t devices[] = {0, 0};
  twComm_t comms[2] = {};
  for (const int32_t device : {-1, 0, 3}) {
    config.device = device;
    EXPECT_TW(twUnsupported, twCommCreateCuda(comms, 0, 2, &config));
    EXPECT_TRUE(says("this library was built without CUDA"));
  }
  config.devices = devices;
  EXPECT_TW(twUnsupported, twCommCreateLocal(comms, 2, &config));
  EXPECT_TRUE(says("this library was built without CUDA"));
  EXPECT_EQ(comms[0], nullptr);
  EXPECT_EQ(comms[1], nullptr);
}
#endif

// A caller of the first version knows neither devices nor allgather.
TEST(Comm, OlderConfig) {
  twCommConfig_t config = TW_COMM_CONFIG_INIT;
  config.size = offsetof(twCommConfig_t, device);
  const int32_t devices[] = {7};
  config.devices = devices;  // not read
  config.allgather = gather_at;
  twComm_t comm = nullptr;
  ASSERT_TW(twSuccess, twCommCreateLocal(&comm, 1, &config));
  int32_t device = 0;
  EXPECT_TW(twSuccess, twCommDevice(comm, &device));
  EXPECT_EQ(device, -1);
  EXPECT_TW(twSuccess, twCommDestroy(comm));
}

}  // namespace
}  // namespace tw::test
