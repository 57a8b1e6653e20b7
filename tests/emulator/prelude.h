// CUDA's words for device code, for a compiler of C++: what nvcc knows by itself. Included before every source.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "machine.h"

#undef __shared__
#define __shared__
#undef __grid_constant__
#define __grid_constant__
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __noinline__
#define __noinline__
#undef __forceinline__
#define __forceinline__
#define threadIdx (::tw::emulator::place().thread)
#define blockIdx (::tw::emulator::place().block)
#define blockDim (::tw::emulator::place().threads)
#define gridDim (::tw::emulator::place().blocks)

// ---- Arithmetic.

template <class A, class B>
auto min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(a) : static_cast<T>(b);
}
template <class A, class B>
auto max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}
inline int __popc(uint32_t x) { return std::popcount(x); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<uint32_t>(x)) + 1; }
inline int __ffsll(long long x) { return x == 0 ? 0 : std::countr_zero(static_cast<uint64_t>(x)) + 1; }
inline int __clz(int x) { return std::countl_zero(static_cast<uint32_t>(x)); }
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  return std::max(a & 0xffff0000u, b & 0xffff0000u) | std::max(a & 0xffffu, b & 0xffffu);
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t{a} * b >> 32); }
inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

// ---- Memory.

template <class T>
T __ldcg(const T* from) {
  return *const_cast<const volatile std::conditional_t<std::is_arithmetic_v<T>, T, T>*>(from);
}
template <class T>
  requires std::is_class_v<T>
T __ldcg(const T* from) {
  return *from;
}
inline void __threadfence() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  tw::emulator::maybe_poll();
}
inline void __threadfence_block() { __threadfence(); }
inline void __nanosleep(unsigned) { tw::emulator::poll(); }
// Whoever repeats an atomic operation in vain waits.
template <class T>
T atomicAdd(T* at, std::type_identity_t<T> by) {
  const T before = __atomic_fetch_add(at, by, __ATOMIC_SEQ_CST);
  tw::emulator::maybe_poll();
  return before;
}
template <class T>
T atomicOr(T* at, std::type_identity_t<T> bits) {
  return __atomic_fetch_or(at, bits, __ATOMIC_SEQ_CST);
}
template <class T>
T atomicMin(T* at, std::type_identity_t<T> value) {
  T before = __atomic_load_n(at, __ATOMIC_SEQ_CST);
  while (value < before &&
         !__atomic_compare_exchange_n(at, &before, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return before;
}
template <class T>
T atomicMax(T* at, std::type_identity_t<T> value) {
  T before = __atomic_load_n(at, __ATOMIC_SEQ_CST);
  while (before < value &&
         !__atomic_compare_exchange_n(at, &before, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return before;
}
template <class T>
T atomicExch(T* at, std::type_identity_t<T> value) {
  return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST);
}
template <class T>
T atomicCAS(T* at, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}

// ---- Warps and blocks.

inline void __syncwarp(uint32_t mask = ~0u) { tw::emulator::collect(tw::emulator::Collective::kMeet, mask, 0); }
inline uint32_t __ballot_sync(uint32_t mask, int vote) {
  return static_cast<uint32_t>(tw::emulator::collect(tw::emulator::Collective::kBallot, mask, vote != 0));
}
inline int __any_sync(uint32_t mask, int vote) { return __ballot_sync(mask, vote) != 0; }
inline int __all_sync(uint32_t mask, int vote) { return __ballot_sync(mask, vote == 0) == 0; }
template <class T>
T __shfl_sync(uint32_t mask, T value, int lane) {
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  bits = tw::emulator::collect(tw::emulator::Collective::kShuffle, mask, bits, static_cast<uint32_t>(lane));
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int by) {
  return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % 32) ^ by);
}
template <class T>
uint32_t __match_any_sync(uint32_t mask, T value) {
  return static_cast<uint32_t>(
      tw::emulator::collect(tw::emulator::Collective::kMatch, mask, static_cast<uint64_t>(value)));
}
inline uint32_t __reduce_max_sync(uint32_t mask, uint32_t value) {
  return static_cast<uint32_t>(tw::emulator::collect(tw::emulator::Collective::kMax, mask, value));
}
// The machine compares without a sign: flipping the first bit keeps the order.
inline int __reduce_max_sync(uint32_t mask, int value) {
  return static_cast<int>(__reduce_max_sync(mask, static_cast<uint32_t>(value) ^ 0x80000000u) ^ 0x80000000u);
}
inline void __syncthreads() { tw::emulator::meet_block(false); }
inline int __syncthreads_or(int vote) { return tw::emulator::meet_block(vote != 0).any; }
inline int __syncthreads_and(int vote) { return tw::emulator::meet_block(vote != 0).all; }
