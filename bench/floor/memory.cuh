// Loads and stores with the ordering that the exchanges need, and waiting that ends.
#ifndef TOKENWAY_BENCH_FLOOR_MEMORY_CUH_
#define TOKENWAY_BENCH_FLOOR_MEMORY_CUH_

#include <cuda_runtime.h>

#include <cstdint>

__device__ __forceinline__ void store_relaxed(uint32_t* at, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ void store_release(uint32_t* at, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t add_acq_rel(uint32_t* at, uint32_t value) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(at), "r"(value) : "memory");
  return old;
}

__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Whether a flag has not reached a step: steps wrap, and a peer that is done may be one step ahead already.
__device__ __forceinline__ bool before(uint32_t flag, uint32_t step) { return static_cast<int32_t>(flag - step) < 0; }

// One lane's 16 bytes of a line: eight lanes make 128 bytes, the last lane's upper half is the flag.
__device__ __forceinline__ void store_line(void* at, uint64_t low, uint64_t high) {
  asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(low), "l"(high) : "memory");
}

__device__ __forceinline__ void load_line(const void* at, uint64_t* low, uint64_t* high) {
  asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(*low), "=l"(*high) : "l"(at) : "memory");
}

// A wait that ends: every polling loop asks `lost` once per poll. The clock is looked at seldom, so that a wait that is
// about to end pays one counter; after the first loss every other wait on the device ends at its first look.
class Patience {
 public:
  __device__ explicit Patience(uint32_t* expired) : expired_(expired) {}

  __device__ bool lost() {
    if (++polls_ % kPollsPerLook != 0) return false;
    if (load_relaxed(expired_) != 0) return true;
    const long long now = clock64();
    if (begin_ == 0) begin_ = now;
    if (now - begin_ < kLimitCycles) return false;
    store_relaxed(expired_, 1);
    return true;
  }

 private:
  static constexpr uint32_t kPollsPerLook = 1024;
  static constexpr long long kLimitCycles = 4'000'000'000;  // about two seconds
  uint32_t* expired_;
  uint32_t polls_ = 0;
  long long begin_ = 0;
};

#endif  // TOKENWAY_BENCH_FLOOR_MEMORY_CUH_
