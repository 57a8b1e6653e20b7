// What every kernel of the exchange uses within a block: hand-overs in shared memory, loads past the first-level cache,
// a block's and a warp's share of the work, and small arithmetic.
//
// Takes parameters of kernels (Roles, Divider, HandleView); gives values, never waits for a peer.
//
// What breaks if this changes: S3 and S4. load_fresh must bypass the first-level cache, where a kernel that came onto
// the device early may find what an earlier kernel has replaced; shares_of must give each share to exactly one warp.
// warm() is speed alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/device/ptx.cuh"
#include "cuda/launch/group_view.h"
#include "cuda/launch/tiles.h"
#include "cuda/transport/store.cuh"

namespace tw::cuda {

// The thread's number in its warp.
__device__ inline int lane() { return static_cast<int>(threadIdx.x % 32); }
// The mask of the bits below one.
__device__ inline uint32_t below(int bit) { return (1u << bit) - 1; }

// Gives an array of the block in shared memory, by its offset.
template <class T>
__device__ inline T* shared_at(uint32_t offset) {
  return reinterpret_cast<T*>(shared_bytes() + offset);
}

// ---- Hand-overs between warps of a block in shared memory, without a barrier. They are atomic operations, which the
// language and its race checker know for the purpose; a fence (__threadfence_block) orders what goes with them.

__device__ inline int32_t peek(int32_t* at) { return atomicAdd(at, 0); }
__device__ inline void put(int32_t* at, int32_t value) { atomicExch(at, value); }
// Peeks for a whole warp. Threads that make an atomic operation at one place take turns, and a combine of 1024 tokens
// in which all threads of a warp did so took twice as long.
__device__ inline int32_t peek_once(int32_t* at) {
  const int32_t value = lane() == 0 ? peek(at) : 0;
  return __shfl_sync(~0u, value, 0);
}

// ---- The begin of a kernel

// Reads a kernel's parameters ahead of their use. Constants are cold when a kernel starts, and each 64 bytes that are
// met one after the other cost 40 ns; here that passes while the previous kernel runs. `bytes`: the part that most
// calls use.
template <class Params>
__device__ inline void warm(const Params& params, size_t bytes = sizeof(Params)) {
  const auto* const words = reinterpret_cast<const uint32_t*>(&params);
#pragma unroll
  for (size_t i = 0; i < bytes / 64; ++i) pin_read(words[16 * i]);
}

// ---- Loads of what earlier kernels and peers wrote. They go past the first-level cache, where a kernel that comes
// onto the device early may find what it held before. They are volatile, so the compiler moves none to before
// await_earlier.

template <class V>
__device__ inline V load_fresh(const void* from) {
  return __ldcg(static_cast<const V*>(from));
}
template <>
__device__ inline Vec16 load_fresh<Vec16>(const void* from) {
  const ulonglong2 value = __ldcg(static_cast<const ulonglong2*>(from));
  return {value.x, value.y};
}

// Copies what an earlier kernel has left, by as many threads as `step`, of which this one is `first`; by the widest
// accesses that all three allow.
template <class V>
__device__ inline void copy_as(const std::byte* from, std::byte* to, uint64_t bytes, uint64_t first, uint64_t step) {
  constexpr int kAtOnce = 4;  // on their way: with one, 8 SMs put the rows of an exact layout together at 20 GB/s
  const uint64_t count = bytes / sizeof(V);
  uint64_t i = first;
#pragma unroll 1
  for (; i + (kAtOnce - 1) * step < count; i += kAtOnce * step) {
    V values[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) values[k] = load_fresh<V>(from + (i + k * step) * sizeof(V));
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) put_data(reinterpret_cast<V*>(to) + i + k * step, values[k]);
  }
#pragma unroll 1
  for (; i < count; i += step) put_data(reinterpret_cast<V*>(to) + i, load_fresh<V>(from + i * sizeof(V)));
}
__device__ inline void copy_bytes(const std::byte* from, std::byte* to, uint64_t bytes, uint64_t first, uint64_t step) {
  const uint64_t all = bytes | reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to);
  if (all % 16 == 0) return copy_as<uint4>(from, to, bytes, first, step);
  if (all % 4 == 0) return copy_as<uint32_t>(from, to, bytes, first, step);
  copy_as<unsigned char>(from, to, bytes, first, step);
}

// Gives the sum of a warp's values up to and including this thread's.
template <class T>
__device__ inline T sum_through(T value) {
  for (int by = 1; by < 32; by *= 2) {
    const T other = __shfl_sync(~0u, value, max(lane() - by, 0));
    if (lane() >= by) value += other;
  }
  return value;
}

// Loads two int32 that lie together, as {a, b} of a T.
template <class T>
__device__ inline T load_both(const T* from) {
  const uint64_t both = load_fresh<unsigned long long>(from);
  return {static_cast<int32_t>(both), static_cast<int32_t>(both >> 32)};
}

// Gives what a handle keeps of a received row: its ids, and behind them its weights.
__device__ inline const int32_t* kept_ids(const HandleView& handle, int top_k, int64_t row) {
  return reinterpret_cast<const int32_t*>(handle.meta + row * (1 + top_k) + 1);
}

// Fills the table of where experts are, [E + 1]; the last entry is of no rank, for ids that are none. By a block of
// `threads` threads. The tables change only while no kernel of this rank runs, so they are there before a kernel waits
// for the previous one.
__device__ inline void fill_experts(const GroupView& g, uint32_t* table, int threads) {
  const int experts = g.map.shape().experts;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i <= experts; i += threads) {
    table[i] = i < experts ? g.experts[i] : kNoExpert;
  }
}

// ---- A block's part of the work

// Whether this block sends, or receives; where roles are not apart it does both.
__device__ inline bool is_sender(const Roles& roles) {
  return !roles.apart || blockIdx.x < static_cast<uint32_t>(roles.sending);
}
__device__ inline bool is_receiver(const Roles& roles) { return !roles.apart || !is_sender(roles); }
__device__ inline uint32_t first_receiver(const Roles& roles) {
  return roles.apart ? static_cast<uint32_t>(roles.sending) : 0;
}
// A warp's share of what is to be sent or received: its first tile, and the distance to its next. Warps of a block
// begin far apart.
struct Shares {
  uint32_t first;
  uint32_t step;
};
__device__ inline Shares shares_of(uint32_t block, int blocks) {
  return {block + threadIdx.x / 32 * static_cast<uint32_t>(blocks), static_cast<uint32_t>(kWarps * blocks)};
}
__device__ inline Shares sent_shares(const Roles& roles) { return shares_of(blockIdx.x, roles.sending); }
__device__ inline Shares received_shares(const Roles& roles) {
  return shares_of(blockIdx.x - first_receiver(roles), roles.receiving);
}

// Gives x / by for x that is not negative. Most calls divide by one (one other rank, chunks of a row), and a division
// is some 25 instructions, which a kernel meets before it sends anything.
__device__ inline int quotient(int x, int by) { return by == 1 ? x : x / by; }

// Gives x / by for x < 2^31: launch/tiles.h, Divider.
__device__ inline uint32_t divide(uint32_t x, const Divider& by) {
  if (by.divisor == 1) return x;
  const uint32_t high = __umulhi(x, by.factor);
  return (high + ((x - high) >> 1)) >> (by.shift - 1);
}

// Loads 8 bytes at any address, of which `bytes` (up to 8) exist; the rest reads as 0.
__device__ inline uint64_t load_bytes(const std::byte* from, int64_t bytes) {
  if (bytes >= 8 && reinterpret_cast<uintptr_t>(from) % 8 == 0) return load_fresh<unsigned long long>(from);
  uint64_t value = 0;
  for (int i = 0; i < 8 && i < bytes; ++i) {
    value |= static_cast<uint64_t>(load_fresh<unsigned char>(from + i)) << (8 * i);
  }
  return value;
}
__device__ inline void store_bytes(std::byte* to, uint64_t value, int64_t bytes) {
  if (bytes >= 8 && reinterpret_cast<uintptr_t>(to) % 8 == 0) {
    put_data(reinterpret_cast<uint64_t*>(to), value);
    return;
  }
  for (int i = 0; i < 8 && i < bytes; ++i) put_data(to + i, static_cast<std::byte>(value >> (8 * i)));
}

}  // namespace tw::cuda
