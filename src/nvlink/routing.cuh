// Slots, in the kernel (S9). The slot of a token at a rank is the number of earlier tokens that go there too; a block
// counts them itself, from the ids, so no block waits for another and there is no launch before the dispatch.
//
// Counting is quadratic in all, but it runs under the wire: the first blocks start at once and a few of them fill a
// link, while the last one reads 128 KiB of ids at 4096 tokens and top-8. The alternative, sums passed from block to
// block, costs every block two trips to the second-level cache.
#pragma once

#include "nvlink/wait.cuh"

namespace tw::nvlink {

constexpr int kWarps = kThreads / 32;

// The arrays in shared memory.
extern __shared__ uint4 shared_memory[];
template <class T>
__device__ inline T* shared_at(uint32_t offset) {
  return reinterpret_cast<T*>(reinterpret_cast<std::byte*>(shared_memory) + offset);
}

class Scratch {
 public:
  __device__ explicit Scratch(const DispatchParams& p) : p_(p) {}
  __device__ std::byte** windows() const { return shared_at<std::byte*>(p_.at.windows); }
  __device__ Destination* destinations() const { return shared_at<Destination>(p_.at.destinations); }
  __device__ uint64_t* meta() const { return shared_at<uint64_t>(p_.at.meta); }
  __device__ int32_t* next() const { return shared_at<int32_t>(p_.at.next); }
  __device__ int32_t* fan() const { return shared_at<int32_t>(p_.at.fan); }
  __device__ int32_t* in_warp() const { return shared_at<int32_t>(p_.at.in_warp); }
  __device__ int32_t* source_n() const { return shared_at<int32_t>(p_.at.source_n); }
  __device__ int32_t* source_mode() const { return shared_at<int32_t>(p_.at.source_mode); }
  __device__ uint32_t* table() const { return shared_at<uint32_t>(p_.at.table); }

 private:
  const DispatchParams& p_;
};

// Loads what does not depend on tokens. Needs a barrier after it.
__device__ inline void load_tables(const DispatchParams& p, const Scratch& scratch) {
  const Shape& shape = p.group.map.shape();
  for (int i = threadIdx.x; i < shape.ranks; i += blockDim.x) {
    scratch.windows()[i] = window_of(p.group, i);
    scratch.next()[i] = 0;
  }
  if (!p.table) return;
  for (int i = threadIdx.x; i < shape.experts; i += blockDim.x) scratch.table()[i] = p.group.experts[i];
}

// Where an expert is.
__device__ inline uint32_t find_expert(const DispatchParams& p, const Scratch& scratch, int32_t id) {
  return p.table ? scratch.table()[id] : p.group.experts[id];
}

// An id as the caller has it.
__device__ inline int64_t raw_id(const DispatchParams& p, int token, int k) {
  const int64_t at = token * p.in.id_stride[0] + k * p.in.id_stride[1];
  return p.in.wide ? load_input<long long>(static_cast<const long long*>(p.in.ids) + at)
                   : load_input<int>(static_cast<const int*>(p.in.ids) + at);
}
// Loads the first of a token's ids for its place in the cache alone.
__device__ inline uint32_t touch_ids(const DispatchParams& p, int token) {
  uint32_t id;
  const auto* const at = static_cast<const std::byte*>(p.in.ids) + (p.in.wide ? 8 : 4) * (token * p.in.id_stride[0]);
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(id) : "l"(at));
  return id;
}
// What is no expert becomes -1.
__device__ inline int32_t valid_id(const DispatchParams& p, int64_t id) {
  return id >= 0 && id < p.group.map.shape().experts ? static_cast<int32_t>(id) : -1;
}

// Bit i: the token goes to rank base + i.
__device__ inline uint64_t ranks_of(const DispatchParams& p, const Scratch& scratch, int token, int base) {
  uint64_t mask = 0;
#pragma unroll 4
  for (int k = 0; k < p.group.map.shape().top_k; ++k) {
    const int32_t id = valid_id(p, raw_id(p, token, k));
    const int rank = id < 0 ? -1 : expert_rank(find_expert(p, scratch, id)) - base;
    if (rank >= 0 && rank < kRanksAtOnce) mask |= uint64_t{1} << rank;
  }
  return mask;
}

// Walks a rank's tokens in order and gives those of a batch their slots.
class Router {
 public:
  __device__ Router(const DispatchParams& p, const Scratch& scratch) : p_(p), scratch_(scratch) {}

  // Destinations and slots of tokens [begin, begin + count), count <= kBatch, which come after those of the last call;
  // next[] then counts all tokens so far. All threads; ends with a barrier.
  __device__ void route(int begin, int count) {
    const int end = begin + count;
    for (int token = threadIdx.x; token < count; token += blockDim.x) scratch_.fan()[token] = 0;
    __syncthreads();
    for (; counted_ < end; counted_ += blockDim.x) {
      const int token = counted_ + static_cast<int>(threadIdx.x);
      for (int base = 0; base < p_.group.map.shape().ranks; base += kRanksAtOnce) walk(token, base, begin, end);
    }
    counted_ = end;
  }

 private:
  // One token per thread, up to 64 ranks.
  __device__ void walk(int token, int base, int begin, int end) {
    const Shape& shape = p_.group.map.shape();
    const int ranks = min(kRanksAtOnce, shape.ranks - base);
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const uint64_t mask = token < end ? ranks_of(p_, scratch_, token, base) : 0;
#pragma unroll 1
    for (int i = 0; i < ranks; ++i) {
      const uint32_t going = __ballot_sync(~0u, mask >> i & 1);
      if (lane == 0) scratch_.in_warp()[warp * ranks + i] = __popc(going);
    }
    __syncthreads();
    if (token - lane + 31 >= begin && token - lane < end) {  // warps with tokens of the batch
      const int row = token - begin;
      const bool mine = row >= 0 && token < end;
      int fan = mine ? scratch_.fan()[row] : 0;
#pragma unroll 1
      for (int i = 0; i < ranks; ++i) {
        const uint32_t going = __ballot_sync(~0u, mask >> i & 1);
        if (going == 0) continue;
        int slot = scratch_.next()[base + i];
#pragma unroll 4
        for (int other = 0; other < warp; ++other) slot += scratch_.in_warp()[other * ranks + i];
        if (!mine || (mask >> i & 1) == 0) continue;
        slot += __popc(going & ((1u << lane) - 1));
        scratch_.destinations()[row * shape.fan_out() + fan++] = {base + i, slot};
      }
      if (mine) scratch_.fan()[row] = fan;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < ranks; i += blockDim.x) {
      int sum = 0;
#pragma unroll 8
      for (int other = 0; other < kWarps; ++other) sum += scratch_.in_warp()[other * ranks + i];
      scratch_.next()[base + i] += sum;
    }
    __syncthreads();
  }

  const DispatchParams& p_;
  const Scratch& scratch_;
  int counted_ = 0;
};

// Reports an id that is neither -1 nor an expert, or stands twice in its token; one for each step.
__device__ __noinline__ static void report_id(const DispatchParams& p, Step step, int token, int k, int64_t id) {
  if (atomicExch(&p.group.lanes[step.lane].bad_step, step.low()) == step.low()) return;
  report_call(p.group, &p.group.pages[p.group.me]->bad_id, [&](Report* to) {
    write_report(to, p.group, step, twInvalidArgument, p.group.me, 0, 0);
    volatile Report& report = *to;
    report.token = token;
    report.k = k;
    report.value = id;
  });
}

// What travels beside the payloads of a batch, into shared memory; a bad id acts as -1. By `threads` threads.
__device__ inline void stage_meta(const DispatchParams& p, const Scratch& scratch, const Step& step, int begin,
                                  int count, int thread, int threads) {
  const int top_k = p.group.map.shape().top_k;
#pragma unroll 1
  for (int i = thread; i < count * top_k; i += threads) {
    const int row = i / top_k;
    const int k = i - row * top_k;
    const int token = begin + row;
    const float weight =
        p.in.weights == nullptr ? 1.0f : p.in.weights[token * p.in.weight_stride[0] + k * p.in.weight_stride[1]];
    const int64_t raw = raw_id(p, token, k);
    int32_t id = valid_id(p, raw);
    bool twice = false;
#pragma unroll 4
    for (int other = 0; other < k; ++other) twice |= raw_id(p, token, other) == raw;
    if (twice) id = -1;
    if (id < 0 && raw != -1) report_id(p, step, token, k, raw);
    auto* const row_meta = reinterpret_cast<uint32_t*>(scratch.meta() + row * (1 + top_k));
    row_meta[2 + k] = static_cast<uint32_t>(id);
    row_meta[2 + top_k + k] = __float_as_uint(weight);
    if (k == 0) row_meta[0] = static_cast<uint32_t>(token), row_meta[1] = 0;
    if (!p.in.own) {
      p.handle.ids[static_cast<int64_t>(token) * top_k + k] = id;
      p.handle.weights[static_cast<int64_t>(token) * top_k + k] = weight;
    }
  }
}

// The handle's copy of a batch's destinations, which its combine reads. By `threads` threads, after route().
__device__ inline void keep_destinations(const DispatchParams& p, const Scratch& scratch, int begin, int count,
                                         int thread, int threads) {
  const int fan_out = p.group.map.shape().fan_out();
  for (int row = thread; row < count; row += threads) {
    p.handle.fan[begin + row] = scratch.fan()[row];
    Destination* const to = p.handle.destinations + static_cast<int64_t>(begin + row) * fan_out;
    for (int i = 0; i < scratch.fan()[row]; ++i) to[i] = scratch.destinations()[row * fan_out + i];
  }
}

}  // namespace tw::nvlink
