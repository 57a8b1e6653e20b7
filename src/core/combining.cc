// Combines as the host sees them: choosing the channel, the parts of a combine, and its end. calls.cc has the other
// steps, steps.h what they share.
//
// This file keeps S2 between the parts of a combine (pass_part), and S5: where a combine's lane goes is the same at a
// rank that refused and at its peers. Ranks that took different numbers of parts would wait for each other; the number
// follows from the bound, which every step's note has.
#include "core/steps.h"

namespace tw {
namespace {

// Chooses the channel of a combine: the handle's, or a free one for this step.
Status choose_combine_channel(twGroup& group, const twHandle& handle, int* channel) {
  *channel = handle.channel;
  if (*channel >= 0) return {};
  *channel = group.channels.lend(handle.dispatch.at.channel);
  return *channel >= 0 ? Status{} : choose_channel(group, nullptr, -1, channel, kCombineBank);
}

// `ended`: how the combine itself has ended. Token replicas share their sums then.
Status end_combine(twGroup& group, twHandle& handle, const StepEnd& ended) {
  const CombineCall& call = handle.combine;
  StepPlace at = call.at;
  Status sent;
  const StepEnd end = group.context.replicas.is_one() ? ended : share_sums(group, handle, ended, &at, &sent);
  if (!sent.ok()) return fail_launch(group, handle, twPhaseGather, at, std::move(sent));
  const twPhase_t phase = at.step == call.at.step ? twPhaseCombine : twPhaseGather;
  handle.pending = Pending::kNone;
  // A combine that a peer refused can be tried again, so its lease stays.
  if (end.code == twSuccess || handle.channel_for_this_step) give_back(group, handle);
  return conclude(group, phase, at, static_cast<uint32_t>(call.bound), end);
}

// Ends a part of a combine, and finds the place of the next. The rows may be a view in the bank that a dispatch brought
// them to, at any rank, also where the handle has released its lane. So all parts use the other bank, and a step is
// left out between two parts: a rank that has seen it end knows that all have read that bank (S2).
StepEnd pass_part(twGroup& group, twHandle& handle) {
  CombineCall& call = handle.combine;
  StepEnd end = group.backend->finish_combine(call, deadline_of(group), handle);
  if (end.code != twSuccess) return end;
  ++call.part;
  call.at = group.channels.begin(call.at.channel);
  end = group.backend->skip(call, deadline_of(group), handle);
  if (end.code == twSuccess) call.at = group.channels.begin(call.at.channel);
  return end;
}

}  // namespace

Status combine(twGroup& group, twHandle& handle, CombineCall call, bool send_only) {
  TW_RETURN_IF_FAILED(check_not_pending(handle));
  int channel = -1;
  TW_RETURN_IF_FAILED(choose_combine_channel(group, handle, &channel));
  TW_RETURN_IF_FAILED(drain(group, channel, twPhaseCombine, call.stream));
  handle.channel_for_this_step = handle.channel < 0;
  if (handle.channel_for_this_step) group.channels.borrow(channel);
  hold(group, handle, channel);
  call.at = group.channels.begin(channel);
  note_capture(group, handle, call.stream, handle.exact, handle.is_sized());
  handle.combine = call;
  handle.pending = Pending::kCombine;
  // Only the last part waits for twComplete: ranks make this call in one order, but may complete in any.
  for (CombineCall& part = handle.combine;;) {
    const bool last = part.part == part.parts - 1;
    part.send_only = send_only && last;
    Status sent = group.backend->send_combine(part, handle);
    if (!sent.ok()) return fail_launch(group, handle, twPhaseCombine, part.at, std::move(sent));
    if (last) return send_only ? Status{} : finish_combine(group, handle);
    const StepEnd end = pass_part(group, handle);
    if (end.code != twSuccess) return end_combine(group, handle, end);
  }
}

Status finish_combine(twGroup& group, twHandle& handle) {
  return end_combine(group, handle, group.backend->finish_combine(handle.combine, deadline_of(group), handle));
}

Status refuse_combine(twGroup& group, twHandle& handle, const CombineRows& sent, void* stream, Status why) {
  TW_RETURN_IF_FAILED(check_not_pending(handle));
  int channel = -1;
  TW_RETURN_IF_FAILED(choose_combine_channel(group, handle, &channel));
  const bool borrows = handle.channel < 0;
  if (borrows) group.channels.borrow(channel);
  const Refusal refusal{twPhaseCombine, false, &handle, stream, handle.bound, sent.map, {}, false, sent.values};
  Status refused = refuse_on(group, refusal, channel, std::move(why));
  if (!group.context.replicas.is_one()) {
    refused = refuse_sharing(group, handle, sent, channel, stream, std::move(refused));
  }
  if (borrows) {
    group.channels.give_back(channel);
  } else if (learns_late(group)) {
    give_back(group, handle);  // as at the peers, who think that it went well
  }
  return refused;
}

}  // namespace tw
