// The sentences of errors of steps, as callers read them. describe_call_error takes a record and the two bounds or
// notes that differ, and writes the record's message. Users and tests read these sentences; no code decides by them, so
// only their truth is at stake: which call, which ranks, which values.
#include <cstdio>

#include "core/steps.h"

namespace tw {

void describe_call_error(twErrorRecord_t* record, uint32_t bound, uint32_t note) {
  const bool dispatching = record->phase == twPhaseDispatch;
  const bool collecting = record->phase == twPhaseGather || record->phase == twPhaseReduce;
  const char* const call = record->phase == twPhaseCounts   ? "twExchangeCounts"
                           : record->phase == twPhaseGather ? "twAllGatherV"
                           : record->phase == twPhaseReduce ? "twReduceScatterV"
                           : dispatching                    ? "twDispatch"
                                                            : "twCombine";
  char* const text = record->message;
  constexpr size_t kSize = sizeof record->message;
  if (record->result == twPeerRefused) {
    std::snprintf(text, kSize, "rank %d refused its arguments of %s (step %u, lane %d)", record->peer, call,
                  record->step, record->lane);
  } else if (record->result == twBoundMismatch && collecting && bound == note) {
    std::snprintf(text, kSize,
                  "ranks %d and %d differ in the sizes, tensors, rows or layout of %s; all ranks must give the same",
                  record->reporter, record->peer, call);
  } else if (record->result == twBoundMismatch && collecting) {
    std::snprintf(text, kSize, "input.bound of %s differs: rank %d has %u, rank %d has %u", call, record->reporter,
                  bound, record->peer, note);
  } else if (record->result == twBoundMismatch && ((bound ^ note) & kHasOffsets) != 0) {
    std::snprintf(
        text, kSize,
        "ranks %d and %d dispatch after different exchanges of counts: the rows of one go to leases, those of "
        "the other do not, as one of them was refused; exchange counts again",
        record->reporter, record->peer);
  } else if (record->result == twBoundMismatch && bound == note) {
    std::snprintf(text, kSize, "ranks %d and %d differ in the layer, its map or the counting of %s", record->reporter,
                  record->peer, call);
  } else if (record->result == twBoundMismatch) {
    std::snprintf(
        text, kSize,
        dispatching ? "input.bound of twDispatch differs: rank %d has %u, rank %d has %u"
                    : "twCombine answers different dispatches: that of rank %d had bound %u, that of rank %d bound %u",
        record->reporter, bound, record->peer, note);
  } else if (record->result == twRecvOverflow) {
    std::snprintf(text, kSize, "rank %d would receive %lld rows; config.max_recv_tokens is %u (nothing was sent)",
                  record->peer, static_cast<long long>(record->value), bound);
  } else if (collecting) {
    std::snprintf(
        text, kSize,
        "input.sizes of %s tell %lld rows of rank %d in device memory (step %u, lane %d); it must be from 0 to "
        "%u: the nearest of these was taken",
        call, static_cast<long long>(record->value), record->token, record->step, record->lane, bound);
  } else {
    std::snprintf(
        text, kSize,
        "ids[%d, %d] is %lld in device memory (step %u, lane %d); it must be -1 (no expert) or an expert that "
        "the token does not have yet: it was taken for -1",
        record->token, record->k, static_cast<long long>(record->value), record->step, record->lane);
  }
}

}  // namespace tw
