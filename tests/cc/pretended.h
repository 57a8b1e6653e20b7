// A group whose backend only says that it is a device: what the host decides for devices is tested by it without one.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/group.h"
#include "harness.h"

namespace tw::test {

// Enqueues nothing and notes what it was asked for; every step is as good as done.
class Pretended : public Backend {
 public:
  Pretended(const Context& context, std::unique_ptr<Backend> window) : Backend(context), window_(std::move(window)) {}

  Status send_dispatch(const DispatchCall& call, HandleArrays& handle) override {
    places.push_back(call.at);
    limits.push_back(call.sm_limit);
    sources.push_back(handle.source);
    return refused;
  }
  Status send_combine(const CombineCall& call, HandleArrays&) override {
    places.push_back(call.at);
    limits.push_back(call.sm_limit);
    return refused;
  }
  Status send_refusal(StepPlace at, const Refusal& refusal) override {
    places.push_back(at);
    const bool gathers = refusal.phase == twPhaseGather;
    refusals += refusal.combining != nullptr ? "c" : gathers ? (refusal.views ? "G" : "g") : "d";
    return {};
  }
  Status send_collective(const CollectiveCall& call) override {
    places.push_back(call.at);
    limits.push_back(call.sm_limit);
    collected.push_back(call);
    return refused;
  }
  Status send_sharing(const SharingCall& call, HandleArrays&) override {
    places.push_back(call.at);
    return refused;
  }
  StepEnd finish_sharing(const SharingCall&, TimePoint, HandleArrays&) override { return {}; }
  StepEnd finish_collective(const CollectiveCall& call, TimePoint) override {
    streams.push_back(call.stream);
    limits.push_back(call.sm_limit);
    return {};
  }
  Status send_counts(const CountsCall& call, HandleArrays&) override {
    limits.push_back(call.sm_limit);
    return {};
  }
  StepEnd finish_counts(const CountsCall&, TimePoint, HandleArrays&, KnownCounts*) override { return {}; }
  StepEnd finish_dispatch(const DispatchCall& call, TimePoint, HandleArrays&) override {
    streams.push_back(call.stream);
    limits.push_back(call.sm_limit);
    return {};
  }
  StepEnd finish_combine(const CombineCall& call, TimePoint, HandleArrays&) override {
    streams.push_back(call.stream);
    limits.push_back(call.sm_limit);
    return {};
  }
  StepEnd drain(StepPlace, TimePoint) override { return {}; }
  Status prepare_growth(const BackendInit&, WindowMap*) override { return {}; }
  void end_growth(bool, bool) override {}
  std::byte* window() override { return window_->window(); }
  std::byte* window_of(int) override { return nullptr; }
  std::shared_ptr<void> keep_window() override { return nullptr; }
  void announce_abort(AbortSignal reason) override { window_->announce_abort(reason); }
  AbortSignal find_abort() override { return window_->find_abort(); }
  AbortSignal abort_of(int writer) override { return window_->abort_of(writer); }

  bool on_device() const override { return true; }
  Status check_stream(const void*) const override { return {}; }
  bool captures(const void*) const override { return capturing; }
  bool poll(ErrorRecord* record) override {
    if (news.result == twSuccess) return false;
    *record = news;
    news = empty_record();
    return true;
  }

  std::vector<StepPlace> places;
  std::vector<RoutingSource> sources;
  std::vector<void*> streams;
  std::vector<int32_t> limits;  // sm_limit of what was sent and finished
  std::vector<CollectiveCall> collected;
  std::string refusals;
  Status refused;
  bool capturing = false;
  ErrorRecord news = empty_record();

 private:
  std::unique_ptr<Backend> window_;
};

class PretendedGroup : public ::testing::Test {
 protected:
  explicit PretendedGroup(const twGroupConfig_t& config = make_config(6, 2, 4)) : world(1, config), group(*world[0]) {
    auto made = std::make_unique<Pretended>(group.context, std::move(group.backend));
    device = made.get();
    group.backend = std::move(made);
  }
  twHandle_t make_handle() {
    const twTensor_t tensor_of_ids = tensor(ids, twInt32, {4, 2});
    twHandle_t handle = nullptr;
    EXPECT_TW(twSuccess, twHandleCreate(&handle, &group, &tensor_of_ids, nullptr, nullptr));
    return handle;
  }
  twResult_t dispatch(twHandle_t handle, int64_t tokens = 4, bool send_only = false, int32_t sm_limit = 0) {
    twDispatchInput_t input = TW_DISPATCH_INPUT_INIT;
    input.stream = stream;
    input.sm_limit = sm_limit;
    input.send_only = send_only ? 1 : 0;
    input.payloads[0] = tensor(rows, twBfloat16, {tokens, 8});
    received = TW_DISPATCH_OUTPUT_INIT;
    received.layout = layout;
    return twDispatch(&group, handle, &input, &received);
  }
  twResult_t combine(twHandle_t handle, int32_t sm_limit = 0) {
    twCombineInput_t input = TW_COMBINE_INPUT_INIT;
    input.stream = stream;
    input.sm_limit = sm_limit;
    input.layout = layout;
    input.rows = received.payloads[0];
    twCombineOutput_t output = TW_COMBINE_OUTPUT_INIT;
    output.tokens = tensor(sums, twBfloat16, {4, 8});
    return twCombine(&group, handle, &input, &output);
  }

  World world;
  twGroup& group;
  Pretended* device = nullptr;
  void* stream = &world;  // any address
  int32_t ids[8] = {0, 1, 2, 3, 4, 5, 1, 99};
  uint16_t rows[32] = {};
  uint16_t sums[32] = {};
  twLayout_t layout = twRankMajor;
  twDispatchOutput_t received{};
};

}  // namespace tw::test
