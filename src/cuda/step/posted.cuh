// What kernels that post and those that pull know of a step's blocks (step/post.cu, step/pull.cu). Takes PostParams;
// gives where a rank's block of a region lies, here and there, and what this rank's signals tell.
//
// What breaks if this changes: S10. A rank's block is looked for where its peer puts it.
#pragma once

#include "cuda/device/wait.cuh"
#include "cuda/launch/posts.h"

namespace tw::cuda {

__device__ inline NetPlace beyond(const NetPlace& place, uint64_t bytes) {
  return {place.memory, place.offset + bytes};
}

// Whether rows come with a signal, and not only word that there are none.
__device__ inline bool brings(Mode mode) {
  return mode != Mode::kRefused && mode != Mode::kSkip && mode != Mode::kNone;
}

// What this rank's outgoing signal for a rank says.
__device__ inline Signal told_of(const GroupView& g, const PostSignals& signals, int bank, int rank) {
  return unpack(load_word(signals.at + g.posts * bank + kSignalStride * static_cast<uint64_t>(rank)));
}

// Whether the kernel before has made the step, which this rank's outgoing signal for a rank then tells. Behind an
// error, or a dispatch that failed, it has made none, as on all ranks.
__device__ inline bool is_made(const Signal& told, uint64_t number) {
  return told.step == static_cast<uint32_t>(number) && told.mode != Mode::kNone;
}

// Where the block for a rank is in a region here, and where the block of a rank is in that of a window: bytes from
// where the region begins.
__device__ inline uint64_t block_here(const PostRegion& region, int bank, int rank) {
  return region.bank_here * static_cast<uint64_t>(bank) + region.block * static_cast<uint64_t>(rank);
}
__device__ inline uint64_t block_there(const PostRegion& region, int bank, int rank) {
  return region.bank_there * static_cast<uint64_t>(bank) + region.block * static_cast<uint64_t>(rank);
}

// Where a message is among those that go out, and among the lists of an inbox; likewise.
__device__ inline uint64_t message_here(const HostRows& once, int bank, int message) {
  return once.bank_here * static_cast<uint64_t>(bank) + once.message * static_cast<uint64_t>(message);
}
__device__ inline uint64_t message_there(const HostRows& once, int bank, int list) {
  return once.bank_there * static_cast<uint64_t>(bank) + once.message * static_cast<uint64_t>(list);
}

}  // namespace tw::cuda
