// Rows that are read where they came: whole rows of the inbox of one step are found in their message, and nothing else.
#include "cpu/in_place.h"

#include <gtest/gtest.h>

#include <vector>

namespace tw::cpu {
namespace {

constexpr uint64_t kRow = 24;
constexpr int kPositions = 3;  // as many as a token has choices
constexpr int kTokens = 5;

WindowMap make_map(int32_t per_expert = 0) {
  Shape shape;
  shape.ranks = 4;
  shape.experts = 8;
  shape.top_k = kPositions;
  shape.max_tokens = kTokens;
  shape.channels = 2;
  shape.payloads = 1;
  shape.payload_bytes[0] = kRow;
  shape.combine_bytes = kRow;
  shape.per_expert = per_expert;
  WindowMap map;
  EXPECT_TRUE(WindowMap::make(shape, &map));
  return map;
}

struct InPlace : testing::Test {
  const WindowMap map = make_map();
  const std::vector<std::byte> message = std::vector<std::byte>(1024);
  RowsInPlace rows;
  uint64_t place(int token, int position, int bank = 1) const { return map.inbox(1, bank, token, position); }
  uint64_t take(uint64_t offset, uint64_t n, uint64_t from = 0) { return rows.take(offset, message.data() + from, n); }
};

TEST_F(InPlace, RowsAreFoundWhereTheyCame) {
  rows.begin(map, 1, 1);
  EXPECT_EQ(take(place(2, 1), kRow, 8), kRow);
  EXPECT_EQ(take(place(0, 0), kRow, 80), kRow);
  EXPECT_EQ(take(place(kTokens - 1, kPositions - 1), kRow, 200), kRow);
  EXPECT_EQ(rows.find(place(2, 1)), message.data() + 8);
  EXPECT_EQ(rows.find(place(0, 0)), message.data() + 80);
  EXPECT_EQ(rows.find(place(kTokens - 1, kPositions - 1)), message.data() + 200);
  EXPECT_EQ(rows.find(place(2, 0)), nullptr);
  EXPECT_EQ(rows.find(place(2, 2)), nullptr);
}

TEST_F(InPlace, RowsThatFollowEachOtherAreOneRecord) {
  rows.begin(map, 1, 1);
  EXPECT_EQ(take(place(1, 1), 4 * kRow, 16), 4 * kRow);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(rows.find(place(1, 1) + static_cast<uint64_t>(i) * kRow), message.data() + 16 + i * kRow) << i;
  }
  EXPECT_EQ(rows.find(place(1, 0)), nullptr);
  EXPECT_EQ(rows.find(place(2, 2)), nullptr);
}

TEST_F(InPlace, WhatIsBehindTheInboxIsNotTaken) {
  rows.begin(map, 1, 1);
  EXPECT_EQ(take(place(kTokens - 1, kPositions - 1), 2 * kRow), kRow) << "values of choices follow the last row";
  EXPECT_EQ(take(place(kTokens, 0), kRow), 0u);
  EXPECT_EQ(take(place(1, 0), kRow + 7), kRow) << "a part of a row goes to its place";
  EXPECT_EQ(take(place(3, 0), kRow - 1), 0u);
  EXPECT_EQ(rows.find(place(1, 1)), nullptr);
  EXPECT_EQ(rows.find(place(3, 0)), nullptr);
}

TEST_F(InPlace, OtherPlacesAreNotTaken) {
  rows.begin(map, 1, 1);
  EXPECT_EQ(take(place(1, 1) + 8, 2 * kRow), 0u) << "no row begins there";
  EXPECT_EQ(take(place(0, 0) - kRow, kRow), 0u);
  EXPECT_EQ(take(place(1, 1, 0), kRow), 0u) << "the other bank";
  EXPECT_EQ(take(map.inbox(0, 1, 1, 1), kRow), 0u) << "another channel";
  EXPECT_EQ(take(0, kRow), 0u);
  for (int token = 0; token < kTokens; ++token) {
    for (int position = 0; position < kPositions; ++position) EXPECT_EQ(rows.find(place(token, position)), nullptr);
  }
}

TEST_F(InPlace, EachStepBeginsAnew) {
  EXPECT_EQ(take(place(1, 1), kRow), 0u);
  EXPECT_EQ(rows.find(place(1, 1)), nullptr);
  rows.begin(map, 1, 1);
  EXPECT_EQ(take(place(1, 1), kRow), kRow);
  rows.begin(map, 1, 1);
  EXPECT_EQ(rows.find(place(1, 1)), nullptr);
  EXPECT_EQ(take(place(1, 1), kRow), kRow);
  rows.end();
  EXPECT_EQ(rows.find(place(1, 1)), nullptr);
  EXPECT_EQ(take(place(1, 1), kRow), 0u);
}

TEST_F(InPlace, RowsOfChoicesHaveAPlaceForEach) {
  const WindowMap choices = make_map(1);
  rows.begin(choices, 1, 0);
  const uint64_t last = choices.choice_inbox(1, 0, kTokens - 1, kPositions - 1);
  EXPECT_EQ(take(last, kRow, 40), kRow);
  EXPECT_EQ(rows.find(last), message.data() + 40);
}

}  // namespace
}  // namespace tw::cpu
