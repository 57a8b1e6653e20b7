// How a kernel's stores reach the rank that they are for. Every store that may be for a peer's window is one of these,
// and the address of a peer's window comes from reachable(); a transport whose peers are not in this device's address
// space has a file of this name of its own (tests/emulator/counted has one, which counts).
//
// Here all windows are mapped, so each is the instruction that it says. Addresses of this rank's own memory are taken
// too: a row's own rank is one of its ranks.
//
// What breaks if this changes: S4 (put_data and put_word are ordered by the fence between them alone, and a put_pair is
// seen whole or not at all), and the instructions of every kernel.
#pragma once

#include "cuda/device/ptx.cuh"

namespace tw::cuda {

// Gives the address by which kernels store into a peer's window, from that at which the window is mapped.
__device__ inline std::byte* reachable(std::byte* window) { return window; }

// Stores a part of a row, of its metadata or of counts.
template <class V>
__device__ inline void put_data(V* to, const V& value) {
  *to = value;
}
// Stores a signal, which follows what a fence before it has ordered.
__device__ inline void put_word(void* to, uint64_t value) { store_word(to, value); }
// Stores a thread's part of a packet, or a signal with its note.
__device__ inline void put_pair(void* to, uint64_t a, uint64_t b) { store_pair(to, a, b); }

}  // namespace tw::cuda
