// src/cuda/device/ptx.cuh for the emulator: the same functions, in C++.
#pragma once

#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace tw::cuda {

struct alignas(16) Vec16 {
  uint64_t a, b;
};

// Accesses of whole words are atomic on the CPU; whoever loads one may be waiting for it.
template <class T>
inline T load_and_wait(const void* from) {
  tw::emulator::poll();
  return __atomic_load_n(static_cast<const T*>(from), __ATOMIC_ACQUIRE);
}
template <class T>
inline void store_late(void* to, T value) {
  tw::emulator::maybe_poll();
  __atomic_store_n(static_cast<T*>(to), value, __ATOMIC_RELAXED);
}

inline void store_word(void* to, uint64_t value) { store_late(to, value); }
inline uint64_t load_word(const void* from) { return load_and_wait<uint64_t>(from); }
inline uint32_t load_half(const void* from) { return load_and_wait<uint32_t>(from); }
inline void store_half(void* to, uint32_t value) { store_late(to, value); }
inline uint64_t load_acquire(const void* from) { return load_and_wait<uint64_t>(from); }
inline void fence_system() { __threadfence(); }
inline uint32_t arrive(uint32_t* counter, uint32_t by = 1) { return atomicAdd(counter, by); }
inline uint32_t arrived(const uint32_t* counter) { return load_and_wait<uint32_t>(counter); }

inline uint32_t draw(uint32_t* counter, bool draws) { return draws ? 0 - atomicAdd(counter, ~0u) : 0; }

inline void store_pair(void* to, uint64_t a, uint64_t b) { tw::emulator::store_together(to, {a, b}); }
inline Vec16 load_pair(const void* from) {
  const auto [a, b] = tw::emulator::load_together(from);
  return {a, b};
}

inline uint32_t bit_of(int bit) { return bit >= 0 && bit < 32 ? 1u << bit : 0; }
template <class... T>
inline void pin(T&...) {}
inline void pin_read(uint32_t) {}
inline void prefetch(const void*) {}
inline void keep_order() { __atomic_signal_fence(__ATOMIC_SEQ_CST); }
inline uint32_t active_threads() { return tw::emulator::together(); }
inline uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
}

inline std::byte* shared_bytes() { return static_cast<std::byte*>(tw::emulator::shared_bytes()); }
inline void meet() { __syncthreads(); }

// A gate: who must arrive, who has yet to, the parity of the turn. Only threads of a block use it, which take turns.
struct Gate {
  uint16_t count, missing;
  uint32_t parity;
};
static_assert(sizeof(Gate) == sizeof(uint64_t));
inline void make_gate(uint64_t* gate, uint32_t count) {
  const auto all = static_cast<uint16_t>(count);
  *gate = std::bit_cast<uint64_t>(Gate{all, all, 0});
}
inline void arrive_at(uint64_t* gate) {
  auto now = std::bit_cast<Gate>(*gate);
  if (--now.missing == 0) now = {now.count, now.count, now.parity ^ 1};
  *gate = std::bit_cast<uint64_t>(now);
}
inline bool has_opened(uint64_t* gate, uint32_t parity) {
  tw::emulator::maybe_poll();
  return std::bit_cast<Gate>(*static_cast<volatile uint64_t*>(gate)).parity != parity;
}
inline void await_gate(uint64_t* gate, uint32_t parity) {
  while (!has_opened(gate, parity)) tw::emulator::poll();
}

inline void let_next_begin() {}
inline void await_earlier() {}

}  // namespace tw::cuda
