// Dispatch kernels: what they take by value, and their launches.
#pragma once

#include <cstddef>
#include <cstdint>
#include "cuda/launch/group_view.h"
#include "cuda/launch/tiles.h"

namespace tw::cuda {

inline constexpr int kFastIds = 8;
inline constexpr int kFewTokens = 32;  // one for each lane of a warp

struct PayloadIn {
  const std::byte* data;
  int64_t stride;       // bytes
  int32_t width;        // bytes that every access may take: 16, 4 or 1
  uint32_t vectors;     // of that many bytes in a row
  uint32_t per_tile;    // of them in a tile of a row that is no packet
  uint32_t first_word;  // in the stream of a packet (layout/ll128.h)
};

// Places in shared memory, from its beginning; decided on the host, so that a kernel finds them among its parameters
// and keeps no pointers in registers.
struct DispatchScratch {
  uint32_t windows;         // std::byte* [N]
  uint32_t here;            // int32 [N] row of the window where each source's begin
  uint32_t there;           // int32 [N] row at each rank where this rank's begin
  uint32_t limit;           // int32 [N] rows that may go to a rank
  uint32_t rounds;          // that are remembered; a power of two
  uint32_t going;           // uint32 [rounds, kWarps, N] which tokens of 32 go to a rank
  uint32_t base;            // int32 [2 * rounds, N] slots of a rank that earlier rounds have taken
  uint32_t meta;            // uint64 [kWarps, 1 + K] what travels beside a warp's row; of one sent, with position 0
  uint32_t before_packets;  // int32 [N] tokens for a rank that are no packets
  uint32_t routed;          // int32 rounds that are
  uint32_t progress;        // int32 [kWarps] the round that a sending warp is in
  uint32_t plain;           // uint32 sending warps whose rows are all sent, but for packets
  uint32_t source_error;    // int32 [N] twResult_t
  uint32_t failed;          // int32 one of these is an error
  uint32_t table;           // uint32 [E + 1] where each expert is, if there are few; at last, of no rank
  uint32_t map;             // MapWords from kFirst on, without `several`, likewise
  uint32_t bytes;

  static DispatchScratch make(const Shape& shape);
};
struct DispatchParams {
  GroupView group;
  HandleView handle;
  IdsIn in;
  PayloadIn payloads[kMaxPayloads];
  Shown shown;
  int32_t lane;
  int32_t bank;  // that the rows must go to
  int32_t bound;
  int32_t tokens;
  int32_t rows;          // of an exact layout: that are shown, those beyond what comes too
  int32_t first_packet;  // token from which on rows travel as packets
  int32_t rehearses;     // whether blocks that send do, if the kernel comes early (dispatch/dispatch.cu)
  int32_t early;         // tiles of the last packets that the warps that route send, before any of the others
  int32_t send;
  int32_t receive;
  int32_t has_offsets;                      // rows go where handle.receive_offset says
  std::byte* receive_offset[kMaxPayloads];  // that of this rank; NULL: in the bank
  DispatchScratch at;
  Tiles tiles;
  WideTiles wide;  // of rows that are no packets
  PacketsAt packets;
  Roles roles;
  int32_t table;    // the expert table is kept in shared memory
  int32_t whole;    // payloads allow 8 bytes at a time
  int32_t counted;  // mix_counted
  int32_t layer;
  LoadsBlock loads_block;
  Kind kind;
};

inline constexpr int kFastPayloads = 2;

// `grid` blocks; `early`: see launch.h. A cudaError_t comes back as int, so that the host side needs no CUDA header.
int launch_dispatch(const DispatchParams& params, int grid, bool early, void* stream);
int launch_dispatch_placed(const DispatchParams& params, int grid, bool early, void* stream);
int launch_dispatch_packets(const DispatchParams& params, int grid, bool early, void* stream);

}  // namespace tw::cuda
