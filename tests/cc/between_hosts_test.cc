// The exchange between hosts, over pretended engines: bits and places of shared memory, how much crosses, and what
// becomes of words that are lost or doubled, ranks that are lost, and ranks that do not come.
//
// All other tests of exchanges run between hosts too, where TOKENWAY_TEST_HOSTS says how many ranks each has.
#include <cstdlib>
#include <mutex>
#include <numeric>

#include "core/group.h"
#include "hosts_world.h"
#include "layout/hosts_map.h"

namespace tw::test {
namespace {

// Counts what goes to peers.
class CountingEngine final : public PassedOn {
 public:
  struct Counted {
    std::mutex mutex;
    int puts = 0;
    int words = 0;
    uint64_t bytes = 0;
  };
  CountingEngine(std::unique_ptr<net::Engine> engine, Counted& counted)
      : PassedOn(std::move(engine)), counted_(counted) {}

  net::Posted put(int peer, const net::Put& put) override {
    count(put, 0);
    return PassedOn::put(peer, put);
  }
  net::Posted put(int peer, const net::Put& put, const net::Word& word) override {
    count(put, 1);
    return PassedOn::put(peer, put, word);
  }

 private:
  void count(const net::Put& put, int words) {
    const std::lock_guard lock(counted_.mutex);
    counted_.puts += put.bytes > 0 ? 1 : 0;
    counted_.words += words;
    counted_.bytes += put.bytes;
  }
  Counted& counted_;
};

struct CountedWorld {
  CountingEngine::Counted counted;
  std::shared_ptr<Nets> nets = std::make_shared<Nets>();
  std::unique_ptr<World> world;

  CountedWorld(const std::vector<int>& hosts, const twGroupConfig_t& config) {
    nets->wrap = [this](std::unique_ptr<net::Engine> engine) {
      return std::make_unique<CountingEngine>(std::move(engine), counted);
    };
    world = std::make_unique<World>(comms_on(hosts, nets), config);
  }
  void reset() {
    const std::lock_guard lock(counted.mutex);
    counted.puts = counted.words = 0;
    counted.bytes = 0;
  }
};

std::vector<int> hosts_of(const std::vector<int>& sizes) {
  std::vector<int> of;
  for (size_t host = 0; host < sizes.size(); ++host) of.insert(of.end(), sizes[host], static_cast<int>(host));
  return of;
}

twGroupConfig_t impatient_hosts() {
  twGroupConfig_t config = make_config(12, 3, 5, 24);
  config.timeout_ms = 300;
  return config;
}

// Where rows, metadata and signals come to lie is what it is in shared memory, byte for byte.
TEST(BetweenHosts, WindowsAreThoseOfSharedMemory) {
  const twGroupConfig_t config = make_config(12, 3, 5, 24);
  const Traffic traffic = make_traffic(config, {5, 0, 3, 4, 1, 5}, 3);
  for (const std::vector<int>& hosts : {std::vector<int>{2, 2, 2}, {1, 3, 2}, {5, 1}}) {
    for (const twLayout_t layout : {twRankMajor, twExpertMajor}) {
      World near(6, config);
      World apart(comms_on(hosts, std::make_shared<Nets>(7, 4)), config);
      Style style{layout, twWeightTopk};
      style.own_memory = layout == twExpertMajor;
      Exchange a(near, traffic, style, 4), b(apart, traffic, style, 4);
      a.dispatch();
      b.dispatch();
      for (int rank = 0; rank < 6; ++rank) EXPECT_TRUE(near.window(rank) == apart.window(rank)) << rank;
      a.combine();
      b.combine();
    }
  }
}

// A row crosses once to each host that wants it, however many of its ranks do; a message is one put, and each step one
// word to each rail peer.
TEST(BetweenHosts, EachRowCrossesOnce) {
  const twGroupConfig_t config = make_config(12, 4, 6, 512);
  const std::vector<int> sizes = {2, 3, 1};
  const std::vector<int> host = hosts_of(sizes);
  CountedWorld made(sizes, config);
  const Traffic traffic = make_traffic(config, {6, 2, 0, 5, 6, 3}, 11);
  Exchange exchange(*made.world, traffic, {twRankMajor}, 12);

  uint64_t out = 0, least_out = 0, back = 0, entries = 0;
  int messages_out = 0, messages_back = 0;
  const uint64_t row = 2 * 512;
  for (int rank = 0; rank < 6; ++rank) {
    std::vector<std::vector<int>> returns(sizes.size());
    for (int other = 0; other < static_cast<int>(sizes.size()); ++other) {
      if (other == host[rank]) continue;
      entries += sizes[other];
      bool any = false;
      for (int token = 0; token < traffic.tokens[rank]; ++token) {
        uint64_t targets = 0;
        for (int to = 0; to < 6; ++to) {
          targets += host[to] == other && goes(traffic, config, rank, token, to) ? 1 : 0;
        }
        if (targets == 0) continue;
        any = true;
        out += Record::room(row, targets) + targets * Record::room(meta_bytes(config.top_k), 1);
        least_out += row + targets * meta_bytes(config.top_k);
        back += targets * Record::room(row, 1);
      }
      messages_out += any ? 1 : 0;
    }
  }
  // What goes back goes from each rank to each host that sent it something.
  for (int rank = 0; rank < 6; ++rank) {
    for (int other = 0; other < static_cast<int>(sizes.size()); ++other) {
      bool any = false;
      for (int owner = 0; owner < 6; ++owner) {
        if (host[owner] != other || other == host[rank]) continue;
        for (int i = 0; i < traffic.tokens[owner] * config.top_k; ++i) {
          any |= traffic.ids[owner][i] >= 0 && traffic.ids[owner][i] / 2 == rank;
        }
      }
      messages_back += any ? 1 : 0;
    }
  }
  const int words = 6 * 2;
  const uint64_t blocks = words * sizeof(Block) + entries * sizeof(Block::Entry);
  made.reset();
  exchange.dispatch();
  EXPECT_EQ(made.counted.words, words);
  EXPECT_EQ(made.counted.puts, messages_out + words);
  // Metadata that follow each other are one record.
  EXPECT_LE(made.counted.bytes, out + blocks);
  EXPECT_GE(made.counted.bytes, least_out + blocks);
  made.reset();
  exchange.combine();
  EXPECT_EQ(made.counted.words, words);
  EXPECT_EQ(made.counted.puts, messages_back + words);
  // Records are padded, but for the last of a message.
  EXPECT_LE(made.counted.bytes, back + blocks);
  EXPECT_GT(made.counted.bytes, back + blocks - Record::kAlignment * static_cast<uint64_t>(messages_back));
}

// Where domains are hosts, one row returns for each host that a token went to, and none is summed twice or late.
TEST(BetweenHosts, FoldsTravelOnce) {
  twGroupConfig_t config = make_config(12, 4, 6, 512);
  config.domain = 3;
  CountedWorld made({3, 3}, config);
  const Traffic traffic = make_traffic(config, {6, 2, 0, 5, 6, 3}, 11);
  Exchange exchange(*made.world, traffic, {twRankMajor, twWeightNone, twBfloat16}, 12);
  uint64_t rows = 0;
  for (int rank = 0; rank < 6; ++rank) {
    for (int token = 0; token < traffic.tokens[rank]; ++token) {
      bool crosses = false;
      for (int k = 0; k < config.top_k; ++k) {
        const int32_t id = traffic.ids[rank][token * config.top_k + k];
        crosses |= id >= 0 && id / 6 != rank / 3;  // two experts a rank
      }
      rows += crosses ? 1 : 0;
    }
  }
  exchange.dispatch();
  made.reset();
  exchange.combine();
  const uint64_t told = 6 * (sizeof(Block) + 3 * sizeof(Block::Entry)) + 6 * sizeof(uint64_t);
  EXPECT_LE(made.counted.bytes, rows * Record::room(1024, 1) + told);
  EXPECT_GE(made.counted.bytes, rows * 1024 + told);
  EXPECT_EQ(made.counted.words, 12);  // a step's word to each rail peer, and a rows word to each owner
  for (uint32_t salt = 20; salt < 40; ++salt) {
    exchange.renew(salt);
    exchange.dispatch();
    exchange.combine();
  }
}

// Ranks that have nothing to return keep nobody waiting for their folds.
TEST(BetweenHosts, FoldsOfNothing) {
  twGroupConfig_t config = make_config(8, 2, 4, 24);
  config.domain = 2;
  World world(comms_on({2, 2}, std::make_shared<Nets>(3, 3)), config);
  for (const std::vector<int>& tokens : {std::vector<int>{0, 0, 0, 0}, {4, 0, 0, 0}, {0, 3, 4, 0}}) {
    for (uint32_t seed = 1; seed < 6; ++seed) {
      Exchange exchange(world, make_traffic(config, tokens, seed), {twRankMajor, twWeightNone, twBfloat16}, seed);
      exchange.dispatch();
      exchange.combine();
    }
  }
}

// What mates have put to a folding rank that refuses its combine is no term of a later fold.
TEST(BetweenHosts, FoldsBehindARefusal) {
  twGroupConfig_t config = make_config(8, 2, 4, 24);
  config.domain = 2;
  World world(comms_on({2, 2}, std::make_shared<Nets>(3, 3)), config);
  const Style style{twRankMajor, twWeightNone, twBfloat16};
  for (int refuses = 0; refuses < 4; ++refuses) {
    {
      Exchange refused(world, make_traffic(config, {4, 4, 4, 4}, 3), style, 3);
      refused.dispatch();
      on_all_ranks(4, [&](int rank) {
        if (rank == refuses) refused[rank].sums.tokens.dtype = static_cast<twDtype_t>(99);
        EXPECT_TW(rank == refuses ? twInvalidArgument : twPeerRefused, refused[rank].combine());
      });
    }
    // The next combine is in the same bank, and its tokens have gone to others of the host's ranks.
    for (uint32_t seed = 10; seed < 14; ++seed) {
      Exchange exchange(world, make_traffic(config, {4, 3, 4, 4}, seed), style, seed);
      exchange.dispatch();
      exchange.combine();
    }
  }
}

// Growing gives everything that folds a new place.
TEST(BetweenHosts, GrownGroupsFold) {
  twGroupConfig_t config = make_config(8, 3, 2, 24);
  config.domain = 2;
  World world(comms_on({2, 2}, std::make_shared<Nets>(3, 3)), config);
  for (const int tokens : {2, 7, 30}) {
    on_all_ranks(4, [&](int rank) {
      twReserve_t reserve = TW_RESERVE_INIT;
      reserve.max_tokens = tokens;
      EXPECT_TW(twSuccess, twGroupReserve(world[rank], &reserve));
    });
    world.config.max_tokens = tokens;
    Exchange exchange(world, make_traffic(world.config, {tokens, 1, 0, tokens}, 5),
                      {twRankMajor, twWeightNone, twBfloat16}, 6);
    exchange.dispatch();
    exchange.combine();
  }
}

// Steps of many lanes may be under way at once, however slow the network is (T7).
TEST(BetweenHosts, ManyLanesUnderWay) {
  twGroupConfig_t config = make_config(2, 2, 40, 4096);
  config.lanes = 48;
  const auto nets = std::make_shared<Nets>();
  World world(comms_on({1, 1}, nets), config);
  std::vector<std::unique_ptr<Exchange>> all;
  nets->last().hold(true);
  for (int lane = 0; lane < 48; ++lane) {
    const Style style{twRankMajor, twWeightNone, twBfloat16};
    all.push_back(std::make_unique<Exchange>(world, make_traffic(config, {40, 40}, 3), style, 3));
    all.back()->send_dispatch();
  }
  nets->last().hold(false);
  for (const auto& one : all) {
    for (int rank = 0; rank < 2; ++rank) EXPECT_TW(twSuccess, (*one)[rank].complete());
  }
  all.front()->combine();
}

// Looking whether counts have come asks nobody anything, and does not wait: with a rank that never sends.
TEST(BetweenHosts, LookingForCountsAsksNobody) {
  twGroupConfig_t config = make_config(4, 2, 4);
  config.mode = twHighThroughput;
  const auto nets = std::make_shared<Nets>();
  World world(comms_on({1, 1}, nets), config);
  const Traffic traffic = make_traffic(config, {4, 4}, 3);
  twHandle_t handles[2] = {};
  for (int rank = 0; rank < 2; ++rank) {
    const twTensor_t ids = tensor(const_cast<int32_t*>(traffic.ids[rank].data()), twInt32, {4, 2});
    ASSERT_TW(twSuccess, twHandleCreate(&handles[rank], world[rank], &ids, nullptr, nullptr));
  }
  twCountsInput_t input = TW_COUNTS_INPUT_INIT;
  input.send_only = 1;
  ASSERT_TW(twSuccess, twExchangeCounts(world[0], handles[0], &input));
  for (int look = 0; look < 50; ++look) {
    int32_t ready = 1;
    EXPECT_TW(twSuccess, twHandleCountsReady(handles[0], 0, &ready));
    EXPECT_EQ(ready, 0);
  }
  std::string question;
  EXPECT_FALSE(world.comms[1]->bootstrap->posted(0, world[1]->number + 4, &question));
  ASSERT_TW(twSuccess, twExchangeCounts(world[1], handles[1], &input));
  for (int rank = 0; rank < 2; ++rank) EXPECT_TW(twSuccess, twComplete(world[rank], handles[rank], nullptr));
}

// What a rank has beside its window is what HostsMap computes, and no more: the memory that this process maps.
TEST(BetweenHosts, TakesTheMemoryThatIsComputed) {
  const auto mapped = [] {
    uint64_t bytes = 0;
    std::FILE* const maps = std::fopen("/proc/self/maps", "r");
    char line[512];
    unsigned long long begin = 0, end = 0;
    while (std::fgets(line, sizeof line, maps) != nullptr) {
      if (std::strstr(line, "tokenway-window") == nullptr) continue;
      if (std::sscanf(line, "%llx-%llx", &begin, &end) == 2) bytes += end - begin;
    }
    std::fclose(maps);
    return bytes;
  };
  const auto pages = [](uint64_t bytes) { return (bytes + 4095) / 4096 * 4096; };
  const twGroupConfig_t config = make_config(8, 4, 16, 512);
  for (const std::vector<int>& sizes : {std::vector<int>{2, 2}, {1, 3}}) {
    const uint64_t before = mapped();
    World world(comms_on(sizes, std::make_shared<Nets>()), config);
    const WindowMap& window = world[0]->context.map;
    const HostsMap map = HostsMap::make(Topology::make(hosts_of(sizes)), window, 1);
    EXPECT_EQ(mapped() - before, 4 * (pages(window.bytes()) + pages(map.words_bytes()) + pages(map.lists_bytes())));
  }
}

// A word that is lost: those who wait for it have all heard that everybody has sent, so its way's end is to blame.
TEST(BetweenHosts, LostWord) {
  const auto nets = std::make_shared<Nets>();
  nets->prepare = [](PretendedNet& between) { between.lose_word(0, 2, 0); };
  World world(comms_on({2, 2}, nets), impatient_hosts());
  Exchange exchange(world, make_traffic(world.config, {5, 3, 4, 2}, 9), {twRankMajor}, 9);
  for (int rank = 0; rank < 4; ++rank) EXPECT_TW(twSuccess, exchange[rank].dispatch(true));
  on_all_ranks(2, [&](int i) { EXPECT_NE(exchange[2 + i].complete(), twSuccess); });
  // Rank 2 has the memory in which the word of rank 0 is missing; itself it blames the source.
  EXPECT_TRUE(error_of(world[3]).peer == 2 || error_of(world[3]).peer == 0) << error_of(world[3]).peer;
  EXPECT_EQ(error_of(world[2]).sticky, 1);
  for (int rank = 0; rank < 2; ++rank) (void)exchange[rank].complete();
}

TEST(BetweenHosts, DoubledWord) {
  const auto nets = std::make_shared<Nets>();
  nets->prepare = [](PretendedNet& between) { between.double_word(3, 1, 0); };
  World world(comms_on({2, 2}, nets), impatient_hosts());
  Exchange exchange(world, make_traffic(world.config, {5, 3, 4, 2}, 9), {twRankMajor}, 9);
  for (int rank = 0; rank < 4; ++rank) EXPECT_TW(twSuccess, exchange[rank].dispatch(true));
  EXPECT_TW(twInternalError, exchange[1].complete());
  EXPECT_EQ(error_of(world[1]).peer, 3);
  for (const int rank : {0, 2, 3}) (void)exchange[rank].complete();
}

// A rank that does not come is blamed by all, also by those who miss nothing but a word of a rank that waits for it on
// another lane.
TEST(BetweenHosts, WhoHasSentTheLeastIsBlamed) {
  twGroupConfig_t config = impatient_hosts();
  config.lanes = 2;
  World world(comms_on({2, 2}, std::make_shared<Nets>()), config);
  Exchange first(world, make_traffic(config, {5, 3, 4, 2}, 9), {twRankMajor}, 9);
  Exchange second(world, make_traffic(config, {5, 3, 4, 2}, 10), {twRankMajor}, 10);
  // Rank 3 sends nothing. Rank 1 waits for it in the first exchange, and so never sends the second.
  for (const int rank : {0, 1, 2}) EXPECT_TW(twSuccess, first[rank].dispatch(true));
  for (const int rank : {0, 2}) EXPECT_TW(twSuccess, second[rank].dispatch(true));
  // Rank 0 finds out by itself, before anybody else gives up; of what it misses rank 1's comes first.
  EXPECT_TW(twTimeout, second[0].complete());
  EXPECT_EQ(error_of(world[0]).peer, 3);
  on_all_ranks(4, [&](int rank) {
    if (rank == 0 || rank == 3) return;
    EXPECT_NE((rank == 1 ? first : second)[rank].complete(), twSuccess);
    EXPECT_EQ(error_of(world[rank]).peer, 3) << rank;
  });
}

// A rank that no other reaches any more, though it lives: what was put to it or by it is lost.
TEST(BetweenHosts, LostRank) {
  const auto nets = std::make_shared<Nets>();
  World world(comms_on({2, 1, 1}, nets), impatient_hosts());
  Exchange before(world, make_traffic(world.config, {5, 3, 4, 2}, 9), {twRankMajor}, 9);
  before.dispatch();
  before.combine();
  nets->last().lose_rank(3, 0);
  Exchange exchange(world, make_traffic(world.config, {5, 3, 4, 2}, 10), {twRankMajor}, 10);
  for (int rank = 0; rank < 4; ++rank) (void)exchange[rank].dispatch(true);
  on_all_ranks(3, [&](int rank) {
    EXPECT_NE(exchange[rank].complete(), twSuccess);
    EXPECT_EQ(error_of(world[rank]).peer, 3) << rank;
  });
  (void)exchange[3].complete();
}

// The end of a process: survivors of all hosts name it, shrink and go on.
TEST(BetweenHosts, SurvivorsGoOn) {
  twGroupConfig_t config = make_config(12, 3, 5, 24);
  config.timeout_ms = 3000;
  World world(comms_on({2, 2}, std::make_shared<Nets>(3, 2)), config);
  Exchange exchange(world, make_traffic(config, {5, 3, 4, 2}, 9), {twRankMajor}, 9);
  exchange.dispatch();
  exchange.combine();
  Exchange next(world, make_traffic(config, {5, 3, 4, 2}, 10), {twRankMajor}, 10);
  world.kill(2);
  std::vector<twGroup_t> survivors(4);
  on_all_ranks(4, [&](int rank) {
    if (rank == 2) return;
    EXPECT_TW(twPeerDied, next[rank].dispatch());
    EXPECT_EQ(error_of(world[rank]).peer, 2);
    EXPECT_TW(twSuccess, twGroupShrink(world[rank], nullptr, &survivors[rank]));
  });
  on_all_ranks(4, [&](int rank) {
    if (rank == 2) return;
    EXPECT_EQ(dispatch_nothing(survivors[rank], config), 3);
    EXPECT_TW(twSuccess, twGroupDestroy(survivors[rank]));
  });
}

// Where the words' steps wrap, and between ranks whose engines let others go first.
TEST(BetweenHosts, LongRunsAcrossTheWrap) {
  const Env first("TOKENWAY_FIRST_STEP", "4294967290");
  twGroupConfig_t config = make_config(12, 3, 5, 24);
  config.lanes = 2;
  World world(comms_on({2, 2}, std::make_shared<Nets>(5, 6)), config);
  for (uint32_t seed = 1; seed < 30; ++seed) {
    const std::vector<int> tokens = {static_cast<int>(seed % 6), 0, static_cast<int>(seed * 7 % 6), 5};
    Exchange exchange(world, make_traffic(config, tokens, seed), {seed % 2 ? twRankMajor : twExpertMajor}, seed);
    exchange.dispatch();
    exchange.combine();
  }
}

}  // namespace
}  // namespace tw::test
