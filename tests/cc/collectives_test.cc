// Gathers and reduces of local ranks, staged in one thread, and what becomes of them when a rank refuses, gives
// something else, or begins the next step before it has completed the last.
#include <cstring>
#include <memory>

#include "harness.h"

namespace tw::test {
namespace {

constexpr int64_t kElements = 8;

// All ranks' part in gathers and reduces of float32 rows, each of whose values is another.
class Collected {
 public:
  Collected(const World& world, std::vector<int32_t> of_ranks, bool by_host = true)
      : world_(world), sizes(std::move(of_ranks)), by_host_(by_host) {
    for (const int32_t size : sizes) all += size;
    for (int rank = 0; rank < world.size(); ++rank) {
      rows.emplace_back(static_cast<size_t>(all * kElements));
      for (size_t i = 0; i < rows.back().size(); ++i) rows.back()[i] = value(rank, static_cast<int64_t>(i));
      gathered.emplace_back(rows.back().size(), -1.0f);
      sums.emplace_back(rows.back().size(), -1.0f);
      counts.emplace_back(world.size() + world.size() + 1, -1);
    }
    requests.assign(world.size(), 0);
  }

  static float value(int rank, int64_t i) { return static_cast<float>(1000 * (rank + 1) + i) / 7.0f; }
  int64_t begin(int rank) const {
    int64_t row = 0;
    for (int before = 0; before < rank; ++before) row += sizes[before];
    return row;
  }

  twResult_t gather(int rank, bool send_only, int32_t lane = -1) {
    twAllGatherVInput_t input = TW_ALL_GATHER_V_INPUT_INIT;
    input.tensors[0] = tensor(rows[rank].data(), twFloat32, {sizes[rank], kElements});
    if (by_host_) input.host_sizes = sizes.data();
    if (!by_host_) input.bound = 1 << 3;
    input.send_only = send_only;
    input.lane = lane;
    twAllGatherVOutput_t output = TW_ALL_GATHER_V_OUTPUT_INIT;
    if (by_host_) output.tensors[0] = tensor(gathered[rank].data(), twFloat32, {all, kElements});
    output.counts = tensor(counts[rank].data(), twInt32, {world_.size()});
    output.offsets = tensor(counts[rank].data() + world_.size(), twInt32, {world_.size() + 1});
    const twResult_t result = twAllGatherV(world_[rank], &input, &output);
    requests[rank] = output.request;
    return result;
  }
  twResult_t reduce(int rank, bool send_only, int32_t lane = -1) {
    twReduceScatterVInput_t input = TW_REDUCE_SCATTER_V_INPUT_INIT;
    input.tensors[0] = tensor(rows[rank].data(), twFloat32, {all, kElements});
    input.host_sizes = sizes.data();
    input.send_only = send_only;
    input.lane = lane;
    twReduceScatterVOutput_t output = TW_REDUCE_SCATTER_V_OUTPUT_INIT;
    output.tensors[0] = tensor(sums[rank].data(), twFloat32, {sizes[rank], kElements});
    const twResult_t result = twReduceScatterV(world_[rank], &input, &output);
    requests[rank] = output.request;
    return result;
  }
  twResult_t complete(int rank) { return twCompleteRequest(world_[rank], requests[rank], nullptr); }

  void expect_gathered(int rank) const {
    for (int source = 0; source < world_.size(); ++source) {
      EXPECT_EQ(counts[rank][source], sizes[source]);
      EXPECT_EQ(counts[rank][world_.size() + source], begin(source));
      for (int64_t i = 0; by_host_ && i < sizes[source] * kElements; ++i) {
        ASSERT_EQ(gathered[rank][begin(source) * kElements + i], value(source, i)) << "of rank " << source;
      }
    }
    EXPECT_EQ(counts[rank].back(), all);
  }
  void expect_sums(int rank) const {
    for (int64_t i = 0; i < sizes[rank] * kElements; ++i) {
      float sum = value(0, begin(rank) * kElements + i);
      for (int source = 1; source < world_.size(); ++source) sum += value(source, begin(rank) * kElements + i);
      ASSERT_EQ(sums[rank][i], sum) << "rank " << rank << ", element " << i;
    }
  }

 private:
  const World& world_;

 public:
  std::vector<int32_t> sizes;
  int64_t all = 0;
  std::vector<std::vector<float>> rows, gathered, sums;
  std::vector<std::vector<int32_t>> counts;
  std::vector<int64_t> requests;

 private:
  const bool by_host_;
};

twGroupConfig_t config_of(int lanes = 1) {
  twGroupConfig_t config = make_config(0, 0, 8, 2 * kElements);
  config.lanes = lanes;
  config.timeout_ms = 2000;
  return config;
}

TEST(Collectives, Staged) {
  for (const int ranks : {1, 2, 3, 5}) {
    World world(ranks, config_of(2));
    for (int round = 0; round < 6; ++round) {
      SCOPED_TRACE(::testing::Message() << ranks << " ranks, round " << round);
      std::vector<int32_t> sizes;
      for (int rank = 0; rank < ranks; ++rank) sizes.push_back((3 * rank + 5 * round) % 9);
      Collected gathers(world, sizes, round % 2 == 0), reduces(world, sizes);
      for (int rank = 0; rank < ranks; ++rank) ASSERT_TW(twSuccess, gathers.gather(rank, true));
      for (int rank = 0; rank < ranks; ++rank) ASSERT_TW(twSuccess, reduces.reduce(rank, true));
      for (int rank = ranks - 1; rank >= 0; --rank) {
        ASSERT_TW(twSuccess, reduces.complete(rank));
        ASSERT_TW(twSuccess, gathers.complete(rank));
        ASSERT_NO_FATAL_FAILURE(gathers.expect_gathered(rank));
        ASSERT_NO_FATAL_FAILURE(reduces.expect_sums(rank));
        EXPECT_TW(twInvalidArgument, gathers.complete(rank)) << "it is completed";
      }
    }
  }
}

// The next step on a channel ends the one before (S2), whoever completes it later.
TEST(Collectives, MoreThanChannels) {
  World world(3, config_of(1));
  std::vector<std::unique_ptr<Collected>> calls;
  for (int i = 0; i < 4; ++i) {
    calls.push_back(std::make_unique<Collected>(world, std::vector<int32_t>{i, 8 - i, 2}));
    for (int rank = 0; rank < 3; ++rank) {
      ASSERT_TW(twSuccess, i % 2 == 0 ? calls[i]->gather(rank, true) : calls[i]->reduce(rank, true));
    }
  }
  for (int i = 3; i >= 0; --i) {
    for (int rank = 0; rank < 3; ++rank) {
      ASSERT_TW(twSuccess, calls[i]->complete(rank));
      i % 2 == 0 ? calls[i]->expect_gathered(rank) : calls[i]->expect_sums(rank);
    }
  }
}

// A reduce of rows that lie in the window: after its signal a peer may write there, and this rank still sums (S3).
TEST(Collectives, OwnRowsOfAView) {
  World world(2, config_of());
  const Collected rows(world, {8, 8});
  std::vector<int64_t> gathers, reduces;
  std::vector<std::vector<float>> sums(2, std::vector<float>(8 * kElements, -1.0f));
  twTensor_t view[2];
  for (int rank = 0; rank < 2; ++rank) {
    twAllGatherVInput_t input = TW_ALL_GATHER_V_INPUT_INIT;
    input.tensors[0] = tensor(const_cast<float*>(rows.rows[rank].data()), twFloat32, {8, kElements});
    input.send_only = 1;
    twAllGatherVOutput_t output = TW_ALL_GATHER_V_OUTPUT_INIT;
    output.layout = twRankMajor;
    ASSERT_TW(twSuccess, twAllGatherV(world[rank], &input, &output));
    gathers.push_back(output.request);
    view[rank] = output.tensors[0];
  }
  for (int rank = 0; rank < 2; ++rank) ASSERT_TW(twSuccess, twCompleteRequest(world[rank], gathers[rank], nullptr));
  for (int rank = 0; rank < 2; ++rank) {
    twReduceScatterVInput_t input = TW_REDUCE_SCATTER_V_INPUT_INIT;
    input.layout = twRankMajor;
    input.tensors[0] = view[rank];
    input.send_only = 1;
    twReduceScatterVOutput_t output = TW_REDUCE_SCATTER_V_OUTPUT_INIT;
    output.tensors[0] = tensor(sums[rank].data(), twFloat32, {8, kElements});
    ASSERT_TW(twSuccess, twReduceScatterV(world[rank], &input, &output));
    reduces.push_back(output.request);
  }
  ASSERT_TW(twSuccess, twCompleteRequest(world[1], reduces[1], nullptr));
  Collected after(world, {1, 1});  // of another bound, so its rows lie where the view's of rank 0 do
  ASSERT_TW(twSuccess, after.gather(1, true));
  ASSERT_TW(twSuccess, twCompleteRequest(world[0], reduces[0], nullptr));
  for (int rank = 0; rank < 2; ++rank) {
    for (int64_t i = 0; i < 8 * kElements; ++i)
      ASSERT_EQ(sums[rank][i], 2 * Collected::value(rank, i)) << rank << ", " << i;
  }
  ASSERT_TW(twSuccess, after.gather(0, true));
  for (int rank = 0; rank < 2; ++rank) ASSERT_TW(twSuccess, after.complete(rank));
}

// A rank refuses; its peers learn of it when they complete, and all go on, on the same channels (S5).
TEST(Collectives, RefusedAmongSent) {
  for (const int lanes : {1, 2, 3}) {
    World world(3, config_of(lanes));
    Collected refused(world, {2, 3, 4});
    for (int rank = 1; rank < 3; ++rank) ASSERT_TW(twSuccess, refused.reduce(rank, true));
    refused.sizes[0] = 9;  // beyond max_tokens
    EXPECT_TW(twInvalidArgument, refused.reduce(0, true));
    EXPECT_NE(std::strstr(twLastError(), "input.bound is 0, so the bound is 9; it must be from 1 to max_tokens, 8"),
              nullptr)
        << twLastError();
    refused.sizes[0] = 2;
    std::vector<std::unique_ptr<Collected>> calls;
    for (int i = 0; i < 5; ++i) {
      calls.push_back(std::make_unique<Collected>(world, std::vector<int32_t>{i, 1, 8}));
      for (int rank = 0; rank < 3; ++rank) ASSERT_TW(twSuccess, calls[i]->gather(rank, true)) << i << " on " << rank;
    }
    for (int rank = 1; rank < 3; ++rank) {
      EXPECT_TW(twPeerRefused, refused.complete(rank));
      for (int64_t i = 0; i < refused.sizes[rank] * kElements; ++i)
        EXPECT_NE(refused.sums[rank][i], refused.sums[rank][i]);
    }
    for (int rank = 0; rank < 3; ++rank) {
      for (auto& call : calls) {
        ASSERT_TW(twSuccess, call->complete(rank));
        call->expect_gathered(rank);
      }
    }
  }
}

TEST(Collectives, WhatRanksMustHaveAlike) {
  World world(3, config_of());
  for (const int odd : {0, 1, 2}) {
    Collected calls(world, {2, 3, 4});
    for (int rank = 0; rank < 3; ++rank) {
      calls.sizes[(odd + 1) % 3] += rank == odd ? -1 : 0;  // another rank's size, as one rank tells it
      if (rank == odd) calls.all -= 1;
      ASSERT_TW(twSuccess, calls.reduce(rank, true));
      if (rank == odd) calls.all += 1;
      calls.sizes[(odd + 1) % 3] += rank == odd ? 1 : 0;
    }
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_TW(twBoundMismatch, calls.complete(rank));
      const twErrorRecord_t record = error_of(world[rank]);
      EXPECT_EQ(record.phase, twPhaseReduce);
      EXPECT_EQ(record.sticky, 0);
      EXPECT_EQ(record.peer, rank != odd ? odd : record.peer);
    }
  }
  Collected good(world, {1, 0, 8});
  for (int rank = 0; rank < 3; ++rank) ASSERT_TW(twSuccess, good.gather(rank, true));
  for (int rank = 0; rank < 3; ++rank) EXPECT_TW(twSuccess, good.complete(rank)) << "the group goes on";
}

// A gather meets a reduce: nobody may go on.
TEST(Collectives, DifferentCalls) {
  World world(2, config_of());
  Collected calls(world, {2, 3});
  ASSERT_TW(twSuccess, calls.gather(0, true));
  ASSERT_TW(twSuccess, calls.reduce(1, true));
  EXPECT_TW(twCallMismatch, calls.complete(0));
  EXPECT_EQ(error_of(world[0]).phase, twPhaseGather);
  EXPECT_EQ(calls.counts[0], std::vector<int32_t>(5, 0));
  EXPECT_TW(twCallMismatch, calls.gather(0, true)) << "sticky";
}

TEST(Collectives, NobodyComes) {
  twGroupConfig_t config = config_of();
  config.timeout_ms = 200;
  World world(2, config);
  Collected calls(world, {2, 3});
  ASSERT_TW(twSuccess, calls.reduce(0, true));
  EXPECT_TW(twTimeout, calls.complete(0));
  EXPECT_EQ(error_of(world[0]).peer, 1);
  EXPECT_NE(std::strstr(error_of(world[0]).message, "twReduceScatterV"), nullptr);
  EXPECT_TRUE(calls.sums[0][0] != calls.sums[0][0]) << "NaN";
}

}  // namespace
}  // namespace tw::test
