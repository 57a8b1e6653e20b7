// What ranks on several hosts have beside their windows: HostsMap's sizes against sizes counted one by one, and the
// largest group that is planned for.
#include "layout/hosts_map.h"

#include <gtest/gtest.h>

#include <vector>

#include "layout/window_map.h"

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

// 64 ranks on 8 hosts, 128 tokens, rows of 7168 bfloat16 both ways, top-8: at most 250 MB, and 60 by domain.
TEST(HostsMap, FitsLargeDecodes) {
  const std::vector<int32_t> sizes(8, 8);
  const Shape shape = shape_of(64, 128, 8, 14336, 14336);
  const HostsMap flat = HostsMap::make(sizes, 3, 5, false);
  EXPECT_EQ(flat.lists, 7);
  EXPECT_EQ(flat.list_row(shape), 14448u);
  EXPECT_EQ(flat.inbox_bytes(shape), 7u * 128 * 14448);
  EXPECT_EQ(flat.staging_bytes(shape), 56u * 128 * 14336);
  EXPECT_EQ(flat.bytes(shape), 231'427'840u);
  EXPECT_LE(flat.bytes(shape), 250'000'000u);

  const HostsMap by_domain = HostsMap::make(sizes, 3, 5, true);
  EXPECT_EQ(by_domain.bytes(shape), 51'797'760u);
  EXPECT_LE(by_domain.bytes(shape), 60'000'000u);

  // Partials for all ranks of the host fit in a bank as dispatches make it: an eighth are the host's own.
  WindowMap window;
  ASSERT_TRUE(WindowMap::make(shape, &window));
  EXPECT_LE(flat.combine_bank(shape, 128), window.bank_bytes());
}

// Each remote rank has one rail peer on each host, whatever the hosts' sizes are.
TEST(HostsMap, GivesEachRemoteRankOneRailPeer) {
  const std::vector<int32_t> sizes = {1, 3, 2, 5};
  for (int32_t host = 0; host < 4; ++host) {
    int32_t remote = 0, lists = 0;
    for (int32_t other = 0; other < 4; ++other) remote += other == host ? 0 : sizes[other];
    for (int32_t rail = 0; rail < sizes[host]; ++rail) {
      const HostsMap map = HostsMap::make(sizes, host, rail, false);
      int32_t counted = 0;
      for (int32_t other = 0; other < 4; ++other) {
        for (int32_t peer = 0; other != host && peer < sizes[other]; ++peer) counted += peer % sizes[host] == rail;
      }
      EXPECT_EQ(map.lists, counted) << host << " " << rail;
      lists += map.lists;
    }
    EXPECT_EQ(lists, remote) << host;
  }
}

// Where ranks are on one host, nothing is needed but room for no words.
TEST(HostsMap, NeedsNothingOnOneHost) {
  const std::vector<int32_t> one = {4};
  const HostsMap map = HostsMap::make(one, 0, 2, false);
  EXPECT_EQ(map.lists, 0);
  EXPECT_EQ(map.bytes(shape_of(4, 16, 2, 64, 64)), 0u);
}

// Parts, and rows that return wider than they went, count.
TEST(HostsMap, CountsWhatReturns) {
  const std::vector<int32_t> sizes = {2, 2};
  Shape shape = shape_of(4, 16, 2, 64, 256);
  const uint64_t row = HostsMap::make(sizes, 0, 0, false).list_row(shape);
  EXPECT_EQ(row, 32u + 64);  // 8 + 2 * 8 + 2 * 4
  EXPECT_EQ(HostsMap::make(sizes, 0, 0, false).staging_bytes(shape), 2u * 16 * 256);
  EXPECT_EQ(HostsMap::make(sizes, 0, 0, true).staging_bytes(shape), 16u * 256);
  EXPECT_EQ(HostsMap::make(sizes, 0, 0, true).inbox_bytes(shape), 16u * 256);
  shape.inbox_tokens = 4;
  EXPECT_EQ(HostsMap::make(sizes, 0, 0, false).staging_bytes(shape), 2u * 4 * 256);
  shape.combine_bytes = 16;
  EXPECT_EQ(HostsMap::make(sizes, 0, 0, true).inbox_bytes(shape), 16u * row);
}

}  // namespace
}  // namespace tw::test
