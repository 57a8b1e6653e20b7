// Gathers and reduces: the exchange with the set "every rank". Included by tokenway.h, which has the conventions.
//
// Each rank has a size, the number of rows that are its own; it may differ from rank to rank, and may be zero. A gather
// brings the rows of all ranks to all ranks. A reduce-scatter brings each rank the sums of what all ranks have for it.
//
// Both are steps like a dispatch and a combine, on the same channels and in the same window, so they may be called
// between these in any order, the same on all ranks. They lease no lane: the next step on theirs may follow at once. A
// group that makes only these two needs no experts (num_experts and top_k 0).
//
// Sizes are n_r for rank r, 0 <= n_r <= b. All ranks give them in the same one of these ways:
//   host_sizes [N]    known to the host: outputs are as large as what comes.
//   sizes [N] or [1]  all of them, or this rank's own, in device memory (on the CPU backend in memory), read when the
//                     step runs, so that a captured graph reads them anew in each replay. Tensors are as large as what
//                     there is room for: b rows of a rank.
//   neither           twAllGatherV: this rank's size is that of its tensors. twReduceScatterV: with twRankMajor the
//                     output tells this rank's size; with twFlat each rank has an equal share of the rows.
//
// Where a rank does not know the others' sizes, a gather learns them in its step; a reduce-scatter then sends b rows to
// each rank. A size in device memory that is out of range is replaced by the nearest in range, and the record names
// rank and value. If ranks give different sizes, bounds, row sizes or types, all of them get twBoundMismatch.
#ifndef TOKENWAY_COLLECTIVES_H_
#define TOKENWAY_COLLECTIVES_H_

// What twAllGatherV takes: this rank's rows, sizes, and how the step is made.
typedef struct {
  size_t size;
  int32_t num_tensors;                  // 1..TW_MAX_PAYLOADS
  twTensor_t tensors[TW_MAX_PAYLOADS];  // [n, ...] each, of any dtype: rows of this rank; n is its size, or b where
                                        // `sizes` tells how many of them count. Rows may be strided
  const int32_t* host_sizes;            // [N], or NULL
  twTensor_t sizes;                     // twInt32 or twInt64 [N] or [1], contiguous, or data == NULL
  int32_t bound;      // b, equal on all ranks, 1..B; 0: the largest of host_sizes; with `sizes` the rows of tensors[0],
                      // else B
  int32_t lane;       // -1: the next free one, in the same order on all ranks
  int32_t send_only;  // 1: return when everything is sent; twCompleteRequest receives
  void* stream;
  int32_t sm_limit;  // as twDispatchInput_t
} twAllGatherVInput_t;
// clang-format off
#define TW_ALL_GATHER_V_INPUT_INIT \
  {sizeof(twAllGatherVInput_t), 1, {TW_TENSOR_INIT}, NULL, TW_TENSOR_INIT, 0, -1, 0, NULL, 0}
// clang-format on

// What a gather delivers. The caller may set `data` of any tensor to memory of its own (C-contiguous, of the shape
// given here) to have it written there; shape and dtype are then checked. With data == NULL:
//   twRankMajor  tensors: a view of the window, valid until the next step on the lane begins (a twReduceScatterV may
//                read it)
//   twFlat       not wanted (nothing is written)
//
// The call fills in all fields of the tensors.
typedef struct {
  size_t size;
  twLayout_t layout;                    // the same on all ranks
  twTensor_t tensors[TW_MAX_PAYLOADS];  // twFlat [R, ...]: the rows of rank 0, then of rank 1 and so on; R is the sum
                                        // of host_sizes, else N * b, of which those from offsets[N] on are not written.
                                        // twRankMajor [N, b, ...]: row i of rank r at [r, i]; rows from counts[r] on
                                        // are not written
  twTensor_t counts;                    // twInt32 [N]: the sizes; written if data is given
  twTensor_t offsets;                   // twInt32 [N + 1]: their running sums, from 0; written if data is given
  int64_t request;                      // set by a send_only call: for twCompleteRequest
} twAllGatherVOutput_t;
// clang-format off
#define TW_ALL_GATHER_V_OUTPUT_INIT \
  {sizeof(twAllGatherVOutput_t), twFlat, {TW_TENSOR_INIT}, TW_TENSOR_INIT, TW_TENSOR_INIT, 0}
// clang-format on

// What twReduceScatterV takes: this rank's rows for all ranks, sizes, and how the step is made.
typedef struct {
  size_t size;
  twLayout_t layout;
  int32_t num_tensors;                  // 1..TW_MAX_PAYLOADS
  twTensor_t tensors[TW_MAX_PAYLOADS];  // partials, twFloat32, twBfloat16 or twFloat16. twFlat [R, ...]: those for rank
                                        // 0, then for rank 1 and so on; R is the sum of host_sizes, with `sizes` N * b.
                                        // twRankMajor [N, b, ...]: that of rank r's row i at [r, i]; rows from its size
                                        // on are not summed. May be a view of the window
  const int32_t* host_sizes;            // as twAllGatherV
  twTensor_t sizes;                     // [1], with twRankMajor alone
  int32_t bound;                        // 0: as twAllGatherV, with `sizes` the rows of output.tensors[0]
  int32_t lane;
  int32_t send_only;
  void* stream;
  int32_t sm_limit;  // as twDispatchInput_t
} twReduceScatterVInput_t;
// clang-format off
#define TW_REDUCE_SCATTER_V_INPUT_INIT \
  {sizeof(twReduceScatterVInput_t), twFlat, 1, {TW_TENSOR_INIT}, NULL, TW_TENSOR_INIT, 0, -1, 0, NULL, 0}
// clang-format on

// Where twReduceScatterV writes: memory of the caller.
typedef struct {
  size_t size;
  twTensor_t
      tensors[TW_MAX_PAYLOADS];  // [n, ...] each, given by the caller; twFloat32, twBfloat16 or twFloat16: sums of
                                 // this rank's rows; n is its size, with `sizes` b, of which the size are written
  int64_t request;               // set by a send_only call: for twCompleteRequest
} twReduceScatterVOutput_t;
// clang-format off
#define TW_REDUCE_SCATTER_V_OUTPUT_INIT {sizeof(twReduceScatterVOutput_t), {TW_TENSOR_INIT}, 0}
// clang-format on

// Brings the rows of every rank to every rank. A step of all ranks. N * b rows of all tensors must find room in a bank
// of the group's window (else twInvalidArgument, with the numbers): a group whose rows are at least as large always has
// it. With host_sizes an output may be in place, where tensors[q] is rows offsets[rank] and on of output.tensors[q];
// otherwise it must be apart from all inputs and other outputs.
//
// Errors: twInvalidArgument and twInvalidUsage (peers get twPeerRefused at once, with the exceptions that twDispatch
// names), twPeerRefused, twBoundMismatch, and the sticky ones. With staged transport between devices, tensors that are
// refused end the group. After a step that failed, counts and offsets are 0.
TW_API twResult_t twAllGatherV(twGroup_t group, const twAllGatherVInput_t* input, twAllGatherVOutput_t* output);

// Sums at each rank what all ranks have for it. A step of all ranks. Output row i is the sum over ranks ascending of
// the row i that each has for this rank: float32, from the first term on, each addition rounded to nearest even;
// rounded once to the output's type, whatever config.domain is. So results depend neither on timing nor on the backend.
// An output may be, in place, this rank's rows of an input of its own type (host_sizes given, or twRankMajor);
// otherwise it must be apart from all inputs and other outputs. Room and errors as twAllGatherV; after a step that
// failed the sums are NaN.
TW_API twResult_t twReduceScatterV(twGroup_t group, const twReduceScatterVInput_t* input,
                                   twReduceScatterVOutput_t* output);

// Finishes a send_only gather or reduce-scatter, whose tensors must live until then. If another step has begun on its
// lane meanwhile, that step has finished it first, on its own call's stream, and this call returns how it ended.
// Errors: those of the call it finishes; twInvalidArgument for a request that does not exist, or no longer.
TW_API twResult_t twCompleteRequest(twGroup_t group, int64_t request, void* stream);

#endif  // TOKENWAY_COLLECTIVES_H_
