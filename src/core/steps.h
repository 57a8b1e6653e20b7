// What calls.cc, collectives.cc and backends have in common: how a step is begun, refused and ended.
#pragma once

#include "core/group.h"

namespace tw {

// The sentence of a record of a step, into its message. `bound` and `note`: what this rank and the other gave.
void describe_call_error(twErrorRecord_t* record, uint32_t bound, uint32_t note);

// Until when a call waits for its peers.
TimePoint deadline_of(twGroup& group);
// Turns the end of a step into a record and a sentence.
Status conclude(twGroup& group, twPhase_t phase, StepPlace at, uint32_t bound, const StepEnd& end);
// The lane of a call: the handle's, or the one asked for, or the next free one.
Status choose_lane(twGroup& group, const twHandle* handle, int32_t wish, int* lane);
// Ends what is left of a lane's last step; before each step. `stream`: of the call that begins it.
Status drain(twGroup& group, int lane, twPhase_t phase, void* stream);
// Finishes the gather or reduce that was sent alone on a lane, and keeps how it ended for twCompleteRequest. Fails when
// the group is finished.
Status finish_request(twGroup& group, int lane, void* stream);
// Publishes a refusal, or gives the group up where the peers cannot be told. Returns `why`.
Status refuse_on(twGroup& group, Refusal refusal, int lane, Status why);

}  // namespace tw
