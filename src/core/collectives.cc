// Gathers and reduces as the host sees them. Arguments come checked (src/api/collectives.cc); a call becomes a step on
// a channel that is not held, and a send_only call a request that twCompleteRequest finishes. A request is finished at
// the latest when the next step on its channel begins, as a refused step is (S2). So leases follow from the calls alone
// (S5), also where a rank refuses a call that its peers complete later.
#include "core/steps.h"

namespace tw {
namespace {

Status finish(twGroup& group, const CollectiveCall& call) {
  const StepEnd end = group.backend->finish_collective(call, deadline_of(group));
  return conclude(group, call.phase(), call.at, static_cast<uint32_t>(call.bound), end);
}

}  // namespace

Status finish_request(twGroup& group, int channel, void* stream) {
  Channel& state = group.channels[channel];
  twGroup& requester = *state.requester;
  Request& request = requester.requests.at(state.request);
  state.request = 0;
  request.call.stream = stream;
  request.status = finish(requester, request.call);
  request.finished = true;
  if (request.status.code == twInterrupted) return request.status;
  return check_usable(group, request.call.phase());
}

Status collect(twGroup& group, CollectiveCall* given, int32_t wish, int64_t* request) {
  CollectiveCall& call = *given;
  call.at.channel = -1;
  int channel = -1;
  TW_RETURN_IF_FAILED(choose_channel(group, nullptr, wish, &channel));
  TW_RETURN_IF_FAILED(drain(group, channel, call.phase(), call.stream));
  // Where a caller sees the window, the host must know the bank, as for a lease's first dispatch.
  call.at =
      call.views && group.backend->on_device() ? group.channels.begin_refusal(channel) : group.channels.begin(channel);
  if (call.views) group.channels[channel].viewed = call.at.step;
  if (Status sent = group.backend->send_collective(call); !sent.ok()) {
    (void)conclude(group, call.phase(), call.at, 0, {twPeerAborted, group.me(), {}, 0});
    return sent;
  }
  if (!call.send_only) return finish(group, call);
  *request = ++group.last_request;
  group.channels[channel].request = *request;
  group.channels[channel].requester = &group;
  group.requests[*request].call = call;
  return {};
}

Status complete_request(twGroup& group, int64_t number, void* stream) {
  const auto found = group.requests.find(number);
  if (found == group.requests.end()) {
    return fail(twInvalidArgument, "{} is {}, which is no send_only gather or reduce that is still to be completed",
                Argument("request"), Value(number));
  }
  const int channel = found->second.call.at.channel;
  const twPhase_t phase = found->second.call.phase();
  if (!found->second.finished) (void)finish_request(group, channel, stream);
  Status status = std::move(found->second.status);
  group.requests.erase(found);
  if (status.code == twInterrupted) return status;
  // The step ends even when another channel's error has finished the group: at once, and with outputs that are safe to
  // read.
  TW_RETURN_IF_FAILED(check_usable(group, phase));
  return status;
}

Status refuse_collective(twGroup& group, twPhase_t phase, bool views, const CollectiveCall& call, int32_t wish,
                         void* stream, Status why) {
  int channel = -1;
  TW_RETURN_IF_FAILED(choose_channel(group, nullptr, wish, &channel));
  return refuse_on(group, {phase, views, nullptr, stream, call.bound, group.context.map, call.places}, channel,
                   std::move(why));
}

bool window_is_alive(twGroup& group, const void* address) {
  for (int channel = 0; channel < group.channels.size(); ++channel) {
    if (!group.backend->in_channel(channel, address)) continue;
    return group.channels[channel].step == group.channels[channel].viewed;
  }
  return false;
}

}  // namespace tw
