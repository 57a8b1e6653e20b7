// What cannot be done together is refused: calls of several threads in one group, and meetings of one comm.
#include <atomic>
#include <chrono>
#include <thread>

#include "harness.h"

namespace tw::test {
namespace {

// A dispatch without tokens, of a handle without any.
struct Empty {
  explicit Empty(twGroup_t of) : group(of) {
    const twTensor_t ids = tensor(nullptr, twInt32, {0, 3});
    EXPECT_TW(twSuccess, twHandleCreate(&handle, group, &ids, nullptr, nullptr));
    input.size = sizeof input;
    input.lane = -1;
    input.payloads[0] = tensor(nullptr, twBfloat16, {0, 8});
    output.size = sizeof output;
  }
  twResult_t dispatch() { return twDispatch(group, handle, &input, &output); }

  twGroup_t group;
  twHandle_t handle = nullptr;
  twDispatchInput_t input{};
  twDispatchOutput_t output{};
};

// Calls until a call of another thread is in the way: that thread is on its way into the call, and then waits there.
// The calls that come before change nothing.
template <class Call>
void until_busy(const char* under_way, Call&& call) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (call() == twSuccess) {
    ASSERT_LT(std::chrono::steady_clock::now(), end) << "no call is in the way";
    std::this_thread::yield();
  }
  EXPECT_TRUE(says(std::string(under_way) + " is under way on the"));
  EXPECT_TRUE(says("in another thread"));
}

constexpr int kPatient = 60000;

class Turns : public ::testing::Test {
 protected:
  Turns() : config(make_config(7, 3, 6)) {
    config.lanes = 2;
    config.timeout_ms = kPatient;
    world = std::make_unique<World>(2, config);
  }
  // The call of rank 0 in a thread of its own, until it is not refused; waits until that thread is in it.
  template <class Call>
  std::thread wait_in(const char* name, std::atomic<twResult_t>& result, Call&& call) {
    std::thread waiting([&result, call] {
      twResult_t last = twInvalidUsage;
      while (last == twInvalidUsage) last = call();  // asked below at that moment
      result = last;
    });
    int32_t total = 0;
    until_busy(name, [&] {
      const twResult_t asked = twHandleNumRecvTokens(mine->handle, nullptr, &total);
      return says("has not been dispatched") ? twSuccess : asked;
    });
    return waiting;
  }

  twGroupConfig_t config;
  std::unique_ptr<World> world;
  std::unique_ptr<Empty> mine;
};

TEST_F(Turns, EveryCallOfAGroupIsRefusedBesideOneThatWaits) {
  twGroup_t group = (*world)[0];
  mine = std::make_unique<Empty>(group);
  Empty other(group);
  std::atomic<twResult_t> result = twInternalError;
  std::thread waiting = wait_in("twDispatch", result, [&] { return mine->dispatch(); });

  const twTensor_t ids = tensor(nullptr, twInt32, {0, 3});
  twHandle_t handle = nullptr;
  twGroup_t survivors = nullptr;
  int32_t number = 0;
  int64_t rows = 0;
  float loads[7] = {};
  twCombineInput_t rows_in{};
  twCombineOutput_t sums{};
  twCountsInput_t counts = TW_COUNTS_INPUT_INIT;
  twAllGatherVInput_t gather = TW_ALL_GATHER_V_INPUT_INIT;
  twAllGatherVOutput_t gathered = TW_ALL_GATHER_V_OUTPUT_INIT;
  twReduceScatterVInput_t reduce = TW_REDUCE_SCATTER_V_INPUT_INIT;
  twReduceScatterVOutput_t reduced = TW_REDUCE_SCATTER_V_OUTPUT_INIT;
  const std::function<twResult_t()> calls[] = {
      [&] { return other.dispatch(); },
      [&] { return mine->dispatch(); },
      [&] { return twDispatch(group, nullptr, nullptr, nullptr); },  // what is wrong would be told to the peers
      [&] { return twCombine(group, other.handle, &rows_in, &sums); },
      [&] { return twComplete(group, other.handle, nullptr); },
      [&] { return twExchangeCounts(group, other.handle, &counts); },
      [&] { return twAllGatherV(group, &gather, &gathered); },
      [&] { return twReduceScatterV(group, &reduce, &reduced); },
      [&] { return twCompleteRequest(group, 1, nullptr); },
      [&] { return twHandleCreate(&handle, group, &ids, nullptr, nullptr); },
      [&] { return twHandleUpdate(other.handle, &ids, nullptr); },
      [&] { return twHandleRelease(other.handle); },
      [&] { return twHandleDestroy(other.handle); },
      [&] { return twHandleNumRecvTokens(other.handle, nullptr, &number); },
      [&] { return twHandleNumRecvRows(other.handle, twFlat, &rows); },
      [&] { return twHandleNumOutputRows(other.handle, twFlat, &rows); },
      [&] { return twHandleCountsReady(other.handle, 0, &number); },
      [&] { return twGroupReplaceMap(group, 0, &number, nullptr, nullptr); },
      [&] { return twGroupMap(group, 0, nullptr, nullptr); },
      [&] { return twGroupLoads(group, loads, nullptr); },
      [&] { return twGroupShrink(group, nullptr, &survivors); },
      [&] { return twGroupDestroy(group); },
  };
  int index = 0;
  for (const auto& call : calls) {
    SCOPED_TRACE(index++);
    EXPECT_TW(twInvalidUsage, call());
    EXPECT_TRUE(says("twDispatch is under way on the group, in another thread"));
    EXPECT_TRUE(says("twGroupAbort"));
  }
  // What may come from any thread still does.
  twGroupInfo_t info{};
  info.size = sizeof info;
  size_t bytes = 0;
  EXPECT_TW(twSuccess, twGroupInfo(group, &info));
  EXPECT_TW(twSuccess, twHandleMemBytes(group, &bytes));
  EXPECT_EQ(error_of(group).result, twSuccess) << "a refused call must leave no record";

  // Nor was anybody told: the step goes well on both ranks, and so does the next.
  Empty peer((*world)[1]);
  EXPECT_TW(twSuccess, peer.dispatch());
  waiting.join();
  EXPECT_EQ(result, twSuccess);
  on_all_ranks(2,
               [&](int rank) { EXPECT_TW(twSuccess, rank == 0 ? other.dispatch() : Empty((*world)[1]).dispatch()); });
}

TEST_F(Turns, AbortEndsACallAndThenTheGroupCanBeDestroyed) {
  twGroup_t group = (*world)[0];
  mine = std::make_unique<Empty>(group);
  std::atomic<twResult_t> result = twSuccess;
  std::thread waiting = wait_in("twDispatch", result, [&] { return mine->dispatch(); });
  EXPECT_TW(twInvalidUsage, twGroupDestroy(group));
  EXPECT_TW(twSuccess, twGroupAbort(group));
  waiting.join();
  EXPECT_EQ(result, twPeerAborted);
}

// Threads that do without a lock: each call is right or refused, and none harms another.
TEST_F(Turns, ManyThreadsInOneGroup) {
  World alone(1, config);
  std::atomic<int> done = 0;
  std::atomic<int> refused = 0;
  on_all_ranks(4, [&](int) {
    for (int round = 0; round < 200; ++round) {
      const twTensor_t ids = tensor(nullptr, twInt32, {0, 3});
      twHandle_t handle = nullptr;
      twResult_t result = twHandleCreate(&handle, alone[0], &ids, nullptr, nullptr);
      if (result == twSuccess) ++done;
      while (result == twSuccess && twHandleDestroy(handle) == twInvalidUsage) ++refused;
      if (result == twSuccess) continue;
      ++refused;
      EXPECT_TW(twInvalidUsage, result);
    }
  });
  EXPECT_GE(done + refused, 800);
  EXPECT_GT(done, 0);
}

// Whoever asks may come too late, but not into what is being freed.
TEST_F(Turns, ErrorRecordWhileTheGroupEnds) {
  for (int round = 0; round < 20; ++round) {
    World alone(1, config);
    twGroup_t group = alone[0];
    std::atomic<bool> stop = false;
    std::thread reader([&] {
      twErrorRecord_t record{};
      record.size = sizeof record;
      while (!stop) {
        const twResult_t result = twGroupGetError(group, &record);
        EXPECT_TRUE(result == twSuccess || (result == twInvalidArgument && says("no longer"))) << twLastError();
      }
    });
    std::this_thread::yield();
    alone.destroy_groups();
    stop = true;
    reader.join();
  }
}

// Rank 0 creates a group in a thread of its own; returns when it waits there for rank 1.
std::thread creating(twComm_t comm, const twGroupConfig_t& config, twGroup_t* made) {
  std::thread waiting([comm, config, made] {
    while (twGroupCreate(made, comm, &config) == twInvalidUsage) {  // asked below at that moment
    }
  });
  // A comm with groups is not destroyed either way; the sentence tells whether the other call has begun.
  while (twCommDestroy(comm) == twInvalidUsage && !says("twGroupCreate is under way on the comm, in another thread")) {
    std::this_thread::yield();
  }
  return waiting;
}

TEST_F(Turns, MeetingsOfACommAreOneAtATime) {
  twGroup_t made[2] = {};
  std::thread waiting = creating(world->comms[0], config, &made[0]);
  twGroup_t survivors = nullptr;
  EXPECT_TW(twInvalidUsage, twGroupCreate(&survivors, world->comms[0], &config));
  EXPECT_TRUE(says("in the same order"));
  EXPECT_TW(twInvalidUsage, twGroupShrink((*world)[0], nullptr, &survivors));
  EXPECT_TRUE(says("twGroupCreate is under way on the comm"));
  EXPECT_TW(twInvalidUsage, twGroupDestroy((*world)[0]));
  EXPECT_TRUE(says("twGroupCreate is under way on the comm"));
  // The group that was not destroyed works, beside the creation.
  on_all_ranks(2, [&](int rank) { EXPECT_TW(twSuccess, Empty((*world)[rank]).dispatch()); });
  EXPECT_TW(twSuccess, twGroupCreate(&made[1], world->comms[1], &config));
  waiting.join();
  ASSERT_NE(made[0], nullptr);
  on_all_ranks(2, [&](int rank) { EXPECT_TW(twSuccess, twGroupDestroy(made[rank])); });
}

// A group that is finished meets nobody, so that its end need not wait for another's beginning.
TEST_F(Turns, AFinishedGroupEndsBesideACreation) {
  twGroup_t first[2] = {};
  on_all_ranks(2, [&](int rank) { EXPECT_TW(twSuccess, twGroupCreate(&first[rank], world->comms[rank], &config)); });
  twGroup_t next[2] = {};
  std::thread waiting = creating(world->comms[0], config, &next[0]);
  EXPECT_TW(twSuccess, twGroupAbort(first[0]));
  EXPECT_TW(twSuccess, twGroupDestroy(first[0]));
  EXPECT_TW(twSuccess, twGroupCreate(&next[1], world->comms[1], &config));
  EXPECT_TW(twSuccess, twGroupDestroy(first[1]));
  waiting.join();
  ASSERT_NE(next[0], nullptr);
  on_all_ranks(2, [&](int rank) { EXPECT_TW(twSuccess, twGroupDestroy(next[rank])); });
}

// A callback within a call is in it too: the same thread is refused, instead of working on what is half done.
TEST_F(Turns, AnAllocatorCannotCallItsGroup) {
  struct Inside {
    twGroup_t group = nullptr;
    twResult_t result = twSuccess;
    std::string text;
  } inside;
  twGroupConfig_t own = config;
  own.alloc_context = &inside;
  own.alloc = [](size_t bytes, void* context) {
    auto* const at = static_cast<Inside*>(context);
    if (at->group != nullptr) {
      at->result = twGroupDestroy(at->group);
      at->text = twLastError();
    }
    return std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  };
  own.release = [](void* block, void*) { std::free(block); };
  World alone(1, own);
  inside.group = alone[0];
  Empty made(alone[0]);
  EXPECT_EQ(inside.result, twInvalidUsage);
  EXPECT_NE(inside.text.find("twHandleCreateForLayer is under way on the group, in this very thread"),
            std::string::npos)
      << inside.text;
  inside.group = nullptr;
  EXPECT_TW(twSuccess, made.dispatch());
}

}  // namespace
}  // namespace tw::test
