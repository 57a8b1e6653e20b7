// The engine over libfabric by itself: what it makes of providers that do less than tcp does (scripted_endpoint.h), and
// how it connects. engine_test.cc has what all engines promise.
#include <algorithm>
#include <csignal>

#include "core/interrupt.h"
#include "engines.h"
#include "interrupt.h"
#include "net/peer_queue.h"

namespace tw::test {
namespace {

constexpr uint64_t kSmallWindow = 65536;

uint64_t total(const std::vector<std::byte>& memory, uint64_t at, uint64_t bytes) {
  uint64_t sum = 0;
  for (uint64_t i = 0; i < bytes; ++i) sum += static_cast<uint64_t>(memory[at + i]);
  return sum;
}

// 40 rounds of a put in pieces, a put in one and a word between them.
void go_rounds(EnginesOf& world) {
  std::ranges::fill(world.sources[0], std::byte{1});
  for (uint64_t round = 1; round <= 40; ++round) {
    const uint64_t at = 512 + round * 1000;
    ASSERT_EQ(world.insist(0, 1, world.put(0, at, 900)), Posted::kTaken);
    ASSERT_EQ(world.insist(0, 1, world.put(0, at + 900, 100), world.word(8, 1)), Posted::kTaken);
    if (round % 3 != 0) continue;  // so that several words are on their way together
    ASSERT_TRUE(world.await_word(1, 8, round));
    ASSERT_EQ(total(world.targets[1], 512, round * 1000 + 1000), round * 1000);
  }
  ASSERT_TRUE(world.await_word(1, 8, 40));
  EXPECT_EQ(total(world.targets[1], 512, 60000), 40000u);
}

TEST(Fabric, WordsWaitForWritesWhereMessagesOvertakeThem) {
  EnginesOf world(Kind::kScripted, 2, kSmallWindow, {.chunk_bytes = 256}, {.ordered = false, .late = 5});
  go_rounds(world);
  EXPECT_EQ(world.hub.overtaken, 0);
  EXPECT_EQ(world.hub.undelivered, 0);
  world.close();
}

TEST(Fabric, WordsGoAtOnceWhereMessagesKeepTheirOrder) {
  EnginesOf world(Kind::kScripted, 2, kSmallWindow, {.chunk_bytes = 256}, {.ordered = true, .late = 5});
  go_rounds(world);
  EXPECT_EQ(world.hub.undelivered, 40 * 5) << "nobody asks for a delivery that the order tells";
  world.close();
}

// Where a write ends before it has arrived, the end waits for what comes behind it.
TEST(Fabric, TheEndComesBehindWhatIsUnderWay) {
  EnginesOf world(Kind::kScripted, 2, kSmallWindow, {}, {.ordered = true, .late = 200});
  on_all_ranks(2, [&](int rank) {
    std::ranges::fill(world.sources[rank], std::byte{1});
    ASSERT_EQ(world[rank].put(1 - rank, world.put(0, 512, 5000)), Posted::kTaken);
    ASSERT_TRUE(world.await_done(rank, 1 - rank, 1));
    const Status closed = world[rank].close(world.meeting(rank, 30));
    EXPECT_TRUE(closed.ok()) << closed.text();
    EXPECT_EQ(total(world.targets[rank], 512, 5000), 5000u);
  });
}

TEST(Fabric, WhatTheNetworkDoesNotTakeComesAgain) {
  EnginesOf world(Kind::kScripted, 2, kSmallWindow, {.chunk_bytes = 256}, {.ordered = true, .again = true});
  go_rounds(world);
  world.close();
}

TEST(Fabric, APutIsNoLongerThanTheNetworkTakes) {
  EnginesOf world(Kind::kScripted, 2, kSmallWindow, {}, {.largest = 333});
  go_rounds(world);
  world.close();
}

// A peer takes nothing: it fills up, and fails when patience is over. The other's puts go on all the time.
TEST(Fabric, APeerThatIsStuckFailsAndKeepsNobody) {
  EnginesOf world(Kind::kScripted, 3, kSmallWindow, {.depth = 5, .patience = 300ms}, {.ordered = true});
  {
    const std::lock_guard lock(world.hub.mutex);
    world.hub.stuck.insert({0, 1});
  }
  for (int i = 0; i < 5; ++i) ASSERT_EQ(world[0].put(1, world.put(0, 512, 0), world.word(16, 1)), Posted::kTaken);
  Posted last = world[0].put(1, world.put(0, 512, 100));
  EXPECT_TRUE(last == Posted::kFull || last == Posted::kGone);
  uint64_t rounds = 0;
  const auto until = Clock::now() + kNobodyWaitsAsLong;
  while (world[0].failure(1).ok() && Clock::now() < until) {
    ASSERT_EQ(world.insist(0, 2, world.put(0, 512, 100), world.word(8, 1)), Posted::kTaken);
    ASSERT_TRUE(world.await_word(2, 8, ++rounds));
  }
  EXPECT_EQ(world[0].failure(1).code, twTimeout);
  EXPECT_NE(world[0].failure(1).text().find("rank 1 has ended for 300 ms"), std::string::npos);
  EXPECT_EQ(world[0].put(1, world.put(0, 512, 100)), Posted::kGone);
  EXPECT_EQ(world[0].done(1), 0u);
}

TEST(Fabric, APeerThatTheNetworkRefusesFails) {
  EnginesOf world(Kind::kScripted, 3, kSmallWindow);
  {
    const std::lock_guard lock(world.hub.mutex);
    world.hub.refused.insert({0, 1});
  }
  EXPECT_EQ(world[0].put(1, world.put(0, 512, 100)), Posted::kTaken);
  EXPECT_EQ(world[0].put(1, world.put(0, 512, 100)), Posted::kGone);
  EXPECT_EQ(world[0].failure(1).text(), "libfabric's scripted sends nothing more to rank 1: scripted error 5");
  EXPECT_EQ(world[0].put(2, world.put(0, 512, 100), world.word(8, 1)), Posted::kTaken);
  EXPECT_TRUE(world.await_word(2, 8, 1));
}

TEST(Fabric, MessagesOfStrangersAreDropped) {
  EnginesOf world(Kind::kScripted, 2, kSmallWindow, {}, {.ordered = true});
  const net::Note strange{12345, net::Note::kAdd, 0, EnginesOf::kTarget, 8, 99};
  world.hub.bring(1, &strange, sizeof strange);
  EXPECT_EQ(world[0].put(1, world.put(0, 0, 0), world.word(8, 1)), Posted::kTaken);
  EXPECT_TRUE(world.await_word(1, 8, 1));
  EXPECT_TRUE(world[1].failure(0).ok());
  world.close();
}

// What connecting 3 ranks gives each, where rank 1 is not as the others.
struct Connecting {
  explicit Connecting(Kind kind, const std::function<Status(Connecting&, int)>& rank1,
                      std::chrono::seconds patience = 60s)
      : hub(3), bootstraps(make_local_bootstraps(3)), until(Clock::now() + patience), results(3), engines(3) {
    on_all_ranks(3, [&](int rank) { results[rank] = rank == 1 ? rank1(*this, rank) : usual(kind, rank); });
  }
  Status usual(Kind kind, int rank) {
    if (kind == Kind::kScripted)
      return net::connect_endpoint({}, meeting(rank), hub.endpoint(rank), {}, &engines[rank]);
    return net::connect_fabric({.provider = name_of(kind)}, meeting(rank), &engines[rank]);
  }
  net::Meeting meeting(int rank) { return {bootstraps[rank].get(), members, 0, until}; }
  bool all_say(twResult_t code, const std::string& part) const {
    bool all = true;
    for (int rank = 0; rank < 3; ++rank) {
      const bool says =
          rank == 1 || (results[rank].code == code && results[rank].text().find(part) != std::string::npos);
      if (!says) ADD_FAILURE() << rank << ": " << twResultString(results[rank].code) << ": " << results[rank].text();
      all = all && says && engines[rank] == nullptr;
    }
    return all;
  }

  ScriptedHub hub;
  std::vector<std::unique_ptr<Bootstrap>> bootstraps;
  const std::vector<int> members{0, 1, 2};
  const TimePoint until;
  std::vector<Status> results;
  std::vector<std::unique_ptr<net::Engine>> engines;
};

TEST(Fabric, ARankThatHasNoEndpointFailsAll) {
  const Connecting connecting(Kind::kScripted, [](Connecting& all, int rank) {
    return net::connect_endpoint({}, all.meeting(rank), nullptr, fail(twUnsupported, "a test has none"),
                                 &all.engines[rank]);
  });
  EXPECT_TRUE(connecting.all_say(twUnsupported, "rank 1: a test has none"));
  EXPECT_EQ(connecting.results[1].text(), "a test has none");
}

TEST(Fabric, ARankThatCannotBeReachedFailsAll) {
  const Connecting connecting(Kind::kScripted, [](Connecting& all, int rank) {
    {
      const std::lock_guard lock(all.hub.mutex);
      all.hub.refused.insert({1, 2});
    }
    return all.usual(Kind::kScripted, rank);
  });
  EXPECT_TRUE(connecting.all_say(twUnsupported, "rank 1: libfabric's scripted sends nothing more to rank 2"));
}

TEST(Fabric, ARankThatDoesNotComeIsLate) {
  const Connecting connecting(Kind::kScripted, [](Connecting&, int) { return Status{}; }, 1s);
  EXPECT_TRUE(connecting.all_say(twTimeout, "rank 1 did not arrive in time"));
}

TEST(Fabric, ARankThatHasLeftIsGone) {
  const Connecting connecting(Kind::kScripted, [](Connecting& all, int rank) {
    all.bootstraps[rank].reset();
    return Status{};
  });
  EXPECT_TRUE(connecting.all_say(twPeerDied, "rank 1 is gone"));
}

TEST(Fabric, AWaitForTheEndMayBeInterrupted) {
  EnginesOf world(Kind::kScripted, 2, kSmallWindow);
  const Interrupt interrupt(1);
  const Interruptible call;
  EXPECT_EQ(world[0].close(world.meeting(0, 30)).code, twInterrupted);
}

TEST(Fabric, AProviderThatIsNotHereIsNamed) {
  if (const std::string missing = libfabric_missing(); !missing.empty()) GTEST_SKIP() << missing;
  std::unique_ptr<net::Endpoint> endpoint;
  const Status opened = net::open_endpoint("no_such_provider", "", &endpoint);
  EXPECT_EQ(opened.code, twUnsupported);
  EXPECT_NE(opened.text().find("no provider \"no_such_provider\" here"), std::string::npos) << opened.text();
}

TEST(Fabric, RanksThatHaveOtherProvidersAreRefused) {
  if (const std::string missing = libfabric_missing(); !missing.empty()) GTEST_SKIP() << missing;
  const Connecting connecting(Kind::kTcp, [](Connecting& all, int rank) { return all.usual(Kind::kShm, rank); });
  EXPECT_TRUE(connecting.all_say(twCallMismatch, "rank 1 has libfabric's provider shm"));
}

// Some that libfabric brings along take SIGINT and others for themselves.
TEST(Fabric, SignalsStayWhoseTheyWere) {
  if (const std::string missing = libfabric_missing(); !missing.empty()) GTEST_SKIP() << missing;
  net::LibraryFacts facts;
  ASSERT_TRUE(net::describe_library(&facts).ok());
  { EnginesOf world(Kind::kShm, 2, kSmallWindow); }
  for (const int signal : {SIGINT, SIGTERM, SIGABRT}) {
    struct sigaction now {};
    ASSERT_EQ(::sigaction(signal, nullptr, &now), 0);
    EXPECT_EQ(now.sa_handler, SIG_DFL) << signal;
  }
}

// What tokenway info prints: a sentence where libfabric is not here, else tcp is among its providers.
TEST(Fabric, TheLibraryIsDescribed) {
  net::LibraryFacts facts;
  const Status described = net::describe_library(&facts);
  if (!described.ok()) {
    EXPECT_EQ(described.code, twUnsupported);
    EXPECT_NE(described.text().find("libfabric"), std::string::npos);
    GTEST_SKIP() << described.text();
  }
  EXPECT_NE(facts.version.find('.'), std::string::npos);
  EXPECT_NE(facts.providers.find("tcp"), std::string::npos) << facts.providers;
}

}  // namespace
}  // namespace tw::test
