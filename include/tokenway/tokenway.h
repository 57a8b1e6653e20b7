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
#define TW_MAX_INDEX_BLOCK 4096        // places of a block of index lists
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

#include "tokenway/group.h"

// ----------------------------------------------------------------------------------------------------------- handle

// Creates a handle, which caches one routing: ids, weights and the slots that follow from them, and, after a dispatch,
// what arrived. It owns no channel, so many can be kept. `memory` may hold its arrays (64-byte aligned,
// twHandleMemBytes bytes, kept alive by the caller); NULL: the group allocates. Not collective.
//
// ids: [T, K] twInt32 or twInt64, 0 <= T <= max_tokens, with token replicas token_replicas * max_tokens. -1 means "no
// expert" and may stand anywhere; other ids are 0..E-1, each at most once per token. weights: [T, K] twFloat32, or data
// == NULL: all 1. Both are copied. Rows may be strided.
//
// On the CUDA backend the handle's first dispatch copies both and checks the ids, in stream order: the tensors must
// stay as they are until then. Where that dispatch is part of a captured graph, each replay copies them anew. A bad id
// in device memory acts as -1; the record names token, k and value.
//
// Errors: twInvalidArgument, which names token, k and value; nothing is created. More tokens are
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

#include "tokenway/exchange.h"

// ----------------------------------------------------------------------------------------------- gathers and reduces

#include "tokenway/collectives.h"

// ----------------------------------------------------------------------------------------------- placement of experts

#include "tokenway/balance.h"

// ------------------------------------------------------------------------------------------------- interrupts, leases
#include "tokenway/interrupt.h"
#include "tokenway/leases.h"
#include "tokenway/moving.h"
#include "tokenway/plan.h"

// ----------------------------------------------------------------------------------- rows to 8 bits, and activation

#include "tokenway/rows.h"

#ifdef __cplusplus
}
#endif
#endif  // TOKENWAY_H_
