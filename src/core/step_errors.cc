// The sentences of errors of steps, as callers read them. describe_call_error takes a record and the two bounds or
// notes that differ, and gives the record its sentence. Users and tests read these sentences; no code decides by them,
// so only their truth is at stake: which call, which ranks, which values.
#include "core/steps.h"

namespace tw {
namespace {

constexpr Argument kBound("input.bound");

Function function_of(twPhase_t phase) {
  if (phase == twPhaseCounts) return {"twExchangeCounts"};
  if (phase == twPhaseGather) return {"twAllGatherV"};
  if (phase == twPhaseReduce) return {"twReduceScatterV"};
  return {phase == twPhaseDispatch ? "twDispatch" : "twCombine"};
}

bool is_collecting(const ErrorRecord& record) { return record.phase == twPhaseGather || record.phase == twPhaseReduce; }

Sentence describe_mismatch(const ErrorRecord& record, uint32_t bound, uint32_t note, bool both_modes) {
  const Function call = function_of(record.phase);
  const int32_t one = record.reporter;
  const int32_t other = record.peer;
  if (is_collecting(record) && bound == note) {
    return compose("ranks {} and {} differ in the sizes, tensors, rows or layout of {}; all ranks must give the same",
                   one, other, call);
  }
  if (!is_collecting(record) && ((bound ^ note) & kHasOffsets) != 0) {
    return compose(
        "ranks {} and {} dispatch after different exchanges of counts: the rows of one go to leases, those of the "
        "other "
        "do not, as one of them was refused; exchange counts again",
        one, other);
  }
  if (record.phase == twPhaseCounts && bound != note) {
    return compose("{} of {} differs: rank {} has {}, rank {} has {}", Argument("input.max_recv_tokens"), call, one,
                   bound, other, note);
  }
  if (record.phase == twPhaseCombine && bound == note) {
    return compose(
        "ranks {} and {} differ in the group or the rows of {}: its dtype, its elements or whether it has choice "
        "values",
        one, other, call);
  }
  if (!is_collecting(record) && bound == note) {
    return compose("ranks {} and {} differ in the group, the layer, its map, the counting{} or the types of rows of {}",
                   one, other, both_modes ? ", the mode" : "", call);
  }
  if (record.phase == twPhaseDispatch && both_modes) {
    return compose(
        "{} of {} differs: rank {} has {}, rank {} has {}; ranks may differ in the mode, low latency or high "
        "throughput",
        kBound, call, one, bound, other, note);
  }
  if (record.phase == twPhaseDispatch || is_collecting(record)) {
    return compose("{} of {} differs: rank {} has {}, rank {} has {}", kBound, call, one, bound, other, note);
  }
  return compose("{} answers different dispatches: that of rank {} had bound {}, that of rank {} bound {}",
                 Function{"twCombine"}, one, bound, other, note);
}

// What a device has found in its own memory.
Sentence describe_bad_value(const ErrorRecord& record, uint32_t bound) {
  if (is_collecting(record)) {
    return compose(
        "{} of {} tell {} rows of rank {} in device memory (step {}, lane {}); it must be from 0 to {}: the nearest of "
        "these was taken",
        Argument("input.sizes[]"), function_of(record.phase), record.value, record.token, record.step, record.lane,
        bound);
  }
  if (record.phase == twPhaseNone) {  // of no step
    return compose(
        "{} of {} is {} in device memory; it must be -1 (no expert) or an expert that the token does not have yet: it "
        "was taken for -1",
        Argument("ids[]", record.token, record.k), Function{"twGroupRoutingLayout"}, Value(record.value));
  }
  return compose(
      "{} is {} in device memory (step {}, lane {}); it must be -1 (no expert) or an expert that the token does not "
      "have yet: it was taken for -1",
      Argument("ids[]", record.token, record.k), Value(record.value), record.step, record.lane);
}

Sentence describe(const ErrorRecord& record, uint32_t bound, uint32_t note, bool both_modes) {
  if (record.result == twPeerRefused) {
    return compose("rank {} refused its arguments of {} (step {}, lane {})", record.peer, function_of(record.phase),
                   record.step, record.lane);
  }
  if (record.result == twReplicaMismatch) {
    return compose(
        "ranks {} and {} are token replicas and hold unlike tokens: they differ in ids, in weights, in how many tokens "
        "there are or in the dtype of results (step {}, lane {}); {} shares no sums between them",
        note, record.peer, record.step, record.lane, Function{"twCombine"});
  }
  if (record.result == twBoundMismatch) return describe_mismatch(record, bound, note, both_modes);
  if (record.result == twRecvOverflow) {
    const Argument room = bound == note ? "config.max_recv_tokens" : "input.max_recv_tokens";
    return compose("rank {} would receive {} rows; {} is {} (nothing was sent)", record.peer, record.value, room,
                   Value(bound));
  }
  return describe_bad_value(record, bound);
}

}  // namespace

void describe_call_error(ErrorRecord* record, uint32_t bound, uint32_t note, bool both_modes) {
  record->set_sentence(describe(*record, bound, note, both_modes));
}

}  // namespace tw
