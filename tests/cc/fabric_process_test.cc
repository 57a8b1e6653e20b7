// The engine over libfabric between processes, of which one is killed in the middle. The processes are this program,
// started again for the test that is called DISABLED_Rank.
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>

#include "engines.h"

namespace tw::test {
namespace {

constexpr const char* kVariable = "TOKENWAY_TEST_FABRIC_RANK";
constexpr const char* kAddress = "TOKENWAY_TEST_FABRIC_ADDRESS";
constexpr int kProcesses = 3;
constexpr int kKilled = 2;
constexpr uint64_t kRow = 50000;
constexpr uint64_t kAfter = 100;  // rounds of survivors

#define CHECK_OR_RETURN(condition, ...)                                             \
  do {                                                                              \
    if (!(condition)) return std::fprintf(stderr, "%d: %s\n", rank, #condition), 1; \
  } while (0)

// One rank: puts to both others until rank 2 has failed, then to the other survivor, whose words it counts.
int be_rank(int rank) {
  std::unique_ptr<Bootstrap> bootstrap;
  const TimePoint until = Clock::now() + kNobodyWaitsAsLong;
  CHECK_OR_RETURN(connect_mesh(rank, kProcesses, std::getenv(kAddress), until, &bootstrap).ok());
  const std::vector<int> members{0, 1, 2};
  const auto meeting = [&](uint64_t tag) { return net::Meeting{bootstrap.get(), members, tag, until}; };
  std::unique_ptr<net::Engine> engine;
  const Status connected = net::connect_fabric({.depth = 4}, meeting(0), &engine);
  if (!connected.ok()) return std::fprintf(stderr, "%d: %s\n", rank, connected.text().c_str()), 1;
  constexpr uint64_t bytes = uint64_t{1} << 20;
  std::vector<std::byte> memory(bytes);
  int window = -1;
  CHECK_OR_RETURN(engine->add_window(meeting(10), memory.data(), bytes, &window).ok());

  const auto word = [&](int from) {
    return std::atomic_ref(*reinterpret_cast<uint64_t*>(memory.data() + 8 * from)).load(std::memory_order_acquire);
  };
  const auto put = [&](int peer, uint64_t add) {
    const uint64_t at = 4096 + kRow * static_cast<uint64_t>(rank);
    return engine->put(peer, {{window, 500000}, {window, at}, kRow}, {{window, 8 * static_cast<uint64_t>(rank)}, add});
  };
  const int other = 1 - rank;
  bool told = false;
  while (engine->failure(kKilled).ok() || rank == kKilled) {
    CHECK_OR_RETURN(Clock::now() < until);
    for (int peer = 0; peer < kProcesses; ++peer) {
      if (peer != rank) (void)put(peer, 1);
    }
    engine->poll();
    // Rank 2 tells when it has heard of both, and goes on until it is killed.
    if (rank == kKilled && !told && word(0) > 20 && word(1) > 20) told = ::write(STDOUT_FILENO, "m\n", 2) == 2;
  }
  CHECK_OR_RETURN(put(kKilled, 1) == Posted::kGone);
  for (uint64_t i = 0; i < kAfter;) {
    CHECK_OR_RETURN(Clock::now() < until);
    const Posted posted = put(other, uint64_t{1} << 32);
    CHECK_OR_RETURN(posted == Posted::kTaken || posted == Posted::kFull);
    i += posted == Posted::kTaken;
    engine->poll();
  }
  while (word(other) >> 32 != kAfter) {
    CHECK_OR_RETURN(Clock::now() < until);
    engine->poll();
  }
  CHECK_OR_RETURN(engine->failure(other).ok());
  const Status closed = engine->close(meeting(30));
  CHECK_OR_RETURN(closed.code == twPeerDied && closed.text().find("rank 2") != std::string::npos);
  return 0;
}

TEST(FabricProcess, DISABLED_Rank) {
  const char* const rank = std::getenv(kVariable);
  ASSERT_NE(rank, nullptr) << "a process of the test below";
  EXPECT_EQ(be_rank(std::atoi(rank)), 0);
}

TEST(FabricProcess, ARankThatIsKilled) {
  if (const std::string missing = libfabric_missing(); !missing.empty()) GTEST_SKIP() << missing;
  int told[2];
  ASSERT_EQ(::pipe2(told, O_CLOEXEC), 0);
  const Env address(kAddress, ("fabric-test-" + std::to_string(::getpid())).c_str());
  std::vector<pid_t> processes(kProcesses);
  for (int rank = 0; rank < kProcesses; ++rank) {
    const Env number(kVariable, std::to_string(rank).c_str());
    posix_spawn_file_actions_t files;
    ::posix_spawn_file_actions_init(&files);
    if (rank == kKilled) ::posix_spawn_file_actions_adddup2(&files, told[1], STDOUT_FILENO);
    const char* const arguments[] = {"tokenway_tests", "--gtest_filter=FabricProcess.DISABLED_Rank",
                                     "--gtest_also_run_disabled_tests", "--gtest_brief=1", nullptr};
    ASSERT_EQ(
        ::posix_spawn(&processes[rank], "/proc/self/exe", &files, nullptr, const_cast<char**>(arguments), environ), 0);
    ::posix_spawn_file_actions_destroy(&files);
  }
  ::close(told[1]);
  // GoogleTest says something first. A process that has ended closes the pipe.
  std::string said;
  char letter = 0;
  while (said != "m" && ::read(told[0], &letter, 1) == 1) said = letter == '\n' ? "" : said + letter;
  ::close(told[0]);
  EXPECT_EQ(said, "m");
  ::kill(processes[kKilled], SIGKILL);
  for (int rank = 0; rank < kProcesses; ++rank) {
    int status = 0;
    ASSERT_EQ(::waitpid(processes[rank], &status, 0), processes[rank]);  // each ends by its own deadline
    if (rank != kKilled) {
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << rank << ": " << status;
    }
  }
}

}  // namespace
}  // namespace tw::test
