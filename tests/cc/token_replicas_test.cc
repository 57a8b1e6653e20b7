// Token replicas: which tokens a rank sends, who gets whose sums, and what ranks that hold unlike tokens hear. tests/py
// has the behaviour of the whole (test_token_replicas.py).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>

#include "exchange/sharing.h"
#include "exchange/token_replicas.h"
#include "harness.h"

namespace tw::test {
namespace {

constexpr int kRanks = 4;
constexpr int kTopK = 2;
constexpr int kExperts = 5;
constexpr int64_t kWidth = 8;

twGroupConfig_t replicated(int replicas) {
  twGroupConfig_t config = make_config(kExperts, kTopK, 8, kWidth);
  config.combine_dtype = twFloat32;
  config.payloads[0] = {twFloat32, kWidth};
  config.combine_room = kWidth * sizeof(float) + kTopK * sizeof(float);
  config.token_replicas = replicas;
  return config;
}

// The tokens of a set; every rank of it has a copy.
struct Tokens {
  std::vector<int32_t> ids;
  std::vector<float> weights;
  std::vector<float> x;

  explicit Tokens(int count, uint64_t set) {
    for (int token = 0; token < count; ++token) {
      const auto drawn = mix({set, static_cast<uint64_t>(token)});
      ids.push_back(static_cast<int32_t>(drawn % kExperts));
      ids.push_back(token % 3 == 2 ? -1 : static_cast<int32_t>((drawn + 1 + drawn / 7 % (kExperts - 1)) % kExperts));
      weights.insert(weights.end(), {1.0f, 2.0f});
      for (int64_t i = 0; i < kWidth; ++i) {
        x.push_back(static_cast<float>(mix({set, static_cast<uint64_t>(token), static_cast<uint64_t>(i)}) % 100));
      }
    }
  }
  int count() const { return static_cast<int>(ids.size()) / kTopK; }
};

// One rank's round: experts multiply by their number + 1, and a value of each choice is its expert's number.
struct Round {
  twResult_t result = twSuccess;
  std::string sentence;
  std::vector<float> out;
  std::vector<float> values;

  void run(const World& world, int rank, Tokens tokens) {
    const int n = tokens.count();
    const twTensor_t ids = tensor(tokens.ids.data(), twInt32, {n, kTopK});
    const twTensor_t weights = tensor(tokens.weights.data(), twFloat32, {n, kTopK});
    twHandle_t handle = nullptr;
    ASSERT_TW(twSuccess, twHandleCreate(&handle, world[rank], &ids, &weights, nullptr));
    twDispatchInput_t input = TW_DISPATCH_INPUT_INIT;
    input.payloads[0] = tensor(tokens.x.data(), twFloat32, {n, kWidth});
    twDispatchOutput_t received = TW_DISPATCH_OUTPUT_INIT;
    received.layout = twRankMajor;
    ASSERT_TW(twSuccess, twDispatch(world[rank], handle, &input, &received));
    const int b = world.config.max_tokens;
    std::vector<float> rows(static_cast<size_t>(kRanks * b * kWidth));
    std::vector<float> of_choices(static_cast<size_t>(kRanks * b * kTopK), -1.0f);
    answer(world, rank, received, rows, of_choices);
    twCombineInput_t given = TW_COMBINE_INPUT_INIT;
    given.rows = tensor(rows.data(), twFloat32, {kRanks, b, kWidth});
    given.choice_values = tensor(of_choices.data(), twFloat32, {kRanks, b, kTopK});
    out.assign(static_cast<size_t>(n * kWidth) + 1, -5.0f);
    values.assign(static_cast<size_t>(n * kTopK) + 1, -5.0f);
    twCombineOutput_t sums = TW_COMBINE_OUTPUT_INIT;
    sums.tokens = tensor(out.data(), twFloat32, {n, kWidth});
    sums.choice_values = tensor(values.data(), twFloat32, {n, kTopK});
    result = twCombine(world[rank], handle, &given, &sums);
    sentence = twLastError();
    (void)twHandleRelease(handle);
    ASSERT_TW(twSuccess, twHandleDestroy(handle));
  }

 private:
  static void answer(const World& world, int rank, const twDispatchOutput_t& received, std::vector<float>& rows,
                     std::vector<float>& of_choices) {
    const auto* const x = static_cast<const float*>(received.payloads[0].data);
    const auto* const ids = static_cast<const int32_t*>(received.ids.data);
    const auto* const counts = static_cast<const int32_t*>(received.counts.data);
    const int b = world.config.max_tokens;
    for (int source = 0; source < kRanks; ++source) {
      for (int slot = 0; slot < counts[source]; ++slot) {
        const auto row = static_cast<size_t>(source * b + slot);
        for (size_t k = 0; k < kTopK; ++k) {
          const int32_t local = ids[row * kTopK + k];
          if (local < 0) continue;
          const auto factor = static_cast<float>(expert_of(world, rank, local) + 1);
          of_choices[row * kTopK + k] = factor;
          for (size_t i = 0; i < kWidth; ++i) rows[row * kWidth + i] += factor * x[row * kWidth + i];
        }
      }
    }
  }
  static int expert_of(const World& world, int rank, int32_t local) {
    for (int expert = 0; expert < kExperts; ++expert) {
      if (world.homes.here(expert, rank) && local-- == 0) return expert;
    }
    return -1000;
  }
};

std::vector<Round> play(const World& world, const std::vector<Tokens>& by_rank) {
  std::vector<Round> rounds(kRanks);
  on_all_ranks(kRanks, [&](int rank) { rounds[rank].run(world, rank, by_rank[rank]); });
  return rounds;
}

std::vector<Tokens> of_sets(int replicas, const std::vector<int>& counts, uint64_t seed) {
  std::vector<Tokens> by_rank;
  for (int rank = 0; rank < kRanks; ++rank) {
    by_rank.emplace_back(counts[rank / replicas], seed + static_cast<uint64_t>(rank / replicas));
  }
  return by_rank;
}

void expect_right(const std::vector<Round>& rounds, const std::vector<Tokens>& by_rank) {
  for (int rank = 0; rank < kRanks; ++rank) {
    const Tokens& tokens = by_rank[rank];
    EXPECT_EQ(rounds[rank].result, twSuccess) << rounds[rank].sentence;
    EXPECT_EQ(rounds[rank].out.back(), -5.0f) << "beyond the last token";
    EXPECT_EQ(rounds[rank].values.back(), -5.0f) << "beyond the last token";
    for (int token = 0; token < tokens.count(); ++token) {
      float factor = 0;
      for (int k = 0; k < kTopK; ++k) {
        const int32_t id = tokens.ids[token * kTopK + k];
        const float value = id < 0 ? 0.0f : static_cast<float>(id + 1);
        factor += value;
        EXPECT_EQ(rounds[rank].values[token * kTopK + k], value) << "rank " << rank << ", token " << token;
      }
      for (int64_t i = 0; i < kWidth; ++i) {
        EXPECT_EQ(rounds[rank].out[token * kWidth + i], factor * tokens.x[token * kWidth + i])
            << "rank " << rank << ", token " << token;
      }
    }
  }
}

TEST(TokenReplicas, SharesCoverAllTokens) {
  for (int replicas = 1; replicas <= 5; ++replicas) {
    const ReplicaSet set = ReplicaSet::of(replicas, 3 * replicas + replicas - 1);
    EXPECT_EQ(set.first, 3 * replicas);
    EXPECT_EQ(set.place, replicas - 1);
    for (int tokens = 0; tokens <= 3 * replicas + 1; ++tokens) {
      int32_t next = 0;
      for (int place = 0; place < replicas; ++place) {
        EXPECT_EQ(set.begin(tokens, place), next);
        const int32_t count = set.count(tokens, place);
        EXPECT_TRUE(count == tokens / replicas || count == (tokens + replicas - 1) / replicas);
        next += count;
      }
      EXPECT_EQ(next, tokens);
    }
  }
}

TEST(TokenReplicas, AllGetAllSums) {
  for (const int replicas : {2, 4}) {
    World world(kRanks, replicated(replicas));
    for (const std::vector<int>& counts : {std::vector<int>{7, 0}, {16, 3}, {1, 16}, {0, 0}, {5, 6}}) {
      const std::vector<Tokens> tokens = of_sets(replicas, counts, counts[0]);
      expect_right(play(world, tokens), tokens);
    }
  }
}

// All ranks hear of it, those of other sets too; sums of the step are NaN, and the group goes on.
TEST(TokenReplicas, UnlikeTokensAreTold) {
  World world(kRanks, replicated(2));
  const std::vector<Tokens> alike = of_sets(2, {7, 4}, 9);
  const auto check = [&](auto&& change) {
    std::vector<Tokens> tokens = alike;
    change(tokens[3]);
    const std::vector<Round> rounds = play(world, tokens);
    for (int rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ(rounds[rank].result, twReplicaMismatch) << "rank " << rank << ": " << rounds[rank].sentence;
      EXPECT_NE(rounds[rank].sentence.find("ranks 2 and 3 are token replicas"), std::string::npos);
      EXPECT_EQ(error_of(world[rank]).peer, 3);
      for (size_t i = 0; i + 1 < rounds[rank].out.size(); ++i) EXPECT_TRUE(std::isnan(rounds[rank].out[i]));
      for (size_t i = 0; i + 1 < rounds[rank].values.size(); ++i) EXPECT_TRUE(std::isnan(rounds[rank].values[i]));
    }
    expect_right(play(world, alike), alike);
  };
  check([](Tokens& tokens) { std::swap(tokens.ids[0], tokens.ids[1]); });
  check([](Tokens& tokens) {  // of an expert: a weight beside -1 counts for nothing
    const auto served = std::find_if(tokens.ids.begin(), tokens.ids.end(), [](int32_t id) { return id >= 0; });
    tokens.weights[static_cast<size_t>(served - tokens.ids.begin())] = 3.0f;
  });
  check([](Tokens& tokens) { tokens = Tokens(3, 10); });
  check([](Tokens& tokens) { tokens = Tokens(0, 10); });
}

TEST(TokenReplicas, TheFirstOfAnUnlikeSetIsFound) {
  const int32_t alike[] = {5, 5, 7, 7};
  const int32_t second[] = {5, 5, 7, 8};
  const int32_t both[] = {5, 6, 7, 8};
  EXPECT_EQ(find_unlike(alike, 4, 2), -1);
  EXPECT_EQ(find_unlike(second, 4, 2), 3);
  EXPECT_EQ(find_unlike(both, 4, 2), 1);
  EXPECT_EQ(find_unlike(both, 4, 1), -1);
}

}  // namespace
}  // namespace tw::test
