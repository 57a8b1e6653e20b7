// The rules between hosts one by one (docs/PROTOCOL.md, T1 to T9): in which order a step is posted, and what becomes of
// steps that are refused, groups that are given up, words on a way that ends, and questions that are asked again.
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "bootstrap/asking.h"
#include "bootstrap/bootstrap.h"
#include "hosts_world.h"
#include "layout/hosts_map.h"

namespace tw::test {
namespace {

// Remembers what was posted to each peer, in order.
class WritingEngine final : public PassedOn {
 public:
  struct Posted {
    uint64_t bytes;
    bool word;
  };
  struct Written {
    std::mutex mutex;
    std::map<std::pair<int, int>, std::vector<Posted>> ways;  // by from and to
    // What there is since this was asked last.
    std::map<std::pair<int, int>, std::vector<Posted>> taken() {
      const std::lock_guard lock(mutex);
      return std::exchange(ways, {});
    }
  };
  WritingEngine(std::unique_ptr<net::Engine> engine, Written& written)
      : PassedOn(std::move(engine)), written_(written) {}

  net::Posted put(int peer, const net::Put& put) override {
    write(peer, {put.bytes, false});
    return PassedOn::put(peer, put);
  }
  net::Posted put(int peer, const net::Put& put, const net::Word& word) override {
    write(peer, {put.bytes, true});
    return PassedOn::put(peer, put, word);
  }

 private:
  void write(int peer, Posted posted) {
    const std::lock_guard lock(written_.mutex);
    written_.ways[{rank(), peer}].push_back(posted);
  }
  Written& written_;
};

twGroupConfig_t waiting(int timeout_ms) {
  twGroupConfig_t config = make_config(12, 3, 5, 24);
  config.timeout_ms = timeout_ms;
  return config;
}

// T5, T8: rows, then the word with its block, to each rail peer, and nothing behind it; also in steps without rows.
TEST(BetweenHosts, WordsComeLast) {
  for (const std::vector<int>& tokens : {std::vector<int>{5, 5, 5, 5}, {0, 0, 0, 0}}) {
    WritingEngine::Written written;
    const auto nets = std::make_shared<Nets>();
    nets->wrap = [&](std::unique_ptr<net::Engine> engine) {
      return std::make_unique<WritingEngine>(std::move(engine), written);
    };
    World world(comms_on({2, 2}, nets), make_config(12, 6, 5, 24));
    Exchange exchange(world, make_traffic(world.config, tokens, 9), {twRankMajor}, 9);
    for (const bool returns : {false, true}) {
      returns ? exchange.send_combine() : exchange.send_dispatch();
      const auto ways = written.taken();
      ASSERT_EQ(ways.size(), 4u);
      for (const auto& [way, posted] : ways) {
        EXPECT_EQ(way.second, (way.first + 2) % 4);
        ASSERT_EQ(posted.size(), tokens[0] > 0 ? 2u : 1u) << way.first;
        EXPECT_TRUE(posted.back().word);
        EXPECT_EQ(posted.back().bytes, sizeof(Block) + 2 * sizeof(Block::Entry));
        if (posted.size() == 1) continue;
        EXPECT_FALSE(posted.front().word);
        EXPECT_GT(posted.front().bytes, 0u);
      }
      returns ? exchange.complete_combine() : exchange.complete_dispatch();
    }
  }
}

// A word for rows that go straight is missed, though the step's word and the rows are here.
TEST(BetweenHosts, LostRowsWord) {
  const auto nets = std::make_shared<Nets>();
  nets->prepare = [](PretendedNet& between) { between.lose_word(0, 3, 0); };  // whose rail peer is rank 2
  twGroupConfig_t config = make_config(0, 0, 8, 16);
  config.timeout_ms = 300;
  World world(comms_on({2, 2}, nets), config);
  const std::vector<int32_t> sizes(4, 2);
  std::vector<float> rows(4 * 2 * 8, 1.0f);
  std::vector<float> sums(4 * 2 * 8, -1.0f);
  std::vector<int64_t> requests(4);
  for (int rank = 0; rank < 4; ++rank) {
    twReduceScatterVInput_t input = TW_REDUCE_SCATTER_V_INPUT_INIT;
    input.tensors[0] = tensor(rows.data(), twFloat32, {8, 8});
    input.host_sizes = sizes.data();
    input.send_only = 1;
    twReduceScatterVOutput_t output = TW_REDUCE_SCATTER_V_OUTPUT_INIT;
    output.tensors[0] = tensor(sums.data() + 16 * rank, twFloat32, {2, 8});
    ASSERT_TW(twSuccess, twReduceScatterV(world[rank], &input, &output));
    requests[rank] = output.request;
  }
  for (const int rank : {0, 1, 2}) EXPECT_TW(twSuccess, twCompleteRequest(world[rank], requests[rank], nullptr));
  EXPECT_TW(twTimeout, twCompleteRequest(world[3], requests[3], nullptr));
  EXPECT_EQ(sums[0], 4.0f);
  EXPECT_NE(sums[16 * 3], sums[16 * 3]) << "sums that failed are NaN";
}

// T9: a word's way ends in the rail peer's engine. That one has sent its own step, and has died since.
TEST(BetweenHosts, DeadRailPeer) {
  World world(comms_on({2, 2}, std::make_shared<Nets>()), waiting(3000));
  Exchange exchange(world, make_traffic(world.config, {5, 3, 4, 2}, 9), {twRankMajor}, 9);
  for (const int rank : {1, 2, 3}) EXPECT_TW(twSuccess, exchange[rank].dispatch(true));
  world.kill(2);
  EXPECT_TW(twSuccess, exchange[0].dispatch(true));
  for (const int rank : {0, 1}) EXPECT_TW(twSuccess, exchange[rank].complete());
  EXPECT_TW(twPeerDied, exchange[3].complete());
  EXPECT_EQ(error_of(world[3]).peer, 2);
}

// A refused step has its words too, so nobody waits, and the next one is whole.
TEST(BetweenHosts, RefusedStepsAreTold) {
  World world(comms_on({2, 2}, std::make_shared<Nets>(3, 3)), waiting(5000));
  Exchange exchange(world, make_traffic(world.config, {5, 3, 4, 2}, 9), {twRankMajor}, 9);
  for (const int refuses : {1, 2}) {
    exchange.dispatch();
    on_all_ranks(4, [&](int rank) {
      const twDtype_t dtype = exchange[rank].sums.tokens.dtype;
      if (rank == refuses) exchange[rank].sums.tokens.dtype = static_cast<twDtype_t>(99);
      EXPECT_TW(rank == refuses ? twInvalidArgument : twPeerRefused, exchange[rank].combine());
      exchange[rank].sums.tokens.dtype = dtype;
    });
    exchange.combine();
  }
}

// Ranks of other hosts hear of it by a post.
TEST(BetweenHosts, GivenUp) {
  World world(comms_on({2, 2}, std::make_shared<Nets>()), waiting(3000));
  Exchange exchange(world, make_traffic(world.config, {5, 3, 4, 2}, 9), {twRankMajor}, 9);
  for (const int rank : {1, 2, 3}) EXPECT_TW(twSuccess, exchange[rank].dispatch(true));
  EXPECT_TW(twSuccess, twGroupAbort(world[0]));
  for (const int rank : {1, 2, 3}) {
    EXPECT_TW(twPeerAborted, exchange[rank].complete());
    EXPECT_EQ(error_of(world[rank]).peer, 0) << rank;
  }
}

// What a rank has told before is no answer to the next question, and who is gone gives none.
TEST(Asking, AnswersAreToTheQuestion) {
  const auto bootstraps = make_local_bootstraps(2);
  const std::vector<int> members = {0, 1};
  constexpr uint64_t kTag = 7;
  Asking asks(bootstraps[0].get(), members, kTag);
  auto answers = std::make_unique<Asking>(bootstraps[1].get(), members, kTag);
  const auto patient = [] { return std::chrono::steady_clock::now() + std::chrono::seconds(20); };
  const auto never = [] { return false; };
  asks.count();
  for (int64_t sent = 0; sent < 4; ++sent) {
    EXPECT_EQ(asks.ask(patient(), never), (std::vector<int64_t>{1, sent}));
    answers->count();
  }
  answers.reset();
  const auto soon = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
  EXPECT_EQ(asks.ask(soon, never), (std::vector<int64_t>{1, -1}));
  EXPECT_EQ(asks.ask(patient(), [] { return true; }), (std::vector<int64_t>{1, -1}));
}

}  // namespace
}  // namespace tw::test
