// The exchange: counts, dispatch, combine and layouts. Included by tokenway.h, which has the conventions and the
// letters.
#ifndef TOKENWAY_EXCHANGE_H_
#define TOKENWAY_EXCHANGE_H_

// How a combine weights rows before it sums them.
typedef enum TW_AS_INT {
  twWeightNone = 0,  // rows are weighted already
  twWeightTopk = 1,  // expert_major: each row is multiplied by the weight of its (token, expert); rank_major: by the
                     // sum of the token's weights for this rank's experts, over k ascending. With twRowPerExpert the
                     // owner multiplies each row by the weight in its handle
} twWeighting_t;

// Which scales rows of twFloat8e4m3 have on their way back (twCombineInput_t.wire_scales).
typedef enum TW_AS_INT {
  twScalesNone = 0,    // rows of other types, which have none
  twScalesBlocks = 1,  // a float32 for each block of 128 elements, found and sent with the row
  twScalesTensor = 2,  // one for all rows, which the caller gives (wire_scale); it does not travel
} twScales_t;

// twExchangeCounts is a step of all ranks, before dispatches of high throughput alone. Each rank tells all others how
// many rows it will send to which rank and to which expert. Then every rank knows where each row goes and how many come
// (twHandleNumRecvRows), and the handle may be dispatched for as long as its routing stays. The step takes a free lane
// and gives it back. Counts that are exchanged again with another max_recv_tokens want a dispatch before the next
// combine. Errors: twInvalidUsage, twRecvOverflow and twBoundMismatch on all ranks alike, twPeerRefused, and the sticky
// ones.
//
// After a send_only call that a rank refused, or in which ranks differed, the handle holds the lane, on all ranks,
// until its counts are exchanged, or it is released or destroyed.
typedef struct {
  size_t size;
  int32_t lane;       // -1: the next free one, in the same order on all ranks
  int32_t send_only;  // 1: return when everything is sent; twComplete receives
  void* stream;
  void* landing[TW_MAX_PAYLOADS];  // receive offsets: for each payload, the lease where the rows of the next dispatch
                                   // are to land (leases.h), or NULL
  int32_t sm_limit;                // as twDispatchInput_t
  // The next two are in place of config's, for all that follows from these counts, until the handle exchanges counts
  // again. Where a graph has captured calls of a handle, they stay what they were.
  int32_t max_recv_tokens;  // R: 1..config.max_recv_tokens, the same on all ranks (else twBoundMismatch on all of
                            // them); 0: as configured
  int32_t row_alignment;    // a power of two, 1..256; ranks may differ; 0: as configured
} twCountsInput_t;
// clang-format off
#define TW_COUNTS_INPUT_INIT {sizeof(twCountsInput_t), -1, 0, NULL, {NULL}, 0, 0, 0}
// clang-format on

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

// Tells how many rows each expert of this rank will receive: rows [L], memory of the caller, by local expert. That is
// without the padding of twGrouped, where the rows of an expert begin behind those of the experts before it, each of
// these rounded up to a multiple of row_alignment (twDispatchOutput_t.offsets). With twOverflowDrop, rows that are
// dropped are counted, as they have places there. Waits as twHandleNumRecvRows does, and not at all after it; the same
// errors.
TW_API twResult_t twHandleNumExpertRows(twHandle_t handle, int32_t* rows);

// Tells how many rows the outputs of a dispatch have; never waits. If the host knows the counts, as on the CPU it
// always does, the number is that of twHandleNumRecvRows. Else, on a device, it is all that there is room for, which
// for twFlat is max_recv_tokens of the exchange of counts. Then ids beyond what comes are invalid and weights 0; rows
// stay as they are there (in twGrouped from the last of the offsets on), so that the cost of a dispatch follows what
// comes.
TW_API twResult_t twHandleNumOutputRows(twHandle_t handle, twLayout_t layout, int64_t* rows);

// Tells how many places the index lists of a view of so many rows have (twDispatchOutput_t.index_block), whatever its
// routing is: as many as twDispatch wants of their memory. With choices = rows * min(K, L) and begun = min(L, choices),
// in whole numbers:
//   capacity = (begun + (choices - begun) / block) * block
// as the first choice of each expert begins a block, and each further `block` choices fill one at most. rows: N * b in
// twRankMajor, what twHandleNumOutputRows tells in twFlat. block: 1..TW_MAX_INDEX_BLOCK. Never waits. Errors:
// twInvalidArgument, also where a place, or rows * K, would not fit into 32 bits.
TW_API twResult_t twGroupIndexCapacity(twGroup_t group, int64_t rows, int32_t block, int64_t* capacity);

// What a layout is in a group. The outputs of a dispatch in it have the leading dimensions [blocks, rows_per_bound *
// b], b being the call's bound, or where `packed` is 1 [rows]: what twHandleNumOutputRows tells where `exact` is 1,
// else
//   rows = (rows_per_bound * b + L * (row_alignment - 1)) / row_alignment * row_alignment
// in whole numbers, as many as can come with their padding.
typedef struct {
  size_t size;
  int32_t exact;      // 1: as many rows as came (high throughput); 0: as many as the bound allows
  int32_t by_expert;  // 1: a row stands under one local expert, with that id alone; 0: under its source, with all K
  int32_t views;      // 1: payloads are views of the window unless memory is given; 0: memory must be given
  int64_t blocks;     // elements of counts: N, or L by expert
  int64_t rows_per_bound;  // rows of a block for each of b: 1, or N by expert, or in twGroupedByBound N * min(K, L), of
                           // all blocks together; 0 in the exact layouts
  int64_t ids_per_row;     // ids and weights of a row: K, or 1 by expert, which is then no dimension of theirs
  int64_t offsets;         // elements of offsets, L + 1; 0: the layout has none
  int32_t default_bound;   // b of a dispatch that names none: B, in twAutomatic low_latency_tokens; 0 in the exact
                           // layouts
  int32_t packed;          // 1: rows stand in one dimension, block behind block
  int32_t row_alignment;   // twGroupedByBound: the group's; elsewhere 1 or what the exchange of counts named
} twLayoutInfo_t;

// Tells what a layout is in this group; creates nothing and never waits. Errors: twInvalidArgument if the group's mode
// does not have the layout (twAutomatic has all).
TW_API twResult_t twGroupLayout(twGroup_t group, twLayout_t layout, twLayoutInfo_t* info);

// What twDispatch takes: the caller's rows, and how the step is made.
typedef struct {
  size_t size;
  twTensor_t payloads[TW_MAX_PAYLOADS];  // [T, ...] each, as configured; T as in the handle
  // b, equal on all ranks, at least T. Low latency: up to B, and 0 means B as it was when the handle was made
  // (twGroupReserve); in twAutomatic up to low_latency_tokens, which 0 means. High throughput: up to B; it sizes no
  // output, but says how many parts the combine takes (config.inbox_tokens); 0 means B as it is now.
  int32_t bound;
  int32_t lane;       // -1: the next free one, in the same order on all ranks
  int32_t send_only;  // 1: return when everything is sent; twComplete receives
  void* stream;
  int32_t uncounted;  // 1: not counted by twGroupLoads (a further pass over tokens that were counted); the same on all
                      // ranks
  // What rows consist of in this call, the same on all ranks: num_types payloads, within config.dispatch_room bytes
  // together, in place of the configured ones. 0: as configured. Leases are for configured rows alone: others come to
  // the bank, and what was announced for this dispatch is let go of. Ranks that differ get twBoundMismatch; over staged
  // transport between devices their blocks do not meet, which ends the group (twCallMismatch).
  int32_t num_types;
  twPayload_t types[TW_MAX_PAYLOADS];
  // CUDA backend: thread blocks of this call's kernels, those of twComplete and those that order rows by expert among
  // them, in place of config.sm_limit; 0: as configured. Ranks may differ. A captured call keeps its limit.
  int32_t sm_limit;
} twDispatchInput_t;
// clang-format off
#define TW_DISPATCH_INPUT_INIT \
  {sizeof(twDispatchInput_t), {TW_TENSOR_INIT}, 0, -1, 0, NULL, 0, 0, {{twDtypeNone, 0}}, 0}
// clang-format on

// What a dispatch delivers. The caller may set `data` of any tensor to memory of its own (C-contiguous, of the shape
// given here) to have it written there; shape and dtype are then checked. With data == NULL:
//   rank_major    payloads: a view of the window, valid until the next step on the lane starts (the handle's combine
//                 may read it); ids, weights, counts: views of the handle, valid until its next dispatch or its end
//   expert_major  not written (there is nothing to view), except counts, a view of the handle
//   flat          as rank_major
//   grouped       as expert_major; offsets are a view of the handle too. grouped_by_bound: likewise
//
// The call fills in all fields of the tensors. Memory that is given for one must not overlap another's, nor, on the
// CUDA backend, what the call reads: its inputs and, in a handle's first dispatch, the routing. On the CPU it may
// overlap the inputs, which have been sent before anything is written. It never lies among the received rows of the
// window, where peers write; leases are the caller's.
typedef struct {
  size_t size;
  twLayout_t layout;
  twTensor_t payloads[TW_MAX_PAYLOADS];  // rank_major [N, b, elements], expert_major [L, N*b, elements]; rows beyond
                                         // the counts are not written. flat [R', elements], grouped [P, elements]
  twTensor_t ids;      // id_dtype. rank_major [N, b, K]; expert_major [L, N*b]; invalid_id where there is nothing;
                       // flat [R', K], grouped [P]
  twTensor_t weights;  // twFloat32, the same shape; 0 where there is nothing
  twTensor_t counts;   // twInt32. rank_major and flat [N], expert_major and grouped [L]
  twTensor_t offsets;  // twInt32 [L + 1], grouped alone, in either mode: where the rows of each expert begin, and at
                       // last where they end: P, unless P is what there is room for
  // Set by the caller, by expert alone. 1: payload q is column-major, as grouped GEMMs read the scales of their rows:
  // grouped [elements, M], where M is P rounded up to whole 16 bytes, with zeros from P on; expert_major [L, elements,
  // M], where M is N * b rounded up likewise, and what is beyond the counts is not written. 0: row-major, as above.
  int32_t column_major[TW_MAX_PAYLOADS];
  // twInt64, expert_major [L, N*b], grouped [P]; written only where the caller gives memory for it: row * K + k that
  // each row was taken from, rows counted as in rank_major (slot p of source s is s * b + p) or flat; -1 where there is
  // nothing.
  twTensor_t origins;
  // Index lists, in rank_major and flat alone: by which rows of the view the experts of this rank work, in blocks of
  // one expert each. Products that gather their rows read these, so no row is copied to its experts. index_block, set
  // by the caller: places of a block, up to TW_MAX_INDEX_BLOCK; 0: no lists. Ranks may differ. Each list is written
  // where the caller gives memory for it. M are the rows of the view, N * b or R', counted through its leading
  // dimensions; C is what twGroupIndexCapacity tells for them.
  int32_t index_block;
  twTensor_t sorted_rows;    // twInt32 [C]: row * K + k of each choice that is an expert's of this rank, by local
                             // expert, of each in (source, slot) order and filled up to whole blocks by M * K; M * K
                             // from num_sorted on too
  twTensor_t block_experts;  // twInt32 [C / index_block]: the local expert of each block, whatever id_space is; -1 from
                             // num_sorted / index_block on
  twTensor_t num_sorted;     // twInt32 [1]: places that are in use, a multiple of index_block
  // twInt32 [L, N], by expert alone, written only where the caller gives memory for it: how many of an expert's rows
  // came from each source. They stand in order of source, so a source's begin where those of the sources before end.
  twTensor_t source_counts;
} twDispatchOutput_t;
// clang-format off
#define TW_DISPATCH_OUTPUT_INIT                                                                                  \
  {sizeof(twDispatchOutput_t), twRankMajor, {TW_TENSOR_INIT}, TW_TENSOR_INIT, TW_TENSOR_INIT, TW_TENSOR_INIT, \
   TW_TENSOR_INIT, {0}, TW_TENSOR_INIT, 0, TW_TENSOR_INIT, TW_TENSOR_INIT, TW_TENSOR_INIT, TW_TENSOR_INIT}
// clang-format on

// What twCombine takes: the experts' rows in the layout of the dispatch, and how the step is made.
typedef struct {
  size_t size;
  twLayout_t layout;  // that of the dispatch, or the other one of its mode
  twWeighting_t weighting;
  twTensor_t rows;    // [N, b, H] or [L, N*b, H], [R', H] or [P, H] as dispatched; twFloat32, twBfloat16 or twFloat16;
                      // rows beyond the counts are not read. May be the dispatch's view itself
  int32_t send_only;  // 1: return when everything is sent. A combine of several parts (config.inbox_tokens) waits for
                      // all but the last to end, on the device where there is one: on the CPU such calls must come in
                      // one order on all ranks
  void* stream;
  // What is combined in this call, the same on all ranks, within config.combine_room bytes a row, in place of
  // config.combine_dtype and combine_elements; none and 0: as configured. twFloat8e4m3 too, with wire_scales below.
  twDtype_t wire_dtype;
  int64_t elements;
  int32_t sm_limit;  // as twDispatchInput_t
  // A value of each choice, which goes to the token's owner beside the rows: gradients of router weights, in the
  // backward pass of a dispatch. twFloat32; as laid out for rows, rank_major [N, b, K] and flat [R', K], where value k
  // is that of the row's k-th choice and counts if an expert of this rank serves it; expert_major [L, N*b] and grouped
  // [P], where a row is one choice. No data and no dimensions: none. All ranks give values or none does, else
  // twBoundMismatch (over staged transport between devices twCallMismatch, as for rows of other types). They take 4 * K
  // bytes of a returned row's room, config.combine_room, which must be given for that.
  twTensor_t choice_values;
  // Where wire_dtype is twFloat8e4m3, which scales rows have; else twScalesNone. A partial, in float32, is quantised
  // once, by the rank that has it, and multiplied with its scale again in float32 at the token's owner. The same on all
  // ranks, else twBoundMismatch (over staged transport between devices twCallMismatch), wire_scale bit for bit.
  //   twScalesBlocks: values and scales are those of twQuantizeFp8 without its flags, bit for bit: a block that holds a
  //     NaN or an infinity becomes NaN. A row takes H bytes, rounded up to a multiple of 16, and 4 * ceil(H / 128),
  //     likewise, of config.combine_room.
  //   twScalesTensor: a value is x / wire_scale, rounded to nearest even; beyond 448 it saturates, and a NaN or an
  //     infinity becomes NaN. A row takes H bytes, rounded up to a multiple of 16.
  twScales_t wire_scales;
  float wire_scale;  // from 2^-116 to 2^116 with twScalesTensor, else 0
  // With twRowPerExpert alone: by which this rank, as the owner, multiplies what returns to it, [T, K] twFloat32; rows
  // of it may be apart. Only with twWeightNone, in place of the handle's weights. Each combine of a dispatch may have
  // others, each rank some or none. Read in stream order, on the CPU by twComplete where the call is send_only. No data
  // and no dimensions: none.
  twTensor_t weights;
  // From what this rank's sums start: the first term of each, before its partials, or before its rows in a group of
  // twRowPerExpert; what a shared expert has made of the tokens, for instance, or a residual. [T, H], of the dtype of
  // output.tokens or twFloat32; rows may be apart. It is this rank's own affair: it travels nowhere, and other ranks
  // may give none. With config.token_replicas the rows of this rank's share count, so the ranks of a set give the same.
  // Read in stream order when the sums are made: where the call is send_only by twComplete, until which it must stay;
  // the parts before the last read theirs in the call. It may be output.tokens itself, the same memory with the same
  // dtype and strides, which then has the sums in place of it; otherwise it overlaps no output. Nor may it be among
  // received rows in the window. No data and no
  // dimensions: none, and a sum starts from its first partial.
  twTensor_t bias;
} twCombineInput_t;
// clang-format off
#define TW_COMBINE_INPUT_INIT                                                                                        \
  {sizeof(twCombineInput_t), twRankMajor, twWeightNone, TW_TENSOR_INIT, 0, NULL, twDtypeNone, 0, 0, TW_TENSOR_INIT, \
   twScalesNone, 0, TW_TENSOR_INIT, TW_TENSOR_INIT}
// clang-format on

// Where twCombine writes: memory of the caller, which received rows in the window are not (leases are).
typedef struct {
  size_t size;
  twTensor_t tokens;  // [T, H], given by the caller; twFloat32, twBfloat16 or twFloat16. May overlap the input's rows:
                      // none of these is overwritten before it was sent. A combine of several parts refuses that
                      // (config.inbox_tokens)
  // [T, K] twFloat32, memory of the caller like tokens, where the input has choice_values, and only there: for each
  // choice the value from the one rank that served it, bit for bit; 0 where none did, as the id is -1 or the row was
  // dropped. Overlaps neither tokens nor what the input has.
  twTensor_t choice_values;
} twCombineOutput_t;
#define TW_COMBINE_OUTPUT_INIT {sizeof(twCombineOutput_t), TW_TENSOR_INIT, TW_TENSOR_INIT}

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
// After a step that failed, counts are 0 and ids invalid_id for sources whose rows did not arrive, and index lists have
// none of them. A failed dispatch gives its lane back, unless it was send_only: then the handle holds it until it is
// dispatched again, released or destroyed. On the CUDA backend the peers of a rank that refused find out later. Their
// handles give the lane back by the combine, which then does nothing but fill its output with NaN, or by
// twHandleRelease. The handle of the rank that refused holds its lane as well: combine it (twInvalidUsage, which gives
// the lane back), release or destroy it where peers combine or release theirs, before the next call; dispatch it again
// only where theirs hold their lanes too. A combine that was refused has given it back.
TW_API twResult_t twDispatch(twGroup_t group, twHandle_t handle, const twDispatchInput_t* input,
                             twDispatchOutput_t* output);

// Tells whether calls of this group may name these rows: reads num_types and types of a dispatch's input, wire_dtype,
// elements and scales of a combine's and whether it has choice_values, and nothing else of them. Not collective.
// Errors: twInvalidArgument.
TW_API twResult_t twGroupCheckRows(twGroup_t group, const twDispatchInput_t* dispatched,
                                   const twCombineInput_t* combined);

// Returns rows to their owners and sums them there. A step of all ranks. It needs a completed dispatch of the handle
// (else twInvalidUsage, and peers that do have one wait for this rank). It uses that dispatch's lane and gives it back,
// or, when the handle holds none any more, takes a free lane for this one step.
//   partial of a (token, rank) = its row, or sum over k ascending of [weight *] row: float32, from the
//   first term on, multiply then add, each rounded to nearest even; rounded once to combine_dtype, or quantised
//   (wire_scales)
//   tokens[t] = sum of the partials over ranks ascending: float32, rounded once to the output type; 0 if
//   there are none. With a bias the sum begins with bias[t], in float32, so that a token without partials gets bias[t]
// In a group with config.domain between 1 and N folds take the place of partials in that sum, over domains ascending:
//   fold of a (token, domain) = sum of its ranks' partials over ranks ascending: float32, from the first term on,
//   rounded once to the type that travels. A domain without a partial has no fold
// In a group of twRowPerExpert there are no partials:
//   row of a (token, k) = the expert's, rounded once to combine_dtype
//   tokens[t] = sum over k ascending of [weight *] row: float32, from the first term on, multiply then add, each
//   rounded to nearest even; rounded once to the output type; 0 if there are none, and a bias as above. k counts where
//   the id is an expert's and its row was not dropped
//
// So results depend neither on timing nor on the backend. Errors: as twDispatch; after a failed step, tokens and
// choice_values are NaN. A
// combine that failed for its arguments can be repeated, but not from the window's view, whose life the failed step has
// ended.
//
// With config.token_replicas the sums of all T tokens of a set come to each of its ranks: a step behind the combine
// passes them on, and twComplete of a send_only call waits for the other ranks of the set, so all ranks complete in one
// order. Sets whose ranks hold unlike tokens get twReplicaMismatch, on all ranks of the group, which stays usable.
TW_API twResult_t twCombine(twGroup_t group, twHandle_t handle, const twCombineInput_t* input,
                            const twCombineOutput_t* output);

// Finishes the handle's pending send_only dispatch, combine or exchange of counts. Errors: those of the call it
// finishes; twInvalidUsage if nothing is pending.
TW_API twResult_t twComplete(twGroup_t group, twHandle_t handle, void* stream);

// The layout of a routing: what twGroupRoutingLayout tells. Memory of the caller, C-contiguous, on the group's device
// if it has one; what has data NULL is not wanted.
typedef struct {
  size_t size;
  twTensor_t tokens_per_rank;  // twInt32 [N]: tokens that go to each rank, once each however many of their experts are
                               // there
  twTensor_t tokens_per_expert;  // twInt32 [P]: tokens that each physical expert serves
  twTensor_t token_in_rank;      // twBool [T, N]: 1 where a token goes to a rank
  twTensor_t physical_ids;       // twInt32 [T, K]: the physical expert that serves each choice; -1: none does
} twRoutingLayout_t;
#define TW_ROUTING_LAYOUT_INIT \
  {sizeof(twRoutingLayout_t), TW_TENSOR_INIT, TW_TENSOR_INIT, TW_TENSOR_INIT, TW_TENSOR_INIT}

// Tells where a handle of these ids would send this rank's tokens: to the same ranks, and the same physical experts. No
// handle is made. Not collective: nothing is sent, and nobody waited for. ids [T, K], T up to max_tokens, as for
// twHandleCreateForLayer: in a group with a placement they are logical experts, which the layer's map turns into
// physical ones; else layer is 0, a physical expert is an expert, and P is E. To count logical experts, count ids.
//
// On a device all is enqueued on the stream, and may be captured; ids must not change, nor outputs be read, before it
// in stream order. Outputs overlap neither each other nor ids. There, a group of policy twReplicaBalanced, whose
// choices depend on the whole batch, needs physical_ids.
//
// Errors: twInvalidArgument. An id that is no expert's, or stands twice in its token, is refused on the CPU, where
// nothing is written then. On a device it acts as -1, and the group's record tells of one, with its token and k, phase
// twPhaseNone, lane -1 and a step that numbers such records.
TW_API twResult_t twGroupRoutingLayout(twGroup_t group, int32_t layer, const twTensor_t* ids,
                                       const twRoutingLayout_t* layout, void* stream);

#endif  // TOKENWAY_EXCHANGE_H_
