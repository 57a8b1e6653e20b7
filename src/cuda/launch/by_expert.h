// A dispatch that puts rows straight to their experts: what its kernel takes by value, where a block keeps what it
// finds out, and the launch.
//
// The host fills both calls that the kernel stands for: `call`, a dispatch whose rows all are packets, and `view`, a
// copy by expert. plan/by_expert.cc decides whether one kernel does both, and fills the rest.
//
// What breaks if this changes: as in launch/dispatch.h and launch/view.h. Rows, ids, counts and places are those of the
// two kernels, bit for bit (S9).
#pragma once

#include "cuda/launch/dispatch.h"
#include "cuda/launch/view.h"

namespace tw::cuda {

// Most shared memory of a block, which every device has that the library is compiled for.
inline constexpr uint32_t kMostShared = 96 << 10;
inline constexpr int64_t kMostSlots = 2048;  // slots of all sources, as WindowMap has unpacked rows

inline constexpr uint32_t kByExpertGroups = 2;  // most groups of packets in a tile

// Places in shared memory behind those of DispatchScratch. Rows are numbered by source and slot, this rank's own by
// their tokens, which are in the same order.
struct ByExpertScratch {
  uint32_t came;     // int32 [N] rows of each source
  uint32_t mine;     // uint32 [b / 32] which of this rank's tokens go to itself
  uint32_t found;    // int32 warps that have found their rows' experts
  uint32_t begin;    // int32 [L + 1] packed: where an expert's rows begin
  uint32_t experts;  // int16 [N * b, kFastIds] the local expert of each id, -1 for none
  uint32_t bits;     // uint32 [L, pitch] which rows an expert has
  uint32_t before;   // uint16 [L, pitch] rows that it has in words before; at `words` all of them
  uint32_t words;    // of bits that an expert has
  uint32_t pitch;    // odd, so that the threads of a warp, an expert each, meet in no bank
  uint32_t bytes;

  static constexpr ByExpertScratch make(const Shape& shape, int32_t bound, int32_t local_experts, uint32_t begin) {
    const auto slots = static_cast<uint32_t>(shape.ranks) * static_cast<uint32_t>(bound);
    const auto experts = static_cast<uint32_t>(local_experts);
    ByExpertScratch at{};
    at.words = (slots + 31) / 32;
    at.pitch = (at.words + 1) | 1;
    at.came = begin;
    at.mine = at.came + 4 * static_cast<uint32_t>(shape.ranks);
    at.found = at.mine + 4 * ((static_cast<uint32_t>(bound) + 31) / 32);
    at.begin = at.found + 4;
    at.bits = at.begin + 4 * (experts + 1);
    at.experts = at.bits + 4 * experts * at.pitch;
    at.before = at.experts + 2 * static_cast<uint32_t>(kFastIds) * slots;
    at.bytes = at.before + 2 * experts * at.pitch;
    return at;
  }
};

struct ByExpertParams {
  DispatchParams call;
  ViewParams view;
  ByExpertScratch at;
  Divider rest;   // divides by the tiles of a row but the first
  Divider slots;  // divides by the bound
  Divider ranks;  // divides by the ranks
};

static_assert(sizeof(ByExpertParams) <= 4096, "a kernel takes no more");

// Launches call.roles' blocks, and one that gathers load statistics if there is one. A cudaError_t comes back as int.
int launch_dispatch_by_expert(const ByExpertParams& params, int grid, bool early, void* stream);

}  // namespace tw::cuda
