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
#include "exchange/notes.h"

namespace tw::cuda {

Status NvlinkBackend::fill_view(const BackendInit& init) {
  const Status fits = budget_for(shape(), &budget_);
  if (shape().counts_loads != 0 && staged_ != nullptr) {
    return fail(twUnsupported, "{} is 1; between CUDA devices over a carrier dispatches tell no counts",
                Argument("config.placement->count_loads"));
  }
  fit_view();
  view_.me = context_.me;
  view_.local_experts = context_.local_experts;
  view_.no_wait = init.no_wait ? 1 : 0;
  view_.by_shares = context_.spec->policy == twReplicaShares ? 1 : 0;
  view_.timeout_ns = static_cast<uint64_t>(init.timeout_ms) * 1000000;
  return fits;
}

// Opens the backend. Each stage that a rank does alone ends in a meeting, so that none waits for one that has failed.
// Tags of a comm must rise: see Connection::take.
Status NvlinkBackend::open(const BackendInit& init) {
  const OnDevice on(device_);
  const OutsideCaptures outside;
  uint64_t tag = init.tag;
  const auto meet = [&](const char* occasion, const Status& mine) {
    return agree(*init.bootstrap, init.members, tag++, init.deadline, occasion, mine);
  };
  const bool staged = init.carrier != nullptr;
  const Status mapped = staged ? make_own_window(init, &windows_) : map_device_windows(init, tag, &windows_);
  ++tag;
  if (staged) {
    std::shared_ptr<DeviceMapping> own;
    if (mapped.ok()) own = windows_.by_rank[context_.me];
    TW_RETURN_IF_FAILED(StagedTransport::create(init, tag, mapped, std::move(own), &staged_));
    tag += 2;
  } else {
    TW_RETURN_IF_FAILED(meet("mapping windows", mapped));
  }
  const Status controlled = staged ? Control::create_apart(init, &control_) : Control::create(init, tag, &control_);
  ++tag;
  TW_RETURN_IF_FAILED(meet("sharing control pages", controlled));
  Status prepared = fill_view(init);
  std::vector<std::byte*> windows;
  for (const auto& window : windows_.by_rank) windows.push_back(window->data());
  if (prepared.ok()) prepared = Arena::create(context_, windows, control_->on_device(), &view_, &arena_);
  if (prepared.ok()) prepared = launched("loading the kernels", load_kernels(shape()));
  bool may = false;
  if (prepared.ok()) prepared = may_use_packets(&may);
  TW_RETURN_IF_FAILED(meet("loading kernels", prepared));
  // All ranks test, or none does: a test needs an answer.
  int32_t testing = may ? 1 : 0;
  TW_RETURN_IF_FAILED(least(init, tag++, {&testing}));
  const Status tested = testing != 0 ? test_packets() : Status{};
  if (testing == 0) view_.packet_tokens = 0;
  TW_RETURN_IF_FAILED(meet("testing the links", tested));
  // All ranks use the least that any has found: receivers must expect what senders send.
  TW_RETURN_IF_FAILED(least(init, tag++, {&view_.packet_tokens, &budget_.summed_tail}));
  budget_.packet_tokens = view_.packet_tokens;
  control_->on_stop([this] {
    const OnDevice here(device_);
    const OutsideCaptures apart;
    arena_->stop_kernels();
    if (staged_ != nullptr) staged_->abort();
  });
  return {};
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
// or more that reach each other over NVLink.
Status NvlinkBackend::may_use_packets(bool* may) {
  int major = 0;
  TW_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_));
  *may = shape().packet_tokens > 0 && major >= 9 && windows_.linked;
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
  if (torn != 0) view_.packet_tokens = 0;
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
