// Loads, stores and fences as the exchange means them. The memory model's words are PTX's (section 8 of its manual).
#pragma once

#include <cstddef>
#include <cstdint>

#include "nvlink/params.h"

namespace tw::nvlink {

struct alignas(16) Vec16 {
  uint64_t a, b;
};

__device__ inline int lane() { return static_cast<int>(threadIdx.x % 32); }
__device__ inline uint32_t below(int bit) { return (1u << bit) - 1; }
// 0 beyond the 32nd.
__device__ inline uint32_t bit_of(int bit) {
  uint32_t mask;
  asm("shl.b32 %0, 1, %1;" : "=r"(mask) : "r"(bit));
  return mask;
}

// ---- Words between ranks: relaxed, ordered by fences alone, one fence for many of them.

__device__ inline void store_word(void* to, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ inline uint64_t load_word(const void* from) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
__device__ inline uint32_t load_half(const void* from) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ inline void store_half(void* to, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// S4, the reader's side: what was written before the word can be read after this. Dearer fences are not needed for it.
__device__ inline uint64_t load_acquire(const void* from) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

// S4, both ways: cumulative, so it stands for every write that this thread has synchronised with.
__device__ inline void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Counts blocks; who gets the last number has synchronised with all of them.
__device__ inline uint32_t arrive(uint32_t* counter) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// ---- Lines: 16 bytes in one access, flag and data together. PTX does not promise that; the self-test looks. Eight
// threads must make it in one instruction, and that they are together there is not promised either: __syncwarp does not
// do it. So they look (lines.cuh). (Of a torn line all words are old but the one that the flag's thread has.)

__device__ inline void store_pair(void* to, uint64_t a, uint64_t b) {
  asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(a), "l"(b) : "memory");
}
__device__ inline Vec16 load_pair(const void* from) {
  Vec16 value;
  asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(value.a), "=l"(value.b) : "l"(from) : "memory");
  return value;
}

// ---- What warps of a block hand to each other in shared memory without a barrier. Atomic operations, since these are
// what the language and its race checker know for it; a fence (__threadfence_block) orders what goes with them.

__device__ inline int32_t peek(int32_t* at) { return atomicAdd(at, 0); }
__device__ inline void put(int32_t* at, int32_t value) { atomicExch(at, value); }
// By a warp: threads that make an atomic operation at one place take turns, and a combine of 1024 tokens in which all
// of a warp's did so took twice as long.
__device__ inline int32_t peek_once(int32_t* at) {
  const int32_t value = lane() == 0 ? peek(at) : 0;
  return __shfl_sync(~0u, value, 0);
}

// Has a value worked out here: the compiler would do it where it is used, which may be where somebody waits.
template <class... T>
__device__ inline void pin(T&... values) {
  const auto one = [](auto& value) {
    if constexpr (sizeof(value) == 8) {
      asm volatile("" : "+l"(value));
    } else {
      asm volatile("" : "+r"(value));
    }
  };
  (one(values), ...);
}

// ---- Parts of a block, and kernels that follow each other.

// Of a block. Warps need not be together: the barrier counts threads. __syncwarp would not bring a warp together
// either: nvcc lets it run what comes next in the parts in which it came.
__device__ inline void meet() { asm volatile("barrier.cta.sync 0;" ::: "memory"); }

// Programmatic dependent launch: the next kernel's blocks may come onto the device, where they find room; and this one
// touches nothing that an earlier kernel may use before that one has ended (S3). Nothing, in a plain launch.
__device__ inline void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Constants are cold when a kernel starts, 40 ns for each 64 bytes that are met one after the other; here that passes
// while the kernel before runs.
template <class Params>
__device__ inline void warm(const Params& params) {
  const auto* const words = reinterpret_cast<const uint32_t*>(&params);
#pragma unroll
  for (size_t i = 0; i < sizeof(Params) / 64; ++i) asm volatile("" ::"r"(words[16 * i]));
}
__device__ inline void await_earlier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- What earlier kernels and peers wrote is read past the first-level cache: a kernel that comes onto the device
// early may find there what it held before. The loads are volatile, so the compiler moves none to before await_earlier.

template <class V>
__device__ inline V load_fresh(const void* from) {
  return __ldcg(static_cast<const V*>(from));
}
template <>
__device__ inline Vec16 load_fresh<Vec16>(const void* from) {
  const ulonglong2 value = __ldcg(static_cast<const ulonglong2*>(from));
  return {value.x, value.y};
}

// ---- A block's part of the work.

__device__ inline bool is_sender(const Roles& roles) {
  return !roles.apart || blockIdx.x < static_cast<uint32_t>(roles.sending);
}
__device__ inline bool is_receiver(const Roles& roles) { return !roles.apart || !is_sender(roles); }
__device__ inline uint32_t first_receiver(const Roles& roles) {
  return roles.apart ? static_cast<uint32_t>(roles.sending) : 0;
}
// A warp's share of what is to be sent, or to be received: from which on, and how far to the next. Warps of a block are
// far apart.
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

__device__ inline uint64_t now_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

__device__ inline uint32_t divide(uint32_t x, const Divider& by) {
  if (by.divisor == 1) return x;
  const uint32_t high = __umulhi(x, by.factor);
  return (high + ((x - high) >> 1)) >> (by.shift - 1);
}

// 8 bytes at any address, of which `bytes` (up to 8) exist; the rest reads as 0.
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
    *reinterpret_cast<uint64_t*>(to) = value;
    return;
  }
  for (int i = 0; i < 8 && i < bytes; ++i) to[i] = static_cast<std::byte>(value >> (8 * i));
}

}  // namespace tw::nvlink
