// Index lists: which rows of a view are whose, how long they are, and how they may be asked for. tests/py has the
// behaviour of the whole (test_index_lists.py).
#include <cstddef>

#include "counted.h"

namespace tw::test {
namespace {

// The lists of a rank, in memory that has more at its end, full of rubbish.
struct Lists {
  static constexpr int32_t kRubbish = 0x7a7a7a7a;

  Lists(twGroup_t group, int64_t rows, int32_t places) : block(places) {
    EXPECT_TW(twSuccess, twGroupIndexCapacity(group, rows, places, &capacity));
    sorted.assign(capacity + 1, kRubbish);
    experts.assign(capacity / places + 1, kRubbish);
  }
  void ask(twDispatchOutput_t* output) {
    output->index_block = block;
    output->sorted_rows = tensor(sorted.data(), twInt32, {capacity});
    output->block_experts = tensor(experts.data(), twInt32, {capacity / block});
    output->num_sorted = tensor(&used, twInt32, {1});
  }

  int32_t block;
  int64_t capacity = 0;
  std::vector<int32_t> sorted, experts;
  int32_t used = -1;
};

// What the lists must be of a view whose local ids, -1 for none, are [rows, top_k]: read off expert by expert.
void expect_lists(const Lists& lists, const int32_t* ids, int64_t rows, int top_k, int experts) {
  const auto none = static_cast<int32_t>(rows * top_k);
  std::vector<int32_t> sorted, of_blocks;
  for (int expert = 0; expert < experts; ++expert) {
    for (int32_t choice = 0; choice < none; ++choice) {
      if (ids[choice] == expert) sorted.push_back(choice);
    }
    while (sorted.size() % lists.block != 0) sorted.push_back(none);
    of_blocks.resize(sorted.size() / lists.block, expert);
  }
  EXPECT_EQ(lists.used, static_cast<int32_t>(sorted.size()));
  ASSERT_LE(static_cast<int64_t>(sorted.size()), lists.capacity);
  sorted.resize(lists.capacity, none);
  of_blocks.resize(lists.capacity / lists.block, -1);
  sorted.push_back(Lists::kRubbish);
  of_blocks.push_back(Lists::kRubbish);
  EXPECT_EQ(lists.sorted, sorted);
  EXPECT_EQ(lists.experts, of_blocks);
}

TEST(IndexLists, OfRankMajor) {
  uint32_t seed = 0;
  for (const int32_t block : {1, 2, 5, 16}) {
    for (const std::vector<int>& tokens : {std::vector<int>{5}, {7, 0, 3}, {1, 2, 7, 4}}) {
      const World world(static_cast<int>(tokens.size()), make_config(6, 3, 7));
      const Traffic traffic = make_traffic(world.config, tokens, ++seed);
      on_all_ranks(world.size(), [&](int rank) {
        SCOPED_TRACE(::testing::Message() << "rank " << rank << " of " << world.size() << ", block " << block);
        Side side(world, traffic, rank, {}, seed);
        const int64_t rows = int64_t{world.size()} * world.config.max_tokens;
        Lists lists(world[rank], rows, block);
        side.input.bound = world.config.max_tokens;
        side.received = TW_DISPATCH_OUTPUT_INIT;
        lists.ask(&side.received);
        EXPECT_TW(twSuccess, twDispatch(world[rank], side.handle, &side.input, &side.received));
        const auto* const ids = static_cast<const int32_t*>(side.received.ids.data);
        expect_lists(lists, ids, rows, world.config.top_k, world.homes.held[rank]);
        EXPECT_TW(twSuccess, twHandleRelease(side.handle));
      });
    }
  }
}

// A dispatch of one rank, in either mode, that is refused, or not.
struct AskedForLists {
  explicit AskedForLists(bool exact = false)
      : world(1, exact ? counting(4, 2, 3) : low_latency()), counted(world, {3}, 1) {
    if (exact) counted.exchange();
    input.payloads[0] = tensor(tokens, twInt32, {3, 2});
    if (exact) output.layout = twFlat;
    lists.emplace_back(world[0], 3, 4);  // all three tokens come
  }
  ~AskedForLists() { (void)twHandleRelease(counted.handles[0]); }
  static twGroupConfig_t low_latency() {
    twGroupConfig_t config = counting(4, 2, 3);
    config.mode = twLowLatency;
    return config;
  }
  twResult_t dispatch() { return twDispatch(world[0], counted.handles[0], &input, &output); }

  World world;
  Counted counted;
  std::vector<Lists> lists;
  int32_t tokens[6] = {};
  twDispatchInput_t input = TW_DISPATCH_INPUT_INIT;
  twDispatchOutput_t output = TW_DISPATCH_OUTPUT_INIT;
};

TEST(IndexLists, OfFlat) {
  AskedForLists asked(true);
  int64_t rows = 0;
  EXPECT_TW(twSuccess, twHandleNumOutputRows(asked.counted.handles[0], twFlat, &rows));
  Lists lists(asked.world[0], rows, 4);
  lists.ask(&asked.output);
  EXPECT_TW(twSuccess, asked.dispatch());
  expect_lists(lists, static_cast<const int32_t*>(asked.output.ids.data), rows, 2, 4);
}

TEST(IndexLists, AreWrittenWhereTheyAreWanted) {
  for (const int which : {0, 1, 2, 3}) {
    AskedForLists asked;
    Lists& lists = asked.lists[0];
    lists.ask(&asked.output);
    if (which != 0) asked.output.sorted_rows.data = nullptr;
    if (which != 1) asked.output.block_experts.data = nullptr;
    if (which != 2) asked.output.num_sorted.data = nullptr;
    EXPECT_TW(twSuccess, asked.dispatch());
    EXPECT_EQ(lists.sorted[0] != Lists::kRubbish, which == 0);
    EXPECT_EQ(lists.experts[0] != Lists::kRubbish, which == 1);
    EXPECT_EQ(lists.used != -1, which == 2);
    EXPECT_EQ(asked.output.sorted_rows.shape[0], lists.capacity) << "shapes are told all the same";
    EXPECT_EQ(asked.output.block_experts.shape[0], lists.capacity / 4);
    EXPECT_EQ(asked.output.num_sorted.shape[0], 1);
  }
}

TEST(IndexLists, WhatIsRefused) {
  const auto refuse = [](const char* sentence, const auto& spoil) {
    AskedForLists asked;
    asked.lists[0].ask(&asked.output);
    spoil(asked.output);
    EXPECT_TW(twInvalidArgument, asked.dispatch());
    EXPECT_TRUE(says(sentence));
  };
  using Output = twDispatchOutput_t;
  refuse("output.index_block is -1; it must be from 1 to 4096", [](Output& output) { output.index_block = -1; });
  refuse("output.index_block is 4097; it must be from 1 to 4096", [](Output& output) { output.index_block = 4097; });
  refuse(
      "output.index_block is 4; it must be 0 in this layout, as only twRankMajor (0) and twFlat (2) have index lists",
      [](Output& output) { output.layout = twExpertMajor; });
  refuse("output.sorted_rows has data", [](Output& output) { output.index_block = 0; });
  refuse("output.sorted_rows has shape", [](Output& output) { ++output.sorted_rows.shape[0]; });
  refuse("output.block_experts has shape", [](Output& output) { --output.block_experts.shape[0]; });
  refuse("output.num_sorted has dtype", [](Output& output) { output.num_sorted.dtype = twInt64; });
  refuse(" overlaps output.sorted_rows", [](Output& output) { output.num_sorted.data = output.sorted_rows.data; });
}

TEST(IndexLists, Capacity) {
  const AskedForLists asked;
  const twGroup_t group = asked.world[0];
  int64_t capacity = -1;
  EXPECT_TW(twSuccess, twGroupIndexCapacity(group, 0, 16, &capacity));
  EXPECT_EQ(capacity, 0);
  EXPECT_TW(twSuccess, twGroupIndexCapacity(group, 1, 16, &capacity));  // two choices begin a block each
  EXPECT_EQ(capacity, 32);
  EXPECT_TW(twSuccess, twGroupIndexCapacity(group, 100, 16, &capacity));  // 4 begun, and 196 more
  EXPECT_EQ(capacity, (4 + 196 / 16) * 16);
  EXPECT_TW(twInvalidArgument, twGroupIndexCapacity(group, 1, 16, nullptr));
  EXPECT_TW(twInvalidArgument, twGroupIndexCapacity(group, -1, 16, &capacity));
  EXPECT_TRUE(says("rows is -1; it must be from 0 to 2147483647"));
  EXPECT_TW(twInvalidArgument, twGroupIndexCapacity(group, 1, 0, &capacity));
  EXPECT_TRUE(says("block is 0; it must be from 1 to 4096"));
  EXPECT_TW(twInvalidArgument, twGroupIndexCapacity(group, 1 << 30, 16, &capacity));
  EXPECT_TRUE(says("places for 2147483648 choices, more than"));
}

// Who was compiled before there were lists has none, and nothing is written behind its struct.
TEST(IndexLists, OlderStruct) {
  AskedForLists asked;
  asked.lists[0].ask(&asked.output);
  asked.output.size = offsetof(twDispatchOutput_t, index_block);
  EXPECT_TW(twSuccess, asked.dispatch());
  EXPECT_EQ(asked.lists[0].used, -1);
  EXPECT_EQ(asked.output.sorted_rows.data, asked.lists[0].sorted.data());
}

}  // namespace
}  // namespace tw::test
