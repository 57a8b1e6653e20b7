// Payloads by column, and what layouts by expert tell of where rows came from: where elements lie, and how they may be
// asked for.
#include <cstddef>
#include <cstring>

#include "counted.h"

namespace tw::test {
namespace {

TEST(Columns, HoldTheRowsOfGrouped) {
  uint32_t seed = 0;
  for (const int32_t alignment : {1, 2, 8}) {
    for (const std::vector<int>& tokens : {std::vector<int>{5}, {7, 0, 3}, {0, 0}, {1, 2, 7, 4}}) {
      SCOPED_TRACE(::testing::Message() << tokens.size() << " ranks, alignment " << alignment);
      twGroupConfig_t config = counting(7, 3, 7);
      config.row_alignment = alignment;
      World world(static_cast<int>(tokens.size()), config);
      Counted counted(world, tokens, ++seed);
      counted.exchange();
      counted.use(twGrouped, true);
      counted.use(twGrouped);
    }
  }
}

// A handle of one rank that has three rows, and a dispatch of it that is refused, or not.
struct Asked {
  Asked() : counted(world, {3}, 1) {
    counted.exchange();
    EXPECT_TW(twSuccess, twHandleNumRecvRows(counted.handles[0], twGrouped, &rows));
    input.payloads[0] = tensor(tokens, twInt32, {3, 2});
    output.layout = twGrouped;
    output.column_major[0] = 1;
  }
  ~Asked() { (void)twHandleRelease(counted.handles[0]); }
  twResult_t dispatch() { return twDispatch(world[0], counted.handles[0], &input, &output); }

  World world{1, counting(4, 2, 4)};
  Counted counted;
  int64_t rows = 0;
  int32_t tokens[6] = {};
  twDispatchInput_t input = TW_DISPATCH_INPUT_INIT;
  twDispatchOutput_t output = TW_DISPATCH_OUTPUT_INIT;
};

TEST(Columns, ShapeIsToldWhereNothingIsGiven) {
  Asked asked;
  EXPECT_TW(twSuccess, asked.dispatch());
  const twTensor_t& payload = asked.output.payloads[0];
  EXPECT_EQ(payload.ndim, 2);
  EXPECT_EQ(payload.shape[0], 2);
  EXPECT_EQ(payload.shape[1], (asked.rows + 3) / 4 * 4);
  EXPECT_EQ(payload.stride[0], payload.shape[1]);
  EXPECT_EQ(payload.stride[1], 1);
}

TEST(Columns, WhatIsRefused) {
  const auto refuse = [](const char* sentence, const auto& spoil) {
    Asked asked;
    spoil(asked);
    EXPECT_TW(twInvalidArgument, asked.dispatch());
    EXPECT_NE(std::strstr(twLastError(), sentence), nullptr) << twLastError();
  };
  int32_t memory[64] = {};
  refuse("output.column_major[0] is 2; it must be 0 or 1", [](Asked& asked) { asked.output.column_major[0] = 2; });
  refuse("output.column_major[0] is -1; it must be 0 or 1", [](Asked& asked) { asked.output.column_major[0] = -1; });
  refuse("output.column_major[0] is 1; only payloads of twExpertMajor (1) and twGrouped (3), from 0 to 0, have columns",
         [](Asked& asked) { asked.output.layout = twFlat; });
  refuse("output.column_major[1] is 1; only payloads of twExpertMajor (1) and twGrouped (3), from 0 to 0, have columns",
         [](Asked& asked) { asked.output.column_major[1] = 1; });
  refuse("output.payloads[0] has shape",
         [&](Asked& asked) { asked.output.payloads[0] = tensor(memory, twInt32, {asked.rows, 2}); });
  refuse("output.payloads[0] has stride", [&](Asked& asked) {
    asked.output.payloads[0] = tensor(memory, twInt32, {2, (asked.rows + 3) / 4 * 4});
    asked.output.payloads[0].stride[0] += 4;
  });
}

// Who was compiled before there were columns has none.
TEST(Columns, OlderStruct) {
  Asked asked;
  asked.output.size = offsetof(twDispatchOutput_t, column_major);
  EXPECT_TW(twSuccess, asked.dispatch());
  EXPECT_EQ(asked.output.payloads[0].shape[0], asked.rows);
  EXPECT_EQ(asked.output.payloads[0].shape[1], 2);
}

twGroupConfig_t low_latency(int experts, int top_k, int max_tokens) {
  twGroupConfig_t config = counting(experts, top_k, max_tokens);
  config.mode = twLowLatency;
  return config;
}

// A rank's dispatch by expert, with memory for all of it that holds -7.
struct ByExpert {
  ByExpert(const World& world, int rank)
      : experts(world.homes.held[rank]), places(int64_t{world.size()} * world.config.max_tokens) {
    column = (places + 3) / 4 * 4;
    rows.assign(experts * 2 * column + 1, -7);
    origins.assign(experts * places + 1, -7);
    source_counts.assign(experts * world.size() + 1, -7);
    output.layout = twExpertMajor;
    output.column_major[0] = 1;
    output.payloads[0] = tensor(rows.data(), twInt32, {experts, 2, column});
    output.origins = tensor(origins.data(), twInt64, {experts, places});
    output.source_counts = tensor(source_counts.data(), twInt32, {experts, world.size()});
  }

  int64_t experts, places, column = 0;
  std::vector<int32_t> rows;
  std::vector<int64_t> origins;
  std::vector<int32_t> source_counts;
  twDispatchOutput_t output = TW_DISPATCH_OUTPUT_INIT;
};

// Every row by expert is that of the view by source that it says it is from, in order, and nothing else is written.
TEST(ExpertMajor, TellsWhereRowsCameFrom) {
  uint32_t seed = 0;
  for (const std::vector<int>& tokens : {std::vector<int>{5}, {7, 0, 3}, {0, 0}, {1, 2, 7, 4}}) {
    const World world(static_cast<int>(tokens.size()), low_latency(7, 3, 7));
    Counted counted(world, tokens, ++seed);
    on_all_ranks(world.size(), [&](int rank) {
      SCOPED_TRACE(::testing::Message() << "rank " << rank << " of " << world.size());
      std::vector<int32_t> sent;
      for (int32_t t = 0; t < tokens[rank]; ++t) sent.insert(sent.end(), {rank, t});
      sent.push_back(0);  // never NULL
      twDispatchInput_t input = TW_DISPATCH_INPUT_INIT;
      input.payloads[0] = tensor(sent.data(), twInt32, {tokens[rank], 2});
      ByExpert got(world, rank);
      twDispatchOutput_t by_source = TW_DISPATCH_OUTPUT_INIT;
      EXPECT_TW(twSuccess, twDispatch(world[rank], counted.handles[rank], &input, &got.output));
      EXPECT_TW(twSuccess, twDispatch(world[rank], counted.handles[rank], &input, &got.output));  // over the same
      EXPECT_TW(twSuccess, twDispatch(world[rank], counted.handles[rank], &input, &by_source));
      const auto* const view = static_cast<const int32_t*>(by_source.payloads[0].data);
      const auto* const counts = static_cast<const int32_t*>(got.output.counts.data);
      std::vector<int32_t> left = got.rows;
      for (int64_t expert = 0; expert < got.experts; ++expert) {
        int64_t before = -1;
        std::vector<int32_t> from(world.size(), 0);
        for (int64_t i = 0; i < got.places; ++i) {
          const int64_t origin = got.origins[expert * got.places + i];
          EXPECT_EQ(origin >= 0, i < counts[expert]);
          if (origin < 0) continue;
          EXPECT_GT(origin, before);
          before = origin;
          ++from[origin / 3 / world.config.max_tokens];
          for (const int64_t j : {0, 1}) {
            int32_t& element = left[(expert * 2 + j) * got.column + i];
            EXPECT_EQ(element, view[origin / 3 * 2 + j]);
            element = -7;
          }
        }
        const int32_t* const told = got.source_counts.data() + expert * world.size();
        EXPECT_EQ(std::vector<int32_t>(told, told + world.size()), from);
      }
      EXPECT_TRUE(std::all_of(left.begin(), left.end(), [](int32_t element) { return element == -7; }));
      EXPECT_EQ(got.origins.back(), -7);
      EXPECT_EQ(got.source_counts.back(), -7);
      EXPECT_TW(twSuccess, twHandleRelease(counted.handles[rank]));
    });
  }
}

TEST(ExpertMajor, WhatIsRefused) {
  const World world(2, low_latency(6, 2, 4));
  const auto refuse = [&](const char* sentence, const auto& spoil) {
    Counted counted(world, {3, 3}, 1);
    on_all_ranks(2, [&](int rank) {
      int32_t sent[6] = {};
      twDispatchInput_t input = TW_DISPATCH_INPUT_INIT;
      input.payloads[0] = tensor(sent, twInt32, {3, 2});
      ByExpert got(world, rank);
      spoil(got.output);
      EXPECT_TW(twInvalidArgument, twDispatch(world[rank], counted.handles[rank], &input, &got.output));
      EXPECT_TRUE(says(sentence)) << twLastError();
      EXPECT_EQ(got.origins[0], -7);
      EXPECT_EQ(got.source_counts[0], -7);
    });
  };
  using Output = twDispatchOutput_t;
  refuse("only payloads of twExpertMajor (1) and twGrouped (3), from 0 to 0, have columns", [](Output& output) {
    output = TW_DISPATCH_OUTPUT_INIT;
    output.column_major[0] = 1;
  });
  refuse("output.payloads[0] has shape [3, 8, 2]; it must be [3, 2, 8]",
         [](Output& output) { output.payloads[0] = tensor(output.payloads[0].data, twInt32, {3, 8, 2}); });
  refuse("output.origins has dtype int32 (5); it must be int64",
         [](Output& output) { output.origins.dtype = twInt32; });
  refuse("output.origins has shape [3, 4]; it must be [3, 8]",
         [](Output& output) { output.origins = tensor(output.origins.data, twInt64, {3, 4}); });
  refuse("output.source_counts has shape [2, 3]; it must be [3, 2]",
         [](Output& output) { output.source_counts = tensor(output.source_counts.data, twInt32, {2, 3}); });
  refuse("output.source_counts has data", [](Output& output) {
    output.layout = twRankMajor;
    output.column_major[0] = 0;
    output.payloads[0] = output.origins = twTensor_t{};
  });
  refuse("overlaps output.origins",
         [](Output& output) { output.source_counts = tensor(output.origins.data, twInt32, {3, 2}); });
}

}  // namespace
}  // namespace tw::test
