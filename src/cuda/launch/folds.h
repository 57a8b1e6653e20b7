// Partials that are folded on the host that sends them, where a group sums by domain and domains are hosts
// (transport/posted.h): parameters and launches.
//
// Behind the kernel that has written a combine's partials, launch_tags notes which token's each is, launch_post serves
// all but the owners for whom this rank folds, launch_fold waits for the ranks of this host, folds their partials for
// these owners and lays out a message to each, and launch_post sends it. At the owner launch_unfold, behind all
// signals, puts each fold where the partial of the first of its ranks would be.
//
// What breaks if this changes: S9 (which partials a fold has, in which order, and that it is rounded to the type that
// travels) and T2 (mates' partials are read before this rank's next signal).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/launch/posts.h"
#include "exchange/domains.h"

namespace tw::cuda {

// What a combine returns: metadata of the rows that came in its dispatch, and the type of their partials.
struct ReturnedRows {
  const uint64_t* meta;  // [.., words], of each the header first
  const int64_t* first;  // exact layouts: [N] the row at which those of a source begin; NULL: every `bound` rows
  int32_t words;
  twDtype_t wire;
};

// Of the three kernels. post.regions[0] has the partials; post.sent, for launch_unfold, the tokens of this rank.
struct FoldParams {
  PostParams post;
  ReturnedRows returned;
  NearPlace partials;   // post.regions[0].from, in the memory of ranks of this host
  std::byte* tags;      // this rank's, in bank 0
  NearPlace near_tags;  // the same, of ranks of this host
  uint64_t tags_bank;   // bytes from bank 0 to bank 1
  int32_t tokens;       // a rank has at most, and so many tags
  int32_t local;        // ranks of each host, neighbours
};

// All return a cudaError_t as int, load_folds that of loading the kernels. blocks: that may work at once.
int load_folds();
int launch_tags(const FoldParams& params, int blocks, void* stream);
int launch_fold(const FoldParams& params, int blocks, void* stream);
int launch_unfold(const FoldParams& params, int blocks, void* stream);

}  // namespace tw::cuda
