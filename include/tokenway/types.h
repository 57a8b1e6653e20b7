// Types that every part of the C API uses: results, error records and tensors. tokenway.h includes it, and has the
// conventions.
#ifndef TOKENWAY_TYPES_H_
#define TOKENWAY_TYPES_H_

#include <stddef.h>
#include <stdint.h>

#define TW_MAX_DIMS 6

// Enums have the size of int, and in C++ any int is a value of theirs: the library checks what a caller gives.
#if defined(__cplusplus) && __cplusplus >= 201103L
#define TW_AS_INT : int
#else
#define TW_AS_INT
#endif

// ---------------------------------------------------------------------------------------------------------- results

// Results, grouped by what they break: nothing (the call did not happen), this call (on all ranks), or the group.
typedef enum TW_AS_INT {
  twSuccess = 0,
  // For these nothing was sent, and the group is as it was. There is one exception: where a device or a carrier could
  // not do this rank's part of a step, for which the peers wait, the rank has given the group up, as by twGroupAbort;
  // twGroupGetError tells it.
  twInvalidArgument = 1,  // an argument is out of range; twLastError() says which
  twInvalidUsage = 2,     // right arguments at the wrong time: combine before dispatch, no free lane, ...
  twOutOfMemory = 3,      // the sentence says how much is needed and how much is free
  twSystemError = 4,      // an operating system call failed; the sentence holds errno
  twUnsupported = 5,      // this build or machine cannot do it; the sentence says why
  twConfigMismatch = 6,   // twGroupCreate: ranks disagree; the sentence names the field and the ranks
  // For these the call failed on every rank; the group stays usable.
  twPeerRefused = 7,    // a peer was given bad arguments; the record's `peer` says which
  twBoundMismatch = 8,  // ranks called with different bounds b or max_recv_tokens, or gather or reduce different sizes
                        // of rows
  twReplicaMismatch = 17,  // token replicas hold unlike tokens; the record's `peer` says which rank differs
  twRecvOverflow = 15,     // a rank would receive more than max_recv_tokens rows; the sentence says which, and how many
  // For these the group is finished (sticky): every later call returns the same error. See twGroupShrink.
  twTimeout = 9,         // a peer was later than the group's timeout
  twPeerDied = 10,       // a peer's process ended or closed its comm, or is out of reach
  twExcluded = 11,       // the peers gave this rank up (it was too slow) and go on without it, or its network failed
  twCallMismatch = 12,   // ranks made different calls on the same lane: a dispatch and a combine, or different handles
  twPeerAborted = 13,    // a peer, or this rank, called twGroupAbort, or a peer's network failed
  twInternalError = 14,  // a promise of the library is broken: please report
  twInterrupted = 16,    // a wait of this rank was interrupted (twSetInterrupt); the group is given up
} twResult_t;

// What a rank was doing when an error was found.
typedef enum TW_AS_INT {
  twPhaseNone = 0,
  twPhaseCreate = 1,
  twPhaseDispatch = 2,
  twPhaseCombine = 3,
  twPhaseShrink = 4,
  twPhaseCounts = 5,
  twPhaseGather = 6,
  twPhaseReduce = 7,
} twPhase_t;

// What ended a call, and which rank is to blame. Ranks are ranks of the group.
typedef struct {
  size_t size;
  twResult_t result;  // twSuccess: no error so far
  int32_t sticky;     // 1: the group is finished
  int32_t peer;       // the culprit, -1 if none
  int32_t reporter;   // the rank that found out first
  twPhase_t phase;    // what this rank was doing
  int32_t lane;       // -1 if none
  uint32_t step;      // step of the lane
  uint32_t expected;  // step waited for in the culprit's signal
  uint32_t seen;      // step found there
  int32_t token;      // for a bad id in device memory its token, for a bad size its rank; else -1
  int32_t k;          // for a bad id its k; else -1
  int64_t value;      // the bad id or size; for twRecvOverflow the rows
  char message[512];  // the same as a sentence
} twErrorRecord_t;

// ---------------------------------------------------------------------------------------------------------- tensors

// The types of elements.
typedef enum TW_AS_INT {
  twDtypeNone = 0,
  twUint8 = 1,
  twInt8 = 2,
  twInt16 = 3,
  twUint16 = 4,
  twInt32 = 5,
  twUint32 = 6,
  twInt64 = 7,
  twUint64 = 8,
  twFloat16 = 9,
  twBfloat16 = 10,
  twFloat32 = 11,
  twFloat64 = 12,
  twFloat8e4m3 = 13,
  twFloat8e5m2 = 14,
  twBool = 15,
} twDtype_t;

// A tensor of the caller. Strides count elements. Within a row (all dimensions after those that count rows) elements
// must be contiguous; the strides over rows are free in inputs, and C-contiguous in outputs. data may be NULL if the
// tensor has no elements; in an output, data == NULL asks for a view where a layout offers one, and elsewhere means
// "not wanted".
typedef struct {
  void* data;
  twDtype_t dtype;
  int32_t ndim;
  int64_t shape[TW_MAX_DIMS];
  int64_t stride[TW_MAX_DIMS];
} twTensor_t;
#define TW_TENSOR_INIT               \
  {                                  \
    NULL, twDtypeNone, 0, {0}, { 0 } \
  }

// One tensor that travels with every token: `elements` values of `dtype` per row, copied and never interpreted.
typedef struct {
  twDtype_t dtype;
  int64_t elements;  // >= 1
} twPayload_t;

// The order and shape of received rows. R' is the number of rows that came; P counts the rows of all experts with their
// padding.
typedef enum TW_AS_INT {
  twRankMajor = 0,    // [N, b, ...]: slot p of source s at [s, p]; slots fill in token order
  twExpertMajor = 1,  // [L, N*b, ...]: rows of a local expert from 0 on, in (source, token) order
  // High throughput has these two layouts, and only these.
  twFlat = 2,     // [R', ...]: the R' rows that came, in (source, token) order
  twGrouped = 3,  // [P, ...]: rows of local expert 0, then of 1 and so on, each in (source, token) order and padded
                  // with zeros to a multiple of row_alignment: expert e has rows offsets[e] .. offsets[e + 1]
  // The rows of twGrouped in low latency, at the same places, where nobody knows before how many come: P follows from
  // the call's bound, as the most that can (twGroupLayout). Rows from offsets[L] on are not written; their ids are
  // invalid_id.
  twGroupedByBound = 4,
} twLayout_t;

#endif  // TOKENWAY_TYPES_H_
