// Where ranks of several hosts stand, and what they have beside their windows: Topology and HostsMap against places
// that are counted one by one, and the largest group that is planned for.
#include "layout/hosts_map.h"

#include <gtest/gtest.h>

#include <map>
#include <vector>

namespace tw::test {
namespace {

Shape shape_of(int32_t ranks, int32_t tokens, int32_t top_k, uint64_t dispatched, uint64_t combined) {
  Shape shape;
  shape.ranks = ranks;
  shape.experts = ranks;
  shape.top_k = top_k;
  shape.max_tokens = tokens;
  shape.channels = 1;
  shape.payloads = 1;
  shape.payload_bytes[0] = dispatched;
  shape.combine_bytes = combined;
  return shape;
}

Topology topology_of(const std::vector<int>& sizes) {
  std::vector<int> names;
  for (size_t host = 0; host < sizes.size(); ++host) names.insert(names.end(), sizes[host], static_cast<int>(host));
  return Topology::make(names);
}

HostsMap map_of(const std::vector<int>& sizes, const Shape& shape, int replicas = 1, bool folds = false) {
  WindowMap window;
  EXPECT_TRUE(WindowMap::make(shape, &window));
  return HostsMap::make(topology_of(sizes), window, replicas, folds);
}

// 64 ranks on 8 hosts, 128 tokens, rows of 7168 bfloat16 both ways, top-8: at most 250 MB, and 60 by domain.
TEST(HostsMap, FitsLargeDecodes) {
  const Shape shape = shape_of(64, 128, 8, 14336, 14336);
  const HostsMap map = map_of(std::vector<int>(8, 8), shape);
  EXPECT_EQ(map.lists, 7);
  EXPECT_GT(map.in_bank, 0u);  // what returns lies in the window's bank
  EXPECT_LE(map.bytes(), 250'000'000u);
  const HostsMap by_domain = map_of(std::vector<int>(8, 8), shape, 1, true);
  EXPECT_GT(by_domain.in_bank, 0u);
  EXPECT_LE(by_domain.bytes(), 60'000'000u);
}

// Each remote rank has one rail peer on each host, and a list of its own there, whatever the hosts' sizes are and
// however their ranks are numbered.
TEST(HostsMap, GivesEachRemoteRankOneList) {
  const std::vector<int> names = {7, 3, 3, 5, 3, 5, 9, 9, 9, 9, 9};
  const Topology topology = Topology::make(names);
  EXPECT_EQ(topology.hosts(), 4);
  int most = 0;
  for (int host = 0; host < topology.hosts(); ++host) {
    std::map<int, std::vector<bool>> lists;
    for (int rank = 0; rank < topology.size(); ++rank) {
      if (topology.host[rank] == host) continue;
      const int peer = topology.rail_peer(rank, host);
      EXPECT_EQ(topology.host[peer], host);
      EXPECT_EQ(topology.rail[peer], topology.rail[rank] % static_cast<int>(topology.ranks[host].size()));
      std::vector<bool>& taken = lists[peer];
      const auto list = static_cast<size_t>(topology.list(rank, host));
      if (taken.size() <= list) taken.resize(list + 1);
      EXPECT_FALSE(taken[list]) << rank << " " << host;
      taken[list] = true;
    }
    for (const auto& [peer, taken] : lists) {
      EXPECT_EQ(std::count(taken.begin(), taken.end(), true), static_cast<int>(taken.size())) << peer;
      most = std::max(most, static_cast<int>(taken.size()));
    }
  }
  EXPECT_EQ(topology.most_lists(), most);
  EXPECT_EQ(topology.most_local(), 5);
  EXPECT_EQ(topology.most_remote(), 10);
}

TEST(HostsMap, NeedsNothingOnOneHost) { EXPECT_EQ(map_of({4}, shape_of(4, 16, 2, 64, 64)).bytes(), 0u); }

// No two regions share a byte, and all lie within what is allocated.
TEST(HostsMap, RegionsDoNotOverlap) {
  for (const std::vector<int>& sizes : {std::vector<int>{2, 2}, {1, 3, 2}, {1, 1, 1}}) {
    int ranks = 0;
    for (const int size : sizes) ranks += size;
    Shape shape = shape_of(ranks, 16, 3, 72, 260);
    shape.channels = 2;
    const bool folds = sizes == std::vector<int>{2, 2};
    const HostsMap map = map_of(sizes, shape, 1, folds);
    std::multimap<uint64_t, uint64_t> words, lists;
    for (int channel = 0; channel < 2; ++channel) {
      for (int bank = 0; bank < HostsMap::kBanks; ++bank) {
        for (int list = 0; list < map.lists; ++list) {
          words.emplace(map.word(channel, bank, list), HostsMap::kWordRoom);
          words.emplace(map.block(channel, bank, list), map.block_bytes());
          lists.emplace(map.inbox_at(channel, bank, list), map.inbox);
          if (map.in_bank == 0) lists.emplace(map.returns_at(channel, bank, list), map.returns);
        }
        for (int host = 0; host < map.hosts; ++host)
          words.emplace(map.staged_block(channel, bank, host), map.block_bytes());
        for (int rank = 0; rank < ranks; ++rank) words.emplace(map.rows_word(channel, bank, rank), HostsMap::kWordRoom);
        lists.emplace(map.staging_at(channel, bank), map.staging);
        if (map.straight > map.staging) lists.emplace(map.straight_at(channel, bank), map.straight);
        if (folds)
          lists.emplace(map.tag(channel, bank, 0, 0, 0), sizeof(FoldTag) * map.tags * static_cast<uint64_t>(map.lists));
      }
    }
    for (const auto& [regions, bytes] : {std::pair(words, map.words_bytes()), {lists, map.lists_bytes()}}) {
      uint64_t end = 0;
      for (const auto& [begin, size] : regions) {
        EXPECT_GE(begin, end);
        end = begin + size;
      }
      EXPECT_LE(end, bytes);
    }
  }
}

// Parts, rows per expert, and rows that return wider than they went, count.
TEST(HostsMap, CountsWhatReturns) {
  Shape shape = shape_of(4, 16, 2, 64, 256);
  const uint64_t whole = map_of({2, 2}, shape).returns;
  EXPECT_GE(whole, 2u * 16 * 256);
  shape.inbox_tokens = 4;
  EXPECT_EQ(map_of({2, 2}, shape).returns, whole / 4);
  shape.inbox_tokens = 0;
  shape.per_expert = 1;
  EXPECT_EQ(map_of({2, 2}, shape).returns, 2 * whole);
  EXPECT_EQ(map_of({2, 2}, shape).in_bank, 0u);  // wider than what went: no room in a bank
}

}  // namespace
}  // namespace tw::test
