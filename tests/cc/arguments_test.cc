// Arguments: everything NULL, stale, out of range or of another version is an error with a sentence, never a crash.
#include <cstring>

#include "harness.h"

namespace tw::test {
namespace {

TEST(Arguments, NullEverything) {
  const twTensor_t ids = tensor(nullptr, twInt32, {0, 2});
  int32_t number = 0;
  size_t bytes = 0;
  EXPECT_TW(twInvalidArgument, twCommCreateLocal(nullptr, 2, nullptr));
  EXPECT_TW(twInvalidArgument, twCommCreateShm(nullptr, 0, 1, nullptr));
  EXPECT_TW(twInvalidArgument, twCommCreateCuda(nullptr, 0, 1, nullptr));
  EXPECT_TW(twInvalidArgument, twCommDestroy(nullptr));
  EXPECT_TW(twInvalidArgument, twCommRank(nullptr, &number, &number));
  EXPECT_TW(twInvalidArgument, twCommDevice(nullptr, &number));
  EXPECT_TW(twInvalidArgument, twGroupWindowBytes(nullptr, 2, nullptr));
  EXPECT_TW(twInvalidArgument, twGroupCreate(nullptr, nullptr, nullptr));
  EXPECT_TW(twInvalidArgument, twGroupDestroy(nullptr));
  EXPECT_TW(twInvalidArgument, twGroupShrink(nullptr, nullptr, nullptr));
  EXPECT_TW(twInvalidArgument, twGroupInfo(nullptr, nullptr));
  EXPECT_TW(twInvalidArgument, twGroupGetError(nullptr, nullptr));
  EXPECT_TW(twInvalidArgument, twHandleCreate(nullptr, nullptr, nullptr, nullptr, nullptr));
  EXPECT_TW(twInvalidArgument, twHandleUpdate(nullptr, &ids, nullptr));
  EXPECT_TW(twInvalidArgument, twHandleDestroy(nullptr));
  EXPECT_TW(twInvalidArgument, twHandleRelease(nullptr));
  EXPECT_TW(twInvalidArgument, twHandleMemBytes(nullptr, &bytes));
  EXPECT_TW(twInvalidArgument, twHandleNumRecvTokens(nullptr, nullptr, nullptr));
  EXPECT_TW(twInvalidArgument, twDispatch(nullptr, nullptr, nullptr, nullptr));
  EXPECT_TW(twInvalidArgument, twCombine(nullptr, nullptr, nullptr, nullptr));
  EXPECT_TW(twInvalidArgument, twComplete(nullptr, nullptr, nullptr));
  EXPECT_TW(twInvalidArgument, twEnvironment(0, nullptr, nullptr, nullptr));
  EXPECT_TRUE(says("NULL"));
}

TEST(Arguments, NullWithALiveGroup) {
  World world(1, make_config(6, 2, 4));
  EXPECT_TW(twInvalidArgument, twGroupInfo(world[0], nullptr));
  EXPECT_TW(twInvalidArgument, twGroupGetError(world[0], nullptr));
  EXPECT_TW(twInvalidArgument, twHandleMemBytes(world[0], nullptr));
  twHandle_t handle = nullptr;
  EXPECT_TW(twInvalidArgument, twHandleCreate(&handle, world[0], nullptr, nullptr, nullptr));
  EXPECT_TW(twInvalidArgument, twDispatch(world[0], nullptr, nullptr, nullptr));
  EXPECT_TW(twInvalidArgument, twCombine(world[0], nullptr, nullptr, nullptr));
  EXPECT_TW(twInvalidArgument, twComplete(world[0], nullptr, nullptr));
  Exchange exchange(world, make_traffic(world.config, {4}, 1), {}, 1);
  Side& side = exchange[0];
  EXPECT_TW(twInvalidArgument, twDispatch(world[0], side.handle, nullptr, nullptr));
  EXPECT_TW(twInvalidArgument, twDispatch(world[0], side.handle, &side.input, nullptr));
  side.input.payloads[0].data = nullptr;
  EXPECT_TW(twInvalidArgument, side.dispatch());
  EXPECT_TRUE(says("input.payloads[0] has data NULL"));
}

TEST(Arguments, StaleObjects) {
  twComm_t comm = nullptr;
  ASSERT_TW(twSuccess, twCommCreateLocal(&comm, 1, nullptr));
  const twGroupConfig_t config = make_config(6, 2, 4);
  twGroup_t group = nullptr;
  ASSERT_TW(twSuccess, twGroupCreate(&group, comm, &config));
  const twTensor_t ids = tensor(nullptr, twInt32, {0, 2});
  twHandle_t handle = nullptr;
  twHandle_t orphan = nullptr;
  ASSERT_TW(twSuccess, twHandleCreate(&handle, group, &ids, nullptr, nullptr));
  ASSERT_TW(twSuccess, twHandleCreate(&orphan, group, &ids, nullptr, nullptr));
  EXPECT_TW(twInvalidUsage, twCommDestroy(comm)) << "it has a group";
  EXPECT_TW(twSuccess, twHandleDestroy(handle));
  EXPECT_TW(twInvalidArgument, twHandleDestroy(handle));
  EXPECT_TW(twInvalidArgument, twDispatch(group, handle, nullptr, nullptr));
  EXPECT_TW(twSuccess, twGroupDestroy(group));
  EXPECT_TW(twInvalidArgument, twGroupDestroy(group));
  EXPECT_TW(twInvalidArgument, twHandleDestroy(orphan)) << "it ended with its group";
  EXPECT_TW(twSuccess, twCommDestroy(comm));
  EXPECT_TW(twInvalidArgument, twCommDestroy(comm));
  EXPECT_TW(twInvalidArgument, twGroupCreate(&group, comm, &config));
}

// What was destroyed stays so: its successors, which may get the same memory, are not taken for it.
TEST(Arguments, StaleObjectsAreNotTheirSuccessors) {
  twComm_t comm = nullptr;
  ASSERT_TW(twSuccess, twCommCreateLocal(&comm, 1, nullptr));
  const twGroupConfig_t config = make_config(6, 2, 4);
  const twTensor_t ids = tensor(nullptr, twInt32, {0, 2});
  std::vector<twGroup_t> old_groups;
  std::vector<twHandle_t> old_handles;
  for (int round = 0; round < 20; ++round) {
    twGroup_t group = nullptr;
    ASSERT_TW(twSuccess, twGroupCreate(&group, comm, &config));
    twHandle_t handles[2] = {};
    for (twHandle_t& handle : handles) ASSERT_TW(twSuccess, twHandleCreate(&handle, group, &ids, nullptr, nullptr));
    for (const twGroup_t old : old_groups) EXPECT_TW(twInvalidArgument, twGroupAbort(old));
    int32_t counts[1] = {};
    int32_t total = 0;
    for (const twHandle_t old : old_handles) {
      EXPECT_TW(twInvalidArgument, twHandleUpdate(old, &ids, nullptr));
      EXPECT_TW(twInvalidArgument, twHandleNumRecvTokens(old, counts, &total));
      EXPECT_TW(twInvalidArgument, twHandleRelease(old));
      EXPECT_TW(twInvalidArgument, twComplete(group, old, nullptr));
      EXPECT_TW(twInvalidArgument, twHandleDestroy(old));
    }
    old_groups.push_back(group);
    old_handles.insert(old_handles.end(), std::begin(handles), std::end(handles));
    EXPECT_TW(twSuccess, twHandleDestroy(handles[1]));  // the other one ends with the group
    EXPECT_TW(twSuccess, twGroupDestroy(group));
    if (::testing::Test::HasFailure()) break;
  }
  EXPECT_TW(twSuccess, twCommDestroy(comm));
}

TEST(Arguments, HandleOfAnotherGroup) {
  World one(1, make_config(6, 2, 4));
  World other(1, make_config(6, 2, 4));
  Exchange exchange(one, make_traffic(one.config, {4}, 1), {}, 1);
  EXPECT_TW(twInvalidArgument, twComplete(other[0], exchange[0].handle, nullptr));
  EXPECT_TRUE(says("another group"));
}

void expect_bad_ids(twGroup_t group, std::vector<int32_t> ids, const char* part) {
  const twTensor_t given = tensor(ids.data(), twInt32, {static_cast<int64_t>(ids.size()) / 2, 2});
  twHandle_t handle = nullptr;
  EXPECT_TW(twInvalidArgument, twHandleCreate(&handle, group, &given, nullptr, nullptr));
  EXPECT_TRUE(says(part));
  EXPECT_EQ(handle, nullptr);
}

TEST(Arguments, BadRouting) {
  World world(1, make_config(6, 2, 4));
  expect_bad_ids(world[0], {0, 1, 6, 2}, "ids[1, 0] is 6");
  expect_bad_ids(world[0], {0, -2}, "ids[0, 1] is -2");
  expect_bad_ids(world[0], {3, 3}, "ids[0, 1] is 3");
  const int64_t wide[] = {int64_t{1} << 32, 1};  // its low half is a good id
  twTensor_t ids = tensor(const_cast<int64_t*>(wide), twInt64, {1, 2});
  twHandle_t handle = nullptr;
  EXPECT_TW(twInvalidArgument, twHandleCreate(&handle, world[0], &ids, nullptr, nullptr));
  EXPECT_TRUE(says("4294967296"));
  ids.shape[1] = 1;
  EXPECT_TW(twInvalidArgument, twHandleCreate(&handle, world[0], &ids, nullptr, nullptr));
  EXPECT_TRUE(says("[T, 2]"));
  ids = tensor(const_cast<int64_t*>(wide), twFloat32, {1, 2});
  EXPECT_TW(twInvalidArgument, twHandleCreate(&handle, world[0], &ids, nullptr, nullptr));
  char memory[256];
  ids = tensor(nullptr, twInt32, {0, 2});
  char* const odd = memory + (1 - reinterpret_cast<uintptr_t>(memory) % 2);
  EXPECT_TW(twInvalidArgument, twHandleCreate(&handle, world[0], &ids, nullptr, odd));
  EXPECT_TRUE(says("64 bytes"));
}

// Said where peers wait, not where they are routed.
TEST(Arguments, TooManyTokens) {
  World world(1, make_config(6, 2, 4));
  std::vector<int32_t> many(10, -1);
  const twTensor_t ids = tensor(many.data(), twInt32, {5, 2});
  twHandle_t handle = nullptr;
  ASSERT_TW(twSuccess, twHandleCreate(&handle, world[0], &ids, nullptr, nullptr));
  const twDispatchInput_t input = TW_DISPATCH_INPUT_INIT;
  twDispatchOutput_t output = TW_DISPATCH_OUTPUT_INIT;
  EXPECT_TW(twInvalidArgument, twDispatch(world[0], handle, &input, &output));
  EXPECT_TRUE(says("ids has 5 tokens; it must have from 0 to max_tokens, 4"));
  const twTensor_t fewer = tensor(many.data(), twInt32, {4, 2});
  EXPECT_TW(twSuccess, twHandleUpdate(handle, &fewer, nullptr));
  EXPECT_TW(twInvalidArgument, twDispatch(world[0], handle, &input, &output));
  EXPECT_FALSE(says("ids has"));  // but of no payload
  EXPECT_TW(twSuccess, twHandleDestroy(handle));
}

using Change = void (*)(twGroupConfig_t*);

TEST(Arguments, BadConfigurationsNameTheField) {
  const std::pair<Change, const char*> cases[] = {
      {[](twGroupConfig_t* c) { c->num_experts = 0; }, "config.num_experts is 0"},
      {[](twGroupConfig_t* c) { c->top_k = 7; }, "config.top_k is 7; it must be from 1 to 6"},
      {[](twGroupConfig_t* c) { c->max_tokens = 0; }, "config.max_tokens"},
      {[](twGroupConfig_t* c) { c->max_tokens = 1 << 28; }, "config.max_tokens"},
      {[](twGroupConfig_t* c) { c->num_payloads = 9; }, "config.num_payloads is 9"},
      {[](twGroupConfig_t* c) { c->payloads[0].elements = 0; }, "config.payloads[0].elements"},
      {[](twGroupConfig_t* c) { c->payloads[0].dtype = twDtypeNone; }, "config.payloads[0].dtype"},
      {[](twGroupConfig_t* c) { c->combine_dtype = twInt8; }, "config.combine_dtype"},
      {[](twGroupConfig_t* c) { c->combine_elements = -1; }, "config.combine_elements"},
      {[](twGroupConfig_t* c) { c->lanes = 65; }, "config.lanes is 65"},
      {[](twGroupConfig_t* c) { c->timeout_ms = -1; }, "config.timeout_ms"},
      {[](twGroupConfig_t* c) { c->id_dtype = twFloat32; }, "config.id_dtype"},
      {[](twGroupConfig_t* c) { c->invalid_id = 2; }, "config.invalid_id is 2"},
      {[](twGroupConfig_t* c) { c->size = 3; }, "config->size is 3"},
      {[](twGroupConfig_t* c) { c->max_recv_tokens = 3; }, "config.max_recv_tokens is 3; in low latency it must be 0"},
      {[](twGroupConfig_t* c) { c->mode = twHighThroughput, c->max_recv_tokens = 9; },
       "config.max_recv_tokens is 9; it must be from 1 to 8"},
      {[](twGroupConfig_t* c) { c->mode = twHighThroughput, c->row_alignment = 12; }, "config.row_alignment is 12"},
      {[](twGroupConfig_t* c) { c->alloc = [](size_t, void*) -> void* { return nullptr; }; }, "config.alloc"},
  };
  for (const auto& [change, part] : cases) {
    SCOPED_TRACE(part);
    twGroupConfig_t config = make_config(6, 2, 4);
    change(&config);
    twWindowBytes_t bytes{};
    bytes.size = sizeof bytes;
    EXPECT_TW(twInvalidArgument, twGroupWindowBytes(&config, 2, &bytes));
    EXPECT_TRUE(says(part));
  }
}

// Windows hold the rows that there is room for, and the counts of all ranks.
TEST(Arguments, RoomForRows) {
  twGroupConfig_t config = make_config(6, 2, 4);
  config.payloads[0].elements = config.combine_elements = 4096;
  twWindowBytes_t slots{};
  slots.size = sizeof slots;
  ASSERT_TW(twSuccess, twGroupWindowBytes(&config, 16, &slots));
  config.mode = twHighThroughput;
  twWindowBytes_t exact{};
  exact.size = sizeof exact;
  ASSERT_TW(twSuccess, twGroupWindowBytes(&config, 16, &exact));
  EXPECT_EQ(exact.window, slots.window) << "as many rows, if none is said";
  config.max_recv_tokens = 16;
  ASSERT_TW(twSuccess, twGroupWindowBytes(&config, 16, &exact));
  EXPECT_LT(exact.window, slots.window / 2);
  config.max_recv_tokens = 1;
  ASSERT_TW(twSuccess, twGroupWindowBytes(&config, 1024, &exact));
  EXPECT_GT(exact.per_lane, 2u * 1024 * 1024 * sizeof(int32_t)) << "the matrix of counts, in both banks";
}

// What a C caller can write into an enum, though C++ has no such value.
template <class Enum>
void set_number(Enum* place, int number) {
  static_assert(sizeof(Enum) == sizeof number);
  std::memcpy(place, &number, sizeof number);
}

TEST(Arguments, EnumsOutOfRange) {
  World world(1, make_config(6, 2, 4));
  for (const int number : {-1, 9, 99, 1 << 30}) {
    twGroupConfig_t config = make_config(6, 2, 4);
    set_number(&config.mode, number);
    EXPECT_TW(twInvalidArgument, twGroupWindowBytes(&config, 1, nullptr));
    config = make_config(6, 2, 4);
    set_number(&config.payloads[0].dtype, number == 9 ? 16 : number);
    EXPECT_TW(twInvalidArgument, twGroupWindowBytes(&config, 1, nullptr));
    config = make_config(6, 2, 4);
    set_number(&config.id_space, number);
    EXPECT_TW(twInvalidArgument, twGroupWindowBytes(&config, 1, nullptr));
    Exchange exchange(world, make_traffic(world.config, {4}, 1), {}, 1);
    Side& side = exchange[0];
    EXPECT_TW(twSuccess, side.dispatch());
    EXPECT_TW(twSuccess, side.combine());
    set_number(&side.rows.layout, number);
    EXPECT_TW(twInvalidArgument, twCombine(world[0], side.handle, &side.rows, &side.sums));
    side.rows.layout = twRankMajor;
    set_number(&side.rows.weighting, number);
    EXPECT_TW(twInvalidArgument, twCombine(world[0], side.handle, &side.rows, &side.sums));
    side.rows.weighting = twWeightNone;
    set_number(&side.rows.rows.dtype, number == 9 ? 16 : number);
    EXPECT_TW(twInvalidArgument, twCombine(world[0], side.handle, &side.rows, &side.sums));
    set_number(&side.received.layout, number);
    EXPECT_TW(twInvalidArgument, twDispatch(world[0], side.handle, &side.input, &side.received));
    twTensor_t ids = tensor(nullptr, twInt32, {0, 2});
    set_number(&ids.dtype, number == 9 ? 16 : number);
    EXPECT_TW(twInvalidArgument, twHandleUpdate(side.handle, &ids, nullptr));
    EXPECT_EQ(twResultString(static_cast<twResult_t>(18)), std::string("unknown result"));
  }
}

TEST(Arguments, BadPlacements) {
  const int32_t rank[] = {0, 0, 1, 1};
  const std::pair<std::vector<int32_t>, const char*> cases[] = {
      {{0, 0, 0, 1}, "config.expert_slot[1] is 0, which expert 0 has"},
      {{0, 2, 0, 1}, "config.expert_slot[1] is 2; rank 0 holds 2"},
      {{0, -1, 0, 1}, "config.expert_slot[1] is -1"},
  };
  for (const auto& [slot, part] : cases) {
    twGroupConfig_t config = make_config(4, 2, 4);
    config.expert_rank = rank;
    config.expert_slot = slot.data();
    EXPECT_TW(twInvalidArgument, twGroupWindowBytes(&config, 2, nullptr));
    EXPECT_TRUE(says(part));
    EXPECT_TW(twInvalidArgument, twGroupWindowBytes(&config, 1, nullptr));
    EXPECT_TRUE(says("config.expert_rank[2] is 1"));
    config.expert_rank = nullptr;
    EXPECT_TW(twInvalidArgument, twGroupWindowBytes(&config, 2, nullptr));
    EXPECT_TRUE(says("given together"));
  }
}

// Every rank learns what differs and where; the comm works afterwards.
TEST(Arguments, MismatchNamesFieldAndRanks) {
  std::vector<twComm_t> comms(3);
  ASSERT_TW(twSuccess, twCommCreateLocal(comms.data(), 3, nullptr));
  static const int32_t rank_map[] = {0, 1, 2, 0, 1, 2};
  static const int32_t slot_map[] = {0, 0, 0, 1, 1, 1};
  const std::pair<Change, const char*> cases[] = {
      {[](twGroupConfig_t* c) { c->max_tokens = 5; }, "config.max_tokens differs: rank 0 has 4, rank 2 has 5"},
      {[](twGroupConfig_t* c) { c->payloads[0].elements = 9; },
       "config.payloads[0].elements differs: rank 0 has 8, rank 2 has 9"},
      {[](twGroupConfig_t* c) { c->num_experts = 7; }, "config.num_experts differs: rank 0 has 6, rank 2 has 7"},
      {[](twGroupConfig_t* c) { c->timeout_ms = 77; }, "config.timeout_ms differs: rank 0 has 20000, rank 2 has 77"},
      {[](twGroupConfig_t* c) { c->expert_rank = rank_map, c->expert_slot = slot_map; },
       "config.expert_rank[1] differs: rank 0 has 0, rank 2 has 1"},
  };
  for (const auto& [change, part] : cases) {
    on_all_ranks(3, [&, change = change, part = part](int rank) {
      twGroupConfig_t config = make_config(6, 2, 4);
      if (rank == 2) change(&config);
      twGroup_t group = nullptr;
      EXPECT_TW(twConfigMismatch, twGroupCreate(&group, comms[rank], &config));
      EXPECT_TRUE(says(part)) << "rank " << rank;
    });
  }
  on_all_ranks(3, [&](int rank) {  // one rank's own mistake is everybody's error too
    twGroupConfig_t config = make_config(6, 2, 4);
    twGroup_t group = nullptr;
    EXPECT_TW(twInvalidArgument, twGroupCreate(&group, comms[rank], rank == 1 ? nullptr : &config));
    EXPECT_TRUE(says(rank == 1 ? "config is NULL" : "rank 1: config is NULL"));
    EXPECT_TW(twSuccess, twGroupCreate(&group, comms[rank], &config));
    EXPECT_TW(twSuccess, twGroupDestroy(group));
  });
  for (const twComm_t comm : comms) EXPECT_TW(twSuccess, twCommDestroy(comm));
}

TEST(Arguments, WindowsTooLarge) {
  twGroupConfig_t config = make_config(6, 2, TW_MAX_TOKENS);
  config.payloads[0] = {twFloat64, INT64_MAX / 16};
  EXPECT_TW(twInvalidArgument, twGroupWindowBytes(&config, 4, nullptr));
  EXPECT_TRUE(says("64 bits"));
  config.payloads[0] = {twUint8, 1 << 20};  // 512 TiB: fits the arithmetic, not the machine
  twWindowBytes_t bytes{};
  bytes.size = sizeof bytes;
  EXPECT_TW(twSuccess, twGroupWindowBytes(&config, 1, &bytes));
  EXPECT_GT(bytes.window, 1ull << 49);
  twComm_t comm = nullptr;
  ASSERT_TW(twSuccess, twCommCreateLocal(&comm, 1, nullptr));
  twGroup_t group = nullptr;
  EXPECT_TW(twOutOfMemory, twGroupCreate(&group, comm, &config));
  EXPECT_TRUE(says("TiB"));
  EXPECT_EQ(group, nullptr);
  EXPECT_TW(twSuccess, twCommDestroy(comm));
}

// Rows are counted in 32 bits, those of all sources together too.
TEST(Arguments, TooManyTokensOfAllRanks) {
  twWindowBytes_t bytes{};
  bytes.size = sizeof bytes;
  for (const int ranks : {1024, 8, 16}) {
    const int64_t most = INT32_MAX / ranks;
    twGroupConfig_t config = make_config(2048, 2, static_cast<int>(most) + 1);
    if (config.max_tokens <= TW_MAX_TOKENS) {
      EXPECT_TW(twInvalidArgument, twGroupWindowBytes(&config, ranks, &bytes)) << ranks;
      EXPECT_TRUE(says("max_tokens"));
    }
    config.max_tokens = static_cast<int>(most);
    if (config.max_tokens <= TW_MAX_TOKENS) {
      EXPECT_TW(twSuccess, twGroupWindowBytes(&config, ranks, &bytes)) << ranks;
    }
  }
}

TEST(Arguments, WindowBytesAreThoseOfTheWindow) {
  twGroupConfig_t config = make_config(6, 2, 4, 100);
  config.lanes = 3;
  twWindowBytes_t bytes{};
  bytes.size = sizeof bytes;
  ASSERT_TW(twSuccess, twGroupWindowBytes(&config, 2, &bytes));
  EXPECT_EQ(bytes.dispatch_row, 8u + 2 * 8 + 200);
  EXPECT_EQ(bytes.combine_row, 200u);
  EXPECT_EQ(bytes.expert_buffers, 2u * 6 * 4 * 200);
  EXPECT_GE(bytes.window, 3 * bytes.per_lane);
}

// Structs of other versions: shorter ones get defaults, longer ones pass if nothing unknown is asked for.
TEST(Arguments, StructsOfOtherVersions) {
  struct Newer {
    twGroupConfig_t known;
    int64_t beyond;
  } newer{make_config(6, 2, 4), 0};
  newer.known.size = sizeof newer;
  twWindowBytes_t bytes{};
  bytes.size = sizeof bytes;
  EXPECT_TW(twSuccess, twGroupWindowBytes(&newer.known, 2, &bytes));
  newer.beyond = 1;
  EXPECT_TW(twInvalidArgument, twGroupWindowBytes(&newer.known, 2, &bytes));
  EXPECT_TRUE(says("newer version"));
  twGroupConfig_t older = make_config(6, 2, 4);
  older.size = offsetof(twGroupConfig_t, lanes);
  older.lanes = 9999;  // not read
  EXPECT_TW(twSuccess, twGroupWindowBytes(&older, 2, &bytes));
  bytes.size = offsetof(twWindowBytes_t, combine_row);
  bytes.combine_row = 4711;
  EXPECT_TW(twSuccess, twGroupWindowBytes(&older, 2, &bytes));
  EXPECT_EQ(bytes.combine_row, 4711u) << "not this caller's field";
}

TEST(Arguments, Environment) {
  const char* name = nullptr;
  const char* value = nullptr;
  const char* doc = nullptr;
  int count = 0;
  while (twEnvironment(count, &name, &value, &doc) == twSuccess) {
    EXPECT_EQ(std::strncmp(name, "TOKENWAY_", 9), 0);
    EXPECT_GT(std::strlen(doc), 20u);
    const Env set(name, "nonsense");
    twComm_t comm = nullptr;
    EXPECT_TW(twInvalidArgument, twCommCreateLocal(&comm, 1, nullptr));
    EXPECT_TRUE(says(name));
    ++count;
  }
  EXPECT_EQ(count, 8);
}

TEST(Arguments, NamesOfResults) {
  for (int i = 0; i <= twInternalError; ++i) {
    EXPECT_EQ(std::strncmp(twResultString(static_cast<twResult_t>(i)), "tw", 2), 0) << i;
  }
  EXPECT_STREQ(twResultString(twPeerDied), "twPeerDied");
  EXPECT_EQ(twVersion(), TW_VERSION);
}

}  // namespace
}  // namespace tw::test
