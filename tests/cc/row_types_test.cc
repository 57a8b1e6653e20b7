// Rows of other types in one group: what the C API refuses, and tells. tests/py has their behaviour.
#include "harness.h"

namespace tw::test {
namespace {

// A group of 8 bfloat16, with room for twice as many bytes.
twGroupConfig_t roomy() {
  twGroupConfig_t config = make_config(6, 2, 4);
  config.dispatch_room = 32;
  config.combine_room = 32;
  return config;
}

TEST(RowTypes, RoomIsPartOfTheConfiguration) {
  twWindowBytes_t own = {};
  own.size = sizeof own;
  twWindowBytes_t more = own;
  twGroupConfig_t config = make_config(6, 2, 1024);
  ASSERT_TW(twSuccess, twGroupWindowBytes(&config, 2, &own));
  config.dispatch_room = config.combine_room = 16;  // what the rows have anyway
  ASSERT_TW(twSuccess, twGroupWindowBytes(&config, 2, &more));
  EXPECT_EQ(more.window, own.window);
  config.dispatch_room = 1600;
  ASSERT_TW(twSuccess, twGroupWindowBytes(&config, 2, &more));
  EXPECT_GT(more.window, 10 * own.window);
  config.dispatch_room = UINT64_MAX;
  EXPECT_TW(twInvalidArgument, twGroupWindowBytes(&config, 2, &more));
  EXPECT_TRUE(says("config.dispatch_room is"));
}

// A call that names what does not fit is refused, and its peers hear of it at once; the group goes on.
TEST(RowTypes, RefusedRowsAreToldAtOnce) {
  const twGroupConfig_t config = roomy();
  World world(3, config);
  struct Bad {
    int32_t num_types;
    twPayload_t types[2];
    const char* what;
  };
  const Bad bad[] = {
      {1, {{twBfloat16, 17}}, "input.types[0].elements is 17; it must be from 1 to 16"},
      {2, {{twBfloat16, 16}, {twUint8, 1}}, "takes rows of 33 bytes; config.dispatch_room has room for 32"},
      {1, {{twUint8, 0}}, "input.types[0].elements is 0"},
      {1, {{static_cast<twDtype_t>(99), 1}}, "input.types[0].dtype is 99"},
      {TW_MAX_PAYLOADS + 1, {}, "input.num_types is 9; it must be from 0 to 8"},
      {-1, {}, "input.num_types is -1"}};
  uint32_t round = 0;
  for (const Bad& each : bad) {
    ++round;
    Exchange exchange(world, make_traffic(config, {4, 4, 4}, round), {}, round);
    twDispatchInput_t& input = exchange[1].input;
    const twDispatchInput_t good = input;
    input.num_types = each.num_types;
    std::copy(std::begin(each.types), std::end(each.types), input.types);
    EXPECT_TW(twSuccess, exchange[0].dispatch(true));
    EXPECT_TW(twInvalidArgument, exchange[1].dispatch(true));
    EXPECT_TRUE(says(each.what));
    EXPECT_TW(twSuccess, exchange[2].dispatch(true));
    for (const int rank : {0, 2}) {
      EXPECT_TW(twPeerRefused, exchange[rank].complete());
      EXPECT_EQ(error_of(world[rank]).peer, 1);
    }
    input = good;
    exchange.dispatch();
    exchange.combine();
  }
}

TEST(RowTypes, RefusedSumsAreToldAtOnce) {
  const twGroupConfig_t config = roomy();
  World world(2, config);
  struct Bad {
    twDtype_t dtype;
    int64_t elements;
    const char* what;
  };
  uint32_t round = 0;
  for (const Bad& each : {Bad{twFloat32, 9, "input.elements is 9; it must be from 1 to 8"},
                          {twBfloat16, 0, "input.elements is 0; it must be from 1 to 16"},
                          {twDtypeNone, 4, "input.wire_dtype is"},
                          {twInt32, 4, "it must be float32, bfloat16, float16 or float8_e4m3"}}) {
    ++round;
    Exchange exchange(world, make_traffic(config, {4, 4}, round), {}, round);
    exchange.dispatch();
    exchange[1].rows.wire_dtype = each.dtype;
    exchange[1].rows.elements = each.elements;
    EXPECT_TW(twSuccess, exchange[0].combine(true));
    EXPECT_TW(twInvalidArgument, exchange[1].combine(true));
    EXPECT_TRUE(says(each.what));
    EXPECT_TW(twPeerRefused, exchange[0].complete());
    exchange[1].rows.wire_dtype = twDtypeNone;
    exchange[1].rows.elements = 0;
    exchange.combine();
  }
}

// Ranks whose rows differ would read each other's at wrong places, or as another type: all of them hear of it, and the
// group goes on.
TEST(RowTypes, RanksThatDifferAreTold) {
  const twGroupConfig_t config = roomy();
  World world(2, config);
  for (uint32_t round = 0; round < 2; ++round) {
    Exchange exchange(world, make_traffic(config, {4, 3}, round), {}, round);
    twDispatchInput_t& input = exchange[1].input;
    input.num_types = 1;
    input.types[0] = {twUint16, 8};  // as many bytes
    input.payloads[0].dtype = twUint16;
    for (int rank = 0; rank < 2; ++rank) EXPECT_TW(twSuccess, exchange[rank].dispatch(true));
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_TW(twBoundMismatch, exchange[rank].complete());
      EXPECT_TRUE(says("the types of rows of twDispatch"));
    }
    input.num_types = 0;
    input.payloads[0].dtype = config.payloads[0].dtype;
    exchange.dispatch();
    exchange[0].rows.wire_dtype = twFloat16;
    exchange[0].rows.elements = 8;
    for (int rank = 0; rank < 2; ++rank) EXPECT_TW(twSuccess, exchange[rank].combine(true));
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_TW(twBoundMismatch, exchange[rank].complete());
      EXPECT_TRUE(says("differ in the group or the rows of twCombine"));
    }
    exchange[0].rows.wire_dtype = twDtypeNone;
    exchange[0].rows.elements = 0;
    exchange.combine();
  }
}

// Naming the group's own rows is naming none: a rank that does so makes the same call as one that does not.
TEST(RowTypes, OwnRowsMayBeNamed) {
  const twGroupConfig_t config = roomy();
  World world(2, config);
  Exchange exchange(world, make_traffic(config, {4, 3}, 1), {}, 1);
  exchange[1].input.num_types = 1;
  exchange[1].input.types[0] = config.payloads[0];
  exchange[1].rows.wire_dtype = config.combine_dtype;
  exchange[1].rows.elements = config.combine_elements;
  exchange.dispatch();
  exchange.combine();
}

}  // namespace
}  // namespace tw::test
