// How the CUDA backend comes into being: every rank does a stage alone, then all meet. Takes BackendInit; gives an open
// backend on all ranks, or an error on all.
//
// What breaks if this changes: tags must rise and be alike on all ranks; windows are prepared before peers can map them
// (S2); all kernels are loaded before any rank may wait (S6); the packet bound and the combine's tail become the least
// of all ranks' (S4: receivers must expect what senders send).
#include <algorithm>

#include "cuda/host/backend.h"
#include "cuda/launch/loading.h"
#include "cuda/launch/steps.h"
#include "cuda/transport/carrier.h"
#include "cuda/transport/posted.h"
#include "exchange/notes.h"

namespace tw::cuda {

Status NvlinkBackend::fill_view(const BackendInit& init) {
  const Status fits = budget_for(shape(), &budget_);
  fit_view();
  view_.me = context_.me;
  view_.local_experts = context_.local_experts;
  view_.no_wait = init.no_wait ? 1 : 0;
  view_.by_shares = context_.spec->policy == twReplicaShares ? 1 : 0;
  view_.timeout_ns = static_cast<uint64_t>(init.timeout_ms) * 1000000;
  return fits;
}

namespace {

// A meeting behind what a rank does alone.
Status meet(const BackendInit& init, uint64_t* tag, const char* occasion, const Status& mine) {
  return agree(*init.bootstrap, init.members, (*tag)++, init.deadline, occasion, mine);
}

}  // namespace

// Makes the window, the control pages and, between devices apart, the transport.
Status NvlinkBackend::make_arena(const BackendInit& init, uint64_t* tag) {
  arena_ = std::make_shared<DeviceArena>();
  if (init.posts()) {
    TW_RETURN_IF_FAILED(PostedTransport::create(init, *tag, &windows_, &arena_->staged));
    *tag += PostedTransport::kTags;
  } else if (init.carrier != nullptr) {
    const Status mapped = make_own_window(init, &windows_);
    std::shared_ptr<DeviceMapping> own;
    if (mapped.ok()) own = windows_.by_rank[context_.me];
    TW_RETURN_IF_FAILED(CarrierTransport::create(init, *tag, mapped, std::move(own), &arena_->staged));
    *tag += 2;
  } else {
    const Status mapped = map_device_windows(init, (*tag)++, &windows_);
    TW_RETURN_IF_FAILED(meet(init, tag, "mapping windows", mapped));
  }
  std::unique_ptr<Control>& control = arena_->control;
  const bool apart = arena_->staged != nullptr || !init.bootstrap->shares_memory();
  const Status controlled = apart ? Control::create_apart(init, &control) : Control::create(init, *tag, &control);
  ++*tag;
  return meet(init, tag, "sharing control pages", controlled);
}

// Takes over what the group has that makes the window. What may have been in the window's load statistics is of groups
// that have ended on all ranks: nobody writes there any more.
Status NvlinkBackend::share_arena(const BackendInit& init, uint64_t* tag) {
  const auto& first = static_cast<const NvlinkBackend&>(*init.arena);
  arena_ = first.arena_;
  windows_ = first.windows_;
  if (init.posts()) *tag += PostedTransport::kTags;
  if (arena_->staged != nullptr && shape().exact()) TW_RETURN_IF_FAILED(arena_->staged->make_arrivals(init));
  const uint64_t loads = WindowMap::loads_bytes(shape());
  for (int channel = 0; channel < shape().channels && loads > 0; ++channel) {
    TW_RETURN_IF_FAILED(clear(window() + context_.map.loads(channel, 0, 0), loads));
  }
  return {};
}

// Opens the backend. Each stage that a rank does alone ends in a meeting, so that none waits for one that has failed.
// Tags of a comm must rise: see Connection::take.
Status NvlinkBackend::open(const BackendInit& init) {
  const OnDevice on(device_);
  const OutsideCaptures outside;
  uint64_t tag = init.tag;
  Status prepared;
  if (init.arena != nullptr) {
    prepared = share_arena(init, &tag);
  } else {
    TW_RETURN_IF_FAILED(make_arena(init, &tag));
  }
  control_ = arena_->control.get();
  staged_ = arena_->staged.get();
  if (prepared.ok()) prepared = fill_view(init);
  std::vector<std::byte*> windows;
  for (const auto& window : windows_.by_rank) windows.push_back(window->data());
  if (prepared.ok() && init.arena == nullptr) prepared = arena_->make(context_, windows);
  arena_->fill(&view_);
  if (prepared.ok()) prepared = GroupMemory::create(context_, &view_, &memory_);
  if (prepared.ok()) prepared = launched("loading the kernels", load_kernels(shape()));
  bool may = false;
  if (prepared.ok() && init.arena == nullptr) prepared = may_use_packets(&may);
  TW_RETURN_IF_FAILED(meet(init, &tag, "loading kernels", prepared));
  if (init.arena == nullptr) TW_RETURN_IF_FAILED(test_links(init, may, &tag));
  if (!arena_->packets) view_.packet_tokens = 0;
  // All ranks use the least that any has found: receivers must expect what senders send.
  TW_RETURN_IF_FAILED(least(init, tag++, {&view_.packet_tokens, &budget_.summed_tail}));
  budget_.packet_tokens = view_.packet_tokens;
  if (init.arena != nullptr) return {};
  if (init.posts()) {
    const std::chrono::milliseconds timeout(init.timeout_ms);
    control_->watch_network([staged = staged_] { return staged->failure(); }, timeout);
  }
  control_->on_stop([arena = arena_.get(), device = device_] {
    const OnDevice here(device);
    const OutsideCaptures apart;
    arena->stop_kernels();
    if (arena->staged != nullptr) arena->staged->abort();
  });
  return {};
}

// Tests whether packets arrive whole. All ranks test, or none does: a test needs an answer. `may`: whether this rank
// would use them.
Status NvlinkBackend::test_links(const BackendInit& init, bool may, uint64_t* tag) {
  int32_t testing = may ? 1 : 0;
  TW_RETURN_IF_FAILED(least(init, (*tag)++, {&testing}));
  arena_->packets = testing != 0;
  const Status tested = testing != 0 ? test_packets() : Status{};
  return meet(init, tag, "testing the links", tested);
}

std::shared_ptr<void> NvlinkBackend::keep_window() {
  windows_.by_rank[context_.me]->keep();
  return windows_.by_rank[context_.me];
}

// Makes each value the least of all ranks' values.
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

// Tells whether this rank may use packets, as far as it knows alone. Packets need 16-byte stores that arrive whole,
// which PTX does not promise. They are used where each pair of ranks has seen so, on devices of compute capability 9.0
// or more that reach each other over NVLink, as far as CUDA or NVML knows their links; see find_link.
Status NvlinkBackend::may_use_packets(bool* may) {
  int major = 0;
  TW_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_));
  *may = context_.map.packet_row() > 0 && major >= 9 && windows_.links != twLinksOther;
  return {};
}

Status NvlinkBackend::test_packets() {
  uint32_t torn = 0;
  GroupView view = view_;
  view.timeout_ns = std::min<uint64_t>(view.timeout_ns, 10'000'000'000);
  view.no_wait = 0;
  TW_RETURN_IF_FAILED(arena_->with_counter(&torn, [&](uint32_t* counter, cudaStream_t stream) {
    Status started = launched("the test of packets", launch_self_test({view, counter, 0}, stream));
    if (!started.ok()) return started;
    if (const cudaError_t error = settle_stream(stream); error != cudaSuccess) {
      return cuda_failure("testing the links", error);
    }
    return was_interrupted() ? fail(twInterrupted, "testing the links was interrupted") : Status{};
  }));
  arena_->packets = torn == 0;
  return {};
}

}  // namespace tw::cuda

namespace tw {

Status make_nvlink_backend(const BackendInit& init, std::unique_ptr<Backend>* backend) {
  auto made = std::make_unique<cuda::NvlinkBackend>(init);
  TW_RETURN_IF_FAILED(made->open(init));
  *backend = std::move(made);
  return {};
}

}  // namespace tw
