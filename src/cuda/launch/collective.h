// Gathers and reduce-scatters: what their kernels take by value, and the two launches.
//
// The host fills CollectiveParams: host/collectives.cc from the call, plan/collective.cc tiles, roles and packets. The
// kernels in collective/ read it and change nothing of it.
//
// What breaks if this changes: all ranks must agree on by_packets, packets.row and chunk_rows, else packets and chunk
// signals are looked for where nobody writes them (S4, S10); late_signal and own_pushed keep S3; the rest is speed.
#pragma once

#include <cstddef>
#include <cstdint>
#include "cuda/launch/group_view.h"
#include "cuda/launch/tiles.h"
#include "exchange/token_replicas.h"
#include "layout/collective_map.h"

namespace tw::cuda {

// One tensor of a gather or reduce.
struct CollectiveRows {
  const std::byte* in;
  int64_t block_stride;  // bytes; 0 in a gather and for flat rows, which follow each other
  int64_t row_stride;
  std::byte* out;  // NULL: the caller reads the rows in the window
  int64_t out_stride;
  uint64_t begin;  // offset in a bank
  uint32_t row_bytes;
  uint32_t elements;
  uint32_t first_word;  // its first word in a row's stream of packets
  uint32_t parts;       // tiles of a row that lies in the window, of kPushedVectors each
  int32_t width;        // bytes that every access may take: 16, 4 or 1
  twDtype_t from;
  twDtype_t to;
};

// Places in shared memory. The last four are what combine/chunks.cuh uses.
struct CollectiveScratch {
  uint32_t windows;  // std::byte* [N]
  uint32_t sizes;    // int32 [N] rows that are each rank's own, as far as they are known
  uint32_t first;    // int32 [N + 1] row of the tensor of all at which each rank's rows begin
  uint32_t came;     // int32 [N] rows that each rank's signal announces
  uint32_t failed;   // int32 1: the step has failed
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
  int32_t channel;
  int32_t bank;  // the bank that the rows must go to; -1: any
  int32_t bound;
  int32_t send;
  int32_t receive;
  int32_t reduces;
  int32_t flat;         // the tensor of all ranks' rows is flat: these follow each other without gaps
  int32_t by_packets;   // all rows travel as packets
  int32_t late_signal;  // publishing must follow all reads and stores (S3): rows lie in the window, or are seen there
  int32_t own_pushed;   // this rank's own rows go through its window, as others' do
  int32_t own_sent;     // the warps that send a gather's packets also put this rank's own rows where they belong
  int32_t usual;        // one tensor, of vectors (of words where all rows are packets), and sums are of its own type
  int32_t tensors;
  int32_t chunk_rows;
  int32_t pushed_parts;  // tiles of a row of all tensors together
  int32_t turn_chunks;   // chunks that are drawn together
  int32_t drawn;         // turns that a block draws ahead: turns_ahead
  uint32_t digest;
  int32_t all_sizes;
  int32_t wide_sizes;    // int64
  const void* sizes_at;  // NULL: the host knows them
  int32_t* counts;
  int32_t* offsets;
  CollectiveRows rows[kMaxPayloads];  // few calls use more than the first, so collective/collective.cuh warms no others
  int32_t sizes[kMostHostSizes];
};

// What token replicas share, and with whom. Rows are [T, row] where they lie and where they go, so `in` is `out`, and a
// place of the set has its share of them. block_stride is the distance of rows in a bank.
struct SharingParams : CollectiveParams {
  ReplicaSet replicas;
  int32_t all_tokens;     // T
  int32_t parts;          // of the combine: behind several a combine that failed is known by its channel
  const uint32_t* sums;   // [kDigestBlocks]
  const int32_t* status;  // of the dispatch that was combined
};

// What the digest of a routing is made from: all ids and weights of the caller.
struct DigestParams {
  const void* ids;
  const float* weights;  // NULL: all 1
  int64_t id_stride[2];
  int64_t weight_stride[2];
  int64_t choices;  // T * K
  int32_t top_k;
  int32_t wide;    // int64
  uint32_t* sums;  // [kDigestBlocks]
};

// Both launch `grid` blocks; `early`: see launch.h. A cudaError_t comes back as int, so that the host side needs no
// CUDA header.
int launch_gather(const CollectiveParams& params, int grid, bool early, void* stream);
int launch_reduce(const CollectiveParams& params, int grid, bool early, void* stream);
int launch_sharing(const SharingParams& params, int grid, bool early, void* stream);
int launch_digest(const DigestParams& params, void* stream);

}  // namespace tw::cuda
