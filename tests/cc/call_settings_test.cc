// Settings that a call names in place of its group's: what the C API refuses, and what reaches the backend. tests/py
// has their behaviour.
#include "counted.h"
#include "pretended.h"

namespace tw::test {
namespace {

// A call's own limit reaches the kernels that send and those that receive, also where these are launched later.
TEST_F(PretendedGroup, CallsHaveLimitsOfTheirOwn) {
  twHandle_t handle = make_handle();
  EXPECT_TW(twSuccess, dispatch(handle, 4, true, 3));
  EXPECT_TW(twSuccess, twComplete(&group, handle, stream));
  EXPECT_TW(twSuccess, combine(handle, 2));
  EXPECT_TW(twSuccess, dispatch(handle));
  EXPECT_TW(twSuccess, combine(handle, INT32_MAX));
  EXPECT_EQ(device->limits, (std::vector<int32_t>{3, 3, 2, 2, 0, 0, INT32_MAX, INT32_MAX}));
  twAllGatherVInput_t gather = TW_ALL_GATHER_V_INPUT_INIT;
  gather.stream = stream;
  gather.sm_limit = 7;
  gather.tensors[0] = tensor(rows, twBfloat16, {4, 8});
  twAllGatherVOutput_t gathered = TW_ALL_GATHER_V_OUTPUT_INIT;
  EXPECT_TW(twSuccess, twAllGatherV(&group, &gather, &gathered));
  EXPECT_EQ(device->limits.back(), 7);
  gather.sm_limit = -1;
  EXPECT_TW(twInvalidArgument, twAllGatherV(&group, &gather, &gathered));
  EXPECT_TRUE(says("input.sm_limit is -1; it must be from 0 to 2147483647"));
  EXPECT_TW(twInvalidArgument, dispatch(handle, 4, false, -2));
  EXPECT_TRUE(says("input.sm_limit is -2; it must be from 0 to 2147483647"));
  EXPECT_TW(twSuccess, dispatch(handle));
  EXPECT_TW(twInvalidArgument, combine(handle, -3));
  EXPECT_TRUE(says("input.sm_limit is -3; it must be from 0 to 2147483647"));
  EXPECT_EQ(device->refusals, "gdc");
  EXPECT_TW(twSuccess, twHandleDestroy(handle));
}

// ---- limits of an exchange of counts

twGroupConfig_t dropping(int32_t room) {
  twGroupConfig_t config = counting(5, 2, 4);
  config.overflow = twOverflowDrop;
  config.max_recv_tokens = room;
  config.row_alignment = 2;
  return config;
}

// Each exchange has limits of its own, and those of ranks may differ in the alignment.
TEST(CallSettings, CountsHaveLimitsOfTheirOwn) {
  World world(3, dropping(10));
  for (const twLayout_t layout : {twFlat, twGrouped}) {
    for (const int32_t room : {0, 1, 3, 10}) {
      SCOPED_TRACE(room);
      Counted counted(world, {4, 4, 4}, 9);
      counted.max_recv_tokens = room;
      counted.row_alignment = {1, 0, 8};
      counted.exchange();
      counted.use(layout);
    }
  }
}

TEST(CallSettings, CountsInFlight) {
  twGroupConfig_t config = dropping(10);
  config.lanes = 2;
  World world(3, config);
  for (uint32_t round = 0; round < 3; ++round) {
    Counted one(world, {4, 3, 4}, 5 * round + 1);
    Counted other(world, {2, 4, 4}, 5 * round + 2);
    one.max_recv_tokens = 3, one.row_alignment = {4, 1, 2};
    other.max_recv_tokens = 5;
    one.send(), other.send();
    other.complete(), one.complete();
    other.use(twGrouped), one.use(twGrouped);
  }
}

TEST(CallSettings, OverflowFollowsTheCall) {
  World world(2, counting(2, 1, 4));
  Counted counted(world, {4, 4}, 1);
  std::vector<int32_t> ids(4, 1);
  const twTensor_t crowd = tensor(ids.data(), twInt32, {4, 1});
  for (int rank = 0; rank < 2; ++rank) EXPECT_TW(twSuccess, twHandleUpdate(counted.handles[rank], &crowd, nullptr));
  counted.max_recv_tokens = 7;
  for (int rank = 0; rank < 2; ++rank) EXPECT_TW(twSuccess, counted.exchange(rank, true));
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_TW(twRecvOverflow, counted.complete(rank));
    EXPECT_TRUE(says("rank 1 would receive 8 rows; input.max_recv_tokens is 7 (nothing was sent)"));
    EXPECT_TW(twSuccess, twHandleRelease(counted.handles[rank]));
  }
  counted.max_recv_tokens = 8;
  for (int rank = 0; rank < 2; ++rank) EXPECT_TW(twSuccess, counted.exchange(rank, true));
  for (int rank = 0; rank < 2; ++rank) EXPECT_TW(twSuccess, counted.complete(rank));
}

// Ranks that expect other rooms would write at other places: both hear of it, and the group goes on.
TEST(CallSettings, RoomsThatDifferAreTold) {
  World world(3, dropping(10));
  Counted counted(world, {4, 4, 4}, 3);
  for (int rank = 0; rank < 3; ++rank) {
    counted.max_recv_tokens = rank == 1 ? 4 : 10;  // the group's, named or not
    if (rank == 2) counted.max_recv_tokens = 0;
    EXPECT_TW(twSuccess, counted.exchange(rank, true));
  }
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_TW(twBoundMismatch, counted.complete(rank));
    EXPECT_TRUE(says("input.max_recv_tokens of twExchangeCounts differs: rank"));
    EXPECT_TRUE(says("rank 1 has 4"));
    EXPECT_EQ(error_of(world[rank]).phase, twPhaseCounts);
    EXPECT_EQ(error_of(world[rank]).sticky, 0);
  }
  for (int rank = 0; rank < 3; ++rank) EXPECT_TW(twSuccess, twHandleRelease(counted.handles[rank]));
  counted.max_recv_tokens = 4;
  counted.exchange();
  counted.use(twGrouped);
}

TEST(CallSettings, RefusedLimitsOfCountsAreToldAtOnce) {
  World world(2, dropping(6));
  struct Bad {
    int32_t max_recv_tokens, row_alignment, sm_limit;
    const char* what;
  };
  const Bad bad[] = {{7, 0, 0, "input.max_recv_tokens is 7; it must be from 1 to 6"},
                     {-1, 0, 0, "input.max_recv_tokens is -1; it must be from 1 to 6"},
                     {0, 3, 0, "input.row_alignment is 3; it must be a power of two from 1 to 256"},
                     {0, 512, 0, "input.row_alignment is 512; it must be from 1 to 256"},
                     {0, 0, -1, "input.sm_limit is -1; it must be from 0 to 2147483647"}};
  for (const Bad& each : bad) {
    Counted counted(world, {4, 2}, 1);
    twCountsInput_t input = TW_COUNTS_INPUT_INIT;
    input.max_recv_tokens = each.max_recv_tokens;
    input.row_alignment = each.row_alignment;
    input.sm_limit = each.sm_limit;
    EXPECT_TW(twInvalidArgument, twExchangeCounts(world[1], counted.handles[1], &input));
    EXPECT_TRUE(says(each.what));
    EXPECT_TW(twPeerRefused, counted.exchange(0));
    counted.exchange();
    counted.use(twGrouped);
  }
}

// ---- as a device sees it, whose host does not know the counts

class PretendedExactGroup : public PretendedGroup {
 protected:
  PretendedExactGroup() : PretendedGroup(exact()) { layout = twFlat; }
  static twGroupConfig_t exact() {
    twGroupConfig_t config = make_config(6, 2, 4);
    config.mode = twHighThroughput;
    config.lease_bytes = 1 << 16;
    return config;
  }
  twResult_t count(twHandle_t handle, int32_t room, int32_t alignment = 0) {
    twCountsInput_t input = TW_COUNTS_INPUT_INIT;
    input.stream = stream;
    input.max_recv_tokens = room;
    input.row_alignment = alignment;
    return twExchangeCounts(&group, handle, &input);
  }
  int64_t rows_of(twHandle_t handle, twLayout_t of) {
    int64_t rows = -1;
    EXPECT_TW(twSuccess, twHandleNumOutputRows(handle, of, &rows));
    return rows;
  }
};

TEST_F(PretendedExactGroup, OutputsHaveTheRoomOfTheCounts) {
  twHandle_t handle = make_handle();
  EXPECT_TW(twSuccess, count(handle, 3, 4));
  EXPECT_EQ(rows_of(handle, twFlat), 3);
  EXPECT_EQ(rows_of(handle, twGrouped), 24) << "3 rows of 2 experts each, and up to 3 more for each of 6";
  EXPECT_TW(twSuccess, dispatch(handle));
  EXPECT_EQ(received.payloads[0].shape[0], 3);
  EXPECT_TW(twSuccess, combine(handle));
  EXPECT_TW(twSuccess, count(handle, 0));
  EXPECT_EQ(rows_of(handle, twFlat), 4) << "the group's again";
  EXPECT_EQ(rows_of(handle, twGrouped), 8);
  EXPECT_TW(twInvalidUsage, combine(handle)) << "rows that went out by other counts have no way back";
  EXPECT_TW(twSuccess, dispatch(handle));
  EXPECT_TW(twSuccess, combine(handle));
  EXPECT_TW(twSuccess, count(handle, 4, 2));
  received.payloads[0].data = rows;
  EXPECT_TW(twSuccess, combine(handle)) << "of another alignment they have";
  EXPECT_TW(twSuccess, twHandleDestroy(handle));
}

// Replays write as many rows as the handle's counts say into the tensors that were captured.
TEST_F(PretendedExactGroup, GraphsKeepTheLimitsOfTheirHandles) {
  twHandle_t handle = make_handle();
  const twTensor_t tensor_of_ids = tensor(ids, twInt32, {4, 2});
  EXPECT_TW(twSuccess, count(handle, 2, 8));
  EXPECT_TW(twSuccess, count(handle, 3, 4));
  device->capturing = true;
  EXPECT_TW(twInvalidUsage, count(handle, 2, 4));
  EXPECT_TRUE(says("input.max_recv_tokens is 2, but was 3 in the handle's last exchange of counts"));
  EXPECT_TW(twSuccess, count(handle, 3, 4));
  EXPECT_TW(twSuccess, dispatch(handle));
  device->capturing = false;
  EXPECT_TW(twSuccess, combine(handle));
  EXPECT_TW(twSuccess, twHandleUpdate(handle, &tensor_of_ids, nullptr));
  EXPECT_TW(twInvalidUsage, count(handle, 4, 4));
  EXPECT_TW(twInvalidUsage, count(handle, 3, 8));
  EXPECT_TRUE(says("input.row_alignment is 8, but was 4 in the handle's last exchange of counts"));
  EXPECT_TW(twSuccess, count(handle, 3, 4));
  twHandle_t other = make_handle();
  EXPECT_TW(twSuccess, count(other, 4, 8)) << "another handle is in no graph";
  for (twHandle_t each : {handle, other}) EXPECT_TW(twSuccess, twHandleDestroy(each));
}

}  // namespace
}  // namespace tw::test
