// Everything that is said in PTX: loads, stores and fences as the exchange means them, and what CUDA has no word for.
// The memory model's words are PTX's (section 8 of its manual). Another file of this name makes the kernels run without
// a GPU: tests/emulator.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tw::cuda {

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

// S4, the reader's side: what was written before the word can be read after this. Dearer fences are not needed for it.
__device__ inline uint64_t load_acquire(const void* from) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

// S4, both ways: cumulative, so it stands for every write that this thread has synchronised with.
__device__ inline void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Counts who arrives on the device; who gets the last number has synchronised with all of them.
__device__ inline uint32_t arrive(uint32_t* counter, uint32_t by = 1) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(by) : "memory");
  return before;
}
// How many have; who sees all of them has synchronised with them.
__device__ inline uint32_t arrived(const uint32_t* counter) {
  uint32_t count;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}

// Draws the next number of a counter that began at 0 on the device, by the threads for which `draws` holds; the others
// get 0. The reply is waited for where it is used. The counter counts down: of additions ptxas makes one operation for
// the warp, whose reply it hands out at once, so that whoever drew waited for it, 1 us, before it did anything else.
__device__ inline uint32_t draw(uint32_t* counter, bool draws) {
  uint32_t before = 0;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p atom.relaxed.gpu.global.dec.u32 %0, [%1], 0xffffffff; }"
               : "+r"(before)
               : "l"(counter), "r"(static_cast<uint32_t>(draws))
               : "memory");
  return 0 - before;
}

// ---- Packets: 16 bytes in one access, flag and data together. PTX does not promise that; the self-test looks. Eight
// threads must make it in one instruction, and that they are together there is not promised either: __syncwarp does not
// do it. So they look (device/ll128.cuh). (Of a torn packet all words are old but the one that the flag's thread has.)

__device__ inline void store_pair(void* to, uint64_t a, uint64_t b) {
  asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(a), "l"(b) : "memory");
}
__device__ inline Vec16 load_pair(const void* from) {
  Vec16 value;
  asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(value.a), "=l"(value.b) : "l"(from) : "memory");
  return value;
}

// ---- Registers and threads.

// 0 beyond the 32nd.
__device__ inline uint32_t bit_of(int bit) {
  uint32_t mask;
  asm("shl.b32 %0, 1, %1;" : "=r"(mask) : "r"(bit));
  return mask;
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

// Has a value read here, though nothing is made of it.
__device__ inline void pin_read(uint32_t value) { asm volatile("" ::"r"(value)); }

// Has 128 bytes on their way to the second-level cache, which all of a device's memory is read through.
__device__ inline void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// Keeps the compiler from moving accesses past this place.
__device__ inline void keep_order() { asm volatile("" ::: "memory"); }

// The warp's threads that make this very instruction together.
__device__ inline uint32_t active_threads() {
  uint32_t active;
  asm volatile("activemask.b32 %0;" : "=r"(active)::"memory");
  return active;
}

__device__ inline uint64_t now_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// ---- Blocks, and kernels that follow each other.

extern __shared__ uint4 shared_memory[];
__device__ inline std::byte* shared_bytes() { return reinterpret_cast<std::byte*>(shared_memory); }

// Of a block. Warps need not be together: the barrier counts threads. __syncwarp would not bring a warp together
// either: nvcc lets it run what comes next in the parts in which it came.
__device__ inline void meet() { asm volatile("barrier.cta.sync 0;" ::: "memory"); }

// Gates of a block, in shared memory (mbarriers: section on them in PTX's manual). A gate opens when `count` threads
// have arrived, then closes for the next turn; turns are told apart by their parity. Who sees it open sees what those
// that arrived had written.
__device__ inline uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}
__device__ inline void make_gate(uint64_t* gate, uint32_t count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(gate)), "r"(count) : "memory");
}
__device__ inline void arrive_at(uint64_t* gate) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(gate)) : "memory");
}
__device__ inline bool has_opened(uint64_t* gate, uint32_t parity) {
  uint32_t open;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(open)
               : "r"(shared_address(gate)), "r"(parity)
               : "memory");
  return open != 0;
}
// Sleeps until it does, where the hardware can.
__device__ inline void await_gate(uint64_t* gate, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  uint32_t open = 0;
  while (open == 0) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(open)
                 : "r"(shared_address(gate)), "r"(parity)
                 : "memory");
  }
#else
  while (!has_opened(gate, parity)) __nanosleep(20);
#endif
}

// Programmatic dependent launch: the next kernel's blocks may come onto the device, where they find room; and this one
// writes nothing that an earlier kernel may use before that one has ended, nor makes anything of what such a one may
// write (S3). Nothing, in a plain launch.
__device__ inline void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void await_earlier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace tw::cuda
