// The CUDA backend's calls: arguments into kernel parameters, and what kernels report into errors. What happens to
// bytes is in the kernels, the files that end in .cu.
//
// Takes calls that the core has checked; gives launches on the caller's stream, and error records from what kernels and
// peers report.
//
// What breaks if this changes: which kernels may serve a call (width_of, usual, vectors_fit: an access that is wider
// than its memory allows faults); S3 (late_signal, and two launches where sums overwrite rows); S5 (p.bank). Whether a
// kernel comes early is speed.
#include "cuda/host/backend.h"

#include <algorithm>
#include <mutex>

#include "core/group.h"
#include "core/steps.h"
#include "cuda/launch/bias.h"
#include "cuda/launch/steps.h"
#include "cuda/plan/by_expert.h"
#include "cuda/plan/combine.h"
#include "cuda/plan/dispatch.h"
#include "layout/fp8_rows.h"

namespace tw::cuda {

// Gives the largest power of two up to 16 that divides everything.
int width_of(std::initializer_list<uint64_t> values) {
  uint64_t all = 16;
  for (const uint64_t value : values) all |= value;
  return static_cast<int>(all & (~all + 1));
}

namespace {

// What a dispatch's rows allow, by their sizes and where they lie.
struct PayloadFit {
  int width = 16;      // bytes that every access to any payload may take
  uint64_t words = 0;  // words of a row's stream, with its metadata
};
PayloadFit fill_payloads(const Shape& shape, const RowsIn* rows, PayloadIn* payloads) {
  PayloadFit fit;
  fit.words = words_of(meta_bytes(shape.top_k));
  for (int q = 0; q < shape.payloads; ++q) {
    const uint64_t bytes = shape.payload_bytes[q];
    PayloadIn& payload = payloads[q];
    payload.data = rows[q].data;
    payload.stride = rows[q].stride;
    const int width = width_of({address_of(rows[q].data), static_cast<uint64_t>(rows[q].stride), bytes});
    fit.width = std::min(fit.width, width);
    payload.width = width == 16 ? 16 : width >= 4 ? 4 : 1;  // the widths for which dispatch/send.cuh has loops
    payload.vectors = static_cast<uint32_t>(bytes / static_cast<uint64_t>(payload.width));
    payload.first_word = static_cast<uint32_t>(fit.words);
    fit.words += words_of(bytes);
  }
  return fit;
}

// Fills in where this rank was, as a kernel has reported it.
void fill_place(const Report& report, ErrorRecord* record) {
  record->phase = static_cast<twPhase_t>(report.phase);
  record->lane = report.channel;
  record->step = record->expected = report.step;
  record->seen = report.seen;
}

}  // namespace

// All ranks have agreed on packet_tokens and give the same bound, so all rows of such a step come as packets. Where
// their receiver puts them is its own affair: a view of more rows than there are unpacked ones (a fixed
// max_recv_tokens) lies in the bank.
WindowMap NvlinkBackend::places(const WindowMap& rows, int32_t bound, int64_t shown) const {
  const bool packets = bound <= std::min(view_.packet_tokens, rows.shape().packet_tokens);
  return packets && shown <= rows.unpacked_rows() ? rows.unpacked() : rows;
}

bool NvlinkBackend::captures(const void* stream) const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  auto* const on = static_cast<cudaStream_t>(const_cast<void*>(stream));
  if (cudaStreamIsCapturing(on, &status) != cudaSuccess) (void)cudaGetLastError();
  return status == cudaStreamCaptureStatusActive;
}

void NvlinkBackend::remember(void* stream) {
  if (stream == last_stream_ && !streams_.empty()) return;
  last_stream_ = stream;
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) streams_.push_back(stream);
}

HandleView NvlinkBackend::view_of(const HandleArrays& handle, const Shape& rows) const {
  const bool slots = shape().has_both_modes() && !rows.exact();
  HandleView view{};
  view.ids = handle.routing.ids;
  view.weights = handle.routing.weights;
  view.fan = reinterpret_cast<int32_t*>(handle.routing.first);
  view.destinations = handle.routing.destinations;
  view.send_counts = handle.send_counts(rows, context_.me);
  view.counts = handle.received.counts;
  view.meta = reinterpret_cast<uint64_t*>(slots ? handle.device.slot_meta : handle.received.meta);
  view.places = handle.device.places;
  view.expert_counts = handle.experts.counts;
  view.status = handle.device.status;
  view.digest = handle.device.digest;
  view.choices = handle.map.choices;
  view.sent_rows = handle.counts.sent;
  view.experts = handle.counts.experts;
  view.begin = handle.counts.begin;
  view.source = handle.counts.source;
  view.expert_begin = handle.experts.begin;
  view.offsets = handle.shown.offsets;
  view.overflow = handle.device.overflow;
  view.marks = rows.exact() ? handle.device.marks : nullptr;
  // With no_wait a kernel meets signals of other steps, some of which say that the metadata is known.
  const bool once = rows.exact() && view_.packet_tokens > 0 && rows.packet_tokens > 0 && view_.no_wait == 0;
  view.metadata_step = once ? handle.device.metadata_step : nullptr;
  view.receive_offset = handle.counts.receive_offset;
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

void NvlinkBackend::fill_receive_offsets(const DispatchCall& call, std::byte** receive_offset) {
  for (int q = 0; q < call.rows.payloads && call.has_offsets; ++q) {
    if (call.receive_offset[q] != 0) receive_offset[q] = window() + call.receive_offset[q];
  }
}

Status NvlinkBackend::run_dispatch(const DispatchCall& call, HandleArrays& handle, bool send, bool receive) {
  const OnDevice on(device_);
  remember(call.stream);
  const bool capturing = captures(call.stream);
  const Shape& rows = call.rows.map.shape();
  DispatchParams p{};
  p.group = view_at(call.at, call.rows.map, !call.send_only);
  p.rows_digest = call.rows.digest;
  p.handle = view_of(handle, rows);
  p.in = ids_of(handle, rows.exact() || !send);  // ids that were sent stay, whatever map there is now
  p.counted = call.counted ? 1 : 0;
  p.layer = handle.map.layer;
  const Budget budget = budget_of(rows, call.sm_limit);
  p.loads_block = send ? budget.loads_block : LoadsBlock::kNone;
  const IdsIn given = p.in;
  if (send) TW_RETURN_IF_FAILED(choose_slots(budget, handle, call.at, twPhaseDispatch, call.stream, &p.in));
  p.routed = balances() ? p.in : given;
  const uint64_t id_bytes = p.in.wide ? sizeof(int64_t) : sizeof(int32_t);
  const bool whole_ids =
      p.in.id_stride[1] == 1 && width_of({address_of(p.in.ids), static_cast<uint64_t>(p.in.id_stride[0]) * id_bytes,
                                          static_cast<uint64_t>(shape().top_k) * id_bytes}) == 16;
  const PayloadFit fit = fill_payloads(rows, call.payloads, p.payloads);
  const bool by_expert = layout_of(call.targets.layout).by_expert;
  p.shown = shown_of(call.targets, handle);
  p.rows = by_expert ? 0 : static_cast<int32_t>(call.targets.rows);
  if (by_expert) p.shown.ids = p.shown.weights = nullptr, p.shown.counts = handle.received.counts;
  p.channel = call.at.channel;
  p.bank = call.at.bank();
  p.bound = call.bound;
  p.tokens = handle.routing.tokens;
  p.send = send;
  p.receive = receive;
  p.has_offsets = call.has_offsets;
  fill_receive_offsets(call, p.receive_offset);
  p.at = dispatch_;
  p.packets = PacketsAt::make(call.rows.map, p.channel);
  p.table = fits_tables(shape());
  p.whole = fit.width >= 8;
  const bool usual = fit.width == 16 && whole_ids && is_usual(rows);
  plan_dispatch(budget, rows, {fit.words, usual, p.handle.metadata_step != nullptr && handle.device.brought}, &p);
  bool placed = false;  // rows are where the caller wants them
  TW_RETURN_IF_FAILED(run_by_expert(call, budget, handle, p, &placed));
  const int grid = p.roles.grid() + (p.loads_block == LoadsBlock::kApart ? kLoadsBlocks : 0);
  const bool early = budget.early && capturing;
  if (!placed) TW_RETURN_IF_FAILED(launched("a dispatch", launch_dispatch(p, grid, early, call.stream)));
  if (send && !rows.exact()) TW_RETURN_IF_FAILED(run_digest(handle, capturing, call.stream));
  // In a capture nothing has been copied yet: each replay reads the caller's tensors, and so does a later dispatch.
  if (send && !capturing && !rows.exact()) handle.source = {};
  if (send && rows.exact()) handle.device.brought = true;
  handle.device.stream = call.stream;
  return receive ? run_views(call, budget, handle, placed) : Status{};
}

ArrivedParams NvlinkBackend::arrived_params(const HandleArrays& handle, const WindowMap& map, int32_t channel,
                                            int32_t bound) const {
  ArrivedParams p{};
  p.group = view_;
  p.group.map = map;
  p.handle = view_of(handle, map.shape());
  p.channel = channel;
  p.bound = bound;
  const auto top_k = static_cast<uint32_t>(shape().top_k);
  p.ids = Divider::make(top_k);
  p.pairs = Divider::make((top_k + 1) / 2);
  p.slots = Divider::make(static_cast<uint32_t>(std::max(bound, 1)));
  return p;
}

Status NvlinkBackend::run_view(const char* what, LaunchView* launch, const Budget& budget, const ViewParams& params,
                               void* stream) {
  return launched(what, launch(params, view_blocks(budget), budget.early_views && captures(stream), stream));
}

// Describes a copy of what the caller wants elsewhere than in the window. False: nothing is.
bool NvlinkBackend::fill_copy(const DispatchCall& call, const HandleArrays& handle, ViewParams* params) {
  const DispatchTargets& targets = call.targets;
  const Layout& layout = layout_of(targets.layout);
  ViewParams& p = *params;
  static_cast<ArrivedParams&>(p) = arrived_params(handle, call.rows.map, call.at.channel, call.bound);
  bool any = layout.by_expert;
  std::byte* receive_offset[kMaxPayloads] = {};
  fill_receive_offsets(call, receive_offset);
  for (int q = 0; q < call.rows.payloads; ++q) {
    p.payloads[q] = targets.payloads[q];
    for (int bank = 0; bank < 2; ++bank) {
      p.from[bank][q] = receive_offset[q] != nullptr
                            ? receive_offset[q]
                            : window() + call.rows.map.payload_row(call.at.channel, bank, q, 0);
    }
    any |= targets.payloads[q] != nullptr;
    const uint64_t bytes = call.rows.map.shape().payload_bytes[q];
    p.width[q] = width_of({address_of(targets.payloads[q]), bytes});
    p.columns[q] = targets.columns[q];
    p.vectors[q] = static_cast<uint32_t>(bytes / static_cast<uint64_t>(p.width[q]));
  }
  p.shown = shown_of(targets, handle);
  p.rows = static_cast<int32_t>(targets.rows);
  p.offsets = layout.has_offsets() ? targets.offsets : nullptr;
  p.alignment = layout.placed_by_receiver() ? targets.alignment : 0;
  p.origins = targets.origins;
  return any;
}

// Launches a dispatch that puts rows straight to their experts, if its kernel serves the call.
Status NvlinkBackend::run_by_expert(const DispatchCall& call, const Budget& budget, const HandleArrays& handle,
                                    const DispatchParams& dispatch, bool* placed) {
  ByExpertParams p{};
  p.call = dispatch;
  ByExpertFacts facts;
  facts.by_expert = layout_of(call.targets.layout).by_expert;
  facts.local_experts = context_.local_experts;
  facts.width = 16;
  for (int q = 0; q < call.rows.payloads; ++q) {
    const std::byte* const to = call.targets.payloads[q];
    facts.columns |= call.targets.columns[q].wanted();
    facts.width = to == nullptr ? 0 : std::min(facts.width, width_of({address_of(to)}));
  }
  *placed = plan_by_expert(budget, call.rows.map.shape(), facts, &p);
  if (!*placed) return {};
  fill_copy(call, handle, &p.view);
  const int grid = p.call.roles.grid() + (p.call.loads_block == LoadsBlock::kApart ? kLoadsBlocks : 0);
  const bool early = budget.early && captures(call.stream);
  return launched("a dispatch by expert", launch_dispatch_by_expert(p, grid, early, call.stream));
}

// Copies what the caller wants elsewhere than in the window, if it is not there already (`placed`), and tells what it
// wants to know.
Status NvlinkBackend::run_views(const DispatchCall& call, const Budget& budget, HandleArrays& handle, bool placed) {
  const DispatchTargets& targets = call.targets;
  const Layout& layout = layout_of(targets.layout);
  handle.device.placed = layout.by_expert ? layout.id : twRankMajor;
  if (targets.lists.wanted()) TW_RETURN_IF_FAILED(run_index_lists(call, budget, handle));
  if (targets.source_counts != nullptr) TW_RETURN_IF_FAILED(run_source_counts(call, budget, handle));
  ViewParams p{};
  if (placed || !fill_copy(call, handle, &p)) return {};
  return run_view("a view", layout.by_expert ? launch_expert_view : launch_rank_view, budget, p, call.stream);
}

// Tells which rows of the view are whose.
Status NvlinkBackend::run_index_lists(const DispatchCall& call, const Budget& budget, const HandleArrays& handle) {
  IndexParams p{};
  static_cast<ArrivedParams&>(p) = arrived_params(handle, call.rows.map, call.at.channel, call.bound);
  p.lists = call.targets.lists;
  p.block = Divider::make(static_cast<uint32_t>(p.lists.block));
  p.counted = memory_->list_counts(call.at.channel, context_.local_experts);
  const bool early = budget.early_views && captures(call.stream);
  return launched("index lists", launch_index_lists(p, view_blocks(budget), early, call.stream));
}

// Tells how many rows of each expert came from each source.
Status NvlinkBackend::run_source_counts(const DispatchCall& call, const Budget& budget, const HandleArrays& handle) {
  const SourceCountsParams p{arrived_params(handle, call.rows.map, call.at.channel, call.bound),
                             call.targets.source_counts};
  const bool early = budget.early_views && captures(call.stream);
  return launched("counts by source", launch_source_counts(p, view_blocks(budget), early, call.stream));
}

// Finds where rows stand by expert, for a combine by expert after a dispatch that was shown otherwise.
Status NvlinkBackend::run_places(const CombineCall& call, const Budget& budget, HandleArrays& handle) {
  ViewParams p{};
  static_cast<ArrivedParams&>(p) = arrived_params(handle, call.sent.map, call.at.channel, call.bound);
  p.shown.counts = handle.experts.counts;
  const Layout& layout = layout_of(call.layout);
  p.alignment = layout.placed_by_receiver() ? call.alignment : 0;
  // Those of the dispatch's own layout are over. These are not kept for further combines, as a graph may have made
  // them.
  handle.device.placed = twRankMajor;
  return run_view("places by expert", launch_expert_view, budget, p, call.stream);
}

// Points a combine's parameters at its part; before the first part all are counted.
Status NvlinkBackend::part_of(const CombineCall& call, const HandleArrays& handle, bool send, CombineParams* params) {
  CombineParams& p = *params;
  const Shape& shape = call.sent.map.shape();
  const int32_t tokens = handle.routing.tokens;
  int32_t* const counts = handle.device.part_counts;
  if (call.part == 0 && send) {
    const PartsParams parts{view_, p.handle, counts, tokens, call.parts};
    TW_RETURN_IF_FAILED(launched("the parts of a combine", launch_parts(parts, call.stream)));
  }
  const int32_t begin = call.part * shape.part_tokens();
  const bool skips = call.part > 0 && !call.sent.values;  // else the kernel that puts values makes that step
  p.part = {counts, call.part, begin, std::min(begin, tokens), tokens, skips ? 1 : 0};
  p.handle.fan += p.part.first_token;
  p.handle.destinations += static_cast<int64_t>(p.part.first_token) * shape.fan_out();
  return {};
}

namespace {

// Says where accesses of 16 bytes fit in a combine of fp8: its inbox always allows them.
void fit_fp8(const CombineCall& call, CombineParams* params) {
  CombineParams& p = *params;
  p.sums_fit = width_of({address_of(call.rows.data), static_cast<uint64_t>(call.rows.block_stride),
                         static_cast<uint64_t>(call.rows.row_stride)}) == 16;
  p.vectors_fit = width_of({address_of(call.out), static_cast<uint64_t>(call.out_stride)}) == 16;
}

Fp8Params fp8_of(const CombineCall& call, const CombineParams& p) {
  const bool rows = p.rows_dtype == twBfloat16 && !p.expert_major && !p.weighted && p.sums_fit;
  const bool out = p.out_dtype == twBfloat16 && p.vectors_fit;
  const bool fast = (rows || !p.send) && (out || !p.receive) && p.elements % kFp8Tile == 0;
  return {p, call.sent.scale, static_cast<uint32_t>(fp8_scales_begin(static_cast<uint64_t>(p.elements))), fast ? 1 : 0};
}

}  // namespace

// Launches the half of a combine that sums, where a kernel sums alone.
Status NvlinkBackend::run_sums(const CombineCall& call, const ChoicesParams& choices) {
  const CombineParams& p = choices.call;
  const Bias& from = call.bias;
  const bool fits = width_of({address_of(from.data), static_cast<uint64_t>(from.stride)}) == 16;
  const std::byte* const first = from.data == nullptr ? nullptr : from.data + p.part.first_token * from.stride;
  const BiasRows bias{first, from.stride, from.dtype, fits ? 1 : 0};
  const Domains& domains = context_.domains;
  if (domains.fold()) {
    const bool folded =
        staged_ != nullptr && staged_->folds(domains, combined(call.sent.map, call.bound, call.sent.values));
    const DomainParams params{{choices, bias}, {domains, folded ? 1 : 0}};
    return launched("sums by domain", launch_domains(params, call.stream));
  }
  if (call.sent.scales == twScalesNone) return launched("sums from a bias", launch_bias({choices, bias}, call.stream));
  return launched("sums from a bias", launch_fp8_bias({fp8_of(call, p), bias}, call.stream));
}

Status NvlinkBackend::run_combine(const CombineCall& call, HandleArrays& handle, bool send, bool receive) {
  const OnDevice on(device_);
  remember(call.stream);
  const Shape& rows = call.sent.map.shape();
  const Budget budget = budget_of(rows, call.sm_limit);
  const bool early = budget.early && captures(call.stream);  // an early launch takes the host 4 us longer
  CombineParams p{};
  p.group = view_at(call.at, call.sent.map, !call.send_only);
  p.rows_digest = call.sent.digest;
  p.handle = view_of(handle, rows);
  p.part.all_tokens = handle.routing.tokens;
  if (call.parts > 1) TW_RETURN_IF_FAILED(part_of(call, handle, send, &p));
  p.channel = call.at.channel;
  p.bank = bank_of(call.at);
  p.bound = std::min(call.bound, rows.part_tokens());
  p.tokens = std::min(handle.routing.tokens - p.part.first_token, rows.part_tokens());
  p.send = send;
  p.receive = receive;
  p.expert_major = layout_of(call.layout).by_expert;
  const bool placed = handle.device.placed == call.layout || call.sent.values;  // values are put by their places too
  if (p.expert_major && send && !placed) TW_RETURN_IF_FAILED(run_places(call, budget, handle));
  p.weighted = call.weighted;
  p.plain = !p.expert_major && !p.weighted && call.rows_dtype == call.sent.wire;
  const bool alone = sums_alone(call);
  p.own_direct = call.apart && staged_ == nullptr && !alone;
  p.late_signal = call.in_window;
  p.rows_dtype = call.rows_dtype;
  p.wire_dtype = call.sent.wire;
  p.out_dtype = call.out_dtype;
  p.elements = call.sent.elements;
  p.rows = call.rows.data;
  p.block_stride = call.rows.block_stride;
  p.row_stride = call.rows.row_stride;
  p.out = call.out + p.part.first_token * call.out_stride;
  p.out_stride = call.out_stride;
  const int width = width_of({address_of(call.rows.data), static_cast<uint64_t>(call.rows.block_stride),
                              static_cast<uint64_t>(call.rows.row_stride), address_of(call.out),
                              static_cast<uint64_t>(call.out_stride), rows.combine_bytes});
  p.vectors_fit = width == 16;
  p.words_fit = width >= 8;
  const bool same = call.rows_dtype == call.sent.wire;
  p.sums_fit = p.vectors_fit && same;
  p.word_sums_fit = p.words_fit && same;
  p.vectors = static_cast<uint32_t>(rows.combine_bytes / 16);
  p.at = combine_;
  p.packets = PacketsAt::make(call.sent.map, p.channel);
  if (rows.per_expert != 0) return run_choices(call, budget, p, early);
  // Where sums overwrite rows, all rows are sent before the first sum.
  const bool twice = send && receive && (alone || (!call.apart && !call.in_window));
  const bool fp8 = call.sent.scales != twScalesNone;
  if (fp8) fit_fp8(call, &p);
  (fp8 ? plan_fp8 : plan_combine)(budget, rows, {!twice, call.parts > 1}, &p);
  if (p.part.skips) p.rehearses = 0;  // it would come before the step that is left out has ended
  const auto launch = [&]() -> Status {
    if (alone && p.receive) return run_sums(call, {p, nullptr, 0, 0});
    if (fp8)
      return launched("a combine of fp8", launch_combine_fp8(fp8_of(call, p), p.roles.grid(), early, call.stream));
    return launched("a combine", launch_combine(p, p.roles.grid(), early, call.stream));
  };
  if (twice) {
    p.receive = 0;
    TW_RETURN_IF_FAILED(launch());
    p.send = 0;
    p.receive = 1;
  }
  return launch();
}

Status NvlinkBackend::run_refusal(StepPlace at, const Refusal& refusal, bool send, bool receive) {
  const OnDevice on(device_);
  remember(refusal.stream);
  RefuseParams p{};
  p.group = view_at(at, context_.map, true);
  p.channel = at.channel;
  p.bank = refusal.views || over_carrier() ? at.bank() : -1;
  p.status = refusal.combining == nullptr ? nullptr : refusal.combining->device.status;
  p.phase = refusal.phase;
  p.skips = refusal.skips ? 1 : 0;
  p.send = send;
  p.receive = receive;
  return launched("the refusal of a call", launch_refuse(p, refusal.stream));
}

bool NvlinkBackend::poll(ErrorRecord* record) {
  *record = empty_record();
  const std::lock_guard lock(arena_->reports);
  Report report;
  const bool failed = control_->next_failure(&report);
  if (failed || arena_->next_call(view_, &report) || arena_->next_bad_id(view_, &report)) {
    record->result = static_cast<twResult_t>(report.result);
    record->sticky = failed ? 1 : 0;
    record->peer = report.peer;
    record->reporter = context_.me;
    record->token = report.token;
    record->k = report.k;
    record->value = report.value;
    fill_place(report, record);
    if (!failed) describe_call_error(record, report.bound, report.note, shape().has_both_modes());
    return true;
  }
  return poll_others(record);
}

// Tells what others have found, or the watching thread. A kernel that waits says within a moment what it waits for; the
// record tells that too, so the kernel is given that moment.
bool NvlinkBackend::poll_others(ErrorRecord* record) {
  constexpr std::chrono::milliseconds kMoment{20};
  const AbortSignal abort = control_->find_abort();
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

}  // namespace tw::cuda
