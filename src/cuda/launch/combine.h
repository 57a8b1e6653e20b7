// Combines: what their kernels take by value, where a block keeps its working arrays, and the two launches.
//
// The host fills CombineParams: host/ from the call, plan/combine.cc kind, tiles, roles and turns. The kernels in
// combine/ read it and change nothing of it.
//
// What breaks if this changes: tail_packets must be alike on all ranks, else owner and sender disagree which rows come
// as packets (S4, S10); late_signal keeps S3; weighted, expert_major and the dtypes decide the bits of results; the
// rest is speed.
#pragma once

#include <cstddef>
#include <cstdint>
#include "cuda/launch/group_view.h"
#include "cuda/launch/tiles.h"

namespace tw::cuda {

// Places in shared memory. A set is what one token's sum or one row's partial needs; every warp has one.
struct CombineScratch {
  uint32_t windows;     // std::byte* [N]
  uint32_t rows;        // const std::byte* [sets, K] the caller's rows of a partial, k ascending
  uint32_t weights;     // float [sets, K]
  uint32_t row_counts;  // int32 [sets]
  uint32_t places;      // const std::byte* [sets, F] where each term of a token's sum is found
  uint32_t kinds;       // int32 [sets, F]
  uint32_t from;        // Destination [sets, F] who sends the term, and from which slot
  uint32_t first;       // int32 [N] exact layouts: the row at which each source's rows begin; otherwise 0
  uint32_t counts;      // int32 [N] received from each owner
  uint32_t sent_rows;   // int32 [2, N] sent to each rank, and the slot of the first of these
  uint32_t given;       // uint64 [kChunks] gate: opens when this place has a chunk (combine/chunks.cuh, Work)
  uint32_t sent;        // uint64 [kChunks] gate: opens when all of that chunk is sent
  uint32_t taken;       // int32 [kChunks] the chunk that has the place; -1: none is left
  uint32_t failed;      // int32 1: the step has failed
  uint32_t bytes;

  static CombineScratch make(const Shape& shape);
};

// The tokens that a kernel combines, where a combine takes parts: `tokens`, rows and counts of CombineParams are those
// of its part, and `fan` and `destinations` of the handle and `out` begin at its first token.
struct PartOfCombine {
  const int32_t* counts;  // DeviceArrays::part_counts; NULL: the combine is one part
  int32_t number;
  int32_t begin;        // its first token, at any rank
  int32_t first_token;  // the same, but at most all_tokens
  int32_t all_tokens;   // of this rank, in all parts
  int32_t skips;        // 1: a step is left out before it, which the kernel that sends makes (S2)
};

// One combine as its kernel sees it. What partials are made of is told in device/sum.cuh.
struct CombineParams {
  CombineScratch at;
  GroupView group;
  HandleView handle;
  Tiles tiles;
  WideTiles wide;   // for the sums of tokens
  uint32_t single;  // low-SM kernels: a warp whose next tile is this one or a later one draws no second one beside it
  int32_t joins;    // 1: blocks that have sent their rows then sum too
  PacketsAt packets;
  Roles roles;
  int32_t channel;
  int32_t bank;  // the bank that the rows must go to, over a staged transport; else -1
  int32_t bound;
  int32_t tokens;
  int32_t send;
  int32_t receive;
  int32_t expert_major;
  int32_t weighted;
  int32_t late_signal;  // rows lie where peers will write: publishing must follow their last read (S3)
  int32_t plain;        // a partial is one row, bit for bit
  Kind kind;
  int32_t tail_packets;   // where more rows go to an owner than the packet bound, the last so many go as packets
  int32_t own_direct;     // this rank's own partials are made where they are summed
  int32_t vectors_fit;    // rows, inbox and output allow accesses of 16 bytes of the wire's type
  int32_t words_fit;      // the same for 8 bytes
  int32_t sums_fit;       // vectors_fit, and rows are of the wire's type: partials are made of whole vectors
  int32_t word_sums_fit;  // the same for words of 8 bytes
  uint32_t rows_digest;   // what rows consist of (mix_rows); 0: the group's own
  twDtype_t rows_dtype;
  twDtype_t wire_dtype;
  twDtype_t out_dtype;
  int64_t elements;
  const std::byte* rows;
  int64_t block_stride;
  int64_t row_stride;
  std::byte* out;
  int64_t out_stride;
  uint32_t vectors;      // vectors of 16 bytes in a row
  uint32_t per_tile;     // vectors in a tile of a sum
  uint32_t pushed;       // vectors in a tile of a row that goes into an inbox
  int32_t pushed_parts;  // such tiles in a row
  int32_t turn_chunks;   // chunks that are drawn together
  int32_t drawn;         // turns that a block draws ahead: turns_ahead
  int32_t rehearses;     // blocks that send rehearse if the kernel comes early (dispatch/dispatch.cu)
  PartOfCombine part;    // last, so that kernels for whole combines find what they read where it was without parts
};

// A combine whose rows return as e4m3 with scales (layout/fp8_rows.h). It has a kernel of its own, which takes this, so
// that the parameters of all others are as they were. Of `call` it does not read what is about packets and about words
// of the wire: no row is a packet, and p.tiles.per_row and p.pushed_parts count tiles of kFp8Tile elements.
struct Fp8Params {
  CombineParams call;    // vectors_fit: sums may be stored 16 bytes at a time; sums_fit: rows may be loaded so
  float scale;           // of all elements; 0: each block of 128 has its own
  uint32_t scales_from;  // bytes of a row before its scales
  int32_t fast;          // 1: the instance for usual calls serves (combine/fp8.cu, kFast)
};
inline constexpr uint32_t kFp8Tile = 1024;  // elements of a tile, which one warp quantises or sums

// The rows of each part, counted: fills DeviceArrays::part_counts.
struct PartsParams {
  GroupView group;
  HandleView handle;
  int32_t* counts;
  int32_t tokens;
  int32_t parts;
};

// launch_parts launches what it needs. The others launch `grid` blocks; `early`: see launch.h. A cudaError_t comes back
// as int, so that the host side needs no CUDA header.
int launch_combine(const CombineParams& params, int grid, bool early, void* stream);
int launch_combine_packets(const CombineParams& params, int grid, bool early, void* stream);
int launch_combine_fp8(const Fp8Params& params, int grid, bool early, void* stream);
int launch_parts(const PartsParams& params, void* stream);

}  // namespace tw::cuda
