// What calls.cc, combining.cc, collectives.cc and backends share: how a step gets its channel, is refused, drained and
// concluded. S2 depends on drain being called before each step begins, S5 on choose_channel looking at calls alone;
// conclude decides which rank is blamed.
#pragma once

#include "core/group.h"

namespace tw {

// Writes the sentence of a step's record. `bound` and `note`: what this rank and the other gave. `both_modes`: the
// group has them, and ranks may differ in them.
void describe_call_error(ErrorRecord* record, uint32_t bound, uint32_t note, bool both_modes = false);

// Until when a call waits for its peers.
TimePoint deadline_of(twGroup& group);
// Turns the end of a step into a record and a sentence.
Status conclude(twGroup& group, twPhase_t phase, StepPlace at, uint32_t bound, const StepEnd& end);
// Chooses the channel of a call: the handle's, or the one asked for, or the next free one, as Channels::next_free does
// for a step in `bank`.
Status choose_channel(twGroup& group, const twHandle* handle, int32_t wish, int* channel, int bank = -1);
// Ends what is left of a channel's last step; called before each step. `stream`: that of the call that begins it.
Status drain(twGroup& group, int channel, twPhase_t phase, void* stream);
// Finishes the send_only gather or reduce of a channel, and keeps how it ended for twCompleteRequest. Fails when the
// group is finished.
Status finish_request(twGroup& group, int channel, void* stream);
// What follows a combine of such rows where token replicas share their sums (sharing.cc), without its place, its stream
// and the memory of its tensors.
SharingCall sharing_of(const twGroup& group, const twHandle& handle, const CombineRows& sent);
// Shares the sums of the handle's combine, which has ended so at this rank; *at becomes the place of that step, if one
// is made. Gives how both have ended. *sent: whether it could be sent.
StepEnd share_sums(twGroup& group, twHandle& handle, const StepEnd& combined, StepPlace* at, Status* sent);
// Refuses that step too, behind a combine that this rank has refused, where the peers cannot leave it out.
Status refuse_sharing(twGroup& group, twHandle& handle, const CombineRows& sent, int channel, void* stream, Status why);
// Finishes the last part of a handle's combine.
Status finish_combine(twGroup& group, twHandle& handle);

// Fails where the handle has a send_only call pending.
Status check_not_pending(const twHandle& handle);
// Notes that a call about to be made is captured, where it matters: in exact layouts (`exact`). `sized`: its tensors
// have as many rows as come.
void note_capture(const twGroup& group, twHandle& handle, const void* stream, bool exact, bool sized);
// Has a handle hold a channel, and give it back.
void hold(twGroup& group, twHandle& handle, int channel);
void give_back(twGroup& group, twHandle& handle);
// Whether ranks learn of a failed step only after their calls have returned.
bool learns_late(const twGroup& group);
// Ends the group after a step that could not be launched: the peers would wait for it, so they are told.
Status fail_launch(twGroup& group, twHandle& handle, twPhase_t phase, StepPlace at, Status why);
// Publishes a refusal, or gives the group up where the peers cannot be told. Returns `why`.
Status refuse_on(twGroup& group, Refusal refusal, int channel, Status why);

}  // namespace tw
