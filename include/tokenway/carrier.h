// What moves the bytes of a portable comm: collectives of the caller's own, behind a few functions. Part of tokenway.h.
//
// A portable comm has no memory in common. What a step writes for a peer goes into a message, messages travel by an
// all-to-all of the caller's (torch.distributed's in the Python package), and are unpacked into the peer's own window:
// so layouts, sums and bits are those of the other backends. Ranks meet, tell each other of failures and notice each
// other's death over TCP connections that the library makes itself.
//
// On CUDA devices kernels lay out a block for each rank, all of one size by the call's bound, collectives that are
// enqueued behind them on the caller's stream move the blocks into the window, and kernels behind those show and sum
// them: nothing waits for the host, and a sequence of calls can be captured into a graph.
#ifndef TOKENWAY_CARRIER_H_
#define TOKENWAY_CARRIER_H_

#include "tokenway/types.h"

#ifdef __cplusplus
extern "C" {
#endif

// One channel serves one group.
typedef struct {
  size_t size;
  int32_t rank;  // of the group
  int32_t nranks;
  const int32_t* comm_ranks;  // [nranks]
  const char* local;          // this rank's IP address as its peers reach it
  const char* host;           // the first rank's IP address as this rank reaches it
  int32_t port;               // what the first rank's `offer` has given
  int32_t timeout_ms;         // for the meeting
  int32_t queues;             // how many: one for each lane of the group
  uint64_t key;               // of this channel: the same on its ranks, and never used twice
  int32_t device;             // whose memory its moves are of; -1: the host's
  // over(meeting), asked every few milliseconds while `open` waits, by the thread that called it: not 0 once a peer is
  // gone, or has failed, and the others will not come.
  int32_t (*over)(const void* meeting);
  const void* meeting;
} twChannelConfig_t;

typedef enum TW_AS_INT {
  twMoveBlocks = 0,  // all-to-all: send_bytes[0] bytes to each rank, as many from each
  twMoveExact = 1,   // all-to-all: send_bytes[r] to rank r, recv_bytes[r] from it, 0 for some
  twMoveGather = 2,  // all-gather: the same send_bytes[0] bytes to every rank, as many from each
} twMoveKind_t;

// Host memory, or a device's; parts of ranks follow each other without gaps. All of it stays until the move has ended,
// or, if it never does, for ever.
typedef struct {
  size_t size;
  twMoveKind_t kind;
  int32_t queue;  // from 0 on. All ranks start the moves of one queue in the same order, those of several in any
  const void* send;
  void* recv;
  const uint64_t* send_bytes;
  const uint64_t* recv_bytes;
} twMove_t;

// Functions may be called from any thread, for one channel by one at a time. They throw nothing.
typedef struct {
  size_t size;
  void* context;
  // The first rank of a group opens a place to meet at, on all its addresses. 0, or not.
  int32_t (*offer)(void* context, int32_t* port);
  // All ranks of a group: connects them. 0, or not: before timeout_ms are over and soon after config->over says so,
  // even if a peer is stopped. `error`: a sentence of at most 255 bytes; empty where peers did not come, whom the
  // library then finds. What config points to is there until this returns.
  int32_t (*open)(void* context, const twChannelConfig_t* config, int64_t* channel, char* error);
  // `idle`: every move that was started has ended. If not, nothing may wait for those that have not.
  void (*close)(void* context, int64_t channel, int32_t idle);
  // Starts a move and never waits for a peer. The move's number, from 0 on; -1 if it cannot be started.
  int64_t (*start)(void* context, int64_t channel, const twMove_t* move);
  // 1: ended, the bytes are there; 0: not in time; -1: failed, as when a connection broke. After 1 or -1 the number is
  // forgotten.
  int32_t (*wait)(void* context, int64_t channel, int64_t move, int32_t timeout_ms);
  // The rest is of channels of a device alone, which call neither `start` nor `wait`; NULL where there are none.
  // Begins `count` moves (twMoveBlocks, of one queue) behind what is on the stream (a cudaStream_t) so far. Never waits
  // for a peer or the device, and may be captured. `at_once`: `join` follows. 0, or not.
  int32_t (*enqueue)(void* context, int64_t channel, const twMove_t* moves, int32_t count, int32_t at_once,
                     void* stream);
  // What is put on the stream from now on comes behind the moves that a queue has begun. 0, or not.
  int32_t (*join)(void* context, int64_t channel, int32_t queue, void* stream);
  // Ends the moves that are under way, as their peers will never come; the streams go on. From any thread. Later moves
  // of the channel fail.
  void (*abort)(void* context, int64_t channel);
  // Not 0: functions can no longer be called, as of an interpreter that ends. NULL: they always can.
  const int32_t* ended;
} twCarrier_t;

typedef enum TW_AS_INT {
  twRouted = 0,    // rows go to the ranks of their experts, by all-to-all
  twGathered = 1,  // all tokens and their routing go to all ranks, which pick what concerns them
  twAuto =
      2,  // whichever takes less time by a model, from what was measured and the call's bound; routed if it is close
} twStrategy_t;

// The same on every rank, but for the carrier and the contexts.
typedef struct {
  size_t size;
  int32_t timeout_ms;  // as in twCommConfig_t
  // As in twCommConfig_t, and needed: ranks tell each other their addresses. They may be on several hosts.
  int (*allgather)(const void* mine, void* all, size_t bytes, void* context);
  void* allgather_context;
  const twCarrier_t* carrier;  // copied
  twStrategy_t strategy;       // of dispatches
  // A step is a move of equal blocks, each a frame and so many bytes of a message; if a message anywhere is longer,
  // what is left of all that are travels in a second move, exactly as long as it is. 0: exact sizes always. INT64_MAX:
  // as much as the group's longest message, so one move for each (two for a gather of many narrow tensors). -1: as
  // much, to all ranks together, as takes two thirds of the time that a second move takes to begin; the longest
  // message, where that takes no longer than a second move's beginning. As measured when the comm's first group is
  // created
  int64_t inline_bytes;
  // 1: ranks have a CUDA device each, `device` (-1: the current one), and so are the tensors of all calls. Blocks then
  // have fixed sizes: strategy must be twRouted or twAuto, which are the same, and inline_bytes is not used.
  int32_t on_device;
  int32_t device;
} twPortableConfig_t;
#define TW_PORTABLE_CONFIG_INIT {sizeof(twPortableConfig_t), 0, NULL, NULL, NULL, twAuto, -1, 0, 0}

// How the groups of a portable comm exchange, and what decided it.
typedef struct {
  size_t size;
  twStrategy_t strategy;  // as configured
  int64_t inline_bytes;   // of each message, in the first move; on a device, of a dispatch's block for max_tokens rows
  // Not on a device. Measured when the first group was created, in up to 20 rounds or some 250 ms, the lowest
  // decile of the ranks' mean times: microseconds of a move of few bytes, and bytes per microsecond that a rank sends
  // in a large one (1 MiB to all peers together, less the time of a small one, but two thirds of its time at
  // least); of an all-to-all and of an all-gather. The same on all ranks.
  double exchange_us;
  double exchange_rate;
  double gather_us;
  double gather_rate;
} twPortableInfo_t;

#ifdef __cplusplus
}
#endif
#endif  // TOKENWAY_CARRIER_H_
