// Runs CUDA kernels on the CPU, so that what they do can be tested where there is no GPU.
//
// A thread of a kernel is a fiber, a block is a thread of the operating system, so blocks and ranks run at the same
// time and are preempted anywhere; what happens within a block happens one fiber at a time. A fiber goes on until it
// waits: for its warp, for its block, or in vain for memory. This is CUDA's independent thread scheduling (programming
// guide, section on the Volta architecture): nothing but what a kernel asks for brings threads of a warp together.
// Collectives whose masks do not agree, and barriers that can never open, end the process with a sentence.
//
// What it does not show: times, a memory model weaker than the CPU's, what the compiler makes of a kernel.
#pragma once

#include <cstdint>
#include <functional>

#include <vector_types.h>

namespace tw::emulator {

// Where the running fiber is.
struct Place {
  uint3 thread;
  uint3 block;
  dim3 threads;
  dim3 blocks;
};
const Place& place();

// The block's shared memory.
inline constexpr unsigned kSharedBytes = 227 * 1024;
void* shared_bytes();

// Lets the others of the block go on: the running fiber waits in vain.
void poll();
// Sometimes does so, where a warp may be held up on a GPU too.
void maybe_poll();

// ---- Collectives of a warp's threads; all that `mask` names must come.
enum class Collective { kMeet, kBallot, kShuffle, kMatch, kMax };
// kShuffle: `argument` is the lane whose value is wanted.
uint64_t collect(Collective kind, uint32_t mask, uint64_t value, uint32_t argument = 0);

// ---- Of all threads of a block that have not ended.
struct Votes {
  bool any;
  bool all;
};
Votes meet_block(bool vote);

// ---- Accesses that the threads of a warp make in one instruction where they are together, which is when each of them
// waits for something or has come here: first what a packet's flag comes with, its last 16 bytes.
struct Pair {
  uint64_t a, b;
};
uint32_t together();
Pair load_together(const void* from);
void store_together(void* to, Pair value);

// ---- A kernel, on a stream: cudaLaunchKernelEx. `name` for messages.
void launch(void* stream, dim3 blocks, dim3 threads, uint32_t shared, std::function<void()> kernel, const char* name);

// Runs a grid; returns when it has ended. `at_once`: blocks that the device holds at a time.
void run_grid(dim3 blocks, dim3 threads, uint32_t shared, const std::function<void()>& kernel, const char* name,
              unsigned at_once);

}  // namespace tw::emulator
