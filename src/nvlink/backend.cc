// The CUDA backend: arguments into kernel parameters, and what kernels report into errors. What happens to bytes is in
// the kernels, the files that end in .cu.
#include "nvlink/backend.h"

#include <algorithm>
#include <mutex>

#include "core/group.h"
#include "core/steps.h"
#include "nvlink/units.h"

namespace tw::nvlink {

// The largest power of two up to 16 that divides everything.
int width_of(std::initializer_list<uint64_t> values) {
  uint64_t all = 16;
  for (const uint64_t value : values) all |= value;
  return static_cast<int>(all & (~all + 1));
}

namespace {

// Of a dispatch's rows as a stream, and of where they lie.
struct PayloadFit {
  int width = 16;      // bytes that all payloads allow at a time
  uint64_t words = 0;  // of a row, with what travels beside it
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
    payload.width = width == 16 ? 16 : width >= 4 ? 4 : 1;  // what dispatch_send.cuh has loops for
    payload.vectors = static_cast<uint32_t>(bytes / static_cast<uint64_t>(payload.width));
    payload.first_word = static_cast<uint32_t>(fit.words);
    fit.words += words_of(bytes);
  }
  return fit;
}

// Where this rank was: what a kernel has reported.
void fill_place(const Report& report, twErrorRecord_t* record) {
  record->phase = static_cast<twPhase_t>(report.phase);
  record->lane = report.lane;
  record->step = record->expected = report.step;
  record->seen = report.seen;
}

}  // namespace

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
  view.digest = handle.digest_here;
  view.choices = handle.choices;
  view.sent_rows = handle.counts.sent;
  view.experts = handle.counts.experts;
  view.begin = handle.counts.begin;
  view.source = handle.counts.source;
  view.expert_begin = handle.expert_begin;
  view.offsets = handle.offsets;
  view.overflow = handle.overflow;
  view.marks = shape().exact() ? handle.marks : nullptr;
  // Whoever does not wait meets words of other steps, of which some say that it is known.
  const bool once = shape().exact() && view_.line_tokens > 0 && view_.no_wait == 0;
  view.beside = once ? handle.beside : nullptr;
  view.landing = handle.counts.landing;
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

Roles NvlinkBackend::roles_of(int64_t rows, const Units& units, bool both, int most) const {
  const int64_t shares = rows * units.per_row.divisor;
  if (!both || max_grid_ == 1) return Roles::one(static_cast<int>(std::clamp<int64_t>(shares, 1, max_grid_)));
  const int sending = static_cast<int>(std::clamp<int64_t>(shares, 1, std::max(1, most)));
  return Roles::two(sending, static_cast<int>(std::clamp<int64_t>(shares, 1, max_grid_ - sending)));
}

Roles NvlinkBackend::line_roles(int64_t rows, const Units& units, bool both, int filling, int busy) const {
  if (!both || max_grid_ == 1) return roles_of(rows, units, both, max_grid_);
  const int64_t shares = rows * units.per_row.divisor;
  const int half = max_grid_ / 2;
  const int quarter = std::max(1, max_grid_ / 4);
  if (shares > int64_t{half} * kWarps) {
    const int sending = std::max(1, std::min(half, device_sms_ * filling / 100));
    return Roles::two(sending, max_grid_ - sending);
  }
  const int eighth = std::min(quarter, std::max(1, device_sms_ / 8));
  const int most = shares <= int64_t{eighth} * busy ? eighth : shares <= int64_t{quarter} * kWarps ? quarter : half;
  const auto blocks = static_cast<int>(std::clamp<int64_t>(shares, 1, most));
  return Roles::two(blocks, blocks);
}

void NvlinkBackend::fill_landing(const DispatchCall& call, std::byte** landing) {
  for (int q = 0; q < shape().payloads && call.lands; ++q) {
    if (call.landing[q] != 0) landing[q] = window() + call.landing[q];
  }
}

// Units, blocks and lines of a dispatch of so many words to a row. `known`: what travels beside rows has come before.
void NvlinkBackend::share_dispatch(uint64_t words, bool known, DispatchParams* params) const {
  DispatchParams& p = *params;
  const bool lines = p.kind == Kind::kLines;
  const bool usual = p.kind != Kind::kAny && !lines;
  const bool both = p.send && p.receive;
  const int64_t rows = std::max<int64_t>(p.tokens, static_cast<int64_t>(shape().ranks - 1) * p.bound);
  const auto units = [&](uint32_t most) {
    return units_of(words, words_of(meta_bytes(shape().top_k)), unit_rows(lines, p.tokens, p.bound),
                    int64_t{max_grid_} * kWarps / 2, most);
  };
  // A dispatch draws its lines, so narrower units are for longer better: 256 tokens took 15.1 us with two groups, 16.3
  // with four. (1024 took 60 and 49.)
  p.units = units(lines && p.bound <= kRound ? kUnitGroups / 2 : kUnitGroups);
  // With more than a quarter of the device's SMs, usual units at the end wait longer behind each other. Rows of several
  // payloads are stored in smaller parts, which take an SM longer: 4096 tokens of fp8 with their scales took 109 us
  // with a quarter of the SMs, 97 with a third.
  const int filling = shape().payloads > 1 ? 33 : shape().exact() ? 26 : 25;
  const auto bulk = [&](int percent) {
    return roles_of(rows, p.units, both, p.bound > view_.line_tokens ? bulk_senders(percent, 80) : max_grid_ / 2);
  };
  p.roles = lines ? line_roles(rows, p.units, both, 30, 4) : bulk(filling);
  const bool few = is_few(p.roles, filling);
  const Roles more = bulk(kFillingKnown);
  const bool narrow = known && usual && !few && shape().payloads == 1 && p.tokens > view_.line_tokens &&
                      more.apart != 0 && more.sending <= more.receiving;
  p.first_line = first_line(p.tokens, narrow ? kTailNarrow : known ? kTailKnown : kTailSent, few);
  if (narrow) {
    p.roles = more;
    p.units = units(kUnitGroups / 2);
    p.wide = last_narrow(p.units, p.first_line);
  } else if (few) {
    p.wide = widen(p.units, p.first_line, int64_t{p.roles.sending} * kWarps, kFewUnits);
  } else {
    p.wide = usual ? first_wide(p.units, p.first_line, int64_t{p.roles.sending} * (kWarps - 1)) : kNoneWide;
  }
  // Those that receive rows as they lie have little to do: other SMs are left to the kernel that comes next.
  if (!lines && !few && p.roles.apart) p.roles.receiving = std::min(p.roles.receiving, max_grid_ / 2);
  if (usual && !few && p.first_line > 0 && p.tokens > kRound) p.early = early_units(p);
  for (int q = 0; q < shape().payloads; ++q) p.payloads[q].per_unit = share_of(p.payloads[q].vectors, p.units);
  p.rehearses = may_rehearse(p);
}

Status NvlinkBackend::run_dispatch(const DispatchCall& call, HandleArrays& handle, bool send, bool receive) {
  const OnDevice on(device_);
  remember(call.stream);
  const bool capturing = captures(call.stream);
  DispatchParams p{};
  p.group = view_at(call.at, !call.send_only);
  p.handle = view_of(handle);
  p.in = ids_of(handle, shape().exact() || !send);  // what was sent stays, whatever map there is now
  p.counted = call.counted ? 1 : 0;
  p.layer = handle.layer;
  p.tally = send ? tally_ : Tally::kNone;
  if (send) TW_RETURN_IF_FAILED(choose_slots(handle, call.at, twPhaseDispatch, call.stream, &p.in));
  const uint64_t id_bytes = p.in.wide ? sizeof(int64_t) : sizeof(int32_t);
  const bool whole_ids =
      p.in.id_stride[1] == 1 && width_of({address_of(p.in.ids), static_cast<uint64_t>(p.in.id_stride[0]) * id_bytes,
                                          static_cast<uint64_t>(shape().top_k) * id_bytes}) == 16;
  const PayloadFit fit = fill_payloads(shape(), call.payloads, p.payloads);
  const bool by_source = call.targets.layout == twRankMajor || call.targets.layout == twFlat;
  p.shown = shown_of(call.targets, handle);
  p.rows = by_source ? static_cast<int32_t>(call.targets.rows) : 0;
  if (!by_source) p.shown.ids = p.shown.weights = nullptr, p.shown.counts = handle.received.counts;
  p.lane = call.at.lane;
  p.bank = call.at.bank();
  p.bound = call.bound;
  p.tokens = handle.routing.tokens;
  p.send = send;
  p.receive = receive;
  p.lands = call.lands;
  fill_landing(call, p.landing);
  p.at = dispatch_;
  p.lines = LinesAt::make(context_.map, p.lane);
  p.table = fits_tables(shape());
  p.whole = fit.width >= 8;
  const bool usual = fit.width == 16 && whole_ids && p.table && shape().payloads <= kFastPayloads &&
                     shape().top_k <= kFastIds && shape().ranks <= kRanksAtOnce;
  p.kind = kind_of(usual, usual && all_lines(call.bound));
  share_dispatch(fit.words, p.handle.beside != nullptr && handle.brought, &p);
  const int grid = p.roles.grid() + (p.tally == Tally::kApart ? 1 : 0);
  TW_RETURN_IF_FAILED(launched("a dispatch", launch_dispatch(p, grid, early_ && capturing, call.stream)));
  // In a capture nothing has been copied yet: each replay reads the caller's tensors, and so does a later dispatch.
  if (send && !capturing && !shape().exact()) handle.source = {};
  if (send) handle.brought = true;
  handle.stream = call.stream;
  return receive ? run_views(call, handle) : Status{};
}

ViewParams NvlinkBackend::view_params(const HandleArrays& handle, int32_t lane, int32_t bound) const {
  ViewParams p{};
  p.group = view_;
  p.handle = view_of(handle);
  p.lane = lane;
  p.bound = bound;
  const auto top_k = static_cast<uint32_t>(shape().top_k);
  p.ids = Divider::make(top_k);
  p.pairs = Divider::make((top_k + 1) / 2);
  p.slots = Divider::make(static_cast<uint32_t>(std::max(bound, 1)));
  return p;
}

Status NvlinkBackend::run_view(const char* what, LaunchView* launch, const ViewParams& params, void* stream) {
  return launched(what, launch(params, view_blocks(), early_views_ && captures(stream), stream));
}

// What the caller wants written elsewhere than in the window.
Status NvlinkBackend::run_views(const DispatchCall& call, HandleArrays& handle) {
  const DispatchTargets& targets = call.targets;
  handle.placed = targets.layout == twExpertMajor || targets.layout == twGrouped;
  ViewParams p = view_params(handle, call.at.lane, call.bound);
  bool any = handle.placed;
  std::byte* landing[kMaxPayloads] = {};
  fill_landing(call, landing);
  for (int q = 0; q < shape().payloads; ++q) {
    p.payloads[q] = targets.payloads[q];
    for (int bank = 0; bank < 2; ++bank) {
      p.from[bank][q] =
          landing[q] != nullptr ? landing[q] : window() + context_.map.payload_row(call.at.lane, bank, q, 0);
    }
    any |= targets.payloads[q] != nullptr;
    const uint64_t bytes = shape().payload_bytes[q];
    p.width[q] = width_of({address_of(targets.payloads[q]), bytes});
    p.columns[q] = targets.columns[q];
    p.vectors[q] = static_cast<uint32_t>(bytes / static_cast<uint64_t>(p.width[q]));
  }
  if (!any) return {};
  p.shown = shown_of(targets, handle);
  p.rows = static_cast<int32_t>(targets.rows);
  p.offsets = targets.layout == twGrouped ? targets.offsets : nullptr;
  p.origins = targets.origins;
  return run_view("a view", handle.placed ? launch_expert_view : launch_rank_view, p, call.stream);
}

// Where rows stand by expert, for a combine by expert of a dispatch that was shown otherwise.
Status NvlinkBackend::run_places(const CombineCall& call, HandleArrays& handle) {
  ViewParams p = view_params(handle, call.at.lane, call.bound);
  p.shown.counts = handle.expert_counts;
  return run_view("places by expert", launch_expert_view, p, call.stream);
}

// Units of a combine whose roles are known. `full`: its senders fill the link, or all rows are lines.
void NvlinkBackend::share_combine(int64_t returning, bool full, CombineParams* params) const {
  CombineParams& p = *params;
  const bool any = p.kind == Kind::kAny;
  const bool sums = any && !p.plain && p.sums_fit;
  const bool wide = sums || !full;
  const int64_t each = sums ? kSumUnits : kFewUnits;
  // Those whose rows come as lines, in narrow units anyway, stay so.
  p.wide = wide ? widen(p.units, p.tokens - p.tail_lines, int64_t{p.roles.receiving} * kWarps, each) : kNoneWide;
  p.single = p.wide.units() - std::min(p.wide.units(), static_cast<uint32_t>(p.roles.receiving) * kWarps * 7 / 8);
  p.per_unit = share_of(p.vectors, p.units);
  p.joins = wide ? 1 : 0;
  p.pushed = kPushedVectors;
  const auto parts = [&p](uint32_t pushed) { return (p.vectors + pushed - 1) / pushed; };
  // Of usual calls by few SMs whole rows, where so few blocks send that the link has room for more; else halves, with
  // which warps end sooner. (By 24 a combine of 4096 tokens took 2 us longer with whole rows, by 16 it takes 20 longer
  // with halves.) By more SMs usual units: by 64 it took 183 us with halves, 171 with those.
  const bool large = sums || (p.plain && p.vectors_fit && wide && (any || few_sms()));
  const uint32_t least = any || p.roles.sending < device_sms_ / 16 ? 1 : 2;
  while (large && parts(p.pushed) > least &&
         returning * parts(2 * p.pushed) >= int64_t{p.roles.sending} * kWarps * each) {
    p.pushed *= 2;
  }
  p.pushed_parts = static_cast<int32_t>(p.sums_fit ? parts(p.pushed) : p.units.per_row.divisor);
  const int items = shape().chunk_rows * p.pushed_parts;
  const int chunks = any ? kWarps / 2 / items : turn_rows(returning, p.roles.sending, few_sms()) / shape().chunk_rows;
  p.turn_chunks = full ? 1 : std::max(1, chunks);
  p.drawn = turns_ahead(p.turn_chunks * items);
}

Status NvlinkBackend::run_combine(const CombineCall& call, HandleArrays& handle, bool send, bool receive) {
  const OnDevice on(device_);
  remember(call.stream);
  const bool early = early_ && captures(call.stream);  // the launch itself takes the host 4 us longer
  CombineParams p{};
  p.group = view_at(call.at, !call.send_only);
  p.handle = view_of(handle);
  p.lane = call.at.lane;
  p.bank = bank_of(call.at);
  p.bound = call.bound;
  p.tokens = handle.routing.tokens;
  p.send = send;
  p.receive = receive;
  p.expert_major = call.layout == twExpertMajor || call.layout == twGrouped;
  if (p.expert_major && send && !handle.placed) TW_RETURN_IF_FAILED(run_places(call, handle));
  p.weighted = call.weighted;
  p.plain = !p.expert_major && !p.weighted && call.rows_dtype == context_.wire;
  p.own_direct = call.apart && carriage_ == nullptr;
  p.tail_lines = std::min(view_.line_tokens, summed_tail_);
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
  const bool same = call.rows_dtype == context_.wire;
  p.sums_fit = p.vectors_fit && same;
  p.word_sums_fit = p.words_fit && same;
  p.vectors = static_cast<uint32_t>(shape().combine_bytes / 16);
  const bool direct = p.vectors_fit && p.own_direct && p.out_dtype == p.wire_dtype;
  const bool usual = direct && p.plain;
  const bool lines = direct && (p.plain || (p.expert_major && same)) && all_lines(call.bound);
  p.kind = kind_of(usual, lines);
  const int64_t returning = static_cast<int64_t>(shape().ranks - (p.own_direct ? 1 : 0)) * call.bound;
  const int64_t rows = std::max<int64_t>(p.tokens, returning);
  p.units = units_of(words_of(shape().combine_bytes), 0, unit_rows(lines, p.tokens, call.bound),
                     int64_t{max_grid_} * kWarps / 2, lines && !p.plain ? kSummedGroups : kUnitGroups);
  p.at = combine_;
  p.lines = LinesAt::make(context_.map, p.lane);
  // Rows that the sums overwrite are all sent before the first sum.
  const bool twice = send && receive && !call.apart && !call.in_window;
  constexpr int kFilling = 36;
  p.roles = lines ? line_roles(rows, p.units, send && receive, p.plain ? 20 : 50, 4)
                  : roles_of(rows, p.units, send && receive && !twice && returning > 0,
                             call.bound > view_.line_tokens && p.plain ? bulk_senders(kFilling, 42) : max_grid_ / 2);
  share_combine(returning, lines || !is_few(p.roles, kFilling), &p);
  p.rehearses = p.roles.apart && p.bound > view_.line_tokens;
  if (twice) {
    p.receive = 0;
    TW_RETURN_IF_FAILED(launched("a combine", launch_combine(p, p.roles.grid(), early, call.stream)));
    p.send = 0;
    p.receive = 1;
  }
  return launched("a combine", launch_combine(p, p.roles.grid(), early, call.stream));
}

Status NvlinkBackend::run_refusal(StepPlace at, const Refusal& refusal, bool send, bool receive) {
  const OnDevice on(device_);
  remember(refusal.stream);
  RefuseParams p{};
  p.group = view_at(at, true);
  p.lane = at.lane;
  p.bank = refusal.views || carriage_ != nullptr ? at.bank() : -1;
  p.status = refusal.combining == nullptr ? nullptr : refusal.combining->status;
  p.phase = refusal.phase;
  p.send = send;
  p.receive = receive;
  return launched("the refusal of a call", launch_refuse(p, refusal.stream));
}

bool NvlinkBackend::poll(twErrorRecord_t* record) {
  *record = empty_record();
  const std::lock_guard lock(reports_);
  Report report;
  const bool failed = control_->next_failure(&report);
  if (failed || control_->next_call(&report) || control_->next_bad_id(&report)) {
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

}  // namespace tw::nvlink
