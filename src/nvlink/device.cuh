// Loads, stores and fences as the exchange means them. The memory model's words are PTX's (section 8 of its manual).
#pragma once

#include <cstddef>
#include <cstdint>

#include "nvlink/params.h"

namespace tw::nvlink {

struct alignas(16) Vec16 {
  uint64_t a, b;
};

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

// S4, both ways: cumulative, so it stands for every write that this thread has synchronised with.
__device__ inline void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Counts blocks; who gets the last number has synchronised with all of them.
__device__ inline uint32_t arrive(uint32_t* counter) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// ---- Lines: 16 bytes in one access, flag and data together. PTX does not promise that; the self-test looks.

__device__ inline void store_pair(void* to, uint64_t a, uint64_t b) {
  asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(a), "l"(b) : "memory");
}
__device__ inline Vec16 load_pair(const void* from) {
  Vec16 value;
  asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(value.a), "=l"(value.b) : "l"(from) : "memory");
  return value;
}

// ---- Rows. Inputs are read once and not written meanwhile; what peers wrote is read past the first-level cache.

template <class V>
__device__ inline V load_input(const void* from) {
  return __ldg(static_cast<const V*>(from));
}
template <>
__device__ inline uint4 load_input<uint4>(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
template <class V>
__device__ inline V load_received(const void* from) {
  return __ldcg(static_cast<const V*>(from));
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
  if (bytes >= 8 && reinterpret_cast<uintptr_t>(from) % 8 == 0) return load_input<unsigned long long>(from);
  uint64_t value = 0;
  for (int i = 0; i < 8 && i < bytes; ++i) {
    value |= static_cast<uint64_t>(load_input<unsigned char>(from + i)) << (8 * i);
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
