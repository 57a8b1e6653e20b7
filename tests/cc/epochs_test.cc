// Epochs: the version that follows from what ranks have told, which map it chooses, and layers whose maps move.
#include "exchange/epochs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "harness.h"

namespace tw {
namespace {

static_assert(unpack_version(pack(MapVersion{7, 5})) == MapVersion{7, 5});
static_assert(pack(MapVersion{}) == 0, "fresh memory is a version");
static_assert(has_epoch(0, 0xffffffff) && !has_epoch(0xffffffff, 0));
static_assert(MapHead::chosen(0, MapVersion{}) == 0, "fresh memory has the first map in force");

// Where numbers begin: where what is told wraps, where heads do, where versions do, and nowhere.
constexpr uint32_t kBegins[] = {0, 1, 0xfff8, 0xffff, 0x10000, 0x7ffffff8u, 0x80000000u, 0xfffffff8u, 0xffffffffu};

// Epochs as one would tell of them without words: each rank has a list, and all of them meet.
class Ranks {
 public:
  Ranks(int ranks, uint32_t begin, uint32_t seed) : begin_(begin), random_(seed), ready_(ranks), failed_(ranks) {}

  // Each rank is ready for some epochs more, and may have failed in them.
  void go_on() {
    for (size_t rank = 0; rank < ready_.size(); ++rank) {
      const uint32_t room = agreed_ + kMostOpenEpochs - ready_[rank];
      const uint32_t more = drawn(room == 0 || drawn(2) == 0 ? 1 : room + 1);
      for (uint32_t i = 0; i < more; ++i) {
        ++ready_[rank];
        if (drawn(4) == 0) failed_[rank].insert(ready_[rank]);
      }
    }
  }
  // What a rank tells. Of epochs that are decided the bits are any rank's own affair.
  uint32_t word(int rank) const {
    uint32_t voids = 0;
    for (uint32_t i = 0; i < 16 && i < ready_[rank]; ++i) {
      if (failed_[rank].count(ready_[rank] - i) != 0) voids |= 1u << i;
    }
    return ready_word(begin_ + ready_[rank], voids);
  }
  // Decides what all have.
  void agree() {
    agreed_ = *std::min_element(ready_.begin(), ready_.end());
    for (const std::set<uint32_t>& failed : failed_) void_.insert(failed.begin(), failed.end());
  }
  uint32_t agreed() const { return agreed_; }
  uint32_t number(uint32_t epoch) const { return begin_ + epoch; }
  bool uses(uint32_t epoch) const { return epoch <= agreed_ && void_.count(epoch) == 0; }

 private:
  uint32_t drawn(uint32_t end) { return std::uniform_int_distribution<uint32_t>(0, end - 1)(random_); }

  uint32_t begin_;
  std::mt19937 random_;
  std::vector<uint32_t> ready_;  // [N] counted from begin_
  std::vector<std::set<uint32_t>> failed_;
  std::set<uint32_t> void_;
  uint32_t agreed_ = 0;
};

TEST(Epochs, LeastOfWhatAllHaveTold) {
  for (uint32_t seed = 0; seed < 360; ++seed) {
    const int ranks = 1 + static_cast<int>(seed % 8);
    const uint32_t begin = kBegins[seed % std::size(kBegins)];
    Ranks all(ranks, begin, seed);
    MapVersion version{begin, 0};
    for (int dispatch = 0; dispatch < 60; ++dispatch) {
      all.go_on();
      version = agreed_version(version, ranks, [&](int rank) { return all.word(rank); });
      all.agree();
      ASSERT_EQ(version.epoch, all.number(all.agreed())) << "seed " << seed << " dispatch " << dispatch;
      const uint32_t oldest = all.agreed() < 31 ? 1 : all.agreed() - 31;
      for (uint32_t epoch = oldest; epoch <= all.agreed() + kMostOpenEpochs; ++epoch) {
        ASSERT_EQ(version.uses(all.number(epoch)), all.uses(epoch))
            << "seed " << seed << " dispatch " << dispatch << " epoch " << epoch << " of " << all.agreed();
      }
    }
  }
}

// A word that no rank can have told moves nothing: so a version is at most kMostOpenEpochs behind what anyone tells.
TEST(Epochs, NoMoreThanCanBeOpen) {
  for (const uint32_t begin : kBegins) {
    const MapVersion before{begin, 6};
    for (uint32_t ahead = 0; ahead < 0x10000; ahead += ahead < 40 ? 1 : 997) {
      const MapVersion version = agreed_version(before, 2, [&](int) { return ready_word(begin + ahead, 0); });
      EXPECT_EQ(version.epoch, ahead <= kMostOpenEpochs ? begin + ahead : begin) << begin << " " << ahead;
      EXPECT_EQ(version.voids, ahead <= kMostOpenEpochs ? 6u << ahead : 6u) << begin << " " << ahead;
    }
  }
}

TEST(Epochs, VersionsUseWhatIsNotVoid) {
  for (const uint32_t epoch : kBegins) {
    const MapVersion version{epoch, 0x80000005u};  // it, the second before it, and the last that has a bit
    EXPECT_FALSE(version.uses(epoch));
    EXPECT_TRUE(version.uses(epoch - 1));
    EXPECT_FALSE(version.uses(epoch - 2));
    EXPECT_TRUE(version.uses(epoch - 30));
    EXPECT_FALSE(version.uses(epoch - 31));
    for (const uint32_t past : {32u, 33u, 34u, 63u, 64u, 1000u, kFarEpochs - 1}) {
      EXPECT_TRUE(version.uses(epoch - past)) << past;  // too old for a bit
    }
    for (const uint32_t ahead : {1u, 15u, 32u, kFarEpochs}) EXPECT_FALSE(version.uses(epoch + ahead)) << ahead;
    EXPECT_EQ(unpack_version(pack(version)), version);
  }
}

// A kernel may read a head while the host writes the next: whichever it finds, it has the same map.
TEST(Epochs, HeadsMayBeReadWhileTheyAreWritten) {
  for (const uint32_t begin : kBegins) {
    for (const uint32_t later : {0u, 1u}) {
      for (uint32_t gap = 1; gap <= kMostOpenEpochs; ++gap) {  // other layers have the epochs between
        const uint32_t epoch = begin + gap;
        const uint32_t before = MapHead::word(begin, later);
        const uint32_t staged = MapHead::word(epoch, later ^ 1);
        // Staged: no version has come to the epoch.
        for (uint32_t at = 0; at < gap; ++at) {
          const MapVersion version{begin + at, 0};
          EXPECT_EQ(MapHead::chosen(before, version), later);
          EXPECT_EQ(MapHead::chosen(staged, version), later);
        }
        for (uint32_t at = 0; at <= kMostOpenEpochs; ++at) {
          // Decided: it has its own map, or the head is put back where it is void.
          EXPECT_EQ(MapHead::chosen(staged, MapVersion{epoch + at, 0}), later ^ 1);
          const MapVersion failed{epoch + at, 1u << at};
          EXPECT_EQ(MapHead::chosen(staged, failed), later);
          EXPECT_EQ(MapHead::chosen(before, failed), later);
        }
      }
    }
  }
}

// ---- Through the C API

// Which of a rank's slots serve expert 0: 0 and 1 are rank 0's, 2 and 3 rank 1's.
constexpr int32_t kBoth[] = {0, 1, 2, 0};
constexpr int32_t kFirst[] = {0, 1, 2, 1};
constexpr int32_t kSecond[] = {2, 1, 0, 0};

class Moving : public ::testing::Test {
 protected:
  static constexpr int kLayers = 2;

  Moving() {
    for (int layer = 0; layer < kLayers; ++layer) tables_.insert(tables_.end(), kBoth, std::end(kBoth));
    placement_.num_layers = kLayers;
    placement_.num_slots = 4;
    placement_.slot_expert = tables_.data();
    placement_.count_loads = 1;
    placement_.moves = 1;
    placement_.weight_bytes = 4097;
    config_.placement = &placement_;
    config_.lanes = 2;
  }

  static twEpochs_t epochs_of(twGroup_t group, uint32_t* lanes = nullptr) {
    twEpochs_t epochs{};
    epochs.size = sizeof epochs;
    EXPECT_TW(twSuccess, twGroupEpochs(group, &epochs, lanes));
    return epochs;
  }
  static uint32_t stage(twGroup_t group, const int32_t* table, int32_t layer = 0) {
    uint32_t epoch = 0;
    EXPECT_TW(twSuccess, twGroupStageMap(group, layer, table, nullptr, &epoch));
    return epoch;
  }
  static twHandle_t route(twGroup_t group, int32_t layer = 0) {
    int32_t ids[] = {0, -1, 0, -1};
    const twTensor_t given = test::tensor(ids, twInt32, {2, 2});
    twHandle_t handle = nullptr;
    EXPECT_TW(twSuccess, twHandleCreateForLayer(&handle, group, layer, &given, nullptr, nullptr));
    // The ids are read here, whatever the handle gets by them later.
    std::fill(std::begin(ids), std::end(ids), 1);
    return handle;
  }
  // Rows that come from rank 0; of its two tokens of expert 0 each map sends another number to this rank.
  static int dispatch(twGroup_t group, twHandle_t handle, int32_t lane) {
    std::vector<uint16_t> rows(16, 0);
    twDispatchInput_t input = TW_DISPATCH_INPUT_INIT;
    input.payloads[0] = test::tensor(rows.data(), twBfloat16, {2, 8});
    input.lane = lane;
    twDispatchOutput_t output = TW_DISPATCH_OUTPUT_INIT;
    EXPECT_TW(twSuccess, twDispatch(group, handle, &input, &output));
    return output.counts.data == nullptr ? -1 : static_cast<const int32_t*>(output.counts.data)[0];
  }
  static int pass(twGroup_t group, int32_t lane, int32_t layer = 0) {
    twHandle_t handle = route(group, layer);
    const int found = dispatch(group, handle, lane);
    EXPECT_TW(twSuccess, twHandleDestroy(handle));
    return found;
  }
  // What dispatch() gives at a rank by a map.
  static int rows_by(const int32_t* table, int rank) {
    return table == kBoth ? 1 : (table == kFirst) == (rank == 0) ? 2 : 0;
  }

  std::vector<int32_t> tables_;
  twPlacement_t placement_ = TW_PLACEMENT_INIT;
  twGroupConfig_t config_ = test::make_config(3, 2, 4);
};

TEST_F(Moving, EachLaneSwitchesWhenAllHaveToldThere) {
  const test::World world(2, config_);
  test::on_all_ranks(2, [&](int rank) {
    twGroup_t group = world[rank];
    EXPECT_EQ(pass(group, 0), rows_by(kBoth, rank));
    EXPECT_EQ(stage(group, kFirst), 1u);
    EXPECT_EQ(pass(group, 0), rows_by(kBoth, rank)) << "staged alone";
    if (rank == 1) {
      EXPECT_TW(twSuccess, twGroupReady(group, 1, 0));
    }
    for (int i = 0; i < 3; ++i) EXPECT_EQ(pass(group, 0), rows_by(kBoth, rank)) << "rank 0 is late";
    if (rank == 0) {
      EXPECT_TW(twSuccess, twGroupReady(group, 1, 0));
    }
    EXPECT_EQ(pass(group, 0), rows_by(kBoth, rank)) << "the dispatch that tells it";
    EXPECT_EQ(pass(group, 0), rows_by(kFirst, rank));
    uint32_t lanes[2] = {7, 7};
    EXPECT_EQ(epochs_of(group, lanes).agreed, 0u);
    EXPECT_EQ(lanes[0], 1u);
    EXPECT_EQ(lanes[1], 0u);
    // The other lane has its own version, and as long as it is behind the layer has two maps (M5).
    uint32_t epoch = 0;
    EXPECT_TW(twInvalidUsage, twGroupStageMap(group, 0, kSecond, nullptr, &epoch));
    EXPECT_TRUE(test::says("layer 0 has epoch 1 open, and the lanes of this rank have come to epoch 0"));
    EXPECT_EQ(pass(group, 1), rows_by(kBoth, rank));
    EXPECT_EQ(pass(group, 0, 1), rows_by(kBoth, rank)) << "the other layer";
    EXPECT_EQ(epochs_of(group).agreed, 1u);
    EXPECT_EQ(pass(group, 1), rows_by(kFirst, rank));
    EXPECT_EQ(stage(group, kSecond), 2u);
    EXPECT_EQ(stage(group, kSecond, 1), 3u);
    EXPECT_TW(twSuccess, twGroupReady(group, 2, 0));
    EXPECT_TW(twSuccess, twGroupReady(group, 3, 0));
    EXPECT_EQ(pass(group, 1, 1), rows_by(kBoth, rank));
    EXPECT_EQ(pass(group, 1, 1), rows_by(kSecond, rank));
    EXPECT_EQ(pass(group, 1), rows_by(kSecond, rank));
    EXPECT_EQ(pass(group, 0), rows_by(kFirst, rank));
    int32_t table[4] = {};
    EXPECT_EQ(epochs_of(group).agreed, 3u);
    EXPECT_TW(twSuccess, twGroupMap(group, 0, table, nullptr));
    EXPECT_EQ(std::memcmp(table, kSecond, sizeof table), 0);
  });
}

// One rank fails: all keep the map, of one lane and of the other, and the next epoch comes as if nothing had been.
TEST_F(Moving, WhatOneRankHasVoidIsVoidForAll) {
  const test::World world(2, config_);
  test::on_all_ranks(2, [&](int rank) {
    twGroup_t group = world[rank];
    EXPECT_EQ(stage(group, kFirst), 1u);
    EXPECT_EQ(stage(group, kFirst, 1), 2u);
    EXPECT_TW(twSuccess, twGroupReady(group, 1, rank));
    EXPECT_TW(twSuccess, twGroupReady(group, 2, 0));
    for (int lane : {0, 1}) {
      EXPECT_EQ(pass(group, lane), rows_by(kBoth, rank));
      EXPECT_EQ(pass(group, lane), rows_by(kBoth, rank));
      EXPECT_EQ(pass(group, lane, 1), rows_by(kFirst, rank));
    }
    const twEpochs_t epochs = epochs_of(group);
    EXPECT_EQ(epochs.agreed, 2u);
    EXPECT_EQ(epochs.voids, 2u);
    int32_t table[4] = {};
    EXPECT_TW(twSuccess, twGroupMap(group, 0, table, nullptr));
    EXPECT_EQ(std::memcmp(table, kBoth, sizeof table), 0);
    EXPECT_EQ(stage(group, kSecond), 3u);
    EXPECT_TW(twSuccess, twGroupReady(group, 3, 0));
    for (int lane : {0, 1}) {
      EXPECT_EQ(pass(group, lane), rows_by(kBoth, rank));
      EXPECT_EQ(pass(group, lane), rows_by(kSecond, rank));
    }
    EXPECT_EQ(epochs_of(group).voids, 4u);
  });
}

// Ranks may route before or behind the dispatch that decides: a handle gets its map in its own first step (M3), and
// keeps it.
TEST_F(Moving, HandlesBindInTheirFirstStep) {
  const test::World world(2, config_);
  test::on_all_ranks(2, [&](int rank) {
    twGroup_t group = world[rank];
    twHandle_t held = route(group);
    EXPECT_EQ(dispatch(group, held, 0), rows_by(kBoth, rank));
    EXPECT_TW(twSuccess, twHandleRelease(held));
    EXPECT_EQ(stage(group, kFirst), 1u);
    EXPECT_TW(twSuccess, twGroupReady(group, 1, 0));
    twHandle_t early = rank == 0 ? route(group) : nullptr;
    for (int lane : {0, 1}) EXPECT_EQ(pass(group, lane), rows_by(kBoth, rank));
    if (early == nullptr) early = route(group);
    twEpochs_t epochs = epochs_of(group);
    EXPECT_EQ(epochs.agreed, 1u);
    EXPECT_EQ(epochs.oldest, 0u) << "a handle that lives";
    EXPECT_EQ(dispatch(group, early, 0), rows_by(kFirst, rank));
    EXPECT_TW(twSuccess, twHandleDestroy(early));
    EXPECT_EQ(dispatch(group, held, 1), rows_by(kBoth, rank));
    EXPECT_EQ(epochs_of(group).oldest, 0u);
    EXPECT_TW(twSuccess, twHandleDestroy(held));
    epochs = epochs_of(group);
    EXPECT_EQ(epochs.oldest, 1u);
  });
}

// Each epoch follows as soon as the one before is decided; what was void moves on with them.
TEST_F(Moving, ManyEpochs) {
  const test::World world(2, config_);
  test::on_all_ranks(2, [&](int rank) {
    twGroup_t group = world[rank];
    uint32_t voids = 0;
    const int32_t* now = kBoth;
    for (uint32_t epoch = 1; epoch <= 40; ++epoch) {
      const int32_t* const next = epoch % 2 != 0 ? kFirst : kSecond;
      const bool fails = epoch % 5 == 0;
      EXPECT_EQ(stage(group, next), epoch);
      EXPECT_TW(twSuccess, twGroupReady(group, epoch, fails && rank == static_cast<int>(epoch / 5 % 2)));
      voids = voids << 1 | (fails ? 1u : 0u);
      for (int lane : {0, 1}) EXPECT_EQ(pass(group, lane), rows_by(now, rank));
      if (!fails) now = next;
      const twEpochs_t epochs = epochs_of(group);
      EXPECT_EQ(epochs.agreed, epoch);
      EXPECT_EQ(epochs.voids, voids);
    }
    EXPECT_EQ(pass(group, 0), rows_by(now, rank));
  });
}

TEST_F(Moving, FifteenAreOpenAtMost) {
  constexpr int32_t kMost = kMostOpenEpochs;
  tables_.clear();
  for (int layer = 0; layer <= kMost; ++layer) tables_.insert(tables_.end(), kBoth, std::end(kBoth));
  placement_.slot_expert = tables_.data();
  placement_.num_layers = kMost + 1;
  const test::World world(2, config_);
  test::on_all_ranks(2, [&](int rank) {
    twGroup_t group = world[rank];
    for (int32_t layer = 0; layer < kMost; ++layer) {
      EXPECT_EQ(stage(group, kFirst, layer), static_cast<uint32_t>(layer) + 1);
      EXPECT_TW(twSuccess, twGroupReady(group, static_cast<uint32_t>(layer) + 1, rank == 0 && layer == 0));
    }
    uint32_t epoch = 0;
    EXPECT_TW(twInvalidUsage, twGroupStageMap(group, kMost, kFirst, nullptr, &epoch));
    EXPECT_TRUE(test::says("15 epochs are open, 1 to 15, and no more can be"));
    EXPECT_EQ(pass(group, 0), rows_by(kBoth, rank));
    for (int32_t layer = 0; layer <= kMost; ++layer) {
      const bool moved = layer > 0 && layer < kMost;  // all of them at once, but for the first, which is void
      EXPECT_EQ(pass(group, 0, layer), rows_by(moved ? kFirst : kBoth, rank)) << "layer " << layer;
    }
    EXPECT_TW(twInvalidUsage, twGroupStageMap(group, kMost, kFirst, nullptr, &epoch));
    EXPECT_EQ(pass(group, 1), rows_by(kBoth, rank));
    EXPECT_EQ(stage(group, kFirst, kMost), 16u);
    EXPECT_EQ(epochs_of(group).voids, 1u << 14);
  });
}

TEST_F(Moving, WeightsAreReadAtPeers) {
  if (test::ranks_per_host(2) < 2) GTEST_SKIP() << "ranks of different hosts have no memory in common";
  const test::World world(2, config_);
  constexpr uint64_t kAll = 8192;  // whole pages
  for (int rank : {0, 1}) {
    void* own = nullptr;
    uint64_t bytes = 0;
    EXPECT_TW(twSuccess, twGroupWeights(world[rank], rank, &own, &bytes));
    EXPECT_EQ(bytes, kAll);
    const std::vector<std::byte> zeros(kAll);
    EXPECT_EQ(std::memcmp(own, zeros.data(), kAll), 0);
    for (uint64_t i = 0; i < kAll; ++i) static_cast<uint8_t*>(own)[i] = static_cast<uint8_t>(test::mix({i, 3u + rank}));
  }
  void *mine = nullptr, *there = nullptr;
  uint64_t bytes = 0;
  EXPECT_TW(twSuccess, twGroupWeights(world[0], 0, &mine, &bytes));
  EXPECT_TW(twSuccess, twGroupWeights(world[0], 1, &there, &bytes));
  auto* const here = static_cast<uint8_t*>(mine);
  const auto* const peer = static_cast<const uint8_t*>(there);
  std::vector<uint8_t> want(here, here + kAll);
  const auto pulled = [&](int rank, uint64_t from, uint64_t to, uint64_t n) {
    EXPECT_TW(twSuccess, twGroupPull(world[0], rank, from, to, n, nullptr));
    const std::vector<uint8_t> read(rank == 0 ? want.data() + from : peer + from,
                                    (rank == 0 ? want.data() : peer) + from + n);
    std::copy(read.begin(), read.end(), want.begin() + static_cast<std::ptrdiff_t>(to));
    EXPECT_EQ(std::memcmp(here, want.data(), kAll), 0) << rank << " " << from << " " << to << " " << n;
  };
  pulled(1, 100, 300, 777);
  pulled(1, kAll - 1, 0, 1);
  pulled(1, 0, kAll - 1, 1);
  pulled(1, kAll, kAll, 0);
  pulled(0, 0, 4096, 4096);
  pulled(1, 0, 0, kAll);
  for (const auto& [from, to, n] : {std::tuple<uint64_t, uint64_t, uint64_t>{kAll, 0, 1},
                                    {0, kAll, 1},
                                    {1, 0, kAll},
                                    {0, 1, kAll},
                                    {UINT64_MAX, 0, 2},
                                    {0, UINT64_MAX, 2},
                                    {8, 0, UINT64_MAX},
                                    {8, 8, UINT64_MAX}}) {
    EXPECT_TW(twInvalidArgument, twGroupPull(world[0], 1, from, to, n, nullptr));
    EXPECT_TRUE(test::says("both together must be from 0 to 8192, the memory for weights"));
  }
  EXPECT_EQ(std::memcmp(here, want.data(), kAll), 0);
  for (int rank : {-1, 2}) {
    EXPECT_TW(twInvalidArgument, twGroupPull(world[0], rank, 0, 0, 8, nullptr));
    EXPECT_TW(twInvalidArgument, twGroupWeights(world[0], rank, &mine, &bytes));
  }
  EXPECT_TW(twInvalidArgument, twGroupWeights(world[0], 0, nullptr, &bytes));
  EXPECT_TW(twInvalidArgument, twGroupWeights(world[0], 0, &mine, nullptr));
  // Steps leave them alone.
  const std::vector<uint8_t> was(peer, peer + kAll);
  test::on_all_ranks(2, [&](int rank) { EXPECT_EQ(pass(world[rank], 0), rows_by(kBoth, rank)); });
  EXPECT_EQ(std::memcmp(here, want.data(), kAll), 0);
  EXPECT_EQ(std::memcmp(peer, was.data(), kAll), 0);
}

TEST_F(Moving, NoWeights) {
  placement_.weight_bytes = 0;
  const test::World world(1, config_);
  void* memory = nullptr;
  uint64_t bytes = 0;
  EXPECT_TW(twInvalidUsage, twGroupWeights(world[0], 0, &memory, &bytes));
  EXPECT_TRUE(test::says("config.placement->weight_bytes is 0"));
  EXPECT_TW(twInvalidUsage, twGroupPull(world[0], 0, 0, 0, 0, nullptr));
}

// A placement of before maps moved ends in front of `weight_bytes`: what lies behind it is not its own.
TEST_F(Moving, PlacementsOfOtherVersions) {
  std::memset(&placement_.weight_bytes, 0x5a, sizeof placement_ - offsetof(twPlacement_t, weight_bytes));
  placement_.size = offsetof(twPlacement_t, weight_bytes);
  uint32_t epoch = 0;
  void* memory = nullptr;
  uint64_t bytes = 0;
  {
    const test::World world(1, config_);
    EXPECT_TW(twInvalidUsage, twGroupStageMap(world[0], 0, kFirst, nullptr, &epoch));
    EXPECT_TRUE(test::says("config.placement->moves 0"));
    EXPECT_TW(twInvalidUsage, twGroupWeights(world[0], 0, &memory, &bytes));
    EXPECT_EQ(pass(world[0], 0), 2);
  }
  placement_.moves = 1;
  placement_.weight_bytes = 0;
  placement_.size = sizeof placement_;
  {
    const test::World world(1, config_);
    EXPECT_EQ(stage(world[0], kFirst), 1u);
    EXPECT_TW(twInvalidUsage, twGroupWeights(world[0], 0, &memory, &bytes));
    // So do epochs of a version that has less of them.
    EXPECT_TW(twSuccess, twGroupReady(world[0], 1, 1));
    for (int lane : {0, 1}) EXPECT_EQ(pass(world[0], lane), 2);
    twEpochs_t epochs;
    std::memset(&epochs, 0x5a, sizeof epochs);
    epochs.size = offsetof(twEpochs_t, voids);
    EXPECT_TW(twSuccess, twGroupEpochs(world[0], &epochs, nullptr));
    EXPECT_EQ(epochs.size, offsetof(twEpochs_t, voids));
    EXPECT_EQ(epochs.agreed, 1u);
    EXPECT_EQ(epochs.voids, 0x5a5a5a5au);
    EXPECT_EQ(epochs.oldest, 0x5a5a5a5au);
  }
}

}  // namespace
}  // namespace tw
