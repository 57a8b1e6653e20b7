// The carrier: collectives of the caller's own that move the bytes of a portable comm, behind a few functions. Part of
// tokenway.h.
//
// The ranks of a portable comm have no memory in common, so their groups use staged transport. What a step writes for a
// peer goes into a message, an all-to-all of the caller (torch.distributed's in the Python package) moves the messages,
// and each is unpacked into the peer's own window. So layouts, sums and bits are those of the other backends. Ranks
// meet, tell each other of failures and notice each other's death over TCP connections that the library makes itself.
//
// On CUDA devices kernels lay out a block for each rank, all of one size by the call's bound. Collectives that are
// enqueued behind them on the caller's stream move the blocks into the window, and kernels behind those show and sum
// them. Nothing waits for the host, and a sequence of calls can be captured into a graph.
#ifndef TOKENWAY_CARRIER_H_
#define TOKENWAY_CARRIER_H_

#include "tokenway/types.h"

#ifdef __cplusplus
extern "C" {
#endif

// What the carrier's `open` gets. A channel in this header is one connection of a group's ranks through the carrier; it
// has a queue for each lane of the group, and serves one group.
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
  uint64_t key;               // names this channel: the same on its ranks, and never used twice
  int32_t device;             // the CUDA device whose memory its moves are in; -1: the host's
  // over(meeting): the thread that called `open` asks it every few milliseconds while it waits. It returns non-zero
  // once a peer is gone or has failed, and the others will not come.
  int32_t (*over)(const void* meeting);
  const void* meeting;
} twChannelConfig_t;

// The collectives that a move can be.
typedef enum TW_AS_INT {
  twMoveBlocks = 0,  // all-to-all: send_bytes[0] bytes to each rank, as many from each
  twMoveExact = 1,   // all-to-all: send_bytes[r] to rank r, recv_bytes[r] from it, 0 for some
  twMoveGather = 2,  // all-gather: the same send_bytes[0] bytes to every rank, as many from each
} twMoveKind_t;

// One all-to-all or all-gather. Buffers are host memory, or a device's; the parts of ranks follow each other without
// gaps. All of it stays alive until the move has ended, or for ever if it never does.
typedef struct {
  size_t size;
  twMoveKind_t kind;
  int32_t queue;  // from 0 on. All ranks start the moves of one queue in the same order, those of different queues in
                  // any order
  const void* send;
  void* recv;
  const uint64_t* send_bytes;
  const uint64_t* recv_bytes;
} twMove_t;

// The caller's functions. The library may call them from any thread, but for one channel from one thread at a time.
// They throw nothing.
typedef struct {
  size_t size;
  void* context;
  // Opens a place to meet at, on all addresses of the first rank of a group, which alone calls it. Returns 0 on
  // success.
  int32_t (*offer)(void* context, int32_t* port);
  // Connects the ranks of a group; all of them call it. Returns 0 on success. It returns before timeout_ms are over,
  // and soon after config->over says so, even if a peer is stopped. `error`: a sentence of at most 255 bytes; empty
  // where peers did not come, whom the library then finds. What config points to stays alive until this returns.
  int32_t (*open)(void* context, const twChannelConfig_t* config, int64_t* channel, char* error);
  // Closes a channel. `idle`: every move that was started has ended. If not, nothing may wait for those that have not.
  void (*close)(void* context, int64_t channel, int32_t idle);
  // Starts a move; never waits for a peer. Returns the move's number, from 0 on, or -1 if it cannot be started.
  int64_t (*start)(void* context, int64_t channel, const twMove_t* move);
  // Waits for a move. Returns 1: it ended, the bytes are there; 0: not in time; -1: it failed, as when a connection
  // broke. After 1 or -1 the number is forgotten.
  int32_t (*wait)(void* context, int64_t channel, int64_t move, int32_t timeout_ms);
  // The library calls the remaining functions for channels of a device alone, and for these neither `start` nor `wait`;
  // NULL where there are no such channels.
  //
  // `enqueue` begins `count` moves (twMoveBlocks, all on one queue) behind what is on the stream (a cudaStream_t) so
  // far. It never waits for a peer or the device, and may be captured. `at_once`: `join` follows. Returns 0 on success.
  int32_t (*enqueue)(void* context, int64_t channel, const twMove_t* moves, int32_t count, int32_t at_once,
                     void* stream);
  // Makes what is put on the stream from now on come behind the moves that a queue has begun. Returns 0 on success.
  int32_t (*join)(void* context, int64_t channel, int32_t queue, void* stream);
  // Ends the moves that are under way, as their peers will never come; the streams go on. Later moves of the channel
  // fail. From any thread.
  void (*abort)(void* context, int64_t channel);
  // Points to a flag that becomes non-zero when the functions can no longer be called, as those of an interpreter that
  // ends. NULL: they always can.
  const int32_t* ended;
} twCarrier_t;

// How the dispatches of a portable comm travel.
typedef enum TW_AS_INT {
  twRouted = 0,    // rows go to the ranks of their experts, by all-to-all
  twGathered = 1,  // all tokens and their routing go to all ranks, which pick the rows that concern them
  twAuto = 2,      // by a model of measured times, for the call's bound; routed if it is close
} twStrategy_t;

// What twCommCreatePortable takes. Equal on every rank, except the carrier and the contexts.
typedef struct {
  size_t size;
  int32_t timeout_ms;  // as in twCommConfig_t
  // As in twCommConfig_t, but required: ranks tell each other their addresses. They may be on several hosts.
  int (*allgather)(const void* mine, void* all, size_t bytes, void* context);
  void* allgather_context;
  const twCarrier_t* carrier;  // copied
  twStrategy_t strategy;       // how dispatches travel
  // How much of each message the first move of a step carries. A step is a move of equal blocks, each a frame and so
  // many bytes of a message. If a message anywhere is longer, a second move carries what is left of all the longer
  // ones, exactly as long as it is. 0: exact sizes always. INT64_MAX: as much as the group's longest message, so that
  // each step is one move (two for a gather of many narrow tensors). -1: as many bytes, to all ranks together, as take
  // two thirds of the time that a second move takes to begin, or the longest message, where that takes no longer than a
  // second move takes to begin. The times are measured when the comm's first group is created.
  int64_t inline_bytes;
  // 1: each rank has a CUDA device, `device` (-1: the current one), and the tensors of all calls are in its memory.
  // Blocks then have fixed sizes: strategy must be twRouted or twAuto, which are the same, and inline_bytes is not
  // used.
  int32_t on_device;
  int32_t device;
} twPortableConfig_t;
#define TW_PORTABLE_CONFIG_INIT {sizeof(twPortableConfig_t), 0, NULL, NULL, NULL, twAuto, -1, 0, 0}

// How the groups of a portable comm exchange, and what decided it.
typedef struct {
  size_t size;
  twStrategy_t strategy;  // as configured
  int64_t inline_bytes;   // bytes of a message in the first move; on a device of the block for max_tokens rows
  // Not on a device. Measured when the first group was created, in up to 20 rounds or some 250 ms, as the lowest decile
  // of the ranks' mean times, and the same on all ranks. The times are microseconds of a move of few bytes, and the
  // rates bytes per microsecond that a rank sends in a large move (1 MiB to all peers together, less the time of a
  // small one, but at least two thirds of its own time); `exchange` is an all-to-all and `gather` an all-gather.
  double exchange_us;
  double exchange_rate;
  double gather_us;
  double gather_rate;
  int64_t channel;  // what the carrier's `open` has given for the group; -1 where it has one rank
} twPortableInfo_t;

#ifdef __cplusplus
}
#endif
#endif  // TOKENWAY_CARRIER_H_
