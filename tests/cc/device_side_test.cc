// What the host decides for devices, tested without one: sizes, channels, sentences, numbers that kernels take, and a
// group whose backend only says that it is a device.
#include <cstring>

#include "core/group.h"
#include "core/steps.h"
#include "cuda/launch/tiles.h"
#include "harness.h"
#include "pretended.h"

namespace tw::test {
namespace {

// ------------------------------------------------------------------------------------------------------------- sizes

Environment environment(int32_t packet_tokens) {
  Environment made{};
  made.timeout_ms = 1000;
  made.packet_tokens = packet_tokens;
  return made;
}

GroupConfig checked(bool on_device, int32_t packet_tokens, int32_t max_tokens = 300) {
  GroupConfig config;
  const Status status = check_config(make_config(8, 2, max_tokens), 4, on_device, environment(packet_tokens), &config);
  EXPECT_TRUE(status.ok()) << status.text();
  EXPECT_EQ(config.on_device, on_device);
  return config;
}

TEST(DeviceSide, LinesAndChunksOfAWindow) {
  for (const int32_t wish : {-1, 0, 5, 1 << 20}) {
    EXPECT_EQ(checked(false, wish).shape().packet_tokens, 0) << "the CPU has no packets, whatever the environment says";
    EXPECT_EQ(checked(false, wish).shape().chunk_rows, 0);
    EXPECT_GE(checked(true, wish).shape().chunk_rows, 1);
  }
  EXPECT_EQ(checked(true, 0).shape().packet_tokens, 0);
  EXPECT_EQ(checked(true, 5).shape().packet_tokens, 5);
  EXPECT_EQ(checked(true, 1 << 20).shape().packet_tokens, 300) << "more than max_tokens there never are";
  EXPECT_EQ(checked(true, 64, 7).shape().packet_tokens, 7);
  const int32_t usual = checked(true, -1).shape().packet_tokens;
  EXPECT_GE(usual, 1);
  EXPECT_LE(usual, 300);
  EXPECT_GT(checked(true, 5).map.bytes(), checked(false, 5).map.bytes());
}

// With staged transport a block of each source lies in one piece, for any bound, so that one all-to-all moves it.
TEST(DeviceSide, BlocksOfASourceInAWindow) {
  for (const bool exact : {false, true}) {
    twGroupConfig_t given = make_config(8, 2, 300);
    if (exact) given.mode = twHighThroughput, given.max_recv_tokens = 40;
    GroupConfig config;
    const Status status = check_config(given, 4, true, environment(-1), &config, true);
    ASSERT_TRUE(status.ok()) << status.text();
    const WindowMap& map = config.map;
    const Shape& shape = map.shape();
    EXPECT_EQ(shape.staged, 1);
    EXPECT_EQ(shape.packet_tokens, 0) << "all is there at once, so nothing need certify itself";
    for (const int bound : {1, 7, 300}) {
      const uint64_t block = shape.combine_bytes * static_cast<uint64_t>(bound);
      for (int source = 0; source < 4; ++source) {
        const uint64_t begin = map.inbox_slot(0, 1, source, 0, bound);
        EXPECT_EQ(begin, map.bank(0, 1) + block * static_cast<uint64_t>(source));
        EXPECT_EQ(map.inbox_slot(0, 1, source, bound - 1, bound) + shape.combine_bytes, begin + block);
        EXPECT_LE(begin + block, map.bank(0, 1) + map.bank_bytes());
      }
      // Blocks of a dispatch are as large as the bound, however few rows a rank may receive.
      const uint64_t rows = 4 * static_cast<uint64_t>(bound);
      EXPECT_LE(map.meta_row(0, 1, rows), map.bank(0, 1) + map.bank_bytes());
      for (int q = 0; q + 1 < shape.payloads; ++q) {
        EXPECT_LE(map.payload_row(0, 1, q, rows), map.bank(0, 1) + map.payload_begin(q + 1));
      }
      EXPECT_LE(map.payload_row(0, 1, shape.payloads - 1, rows), map.bank(0, 1) + map.meta_begin());
    }
  }
  GroupConfig plain;
  ASSERT_TRUE(check_config(make_config(8, 2, 300), 4, false, environment(-1), &plain, true).ok());
  EXPECT_EQ(plain.map.shape().staged, 0) << "on the CPU messages say where each row goes";
}

// Packets lie where the shape says, so ranks that see different shapes must not form a group.
TEST(DeviceSide, LineTokensAreComparedBetweenRanks) {
  std::vector<Parcel> parcels(2);
  parcels[0].bytes = pack_config(checked(true, 5));
  parcels[1].bytes = pack_config(checked(true, 5));
  EXPECT_TRUE(compare_configs(parcels).ok());
  parcels[1].bytes = pack_config(checked(true, 6));
  const Status status = compare_configs(parcels);
  EXPECT_EQ(status.code, twConfigMismatch);
  EXPECT_NE(status.text().find("TOKENWAY_LINE_TOKENS"), std::string::npos) << status.text();
}

TEST(DeviceSide, HandlesOnADeviceHaveMoreArrays) {
  const Shape shape{3, 8, 2, 5, 1, 1, {16}, 16};
  std::vector<std::byte> block(1 << 14);
  HandleArrays cpu, device;
  const uint64_t cpu_bytes = place_arrays(shape, 3, 4, false, block.data(), &cpu);
  const uint64_t device_bytes = place_arrays(shape, 3, 4, true, block.data(), &device);
  ASSERT_LE(device_bytes, block.size());
  EXPECT_EQ(place_arrays(shape, 3, 4, true, nullptr, &device), device_bytes);
  EXPECT_EQ(device.routing.ids, nullptr) << "where there is no block there is nothing to point to";
  place_arrays(shape, 3, 4, true, block.data(), &device);
  const auto at = [&](const auto* array) {
    return static_cast<uint64_t>(reinterpret_cast<const std::byte*>(array) - block.data());
  };
  EXPECT_EQ(at(cpu.routing.ids), at(device.routing.ids));
  EXPECT_EQ(at(cpu.received.meta), at(device.received.meta));
  EXPECT_EQ(at(cpu.shown.weights), at(device.shown.weights));
  EXPECT_GE(at(device.device.places), at(device.shown.weights) + 3 * 5 * 2 * sizeof(float));
  EXPECT_GE(at(device.device.status), at(device.device.places) + 3 * 5 * 2 * sizeof(ExpertRow));
  EXPECT_GE(device_bytes, at(device.device.status) + sizeof(int32_t));
  EXPECT_EQ(cpu_bytes, at(device.device.places)) << "on the CPU they take no room";
}

TEST(DeviceSide, SignalsAreBornAtTheFirstStep) {
  const Shape shape{2, 4, 2, 3, 2, 1, {8}, 8};
  WindowMap map;
  ASSERT_TRUE(WindowMap::make(shape, &map));
  std::vector<std::byte> window(map.bytes());
  prepare_signals(map, 0xfffffff0u, window.data());
  for (int channel = 0; channel < 2; ++channel) {
    for (int bank = 0; bank < 2; ++bank) {
      for (int source = 0; source < 2; ++source) {
        uint64_t signal = 0;
        std::memcpy(&signal, window.data() + map.signal(channel, bank, source), sizeof signal);
        EXPECT_EQ(unpack(signal), (Signal{0xfffffff0u, Mode::kNone, 0}));
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------------- channels

// A view's bank is known before the device has counted: the first dispatch of a lease is in bank 1, the next in bank 0.
TEST(DeviceSide, BanksOfDispatchesAlternateFromOne) {
  for (const uint32_t first_step : {0u, 1u, 7u, 0xfffffffeu, 0xffffffffu}) {
    Channels channels(2, first_step);
    uint32_t before = first_step;
    const auto expect_next = [&](StepPlace at, int bank) {
      EXPECT_EQ(at.channel, 1);
      EXPECT_EQ(at.bank(), bank);
      EXPECT_TRUE(at.step - before == 1 || at.step - before == 2) << before << " to " << at.step;
      before = at.step;
    };
    for (int lease = 0; lease < 3; ++lease) {
      channels[1].second = false;  // as core/calls.cc does where the holder changes
      for (int i = 0; i <= lease; ++i) expect_next(channels.begin_dispatch(1), i % 2 == 0 ? 1 : 0);
      const StepPlace combine = channels.begin(1);
      EXPECT_EQ(combine.step, before + 1);
      before = combine.step;
    }
    EXPECT_EQ(channels[0].step, first_step) << "other channels stand still";
  }
}

// Pairs of dispatch and combine need no skipped step.
TEST(DeviceSide, PairsOfDispatchAndCombineSkipNothing) {
  Channels channels(1, 0);
  for (uint32_t pair = 0; pair < 4; ++pair) {
    channels[0].second = false;
    EXPECT_EQ(channels.begin_dispatch(0).step, 2 * pair + 1);
    EXPECT_EQ(channels.begin(0).step, 2 * pair + 2);
  }
}

// Nor do those whose handles release their lanes in between, one after the other or two at once: a combine goes where a
// dispatch has been, and a dispatch where a pair is over.
TEST(DeviceSide, ReleasedPairsSkipNothing) {
  twHandle* const holder = reinterpret_cast<twHandle*>(uintptr_t{64});  // only compared with NULL
  for (const int at_once : {1, 2}) {
    Channels channels(2, 0);
    std::vector<int> dispatched;
    const auto step = [&](int channel, int bank) {
      const uint32_t before = channels[channel].step;
      bank == kDispatchBank ? channels.lease(channel) : channels.borrow(channel);
      channels[channel].holder = holder;
      const StepPlace at = bank == kDispatchBank ? channels.begin_dispatch(channel) : channels.begin(channel);
      EXPECT_EQ(at.step, before + 1) << "lane " << channel;
      EXPECT_EQ(at.bank(), bank);
      channels.give_back(channel);
    };
    for (int round = 0; round < 4; ++round) {
      for (int i = 0; i < at_once; ++i) {
        dispatched.push_back(channels.next_free(kDispatchBank));
        step(dispatched.back(), kDispatchBank);
      }
      for (const int channel : dispatched) step(channels.lend(channel), kCombineBank);
      dispatched.clear();
    }
    EXPECT_EQ(channels[0].step, channels[1].step) << "both lanes are used alike";
    EXPECT_EQ(channels[0].step, 4u * static_cast<uint32_t>(at_once));
    channels[0].holder = channels[1].holder = holder;
    EXPECT_EQ(channels.next_free(kDispatchBank), -1);
    channels.give_back(1);
    EXPECT_EQ(channels.lend(0), 1) << "the only free one, wherever it stands";
  }
}

// A rank that was refused a dispatch may end its lease otherwise than its peers, which learn late: all lease the same
// channels afterwards.
TEST(DeviceSide, LeasesLeaveTheirChannelsAlike) {
  twHandle* const holder = reinterpret_cast<twHandle*>(uintptr_t{64});  // only compared with NULL
  enum End { kCombined, kReleased, kBorrowed, kRefused };
  const auto lanes_behind = [&](End end) {
    Channels channels(3, 0);
    std::vector<int> lanes;
    for (int round = 0; round < 7; ++round) {
      const bool ends_so = round % 2 == 0;
      const int channel = channels.next_free(kDispatchBank);
      lanes.push_back(channel);
      channels.lease(channel);
      channels[channel].holder = holder;
      ends_so&& end == kRefused ? channels.begin_refusal(channel) : channels.begin_dispatch(channel);
      if (!ends_so || end == kCombined) channels.begin(channel);
      channels.give_back(channel);
      if (ends_so && end == kBorrowed) {
        const int lent = channels.lend(channel);
        channels.borrow(lent);
        channels.begin(lent);
        channels.give_back(lent);
      }
      if (round == 3) {  // a gather
        lanes.push_back(channels.next_free(-1));
        channels.begin(lanes.back());
      }
    }
    return lanes;
  };
  for (const End end : {kReleased, kBorrowed, kRefused}) EXPECT_EQ(lanes_behind(end), lanes_behind(kCombined));
}

// A refusal takes the place of the dispatch that its peers make: same bank, and the next one is not put out of step.
TEST(DeviceSide, RefusalStandsWhereTheDispatchWould) {
  for (const bool second : {false, true}) {
    Channels refusing(1, 0);
    Channels dispatching(1, 0);
    if (second) {
      refusing.begin_dispatch(0);
      dispatching.begin_dispatch(0);
    }
    const StepPlace refused = refusing.begin_refusal(0);
    EXPECT_EQ(refused.step, dispatching.begin_dispatch(0).step);
    EXPECT_EQ(refusing[0].second, second) << "nothing was dispatched";
    EXPECT_EQ(refusing.begin_dispatch(0).bank(), refused.bank()) << "again";
  }
}

// --------------------------------------------------------------------------------------------------------- sentences

std::string sentence(twResult_t result, twPhase_t phase, uint32_t bound = 0, uint32_t note = 0) {
  ErrorRecord record = empty_record();
  record.result = result;
  record.phase = phase;
  record.peer = 3;
  record.reporter = 1;
  record.lane = 2;
  record.step = 9;
  record.token = 5;
  record.k = 1;
  record.value = -7000000000;
  describe_call_error(&record, bound, note);
  return record.message;
}

TEST(DeviceSide, SentencesOfCallErrors) {
  EXPECT_EQ(sentence(twPeerRefused, twPhaseDispatch), "rank 3 refused its arguments of twDispatch (step 9, lane 2)");
  EXPECT_EQ(sentence(twPeerRefused, twPhaseCombine), "rank 3 refused its arguments of twCombine (step 9, lane 2)");
  EXPECT_EQ(sentence(twBoundMismatch, twPhaseDispatch, 16, 32),
            "input.bound of twDispatch differs: rank 1 has 16, rank 3 has 32");
  EXPECT_EQ(sentence(twBoundMismatch, twPhaseCombine, 16, 32),
            "twCombine answers different dispatches: that of rank 1 had bound 16, that of rank 3 bound 32");
  EXPECT_EQ(
      sentence(twInvalidArgument, twPhaseDispatch),
      "ids[5, 1] is -7000000000 in device memory (step 9, lane 2); it must be -1 (no expert) or an expert that the "
      "token does not have yet: it was taken for -1");
}

// ----------------------------------------------------------------------------------------------- numbers for kernels

TEST(DeviceSide, PackedExperts) {
  for (const int32_t rank : {0, 1, 513, TW_MAX_RANKS - 1}) {
    for (const int32_t slot : {0, 1, 4711, TW_MAX_EXPERTS - 1}) {
      const uint32_t packed = cuda::pack_expert(rank, slot);
      EXPECT_EQ(cuda::expert_rank(packed), rank);
      EXPECT_EQ(cuda::expert_slot(packed), slot);
    }
  }
}

// As src/cuda/device/block.cuh divides.
uint32_t divide(uint32_t x, const cuda::Divider& by) {
  if (by.divisor == 1) return x;
  const auto high = static_cast<uint32_t>(static_cast<uint64_t>(x) * by.factor >> 32);
  return (high + ((x - high) >> 1)) >> (by.shift - 1);
}

TEST(DeviceSide, DivisionByMultiplication) {
  constexpr uint32_t kLargest = 0x7fffffffu;
  std::vector<uint32_t> divisors;
  for (uint32_t d = 1; d <= 3000; ++d) divisors.push_back(d);
  for (int bits = 12; bits < 31; ++bits) {
    for (const int off : {-1, 0, 1}) divisors.push_back((1u << bits) + static_cast<uint32_t>(off));
  }
  for (uint32_t i = 0; i < 500; ++i) divisors.push_back(1 + mix({i, 1}) % kLargest);
  divisors.push_back(kLargest);
  for (const uint32_t d : divisors) {
    const cuda::Divider by = cuda::Divider::make(d);
    const auto check = [&](uint32_t x) { ASSERT_EQ(divide(x, by), x / d) << x << " / " << d; };
    for (uint32_t i = 0; i < 40; ++i) {
      const uint32_t multiple = kLargest / d == 0 ? 0 : mix({i, d}) % (kLargest / d + 1) * d;
      ASSERT_NO_FATAL_FAILURE(check(multiple));
      ASSERT_NO_FATAL_FAILURE(check(multiple > 0 ? multiple - 1 : 0));
      ASSERT_NO_FATAL_FAILURE(check(mix({i, d, 2}) & kLargest));
    }
    for (const uint32_t x : {0u, 1u, d - 1, d, kLargest - 1, kLargest}) ASSERT_NO_FATAL_FAILURE(check(x));
  }
}

// ---------------------------------------------------------------------------------------- a group's calls, pretended

// Ids lie in device memory: creating a handle must not read them (99 passes), only say where they are.
TEST_F(PretendedGroup, IdsAreNotReadOnTheHost) {
  twHandle_t handle = make_handle();
  ASSERT_NE(handle, nullptr);
  EXPECT_TW(twSuccess, dispatch(handle));
  EXPECT_EQ(device->sources.at(0).ids, ids);
  EXPECT_EQ(device->sources.at(0).id_stride[0], 2);
  EXPECT_EQ(device->sources.at(0).id_stride[1], 1);
  EXPECT_EQ(device->sources.at(0).weights, nullptr);
  EXPECT_TW(twSuccess, combine(handle));
  EXPECT_EQ(device->streams, (std::vector<void*>{stream, stream}));
  EXPECT_TW(twSuccess, twHandleDestroy(handle));
}

// The view that a dispatch returns lies in the bank that the device was told of.
TEST_F(PretendedGroup, ViewsLieInTheBankOfTheLease) {
  twHandle_t first = make_handle();
  twHandle_t second = make_handle();
  for (int round = 0; round < 2; ++round) {
    for (const int bank : {1, 0, 1}) {
      EXPECT_TW(twSuccess, dispatch(first));
      EXPECT_EQ(device->places.back().bank(), bank);
      EXPECT_EQ(received.payloads[0].data, device->view(group.context.map, device->places.back(), 0));
    }
    EXPECT_TW(twSuccess, combine(first));
    EXPECT_TW(twSuccess, dispatch(second));
    EXPECT_EQ(device->places.back().bank(), 1) << "a new lease begins anew";
    EXPECT_TW(twSuccess, combine(second));
  }
  EXPECT_TW(twSuccess, twHandleDestroy(first));
  EXPECT_TW(twSuccess, twHandleDestroy(second));
}

// A gather that shows the window makes the host know its bank; others go on where the channel stands.
TEST_F(PretendedGroup, GathersThatShowTheWindow) {
  const auto gather = [&](twLayout_t layout, int64_t count) {
    twAllGatherVInput_t input = TW_ALL_GATHER_V_INPUT_INIT;
    input.stream = stream;
    input.tensors[0] = tensor(rows, twBfloat16, {count, 8});
    twAllGatherVOutput_t output = TW_ALL_GATHER_V_OUTPUT_INIT;
    output.layout = layout;
    return twAllGatherV(&group, &input, &output);
  };
  for (const twLayout_t layout : {twRankMajor, twRankMajor, twFlat, twFlat, twRankMajor}) {
    EXPECT_TW(twSuccess, gather(layout, 4));
  }
  ASSERT_EQ(device->places.size(), 5u);
  for (const int i : {0, 1, 4}) EXPECT_EQ(device->places[i].bank(), 1) << i;
  EXPECT_EQ(device->places[2].step + 1, device->places[3].step);
  EXPECT_TW(twInvalidArgument, gather(twFlat, 99));
  EXPECT_TW(twInvalidArgument, gather(twRankMajor, 99));
  EXPECT_EQ(device->refusals, "gG");
  EXPECT_EQ(device->places[6].bank(), 1);
  EXPECT_EQ(device->collected[0].tensors[0].out, nullptr);
}

TEST_F(PretendedGroup, RefusalsKeepTheirPlace) {
  twHandle_t handle = make_handle();
  for (int round = 0; round < 2; ++round) {
    EXPECT_TW(twInvalidArgument, dispatch(handle, 3));
    EXPECT_EQ(device->places.back().bank(), 1) << "where the peers' new lease begins, whatever came before";
    EXPECT_TW(twSuccess, dispatch(handle));
    EXPECT_EQ(device->places.back().bank(), 0) << "as the peers, which do not know yet and dispatch again";
    EXPECT_TW(twInvalidArgument, dispatch(handle, 3));
    EXPECT_EQ(device->places.back().bank(), 1);
    EXPECT_TW(twSuccess, dispatch(handle));
    received.payloads[0].dtype = twInt8;
    EXPECT_TW(twInvalidArgument, combine(handle));
    EXPECT_EQ(handle->channel, -1) << "the peers have given theirs back";
    EXPECT_TW(twSuccess, dispatch(handle));
    EXPECT_EQ(device->places.back().bank(), 1);
    EXPECT_TW(twSuccess, combine(handle));
  }
  EXPECT_EQ(device->refusals, "ddcddc");
  EXPECT_TW(twSuccess, twHandleDestroy(handle));
}

// What a rank does with the handle of a refused dispatch: a combine gives the lane back, as at peers; and where no lane
// is free otherwise, another dispatch takes that one, as it is free at peers, or they could not make the call.
TEST_F(PretendedGroup, LeasesOfRefusedDispatches) {
  twHandle_t first = make_handle();
  twHandle_t second = make_handle();
  EXPECT_TW(twInvalidArgument, dispatch(first, 3));
  EXPECT_EQ(first->channel, 0) << "as at the peers, which do not know yet";
  EXPECT_TW(twInvalidUsage, combine(first));
  EXPECT_NE(std::string(twLastError()).find("refused on this rank, so there is nothing to combine"), std::string::npos);
  EXPECT_EQ(first->channel, -1);
  EXPECT_TW(twInvalidUsage, combine(first));
  EXPECT_NE(std::string(twLastError()).find("combine before dispatch"), std::string::npos) << "it is told once";
  EXPECT_TW(twInvalidArgument, dispatch(first, 3));
  EXPECT_TW(twSuccess, dispatch(second));
  EXPECT_EQ(device->places.back().bank(), 1);
  EXPECT_EQ(first->channel, -1);
  const twDispatchOutput_t rows_of_second = received;
  EXPECT_TW(twInvalidUsage, dispatch(first)) << "a lane of rows is nobody else's";
  received = rows_of_second;
  EXPECT_TW(twSuccess, combine(second));
  EXPECT_TW(twInvalidArgument, dispatch(first, 3));
  EXPECT_TW(twSuccess, dispatch(first));
  const twDispatchOutput_t rows_of_first = received;
  EXPECT_TW(twInvalidUsage, dispatch(second)) << "nor is it behind a refusal";
  received = rows_of_first;
  EXPECT_TW(twSuccess, combine(first));
  EXPECT_EQ(device->refusals, "ddd");
  EXPECT_TW(twSuccess, twHandleDestroy(first));
  EXPECT_TW(twSuccess, twHandleDestroy(second));
}

// A launch that fails is this call's error, with its sentence. The peers would wait for the step, so the group ends.
TEST_F(PretendedGroup, LaunchesThatFail) {
  twHandle_t handle = make_handle();
  device->refused = fail(twSystemError, "no launch");
  EXPECT_TW(twSystemError, dispatch(handle));
  EXPECT_STREQ(twLastError(), "no launch");
  device->refused = {};
  EXPECT_TW(twPeerAborted, dispatch(handle)) << "as if this rank had given it up";
  EXPECT_TW(twInvalidUsage, twComplete(&group, handle, stream)) << "nothing is pending";
  EXPECT_EQ(error_of(&group).sticky, 1);
  EXPECT_TW(twSuccess, twHandleDestroy(handle));
}

// Completing may use another stream than sending did.
TEST_F(PretendedGroup, CompletingHasAStreamOfItsOwn) {
  twHandle_t handle = make_handle();
  EXPECT_TW(twSuccess, dispatch(handle, 4, true));
  EXPECT_TW(twSuccess, twComplete(&group, handle, &group));
  EXPECT_EQ(device->streams.back(), static_cast<void*>(&group));
  EXPECT_TW(twSuccess, combine(handle));
  EXPECT_TW(twSuccess, twHandleDestroy(handle));
}

// What a step finds out later is in the record without a call, and, if it is sticky, in every later call.
TEST_F(PretendedGroup, NewsOfTheDevice) {
  twHandle_t handle = make_handle();
  device->news.result = twInvalidArgument;
  device->news.phase = twPhaseDispatch;
  std::strcpy(device->news.message, "ids are bad");
  EXPECT_EQ(error_of(&group).result, twInvalidArgument);
  EXPECT_STREQ(error_of(&group).message, "ids are bad");
  EXPECT_TW(twSuccess, dispatch(handle)) << "the group stays usable";
  EXPECT_TW(twSuccess, combine(handle));
  device->news.result = twTimeout;
  device->news.phase = twPhaseCombine;
  device->news.sticky = 1;
  device->news.peer = 0;
  device->news.reporter = 0;
  device->news.lane = 0;
  device->news.expected = 4;
  device->news.seen = 3;
  EXPECT_TW(twTimeout, dispatch(handle));
  const twErrorRecord_t record = error_of(&group);
  EXPECT_EQ(record.sticky, 1);
  EXPECT_STREQ(record.message,
               "rank 0 did not arrive in time in combine of step 4 on lane 0 (last seen: step 3); found by rank 0");
  EXPECT_TW(twTimeout, dispatch(handle));
  EXPECT_TW(twSuccess, twHandleDestroy(handle));
}

}  // namespace
}  // namespace tw::test
