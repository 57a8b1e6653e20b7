// Slots: each rank once per token, ascending; positions in token order; nothing else decides them (S9).
#include "exchange/routing.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <vector>

#include "reference.h"

namespace tw {
namespace {

// The arrays of a routing, larger than needed: a wrong routing then fails a test instead of writing past an end.
class Routed {
 public:
  Routed(const Shape& shape, std::vector<int32_t> given)
      : ids(std::move(given)),
        first(ids.size() / shape.top_k + 1, -7),
        destinations(ids.size() + 1, {-7, -7}),
        counts(shape.ranks, -7) {
    routing.tokens = static_cast<int32_t>(ids.size()) / shape.top_k;
    routing.ids = ids.data();
    routing.first = first.data();
    routing.destinations = destinations.data();
    routing.send_counts = counts.data();
  }
  std::vector<std::pair<int32_t, int32_t>> of(int32_t token) const {
    std::vector<std::pair<int32_t, int32_t>> found;
    for (int64_t i = first[token]; i < first[token + 1]; ++i) {
      found.emplace_back(destinations[i].rank, destinations[i].slot);
    }
    return found;
  }

  std::vector<int32_t> ids;
  std::vector<int64_t> first;
  std::vector<Destination> destinations;
  std::vector<int32_t> counts;
  Routing routing;
};

using Pairs = std::vector<std::pair<int32_t, int32_t>>;

TEST(Routing, ByHand) {
  const std::vector<int32_t> rank = {2, 0, 1, 0, 2, 1};  // of experts 0..5
  const std::vector<int32_t> slot = {0, 0, 0, 1, 1, 1};
  const Shape shape{3, 6, 3, 8, 1, 1, {4}, 4};
  Routed owned(shape, {0, 4, 1,     // ranks 2, 2, 0
                       -1, -1, -1,  // nowhere
                       5, -1, 2,    // rank 1 twice
                       4, 3, 5});   // all
  assign_slots(shape, {rank.data(), slot.data()}, &owned.routing);
  EXPECT_EQ(owned.of(0), (Pairs{{0, 0}, {2, 0}}));
  EXPECT_EQ(owned.of(1), Pairs{});
  EXPECT_EQ(owned.of(2), (Pairs{{1, 0}}));
  EXPECT_EQ(owned.of(3), (Pairs{{0, 1}, {1, 1}, {2, 1}}));
  EXPECT_EQ(owned.counts, (std::vector<int32_t>{2, 2, 2}));
  EXPECT_EQ(owned.routing.fan_out(3), 3);
}

std::vector<int32_t> random_ids(const Shape& shape, int tokens, uint32_t seed) {
  std::vector<int32_t> ids;
  for (int t = 0; t < tokens; ++t) {
    std::vector<int32_t> deck(shape.experts);
    for (int e = 0; e < shape.experts; ++e) deck[e] = e;
    for (int k = 0; k < shape.top_k; ++k) {
      const uint32_t h = test::mix({seed, static_cast<uint64_t>(t), static_cast<uint64_t>(k)});
      std::swap(deck[k], deck[k + h % (shape.experts - k)]);
      ids.push_back(h >> 20 & 3 ? deck[k] : -1);
    }
  }
  return ids;
}

void expect_slots(const Shape& shape, int tokens, uint32_t seed) {
  std::vector<int32_t> rank(shape.experts);
  std::vector<int32_t> slot(shape.experts, 0);
  for (int e = 0; e < shape.experts; ++e)
    rank[e] = static_cast<int32_t>(test::mix({seed, 77, static_cast<uint64_t>(e)}) % shape.ranks);
  Routed owned(shape, random_ids(shape, tokens, seed));
  assign_slots(shape, {rank.data(), slot.data()}, &owned.routing);
  std::map<int32_t, int32_t> sent;
  for (int t = 0; t < tokens; ++t) {
    std::set<int32_t> wanted;
    for (int k = 0; k < shape.top_k; ++k) {
      const int32_t id = owned.ids[t * shape.top_k + k];
      if (id >= 0) wanted.insert(rank[id]);
    }
    Pairs want;
    for (const int32_t to : wanted) want.emplace_back(to, sent[to]++);
    ASSERT_EQ(owned.of(t), want) << "token " << t << ", seed " << seed;
    ASSERT_LE(owned.routing.fan_out(t), shape.fan_out());
  }
  for (int r = 0; r < shape.ranks; ++r) ASSERT_EQ(owned.counts[r], sent[r]);
}

TEST(Routing, RanksOnceAscendingSlotsInTokenOrder) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    ASSERT_NO_FATAL_FAILURE(expect_slots({5, 12, 4, 40, 1, 1, {4}, 4}, 40, seed));
    ASSERT_NO_FATAL_FAILURE(expect_slots({1, 3, 2, 9, 1, 1, {4}, 4}, 9, seed));
    ASSERT_NO_FATAL_FAILURE(expect_slots({16, 64, 64, 10, 1, 1, {4}, 4}, 10, seed));
    ASSERT_NO_FATAL_FAILURE(expect_slots({100, 200, 64, 10, 1, 1, {4}, 4}, 10, seed));
  }
}

TEST(Routing, NoTokens) {
  const Shape shape{3, 6, 3, 8, 1, 1, {4}, 4};
  Routed owned(shape, {});
  assign_slots(shape, {nullptr, nullptr}, &owned.routing);
  EXPECT_EQ(owned.first[0], 0);
  EXPECT_EQ(owned.counts, (std::vector<int32_t>{0, 0, 0}));
}

// Doing it again, in memory that held another routing, changes nothing.
TEST(Routing, Deterministic) {
  const Shape shape{4, 16, 6, 20, 1, 1, {4}, 4};
  const std::vector<int32_t> rank = {3, 1, 2, 0, 0, 1, 2, 3, 3, 3, 1, 0, 2, 2, 1, 0};
  const std::vector<int32_t> slot(16, 0);
  Routed once(shape, random_ids(shape, 20, 1));
  assign_slots(shape, {rank.data(), slot.data()}, &once.routing);
  Routed again(shape, random_ids(shape, 20, 2));
  assign_slots(shape, {rank.data(), slot.data()}, &again.routing);
  std::copy(once.ids.begin(), once.ids.end(), again.ids.begin());
  assign_slots(shape, {rank.data(), slot.data()}, &again.routing);
  for (int t = 0; t < 20; ++t) EXPECT_EQ(once.of(t), again.of(t));
  EXPECT_EQ(once.counts, again.counts);
}

}  // namespace
}  // namespace tw
