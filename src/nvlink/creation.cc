// How the CUDA backend comes into being: every rank does a stage, then all meet.
#include <algorithm>

#include "exchange/notes.h"
#include "nvlink/backend.h"

namespace tw::nvlink {

Status NvlinkBackend::fill_view(const BackendInit& init) {
  cudaDeviceProp prop{};
  TW_CUDA(cudaGetDeviceProperties(&prop, device_));
  sharing_ = windows_.sharing;
  const int limit = sm_limit_ > 0 ? std::min(sm_limit_, prop.multiProcessorCount) : prop.multiProcessorCount;
  const int queues = sharing_ * shape().lanes;
  device_sms_ = prop.multiProcessorCount;
  max_grid_ = std::clamp(std::min(limit, prop.multiProcessorCount / queues), 1, kMaxBlocks);
  // Few SMs send more than a round of rows sooner as they lie, in wide units, than as lines.
  const bool few = max_grid_ < device_sms_ / 2;
  summed_tail_ = tail_of(kTailSummed, few);
  if (shape().counts_loads != 0) {
    tally_ = max_grid_ > 1 ? Tally::kApart : Tally::kLast;
    max_grid_ = std::max(1, max_grid_ - 1);  // a block of each dispatch counts
  }
  early_ = queues == 1 && prop.major >= 9 && carriage_ == nullptr;  // what comes before may be a collective
  // A view would hold SMs while the dispatch before it waits for peers: not where the others are somebody else's.
  early_views_ = early_ && sm_limit_ == 0;
  if (shape().counts_loads != 0 && carriage_ != nullptr) {
    return fail(twUnsupported,
                "config.placement->count_loads is 1; between CUDA devices over a carrier dispatches tell no counts");
  }
  view_grid_ = sm_limit_ > 0 ? limit : 2 * limit;
  dispatch_ = DispatchScratch::make(shape());
  combine_ = CombineScratch::make(shape());
  collective_ = CollectiveScratch::make(shape());
  view_.map = context_.map;
  view_.me = context_.me;
  view_.local_experts = context_.local_experts;
  view_.line_tokens = few ? std::min(shape().line_tokens, kRound) : shape().line_tokens;
  view_.no_wait = init.no_wait ? 1 : 0;
  view_.by_shares = context_.spec->policy == twReplicaShares ? 1 : 0;
  view_.note_bits = note_bits(shape().max_tokens);
  view_.timeout_ns = static_cast<uint64_t>(init.timeout_ms) * 1000000;
  if (queues <= prop.multiProcessorCount) return {};
  return fail(twInvalidArgument,
              "config.lanes is %d; %d ranks share a device of %d SMs, and a block of each lane of each must find room "
              "there, so lanes must be from 1 to %d",
              shape().lanes, sharing_, prop.multiProcessorCount, prop.multiProcessorCount / sharing_);
}

// Each stage that a rank does alone ends in a meeting, so that none waits for one that has failed. Tags of a comm must
// rise: see Connection::take.
Status NvlinkBackend::open(const BackendInit& init) {
  const OnDevice on(device_);
  const OutsideCaptures outside;
  uint64_t tag = init.tag;
  const auto meet = [&](const char* occasion, const Status& mine) {
    return agree(*init.bootstrap, init.members, tag++, init.deadline, occasion, mine);
  };
  const bool carried = init.carrier != nullptr;
  const Status mapped = carried ? make_own_window(init, &windows_) : map_device_windows(init, tag, &windows_);
  ++tag;
  if (carried) {
    std::shared_ptr<DeviceMapping> own;
    if (mapped.ok()) own = windows_.by_rank[context_.me];
    TW_RETURN_IF_FAILED(Carriage::create(init, tag, mapped, std::move(own), &carriage_));
    tag += 2;
  } else {
    TW_RETURN_IF_FAILED(meet("mapping windows", mapped));
  }
  const Status controlled = carried ? Control::create_apart(init, &control_) : Control::create(init, tag, &control_);
  ++tag;
  TW_RETURN_IF_FAILED(meet("sharing control pages", controlled));
  Status prepared = fill_view(init);
  std::vector<std::byte*> windows;
  for (const auto& window : windows_.by_rank) windows.push_back(window->data());
  if (prepared.ok()) prepared = Arena::create(context_, windows, control_->on_device(), &view_, &arena_);
  if (prepared.ok()) prepared = launched("loading the kernels", load_kernels(shape()));
  bool may = false;
  if (prepared.ok()) prepared = may_use_lines(&may);
  TW_RETURN_IF_FAILED(meet("loading kernels", prepared));
  // All test, or nobody: a test needs an answer.
  int32_t testing = may ? 1 : 0;
  TW_RETURN_IF_FAILED(least(init, tag++, {&testing}));
  const Status tested = testing != 0 ? test_lines() : Status{};
  if (testing == 0) view_.line_tokens = 0;
  TW_RETURN_IF_FAILED(meet("testing the links", tested));
  // The least that any rank found is what all use: receivers must expect what senders send.
  TW_RETURN_IF_FAILED(least(init, tag++, {&view_.line_tokens, &summed_tail_}));
  control_->on_stop([this] {
    const OnDevice here(device_);
    const OutsideCaptures apart;
    arena_->stop_kernels();
    if (carriage_ != nullptr) carriage_->abort();
  });
  return {};
}

std::shared_ptr<void> NvlinkBackend::keep_window() {
  windows_.by_rank[context_.me]->keep();
  return windows_.by_rank[context_.me];
}

// Values become the least of all ranks'.
Status NvlinkBackend::least(const BackendInit& init, uint64_t tag, std::initializer_list<int32_t*> values) {
  Packer mine;
  for (const int32_t* value : values) mine.add(*value);
  std::vector<Parcel> parcels;
  TW_RETURN_IF_FAILED(
      gather(*init.bootstrap, init.members, tag, {mine.take(), {}}, init.deadline, "testing the links", &parcels));
  for (const Parcel& parcel : parcels) {
    Unpacker theirs(parcel.bytes);
    for (int32_t* value : values) *value = std::min(*value, theirs.get<int32_t>());
  }
  return {};
}

// Lines need 16-byte stores that arrive whole, which PTX does not promise. They are used where each pair of ranks has
// seen so, on devices of compute capability 9.0 or more that reach each other over NVLink.
Status NvlinkBackend::may_use_lines(bool* may) {
  int major = 0;
  TW_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_));
  *may = shape().line_tokens > 0 && major >= 9 && windows_.linked;
  return {};
}

Status NvlinkBackend::test_lines() {
  uint32_t torn = 0;
  GroupView view = view_;
  view.timeout_ns = std::min<uint64_t>(view.timeout_ns, 10'000'000'000);
  view.no_wait = 0;
  TW_RETURN_IF_FAILED(arena_->with_counter(&torn, [&](uint32_t* counter, cudaStream_t stream) {
    Status started = launched("the test of lines", launch_self_test({view, counter, 0}, stream));
    if (!started.ok()) return started;
    if (const cudaError_t error = settle_stream(stream); error != cudaSuccess) {
      return cuda_failure("testing the links", error);
    }
    return was_interrupted() ? fail(twInterrupted, "testing the links was interrupted") : Status{};
  }));
  if (torn != 0) view_.line_tokens = 0;
  return {};
}

}  // namespace tw::nvlink

namespace tw {

Status make_nvlink_backend(const BackendInit& init, std::unique_ptr<Backend>* backend) {
  auto made = std::make_unique<nvlink::NvlinkBackend>(init);
  TW_RETURN_IF_FAILED(made->open(init));
  *backend = std::move(made);
  return {};
}

}  // namespace tw
