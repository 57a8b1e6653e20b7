// Many exchanges: in flight at once, repeated, out of order, and over handles that live long.
#include <algorithm>
#include <map>
#include <random>

#include "harness.h"

namespace tw::test {
namespace {

using Exchanges = std::vector<std::unique_ptr<Exchange>>;

Exchanges make_exchanges(const World& world, int count, const std::vector<int>& tokens, const Style& style) {
  Exchanges made;
  for (int i = 0; i < count; ++i) {
    const auto seed = static_cast<uint32_t>(i + 1);
    made.push_back(std::make_unique<Exchange>(world, make_traffic(world.config, tokens, seed), style, seed));
  }
  return made;
}

TEST(Channels, ManyInFlight) {
  twGroupConfig_t config = make_config(8, 3, 5);
  config.lanes = 4;
  World world(3, config);
  Exchanges all = make_exchanges(world, 4, {5, 3, 4}, {twRankMajor, twWeightTopk});
  for (int round = 0; round < 3; ++round) {
    for (auto& one : all) one->renew(100 + round);
    for (auto& one : all) one->send_dispatch();
    for (auto one = all.rbegin(); one != all.rend(); ++one) (*one)->complete_dispatch();
    for (const int i : {2, 0, 3, 1}) all[i]->send_combine();
    for (const int i : {1, 3, 0, 2}) all[i]->complete_combine();
  }
}

// A channel that the caller names is the one that is used: the view lies in it.
TEST(Channels, ExplicitChannel) {
  twGroupConfig_t config = make_config(8, 3, 5);
  config.lanes = 3;
  World world(2, config);
  std::vector<const void*> views;
  for (const int lane : {2, 0, 1}) {
    Style style;
    style.lane = lane;
    Exchange exchange(world, make_traffic(config, {5, 5}, 1), style, 1);
    exchange.dispatch();
    views.push_back(exchange[0].received.payloads[0].data);
    exchange.combine();
  }
  EXPECT_LT(views[1], views[2]);
  EXPECT_LT(views[2], views[0]);
}

// What a handle holds stays whole while others go around it, whichever bank its channel stands before: leases prefer a
// channel that stands before the step's own, which would hide a held channel half of the time.
TEST(Channels, HeldChannelsAreLeftAlone) {
  twGroupConfig_t config = make_config(8, 3, 5);
  config.lanes = 3;
  World world(2, config);
  const Style in_place{twRankMajor, twWeightNone, twBfloat16, twFloat32, 0, -1, false, true};
  for (const int dispatches : {1, 2}) {
    Exchange held(world, make_traffic(config, {5, 5}, 1), in_place, 1);
    for (int i = 0; i < dispatches; ++i) held.dispatch();
    for (uint32_t seed = 2; seed < 9; ++seed) {
      Exchange other(world, make_traffic(config, {5, 5}, seed), in_place, seed);
      other.dispatch();
      other.combine();
    }
    for (int rank = 0; rank < 2; ++rank) held[rank].expect_received();
    held.combine();
  }
}

// Backward recomputes the forward pass's dispatch: the same handle dispatches again on the channel that it holds.
TEST(Channels, DispatchTwiceThenCombine) {
  const twGroupConfig_t config = make_config(8, 3, 5);
  World world(3, config);
  for (const twLayout_t layout : {twRankMajor, twExpertMajor}) {
    Style style{layout, twWeightTopk};
    style.own_memory = layout == twExpertMajor;
    Exchange exchange(world, make_traffic(config, {5, 3, 4}, 9), style, 9);
    for (uint32_t salt = 20; salt < 25; ++salt) {
      exchange.renew(salt);
      exchange.dispatch();
    }
    exchange.combine();
  }
}

// A handle owns no channel after its combine, and can combine again: gradients take the forward pass's way.
TEST(Channels, CombineWithoutALease) {
  twGroupConfig_t config = make_config(8, 3, 5);
  config.lanes = 2;
  World world(3, config);
  Exchanges all = make_exchanges(world, 5, {5, 3, 4}, {twRankMajor});
  for (auto& one : all) one->dispatch(), one->combine();
  for (const int i : {4, 1, 0, 3, 2}) {
    all[i]->renew(50 + i);
    all[i]->combine();
  }
}

TEST(Channels, ReleaseInsteadOfCombine) {
  const twGroupConfig_t config = make_config(8, 3, 5);
  World world(2, config);
  Exchanges all = make_exchanges(world, 3, {5, 3}, {twRankMajor});
  for (auto& one : all) {
    one->dispatch();
    for (int rank = 0; rank < 2; ++rank) EXPECT_TW(twSuccess, twHandleRelease((*one)[rank].handle));
  }
  for (auto& one : all) one->combine();
}

// Sixty layers keep their handles until backward; none of them owns a bank meanwhile.
TEST(Channels, HandlesAreKeptOverManySteps) {
  twGroupConfig_t config = make_config(8, 2, 4);
  config.lanes = 2;
  World world(2, config);
  Exchanges layers = make_exchanges(world, 60, {4, 3}, {twRankMajor, twWeightTopk});
  for (auto& layer : layers) layer->dispatch(), layer->combine();
  for (size_t i = layers.size(); i-- > 0;) {
    layers[i]->renew(static_cast<uint32_t>(1000 + i));
    layers[i]->combine();
    layers[i]->dispatch();
    layers[i]->combine();
  }
}

TEST(Channels, UpdateReplacesTheRouting) {
  const twGroupConfig_t config = make_config(8, 2, 4);
  World world(2, config);
  Exchange exchange(world, make_traffic(config, {4, 3}, 1), {}, 1);
  exchange.dispatch();
  const twTensor_t ids = tensor(nullptr, twInt32, {0, 2});
  EXPECT_TW(twInvalidUsage, twHandleUpdate(exchange[0].handle, &ids, nullptr)) << "it holds a lane";
  exchange.combine();
  for (int rank = 0; rank < 2; ++rank) EXPECT_TW(twSuccess, twHandleUpdate(exchange[rank].handle, &ids, nullptr));
  EXPECT_TW(twInvalidUsage, twHandleNumRecvTokens(exchange[0].handle, nullptr, nullptr));
  EXPECT_TW(twInvalidUsage, exchange[0].combine()) << "not dispatched since";
}

TEST(Channels, CallersHandleMemory) {
  const twGroupConfig_t config = make_config(8, 3, 5);
  World world(2, config);
  size_t bytes = 0;
  ASSERT_TW(twSuccess, twHandleMemBytes(world[0], &bytes));
  const Traffic traffic = make_traffic(config, {5, 5}, 3);
  std::vector<std::vector<uint8_t>> blocks(2);
  std::vector<std::unique_ptr<Side>> sides;
  for (int rank = 0; rank < 2; ++rank) {
    blocks[rank].assign(bytes + 192, 0xcd);
    auto* const begin = blocks[rank].data() + (64 - reinterpret_cast<uintptr_t>(blocks[rank].data()) % 64);
    sides.push_back(std::make_unique<Side>(world, traffic, rank, Style{}, 3, begin));
  }
  for (auto& side : sides) EXPECT_TW(twSuccess, side->dispatch(true));
  for (auto& side : sides) EXPECT_TW(twSuccess, side->complete()), side->expect_received();
  for (auto& side : sides) EXPECT_TW(twSuccess, side->combine(true));
  for (auto& side : sides) EXPECT_TW(twSuccess, side->complete()), side->expect_tokens();
  sides.clear();
  for (const auto& block : blocks) {
    const size_t begin = 64 - reinterpret_cast<uintptr_t>(block.data()) % 64;
    for (size_t i = 0; i < block.size(); ++i) {
      if (i >= begin && i < begin + bytes) continue;
      ASSERT_EQ(block[i], 0xcd) << "outside the block";
    }
  }
}

// Every block by the caller's allocator comes back to it.
struct Arena {
  std::map<void*, size_t> blocks;
  int given = 0;
  static void* alloc(size_t bytes, void* self) {
    auto* const arena = static_cast<Arena*>(self);
    void* const block = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    arena->blocks[block] = bytes;
    ++arena->given;
    return block;
  }
  static void release(void* block, void* self) {
    EXPECT_EQ(static_cast<Arena*>(self)->blocks.erase(block), 1u);
    std::free(block);
  }
};

TEST(Channels, CustomAllocator) {
  std::vector<Arena> arenas(2);
  {
    const twGroupConfig_t config = make_config(8, 3, 5);
    World world(2, config, [&](int rank, twGroupConfig_t* mine) {
      mine->alloc = Arena::alloc;
      mine->release = Arena::release;
      mine->alloc_context = &arenas[rank];
    });
    Exchanges all = make_exchanges(world, 3, {5, 3}, {twRankMajor});
    for (auto& one : all) one->dispatch(), one->combine();
    EXPECT_GE(arenas[0].given, 3);
    all.clear();
    make_exchanges(world, 3, {5, 3}, {twRankMajor})[0]->dispatch();
    EXPECT_EQ(arenas[0].given, 3) << "blocks of destroyed handles are used again";
  }
  for (const Arena& arena : arenas) EXPECT_TRUE(arena.blocks.empty());
}

TEST(Channels, AllocatorWithoutMemory) {
  twGroupConfig_t config = make_config(8, 3, 5);
  config.alloc = [](size_t, void*) -> void* { return nullptr; };
  config.release = [](void*, void*) {};
  World world(1, config);
  const twTensor_t ids = tensor(nullptr, twInt32, {0, 3});
  twHandle_t handle = nullptr;
  EXPECT_TW(twOutOfMemory, twHandleCreate(&handle, world[0], &ids, nullptr, nullptr));
  EXPECT_EQ(handle, nullptr);
}

// Steps begin just below 2^32 and wrap under way.
TEST(Channels, StepsWrap) {
  const Env first("TOKENWAY_FIRST_STEP", "4294967290");
  twGroupConfig_t config = make_config(8, 3, 5, 16);
  config.lanes = 2;
  World world(3, config);
  for (uint32_t round = 0; round < 12; ++round) {
    const Style style{twRankMajor, twWeightTopk, twBfloat16, twFloat32, 0, -1, false, true};
    Exchange exchange(world, make_traffic(config, {5, 3, 4}, round), style, round);
    exchange.dispatch();
    if (round % 3 == 0) exchange.dispatch();
    exchange.combine();
  }
}

// Every order that S2 allows, one thread: each rank goes through the same steps, and a seeded scheduler picks who sends
// or completes next. A rank may complete once all have sent, so ranks drift one step apart, as fast ones do.
class Schedule {
 public:
  Schedule(const World& world, const std::vector<int>& tokens, uint32_t seed)
      : world_(world), random_(seed), place_(world.size(), 0), sent_(world.size(), false) {
    const Style styles[] = {{twRankMajor, twWeightTopk, twBfloat16, twFloat32, 0, 0, false, true},
                            {twExpertMajor, twWeightNone, twFloat32, twBfloat16, 0, 0, true, false}};
    for (uint32_t i = 0; i < 6; ++i) {
      exchanges_.push_back(std::make_unique<Exchange>(world, make_traffic(world.config, tokens, seed + i),
                                                      styles[(seed + i) % 2], seed + i));
      for (uint32_t again = 0; again <= random_() % 3; ++again) steps_.push_back({i, true});
      steps_.push_back({i, false});
    }
  }

  void run() {
    for (;;) {
      std::vector<int> able;
      for (int rank = 0; rank < world_.size(); ++rank) {
        if (can_go(rank)) able.push_back(rank);
      }
      if (able.empty()) return;
      go(able[random_() % able.size()]);
      if (::testing::Test::HasFailure()) return;
    }
  }

  bool finished() const {
    return std::all_of(place_.begin(), place_.end(), [&](size_t place) { return place == steps_.size(); });
  }

 private:
  struct Step {
    uint32_t exchange;
    bool dispatch;
  };

  bool can_go(int rank) const {
    if (place_[rank] == steps_.size()) return false;
    if (!sent_[rank]) return true;
    for (int peer = 0; peer < world_.size(); ++peer) {
      if (place_[peer] < place_[rank] || (place_[peer] == place_[rank] && !sent_[peer])) return false;
    }
    return true;
  }

  void go(int rank) {
    const Step step = steps_[place_[rank]];
    Side& side = (*exchanges_[step.exchange])[rank];
    if (!sent_[rank]) {
      EXPECT_TW(twSuccess, step.dispatch ? side.dispatch(true) : side.combine(true)) << "rank " << rank;
      sent_[rank] = true;
      return;
    }
    EXPECT_TW(twSuccess, side.complete()) << "rank " << rank << ", step " << place_[rank];
    if (!::testing::Test::HasFailure()) step.dispatch ? side.expect_received() : side.expect_tokens();
    sent_[rank] = false;
    ++place_[rank];
  }

  const World& world_;
  std::mt19937 random_;
  std::vector<std::unique_ptr<Exchange>> exchanges_;
  std::vector<Step> steps_;
  std::vector<size_t> place_;
  std::vector<bool> sent_;
};

TEST(Channels, EveryLegalOrder) {
  twGroupConfig_t config = make_config(8, 3, 3, 4);
  config.timeout_ms = 500;
  for (uint32_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE(seed);
    const int ranks = 2 + static_cast<int>(seed % 3);
    World world(ranks, config);
    {
      Schedule schedule(world, std::vector<int>(ranks, 3), seed);
      schedule.run();
      EXPECT_TRUE(schedule.finished());
      if (::testing::Test::HasFailure()) world.destroy_groups();
    }
    if (::testing::Test::HasFailure()) return;
  }
}

// Combine after combine, and dispatch after dispatch: a fast peer's second must not meet the first, which a slow rank
// has not read yet.
TEST(Channels, CombineAfterCombine) {
  const twGroupConfig_t config = make_config(8, 3, 5);
  World world(2, config);
  Exchange exchange(world, make_traffic(config, {5, 4}, 1), {twRankMajor}, 1);
  exchange.dispatch();
  exchange.send_combine();
  for (uint32_t round = 2; round < 6; ++round) {
    for (const int rank : {0, 1}) {
      ASSERT_TW(twSuccess, exchange[rank].complete());
      exchange[rank].expect_tokens();
      exchange[rank].renew(round);
      ASSERT_TW(twSuccess, exchange[rank].combine(true));
    }
  }
  exchange.complete_combine();
}

TEST(Channels, DispatchAfterDispatch) {
  const twGroupConfig_t config = make_config(8, 3, 5);
  World world(2, config);
  Exchange exchange(world, make_traffic(config, {5, 4}, 1), {twRankMajor}, 1);
  exchange.send_dispatch();
  for (uint32_t round = 2; round < 6; ++round) {
    for (const int rank : {0, 1}) {
      ASSERT_TW(twSuccess, exchange[rank].complete());
      exchange[rank].renew(round - 1);
      exchange[rank].expect_received();
      exchange[rank].renew(round);
      ASSERT_TW(twSuccess, exchange[rank].dispatch(true));
    }
  }
  exchange.complete_dispatch();
  exchange.combine();
}

// Rows combined from the view are read before the signals are published, the rank's own ones too: a fast peer's next
// step, under another bound, overwrites them.
TEST(Channels, FastPeerOverwritesTheView) {
  const twGroupConfig_t config = make_config(2, 2, 8);
  World world(2, config);
  Traffic four{
      {4, 4}, std::vector(2, std::vector<int32_t>{0, 1, 0, 1, 0, 1, 0, 1}), std::vector(2, std::vector(8, 1.0f))};
  Traffic eight{{8, 8}, four.ids, std::vector(2, std::vector(16, 1.0f))};
  for (auto& ids : eight.ids) ids.insert(ids.end(), ids.begin(), ids.begin() + 8);
  Exchange first(world, four, {twRankMajor, twWeightNone, twBfloat16, twFloat32, 4, -1, false, true}, 1);
  Exchange next(world, eight, {twRankMajor, twWeightNone, twBfloat16, twFloat32, 8}, 2);
  first.dispatch();
  for (const int rank : {1, 0}) ASSERT_TW(twSuccess, first[rank].combine(true));
  ASSERT_TW(twSuccess, first[0].complete());
  ASSERT_TW(twSuccess, next[0].dispatch(true));
  ASSERT_TW(twSuccess, first[1].complete());
  first[1].expect_tokens();
  ASSERT_TW(twSuccess, next[1].dispatch(true));
  next.complete_dispatch();
  next.combine();
}

}  // namespace
}  // namespace tw::test
