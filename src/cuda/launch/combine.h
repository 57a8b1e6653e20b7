// Combine kernels: what they take by value, and their launches.
#pragma once

#include <cstddef>
#include <cstdint>
#include "cuda/launch/group_view.h"
#include "cuda/launch/tiles.h"

namespace tw::cuda {

// A set is what one token's sum or one row's partial needs: every warp has one.
struct CombineScratch {
  uint32_t windows;     // std::byte* [N]
  uint32_t rows;        // const std::byte* [sets, K] the caller's rows of a partial, k ascending
  uint32_t weights;     // float [sets, K]
  uint32_t row_counts;  // int32 [sets]
  uint32_t places;      // const std::byte* [sets, F] where a term of a token's sum is found
  uint32_t kinds;       // int32 [sets, F]
  uint32_t from;        // Destination [sets, F] who sends it, and in which slot
  uint32_t first;       // int32 [N] of exact layouts: row where each source's begin; else 0
  uint32_t counts;      // int32 [N] received from each owner
  uint32_t sent_rows;   // int32 [N] sent to each rank
  uint32_t given;       // uint64 [kChunks] gate: it is known which chunk has this place (combine/chunks.cuh, Work)
  uint32_t sent;        // uint64 [kChunks] gate: all of it is
  uint32_t taken;       // int32 [kChunks] the chunk that has the place; -1: none is left
  uint32_t failed;      // int32 the step has
  uint32_t bytes;

  static CombineScratch make(const Shape& shape);
};

// The caller's rows of a combine; what their partials are made of: device/sum.cuh.
struct CombineParams {
  CombineScratch at;
  GroupView group;
  HandleView handle;
  Tiles tiles;
  WideTiles wide;   // of tokens' sums
  uint32_t single;  // by few SMs: whose next tile is this or a later one draws none beside it
  int32_t joins;    // blocks that have sent sum too
  PacketsAt packets;
  Roles roles;
  int32_t lane;
  int32_t bank;  // that the rows must go to, over a carrier; else -1
  int32_t bound;
  int32_t tokens;
  int32_t send;
  int32_t receive;
  int32_t expert_major;
  int32_t weighted;
  int32_t late_signal;  // rows lie in the window: publishing must follow their last read (S3)
  int32_t plain;        // a partial is one row, bit for bit
  Kind kind;
  int32_t tail_packets;   // of more rows for an owner than go as packets, the last so many do
  int32_t own_direct;     // this rank's own partials are made where they are summed
  int32_t vectors_fit;    // rows, inbox and output allow 16 bytes of the wire's type at a time
  int32_t words_fit;      // and 8
  int32_t sums_fit;       // vectors do, and rows are of the wire's type: partials are made of whole vectors
  int32_t word_sums_fit;  // likewise of words
  twDtype_t rows_dtype;
  twDtype_t wire_dtype;
  twDtype_t out_dtype;
  int64_t elements;
  const std::byte* rows;
  int64_t block_stride;
  int64_t row_stride;
  std::byte* out;
  int64_t out_stride;
  uint32_t vectors;      // of 16 bytes in a row
  uint32_t per_tile;     // of them in a tile of a sum
  uint32_t pushed;       // of them in a tile of a row that goes into an inbox
  int32_t pushed_parts;  // such tiles of a row
  int32_t turn_chunks;   // that are drawn together
  int32_t drawn;         // turns_ahead
  int32_t rehearses;     // whether blocks that send do, if the kernel comes early (dispatch/dispatch.cu)
};

// `grid` blocks; `early`: see launch.h. A cudaError_t comes back as int, so that the host side needs no CUDA header.
int launch_combine(const CombineParams& params, int grid, bool early, void* stream);
int launch_combine_packets(const CombineParams& params, int grid, bool early, void* stream);

}  // namespace tw::cuda
