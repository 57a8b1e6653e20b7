// Dispatches: what their kernels take by value, where a block keeps its working arrays, and the three launches.
//
// The host fills DispatchParams: host/ from the call, plan/dispatch.cc kind, tiles, roles, first_packet and early. The
// kernels in dispatch/ read it and change nothing of it.
//
// What breaks if this changes: `bound`, `bank` and has_offsets must be alike on all ranks (S1, S5, S10). first_packet
// may differ between ranks, as the note beside the signal tells it. The rest is speed alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include "cuda/launch/group_view.h"
#include "cuda/launch/tiles.h"

namespace tw::cuda {

inline constexpr int kFastIds = 8;
inline constexpr int kFewTokens = 32;  // so many tokens are one for each thread of a warp

struct PayloadIn {
  const std::byte* data;
  int64_t stride;       // bytes
  int32_t width;        // bytes that every access may take: 16, 4 or 1
  uint32_t vectors;     // vectors of `width` bytes in a row
  uint32_t per_tile;    // vectors in a tile of a Simple row
  uint32_t first_word;  // its first word in a row's stream of packets (layout/ll128.h)
};

// Places in shared memory, as offsets from its beginning. The host decides them, so that a kernel finds them among its
// parameters and keeps no pointers in registers.
struct DispatchScratch {
  uint32_t windows;         // std::byte* [N]
  uint32_t here;            // int32 [N] the row of the window at which each source's rows begin
  uint32_t there;           // int32 [N] the row at each rank at which this rank's rows begin
  uint32_t limit;           // int32 [N] rows that may go to a rank
  uint32_t rounds;          // rounds whose marks are remembered; a power of two
  uint32_t going;           // uint32 [rounds, kWarps, N] marks: which of 32 tokens go to a rank
  uint32_t base;            // int32 [2 * rounds, N] slots of a rank that earlier rounds have taken
  uint32_t meta;            // uint64 [kWarps, 1 + K] the metadata of a warp's row; in a sender with position 0
  uint32_t before_packets;  // int32 [N] tokens for a rank that go as Simple rows
  uint32_t routed;          // int32 rounds that have been routed
  uint32_t progress;        // int32 [kWarps] the round that each sending warp is in
  uint32_t plain;           // uint32 sending warps whose Simple rows are all sent
  uint32_t source_error;    // int32 [N] twResult_t
  uint32_t failed;          // int32 1: some source_error is set
  uint32_t table;  // uint32 [E + 1] where each expert is, if there are few enough; the last entry is of no rank
  uint32_t map;    // MapWords from kFirst on, without `several`; only where `table` is kept too
  uint32_t bytes;

  static DispatchScratch make(const Shape& shape);
};
struct DispatchParams {
  GroupView group;
  HandleView handle;
  IdsIn in;
  IdsIn routed;  // what load statistics count: the caller's ids; the handle's own: these are counted
  PayloadIn payloads[kMaxPayloads];
  Shown shown;
  int32_t channel;
  int32_t bank;  // the bank that the rows must go to
  int32_t bound;
  int32_t tokens;
  int32_t rows;          // exact layouts: rows that are shown, which are more than those that come
  int32_t first_packet;  // the token from which on rows travel as packets
  int32_t rehearses;     // blocks that send rehearse if the kernel comes early (dispatch/dispatch.cu)
  int32_t early;         // tiles of the last packets that the warps which route send before all other rows
  int32_t send;
  int32_t receive;
  int32_t has_offsets;                      // rows go where handle.receive_offset says
  std::byte* receive_offset[kMaxPayloads];  // where this rank's rows arrive; NULL: in the bank
  DispatchScratch at;
  Tiles tiles;
  WideTiles wide;  // for Simple rows
  PacketsAt packets;
  Roles roles;
  int32_t table;    // the expert table is kept in shared memory
  int32_t whole;    // payloads allow 8 bytes at a time
  int32_t counted;  // 1: this dispatch counts for the load statistics (mix_counted)
  int32_t layer;
  uint32_t rows_digest;  // what rows consist of (mix_rows); 0: the group's own
  LoadsBlock loads_block;
  Kind kind;
};

inline constexpr int kFastPayloads = 2;

// All launch `grid` blocks; `early`: see launch.h. A cudaError_t comes back as int, so that the host side needs no CUDA
// header.
int launch_dispatch(const DispatchParams& params, int grid, bool early, void* stream);
int launch_dispatch_placed(const DispatchParams& params, int grid, bool early, void* stream);
int launch_dispatch_packets(const DispatchParams& params, int grid, bool early, void* stream);

}  // namespace tw::cuda
