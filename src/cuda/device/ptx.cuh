// Everything that is said in PTX: loads, stores and fences as the exchange means them, and what CUDA has no word for.
//
// Each function is one or a few instructions; the words of the memory model are PTX's (section 8 of its manual).
// Another file of this name makes the kernels run without a GPU: tests/emulator.
//
// What breaks if this changes: S4 above all (the strength and scope of each access), and S3 in await_earlier. A weaker
// access is not caught by tests on a GPU that happens to order it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tw::cuda {

struct alignas(16) Vec16 {
  uint64_t a, b;
};

// ---- Words between ranks. They are relaxed and ordered by fences alone, one fence for many of them.

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

// S4, the reader's side: after this load, what was written before the word was stored can be read. Dearer fences are
// not needed.
__device__ inline uint64_t load_acquire(const void* from) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

// S4, both sides: the fence is cumulative, so it stands for every write with which this thread has synchronised.
__device__ inline void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Counts who arrives, on the device; the thread that gets the last number has synchronised with all the others.
__device__ inline uint32_t arrive(uint32_t* counter, uint32_t by = 1) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(by) : "memory");
  return before;
}
// Gives how many have arrived; a thread that sees all of them has synchronised with them.
__device__ inline uint32_t arrived(const uint32_t* counter) {
  uint32_t count;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}

// Draws the next number of a counter on the device that began at 0, for the threads for which `draws` holds; the others
// get 0. The reply is waited for where it is used. The counter counts down, because ptxas joins additions into one
// operation for the warp and hands out its reply at once: so whoever drew waited for it, 1 us, before doing anything
// else.
__device__ inline uint32_t draw(uint32_t* counter, bool draws) {
  uint32_t before = 0;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p atom.relaxed.gpu.global.dec.u32 %0, [%1], 0xffffffff; }"
               : "+r"(before)
               : "l"(counter), "r"(static_cast<uint32_t>(draws))
               : "memory");
  return 0 - before;
}

// ---- Packets: 16 bytes in one access, flag and data together. PTX does not promise that they arrive together; the
// self-test looks. Eight threads must make the access in one instruction, and nothing promises that they are together
// there, not even __syncwarp. So they look (device/ll128.cuh). (In a torn packet all words are old except that of the
// flag's thread.)

__device__ inline void store_pair(void* to, uint64_t a, uint64_t b) {
  asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(a), "l"(b) : "memory");
}
__device__ inline Vec16 load_pair(const void* from) {
  Vec16 value;
  asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(value.a), "=l"(value.b) : "l"(from) : "memory");
  return value;
}

// ---- Registers and threads

// Gives 1 << bit, and 0 beyond the 32nd.
__device__ inline uint32_t bit_of(int bit) {
  uint32_t mask;
  asm("shl.b32 %0, 1, %1;" : "=r"(mask) : "r"(bit));
  return mask;
}

// Makes the compiler work a value out here; it would do so where the value is used, which may be where somebody waits.
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

// Makes the compiler read a value here, though nothing is made of it.
__device__ inline void pin_read(uint32_t value) { asm volatile("" ::"r"(value)); }

// Starts to bring 128 bytes to the second-level cache, through which all of a device's memory is read.
__device__ inline void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// Keeps the compiler from moving accesses past this place.
__device__ inline void keep_order() { asm volatile("" ::: "memory"); }

// Gives the mask of the warp's threads that make this very instruction together.
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

// ---- Blocks, and kernels that follow each other

extern __shared__ uint4 shared_memory[];
__device__ inline std::byte* shared_bytes() { return reinterpret_cast<std::byte*>(shared_memory); }

// Is a barrier of the block. Warps need not be together for it: it counts threads. __syncwarp would not bring a warp
// together either: nvcc lets it run what comes next in the parts in which it came.
__device__ inline void meet() { asm volatile("barrier.cta.sync 0;" ::: "memory"); }

// Gates of a block, in shared memory (mbarriers; PTX's manual has a section on them). A gate opens when `count` threads
// have arrived, then closes for the next turn; turns are told apart by their parity. A thread that sees it open also
// sees what those that arrived had written.
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
// Sleeps until the gate has opened, where the hardware can.
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

// Programmatic dependent launch. let_next_begin allows the next kernel's blocks onto the device, where they find room.
// await_earlier waits for the end of earlier kernels: before it a kernel writes nothing that an earlier one may use,
// and makes nothing of what an earlier one may write (S3). In a plain launch neither does anything.
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
