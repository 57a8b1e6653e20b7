// Staged transport, with a carrier whose moves are copies between threads: every way to exchange against the oracle,
// and what becomes of refusals, late ranks and moves that fail.
#include "cpu/cost_model.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include "interrupt.h"

namespace tw::test {
namespace {

// What all ranks' carriers have in common.
class Hub {
 public:
  explicit Hub(int ranks) : ranks_(ranks) {}

  void allgather(int rank, const void* mine, void* all, size_t bytes) {
    std::unique_lock lock(mutex_);
    parts_.resize(ranks_ * bytes);
    std::memcpy(parts_.data() + rank * bytes, mine, bytes);
    ++arrived_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return arrived_ == ranks_; });
    std::memcpy(all, parts_.data(), parts_.size());
  }

  struct Move {
    int queue;
    int64_t number;
    int rank;
    twMoveKind_t kind;
    std::byte* recv;
    std::vector<uint64_t> recv_bytes;
  };

  int64_t start(int64_t channel, int rank, const twMove_t& given) {
    const std::lock_guard lock(mutex_);
    if (broken_) return -1;
    Move move{given.queue, next_[{channel, given.queue, rank}]++, rank,
              given.kind,  static_cast<std::byte*>(given.recv),   {}};
    auto& sent = sent_[{channel, move.queue, move.number}];
    sent.resize(ranks_);
    const auto* from = static_cast<const std::byte*>(given.send);
    for (int peer = 0; peer < ranks_; ++peer) {
      const uint64_t bytes = given.send_bytes[given.kind == twMoveExact ? peer : 0];
      sent[rank].emplace_back(from, from + bytes);
      if (given.kind != twMoveGather) from += bytes;
      move.recv_bytes.push_back(given.recv_bytes[given.kind == twMoveExact ? peer : 0]);
    }
    moves_.push_back(move);
    changed_.notify_all();
    return static_cast<int64_t>(moves_.size()) - 1;
  }

  int32_t wait(int64_t channel, int64_t number, int32_t timeout_ms) {
    std::unique_lock lock(mutex_);
    const Move& move = moves_[static_cast<size_t>(number)];
    auto& sent = sent_[{channel, move.queue, move.number}];
    const auto complete = [&] {
      return broken_ || std::all_of(sent.begin(), sent.end(), [](const auto& parts) { return !parts.empty(); });
    };
    if (!changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), complete)) return 0;
    if (broken_) return -1;
    std::byte* to = move.recv;
    for (int source = 0; source < ranks_; ++source) {
      const std::vector<std::byte>& part = sent[source][move.rank];
      EXPECT_EQ(part.size(), move.recv_bytes[source]) << "source " << source << ", kind " << move.kind;
      std::copy(part.begin(), part.end(), to);
      to += move.recv_bytes[source];
    }
    return 1;
  }

  void break_moves() {
    const std::lock_guard lock(mutex_);
    broken_ = true;
    changed_.notify_all();
  }
  std::map<twMoveKind_t, int> count_moves() {
    const std::lock_guard lock(mutex_);
    std::map<twMoveKind_t, int> counts;
    for (const Move& move : moves_) ++counts[move.kind];
    return counts;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int ranks_;
  int arrived_ = 0;
  bool broken_ = false;
  std::vector<std::byte> parts_;
  std::map<std::tuple<int64_t, int, int>, int64_t> next_;
  // [source][peer], by channel, queue and number.
  std::map<std::tuple<int64_t, int, int64_t>, std::vector<std::vector<std::vector<std::byte>>>> sent_;
  std::deque<Move> moves_;
};

// One rank's carrier.
struct Ferry {
  Hub* hub = nullptr;
  int rank = 0;

  static Ferry& of(void* context) { return *static_cast<Ferry*>(context); }
  twCarrier_t calls() {
    return {sizeof(twCarrier_t),
            this,
            [](void*, int32_t* port) {
              *port = 1;
              return 0;
            },
            [](void*, const twChannelConfig_t* config, int64_t* channel, char*) {
              *channel = static_cast<int64_t>(config->key);
              return 0;
            },
            [](void*, int64_t, int32_t) {},
            [](void* c, int64_t channel, const twMove_t* move) { return of(c).hub->start(channel, of(c).rank, *move); },
            [](void* c, int64_t channel, int64_t move, int32_t ms) { return of(c).hub->wait(channel, move, ms); },
            nullptr,
            nullptr,
            nullptr,
            nullptr};
  }
};

struct Staged {
  Staged(int ranks, twStrategy_t strategy, int64_t inline_bytes) : hub(ranks), ferries(ranks), comms(ranks) {
    on_all_ranks(ranks, [&](int rank) {
      ferries[rank] = {&hub, rank};
      const twCarrier_t calls = ferries[rank].calls();
      twPortableConfig_t config = TW_PORTABLE_CONFIG_INIT;
      config.timeout_ms = 20000;
      config.carrier = &calls;
      config.strategy = strategy;
      config.inline_bytes = inline_bytes;
      config.allgather = [](const void* mine, void* all, size_t bytes, void* context) {
        Ferry::of(context).hub->allgather(Ferry::of(context).rank, mine, all, bytes);
        return 0;
      };
      config.allgather_context = &ferries[rank];
      ASSERT_TW(twSuccess, twCommCreatePortable(&comms[rank], rank, ranks, &config));
    });
  }

  Hub hub;
  std::vector<Ferry> ferries;
  std::vector<twComm_t> comms;
};

struct Way {
  twStrategy_t strategy;
  int64_t inline_bytes;
};
// 200 bytes are the beginning of many a message here, and end within a row or the 16 bytes before it.
constexpr Way kWays[] = {{twAuto, -1},     {twRouted, 0},   {twRouted, 200},  {twRouted, INT64_MAX},
                         {twGathered, -1}, {twGathered, 0}, {twGathered, 200}};

// A wait of staged transport ends by the caller's wish, and the peers hear why.
TEST(Staged, Interrupted) {
  Staged staged(3, twRouted, 0);
  twGroupConfig_t config = make_config(6, 2, 4);
  config.timeout_ms = 60000;
  World world(staged.comms, config);
  const Traffic traffic = make_traffic(config, {2, 2, 2}, 1);
  std::atomic<bool> over = false;
  on_all_ranks(3, [&](int rank) {
    Side side(world, traffic, rank, {}, 1);
    if (rank == 0) {
      const Interrupt interrupt(2);
      EXPECT_TW(twInterrupted, side.dispatch());
      EXPECT_TRUE(says("interrupted in dispatch of step"));
      EXPECT_EQ(interrupt.asked, 2);
      over = true;
      over.notify_all();
      return;
    }
    if (rank == 1) over.wait(false);
    EXPECT_TW(twPeerAborted, side.dispatch()) << "rank " << rank;
  });
}

TEST(Staged, EveryWayAgainstTheOracle) {
  for (const Way& way : kWays) {
    SCOPED_TRACE(::testing::Message() << "strategy " << way.strategy << ", inline " << way.inline_bytes);
    Staged staged(3, way.strategy, way.inline_bytes);
    twGroupConfig_t config = make_config(7, 3, 9, 20);
    config.lanes = 2;
    World world(staged.comms, config);
    uint32_t seed = 0;
    for (const std::vector<int>& tokens : {std::vector{9, 0, 4}, {0, 0, 0}, {9, 9, 9}, {0, 0, 1}}) {
      for (const twLayout_t layout : {twRankMajor, twExpertMajor}) {
        const Style style{layout, twWeightTopk, twFloat32, twFloat32, 0, -1, false, false};
        const Traffic traffic = make_traffic(config, tokens, ++seed);
        on_all_ranks(3, [&](int rank) {
          Side side(world, traffic, rank, style, seed);
          for (const bool send_only : {false, true}) {
            ASSERT_TW(twSuccess, side.dispatch(send_only));
            if (send_only) {
              ASSERT_TW(twSuccess, side.complete());
            }
            side.expect_received();
            ASSERT_TW(twSuccess, side.combine(send_only));
            if (send_only) {
              ASSERT_TW(twSuccess, side.complete());
            }
            side.expect_tokens();
          }
        });
        if (::testing::Test::HasFailure()) return;
      }
    }
    if (way.inline_bytes < 0) continue;  // measured: on some machines all of these messages are short
    const auto moves = staged.hub.count_moves();
    EXPECT_EQ(way.inline_bytes == INT64_MAX, !moves.contains(twMoveExact)) << "fixed: one move a step";
  }
}

// A rank may be later than the environment's timeout, if not than the one that was given.
TEST(Staged, GivenTimeoutHolds) {
  const Env usual("TOKENWAY_TIMEOUT_MS", "1");
  Staged staged(2, twRouted, 0);
  twGroupConfig_t config = make_config(2, 1, 1);
  config.timeout_ms = 20000;
  std::vector<twGroup_t> groups(2);
  on_all_ranks(2, [&](int rank) {
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    EXPECT_TW(twSuccess, twGroupCreate(&groups[rank], staged.comms[rank], &config));
    EXPECT_TW(twSuccess, twGroupDestroy(groups[rank]));
    EXPECT_TW(twSuccess, twCommDestroy(staged.comms[rank]));
  });
}

// Ranks that give different bounds learn of it, whatever the messages' lengths, and go on.
TEST(Staged, BoundsDiffer) {
  for (const Way& way : kWays) {
    SCOPED_TRACE(::testing::Message() << "strategy " << way.strategy << ", inline " << way.inline_bytes);
    Staged staged(3, way.strategy, way.inline_bytes);
    const twGroupConfig_t config = make_config(6, 2, 9, 20);
    World world(staged.comms, config);
    const Traffic traffic = make_traffic(config, {5, 5, 5}, 1);
    on_all_ranks(3, [&](int rank) {
      Style style;
      style.bound = rank == 1 ? 6 : 5;
      Side side(world, traffic, rank, style, 1);
      EXPECT_TW(twBoundMismatch, side.dispatch());
      Side good(world, traffic, rank, {}, 2);
      ASSERT_TW(twSuccess, good.dispatch());
      good.expect_received();
      ASSERT_TW(twSuccess, good.combine());
      good.expect_tokens();
    });
  }
}

// A rank that never comes is the one to blame, though a collective does not say who holds it up.
TEST(Staged, LateRank) {
  Staged staged(3, twAuto, -1);
  const twGroupConfig_t config = impatient(kOneWaitMs);  // in which ranks 0 and 2 must meet
  World world(staged.comms, config);
  const Traffic traffic = make_traffic(config, {4, 4, 4}, 1);
  on_all_ranks(3, [&](int rank) {
    if (rank == 1) return;
    Side side(world, traffic, rank, {}, 1);
    EXPECT_TW(twTimeout, side.dispatch());
    EXPECT_EQ(error_of(world[rank]).peer, 1);
  });
}

// Moves that fail while all ranks are there end the group, on every rank and within moments.
TEST(Staged, BrokenMoves) {
  Staged staged(2, twAuto, -1);
  const twGroupConfig_t config = make_config(4, 2, 4);
  World world(staged.comms, config);
  const Traffic traffic = make_traffic(config, {4, 4}, 1);
  staged.hub.break_moves();
  const auto begin = std::chrono::steady_clock::now();
  on_all_ranks(2, [&](int rank) {
    Side side(world, traffic, rank, {}, 1);
    EXPECT_NE(twSuccess, side.dispatch());
    EXPECT_EQ(error_of(world[rank]).sticky, 1);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(config.timeout_ms / 2));
}

TEST(Staged, CostModel) {
  Shape shape;
  shape.ranks = 4;
  shape.top_k = 2;
  shape.max_tokens = 1000;
  shape.payloads = 1;
  shape.payload_bytes[0] = 10000;
  shape.combine_bytes = 10000;
  const Costs ring{200, 1000, 600, 800};
  // Two thirds of 200 us at 1000 bytes/us, for three peers.
  EXPECT_EQ(cpu::choose_inline_bytes(shape, ring), 400000u / 9);
  for (const int bound : {1, 10, 1000}) {
    EXPECT_FALSE(cpu::choose_gathered(shape, ring, twAuto, 0, bound)) << bound;
    EXPECT_TRUE(cpu::choose_gathered(shape, ring, twGathered, 0, bound)) << bound;
    EXPECT_FALSE(cpu::choose_gathered(shape, ring, twRouted, 0, bound)) << bound;
  }
  // Where gathering is ten times as fast, it is worth sending to all what goes to less than half.
  const Costs multicast{200, 1000, 200, 10000};
  EXPECT_TRUE(cpu::choose_gathered(shape, multicast, twAuto, 0, 1000));
  // Messages that all together take as long as a move takes to begin are never worth asking for their lengths.
  shape.max_tokens = 6;
  ASSERT_LT(3 * cpu::longest_message(shape), 200000u);
  EXPECT_EQ(cpu::choose_inline_bytes(shape, ring), cpu::longest_message(shape));
  shape.max_tokens = 7;
  ASSERT_GT(3 * cpu::longest_message(shape), 200000u);
  EXPECT_EQ(cpu::choose_inline_bytes(shape, ring), 400000u / 9);
}

// What travels beside the rows belongs to a message: where rows land in leases, and what experts are sent.
TEST(Staged, LongestMessages) {
  Shape shape;
  shape.ranks = 2;
  shape.experts = 600;
  shape.most_local_experts = 300;
  shape.top_k = 1;
  shape.max_tokens = 1;
  shape.payloads = 2;
  shape.payload_bytes[0] = shape.payload_bytes[1] = 8;
  shape.recv_rows = 2;
  const uint64_t counts = cpu::longest_message(shape);
  EXPECT_EQ(counts, cpu::kPutHeader + WindowMap::counts_bytes(shape));
  shape.lease_bytes = 4096;
  EXPECT_EQ(cpu::longest_message(shape), counts + 2 * sizeof(uint64_t));
  shape.recv_rows = 0;
  shape.lease_bytes = 0;
  const uint64_t rows = cpu::longest_message(shape);
  shape.counts_loads = 1;
  EXPECT_EQ(cpu::longest_message(shape), rows + cpu::kPutHeader + WindowMap::loads_words(shape) * sizeof(uint64_t));
}

// A dispatch whose messages are longer than a block pays for what is left of them alone: blocks cost little where there
// is more to send, and much where there is nothing.
TEST(Staged, CostOfBlocks) {
  Shape shape;
  shape.ranks = 2;
  shape.top_k = 64;  // all tokens go to the other rank
  shape.max_tokens = 100;
  shape.payloads = 1;
  shape.payload_bytes[0] = 10000;
  const Costs costs{200, 1000, 600, 800};
  const double row = static_cast<double>(cpu::routed_row_bytes(shape));
  EXPECT_DOUBLE_EQ(cpu::dispatch_us(shape, costs, 0, 50, false), 400 + 50 * row / 1000);
  EXPECT_DOUBLE_EQ(cpu::dispatch_us(shape, costs, 100000, 50, false), 400 + 50 * row / 1000);
  EXPECT_DOUBLE_EQ(cpu::dispatch_us(shape, costs, 100000, 1, false), 200 + 100);
}

// Costs are what moves take where nothing disturbs them, whichever rank was late and however many were disturbed.
TEST(Staged, CostsOfRounds) {
  constexpr int kRounds = 8;
  constexpr double kTrue[] = {200, 200, 200, 200, 1200, 300, 300, 2400};
  std::vector<std::vector<cpu::TimedRound>> ranks(2, std::vector<cpu::TimedRound>(kRounds));
  for (size_t round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < std::size(kTrue); ++i) {
      const double lost = (round + i) % 4 == 0 ? 0 : 3000;  // to whoever else computes
      const double late = round % 2 == 0 ? 90 : -150;       // one waits for the other
      ranks[0][round][i] = kTrue[i] + lost + late;
      ranks[1][round][i] = kTrue[i] + lost - late;
    }
  }
  const Costs costs = cpu::costs_of(ranks);
  EXPECT_DOUBLE_EQ(costs.exchange_us, 200);
  EXPECT_DOUBLE_EQ(costs.exchange_rate, static_cast<double>(cpu::kLargeMove) / 1000);
  EXPECT_DOUBLE_EQ(costs.gather_us, 300);
  EXPECT_DOUBLE_EQ(costs.gather_rate, static_cast<double>(cpu::kLargeMove) / 2100);
  // Where every move waits for a core, bytes seem to cost nothing. They do.
  for (auto& rounds : ranks) {
    for (cpu::TimedRound& round : rounds) round.fill(4000);
  }
  EXPECT_DOUBLE_EQ(cpu::costs_of(ranks).exchange_rate, static_cast<double>(cpu::kLargeMove) / (4000 * 2 / 3.0));
}

}  // namespace
}  // namespace tw::test
