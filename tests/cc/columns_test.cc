// Payloads of the grouped layout by column: where their elements lie, and how they may be asked for.
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
  refuse("output.column_major[0] is 1; only payloads of twGrouped (3), from 0 to 0, have columns",
         [](Asked& asked) { asked.output.layout = twFlat; });
  refuse("output.column_major[1] is 1; only payloads of twGrouped (3), from 0 to 0, have columns",
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

}  // namespace
}  // namespace tw::test
