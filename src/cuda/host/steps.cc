// How a step is made. Where devices write into each other's windows, by one kernel; over a staged transport, by a
// kernel that lays out what goes to each rank, the moves behind it (a carrier's, or posts), and a kernel that shows or
// sums what has come.
//
// Takes a call and a function that launches its kernels (run(send, receive)); gives the launches and moves, in stream
// order.
//
// What breaks if this changes: S1 and S4 over a staged transport: which parts of a bank a step moves is decided here,
// from what all ranks have alike, and blocks of different sizes do not meet. A refusal must move as much as the call
// would have, or the peers' moves do not end.
#include <thread>

#include "cuda/host/backend.h"
#include "cuda/launch/steps.h"

namespace tw::cuda {

GroupView NvlinkBackend::view_at(StepPlace at, const WindowMap& map, bool waits) const {
  GroupView view = view_;
  view.map = map;
  view.packet_tokens = std::min(view.packet_tokens, map.shape().packet_tokens);
  if (staged_ != nullptr) staged_->place(at, map, &view);
  view.waits = waits ? 1 : 0;
  return view;
}

Blocks NvlinkBackend::dispatched(const WindowMap& map, int channel, int32_t bound) const {
  Blocks blocks;
  const auto rows = static_cast<uint64_t>(bound);
  for (int q = 0; q < map.shape().payloads; ++q) {
    const uint64_t row = map.shape().payload_bytes[q];
    blocks.regions.push_back({map.payload_begin(q), rows * row, row, true});
  }
  const uint64_t meta = meta_bytes(map.shape().top_k);
  blocks.regions.push_back({map.meta_begin(), rows * meta, meta});
  blocks.land = map.shape().exact();
  if (shape().counts_loads != 0) {
    blocks.loads = {context_.map.loads(channel, 0, 0), sizeof(uint64_t) * WindowMap::loads_words(shape())};
  }
  return blocks;
}

Blocks NvlinkBackend::combined(const WindowMap& map, int32_t bound, bool values) {
  const auto rows = static_cast<uint64_t>(bound);
  const Shape& shape = map.shape();
  const auto each = static_cast<uint64_t>(shape.per_expert != 0 ? shape.top_k : 1);
  const uint64_t row = each * shape.combine_bytes;
  Blocks blocks{{{0, rows * row, row}}};
  const uint64_t value = choice_bytes(map.shape().top_k);
  if (values) blocks.regions.push_back({map.values_begin(), rows * value, value});
  return blocks;
}

Blocks NvlinkBackend::counted() const { return {{{0, WindowMap::counts_bytes(shape())}}}; }

Blocks NvlinkBackend::collected(const CollectiveMap& places, bool gathers) const {
  Blocks blocks;
  for (int q = 0; q < places.tensors; ++q) {
    const uint64_t row = places.row_bytes[q];
    blocks.regions.push_back({places.begin[q], static_cast<uint64_t>(places.bound) * row, row, gathers});
  }
  blocks.all = gathers;
  return blocks;
}

// Sums go to the ranks of the set alone, and their signals tell of no rows (exchange/token_replicas.h).
Blocks NvlinkBackend::shared(const CollectiveMap& places) const {
  Blocks blocks = collected(places, false);
  for (Region& region : blocks.regions) region.row = 0;
  blocks.first = context_.replicas.first;
  blocks.ranks = context_.replicas.size;
  return blocks;
}

// Whether somebody else is to blame for moves that cannot be made: that is known in a moment, or not at all.
bool NvlinkBackend::in_trouble() const {
  constexpr std::chrono::milliseconds kMoment{500};
  const TimePoint until = std::chrono::steady_clock::now() + kMoment;
  while (std::chrono::steady_clock::now() < until) {
    if (control_->dead() >= 0 || control_->find_abort().kind != 0) return true;
    if (is_interrupted_now()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

// Sends a step over the staged transport, and receives it unless `send_only`; `run(send, receive)` launches. What could
// not be moved does not come: the kernel that waits for it finds that out, and who is to blame.
template <class Run>
Status NvlinkBackend::send_staged(const MovedStep& step, const Blocks& blocks, bool send_only, Run&& run) {
  const OnDevice on(device_);
  const GroupView view = view_at(step.at, context_.map, true);
  TW_RETURN_IF_FAILED(staged_->begin(view, step));
  TW_RETURN_IF_FAILED(run(true, false));
  Status started = staged_->start(view, step, blocks, !send_only);
  const bool alone = !started.ok() && !in_trouble();
  if (was_interrupted()) return fail(twInterrupted, "interrupted in a step whose blocks are moved");
  if (alone) return started;
  return send_only ? Status{} : arrive(step, blocks, true, run);
}
template <class Run>
Status NvlinkBackend::arrive(const MovedStep& step, const Blocks& blocks, bool at_once, Run&& run) {
  const OnDevice on(device_);
  const GroupView view = view_at(step.at, context_.map, true);
  if (!at_once && over_carrier()) {
    TW_RETURN_IF_FAILED(launched("a wait", launch_await({view, step.at.channel}, step.stream)));
  }
  if (!staged_->join(view, step, blocks).ok() && is_interrupted_now()) {
    return fail(twInterrupted, "interrupted in a step that a carrier moves");
  }
  return run(false, true);
}

Status NvlinkBackend::land_rows(const DispatchCall& call, HandleArrays& handle) {
  const Shape& rows = call.rows.map.shape();
  if (!rows.exact()) return {};
  LandParams p{};
  p.group = view_at(call.at, call.rows.map, true);
  p.handle = view_of(handle, rows);
  p.channel = call.at.channel;
  p.bank = call.at.bank();
  p.bound = call.bound;
  p.from = staged_->receive_offset(call.at);
  return launched("rows of a dispatch", launch_land(p, view_blocks(limited(budget_, call.sm_limit)), call.stream));
}

namespace {

// Whether a view is in the bank that the host has named.
bool has_bank(const DispatchCall&) { return true; }
bool has_bank(const CollectiveCall& call) { return call.views; }
template <class Call>
bool has_bank(const Call&) {
  return false;
}

// Kernels that sum, and those that put rows together, begin with what has come.
bool waits(const DispatchCall& call) { return !call.rows.map.shape().exact(); }
bool waits(const CountsCall&) { return true; }
template <class Call>
bool waits(const Call&) {
  return false;
}

}  // namespace

template <class Call, class MakeBlocks, class Run>
Status NvlinkBackend::make(const Call& call, twPhase_t phase, bool sends, MakeBlocks&& blocks, Run&& run) {
  if (staged_ == nullptr) return run(sends, !sends || !call.send_only);
  const int grid = limited(budget_, call.sm_limit).max_grid;
  const MovedStep step{call.at, phase, call.stream, has_bank(call), waits(call), grid};
  if (!sends) return arrive(step, blocks(), false, run);
  return send_staged(step, blocks(), call.send_only, run);
}

Status NvlinkBackend::make_dispatch(const DispatchCall& call, HandleArrays& handle, bool sends) {
  return make(
      call, twPhaseDispatch, sends,
      [&] {
        Blocks blocks = dispatched(call.rows.map, call.at.channel, call.bound);
        const HandleView view = view_of(handle, call.rows.map.shape());
        blocks.sent = {handle.routing.tokens, call.rows.map.shape().fan_out(), view.fan, view.destinations};
        return blocks;
      },
      [&](bool send, bool receive) -> Status {
        if (staged_ != nullptr && receive) TW_RETURN_IF_FAILED(land_rows(call, handle));
        return run_dispatch(call, handle, send, receive);
      });
}

Status NvlinkBackend::make_combine(const CombineCall& call, HandleArrays& handle, bool sends) {
  return make(
      call, twPhaseCombine, sends,
      [&] {
        Blocks blocks = combined(call.sent.map, call.bound, call.sent.values);
        const Shape& rows = call.sent.map.shape();
        const HandleView view = view_of(handle, rows);
        blocks.folds = staged_->folds(context_.domains, blocks);
        blocks.sent = {handle.routing.tokens, rows.fan_out(), view.fan, view.destinations};
        blocks.returned = {view.meta, rows.exact() ? view.source : nullptr, 1 + rows.top_k, call.sent.wire};
        return blocks;
      },
      [&](bool send, bool receive) -> Status {
        if (send) TW_RETURN_IF_FAILED(put_values(call, handle));
        TW_RETURN_IF_FAILED(run_combine(call, handle, send, receive));
        return receive ? take_values(call, handle) : Status{};
      });
}

Status NvlinkBackend::make_counts(const CountsCall& call, HandleArrays& handle, bool sends) {
  return make(
      call, twPhaseCounts, sends, [&] { return counted(); },
      [&](bool send, bool receive) { return run_counts(call, handle, send, receive); });
}

Status NvlinkBackend::make_collective(const CollectiveCall& call, bool sends) {
  return make(
      call, call.reduces ? twPhaseReduce : twPhaseGather, sends, [&] { return collected(call.places, !call.reduces); },
      [&](bool send, bool receive) { return run_collective(call, send, receive); });
}

Status NvlinkBackend::make_sharing(const SharingCall& call, HandleArrays& handle) {
  return make(
      call, twPhaseGather, true, [&] { return shared(call.places); },
      [&](bool send, bool receive) { return run_sharing(call, handle, send, receive); });
}

bool NvlinkBackend::describe(twPortableInfo_t* info) const {
  if (!over_carrier()) return false;
  info->strategy = twRouted;
  info->channel = staged_->carrier_channel();
  for (const Region& region : dispatched(context_.map, 0, shape().max_tokens).regions)
    info->inline_bytes += static_cast<int64_t>(region.bytes);
  return true;
}

bool NvlinkBackend::can_refuse(const Refusal& refusal) const {
  const bool collects = refusal.phase == twPhaseGather || refusal.phase == twPhaseReduce;
  return !over_carrier() || (refusal.bound >= 0 && (!collects || refusal.places.tensors > 0));
}

Status NvlinkBackend::keep_pace(StepPlace at, int32_t bound, const CombineRows& sent, void* stream) {
  if (!over_carrier()) return {};
  const OnDevice on(device_);
  remember(stream);
  const MovedStep step{at, twPhaseCombine, stream, true, false, 0};
  TW_RETURN_IF_FAILED(staged_->start(view_, step, combined(sent.map, bound, sent.values), true));
  return staged_->join(view_, step, {});
}

Status NvlinkBackend::abandon(StepPlace at, const Refusal& sent) {
  const auto run = [&](bool, bool) { return run_refusal(at, sent, false, true); };
  if (staged_ == nullptr) return run(false, true);
  return arrive({at, sent.phase, sent.stream, sent.views, true, 1}, {}, false, run);
}

// Over a carrier the peers' moves are made with the refusal, or they would not end. What is posted are signals alone.
Status NvlinkBackend::send_refusal(StepPlace at, const Refusal& refusal) {
  if (staged_ == nullptr) return run_refusal(at, refusal, true, true);
  const int32_t bound = refusal.bound > 0 ? refusal.bound : refusal.map.shape().default_bound();
  Blocks blocks;
  if (refusal.phase == twPhaseDispatch) blocks = dispatched(refusal.map, at.channel, bound);
  if (refusal.phase == twPhaseCombine) blocks = combined(refusal.map, bound, refusal.values);
  if (refusal.phase == twPhaseCounts) blocks = counted();
  const bool gathers = refusal.phase == twPhaseGather;
  if (gathers || refusal.phase == twPhaseReduce) blocks = collected(refusal.places, gathers);
  return send_staged({at, refusal.phase, refusal.stream, refusal.views, true, 1}, blocks, false,
                     [&](bool send, bool receive) { return run_refusal(at, refusal, send, receive); });
}

}  // namespace tw::cuda
