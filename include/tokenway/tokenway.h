// Tokenway: expert-parallel communication for mixture-of-experts models.
//
// There is one exchange. `dispatch` sends every token to the distinct ranks that hold its top-k experts; `combine`
// returns one partial result per rank and sums the partials where the token came from. This header brings the whole C
// API (it includes the headers beside it) and needs nothing but a C99 compiler. A complete program stands in
// examples/03_c_api.c.
//
// Conventions
//   * Functions return twResult_t. After a failure, twLastError() gives a sentence that names the argument, its value
//     and the allowed range. It is kept per thread.
//   * A struct begins with `size`, which the caller sets to sizeof the struct. Smaller (older) sizes are accepted, and
//     the missing fields take their defaults. Larger ones are accepted if the bytes beyond the known fields are zero.
//     The TW_*_INIT macros set the size and every default.
//   * The caller owns all tensors. A tensor given to a call must stay alive and unchanged until the call has returned
//     or, for a `send_only` call, until twComplete has returned.
//   * On the CPU backend every call is synchronous on the calling thread, and `stream` must be NULL.
//   * A group, with its handles, is for one thread at a time; different groups may be used by different threads at
//     once. A call that comes while another one is in the group returns twInvalidUsage at once and names the other; it
//     tells the peers nothing and changes nothing. The same holds for a call from a callback of that other. Exceptions
//     say that they may come from any thread.
//   * On the CUDA backend tensors are device memory, `stream` is a cudaStream_t, and twDispatch, twCombine and
//     twComplete only enqueue: they never wait for the device, and can be captured into a CUDA graph. Tensors must stay
//     alive and unchanged until the work of the call has run, in stream order. Results are on the device. What a step
//     finds out while it runs (a late peer, a refused call, a bad id) appears in the group's record, which
//     twGroupGetError reads without waiting. A sticky error is returned by every later call; TOKENWAY_BLOCKING=1 makes
//     each call wait and return its own error. The uses of one lane must be ordered by streams or events.
//   * "Collective" means that every rank makes the call, in the same order relative to the other calls on that comm or
//     group. Creating, shrinking and destroying groups of one comm, and destroying the comm, happen one at a time, else
//     twInvalidUsage; but a group with a sticky error may be destroyed beside another call of the comm.
//   * Comms, groups and handles do not survive fork(): they do not exist in the child.
//
// A lane is a channel: an independent line of exchanges with two banks of window memory and a step counter of its own.
// As many exchanges can be in flight as a group has lanes.
//
// Letters: N ranks, E experts, T tokens of this rank in this call, K expert ids per token, B = max_tokens, b = the
// bound of this call (T <= b <= B, equal on all ranks), L = experts on this rank, H = elements of a row.
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
#define TW_MAX_TOKENS ((1 << 28) - 1)  // max_tokens: a count has 28 bits in a published signal

#if defined(__GNUC__)
#define TW_API __attribute__((visibility("default")))
#else
#define TW_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ---------------------------------------------------------------------------------------------------------- results

// Gives the name of a result, for example "twPeerDied". Never NULL.
TW_API const char* twResultString(twResult_t result);

// Gives the sentence of this thread's last failed call, "" if none failed. It is valid until the thread's next call.
TW_API const char* twLastError(void);

#include "tokenway/errors.h"

// Gives TW_VERSION of the library that is loaded.
TW_API int twVersion(void);

// Describes the index-th environment variable that the library reads, counted from 0; returns twInvalidArgument past
// the last one. The strings are static, except `value`: it is the setting in force, and is valid until the thread's
// next call.
TW_API twResult_t twEnvironment(int32_t index, const char** name, const char** value, const char** doc);

// ------------------------------------------------------------------------------------------------------------- comm

// What callers hold: a comm (ranks that found each other), a group (a window on each rank, on a comm) and a handle (one
// routing, of a group). Their destroy calls free them; twGroupDestroy frees the group's handles too.
typedef struct twComm* twComm_t;
typedef struct twGroup* twGroup_t;
typedef struct twHandle* twHandle_t;

#include "tokenway/comm.h"

// -------------------------------------------------------------------------------------------------------- placement

#include "tokenway/placement.h"

// ------------------------------------------------------------------------------------------------------------ group

// The mode of a group: whether ranks exchange counts before rows.
typedef enum TW_AS_INT {
  twLowLatency = 0,
  // Exact layouts: ranks exchange counts first (twExchangeCounts), so that each row goes to its final place and outputs
  // are as large as what comes.
  twHighThroughput = 1,
} twMode_t;

// What happens to rows beyond max_recv_tokens.
typedef enum TW_AS_INT {
  twOverflowRefuse = 0,  // the exchange of counts fails on all ranks alike (twRecvOverflow); nothing is sent
  twOverflowDrop = 1,    // they are not sent; a token's sum lacks the partials of ranks that it was dropped for
} twOverflow_t;

// What received ids name.
typedef enum TW_AS_INT {
  twIdLocal = 0,   // received ids are local experts 0..L-1 of this rank; ids of experts elsewhere become invalid_id
  twIdGlobal = 1,  // received ids are as sent; with config.placement, the physical experts that serve them
} twIdSpace_t;

// A group's configuration. It must be equal on every rank, except sm_limit and the allocator; twGroupCreate finds
// differences and names them.
typedef struct {
  size_t size;
  twMode_t mode;
  int32_t num_experts;   // E, 1..TW_MAX_EXPERTS; 0, with top_k 0: one on each rank, for a group that only gathers and
                         // reduces
  int32_t top_k;         // K, 1..TW_MAX_TOP_K, at most E
  int32_t max_tokens;    // B, 1..TW_MAX_TOKENS: tokens of one rank in one call; N * B is at most 2^31 - 1
  int32_t num_payloads;  // 1..TW_MAX_PAYLOADS
  twPayload_t payloads[TW_MAX_PAYLOADS];
  twDtype_t combine_dtype;   // dtype of combined rows on the wire: twFloat32, twBfloat16 or twFloat16
  int64_t combine_elements;  // H of combined rows
  // Placement of experts. NULL: contiguous blocks, where the first E mod N ranks hold one more. Else expert e lives on
  // rank expert_rank[e] as its local expert expert_slot[e]; a rank's slots are 0..L-1, each once; L may be 0. Copied.
  // With `placement`, below, both place the P physical experts instead, and have P elements.
  const int32_t* expert_rank;  // [E]
  const int32_t* expert_slot;  // [E]
  int32_t lanes;               // channels: exchanges in flight, 1..TW_MAX_LANES; 0: 1
  int32_t timeout_ms;          // a peer later than this is an error; 0: TOKENWAY_TIMEOUT_MS, else 100 s
  twDtype_t id_dtype;          // dtype of received ids: twInt32 or twInt64; twDtypeNone: twInt32
  twIdSpace_t id_space;
  int32_t invalid_id;  // what stands for "no expert" in received ids: negative, or no id that may come; default -1
  int32_t sm_limit;    // CUDA backend: thread blocks of a kernel, at most one per SM; 0: the backend chooses
  // The next three are for high throughput alone.
  int32_t max_recv_tokens;  // R: how many rows of all sources a rank may receive in a step, 1..N*B; 0: N*B
  twOverflow_t overflow;
  int32_t row_alignment;  // twGrouped: an expert's rows begin at multiples of this; a power of two, 1..256; 0: 1
  // Allocator for the arrays of handles (device memory on the CUDA backend); both NULL: the library's own. alloc must
  // return 64-byte aligned blocks.
  void* (*alloc)(size_t bytes, void* context);
  void (*release)(void* block, void* context);
  void* alloc_context;
  uint64_t lease_bytes;            // bytes of the window for leases (leases.h), high throughput alone; 0: none
  const twPlacement_t* placement;  // placement.h: replicas of experts, maps by layer, load statistics; NULL: none
  // Bytes that the window has room for in each row, so that calls may name rows of other types
  // (twDispatchInput_t.types, twCombineInput_t.wire_dtype); 0: as many as the rows above have.
  uint64_t dispatch_room;  // of all payloads of a dispatched row together
  uint64_t combine_room;   // of a combined row
} twGroupConfig_t;

// clang-format off
#define TW_GROUP_CONFIG_INIT                                                                                       \
  {sizeof(twGroupConfig_t), twLowLatency, 0, 0, 0, 0, {{twDtypeNone, 0}}, twBfloat16, 0, NULL, NULL, 1, 0, twInt32, \
   twIdLocal, -1, 0, 0, twOverflowRefuse, 0, NULL, NULL, NULL, 0, NULL, 0, 0}
// clang-format on

// A group as twGroupInfo tells it.
typedef struct {
  size_t size;
  int32_t rank;               // rank in this group: after a shrink, ranks are renumbered
  int32_t nranks;             // N
  int32_t num_local_experts;  // L of this rank
  int32_t lanes;
  int32_t timeout_ms;
  int32_t comm_ranks[TW_MAX_RANKS];  // the comm's rank of each rank of the group
  uint64_t window_bytes;  // bytes of this rank's window; on the CUDA backend with its LL128 packets and chunk signals
} twGroupInfo_t;

// Sizes in bytes, as twGroupWindowBytes tells them.
typedef struct {
  size_t size;
  uint64_t window;          // bytes of one rank's window, all channels
  uint64_t per_lane;        // bytes of one channel in it: two banks of rows, inbox and signals
  uint64_t dispatch_row;    // bytes of one dispatched row with its header, ids and weights
  uint64_t combine_row;     // bytes of one combined row
  uint64_t expert_buffers;  // 2 * E * B * row: the receive and send buffers of designs that keep a place per expert
                            // (NCCL EP, equation 3), for comparison
} twWindowBytes_t;

// Computes what a group of this configuration would take on `nranks` ranks; creates nothing. Errors: as twGroupCreate.
TW_API twResult_t twGroupWindowBytes(const twGroupConfig_t* config, int32_t nranks, twWindowBytes_t* bytes);

// Creates a group: maps a window of each rank into every other. Collective over the comm. Errors: twInvalidArgument and
// twConfigMismatch, which leave the comm usable (if any rank fails, all ranks return an error); twOutOfMemory,
// twTimeout, twPeerDied; and twCallMismatch, at once, where another rank destroys or shrinks a group instead. Its
// sentence names what each rank does. Each rank counts that as one call, so the comm's next calls meet again.
TW_API twResult_t twGroupCreate(twGroup_t* group, twComm_t comm, const twGroupConfig_t* config);

// Destroys a group and frees its handles: a handle must not be used, nor destroyed, afterwards. Collective, with a
// bounded barrier; a group with a sticky error is freed without one. Views into the window end here, unless it is kept
// (twWindowKeep). Errors: twInvalidUsage while another thread is in a call of the group (twGroupAbort ends one that
// waits); twCallMismatch, at once, where another rank creates a group or destroys another one instead. Then the group
// is freed all the same, and its peers need not wait for this rank when they destroy it. While peers shrink the group
// they go on without this rank, which is no error here.
TW_API twResult_t twGroupDestroy(twGroup_t group);

// Creates a new group of the ranks that are still there, usually after an error. Collective among them. They agree on
// who survives. Ranks are left out that died, that an error record blames, that gave the group up or destroyed it, or
// that do not answer within the timeout or 10 s (TOKENWAY_SHRINK_MS), whichever is longer. Only a rank that
// does not answer costs that time: the others are left out as soon as it is known that they will not come, also while
// the call waits. The new group has fresh memory; the old one becomes sticky and must still be destroyed.
//
// config == NULL keeps the old configuration, with the maps and shares of config.placement; experts (or physical
// experts) are in blocks over the survivors. max_recv_tokens beyond what the survivors can send becomes as much as they
// can send.
//
// Errors: twExcluded on a rank that the others have given up, or, where ranks came too far apart, on a rank of the side
// that is not the larger one; it then stays left out. Ranks that make another call instead are left out too, if those
// who shrink are more; else the call returns twCallMismatch and changes nothing. The call may be repeated when it
// failed, as when another rank died meanwhile.
TW_API twResult_t twGroupShrink(twGroup_t group, const twGroupConfig_t* config, twGroup_t* survivors);

// Gives the group up, here and at all peers: their calls, also those that wait, return twPeerAborted within moments,
// and twGroupDestroy does not wait for them. It is for a rank that cannot go on, as when an exception has ended its
// part. Not collective. On a group that is finished already it only tells survivors not to wait for this rank. From any
// thread.
TW_API twResult_t twGroupAbort(twGroup_t group);

// Tells a group's ranks, sizes and memory. From any thread.
TW_API twResult_t twGroupInfo(twGroup_t group, twGroupInfo_t* info);

// Tells how a group of a portable comm exchanges (carrier.h). From any thread. Errors: twUnsupported for a group whose
// ranks share memory.
TW_API twResult_t twGroupPortableInfo(twGroup_t group, twPortableInfo_t* info);

// Gives the record of the group's last error, whether sticky or of one call. Always returns twSuccess for a valid
// group; never blocks; may be called from any thread.
TW_API twResult_t twGroupGetError(twGroup_t group, twErrorRecord_t* record);

// ----------------------------------------------------------------------------------------------------------- handle

// Creates a handle, which caches one routing: ids, weights and the slots that follow from them, and, after a dispatch,
// what arrived. It owns no channel, so many can be kept. `memory` may hold its arrays (64-byte aligned,
// twHandleMemBytes bytes, kept alive by the caller); NULL: the group allocates. Not collective.
//
// ids: [T, K] twInt32 or twInt64, 0 <= T <= max_tokens. -1 means "no expert" and may stand anywhere; other ids are
// 0..E-1, each at most once per token. weights: [T, K] twFloat32, or data == NULL: all 1. Both are copied. Rows may be
// strided.
//
// On the CUDA backend the handle's first dispatch copies both and checks the ids, in stream order: the tensors must
// stay as they are until then. Where that dispatch is part of a captured graph, each replay copies them anew. A bad id
// in device memory acts as -1; the record names token, k and value.
//
// Errors: twInvalidArgument, which names token, k and value; nothing is created. More than max_tokens tokens are
// refused by the handle's dispatch or exchange of counts (twInvalidArgument), where peers wait and are told at once. In
// high throughput the handle's counts must be exchanged before it is dispatched: twExchangeCounts.
TW_API twResult_t twHandleCreate(twHandle_t* handle, twGroup_t group, const twTensor_t* ids, const twTensor_t* weights,
                                 void* memory);

// Replaces the routing of a handle; ids and weights as in twHandleCreate. Errors: twInvalidUsage if the handle has a
// dispatch or combine pending or holds a lane, or if a CUDA graph holds a call of it whose tensors have exactly as many
// rows as the host knew would come.
TW_API twResult_t twHandleUpdate(twHandle_t handle, const twTensor_t* ids, const twTensor_t* weights);

// Gives back the handle's lane, if it holds one, and frees it. As with twHandleRelease, all ranks do it at the same
// place in their order of calls. While a send is pending it is refused (twInvalidUsage), and nothing is freed.
TW_API twResult_t twHandleDestroy(twHandle_t handle);

// Gives back the lane that the handle's dispatch leased, without a combine. Sends nothing. All ranks do it at the same
// place in their order of calls, as every lease depends on it. Refused (twInvalidUsage) while a send is pending.
TW_API twResult_t twHandleRelease(twHandle_t handle);

// Gives the number of bytes that `memory` of twHandleCreate needs. From any thread.
TW_API twResult_t twHandleMemBytes(twGroup_t group, size_t* bytes);

// Tells how many rows the handle's last completed dispatch received. counts: [N], from each rank; total: their sum.
// Either may be NULL. On the CUDA backend it waits for that dispatch; not in a capture. Errors: twInvalidUsage before
// the first dispatch, in high throughput before the exchange of counts.
TW_API twResult_t twHandleNumRecvTokens(twHandle_t handle, int32_t* counts, int32_t* total);

// -------------------------------------------------------------------------------------------------------- exchange

// How a combine weights rows before it sums them.
typedef enum TW_AS_INT {
  twWeightNone = 0,  // rows are weighted already
  twWeightTopk = 1,  // expert_major: each row is multiplied by the weight of its (token, expert); rank_major: by the
                     // sum of the token's weights for this rank's experts, over k ascending
} twWeighting_t;

// twExchangeCounts is a step of all ranks, in high throughput alone. Each rank tells all others how many rows it will
// send to which rank and to which expert. Then every rank knows where each row goes and how many come
// (twHandleNumRecvRows), and the handle may be dispatched for as long as its routing stays. The step takes a free lane
// and gives it back. Errors: twInvalidUsage, twRecvOverflow on all ranks alike, twPeerRefused, and the sticky ones.
// After a send_only call that a rank refused, the handle holds the lane, there and at the peers, until its counts are
// exchanged, or it is released or destroyed.
typedef struct {
  size_t size;
  int32_t lane;       // -1: the next free one, in the same order on all ranks
  int32_t send_only;  // 1: return when everything is sent; twComplete receives
  void* stream;
  void* landing[TW_MAX_PAYLOADS];  // receive offsets: for each payload, the lease where the rows of the next dispatch
                                   // are to land (leases.h), or NULL
} twCountsInput_t;
#define TW_COUNTS_INPUT_INIT                       \
  {                                                \
    sizeof(twCountsInput_t), -1, 0, NULL, { NULL } \
  }

TW_API twResult_t twExchangeCounts(twGroup_t group, twHandle_t handle, const twCountsInput_t* input);

// Asks whether the handle's counts are there. ready: 1 if twComplete of its send_only exchange of counts would not
// wait, as all counts have come, or something has gone wrong, which twComplete then tells; 1 too once the counts are
// known; else 0. timeout_ms: 0 asks and returns at once; more waits for it, at most so long; -1 as long as twComplete
// would. Only the calling thread waits: no lane, no stream and no device does. The call sends nothing and gives no lane
// back, so ranks may make it when and as often as they like. The first call begins the group's timeout, after which
// twComplete tells who is late.
//
// On a device, where twComplete never waits, ready is 1 while twComplete is still to be called. After it, or after a
// call that was not send_only, ready says whether the host knows the counts, which twHandleNumRecvRows then tells
// without waiting. Errors: twInvalidArgument; twInvalidUsage if no exchange of counts is under way.
TW_API twResult_t twHandleCountsReady(twHandle_t handle, int32_t timeout_ms, int32_t* ready);

// Tells how many rows of a layout this rank will receive: for twFlat R', for twGrouped P, where rows that are dropped
// have places too, which hold zeros. On a device the call waits until the exchange of counts has told the host, in
// memory that both map: it waits for no stream, and never for what was enqueued after the exchange. Errors:
// twInvalidUsage before the exchange of counts, or if that is captured into a graph, where the host cannot know;
// twRecvOverflow; twTimeout; the sticky ones.
TW_API twResult_t twHandleNumRecvRows(twHandle_t handle, twLayout_t layout, int64_t* rows);

// Tells how many rows the outputs of a dispatch have; never waits. If the host knows the counts, as on the CPU it
// always does, the number is that of twHandleNumRecvRows. Else, on a device, it is all that there is room for, which
// for twFlat is max_recv_tokens. Then ids beyond what comes are invalid and weights 0; rows stay as they are there (in
// twGrouped from the last of the offsets on), so that the cost of a dispatch follows what comes.
TW_API twResult_t twHandleNumOutputRows(twHandle_t handle, twLayout_t layout, int64_t* rows);

// What a layout is in a group. The outputs of a dispatch in it have the leading dimensions [blocks, rows_per_bound *
// b], b being the call's bound, or where `exact` is 1 [rows], rows being what twHandleNumOutputRows tells.
typedef struct {
  size_t size;
  int32_t exact;      // 1: as many rows as came (high throughput); 0: as many as the bound allows
  int32_t by_expert;  // 1: a row stands under one local expert, with that id alone; 0: under its source, with all K
  int32_t views;      // 1: payloads are views of the window unless memory is given; 0: memory must be given
  int64_t blocks;     // elements of counts: N, or L by expert
  int64_t rows_per_bound;  // rows of a block for each of b: 1, or N by expert; 0 in the exact layouts
  int64_t ids_per_row;     // ids and weights of a row: K, or 1 by expert, which is then no dimension of theirs
  int64_t offsets;         // elements of offsets, L + 1; 0: no offsets, origins or payloads by column
  int32_t default_bound;   // b of a dispatch that names none; 0 in the exact layouts
} twLayoutInfo_t;

// Tells what a layout is in this group; creates nothing and never waits. Errors: twInvalidArgument if the group's mode
// does not have the layout.
TW_API twResult_t twGroupLayout(twGroup_t group, twLayout_t layout, twLayoutInfo_t* info);

// What twDispatch takes: the caller's rows, and how the step is made.
typedef struct {
  size_t size;
  twTensor_t payloads[TW_MAX_PAYLOADS];  // [T, ...] each, as configured; T as in the handle
  int32_t bound;                         // b, equal on all ranks, T <= b <= B; 0: B. High throughput: 0
  int32_t lane;                          // -1: the next free one, in the same order on all ranks
  int32_t send_only;                     // 1: return when everything is sent; twComplete receives
  void* stream;
  int32_t uncounted;  // 1: not counted by twGroupLoads (a further pass over tokens that were counted); the same on all
                      // ranks
  // What rows consist of in this call, the same on all ranks: num_types payloads, within config.dispatch_room bytes
  // together, in place of the configured ones. 0: as configured. Leases are for configured rows alone: others come to
  // the bank, and what was announced for this dispatch is let go of.
  int32_t num_types;
  twPayload_t types[TW_MAX_PAYLOADS];
} twDispatchInput_t;
#define TW_DISPATCH_INPUT_INIT                                           \
  {                                                                      \
    sizeof(twDispatchInput_t), {TW_TENSOR_INIT}, 0, -1, 0, NULL, 0, 0, { \
      { twDtypeNone, 0 }                                                 \
    }                                                                    \
  }

// What a dispatch delivers. The caller may set `data` of any tensor to memory of its own (C-contiguous, of the shape
// given here) to have it written there; shape and dtype are then checked. With data == NULL:
//   rank_major    payloads: a view of the window, valid until the next step on the lane starts (the handle's combine
//                 may read it); ids, weights, counts: views of the handle, valid until its next dispatch or its end
//   expert_major  not written (there is nothing to view), except counts, a view of the handle
//   flat          as rank_major
//   grouped       as expert_major; offsets are a view of the handle too
//
// The call fills in all fields of the tensors. Memory that is given for one must not overlap another's, nor, on the
// CUDA backend, what the call reads: its inputs and, in a handle's first dispatch, the routing. On the CPU it may
// overlap the inputs, which have been sent before anything is written.
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
  // Set by the caller, grouped alone. 1: payload q is column-major, [elements, M], where M is P rounded up to whole 16
  // bytes, with zeros from P on. Grouped GEMMs read the scales of their rows like that. 0: row-major, as above.
  int32_t column_major[TW_MAX_PAYLOADS];
  twTensor_t origins;  // twInt64 [P], grouped alone, written only where the caller gives memory for it: row * K + k of
                       // the flat layout that each row was taken from, -1 where there is nothing
} twDispatchOutput_t;
// clang-format off
#define TW_DISPATCH_OUTPUT_INIT                                                                                  \
  {sizeof(twDispatchOutput_t), twRankMajor, {TW_TENSOR_INIT}, TW_TENSOR_INIT, TW_TENSOR_INIT, TW_TENSOR_INIT, \
   TW_TENSOR_INIT, {0}, TW_TENSOR_INIT}
// clang-format on

// What twCombine takes: the experts' rows in the layout of the dispatch, and how the step is made.
typedef struct {
  size_t size;
  twLayout_t layout;
  twWeighting_t weighting;
  twTensor_t rows;  // [N, b, H] or [L, N*b, H], [R', H] or [P, H] as dispatched; twFloat32, twBfloat16 or twFloat16;
                    // rows beyond the counts are not read. May be the dispatch's view itself
  int32_t send_only;
  void* stream;
  // What is combined in this call, the same on all ranks, within config.combine_room bytes a row, in place of
  // config.combine_dtype and combine_elements; none and 0: as configured.
  twDtype_t wire_dtype;
  int64_t elements;
} twCombineInput_t;
#define TW_COMBINE_INPUT_INIT \
  {sizeof(twCombineInput_t), twRankMajor, twWeightNone, TW_TENSOR_INIT, 0, NULL, twDtypeNone, 0}

// Where twCombine writes: memory of the caller.
typedef struct {
  size_t size;
  twTensor_t tokens;  // [T, H], given by the caller; twFloat32, twBfloat16 or twFloat16. May overlap the input's rows:
                      // none of these is overwritten before it was sent
} twCombineOutput_t;
#define TW_COMBINE_OUTPUT_INIT {sizeof(twCombineOutput_t), TW_TENSOR_INIT}

// Sends every token to the ranks of its experts and receives what the others send here. A step of all ranks. It leases
// a lane until the handle's combine (or twHandleRelease); a handle that holds a lane dispatches again on the same one.
// Stream semantics: as in the conventions above.
//
// Errors: twInvalidArgument and twInvalidUsage; twPeerRefused, twBoundMismatch, and the sticky ones. For the first two,
// peers get twPeerRefused at once, with two exceptions. An error about which lane to use or about a send that is
// pending is refused alike everywhere. After an error about the stream of a device nothing can be sent: then peers wait
// for this rank, up to their timeout. With staged transport between devices a bound that is out of range ends the group
// (docs/BACKENDS.md). If neither the handle nor the struct tells the lane, the call is refused on the next free one.
//
// After a step that failed, counts are 0 and ids invalid_id for sources whose rows did not arrive. A failed dispatch
// gives its lane back, unless it was send_only: then the handle holds it until it is dispatched again, released or
// destroyed. On the CUDA backend the peers of a rank that refused find out later. Their handles give the lane back by
// the combine, which then does nothing but fill its output with NaN, or by twHandleRelease. The handle of the rank that
// refused holds its lane as well, until it is dispatched again, released or destroyed; a combine that was refused has
// given it back.
TW_API twResult_t twDispatch(twGroup_t group, twHandle_t handle, const twDispatchInput_t* input,
                             twDispatchOutput_t* output);

// Tells whether calls of this group may name these rows: reads num_types and types of a dispatch's input, wire_dtype
// and elements of a combine's, and nothing else of them. Not collective. Errors: twInvalidArgument.
TW_API twResult_t twGroupCheckRows(twGroup_t group, const twDispatchInput_t* dispatched,
                                   const twCombineInput_t* combined);

// Returns rows to their owners and sums them there. A step of all ranks. It needs a completed dispatch of the handle
// (else twInvalidUsage, and peers that do have one wait for this rank). It uses that dispatch's lane and gives it back,
// or, when the handle holds none any more, takes a free lane for this one step.
//   partial of a (token, rank) = its row, or sum over k ascending of [weight *] row: float32, from the
//   first term on, multiply then add, each rounded to nearest even; rounded once to combine_dtype
//   tokens[t] = sum of the partials over ranks ascending: float32, rounded once to the output type; 0 if
//   there are none
//
// So results depend neither on timing nor on the backend. Errors: as twDispatch; after a failed step, tokens are NaN. A
// combine that failed for its arguments can be repeated, but not from the window's view, whose life the failed step has
// ended.
TW_API twResult_t twCombine(twGroup_t group, twHandle_t handle, const twCombineInput_t* input,
                            const twCombineOutput_t* output);

// Finishes the handle's pending send_only dispatch, combine or exchange of counts. Errors: those of the call it
// finishes; twInvalidUsage if nothing is pending.
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
