// Groups: their configuration, memory and life. Included by tokenway.h, which has the conventions and the letters.
#ifndef TOKENWAY_GROUP_H_
#define TOKENWAY_GROUP_H_

// The mode of a group: whether ranks exchange counts before rows.
typedef enum TW_AS_INT {
  // Rows in slots that a bound sizes (twRankMajor, twExpertMajor, twGroupedByBound); nothing is asked first.
  twLowLatency = 0,
  // Exact layouts: ranks exchange counts first (twExchangeCounts), so that each row goes to its final place and outputs
  // are as large as what comes.
  twHighThroughput = 1,
  // Both, by the call: a dispatch in a layout of low latency is one of it, with up to low_latency_tokens tokens of each
  // rank; one in twFlat or twGrouped is of high throughput, after twExchangeCounts. A combine is as the
  // handle's last dispatch, so a handle serves both in turns. Ranks whose dispatches differ in it get twBoundMismatch.
  twAutomatic = 2,
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

// Which rows return to a token's owner, in all combines of a group.
typedef enum TW_AS_INT {
  twRowPerRank = 0,  // a partial from each of the token's ranks, which sums what its experts have made of the token
  // A row for each (token, k), as the expert made it: the owner multiplies by weights, which it may learn late, and
  // sums over k. So the bits of results depend neither on the number of ranks nor on the placement of experts, replicas
  // included. Combines are in layouts by expert alone. K rows of each token return instead of at most
  // min(K, N), and the window has room for as many.
  twRowPerExpert = 1,
} twCombineRows_t;

// A group's configuration. It must be equal on every rank, except sm_limit and the allocator; twGroupCreate finds
// differences and names them.
typedef struct twGroupConfig {
  size_t size;
  twMode_t mode;
  int32_t num_experts;   // E, 1..TW_MAX_EXPERTS; 0, with top_k 0: one on each rank, for a group that only gathers and
                         // reduces
  int32_t top_k;         // K, 1..TW_MAX_TOP_K, at most E
  int32_t max_tokens;    // B, 1..TW_MAX_TOKENS: tokens that one rank sends in one call; N * B is at most 2^31 - 1
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
  // CUDA backend: thread blocks of a kernel, at most one per SM; 0: the backend chooses. Of calls that name none of
  // their own.
  int32_t sm_limit;
  // The next three are for high throughput (and twAutomatic); an exchange of counts may name its own row_alignment.
  int32_t max_recv_tokens;  // R: how many rows of all sources a rank may receive in a step, 1..N*B; 0: N*B. An exchange
                            // of counts may name less
  twOverflow_t overflow;
  // twGrouped and twGroupedByBound, of all modes: an expert's rows begin at multiples of this; a power of two, 1..256;
  // 0: 1.
  int32_t row_alignment;
  // Allocator for the arrays of handles (device memory on the CUDA backend); both NULL: the library's own. alloc must
  // return 64-byte aligned blocks.
  void* (*alloc)(size_t bytes, void* context);
  void (*release)(void* block, void* context);
  void* alloc_context;
  uint64_t lease_bytes;  // bytes of the window for leases (leases.h), of high throughput and twAutomatic; 0: none
  const twPlacement_t* placement;  // placement.h: replicas of experts, maps by layer, load statistics; NULL: none
  // Bytes that the window has room for in each row, so that calls may name rows of other types
  // (twDispatchInput_t.types, twCombineInput_t.wire_dtype); 0: as many as the rows above have.
  uint64_t dispatch_room;  // of all payloads of a dispatched row together
  uint64_t combine_room;   // of a combined row
  // High throughput (and twAutomatic): for how many tokens of a rank the window has room for the partials that return
  // to it, from B / 16 to B. A combine takes a part for each so many tokens of its dispatch's bound, one after the
  // other. A part more is two steps more. 0: B, or, where that saves 512 MiB of a
  // window, as many as make the partials no larger than the rows that come, in 4 parts at most. Over staged transport
  // between devices it is always B, as partials have no places of their own there.
  int32_t inbox_tokens;
  // A group of the comm whose window this one uses too; NULL: it makes one of its own. See twGroupCreate.
  twGroup_t arena;
  // Configurations of groups that are to be placed in this window later, [num_room_for], at most 64: each lane has room
  // for any of them, and for the load statistics of all. Their lanes, arena and room_for are not looked at.
  const struct twGroupConfig* const* room_for;
  int32_t num_room_for;
  // twAutomatic alone: the largest bound of a low-latency dispatch, 1..B, and at most inbox_tokens where those are
  // given: its combine has one part. Windows and handles have as many slots for each rank, beside the room for R rows.
  // 0: as many as there may be, up to 1024. It stays what it is when the group grows.
  int32_t low_latency_tokens;
  twCombineRows_t combine_rows;  // what combines return: twCombine
  // Token replicas: R neighbouring ranks, a set, hold the same tokens, as ranks of tensor-parallel attention do. Rank j
  // of a set sends the j-th share of its T tokens, T / R of them and one more where j < T mod R, and all R receive
  // every sum. R divides N; 0: 1, which is none. All tensors of tokens, ids, weights and sums have T rows; max_tokens
  // and bounds are of shares, so T is at most R * B. What a rank receives of a source is that source's share, and its
  // token numbers count from there. Ranks of a set that hold unlike ids or weights are told in the combine
  // (twReplicaMismatch); rows are not compared. Refused with combine_rows twRowPerExpert, and in or around an arena.
  // See twCombine.
  int32_t token_replicas;
  // Sums by domain: a token's owner first folds the partials of each `domain` neighbouring ranks (those of rank r with
  // the same r / domain; the last domain may be smaller), over ranks ascending, in float32, and rounds each fold once
  // to the type that travels; then it sums the folds over domains ascending. 0..TW_MAX_RANKS; 0, 1, or at least N: the
  // usual sum, bit for bit. It is a number that the caller gives, so bits do not depend on which ranks share a host.
  // Of combines alone, not of twReduceScatterV. Unless it is 0, combines of twFloat8e4m3 rows and combine_rows
  // twRowPerExpert are refused. Between hosts of just `domain` ranks each, partials are folded by the host that sends
  // them: of a comm of twCommCreateGin within the send, in stream order behind the sends of the other ranks of the
  // host, which must therefore send combines in one order on all lanes. See twCombine.
  int32_t domain;
} twGroupConfig_t;

// clang-format off
#define TW_GROUP_CONFIG_INIT                                                                                       \
  {sizeof(twGroupConfig_t), twLowLatency, 0, 0, 0, 0, {{twDtypeNone, 0}}, twBfloat16, 0, NULL, NULL, 1, 0, twInt32, \
   twIdLocal, -1, 0, 0, twOverflowRefuse, 0, NULL, NULL, NULL, 0, NULL, 0, 0, 0, NULL, NULL, 0, 0, twRowPerRank, 0, \
   0}
// clang-format on

// How a rank knows that NVLink joins its device to all others of a group, which LL128 packets need; the weakest of what
// it knows of each.
typedef enum TW_AS_INT {
  twLinksOther = 0,    // they are joined otherwise: by PCIe, by a carrier, or ranks are on the CPU
  twLinksTested = 1,   // neither CUDA nor NVML knows some of them: the test of packets has decided
  twLinksNvml = 2,     // NVML says so of those that this process does not see (CUDA_VISIBLE_DEVICES)
  twLinksVisible = 3,  // this process sees all of them, and CUDA says so
} twLinks_t;

// A group as twGroupInfo tells it.
typedef struct {
  size_t size;
  int32_t rank;               // rank in this group: after a shrink, ranks are renumbered
  int32_t nranks;             // N
  int32_t num_local_experts;  // L of this rank
  int32_t lanes;
  int32_t timeout_ms;
  int32_t comm_ranks[TW_MAX_RANKS];  // the comm's rank of each rank of the group
  // Bytes of this rank's window; on the CUDA backend with its LL128 packets and chunk signals. 0 in another's window.
  uint64_t window_bytes;
  // As the group has them now: twGroupReserve raises them.
  int32_t max_tokens;
  int32_t max_recv_tokens;  // R; 0 in low latency
  uint64_t dispatch_room;   // bytes that a dispatched row may have
  uint64_t combine_room;
  int32_t inbox_tokens;        // 0 in low latency
  int32_t low_latency_tokens;  // twAutomatic alone, else 0
  // CUDA backend. As many tokens of a call travel as LL128 packets at most; 0: none, as the links do not allow it.
  int32_t packet_tokens;
  twLinks_t links;
  twHandles_t handles;     // how this rank has the windows of ranks in other processes; the weakest of all
  int32_t refusal;         // the driver's CUresult where fabric handles were refused, by this rank's driver or a peer's
  int32_t token_replicas;  // R; 1: there are none
  int32_t domain;          // as it was given
} twGroupInfo_t;

// What a group shall have room for; 0: what it has now.
typedef struct {
  size_t size;
  int32_t max_tokens;      // B, up to TW_MAX_TOKENS; N * B is at most 2^31 - 1
  uint64_t dispatch_room;  // bytes of all payloads of a dispatched row together
  uint64_t combine_room;   // bytes of a combined row
  void* stream;            // a CUDA stream, which must not be captured; NULL on the CPU
} twReserve_t;

#define TW_RESERVE_INIT {sizeof(twReserve_t), 0, 0, 0, NULL}

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
// twTimeout, twPeerDied; and twCallMismatch, at once, where another rank destroys, grows or shrinks a group instead, or
// meets in one. Its sentence names what each rank does. Each rank counts that as one call, so the comm's next calls
// meet again.
//
// With config->arena the group takes no window: it uses that of another group, and what differs between them (experts,
// top_k, placement, mode, rows, max_tokens, ids, timeout) is its own. Collective over the arena's ranks, which all name
// a group of the same window. So layers of unlike shapes pay for the largest. What follows:
// - Lanes are the arena's (config->lanes: 0, or as many), and the steps of all its groups follow each other on them: a
//   handle that holds a lane holds it for all, a view lasts until the next step of any of them on its lane, and on the
//   CUDA backend their calls on one lane must be ordered. Ranks make the calls of all in the same order.
// - One thread at a time may be in a call of any of them.
// - What the group needs must fit: twOutOfMemory says how many bytes of what are missing. The first group, which makes
//   the window, may be given the configurations of the others (room_for), or be grown (twGroupReserve); it alone has
//   leases and may grow. A call that ranks make in different groups is refused on all (twBoundMismatch).
// - An error that finishes one finishes all, and so does twGroupAbort. One of them may be shrunk; the others are then
//   created anew, in the window of the group that twGroupShrink returned.
// - They may be destroyed in any order; the window lasts as long as the last of them. A send_only call that a group has
//   under way then is ended without outputs, which may take as long as its peers need to send.
TW_API twResult_t twGroupCreate(twGroup_t* group, twComm_t comm, const twGroupConfig_t* config);

// Destroys a group and frees its handles: a handle must not be used, nor destroyed, afterwards. Collective, with a
// bounded barrier; a group with a sticky error is freed without one. Views into the window end here, unless it is kept
// (twWindowKeep). Errors: twInvalidUsage while another thread is in a call of the group (twGroupAbort ends one that
// waits); twCallMismatch, at once, where another rank creates a group or destroys another one instead. Then the group
// is freed all the same, and its peers need not wait for this rank when they destroy it. While peers shrink the group
// they go on without this rank, which is no error here. A group in another's window first waits, up to its timeout, for
// the peers to send what it has pending; meanwhile twGroupAbort of another group of that window ends the wait.
TW_API twResult_t twGroupDestroy(twGroup_t group);

// Grows a group: afterwards calls may have up to reserve->max_tokens tokens and rows up to its rooms. What is no more
// than the group has changes nothing, and is no error. Where max_recv_tokens was all that can come, N * B, it becomes
// all that can come now. inbox_tokens that were given stay, or become the least that they may be; lease_bytes stay.
// Collective over the group, between steps: no send_only call may be pending, and on the CUDA backend no stream may be
// captured. It waits for the other ranks, not for the device.
//
// The window grows where it is, and keeps what it has: new banks are added to the old ones. So everything goes on:
// - Leases keep their addresses and contents, views of earlier dispatches last as long as they would have (until the
//   next step on their lane), and lanes stay with the handles that hold them.
// - A handle keeps the size that the group had when it was made. It may be dispatched, combined, counted and routed
//   anew as before, with as many tokens and received rows as then: its default bound, and the default max_recv_tokens
//   of its counts, are those of then. So a rank that names none may use it where the others' handles are of before too;
//   where theirs are of after, all name one. A larger bound, routing or room is refused, and the peers hear of it. With
//   twOverflowDrop new counts are refused too.
// - A CUDA graph that was captured before replays as it was captured, if all ranks replay it. Where a rank replays it
//   and another makes the call anew, the step is refused on both (twBoundMismatch).
// A handle that is made afterwards takes more memory: twHandleMemBytes tells how much.
//
// Errors: twInvalidArgument; twInvalidUsage where a call is pending or captured, of any group of the window, and for a
// group in another's window, which does not grow; twConfigMismatch where ranks name different sizes; twOutOfMemory;
// twTimeout and twPeerDied where a rank does not come. They are errors on all ranks, and leave the group as it was. So
// does twCallMismatch, at once, where another rank creates, shrinks or destroys a group of the comm. A rank that is in
// a dispatch or combine instead does not hear of this call: both wait until their timeouts, and the group is finished.
TW_API twResult_t twGroupReserve(twGroup_t group, const twReserve_t* reserve);

// Creates a new group of the ranks that are still there, usually after an error. Collective among them. They agree on
// who survives. Ranks are left out that died, that an error record blames, that gave the group up or destroyed it, or
// that do not answer within the timeout or 10 s (TOKENWAY_SHRINK_MS), whichever is longer. Only a rank that
// does not answer costs that time: the others are left out as soon as it is known that they will not come, also while
// the call waits. The new group has fresh memory; the old one becomes sticky and must still be destroyed.
//
// config == NULL keeps the old configuration, with the maps and shares of config.placement; experts (or physical
// experts) are in blocks over the survivors. Where maps move, survivors keep their slots and begin with the maps in
// force; moving.h tells of experts that are lost. max_recv_tokens beyond what the survivors can send becomes as much as
// they can send.
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

#endif  // TOKENWAY_GROUP_H_
