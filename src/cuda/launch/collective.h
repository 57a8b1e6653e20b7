// Gathers and reduce-scatters: what their kernels take by value, and their launches.
#pragma once

#include <cstddef>
#include <cstdint>
#include "cuda/launch/group_view.h"
#include "cuda/launch/tiles.h"
#include "layout/collective_map.h"

namespace tw::cuda {

// One tensor of a gather or reduce.
struct CollectiveRows {
  const std::byte* in;
  int64_t block_stride;  // bytes; of a gather 0, and of flat rows that follow each other
  int64_t row_stride;
  std::byte* out;  // NULL: not wanted but in the window
  int64_t out_stride;
  uint64_t begin;  // in a bank
  uint32_t row_bytes;
  uint32_t elements;
  uint32_t first_word;  // in a row's stream of packets
  uint32_t parts;       // of a row that lies in the window: each of kPushedVectors
  int32_t width;        // bytes that every access may take: 16, 4 or 1
  twDtype_t from;
  twDtype_t to;
};

// Places in shared memory. The last four are what combine/chunks.cuh uses.
struct CollectiveScratch {
  uint32_t windows;  // std::byte* [N]
  uint32_t sizes;    // int32 [N] rows that are each rank's own, as far as they are known
  uint32_t first;    // int32 [N + 1] row of flat tensors where each rank's begin; else what there is instead
  uint32_t came;     // int32 [N] as words tell it
  uint32_t failed;   // int32 the step has
  uint32_t given;    // uint64 [kChunks]
  uint32_t sent;     // uint64 [kChunks]
  uint32_t taken;    // int32 [kChunks]
  uint32_t bytes;

  static CollectiveScratch make(const Shape& shape);
};

struct CollectiveParams {
  CollectiveScratch at;
  GroupView group;
  Tiles tiles;
  PacketsAt packets;
  Roles roles;
  int32_t lane;
  int32_t bank;  // that the rows must go to; -1: any
  int32_t bound;
  int32_t send;
  int32_t receive;
  int32_t reduces;
  int32_t flat;         // the rows of all ranks
  int32_t by_packets;   // all rows travel as packets
  int32_t late_signal;  // publishing must follow all reads and stores: rows lie in the window, or are seen there
  int32_t own_pushed;   // this rank's own rows go through its window, as others' do
  int32_t own_sent;     // who sends a gather's packets also puts this rank's own rows where they belong
  int32_t usual;        // one tensor, of vectors, or of words where all rows are packets; and sums of its own type
  int32_t tensors;
  int32_t chunk_rows;
  int32_t pushed_parts;  // of a row of all tensors
  int32_t turn_chunks;   // that are drawn together
  int32_t drawn;         // turns_ahead
  uint32_t digest;
  int32_t all_sizes;
  int32_t wide_sizes;    // int64
  const void* sizes_at;  // NULL: the host knows them
  int32_t* counts;
  int32_t* offsets;
  CollectiveRows rows[kMaxPayloads];  // few calls use more than the first: collective/collective.cuh warms no others
  int32_t sizes[kMostHostSizes];
};

// `grid` blocks; `early`: see launch.h. A cudaError_t comes back as int, so that the host side needs no CUDA header.
int launch_gather(const CollectiveParams& params, int grid, bool early, void* stream);
int launch_reduce(const CollectiveParams& params, int grid, bool early, void* stream);

}  // namespace tw::cuda
