#include "harness.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "core/group.h"
#include "hosts_world.h"

namespace tw::test {

namespace {

constexpr char kHosts[] = "TOKENWAY_TEST_HOSTS";

}  // namespace

int ranks_per_host(int ranks) {
  const char* const each_has = std::getenv(kHosts);
  return each_has == nullptr ? ranks : std::max(1, std::atoi(each_has));
}

void until_looked_again() { std::this_thread::sleep_for(std::chrono::milliseconds(2)); }

void on_all_ranks(int ranks, const std::function<void(int)>& run) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
}

twGroupConfig_t make_config(int experts, int top_k, int max_tokens, int64_t elements) {
  twGroupConfig_t config = TW_GROUP_CONFIG_INIT;
  config.num_experts = experts;
  config.top_k = top_k;
  config.max_tokens = max_tokens;
  config.num_payloads = 1;
  config.payloads[0] = {twBfloat16, elements};
  config.combine_dtype = twBfloat16;
  config.combine_elements = elements;
  config.timeout_ms = 20000;  // a hang becomes a failure
  return config;
}

twGroupConfig_t impatient(int timeout_ms) {
  twGroupConfig_t config = make_config(6, 2, 4);
  config.timeout_ms = timeout_ms;
  return config;
}

twTensor_t tensor(void* data, twDtype_t dtype, std::initializer_list<int64_t> shape) {
  twTensor_t made{};
  made.data = data;
  made.dtype = dtype;
  made.ndim = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), made.shape);
  int64_t stride = 1;
  for (int i = made.ndim - 1; i >= 0; --i) {
    made.stride[i] = stride;
    stride *= made.shape[i];
  }
  return made;
}

twErrorRecord_t error_of(twGroup_t group) {
  twErrorRecord_t record{};
  record.size = sizeof record;
  EXPECT_TW(twSuccess, twGroupGetError(group, &record));
  return record;
}

int64_t dispatch_nothing(twGroup_t group, const twGroupConfig_t& config) {
  const twTensor_t ids = tensor(nullptr, twInt32, {0, config.top_k});
  twHandle_t handle = nullptr;
  EXPECT_TW(twSuccess, twHandleCreate(&handle, group, &ids, nullptr, nullptr));
  twDispatchInput_t input = TW_DISPATCH_INPUT_INIT;
  input.payloads[0] = tensor(nullptr, twBfloat16, {0, config.payloads[0].elements});
  twDispatchOutput_t output = TW_DISPATCH_OUTPUT_INIT;
  EXPECT_TW(twSuccess, twDispatch(group, handle, &input, &output));
  EXPECT_TW(twSuccess, twHandleDestroy(handle));
  return output.counts.shape[0];
}

World::World(int ranks, const twGroupConfig_t& given, const std::function<void(int, twGroupConfig_t*)>& each)
    : config(given), homes(given, ranks), comms(ranks), groups(ranks) {
  EXPECT_TW(twSuccess, twCommCreateLocal(comms.data(), ranks, nullptr));
  if (std::getenv(kHosts) != nullptr) {
    const int local = ranks_per_host(ranks);
    spread(comms, std::vector<int>(static_cast<size_t>((ranks + local - 1) / local), local),
           std::make_shared<Nets>(1, 3));
  }
  on_all_ranks(ranks, [&](int rank) {
    twGroupConfig_t mine = given;
    if (each) each(rank, &mine);
    EXPECT_TW(twSuccess, twGroupCreate(&groups[rank], comms[rank], &mine));
  });
}

World::World(std::vector<twComm_t> connected, const twGroupConfig_t& given)
    : config(given),
      homes(given, static_cast<int>(connected.size())),
      comms(std::move(connected)),
      groups(comms.size()) {
  on_all_ranks(size(), [&](int rank) { EXPECT_TW(twSuccess, twGroupCreate(&groups[rank], comms[rank], &given)); });
}

World::World(const World& arena, const twGroupConfig_t& given)
    : config(given), homes(given, arena.size()), groups(arena.groups.size()) {
  config.lanes = arena.config.lanes;
  on_all_ranks(size(), [&](int rank) {
    twGroupConfig_t mine = config;
    mine.arena = arena[rank];
    EXPECT_TW(twSuccess, twGroupCreate(&groups[rank], arena.comms[rank], &mine));
  });
}

World::~World() {
  destroy_groups();
  for (const twComm_t comm : comms) {
    if (comm == nullptr) continue;  // killed
    EXPECT_TW(twSuccess, twCommDestroy(comm));
  }
}

void World::abandon(int rank) {
  ErrorRecord record = groups[rank]->error();
  record.sticky = 1;
  record.result = twInternalError;
  groups[rank]->set_error(record);
}

void World::kill(int rank) {
  abandon(rank);
  EXPECT_TW(twSuccess, twGroupDestroy(groups[rank]));
  EXPECT_TW(twSuccess, twCommDestroy(comms[rank]));
  groups[rank] = nullptr;
  comms[rank] = nullptr;
}

void World::destroy_groups() {
  on_all_ranks(size(), [&](int rank) {
    if (groups[rank] == nullptr) return;
    EXPECT_TW(twSuccess, twGroupDestroy(groups[rank]));
    groups[rank] = nullptr;
  });
}

std::vector<uint8_t> World::window(int rank) const {
  const WindowMap& map = groups[rank]->context.map;
  const auto* const view =
      static_cast<const uint8_t*>(groups[rank]->backend->view(groups[rank]->context.map, {0, 0}, 0));
  const uint8_t* const begin = view - map.payload(0, 0, 0, 0, 0, 0);
  return {begin + map.signal(0, 0, 0), begin + map.bytes()};
}

bool goes(const Traffic& traffic, const twGroupConfig_t& config, int rank, int token, int to) {
  const int32_t* const ids = traffic.ids[rank].data() + token * config.top_k;
  return std::any_of(ids, ids + config.top_k, [&](int32_t id) { return id >= 0 && id / 2 == to; });
}

Traffic make_traffic(const twGroupConfig_t& config, const std::vector<int>& tokens, uint32_t seed) {
  Traffic traffic;
  traffic.tokens = tokens;
  for (size_t rank = 0; rank < tokens.size(); ++rank) {
    std::vector<int32_t> ids;
    std::vector<float> weights;
    for (int t = 0; t < tokens[rank]; ++t) {
      std::vector<int32_t> deck(config.num_experts);
      for (int32_t e = 0; e < config.num_experts; ++e) deck[e] = e;
      for (int k = 0; k < config.top_k; ++k) {
        const uint32_t h = mix({seed, rank, static_cast<uint64_t>(t), static_cast<uint64_t>(k)});
        std::swap(deck[k], deck[k + h % (config.num_experts - k)]);
        ids.push_back(h / 1024 % 6 == 0 ? -1 : deck[k]);
        weights.push_back(std::ldexp(static_cast<float>(h >> 4 & 0xfff) + 1.0f, -12));
      }
    }
    traffic.ids.push_back(std::move(ids));
    traffic.weights.push_back(std::move(weights));
  }
  return traffic;
}

Exchange::Exchange(const World& world, Traffic traffic, const Style& style, uint32_t salt)
    : traffic_(std::make_unique<Traffic>(std::move(traffic))) {
  for (int rank = 0; rank < world.size(); ++rank) {
    sides_.push_back(std::make_unique<Side>(world, *traffic_, rank, style, salt));
  }
}

void Exchange::send_dispatch() {
  for (auto& side : sides_) EXPECT_TW(twSuccess, side->dispatch(true));
}

void Exchange::complete_dispatch() {
  for (auto& side : sides_) {
    EXPECT_TW(twSuccess, side->complete());
    side->expect_received();
  }
}

void Exchange::send_combine() {
  for (auto& side : sides_) EXPECT_TW(twSuccess, side->combine(true));
}

void Exchange::complete_combine() {
  for (auto& side : sides_) {
    EXPECT_TW(twSuccess, side->complete());
    side->expect_tokens();
  }
}

void Exchange::renew(uint32_t salt) {
  for (auto& side : sides_) side->renew(salt);
}

}  // namespace tw::test
