// The exchange as the host sees it: dispatches and the exchange of counts (combining.cc has combines), from choosing a
// channel to recording an error. It takes checked arguments (src/api), lets a Backend move the bytes, and gives a
// Status, the handle's new state and the group's record.
//
// This file keeps S5 (leases follow from the calls alone, also where a call fails or is refused) and, by drain, S2 (a
// refused step is waited out before the next). A change of when a channel is held or given back must be the same at a
// rank that refused and at its peers; conclude decides which rank is blamed.
#include <algorithm>
#include <chrono>

#include "core/interrupt.h"
#include "core/steps.h"

namespace tw {

// A finished group waits for nobody: what has not come is an error at once.
TimePoint deadline_of(twGroup& group) {
  const auto now = std::chrono::steady_clock::now();
  return group.is_sticky() ? now : now + std::chrono::milliseconds(group.config.given.timeout_ms);
}

Status conclude(twGroup& group, twPhase_t phase, StepPlace at, uint32_t bound, const StepEnd& end) {
  if (end.code == twSuccess) return {};
  if (end.code == twInterrupted) return interrupt_group(group, phase, at, end.peer);
  ErrorRecord record = empty_record();
  record.result = end.code;
  record.peer = end.peer;
  record.reporter = group.me();
  record.phase = phase;
  record.lane = at.channel;
  record.step = record.expected = at.step;
  record.seen = end.seen.step;
  if (end.code == twPeerRefused || end.code == twBoundMismatch || end.code == twReplicaMismatch) {
    describe_call_error(&record, bound, end.note, group.shape().has_both_modes());
    group.set_error(record);
    return {end.code, record.sentence};
  }
  if (end.code == twExcluded) {  // a peer gave up: its abort signal says who is to blame
    const AbortSignal abort = group.backend->find_abort();
    record.result = static_cast<twResult_t>(abort.kind);
    record.peer = static_cast<int32_t>(abort.culprit);
    record.reporter = static_cast<int32_t>(abort.reporter);
  }
  return finish_group(group, record);
}

// Ends a channel's last step, where that is still to be done: a gather or reduce that was send_only, or a step that
// this rank refused, which it waits out. S2 wants it before the next step begins.
Status drain(twGroup& group, int channel, twPhase_t phase, void* stream) {
  Channel& state = group.channels[channel];
  if (state.request != 0) TW_RETURN_IF_FAILED(finish_request(group, channel, stream));
  if (!state.draining) return {};
  const StepPlace at{channel, state.step};
  const StepEnd end = group.backend->drain(at, deadline_of(group));
  state.draining = false;
  TW_RETURN_IF_FAILED(conclude(group, phase, at, 0, end));
  Arena& arena = *group.arena;
  if (!arena.parted.empty() && !group.channels.drains()) {
    arena.leases->release(arena.parted);
    arena.parted.clear();
  }
  return {};
}

void part_leases(twGroup& group, twHandle& handle) {
  handle.has_offsets = false;
  if (handle.leases.empty()) return;
  if (group.is_sticky()) {
    // A peer that is merely slow may still write there: the leases stay announced for ever.
  } else if (group.channels.drains()) {  // whichever step drains: peers may be in the dispatch
    std::vector<std::byte*>& parted = group.arena->parted;
    parted.insert(parted.end(), handle.leases.begin(), handle.leases.end());
  } else {
    group.leases->release(handle.leases);
  }
  handle.leases.clear();
}

namespace {

// Ends the lease of a dispatch that this rank was refused, in the belief that its peers have.
void take_over(twGroup& group, int channel) {
  give_back(group, *group.channels[channel].holder);
  group.channels[channel].refused_before = true;
}

}  // namespace

Status choose_channel(twGroup& group, const twHandle* handle, int32_t wish, int* channel, int bank) {
  const int count = group.channels.size();
  if (wish < -1 || wish >= count) {
    return fail(twInvalidArgument, "{} is {}; it must be -1 (the next free one) or from 0 to {}",
                Argument("input.lane"), Value(wish), count - 1);
  }
  if (handle != nullptr && handle->channel >= 0) {
    if (wish >= 0 && wish != handle->channel) {
      return fail(twInvalidUsage, "{} is {}, but the handle holds lane {}", Argument("input.lane"), Value(wish),
                  handle->channel);
    }
    *channel = handle->channel;
    return {};
  }
  // Peers that find a channel free have ended a lease whose dispatch this rank was refused, and so does this rank.
  if (wish >= 0) {
    if (group.channels[wish].refused) take_over(group, wish);
    if (group.channels[wish].holder != nullptr) {
      return fail(twInvalidUsage, "{} {} is held by another handle that was dispatched and not yet combined",
                  Argument("input.lane"), wish);
    }
    *channel = wish;
    return {};
  }
  *channel = group.channels.next_free(bank);
  if (*channel >= 0) return {};
  if (const int refused = group.channels.next_refused(); refused >= 0) {
    take_over(group, refused);
    *channel = group.channels.next_free(bank);
    return {};
  }
  return fail(twInvalidUsage,
              "no free lane: all {} are held by handles that were dispatched and not yet combined; combine or release "
              "one, or create the group with more lanes",
              count);
}

Status check_not_pending(const twHandle& handle) {
  if (handle.pending == Pending::kNone) return {};
  const char* const names[] = {"", "dispatch", "combine", "exchange of counts"};
  return fail(twInvalidUsage, "the handle has a send_only {} pending; call {} first",
              names[static_cast<int>(handle.pending)], Function{"twComplete"});
}

void note_capture(const twGroup& group, twHandle& handle, const void* stream, bool exact, bool sized) {
  if (!exact || !group.backend->captures(stream)) return;
  handle.in_graph = true;
  handle.sized_in_graph |= sized;
}

void hold(twGroup& group, twHandle& handle, int channel) {
  handle.channel = channel;
  group.channels[channel].holder = &handle;
}

void give_back(twGroup& group, twHandle& handle) {
  if (handle.channel >= 0) group.channels.give_back(handle.channel);
  handle.channel = -1;
  handle.channel_for_this_step = false;
}

bool learns_late(const twGroup& group) { return group.backend->on_device() && !group.comm->environment.blocking; }

Status fail_launch(twGroup& group, twHandle& handle, twPhase_t phase, StepPlace at, Status why) {
  handle.pending = Pending::kNone;
  if (handle.channel_for_this_step) give_back(group, handle);
  (void)conclude(group, phase, at, 0, {twPeerAborted, group.me(), {}, 0});
  return why;
}

namespace {

Status finish_dispatch(twGroup& group, twHandle& handle) {
  const DispatchCall& call = handle.dispatch;
  const StepEnd end = group.backend->finish_dispatch(call, deadline_of(group), handle);
  handle.pending = Pending::kNone;
  handle.dispatched = end.code == twSuccess;
  // All signals have come, so all rows have.
  Status ended = conclude(group, twPhaseDispatch, call.at, with_receive_offsets(call.bound, call.has_offsets), end);
  part_leases(group, handle);
  // Leases must follow from the calls alone (S5). A blocking dispatch that fails does so in the same call on all ranks.
  // A send_only one fails here, in twComplete, which a rank that refused it never calls: so the channel stays held on
  // both.
  if (!handle.dispatched && !call.send_only) give_back(group, handle);
  return ended;
}

// All ranks have the same counts, so they refuse alike, and the group stays usable.
Status refuse_overflow(twGroup& group, const twHandle& handle, const Overflow& overflow) {
  ErrorRecord record = empty_record();
  record.result = twRecvOverflow;
  record.peer = overflow.rank;
  record.reporter = group.me();
  record.phase = twPhaseCounts;
  record.lane = handle.counting.at.channel;
  record.step = record.expected = record.seen = handle.counting.at.step;
  record.value = overflow.rows;
  describe_call_error(&record, static_cast<uint32_t>(handle.counting.room),
                      static_cast<uint32_t>(group.shape().recv_rows));
  group.set_error(record);
  return {twRecvOverflow, record.sentence};
}

Status finish_counts(twGroup& group, twHandle& handle) {
  const CountsCall& call = handle.counting;
  const TimePoint deadline = std::min(deadline_of(group), handle.counts_deadline);
  KnownCounts known = handle.counted;
  const StepEnd end = group.backend->finish_counts(call, deadline, handle, call.known ? &known : &handle.counted);
  handle.pending = Pending::kNone;
  // A send_only call that fails keeps its channel, as it does at the rank that refused and never completes (S5).
  if (end.code == twSuccess || !call.send_only) give_back(group, handle);
  if (end.code != twSuccess) {
    handle.counts.exchanged = false;
    part_leases(group, handle);  // no dispatch may follow
    return conclude(group, twPhaseCounts, call.at, static_cast<uint32_t>(call.room), end);
  }
  const Overflow& overflow = handle.counted.overflow;
  if (handle.counted.known && overflow.rank >= 0 && !call.drop) {
    part_leases(group, handle);
    return refuse_overflow(group, handle, overflow);
  }
  handle.counts.exchanged = true;
  handle.has_offsets = group.leases != nullptr;
  return {};
}

}  // namespace

Status refuse_on(twGroup& group, Refusal refusal, int channel, Status why) {
  TW_RETURN_IF_FAILED(drain(group, channel, refusal.phase, refusal.stream));
  if (!group.backend->can_refuse(refusal)) {
    abort_group(group);
    return why;
  }
  refusal.views = refusal.views && group.backend->on_device();
  const StepPlace at = refusal.views ? group.channels.begin_refusal(channel) : group.channels.begin(channel);
  group.channels[channel].draining = true;
  TW_RETURN_IF_FAILED(group.backend->send_refusal(at, refusal));
  return why;
}

Status exchange_counts(twGroup& group, twHandle& handle, const CountsCall& call, int32_t wish,
                       std::vector<std::byte*> leases) {
  TW_RETURN_IF_FAILED(check_not_pending(handle));
  int channel = -1;
  TW_RETURN_IF_FAILED(choose_channel(group, &handle, wish, &channel));
  TW_RETURN_IF_FAILED(drain(group, channel, twPhaseCounts, call.stream));
  hold(group, handle, channel);
  part_leases(group, handle);  // those of an exchange that no dispatch followed
  if (!leases.empty()) group.leases->claim(leases);
  handle.leases = std::move(leases);
  const CountsCall before = handle.counting;
  CountsCall& now = handle.counting;
  now = call;
  now.at = group.channels.begin(channel);
  now.drop = group.config.given.overflow == twOverflowDrop;
  now.again = handle.counts.exchanged;
  now.growth = group.context.growth;
  now.known = now.again && now.room == before.room && now.alignment == before.alignment;
  if (!now.known) {
    handle.counted = {};
    handle.sizing.reset();
    // Other rows may be dropped, so partials of the last dispatch have no way back; all ranks see that alike. Those of
    // another alignment have, as their rows are told by the counts, and those of low latency, which drops none.
    handle.dispatched = handle.dispatched && (!handle.exact || now.room == before.room);
    handle.device.placed = twRankMajor;
  }
  bind_routing(group, handle, channel, call.stream);
  note_capture(group, handle, call.stream, true, false);
  handle.counts_deadline = TimePoint::max();
  handle.pending = Pending::kCounts;
  Status sent = group.backend->send_counts(handle.counting, handle);
  if (!sent.ok()) return fail_launch(group, handle, twPhaseCounts, handle.counting.at, std::move(sent));
  return call.send_only ? Status{} : finish_counts(group, handle);
}

namespace {

// Waits until a device has told the host the counts.
Status await_counts(twGroup& group, twHandle& handle) {
  if (handle.device.counts_serial == 0) {
    return fail(twInvalidUsage,
                "the counts of an exchange that is captured into a graph are in device memory alone: the host cannot "
                "wait for them");
  }
  // The device begins to wait after the host, and is the one to say who is late.
  group.backend->read_counts(handle, deadline_of(group) + std::chrono::seconds(1), &handle.counted);
  if (handle.counted.known) return {};
  if (was_interrupted()) return interrupt_group(group, twPhaseCounts, handle.counting.at, -1);
  TW_RETURN_IF_FAILED(check_usable(group, twPhaseCounts));
  if (handle.counted.failed) {
    handle.counts.exchanged = false;
    const ErrorRecord record = group.error();  // a peer has refused the call
    return {record.result, record.sentence};
  }
  return fail(twTimeout, "the counts of step {} on lane {} have not come to the host in time", handle.counting.at.step,
              handle.counting.at.channel);
}

}  // namespace

Status learn_counts(twGroup& group, twHandle& handle) {
  if (!handle.counted.known) TW_RETURN_IF_FAILED(await_counts(group, handle));
  const Overflow& overflow = handle.counted.overflow;
  if (overflow.rank < 0 || handle.counting.drop) return {};
  handle.counts.exchanged = false;
  part_leases(group, handle);
  return refuse_overflow(group, handle, overflow);
}

int64_t shown_rows(const twGroup& group, const twHandle& handle, const Layout& layout, bool sized) {
  if (sized) return layout.by_expert ? handle.counted.grouped_rows : handle.counted.flat_rows;
  const Shape& shape = group.shape();
  if (!layout.by_expert) return handle.counting.room;
  const int64_t alignment = handle.counting.alignment;
  const int64_t experts = group.context.local_experts;
  // Each row stands under so many experts at most, and each expert's rows are padded. Rows that are dropped have places
  // too.
  const int64_t sent = group.config.given.overflow == twOverflowDrop
                           ? static_cast<int64_t>(shape.ranks) * handle.max_tokens
                           : handle.counting.room;
  return padded_rows(sent * std::min<int64_t>(shape.top_k, experts), experts, alignment);
}

Status counts_ready(twGroup& group, twHandle& handle, int32_t timeout_ms, bool* ready) {
  *ready = handle.counted.known;
  if (*ready) return {};
  const bool launched =
      handle.counts.exchanged && handle.device.counts_serial != 0;  // a device tells when they are there
  if (handle.pending != Pending::kCounts && !launched) {
    return fail(twInvalidUsage, "no exchange of counts is under way that could tell the host: call {}, {}",
                Function{"twExchangeCounts"}, group.backend->on_device() ? "and not into a graph" : "send_only");
  }
  // S6: a caller that only asks must come to an end too. The first question begins the wait that twComplete ends.
  const TimePoint patience = std::min(deadline_of(group), handle.counts_deadline);
  handle.counts_deadline = patience;
  const TimePoint asked = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  const TimePoint until = timeout_ms < 0 ? patience : std::min(patience, asked);
  if (launched) {
    group.backend->read_counts(handle, until, &handle.counted);
    if (!handle.counted.known && was_interrupted()) {
      return interrupt_group(group, twPhaseCounts, handle.counting.at, -1);
    }
    *ready = handle.counted.known || handle.counted.failed || !check_usable(group, twPhaseCounts).ok();
  } else {
    *ready = group.backend->counts_ready(handle.counting.at, until);
    if (was_interrupted()) return interrupt_group(group, twPhaseCounts, handle.counting.at, -1);
  }
  *ready = *ready || std::chrono::steady_clock::now() >= patience;
  return {};
}

Status dispatch(twGroup& group, twHandle& handle, DispatchCall* call, int32_t wish, bool send_only) {
  call->at.channel = -1;
  TW_RETURN_IF_FAILED(check_not_pending(handle));
  int channel = -1;
  TW_RETURN_IF_FAILED(choose_channel(group, &handle, wish, &channel, kDispatchBank));
  TW_RETURN_IF_FAILED(drain(group, channel, twPhaseDispatch, call->stream));
  hold(group, handle, channel);
  group.channels.lease(channel);
  Channel& state = group.channels[channel];
  state.refused_before |= state.refused;
  state.refused = false;
  call->at = group.backend->on_device() ? group.channels.begin_dispatch(channel) : group.channels.begin(channel);
  call->send_only = send_only;
  // Leases are announced for the group's own rows in high throughput. Others go to the bank, which all ranks know by
  // the digest.
  const bool exact = call->rows.map.shape().exact();
  call->has_offsets = handle.has_offsets && call->rows.own && exact;
  handle.has_offsets = false;
  for (int q = 0; q < kMaxPayloads && call->has_offsets; ++q) {
    call->receive_offset[q] = handle.counting.receive_offset[q];
    // The output is the lease itself: there is nothing to copy.
    std::byte*& target = call->targets.payloads[q];
    const bool here = call->receive_offset[q] != 0 && target == group.backend->window() + call->receive_offset[q];
    if (here && layout_of(call->targets.layout).views()) target = nullptr;
  }
  // In high throughput the exchange of counts was the routing's first step.
  if (!call->rows.map.shape().exact()) bind_routing(group, handle, channel, call->stream);
  group.channels[channel].viewed = call->at.step;
  handle.bound = call->bound;
  if (exact) handle.sizing = handle.is_sized();
  note_capture(group, handle, call->stream, exact, handle.is_sized());
  handle.exact = exact;
  handle.dispatched = handle.refused = false;
  handle.dispatch = *call;
  handle.pending = Pending::kDispatch;
  Status sent = group.backend->send_dispatch(*call, handle);
  if (!sent.ok()) return fail_launch(group, handle, twPhaseDispatch, call->at, std::move(sent));
  return send_only ? Status{} : finish_dispatch(group, handle);
}

Status complete(twGroup& group, twHandle& handle, void* stream) {
  if (handle.pending == Pending::kNone) {
    return fail(twInvalidUsage, "nothing is pending: {} follows a send_only {}, {} or {}", Function{"twComplete"},
                Function{"twDispatch"}, Function{"twCombine"}, Function{"twExchangeCounts"});
  }
  if (handle.pending == Pending::kCounts) {
    handle.counting.stream = stream;
    Status counted = finish_counts(group, handle);
    if (counted.code == twInterrupted) return counted;
    TW_RETURN_IF_FAILED(check_usable(group, twPhaseCounts));
    return counted;
  }
  const bool dispatching = handle.pending == Pending::kDispatch;
  (dispatching ? handle.dispatch.stream : handle.combine.stream) = stream;
  Status status = dispatching ? finish_dispatch(group, handle) : finish_combine(group, handle);
  if (status.code == twInterrupted) return status;
  // The step ends even when another channel's error has finished the group: at once, and with outputs that are safe to
  // read.
  TW_RETURN_IF_FAILED(check_usable(group, dispatching ? twPhaseDispatch : twPhaseCombine));
  return status;
}

Status refuse_dispatch(twGroup& group, twHandle* handle, int32_t wish, bool send_only, int32_t bound,
                       const WindowMap& map, void* stream, Status why) {
  if (handle != nullptr) TW_RETURN_IF_FAILED(check_not_pending(*handle));
  int channel = -1;
  TW_RETURN_IF_FAILED(choose_channel(group, handle, wish, &channel, kDispatchBank));
  // The refusal comes first: on a device its step must have the bank that the lease gives a dispatch, as it has at the
  // peers.
  group.channels.lease(channel);
  Status refused = refuse_on(group, {twPhaseDispatch, true, nullptr, stream, bound, map, {}}, channel, std::move(why));
  if (handle == nullptr) {
    group.channels.give_back(channel);
    return refused;
  }
  part_leases(group, *handle);
  // Then the lease becomes what it is at the peers: their dispatch has failed or, on devices, has gone well as far as
  // they know yet.
  handle->dispatched = false;
  const bool second = group.channels[channel].second;
  give_back(group, *handle);
  group.channels.give_back(channel);
  handle->refused = learns_late(group);
  handle->exact = map.shape().exact();
  handle->bound = bound > 0 ? bound : default_bound(map.shape(), handle);
  handle->dispatch.at.channel = channel;
  if (send_only || learns_late(group)) {
    hold(group, *handle, channel);
    group.channels.lease(channel);
    group.channels[channel].second = !second;
    group.channels[channel].refused = learns_late(group);
  }
  return refused;
}

void keep_pace(twGroup& group, twHandle& handle, const CombineRows& sent, void* stream) {
  if (!handle.refused) return;
  handle.refused = false;
  const bool borrows = handle.channel < 0;  // as the peers' combine does
  const int channel = borrows ? group.channels.lend(handle.dispatch.at.channel) : handle.channel;
  if (borrows && channel >= 0) group.channels.borrow(channel);
  if (group.comm->carrier != nullptr && channel >= 0) {
    (void)group.backend->keep_pace(group.channels.begin(channel), handle.bound, sent, stream);
    if (!group.context.replicas.is_one()) {
      SharingCall call = sharing_of(group, handle, sent);
      call.at = group.channels.begin(channel);
      call.stream = stream;
      (void)group.backend->keep_sharing_pace(call);
    }
  }
  if (borrows && channel >= 0) group.channels.give_back(channel);
  give_back(group, handle);  // as at the peers, who think that it went well
}

Status refuse_counts(twGroup& group, twHandle* handle, int32_t wish, bool send_only, void* stream, Status why) {
  if (handle != nullptr) TW_RETURN_IF_FAILED(check_not_pending(*handle));
  // A handle that was counted may hold the channel of its dispatch, whose view this call must not touch.
  if (handle != nullptr && handle->counts.exchanged) {
    if (group.leases != nullptr && handle->channel < 0) {  // as at the peers, whose exchange fails
      handle->counts.exchanged = false;
      part_leases(group, *handle);
    }
    handle = nullptr;
  }
  int channel = -1;
  TW_RETURN_IF_FAILED(choose_channel(group, handle, wish, &channel));
  Status refused =
      refuse_on(group, {twPhaseCounts, false, nullptr, stream, 0, group.context.map, {}}, channel, std::move(why));
  if (handle == nullptr) return refused;
  give_back(group, *handle);
  // After a send_only call the peers complete, fail and hold the channel, so this rank holds it too. On a device the
  // call goes well as far as they know, so they give it back.
  if (send_only && !learns_late(group)) hold(group, *handle, channel);
  return refused;
}

bool view_is_alive(twGroup& group, const twHandle& handle) {
  const StepPlace& at = handle.dispatch.at;
  return group.channels[at.channel].step == at.step;
}

Status release_channel(twGroup& group, twHandle& handle) {
  TW_RETURN_IF_FAILED(check_not_pending(handle));
  give_back(group, handle);
  return {};
}

}  // namespace tw
