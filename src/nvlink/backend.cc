// The CUDA backend: arguments into kernel parameters, and what kernels report into errors. What happens to bytes is in
// dispatch.cu, combine_lines.cu, combine_bulk.cu and views.cu.
#include "core/backend.h"

#include <cstring>
#include <functional>
#include <mutex>

#include "core/group.h"
#include "nvlink/control.h"
#include "nvlink/memory.h"
#include "nvlink/window.h"

namespace tw::nvlink {
namespace {

constexpr int kSplit = 16;  // blocks from which on some send and some sum
// One block in so many sends: a few fill a link, and sums need all the memory bandwidth that they can get.
constexpr int kSenderShare = 3;
constexpr int kSelfTestRounds = 64;

Status launched(const char* what, int error) { return error == 0 ? Status{} : cuda_failure(what, error); }

// The largest power of two up to 16 that divides everything.
int width_of(std::initializer_list<uint64_t> values) {
  uint64_t all = 16;
  for (const uint64_t value : values) all |= value;
  return static_cast<int>(all & (~all + 1));
}
bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) != cudaSuccess) (void)cudaGetLastError();
  return status == cudaStreamCaptureStatusActive;
}

uint64_t address_of(const void* at) { return reinterpret_cast<uintptr_t>(at); }

class NvlinkBackend : public Backend {
 public:
  explicit NvlinkBackend(const BackendInit& init)
      : context_(*init.context),
        device_(init.device),
        in_process_(init.bootstrap->in_process()),
        blocking_(init.blocking),
        sm_limit_(init.sm_limit) {}

  ~NvlinkBackend() override {
    const OnDevice on(device_);
    control_.reset();  // its thread uses what goes next
    settle();
    arena_.reset();
  }

  Status open(const BackendInit& init);

  bool on_device() const override { return true; }

  Status check_stream(const void* stream) const override {
    if (!in_process_ || (stream != nullptr && stream != cudaStreamLegacy)) return {};
    return fail(twInvalidArgument,
                "stream is %p, the default stream; local ranks may wait for each other on a device, so each needs a "
                "non-blocking stream of its own",
                stream);
  }

  // A call that receives too is one kernel, launched here.
  Status send_dispatch(const DispatchCall& call, HandleArrays& handle) override {
    return run_dispatch(call, handle, true, !call.send_only);
  }
  Status send_combine(const CombineCall& call, HandleArrays& handle) override {
    return run_combine(call, handle, true, !call.send_only);
  }

  Status send_refusal(StepPlace at, bool dispatching, void* stream) override {
    const OnDevice on(device_);
    remember(stream);
    return launched("the refusal of a call", launch_refuse({view_, at.lane, dispatching ? at.bank() : -1}, stream));
  }

  StepEnd finish_dispatch(const DispatchCall& call, TimePoint, HandleArrays& handle) override {
    return end_of(call.stream, call.send_only ? run_dispatch(call, handle, false, true) : Status{});
  }
  StepEnd finish_combine(const CombineCall& call, TimePoint, HandleArrays& handle) override {
    return end_of(call.stream, call.send_only ? run_combine(call, handle, false, true) : Status{});
  }
  // A refusal's kernel has waited for the peers.
  StepEnd drain(StepPlace, TimePoint) override { return {}; }

  void* view(StepPlace at, int q) override { return window() + context_.map.payload(at.lane, at.bank(), q, 0, 0, 0); }
  bool in_window(const void* address) override {
    const auto* const at = static_cast<const std::byte*>(address);
    return std::less_equal<>()(window(), at) && std::less<>()(at, window() + context_.map.bytes());
  }

  void announce_abort(AbortWord reason) override { control_->announce_abort(reason); }
  AbortWord find_abort() override { return control_->find_abort(); }
  AbortWord abort_of(int writer) override { return control_->abort_of(writer); }

  bool poll(twErrorRecord_t* record) override;

  std::byte* allocate(size_t bytes) override {
    const OnDevice on(device_);
    return arena_->allocate(bytes);
  }
  void release(std::byte* block) override {
    const OnDevice on(device_);
    arena_->release(block);
  }

  Status copy_counts(const HandleArrays& handle, int32_t* counts) override {
    const OnDevice on(device_);
    const OutsideCaptures outside;
    const auto stream = static_cast<cudaStream_t>(last_stream_);
    TW_CUDA(cudaMemcpyAsync(counts, handle.received.counts, sizeof(int32_t) * ranks(), cudaMemcpyDeviceToHost, stream));
    TW_CUDA(cudaStreamSynchronize(stream));
    return {};
  }

 protected:
  int32_t ranks() const override { return shape().ranks; }

 private:
  const Shape& shape() const { return context_.map.shape(); }
  std::byte* window() const { return windows_.by_rank[context_.me]->data(); }

  Status test_lines(const BackendInit& init);
  void fill_view(const BackendInit& init);
  Status run_dispatch(const DispatchCall& call, HandleArrays& handle, bool send, bool receive);
  Status run_combine(const CombineCall& call, HandleArrays& handle, bool send, bool receive);
  Status run_views(const DispatchCall& call, HandleArrays& handle);
  bool poll_others(twErrorRecord_t* record);
  StepEnd end_of(void* stream, const Status& run);
  void settle();
  HandleView view_of(const HandleArrays& handle) const;
  Shown shown_of(const DispatchTargets& targets, const HandleArrays& handle) const;
  void remember(void* stream);
  int grid_of(int64_t work) const { return static_cast<int>(std::clamp<int64_t>(work, 1, max_grid_)); }

  const Context& context_;
  const int device_;
  const bool in_process_;
  const bool blocking_;
  const int sm_limit_;
  int sharing_ = 1;
  int max_grid_ = 1;   // blocks of a kernel that waits: those of all lanes and ranks of a device fit on it (S8)
  int view_grid_ = 1;  // of one that does not
  DeviceWindows windows_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Control> control_;
  GroupView view_{};
  DispatchScratch dispatch_{};
  CombineScratch combine_lines_{};
  CombineScratch combine_bulk_{};
  TimePoint trouble_since_{};  // when others' trouble was first seen
  void* last_stream_ = nullptr;
  std::vector<void*> streams_;  // that were used, to be waited for at the end
};

void NvlinkBackend::remember(void* stream) {
  if (stream == last_stream_ && !streams_.empty()) return;
  last_stream_ = stream;
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) streams_.push_back(stream);
}

// Waits until nothing uses the group's memory any more. Ranks of one process wait for their own streams only: a device
// that ranks share may hold a kernel of another rank that waits for a later call of this one.
void NvlinkBackend::settle() {
  const OutsideCaptures outside;
  if (in_process_) {
    for (void* stream : streams_) cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
  } else {
    cudaDeviceSynchronize();
  }
}

void NvlinkBackend::fill_view(const BackendInit& init) {
  cudaDeviceProp prop{};
  cudaGetDeviceProperties(&prop, device_);
  sharing_ = windows_.sharing;
  const int limit = sm_limit_ > 0 ? std::min(sm_limit_, prop.multiProcessorCount) : prop.multiProcessorCount;
  max_grid_ = std::clamp(std::min(limit, prop.multiProcessorCount / (sharing_ * shape().lanes)), 1, kMaxBlocks);
  view_grid_ = sm_limit_ > 0 ? limit : 2 * limit;
  dispatch_ = DispatchScratch::make(shape());
  combine_lines_ = CombineScratch::make(shape(), false);
  combine_bulk_ = CombineScratch::make(shape(), true);
  view_.map = context_.map;
  view_.me = context_.me;
  view_.local_experts = context_.local_experts;
  view_.line_tokens = shape().line_tokens;
  view_.no_wait = init.no_wait ? 1 : 0;
  view_.timeout_ns = static_cast<uint64_t>(init.timeout_ms) * 1000000;
}

Status NvlinkBackend::open(const BackendInit& init) {
  const OnDevice on(device_);
  const OutsideCaptures outside;
  TW_RETURN_IF_FAILED(map_device_windows(init, &windows_));
  BackendInit later = init;
  TW_RETURN_IF_FAILED(Control::create(later, init.tag + 1, &control_));
  fill_view(init);
  std::vector<std::byte*> windows;
  for (const auto& mapped : windows_.by_rank) windows.push_back(mapped->data());
  Status made = Arena::create(context_, windows, control_->on_device(), &view_, &arena_);
  if (made.ok()) made = launched("loading the kernels", load_kernels(shape()));
  if (made.ok()) made = test_lines(init);
  // The least that any rank found is what all use: receivers must expect what senders send.
  std::vector<Parcel> all;
  Status met = gather(*init.bootstrap, init.members, init.tag + 3, {Packer().add(view_.line_tokens).take(), {}},
                      init.deadline, "testing the links", &all);
  TW_RETURN_IF_FAILED(std::move(made));
  TW_RETURN_IF_FAILED(std::move(met));
  for (const Parcel& parcel : all) {
    view_.line_tokens = std::min(view_.line_tokens, Unpacker(parcel.bytes).get<int32_t>());
  }
  control_->on_stop([this] {
    const OnDevice here(device_);
    const OutsideCaptures apart;
    arena_->stop_kernels();
  });
  return {};
}

// Lines need 16-byte stores that arrive whole, which PTX does not promise. They are used where each pair of ranks has
// seen so, on devices of compute capability 9.0 or more that reach each other over NVLink.
Status NvlinkBackend::test_lines(const BackendInit& init) {
  int major = 0;
  TW_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_));
  const bool tested = shape().line_tokens > 0 && major >= 9 && windows_.linked;
  // All ranks meet, tested or not: only then is every window ready, and only if all test does anybody.
  std::vector<Parcel> all;
  TW_RETURN_IF_FAILED(gather(*init.bootstrap, init.members, init.tag + 2, {Packer().add<uint8_t>(tested).take(), {}},
                             init.deadline, "testing the links", &all));
  const bool everyone = std::all_of(all.begin(), all.end(),
                                    [](const Parcel& parcel) { return Unpacker(parcel.bytes).get<uint8_t>() != 0; });
  if (!everyone) {
    view_.line_tokens = 0;
    return {};
  }
  uint32_t torn = 0;
  GroupView view = view_;
  view.timeout_ns = std::min<uint64_t>(view.timeout_ns, 10'000'000'000);
  view.no_wait = 0;
  TW_RETURN_IF_FAILED(arena_->with_counter(&torn, [&](uint32_t* counter, cudaStream_t stream) {
    return launched("the test of lines", launch_self_test({view, counter, kSelfTestRounds}, stream));
  }));
  if (torn != 0) view_.line_tokens = 0;
  return {};
}

HandleView NvlinkBackend::view_of(const HandleArrays& handle) const {
  HandleView view{};
  view.ids = handle.routing.ids;
  view.weights = handle.routing.weights;
  view.fan = reinterpret_cast<int32_t*>(handle.routing.first);
  view.destinations = handle.routing.destinations;
  view.send_counts = handle.routing.send_counts;
  view.counts = handle.received.counts;
  view.meta = reinterpret_cast<uint64_t*>(handle.received.meta);
  view.places = handle.places;
  view.expert_counts = handle.expert_counts;
  view.status = handle.status;
  return view;
}

Shown NvlinkBackend::shown_of(const DispatchTargets& targets, const HandleArrays& handle) const {
  Shown shown{};
  shown.ids = targets.ids;
  shown.weights = targets.weights;
  shown.counts = targets.counts != nullptr ? targets.counts : handle.received.counts;
  shown.wide = context_.ids.dtype == twInt64;
  shown.local = context_.ids.space == twIdLocal;
  shown.invalid = context_.ids.invalid;
  return shown;
}

Status NvlinkBackend::run_dispatch(const DispatchCall& call, HandleArrays& handle, bool send, bool receive) {
  const OnDevice on(device_);
  remember(call.stream);
  DispatchParams p{};
  p.group = view_;
  p.handle = view_of(handle);
  const RoutingSource& source = handle.source;
  p.in.own = source.ids == nullptr;
  p.in.ids = p.in.own ? handle.routing.ids : source.ids;
  p.in.weights = p.in.own ? handle.routing.weights : source.weights;
  p.in.wide = !p.in.own && source.id_dtype == twInt64;
  for (const int i : {0, 1}) {
    const int64_t own_stride = i == 0 ? shape().top_k : 1;
    p.in.id_stride[i] = p.in.own ? own_stride : source.id_stride[i];
    p.in.weight_stride[i] = p.in.own ? own_stride : source.weight_stride[i];
  }
  bool whole = true;
  uint64_t word = words_of(meta_bytes(shape().top_k));
  for (int q = 0; q < shape().payloads; ++q) {
    const RowsIn& rows = call.payloads[q];
    const uint64_t bytes = shape().payload_bytes[q];
    PayloadIn& payload = p.payloads[q];
    payload.data = rows.data;
    payload.stride = rows.stride;
    const int width = width_of({address_of(rows.data), static_cast<uint64_t>(rows.stride), bytes});
    whole &= width >= 8;
    payload.width = width == 16 ? 16 : width >= 4 ? 4 : 1;  // what dispatch.cu has loops for
    payload.vectors = Divider::make(static_cast<uint32_t>(bytes / static_cast<uint64_t>(payload.width)));
    payload.first_word = static_cast<uint32_t>(word);
    word += words_of(bytes);
  }
  p.words = static_cast<uint32_t>(word);
  const bool rank_major = call.targets.layout == twRankMajor;
  p.shown = shown_of(call.targets, handle);
  if (!rank_major) p.shown.ids = p.shown.weights = nullptr, p.shown.counts = handle.received.counts;
  p.lane = call.at.lane;
  p.bank = call.at.bank();
  p.bound = call.bound;
  p.tokens = handle.routing.tokens;
  p.send = send;
  p.receive = receive;
  p.at = dispatch_;
  p.table = shape().experts <= kMaxTable;
  p.whole = whole;
  const int64_t slots = static_cast<int64_t>(shape().ranks - 1) * call.bound;
  const bool bulk = call.bound > view_.line_tokens;
  const int grid = bulk ? max_grid_ : grid_of(p.tokens + slots);
  TW_RETURN_IF_FAILED(launched("a dispatch", launch_dispatch(p, bulk, grid, call.stream)));
  // In a capture nothing has been copied yet: each replay reads the caller's tensors, and so does a later dispatch.
  if (send && !is_capturing(call.stream)) handle.source = {};
  return receive ? run_views(call, handle) : Status{};
}

// What the caller wants written elsewhere than in the window.
Status NvlinkBackend::run_views(const DispatchCall& call, HandleArrays& handle) {
  const DispatchTargets& targets = call.targets;
  const bool expert_major = targets.layout == twExpertMajor;
  ViewParams p{};
  bool any = expert_major;
  for (int q = 0; q < shape().payloads; ++q) {
    p.payloads[q] = targets.payloads[q];
    any |= targets.payloads[q] != nullptr;
    const uint64_t bytes = shape().payload_bytes[q];
    p.width[q] = width_of({address_of(targets.payloads[q]), bytes});
    p.vectors[q] = Divider::make(static_cast<uint32_t>(bytes / static_cast<uint64_t>(p.width[q])));
  }
  if (!any) return {};
  p.group = view_;
  p.handle = view_of(handle);
  p.lane = call.at.lane;
  p.bound = call.bound;
  p.shown = shown_of(targets, handle);
  const int64_t rows = static_cast<int64_t>(shape().ranks) * call.bound;
  const int grid = static_cast<int>(std::clamp<int64_t>(rows, 1, view_grid_));
  return launched("a view",
                  expert_major ? launch_expert_view(p, grid, call.stream) : launch_rank_view(p, grid, call.stream));
}

Status NvlinkBackend::run_combine(const CombineCall& call, HandleArrays& handle, bool send, bool receive) {
  const OnDevice on(device_);
  remember(call.stream);
  CombineParams p{};
  p.group = view_;
  p.handle = view_of(handle);
  p.lane = call.at.lane;
  p.bound = call.bound;
  p.tokens = handle.routing.tokens;
  p.send = send;
  p.receive = receive;
  p.expert_major = call.layout == twExpertMajor;
  p.weighted = call.weighted;
  p.plain = !p.expert_major && !p.weighted && call.rows_dtype == context_.wire;
  p.own_direct = call.apart;
  p.late_word = call.in_window;
  p.rows_dtype = call.rows_dtype;
  p.wire_dtype = context_.wire;
  p.out_dtype = call.out_dtype;
  p.elements = context_.elements;
  p.rows = call.rows.data;
  p.block_stride = call.rows.block_stride;
  p.row_stride = call.rows.row_stride;
  p.out = call.out;
  p.out_stride = call.out_stride;
  const int width = width_of({address_of(call.rows.data), static_cast<uint64_t>(call.rows.block_stride),
                              static_cast<uint64_t>(call.rows.row_stride), address_of(call.out),
                              static_cast<uint64_t>(call.out_stride), shape().combine_bytes});
  p.vectors_fit = width == 16;
  p.words_fit = width >= 8;
  p.vectors = static_cast<uint32_t>(shape().combine_bytes / 16);
  const int64_t rows = static_cast<int64_t>(shape().ranks - 1) * call.bound;
  const bool bulk = call.bound > view_.line_tokens || !call.apart;
  const int grid = bulk ? max_grid_ : grid_of(std::max<int64_t>(p.tokens, rows));
  const bool split = bulk && grid >= kSplit;
  p.senders = split ? grid / kSenderShare : grid;
  p.summers = split ? grid - p.senders : grid;
  p.at = bulk ? combine_bulk_ : combine_lines_;
  return launched("a combine",
                  bulk ? launch_combine_bulk(p, grid, call.stream) : launch_combine_lines(p, grid, call.stream));
}

// The end of a step, as far as the host knows it: launched, unless TOKENWAY_BLOCKING asks to wait.
StepEnd NvlinkBackend::end_of(void* stream, const Status& run) {
  StepEnd end;
  if (!run.ok()) {
    end = {twInternalError, context_.me, {}, 0};
    return end;
  }
  if (!blocking_) return end;
  const OnDevice on(device_);
  if (cudaStreamSynchronize(static_cast<cudaStream_t>(stream)) != cudaSuccess) {
    return {twInternalError, context_.me, {}, 0};
  }
  Report report;
  if (control_->next_failure(&report) || control_->next_call(&report)) {
    if (report.result == twInvalidArgument) return end;  // a bad id fails nothing; poll() tells of it
    end.code = static_cast<twResult_t>(report.result);
    end.peer = report.peer;
    end.seen.step = report.seen;
    end.note = report.note;
  } else if (control_->find_abort().kind != 0) {
    end.code = twExcluded;
  } else if (control_->dead() >= 0) {
    end = {twPeerDied, control_->dead(), {}, 0};
  }
  return end;
}

// Where this rank was: what a kernel has reported.
void fill_place(const Report& report, twErrorRecord_t* record) {
  record->phase = static_cast<twPhase_t>(report.phase);
  record->lane = report.lane;
  record->step = record->expected = report.step;
  record->seen = report.seen;
}

bool NvlinkBackend::poll(twErrorRecord_t* record) {
  *record = empty_record();
  Report report;
  const bool failed = control_->next_failure(&report);
  if (failed || control_->next_call(&report)) {
    record->result = static_cast<twResult_t>(report.result);
    record->sticky = failed ? 1 : 0;
    record->peer = report.peer;
    record->reporter = context_.me;
    record->token = report.token;
    record->k = report.k;
    record->value = report.value;
    fill_place(report, record);
    if (!failed) describe_call_error(record, report.bound, report.note);
    return true;
  }
  return poll_others(record);
}

// What others have found, or the watching thread. A kernel that waits says within a moment what for; the record tells
// that too, so it is given that moment.
bool NvlinkBackend::poll_others(twErrorRecord_t* record) {
  constexpr std::chrono::milliseconds kMoment{20};
  const AbortWord abort = control_->find_abort();
  const int dead = control_->dead();
  if (abort.kind == 0 && dead < 0) return false;
  const auto now = std::chrono::steady_clock::now();
  if (trouble_since_ == TimePoint{}) trouble_since_ = now;
  Report report;
  if (control_->stopped(&report)) {
    fill_place(report, record);
  } else if (now - trouble_since_ < kMoment) {
    return false;
  }
  record->result = abort.kind != 0 ? static_cast<twResult_t>(abort.kind) : twPeerDied;
  record->peer = abort.kind != 0 ? static_cast<int32_t>(abort.culprit) : dead;
  record->reporter = abort.kind != 0 ? static_cast<int32_t>(abort.reporter) : context_.me;
  record->sticky = 1;
  return true;
}

}  // namespace
}  // namespace tw::nvlink

namespace tw {

Status make_nvlink_backend(const BackendInit& init, std::unique_ptr<Backend>* backend) {
  auto made = std::make_unique<nvlink::NvlinkBackend>(init);
  TW_RETURN_IF_FAILED(made->open(init));
  *backend = std::move(made);
  return {};
}

}  // namespace tw
