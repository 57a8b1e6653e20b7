// src/cuda/transport/store.cuh of a transport that counts: what a transport has to bring, and nothing else of the
// library is changed for it. An address at a peer is none of this process, so a store that does not go through here
// ends the test.
#pragma once

#include "counted/counted.h"
#include "cuda/device/ptx.cuh"

namespace tw::cuda {

inline constexpr uintptr_t kFar = uintptr_t{1} << 62;

inline std::byte* reachable(std::byte* window) {
  return reinterpret_cast<std::byte*>(reinterpret_cast<uintptr_t>(window) | kFar);
}

// Gives where a store goes in truth; counts it if that is at a peer.
template <class T>
T* arrived_at(T* to, counted::Kind kind, uint64_t by) {
  const auto address = reinterpret_cast<uintptr_t>(to);
  if ((address & kFar) != 0) counted::add(kind, by);
  return reinterpret_cast<T*>(address & ~kFar);
}

template <class V>
inline void put_data(V* to, const V& value) {
  *arrived_at(to, counted::kBytes, sizeof(V)) = value;
}
inline void put_word(void* to, uint64_t value) {
  store_word(arrived_at(static_cast<std::byte*>(to), counted::kWords, 1), value);
}
inline void put_pair(void* to, uint64_t a, uint64_t b) {
  store_pair(arrived_at(static_cast<std::byte*>(to), counted::kPairs, 1), a, b);
}

}  // namespace tw::cuda
