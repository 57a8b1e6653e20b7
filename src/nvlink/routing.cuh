// Slots, in the kernel (S9). The slot of a token at a rank is the number of earlier tokens that go there too; every
// block counts them itself, from the ids, so no block waits for another and there is no launch before the dispatch.
//
// Half of a block's warps route, 256 tokens in a round, and are a round ahead of those that send. What they
// leave is small, a bit for each token and rank, from which a sending warp finds the slots of its row by itself. All
// blocks count all tokens, which is quadratic; but counting runs under the wire, and what a block sends first needs one
// round. The alternative, sums passed from block to block, costs every block two trips to the second-level cache.
#pragma once

#include "nvlink/wait.cuh"

namespace tw::nvlink {

// The arrays in shared memory.
extern __shared__ uint4 shared_memory[];
template <class T>
__device__ inline T* shared_at(uint32_t offset) {
  return reinterpret_cast<T*>(reinterpret_cast<std::byte*>(shared_memory) + offset);
}

// Barriers of a part of a block; the first is the whole block's.
enum Name : int { kAmongSenders = 1, kRouted = 2 };

class Scratch {
 public:
  __device__ explicit Scratch(const DispatchParams& p) : p_(p) {}
  __device__ std::byte** windows() const { return shared_at<std::byte*>(p_.at.windows); }
  __device__ uint32_t* going(int round) const {
    return shared_at<uint32_t>(p_.at.going) + round % kRounds * (kRoundWarps * ranks());
  }
  __device__ int32_t* base(int round) const { return shared_at<int32_t>(p_.at.base) + round % (2 * kRounds) * ranks(); }
  __device__ Destination* destinations() const {
    return shared_at<Destination>(p_.at.destinations) + threadIdx.x / 32 * p_.group.map.shape().fan_out();
  }
  __device__ uint64_t* meta() const {
    return shared_at<uint64_t>(p_.at.meta) + threadIdx.x / 32 * (1 + p_.group.map.shape().top_k);
  }
  __device__ uint32_t* plain() const { return shared_at<uint32_t>(p_.at.plain); }
  __device__ int32_t* source_error() const { return shared_at<int32_t>(p_.at.source_error); }
  __device__ uint32_t* table() const { return shared_at<uint32_t>(p_.at.table); }

  // Where the masks of a token's warp are, one for each rank.
  __device__ uint32_t* masks(int token) const { return going(token / kRound) + token % kRound / 32 * ranks(); }
  __device__ bool goes(int token, int rank) const { return (masks(token)[rank] >> (token % 32) & 1) != 0; }
  // Tokens before this one that go to a rank: its slot. The token's round must be routed.
  __device__ int before(int token, int rank) const {
    const int round = token / kRound;
    const uint32_t* const masks = going(round) + rank;
    const int warp = token % kRound / 32;
    int count = base(round)[rank];
#pragma unroll 1
    for (int i = 0; i < warp; ++i) count += __popc(masks[i * ranks()]);
    return count + __popc(masks[warp * ranks()] & ((1u << (token % 32)) - 1));
  }

 private:
  __device__ int ranks() const { return p_.group.map.shape().ranks; }

  const DispatchParams& p_;
};

// Where an expert is.
__device__ inline uint32_t find_expert(const DispatchParams& p, const Scratch& scratch, int32_t id) {
  const uint32_t* const table = p.table ? scratch.table() : p.group.experts;
  return table[id];
}

// An id as the caller has it.
__device__ inline int64_t raw_id(const DispatchParams& p, int token, int k) {
  const int64_t at = token * p.in.id_stride[0] + k * p.in.id_stride[1];
  return p.in.wide ? static_cast<int64_t>(load_fresh<unsigned long long>(static_cast<const int64_t*>(p.in.ids) + at))
                   : static_cast<int32_t>(load_fresh<uint32_t>(static_cast<const int32_t*>(p.in.ids) + at));
}
__device__ inline float raw_weight(const DispatchParams& p, int token, int k) {
  if (p.in.weights == nullptr) return 1.0f;
  const int64_t at = token * p.in.weight_stride[0] + k * p.in.weight_stride[1];
  return __uint_as_float(load_fresh<uint32_t>(p.in.weights + at));
}
// What is no expert becomes -1.
__device__ inline int32_t valid_id(const DispatchParams& p, int64_t id) {
  return id >= 0 && id < p.group.map.shape().experts ? static_cast<int32_t>(id) : -1;
}

constexpr int kIdsAtOnce = 8;

// Some of a token's ids, -1 for those that are none.
struct Ids {
  int32_t id[kIdsAtOnce];
};
__device__ inline Ids load_ids(const DispatchParams& p, int token, int begin) {
  Ids ids;
  const int there = token < p.tokens ? p.group.map.shape().top_k - begin : 0;
  const int64_t first = token * p.in.id_stride[0] + begin * p.in.id_stride[1];
  if (p.in.wide) {
    const auto* const at = static_cast<const int64_t*>(p.in.ids) + first;
#pragma unroll
    for (int i = 0; i < kIdsAtOnce; ++i) {
      ids.id[i] = i < there
                      ? valid_id(p, static_cast<int64_t>(load_fresh<unsigned long long>(at + i * p.in.id_stride[1])))
                      : -1;
    }
    return ids;
  }
  const auto* const at = static_cast<const int32_t*>(p.in.ids) + first;
#pragma unroll
  for (int i = 0; i < kIdsAtOnce; ++i) {
    ids.id[i] = i < there ? valid_id(p, static_cast<int32_t>(load_fresh<uint32_t>(at + i * p.in.id_stride[1]))) : -1;
  }
  return ids;
}

// Bit i: one of the ids is of rank base + i.
__device__ inline uint32_t ranks_of(const uint32_t* table, const Ids& ids, int base) {
  uint32_t mask = 0;
#pragma unroll
  for (int i = 0; i < kIdsAtOnce; ++i) {
    if (ids.id[i] < 0) continue;
    const uint32_t rank = (table[ids.id[i]] >> kSlotBits) - static_cast<uint32_t>(base);
    if (rank < kRanksAtOnce) mask |= 1u << rank;
  }
  return mask;
}

// Of many ids, or where the table of experts is in global memory.
__device__ __noinline__ static uint32_t ranks_of_many(const DispatchParams& p, const uint32_t* table, int token,
                                                      int base) {
  uint32_t mask = 0;
#pragma unroll 1
  for (int begin = 0; begin < p.group.map.shape().top_k; begin += kIdsAtOnce) {
    mask |= ranks_of(table, load_ids(p, token, begin), base);
  }
  return mask;
}

// Bit i: the token goes to rank base + i. `first`: the first of its ids.
__device__ inline uint32_t ranks_of(const DispatchParams& p, const Scratch& scratch, int token, int base,
                                    const Ids& first) {
  if (!p.table) return ranks_of_many(p, p.group.experts, token, base);
  if (p.group.map.shape().top_k > kIdsAtOnce) return ranks_of_many(p, scratch.table(), token, base);
  return ranks_of(scratch.table(), first, base);
}

// Which of a warp's 32 tokens go where: one token per thread.
__device__ inline void route_warp(const DispatchParams& p, const Scratch& scratch, int token, const Ids& first) {
  const int ranks = p.group.map.shape().ranks;
  uint32_t* const masks = scratch.masks(token);
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int base = 0; base < ranks; base += kRanksAtOnce) {
    const uint32_t mask = ranks_of(p, scratch, token, base, first);
    uint32_t mine = 0;
#pragma unroll 2
    for (int i = 0; i < min(kRanksAtOnce, ranks - base); ++i) {
      const uint32_t going = __ballot_sync(~0u, mask >> i & 1);
      if (lane == i) mine = going;
    }
    if (base + lane < ranks) masks[base + lane] = mine;
  }
}

// By the routing threads, of which this is number `thread`: all tokens, round by round. `ids`: of the first round.
// tell(rank, n): n tokens in all go to a rank.
template <class Tell>
__device__ inline void route(const DispatchParams& p, const Scratch& scratch, int thread, Ids ids, Tell&& tell) {
  const int ranks = p.group.map.shape().ranks;
#pragma unroll 1
  for (int round = 0; round * kRound < p.tokens; ++round) {
    route_warp(p, scratch, round * kRound + thread, ids);
    const bool last = (round + 1) * kRound >= p.tokens;
    if (!last) ids = load_ids(p, (round + 1) * kRound + thread, 0);
    meet<kThreads>(kRouted);  // and the senders have left the round whose place the next one takes
#pragma unroll 1
    for (int rank = thread; rank < ranks; rank += kReceivers) {
      int sum = scratch.base(round)[rank];
#pragma unroll
      for (int i = 0; i < kRoundWarps; ++i) sum += __popc(scratch.going(round)[i * ranks + rank]);
      scratch.base(round + 1)[rank] = sum;
      if (last) tell(rank, sum);
    }
  }
}

// The ranks that a warp's token goes to, ascending, and its slots there, into the warp's place; their number.
__device__ inline int find_destinations(const DispatchParams& p, const Scratch& scratch, int token) {
  const int ranks = p.group.map.shape().ranks;
  const int lane = threadIdx.x % 32;
  int fan = 0;
#pragma unroll 1
  for (int base = 0; base < ranks; base += 32) {
    const int rank = base + lane;
    const bool goes = rank < ranks && scratch.goes(token, rank);
    const uint32_t all = __ballot_sync(~0u, goes);
    if (goes) scratch.destinations()[fan + __popc(all & ((1u << lane) - 1))] = {rank, scratch.before(token, rank)};
    fan += __popc(all);
  }
  return fan;
}

}  // namespace tw::nvlink
