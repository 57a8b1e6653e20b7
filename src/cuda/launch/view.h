// Copies out of the window, into outputs that the caller gave: what their kernels take by value, and the two launches.
//
// launch_rank_view copies rows as they lie, by source (rank_major); launch_expert_view sorts them by expert
// (expert_major and grouped); launch_index_lists and launch_source_counts copy nothing, and tell which rows are whose.
// They wait for no peer: they follow the dispatch in stream order.
//
// What breaks if this changes: the copies read the bank of the step that ended, before the channel's next step
// publishes (S3); the order of rows by expert is that of docs/PROTOCOL.md (S9). Grids and widths are speed alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include "cuda/launch/group_view.h"
#include "cuda/launch/tiles.h"
#include "views/columns.h"
#include "views/index_lists.h"

namespace tw::cuda {

// The rows that a dispatch has brought, as the kernels behind it see them.
struct ArrivedParams {
  GroupView group;
  HandleView handle;
  int32_t channel;
  int32_t bound;
  Divider ids;    // divides by the ids of a row
  Divider pairs;  // divides by half of that, the pairs of ids
  Divider slots;  // divides by the slots of a source
};

// One copy as its kernel sees it: into rank_major outputs that the caller gave, or into expert_major or grouped ones.
struct ViewParams : ArrivedParams {
  std::byte* payloads[kMaxPayloads];  // NULL: not wanted
  // Where each payload's rows begin, by bank. The host works it out, as kernels take some ten cycles for each
  // instruction that they meet for the first time.
  const std::byte* from[2][kMaxPayloads];
  int32_t width[kMaxPayloads];
  uint32_t vectors[kMaxPayloads];  // vectors of `width` bytes in a row
  Columns columns[kMaxPayloads];
  Shown shown;       // by expert: [L, N*b] or grouped; the counts are handle.expert_counts and `counts`
  int32_t* offsets;  // grouped: [L + 1], NULL: not wanted
  int64_t* origins;  // by expert, NULL: not wanted
  int32_t rows;      // grouped: rows that are shown, which are more than those that come
  // The grouped of low latency: each expert's rows begin at a multiple of this, as the kernel finds out. Else 0.
  int32_t alignment;
};

// The index lists of a rank_major or flat view.
struct IndexParams : ArrivedParams {
  IndexLists lists;
  Divider block;  // divides by the places of a block
  // [blocks of the kernel, L] of a channel, list_words of them: how many choices each expert has among the rows of each
  // block, which a kernel in front counts where there may be many. NULL: there is no memory, or none is needed.
  int32_t* counted;
};
inline constexpr int kCountedBlocks = 128;    // most blocks of which each has counts
inline constexpr int kCountedExperts = 4096;  // most experts of a rank that are counted so
constexpr int64_t list_words(int32_t local_experts) {
  return local_experts <= kCountedExperts ? int64_t{kCountedBlocks} * local_experts : 0;
}

// How many rows of each expert came from each source.
struct SourceCountsParams : ArrivedParams {
  int32_t* counts;  // [L, N]
};

// All launch at most `grid` blocks; `early`: see launch.h. A cudaError_t comes back as int, so that the host side needs
// no CUDA header.
int launch_rank_view(const ViewParams& params, int grid, bool early, void* stream);
int launch_expert_view(const ViewParams& params, int grid, bool early, void* stream);
int launch_index_lists(const IndexParams& params, int grid, bool early, void* stream);
int launch_source_counts(const SourceCountsParams& params, int grid, bool early, void* stream);

}  // namespace tw::cuda
