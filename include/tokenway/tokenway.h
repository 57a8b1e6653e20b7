// Tokenway: expert-parallel communication for mixture-of-experts models.
//
// One exchange: `dispatch` sends every token to the distinct ranks that hold its top-k experts, `combine` returns one
// partial result per rank and sums them where the token came from. This header brings the whole C API, with those
// beside it, and needs nothing but a C99 compiler. A complete program stands in examples/03_c_api.c.
//
// Conventions
//   * Functions return twResult_t. A sentence that names the argument, its value and the allowed range is kept per
//     thread: twLastError().
//   * A struct begins with `size`, which the caller sets to sizeof the struct. Smaller (older) sizes are accepted, the
//     missing fields taking their defaults; larger ones if the bytes beyond the known fields are zero. The TW_*_INIT
//     macros set the size and every default.
//   * The caller owns all tensors. A tensor given to a call must stay alive and unchanged until the call has returned
//     or, for a `send_only` call, until twComplete has returned.
//   * On the CPU backend every call is synchronous on the calling thread and `stream` must be NULL.
//   * A group, with its handles, is for one thread at a time; different groups for different threads at once. A call
//     while another one is in the group is twInvalidUsage at once, names the other, tells the peers nothing and changes
//     nothing; so is one from a callback of that other. Exceptions say that they may come from any thread.
//   * On the CUDA backend tensors are device memory, `stream` is a cudaStream_t, and twDispatch, twCombine and
//     twComplete only enqueue: they never wait for the device, and can be captured into a CUDA graph. Tensors must stay
//     alive and unchanged until the work of the call has run, in stream order. Results are on the device. What a step
//     finds out while it runs (a late peer, a refused call, a bad id) appears in the group's record, which
//     twGroupGetError reads without waiting; a sticky error is returned by every later call; TOKENWAY_BLOCKING=1 makes
//     each call wait and return its own error. The uses of one lane must be ordered by streams or events.
//   * "Collective" means: every rank calls it, in the same order relative to the other calls on that comm or group.
//     Creating, shrinking and destroying groups of one comm, and destroying it: one at a time, else twInvalidUsage; but
//     a group with a sticky error may be destroyed beside another call of the comm.
//   * Comms, groups and handles do not survive fork(): in the child they do not exist.
//
// Words: N ranks, E experts, T tokens of this rank in this call, K expert ids per token, B = max_tokens, b = the bound
// of this call (T <= b <= B, equal on all ranks), L = experts on this rank, H = elements of a row.
#ifndef TOKENWAY_H_
#define TOKENWAY_H_

#include "tokenway/carrier.h"
#include "tokenway/types.h"

#define TW_VERSION_MAJOR 0
#define TW_VERSION_MINOR 1
#define TW_VERSION_PATCH 0
#define TW_VERSION (TW_VERSION_MAJOR * 10000 + TW_VERSION_MINOR * 100 + TW_VERSION_PATCH)

#define TW_MAX_PAYLOADS 8      // tensors dispatched per token
#define TW_MAX_TOP_K 64        // expert ids per token
#define TW_MAX_RANKS 1024      // ranks of a comm
#define TW_MAX_LANES 64        // exchanges in flight per group
#define TW_MAX_LOCAL_RANKS 16  // ranks of one process that share a CUDA device
#define TW_MAX_EXPERTS 1048576
#define TW_MAX_TOKENS ((1 << 28) - 1)  // max_tokens: a count has 28 bits in a published word

#if defined(__GNUC__)
#define TW_API __attribute__((visibility("default")))
#else
#define TW_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ---------------------------------------------------------------------------------------------------------- results

// The name of a result, for example "twPeerDied". Never NULL.
TW_API const char* twResultString(twResult_t result);

// The sentence of the last failed call of this thread; "" if none failed. Valid until the thread's next call.
TW_API const char* twLastError(void);

// TW_VERSION of the library that is loaded.
TW_API int twVersion(void);

// Describes the index-th environment variable that the library reads, from 0; twInvalidArgument past the last one.
// The strings are static, but for `value`: the setting in force, valid until the thread's next call.
TW_API twResult_t twEnvironment(int32_t index, const char** name, const char** value, const char** doc);

// ------------------------------------------------------------------------------------------------------------- comm

typedef struct twComm* twComm_t;
typedef struct twGroup* twGroup_t;
typedef struct twHandle* twHandle_t;

#include "tokenway/comm.h"

// -------------------------------------------------------------------------------------------------------- placement

#include "tokenway/placement.h"

// ------------------------------------------------------------------------------------------------------------ group

typedef enum TW_AS_INT {
  twLowLatency = 0,
  // Exact layouts: ranks exchange counts first (twExchangeCounts), so that each row goes to its final place and outputs
  // are as large as what comes.
  twHighThroughput = 1,
} twMode_t;

// What becomes of rows beyond max_recv_tokens.
typedef enum TW_AS_INT {
  twOverflowRefuse = 0,  // the exchange of counts fails on all ranks alike (twRecvOverflow); nothing is sent
  twOverflowDrop = 1,    // they are not sent; a token's sum lacks the partials of ranks that it was dropped for
} twOverflow_t;

typedef enum TW_AS_INT {
  twIdLocal = 0,   // received ids are slots 0..L-1 of this rank; ids of experts elsewhere become invalid_id
  twIdGlobal = 1,  // received ids are as sent; with config.placement, the slots that serve them
} twIdSpace_t;

// One tensor that travels with every token: `elements` values of `dtype` per row, copied and never interpreted.
typedef struct {
  twDtype_t dtype;
  int64_t elements;  // >= 1
} twPayload_t;

// The same on every rank, but for sm_limit and the allocator; twGroupCreate finds differences and names
// them.
typedef struct {
  size_t size;
  twMode_t mode;
  int32_t num_experts;  // E, 1..TW_MAX_EXPERTS; 0, with top_k 0: one on each rank, for a group that gathers and reduces
  int32_t top_k;        // K, 1..TW_MAX_TOP_K, at most E
  int32_t max_tokens;   // B, 1..TW_MAX_TOKENS: tokens of one rank in one call; N * B is at most 2^31 - 1
  int32_t num_payloads;  // 1..TW_MAX_PAYLOADS
  twPayload_t payloads[TW_MAX_PAYLOADS];
  twDtype_t combine_dtype;   // of the rows on the wire: twFloat32, twBfloat16 or twFloat16
  int64_t combine_elements;  // H of combined rows
  // Placement. NULL: contiguous blocks, the first E mod N ranks hold one more. Else expert e lives on rank
  // expert_rank[e] as its local expert expert_slot[e]; a rank's slots are 0..L-1, each once; L may be 0. Copied.
  // With `placement`, below, the same of P physical slots: [P].
  const int32_t* expert_rank;  // [E]
  const int32_t* expert_slot;  // [E]
  int32_t lanes;               // exchanges in flight, 1..TW_MAX_LANES; 0: 1
  int32_t timeout_ms;          // a peer later than this is an error; 0: TOKENWAY_TIMEOUT_MS, else 100 s
  twDtype_t id_dtype;          // of received ids: twInt32 or twInt64; twDtypeNone: twInt32
  twIdSpace_t id_space;
  int32_t invalid_id;  // what stands for "no expert" in received ids: negative, or no id that may come; default -1
  int32_t sm_limit;    // CUDA backend: thread blocks of a kernel, at most one per SM; 0: the backend chooses
  // High throughput alone.
  int32_t max_recv_tokens;  // R, rows of all sources that a rank may receive in a step, 1..N*B; 0: N*B
  twOverflow_t overflow;
  int32_t row_alignment;  // twGrouped: an expert's rows begin at multiples of this, a power of two, 1..256; 0: 1
  // Memory for the arrays of handles, device memory on the CUDA backend; both NULL: the library's own. alloc must
  // return 64-byte aligned blocks.
  void* (*alloc)(size_t bytes, void* context);
  void (*release)(void* block, void* context);
  void* alloc_context;
  uint64_t lease_bytes;            // high throughput alone: of the window, for leases (leases.h); 0: none
  const twPlacement_t* placement;  // placement.h: experts in several slots, maps by layer, counts; NULL: none of it
} twGroupConfig_t;

// clang-format off
#define TW_GROUP_CONFIG_INIT                                                                                       \
  {sizeof(twGroupConfig_t), twLowLatency, 0, 0, 0, 0, {{twDtypeNone, 0}}, twBfloat16, 0, NULL, NULL, 1, 0, twInt32, \
   twIdLocal, -1, 0, 0, twOverflowRefuse, 0, NULL, NULL, NULL, 0, NULL}
// clang-format on

typedef struct {
  size_t size;
  int32_t rank;               // of this group: after a shrink, ranks are renumbered
  int32_t nranks;             // N
  int32_t num_local_experts;  // L of this rank
  int32_t lanes;
  int32_t timeout_ms;
  int32_t comm_ranks[TW_MAX_RANKS];  // the rank in the comm of each rank of the group
  uint64_t window_bytes;             // of this rank's window; on the CUDA backend with its lines and chunk words
} twGroupInfo_t;

typedef struct {
  size_t size;
  uint64_t window;          // bytes of one rank's window, all lanes
  uint64_t per_lane;        // of it, one lane: two banks of rows, inbox and words
  uint64_t dispatch_row;    // bytes of one dispatched row with its header, ids and weights
  uint64_t combine_row;     // bytes of one combined row
  uint64_t expert_buffers;  // 2 * E * B * row: the receive and send buffers of designs that keep a place per expert
                            // (NCCL EP, equation 3), for comparison
} twWindowBytes_t;

// What a group of this configuration would take on `nranks` ranks; creates nothing. Errors: as twGroupCreate.
TW_API twResult_t twGroupWindowBytes(const twGroupConfig_t* config, int32_t nranks, twWindowBytes_t* bytes);

// Collective over the comm. Maps a window of each rank into every other. Errors: twInvalidArgument, twConfigMismatch
// (both leave the comm usable; if any rank fails, all ranks return an error), twOutOfMemory, twTimeout, twPeerDied,
// and twCallMismatch, at once, where another rank destroys or shrinks a group instead: the sentence names what each
// rank does, and on each that was one call, so that the comm's next ones meet again.
TW_API twResult_t twGroupCreate(twGroup_t* group, twComm_t comm, const twGroupConfig_t* config);

// Collective, with a bounded barrier; a group with a sticky error is freed without one. Frees the group's handles too:
// a handle must not be used, nor destroyed, afterwards. Views into the window end here, unless it is kept
// (twWindowKeep). twInvalidUsage while another thread is in a call of the group: twGroupAbort ends one that waits.
// twCallMismatch, at once, where another rank creates a group or destroys another one instead: the group is freed all
// the same, and its peers need not wait for this rank when they destroy it. While peers shrink the group they go on
// without this rank, which is no error here.
TW_API twResult_t twGroupDestroy(twGroup_t group);

// Collective among the ranks that are still there, usually after an error. They agree on who survives (ranks that
// died, that an error record blames, that gave the group up or destroyed it, or that do not answer within the
// timeout, and 10 s at least (TOKENWAY_SHRINK_MS), are left out) and create a new group over fresh memory; the old
// one becomes sticky and must still be destroyed. Only a rank that does not answer costs that time: the others are
// left out as soon as it is known of them, also while the call waits. config == NULL keeps the old configuration,
// maps and shares of config.placement included, with experts (or its slots) in blocks over the survivors;
// max_recv_tokens beyond what survivors can send is as much as they can. Returns twExcluded on a rank that the
// others have given up, or that lives on the side that is not the larger where ranks came too far apart: it then stays
// left out. Ranks that make another call instead are left out too, if those who shrink are more; else the call returns
// twCallMismatch, and changes nothing. May be called again when it failed, as when another rank died meanwhile.
TW_API twResult_t twGroupShrink(twGroup_t group, const twGroupConfig_t* config, twGroup_t* survivors);

// Gives the group up, here and at all peers: their calls, also those that wait, return twPeerAborted within moments,
// and twGroupDestroy does not wait for them. For a rank that cannot go on, as when an exception has ended its part. Not
// collective. On a group that is finished already it only tells survivors not to wait for this rank. From any thread.
TW_API twResult_t twGroupAbort(twGroup_t group);

// From any thread, as the next.
TW_API twResult_t twGroupInfo(twGroup_t group, twGroupInfo_t* info);

// twUnsupported for a group whose ranks share memory.
TW_API twResult_t twGroupPortableInfo(twGroup_t group, twPortableInfo_t* info);

// The record of the group's last error, whether sticky or of one call. Always returns twSuccess for a valid group;
// never blocks; may be called from any thread.
TW_API twResult_t twGroupGetError(twGroup_t group, twErrorRecord_t* record);

// ----------------------------------------------------------------------------------------------------------- handle

// A handle caches one routing: ids, weights and the slots that follow from them, and, after a dispatch, what arrived.
// It owns no lane, so many can be kept. `memory` (64-byte aligned, twHandleMemBytes bytes, kept alive by the caller)
// may hold its arrays; NULL: the group allocates.
//
// ids: [T, K] twInt32 or twInt64, 0 <= T <= max_tokens; -1 means "no expert" and may stand anywhere; else 0..E-1, each
// at most once per token. weights: [T, K] twFloat32, or data == NULL: all 1. Both are copied. Rows may be strided.
// On the CUDA backend they are copied, and the ids checked, by the handle's first dispatch, in stream order: the
// tensors must stay as they are until then. Where that is part of a captured graph, each replay copies them anew. In
// device memory a bad id acts as -1; the record names token, k and value.
// Not collective. Errors: twInvalidArgument names token, k and value; nothing is created. More than max_tokens tokens
// are refused by the handle's dispatch or exchange of counts (twInvalidArgument), where peers wait and are told at
// once. In high throughput the handle's counts must be exchanged before it is dispatched: twExchangeCounts.
TW_API twResult_t twHandleCreate(twHandle_t* handle, twGroup_t group, const twTensor_t* ids, const twTensor_t* weights,
                                 void* memory);

// Replaces the routing of a handle that has no dispatch or combine pending and no lane leased, and none in a CUDA graph
// whose tensors have as many rows as the host knew that would come (else twInvalidUsage).
TW_API twResult_t twHandleUpdate(twHandle_t handle, const twTensor_t* ids, const twTensor_t* weights);

// Gives back the handle's lane, if it holds one, and frees it. As twHandleRelease, the same host order on all ranks,
// and refused (twInvalidUsage, nothing is freed) while a send is pending.
TW_API twResult_t twHandleDestroy(twHandle_t handle);

// Gives back the lane that the handle's dispatch leased, without a combine. Sends nothing; all ranks do it at the same
// place in their order of calls, as every lease depends on it. Refused (twInvalidUsage) while a send is pending.
TW_API twResult_t twHandleRelease(twHandle_t handle);

TW_API twResult_t twHandleMemBytes(twGroup_t group, size_t* bytes);

// counts: [N], rows received from each rank by the handle's last completed dispatch; total: their sum. Either may be
// NULL. twInvalidUsage before the first dispatch, in high throughput before the exchange of counts. On the CUDA backend
// it waits for that dispatch; not in a capture.
TW_API twResult_t twHandleNumRecvTokens(twHandle_t handle, int32_t* counts, int32_t* total);

// -------------------------------------------------------------------------------------------------------- exchange

typedef enum TW_AS_INT {
  twRankMajor = 0,    // [N, b, ...]: slot p of source s at [s, p]; slots fill in token order
  twExpertMajor = 1,  // [L, N*b, ...]: rows of a local expert from 0 on, in (source, token) order
  // High throughput alone, and there these alone.
  twFlat = 2,     // [R', ...]: the R' rows that came, in (source, token) order
  twGrouped = 3,  // [P, ...]: rows of local expert 0, then of 1 and so on, each in (source, token) order and padded
                  // with zeros to a multiple of row_alignment: expert e has rows offsets[e] .. offsets[e + 1]
} twLayout_t;

typedef enum TW_AS_INT {
  twWeightNone = 0,  // rows are weighted already
  twWeightTopk = 1,  // expert_major: each row is multiplied by the weight of its (token, expert); rank_major: by the
                     // sum of the token's weights of this rank's experts, over k ascending
} twWeighting_t;

// High throughput alone: a step of all ranks, in which each tells all others how many rows it will send to whom and to
// which expert. Then every rank knows where each row goes and how many come (twHandleNumRecvRows), and the handle may
// be dispatched for as long as its routing stays. Takes a free lane for this one step. Errors: twInvalidUsage,
// twRecvOverflow on all ranks alike, twPeerRefused, and the sticky ones. After a send_only call that a rank refused the
// handle holds the lane, there and at the peers, until its counts are exchanged, or it is released or destroyed.
typedef struct {
  size_t size;
  int32_t lane;       // -1: the next free one, in the same order on all ranks
  int32_t send_only;  // 1: return when everything is sent; twComplete receives
  void* stream;
  void* landing[TW_MAX_PAYLOADS];  // of each payload, a lease for the rows of the next dispatch (leases.h), or NULL
} twCountsInput_t;
#define TW_COUNTS_INPUT_INIT                       \
  {                                                \
    sizeof(twCountsInput_t), -1, 0, NULL, { NULL } \
  }

TW_API twResult_t twExchangeCounts(twGroup_t group, twHandle_t handle, const twCountsInput_t* input);

// ready: 1 if twComplete of the handle's send_only exchange of counts would not wait, as all counts have come, or
// something has gone wrong, which it then tells; 1 too once the counts are known; else 0. timeout_ms: 0 asks and
// returns at once; more waits for it, at most so long; -1 as long as twComplete would. Only the calling thread waits:
// no lane, no stream and no device does. Sends nothing and gives no lane back, so ranks may call it when and as often
// as they like. The first call begins the group's timeout, after which twComplete tells who is late. Errors:
// twInvalidArgument; twInvalidUsage if no exchange of counts is under way. On a device, where twComplete never waits:
// 1 while it is still to be called; after it, or after a call that was not send_only, whether the host knows the
// counts, which then twHandleNumRecvRows tells without waiting.
TW_API twResult_t twHandleCountsReady(twHandle_t handle, int32_t timeout_ms, int32_t* ready);

// Rows of a layout that this rank will receive: of twFlat R', of twGrouped P, where rows that are dropped have places
// too, which hold zeros. On a device the call waits until the exchange of counts has told the host, in memory that both
// map: for no stream, and never for what was enqueued after it. Errors: twInvalidUsage before the exchange of counts,
// or if that is captured into a graph, where the host cannot know; twRecvOverflow; twTimeout; the sticky ones.
TW_API twResult_t twHandleNumRecvRows(twHandle_t handle, twLayout_t layout, int64_t* rows);

// Rows that the outputs of a dispatch have, which never waits: as twHandleNumRecvRows if the host knows them, as on the
// CPU it always does; else, on a device, all that there is room for, of twFlat max_recv_tokens. Then ids beyond what
// comes are invalid and weights 0; rows stay as they are there (in twGrouped from the last of the offsets on), so that
// what a dispatch costs follows what comes.
TW_API twResult_t twHandleNumOutputRows(twHandle_t handle, twLayout_t layout, int64_t* rows);

typedef struct {
  size_t size;
  twTensor_t payloads[TW_MAX_PAYLOADS];  // [T, ...] each, as configured; T as in the handle
  int32_t bound;                         // b, equal on all ranks, T <= b <= B; 0: B. High throughput: 0
  int32_t lane;                          // -1: the next free one, in the same order on all ranks
  int32_t send_only;                     // 1: return when everything is sent; twComplete receives
  void* stream;
  int32_t uncounted;  // 1: not for twGroupLoads (a further pass over tokens that were counted); the same on all ranks
} twDispatchInput_t;
#define TW_DISPATCH_INPUT_INIT {sizeof(twDispatchInput_t), {TW_TENSOR_INIT}, 0, -1, 0, NULL, 0}

// What arrives. The caller may set `data` of any tensor to memory of its own (C-contiguous, of the shape given here) to
// have it written there; shape and dtype are then checked. With data == NULL:
//   rank_major    payloads: a view of the window, valid until the next step on the lane starts (the handle's combine
//                 may read it); ids, weights, counts: views of the handle, valid until its next dispatch or its end
//   expert_major  not written (there is nothing to view), but for counts, a view of the handle
//   flat          as rank_major
//   grouped       as expert_major; offsets are a view of the handle too
// All fields of the tensors are filled in. Memory that is given for one must not overlap another's, nor, on the CUDA
// backend, what the call reads: its inputs and, in a handle's first dispatch, the routing. On the CPU it may overlap
// the inputs, which have been sent before anything is written.
typedef struct {
  size_t size;
  twLayout_t layout;
  twTensor_t payloads[TW_MAX_PAYLOADS];  // rank_major [N, b, elements], expert_major [L, N*b, elements]; rows beyond
                                         // the counts are not written. flat [R', elements], grouped [P, elements]
  twTensor_t ids;      // id_dtype. rank_major [N, b, K]; expert_major [L, N*b]; invalid_id where there is nothing;
                       // flat [R', K], grouped [P]
  twTensor_t weights;  // twFloat32, the same shape; 0 where there is nothing
  twTensor_t counts;   // twInt32. rank_major and flat [N], expert_major and grouped [L]
  twTensor_t offsets;  // twInt32 [L + 1], grouped alone: where the rows of each expert begin, and at last P
  // Set by the caller, grouped alone. 1: payload q comes by column, [elements, M], where M is P rounded up to whole 16
  // bytes, with zeros from P on: as grouped GEMMs read the scales of their rows. 0: by row, as above.
  int32_t column_major[TW_MAX_PAYLOADS];
  twTensor_t origins;  // twInt64 [P], grouped alone, and only where the caller gives memory for it: row * K + k of the
                       // flat layout that each row was taken from, -1 where there is nothing
} twDispatchOutput_t;
// clang-format off
#define TW_DISPATCH_OUTPUT_INIT                                                                                  \
  {sizeof(twDispatchOutput_t), twRankMajor, {TW_TENSOR_INIT}, TW_TENSOR_INIT, TW_TENSOR_INIT, TW_TENSOR_INIT, \
   TW_TENSOR_INIT, {0}, TW_TENSOR_INIT}
// clang-format on

typedef struct {
  size_t size;
  twLayout_t layout;
  twWeighting_t weighting;
  twTensor_t rows;  // [N, b, H] or [L, N*b, H], [R', H] or [P, H] as dispatched; twFloat32, twBfloat16 or twFloat16;
                    // rows beyond the counts are not read. May be the dispatch's view itself
  int32_t send_only;
  void* stream;
} twCombineInput_t;
#define TW_COMBINE_INPUT_INIT {sizeof(twCombineInput_t), twRankMajor, twWeightNone, TW_TENSOR_INIT, 0, NULL}

typedef struct {
  size_t size;
  twTensor_t tokens;  // [T, H], given by the caller; twFloat32, twBfloat16 or twFloat16. May overlap the input's rows,
                      // of which none is written over before it was sent
} twCombineOutput_t;
#define TW_COMBINE_OUTPUT_INIT {sizeof(twCombineOutput_t), TW_TENSOR_INIT}

// Sends every token to the ranks of its experts and receives what the others send here. Leases a lane
// until the handle's combine (or twHandleRelease); a handle that holds a lane dispatches again on the
// same one. Step of all ranks. Errors: twInvalidArgument, twInvalidUsage (peers get twPeerRefused at
// once, unless it is about which lane or a send that is pending, which is refused alike everywhere, or
// about the stream of a device, on which nothing can be sent: then they wait for this rank, up to their
// timeout), twPeerRefused, twBoundMismatch, and the sticky ones. Over a carrier between devices a bound
// that is out of range ends the group (docs/BACKENDS.md). A call that the handle or the struct does not tell the lane
// of is refused on the next free one. After a step that failed counts are 0 and ids invalid_id for sources whose rows
// did not arrive. A failed dispatch gives its lane back, unless it was send_only: then the handle holds it until it is
// dispatched again, released or destroyed. On the CUDA backend the peers of a rank that refused find out later: theirs
// give the lane back by the handle's combine, which then does nothing but fill its output with NaN, or by
// twHandleRelease. The handle of the rank that refused holds its lane as well, until it is dispatched again, released
// or destroyed; a combine that was refused has given it back.
TW_API twResult_t twDispatch(twGroup_t group, twHandle_t handle, const twDispatchInput_t* input,
                             twDispatchOutput_t* output);

// Returns rows to their owners and sums. Needs a completed dispatch of the handle (else twInvalidUsage,
// and peers that do have one wait for this rank); uses that dispatch's lane and gives it back, or, when
// the handle holds none any more, a free lane for this one step.
//   partial of a (token, rank) = its row, or sum over k ascending of [weight *] row: float32, from the
//   first term on, multiply then add, each rounded to nearest even; rounded once to combine_dtype
//   tokens[t] = sum of the partials over ranks ascending: float32, rounded once to the output type; 0 if
//   there are none
// So results depend neither on timing nor on the backend. Errors as twDispatch; after a failed step,
// tokens are NaN. A combine that failed for arguments can be repeated, but not from the window's view:
// the failed step has ended its life.
TW_API twResult_t twCombine(twGroup_t group, twHandle_t handle, const twCombineInput_t* input,
                            const twCombineOutput_t* output);

// Finishes the handle's pending send_only dispatch or combine. Errors: those of the call it finishes; twInvalidUsage if
// nothing is pending.
TW_API twResult_t twComplete(twGroup_t group, twHandle_t handle, void* stream);

// ----------------------------------------------------------------------------------------------- gathers and reduces

#include "tokenway/collectives.h"

// ----------------------------------------------------------------------------------------------- placement of experts

#include "tokenway/balance.h"

// ------------------------------------------------------------------------------------------------- interrupts, leases
#include "tokenway/interrupt.h"
#include "tokenway/leases.h"
#include "tokenway/plan.h"

// ----------------------------------------------------------------------------------- rows to 8 bits, and activation

#include "tokenway/rows.h"

#ifdef __cplusplus
}
#endif
#endif  // TOKENWAY_H_
