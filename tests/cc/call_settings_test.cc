// Settings that a call names in place of its group's: what the C API refuses, and what reaches the backend. tests/py
// has their behaviour.
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

}  // namespace
}  // namespace tw::test
