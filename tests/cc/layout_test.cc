// The byte map of a window: regions apart, aligned, and independent of the bound where S10 says so.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "layout/window_map.h"
#include "reference.h"

namespace tw {
namespace {

constexpr Shape kSmall{2, 4, 2, 3, 2, 2, {6, 5}, 10};

constexpr WindowMap made(const Shape& shape) {
  WindowMap map;
  WindowMap::make(shape, &map);
  return map;
}

// A device compiles the same map, and tables of offsets may be constants.
constexpr WindowMap kMap = made(kSmall);
static_assert(kSmall.fan_out() == 2);
static_assert(meta_bytes(3) == 32);
static_assert(kMap.bytes() > 2 * kMap.lane_bytes());
static_assert(kMap.word(1, 0, 0) - kMap.word(0, 0, 0) == kMap.lane_bytes());
static_assert(kMap.note(0, 1, 1) == kMap.word(0, 1, 1) + kNoteOffset);

struct Region {
  uint64_t begin;
  uint64_t end;
  const char* what;
};

void expect_apart(std::vector<Region> regions, uint64_t bytes) {
  std::sort(regions.begin(), regions.end(), [](const Region& a, const Region& b) { return a.begin < b.begin; });
  for (size_t i = 0; i < regions.size(); ++i) {
    ASSERT_LE(regions[i].end, bytes) << regions[i].what;
    if (i == 0) continue;
    ASSERT_LE(regions[i - 1].end, regions[i].begin) << regions[i - 1].what << " and " << regions[i].what;
  }
}

void add_header(const WindowMap& map, std::vector<Region>* regions) {
  const Shape& shape = map.shape();
  regions->push_back({WindowMap::waiters(), WindowMap::waiters() + 4, "waiters"});
  for (int rank = 0; rank < shape.ranks; ++rank) {
    regions->push_back({WindowMap::abort_word(rank), WindowMap::abort_word(rank) + 8, "abort word"});
  }
  for (int lane = 0; lane < shape.lanes; ++lane) {
    for (int bank = 0; bank < 2; ++bank) {
      for (int source = 0; source < shape.ranks; ++source) {
        regions->push_back({map.word(lane, bank, source), map.word(lane, bank, source) + 8, "word"});
        regions->push_back({map.note(lane, bank, source), map.note(lane, bank, source) + 8, "note"});
      }
    }
  }
}

void add_rows(const WindowMap& map, int lane, int bank, int bound, std::vector<Region>* regions) {
  const Shape& shape = map.shape();
  for (int source = 0; source < shape.ranks; ++source) {
    for (int p = 0; p < bound; ++p) {
      for (int q = 0; q < shape.payloads; ++q) {
        const uint64_t at = map.payload(lane, bank, q, source, p, bound);
        regions->push_back({at, at + shape.payload_bytes[q], "payload"});
      }
      const uint64_t meta = map.meta(lane, bank, source, p, bound);
      regions->push_back({meta, meta + meta_bytes(shape.top_k), "meta"});
    }
  }
}

void add_inbox(const WindowMap& map, int lane, int bank, std::vector<Region>* regions) {
  const Shape& shape = map.shape();
  for (int token = 0; token < shape.max_tokens; ++token) {
    for (int position = 0; position < shape.fan_out(); ++position) {
      const uint64_t at = map.inbox(lane, bank, token, position);
      regions->push_back({at, at + shape.combine_bytes, "inbox"});
    }
  }
}

template <class Visit>
void each_small_shape(Visit&& visit) {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    for (int top_k = 1; top_k <= 4; top_k += 3) {
      for (int tokens = 1; tokens <= 4; tokens += 3) {
        for (int lanes = 1; lanes <= 3; lanes += 2) {
          for (const uint64_t row : {1ull, 7ull, 300ull}) {
            for (const uint64_t combined : {2ull, 5000ull}) {
              visit(Shape{ranks, 8, top_k, tokens, lanes, 2, {row, 3}, combined});
              visit(Shape{ranks, 8, top_k, tokens, lanes, 8, {1, 2, 3, 4, 5, 6, 7, row}, combined});
            }
          }
        }
      }
    }
  }
}

// A bank holds the rows of a dispatch or the inbox of a combine; every assignment of kinds to banks must be free of
// overlap, with every other lane and the header.
TEST(Layout, RegionsNeverOverlap) {
  each_small_shape([](const Shape& shape) {
    WindowMap map;
    ASSERT_TRUE(WindowMap::make(shape, &map));
    for (int bound = 1; bound <= shape.max_tokens; ++bound) {
      for (int kinds = 0; kinds < 4; ++kinds) {
        std::vector<Region> regions;
        add_header(map, &regions);
        for (int lane = 0; lane < shape.lanes; ++lane) {
          for (int bank = 0; bank < 2; ++bank) {
            if ((kinds >> bank & 1) != 0) add_inbox(map, lane, bank, &regions);
            if ((kinds >> bank & 1) == 0) add_rows(map, lane, bank, bound, &regions);
          }
        }
        ASSERT_NO_FATAL_FAILURE(expect_apart(std::move(regions), map.bytes()));
      }
    }
  });
}

TEST(Layout, Alignment) {
  each_small_shape([](const Shape& shape) {
    const WindowMap map = made(shape);
    EXPECT_EQ(map.bytes() % kPageAlignment, 0u);
    EXPECT_EQ(map.lane_bytes() % kPageAlignment, 0u);
    EXPECT_EQ(WindowMap::waiters() % 4, 0u);
    EXPECT_EQ(WindowMap::abort_word(shape.ranks - 1) % 8, 0u);
    for (int lane = 0; lane < shape.lanes; ++lane) {
      for (int bank = 0; bank < 2; ++bank) {
        EXPECT_EQ(map.inbox(lane, bank, 0, 0) % kPageAlignment, 0u);
        EXPECT_EQ(map.meta(lane, bank, 0, 0, 1) % kRegionAlignment, 0u);
        for (int q = 0; q < shape.payloads; ++q) {
          EXPECT_EQ(map.payload(lane, bank, q, 0, 0, 1) % kRegionAlignment, 0u);
        }
        for (int source = 0; source < shape.ranks; ++source) {
          EXPECT_EQ(map.word(lane, bank, source) % kWordStride, 0u);  // a cache line for each writer
        }
      }
    }
  });
}

// S10: a slower rank may still read a region while a faster one already works under another bound.
TEST(Layout, BoundMovesNothingOutsideABank) {
  each_small_shape([](const Shape& shape) {
    const WindowMap map = made(shape);
    for (int lane = 0; lane < shape.lanes; ++lane) {
      for (int bank = 0; bank < 2; ++bank) {
        const uint64_t begin = map.inbox(lane, bank, 0, 0);
        const uint64_t end = bank == 0 ? map.inbox(lane, 1, 0, 0) : map.word(lane, 0, 0) + map.lane_bytes();
        for (int bound = 1; bound <= shape.max_tokens; ++bound) {
          for (int q = 0; q < shape.payloads; ++q) {
            EXPECT_GE(map.payload(lane, bank, q, 0, 0, bound), begin);
            EXPECT_LE(map.payload(lane, bank, q, shape.ranks, 0, bound), end);
          }
          EXPECT_GE(map.meta(lane, bank, 0, 0, bound), begin);
          EXPECT_LE(map.meta(lane, bank, shape.ranks, 0, bound), end);
        }
      }
    }
  });
}

// A region is a tensor [N, b, row]: a view of it needs no copy.
TEST(Layout, RowsOfAPayloadHaveNoGaps) {
  const WindowMap map = made(kSmall);
  for (int bound = 1; bound <= kSmall.max_tokens; ++bound) {
    uint64_t next = map.payload(1, 1, 1, 0, 0, bound);
    for (int source = 0; source < kSmall.ranks; ++source) {
      for (int p = 0; p < bound; ++p, next += kSmall.payload_bytes[1]) {
        EXPECT_EQ(map.payload(1, 1, 1, source, p, bound), next);
      }
    }
  }
}

unsigned __int128 wide_bytes(const Shape& s) {
  using Wide = unsigned __int128;
  const auto align = [](Wide a, Wide to) { return (a + to - 1) / to * to; };
  const Wide rows = static_cast<Wide>(s.ranks) * s.max_tokens;
  Wide dispatch = 0;
  for (int q = 0; q < s.payloads; ++q) dispatch = align(dispatch + rows * s.payload_bytes[q], kRegionAlignment);
  dispatch += rows * meta_bytes(s.top_k);
  const Wide inbox = static_cast<Wide>(s.max_tokens) * s.fan_out() * s.combine_bytes;
  const Wide bank = align(std::max(dispatch, inbox), kPageAlignment);
  const Wide lane = align(static_cast<Wide>(2) * kWordStride * s.ranks, kPageAlignment) + 2 * bank;
  return align(64 + static_cast<Wide>(8) * s.ranks, kPageAlignment) + lane * s.lanes;
}

TEST(Layout, OverflowIsRefused) {
  int refused = 0;
  int taken = 0;
  for (uint32_t i = 0; i < 20000; ++i) {
    const auto pick = [i](uint64_t what, uint32_t n) { return test::mix({i, what}) % n; };
    const auto size = [&](uint64_t what) { return (uint64_t{test::mix({i, what})} << 29 | 1) >> pick(what + 50, 61); };
    Shape shape{static_cast<int32_t>(1 + pick(1, 1024)),
                64,
                static_cast<int32_t>(1 + pick(2, 64)),
                static_cast<int32_t>(1 + pick(3, (1 << 28) - 1)) >> pick(9, 27),
                static_cast<int32_t>(1 + pick(4, 64)),
                2,
                {1 + size(5), 1 + size(6)},
                1 + size(7)};
    shape.max_tokens = std::max(shape.max_tokens, 1);
    WindowMap map;
    const bool ok = WindowMap::make(shape, &map);
    const unsigned __int128 want = wide_bytes(shape);
    if (want > UINT64_MAX / 2) {
      EXPECT_FALSE(ok);
      ++refused;
    } else if (want < UINT64_MAX / 4) {
      EXPECT_TRUE(ok);
    }
    if (ok) {
      EXPECT_TRUE(want == map.bytes());
      ++taken;
    }
  }
  EXPECT_GT(refused, 100);
  EXPECT_GT(taken, 100);
}

}  // namespace
}  // namespace tw
