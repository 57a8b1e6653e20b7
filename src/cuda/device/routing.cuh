// How slots are found in the kernel (S9). The slot of a token at a rank is the number of earlier tokens that go there
// too. Every block that sends counts them itself, so there is no launch before the dispatch. Takes DispatchParams and a
// block's Scratch; gives places (find_place), and how many rows go to each rank.
//
// Blocks count marks, one bit for each token and rank, in rounds of 512 tokens. A block that sends makes the marks of
// the first round itself, one token to a thread, so that what it sends first waits for no other block. The marks of
// later rounds are made once on the device, 32 tokens to a warp, by blocks that receive, which have nothing else to do
// yet. One warp of each sending block takes them into its shared memory, a few rounds ahead of the others. So these
// never wait for each other: under a full link a warp's tile takes up to 10 us.
//
// If the marks do not come, because other kernels have the SMs of the blocks that make them, that warp makes them too
// (S7). A round takes it 16 us, as its loads wait behind its block's stores: longer than 512 rows of 7 KB take to send.
// Where all rows go as packets, dispatch/ll128.cu has a shorter way.
//
// What breaks if this changes: S9 (slots), and S7 in route_rest.
#pragma once

#include "cuda/device/ids.cuh"
#include "cuda/launch/dispatch.h"

namespace tw::cuda {

class Scratch {
 public:
  __device__ explicit Scratch(const DispatchParams& p) : p_(p) {}
  __device__ std::byte** windows() const { return shared_at<std::byte*>(p_.at.windows); }
  __device__ int32_t* here() const { return shared_at<int32_t>(p_.at.here); }
  __device__ int32_t* there() const { return shared_at<int32_t>(p_.at.there); }
  __device__ int32_t* limit() const { return shared_at<int32_t>(p_.at.limit); }
  __device__ uint32_t* going(int round) const {
    return shared_at<uint32_t>(p_.at.going) + place(round) * (kWarps * ranks());
  }
  __device__ int32_t* base(int round) const {
    return shared_at<int32_t>(p_.at.base) + (round & (2 * static_cast<int>(p_.at.rounds) - 1)) * ranks();
  }
  __device__ uint64_t* meta() const {
    return shared_at<uint64_t>(p_.at.meta) + threadIdx.x / 32 * (1 + p_.group.map.shape().top_k);
  }
  __device__ int32_t* before_packets() const { return shared_at<int32_t>(p_.at.before_packets); }
  __device__ int32_t* routed() const { return shared_at<int32_t>(p_.at.routed); }
  __device__ int32_t* progress() const { return shared_at<int32_t>(p_.at.progress); }
  __device__ uint32_t* plain() const { return shared_at<uint32_t>(p_.at.plain); }
  __device__ int32_t* source_error() const { return shared_at<int32_t>(p_.at.source_error); }
  __device__ int32_t* failed() const { return shared_at<int32_t>(p_.at.failed); }
  // Remembers why a source's rows could not be had.
  __device__ void fail(int rank, twResult_t error) const { source_error()[rank] = error, *failed() = 1; }
  __device__ uint32_t* table() const { return shared_at<uint32_t>(p_.at.table); }
  __device__ uint32_t* map() const { return shared_at<uint32_t>(p_.at.map); }

  // Gives the marks of a token's group, one word for each rank.
  __device__ uint32_t* marks(int token) const { return going(token / kRound) + token % kRound / kGroup * ranks(); }
  __device__ bool goes(int token, int rank) const { return (marks(token)[rank] >> (token & (kGroup - 1)) & 1) != 0; }
  // Gives the number of tokens before this one that go to a rank: its slot. The token's round must be routed.
  __device__ int before(int token, int rank) const {
    const int round = token / kRound;
    return base(round)[rank] + count(going(round) + rank, token % kRound);
  }
  // Gives the same in a dispatch of up to two rounds of packets: the rounds' marks follow each other, and nobody has
  // counted them.
  __device__ int before_packet(int token, int rank) const { return count(going(0) + rank, token); }
  __device__ int packets(int tokens, int rank) const {
    return tokens == 0 ? 0 : before_packet(tokens - 1, rank) + (goes(tokens - 1, rank) ? 1 : 0);
  }
  // Gives the number of tokens up to and including this one that go to a rank.
  __device__ int through(int token, int rank) const { return before(token, rank) + (goes(token, rank) ? 1 : 0); }

 private:
  // Counts how many of the first `tokens` tokens have a mark.
  __device__ int count(const uint32_t* marks, int tokens) const {
    const int group = tokens / kGroup;
    int n = __popc(marks[group * ranks()] & below(tokens & (kGroup - 1)));
#pragma unroll 4
    for (int i = 0; i < group; ++i) n += __popc(marks[i * ranks()]);
    return n;
  }
  __device__ int place(int round) const { return round & (static_cast<int>(p_.at.rounds) - 1); }
  __device__ int ranks() const { return p_.group.map.shape().ranks; }

  const DispatchParams& p_;
};

__device__ inline void fill_table(const DispatchParams& p, const Scratch& scratch) {
  const GroupView& g = p.group;
  fill_experts(g, scratch.table(), kThreads);
  if (p.in.map == nullptr) return;
  const auto words = static_cast<int>(MapWords::used(g.map.shape()));
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < words; i += kThreads) {
    scratch.map()[i] = load_fresh<uint32_t>(p.in.map + MapWords::kFirst + i);
  }
}
// Gives the physical expert for a valid id. The handle's own ids are physical experts already.
__device__ __noinline__ static int32_t mapped_slot(const DispatchParams& p, int32_t id, int token) {
  if (!p.table) return slot_of(p.group, p.in.map, id, token);
  return replicas_at(p.group, shared_at<int32_t>(p.at.map)).choose(id, token);
}
__device__ inline int32_t find_slot(const DispatchParams& p, int32_t id, int token) {
  return p.in.map == nullptr || id < 0 ? id : mapped_slot(p, id, token);
}
// Gives where an expert is, as pack_expert packs it.
__device__ inline uint32_t find_expert(const DispatchParams& p, const Scratch& scratch, int32_t id) {
  const uint32_t* const table = p.table ? scratch.table() : p.group.experts;
  return table[id];
}

// A token's ids in a usual call, as they lie: as many vectors as there are; those beyond are -1.
struct Ids {
  uint4 vector[kFastIds / 2];
};
struct IdsAt {
  const std::byte* from;
  int bytes;  // 0 beyond the last token
};
__device__ inline IdsAt ids_at(const DispatchParams& p, int token) {
  const int shift = p.in.wide ? 3 : 2;
  return {static_cast<const std::byte*>(p.in.ids) + token * (p.in.id_stride[0] << shift),
          token < p.tokens ? p.group.map.shape().top_k << shift : 0};
}
__device__ inline Ids load_ids(const IdsAt& at) {
  Ids ids;
#pragma unroll
  for (int i = 0; i < kFastIds / 2; ++i) {
    ids.vector[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
    if (16 * i < at.bytes) ids.vector[i] = load_fresh<uint4>(at.from + 16 * i);
  }
  return ids;
}
template <bool kFast>
__device__ inline Ids load_ids(const DispatchParams& p, int token) {
  return kFast ? load_ids(ids_at(p, token)) : Ids{};
}

// The physical experts of a token's ids. Calls with a map find them in a function of its own, whose instructions are
// not in the way of other calls.
struct Slots {
  uint32_t id[kFastIds];
};
__device__ __noinline__ static Slots mapped_slots(const DispatchParams& p, Slots ids, uint32_t limit, int token) {
#pragma unroll
  for (int i = 0; i < kFastIds; ++i) {
    ids.id[i] = ids.id[i] < limit ? static_cast<uint32_t>(mapped_slot(p, static_cast<int32_t>(ids.id[i]), token)) : ~0u;
  }
  return ids;
}

// Gives the ranks of a token: bit i says that one of its ids is of rank i. any_ranks, below, gives those from `base`
// on, in calls of any kind.
__device__ inline uint32_t fast_ranks(const DispatchParams& p, const Scratch& scratch, const Ids& ids, int token) {
  const auto& [a, b, c, d] = ids.vector;
  const auto wide = [](uint32_t low, uint32_t high) { return high == 0 ? low : ~0u; };  // an id beyond 32 bits is none
  uint32_t id[kFastIds] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  if (p.in.wide) {
    id[0] = wide(a.x, a.y), id[1] = wide(a.z, a.w), id[2] = wide(b.x, b.y), id[3] = wide(b.z, b.w);
    id[4] = wide(c.x, c.y), id[5] = wide(c.z, c.w), id[6] = wide(d.x, d.y), id[7] = wide(d.z, d.w);
  }
  const auto experts = static_cast<uint32_t>(p.group.map.shape().experts);
  const uint32_t* const table = scratch.table();
  if (p.in.map != nullptr) {
    const auto limit = static_cast<uint32_t>(p.in.limit);
    const Slots slots = mapped_slots(p, {id[0], id[1], id[2], id[3], id[4], id[5], id[6], id[7]}, limit, token);
#pragma unroll
    for (int i = 0; i < kFastIds; ++i) id[i] = slots.id[i];
  }
  uint32_t mask = 0;
#pragma unroll
  for (int i = 0; i < kFastIds; ++i) mask |= bit_of(expert_rank(table[min(id[i], experts)]));
  return mask;
}
__device__ __noinline__ static uint32_t any_ranks(const DispatchParams& p, int token, int base) {
  const Scratch scratch(p);
  const int top_k = token < p.tokens ? p.group.map.shape().top_k : 0;
  uint32_t mask = 0;
#pragma unroll 1
  for (int begin = 0; begin < top_k; begin += kFastIds) {
    int32_t id[kFastIds];
#pragma unroll
    for (int i = 0; i < kFastIds; ++i)
      id[i] = begin + i < top_k ? find_slot(p, valid_id(p.in, raw_id(p.in, token, begin + i)), token) : -1;
#pragma unroll
    for (int i = 0; i < kFastIds; ++i) {
      if (id[i] < 0) continue;
      const int rank = expert_rank(find_expert(p, scratch, id[i])) - base;
      if (rank >= 0 && rank < kRanksAtOnce) mask |= 1u << rank;
    }
  }
  return mask;
}

// Gives which tokens of a group go where: thread i of the warp gets those of rank base + i. `token`: the thread's.
template <bool kFast>
__device__ inline uint32_t route_warp(const DispatchParams& p, const Scratch& scratch, int token, int base,
                                      const Ids& ids) {
  const uint32_t mask = kFast ? fast_ranks(p, scratch, ids, token) : any_ranks(p, token, base);
  uint32_t mine = 0;
#pragma unroll 1
  for (int i = 0; i < min(kRanksAtOnce, p.group.map.shape().ranks - base); ++i) {
    const uint32_t going = __ballot_sync(~0u, mask >> i & 1);
    if (lane() == i) mine = going;
  }
  return mine;
}

// Counts what the marks of a round say of all its tokens. In the last round, calls tell(rank, n): n tokens in all go to
// a rank; by one thread for each rank, of `threads` threads.
template <class Tell>
__device__ inline void count_round(const DispatchParams& p, const Scratch& scratch, int round, int thread, int threads,
                                   Tell&& tell) {
  const bool last = (round + 1) * kRound >= p.tokens;
  const bool packets = p.first_packet > 0 && p.first_packet < p.tokens && p.first_packet / kRound == round;
  const int end = round * kRound + kRound - 1;
#pragma unroll 1
  for (int rank = thread; rank < p.group.map.shape().ranks; rank += threads) {
    if (packets) scratch.before_packets()[rank] = scratch.before(p.first_packet, rank);
    const int sum = scratch.through(end, rank);
    if (last) {
      tell(rank, sum);
    } else {
      scratch.base(round + 1)[rank] = sum;
    }
  }
}

// Marks where the tokens of a warp's threads go.
template <bool kFast>
__device__ inline void mark_tokens(const DispatchParams& p, const Scratch& scratch, int token, const Ids& ids,
                                   uint32_t* marks) {
  const int ranks = p.group.map.shape().ranks;
#pragma unroll 1
  for (int base = 0; base < (kFast ? 1 : ranks); base += kRanksAtOnce) {
    const uint32_t going = route_warp<kFast>(p, scratch, token, base, ids);
    if (base + lane() < ranks) marks[base + lane()] = going;
  }
}

// Gives where the marks of later rounds are made and taken from: one group's behind the other.
__device__ inline uint32_t* later_marks(const DispatchParams& p, uint32_t group) {
  const Shape& shape = p.group.map.shape();
  return p.group.marks + p.channel * mark_words(shape) + int64_t{group} * shape.ranks;
}
constexpr uint32_t kFirstLater = kRound / kGroup;  // group
__device__ inline uint32_t groups_of(const DispatchParams& p) {
  return (static_cast<uint32_t>(p.tokens) + kGroup - 1) / kGroup;
}

// Makes a warp's share of the marks of later rounds; by blocks that receive, or by all where those send too. They do so
// even if the group is finished: others may not know that yet, and wait.
template <bool kFast>
__device__ inline void mark_rest(const DispatchParams& p, const Scratch& scratch, const Step& step) {
  if (!p.send || p.tokens <= kRound || !is_receiver(p.roles)) return;
  const Shares shares = received_shares(p.roles);
  uint32_t made = 0;
#pragma unroll 1
  for (uint32_t group = kFirstLater + shares.first; group < groups_of(p); group += shares.step, ++made) {
    const int token = static_cast<int>(group) * kGroup + lane();
    mark_tokens<kFast>(p, scratch, token, load_ids<kFast>(p, token), later_marks(p, group));
  }
  __syncwarp();
  if (made > 0 && lane() == 0) arrive(marked(p.group, step), made);
}

// Whether some of the first round's tokens, but not all, go as packets: then their senders need the round's counts.
__device__ inline bool begins_packets(const DispatchParams& p) {
  return p.first_packet > 0 && p.first_packet < min(p.tokens, kRound);
}

// Does what is left to do for the first round when a block has marked its tokens.
template <class Tell>
__device__ inline void count_first(const DispatchParams& p, const Scratch& scratch, Tell&& tell) {
  if (p.tokens > kRound && !begins_packets(p)) return;  // whoever routes the others does it
  count_round(p, scratch, 0, static_cast<int>(threadIdx.x), kThreads, tell);
  if (begins_packets(p)) meet();
}

// Whether all marks of later rounds are there, after at most `looks` looks; each thread that has seen it has acquired
// them.
__device__ inline bool await_marks(const DispatchParams& p, const Step& step, int looks) {
  const uint32_t groups = groups_of(p) - kFirstLater;
#pragma unroll 1
  while (!__all_sync(~0u, static_cast<int32_t>(arrived(marked(p.group, step)) - groups) >= 0)) {
    if (--looks <= 0) return false;
    __nanosleep(100);
  }
  return true;
}

// Brings a later round's marks into the block's memory, by a warp: those that have been made, or its own.
template <bool kFast>
__device__ inline void fetch_marks(const DispatchParams& p, const Scratch& scratch, int round, bool made) {
  const int ranks = p.group.map.shape().ranks;
  const uint32_t first = static_cast<uint32_t>(round) * kFirstLater;
  if (made) {
    const uint32_t* const from = later_marks(p, first);
    const int there = static_cast<int>(min(groups_of(p) - first, kFirstLater)) * ranks;
#pragma unroll 4
    for (int i = lane(); i < static_cast<int>(kFirstLater) * ranks; i += 32) {
      scratch.going(round)[i] = i < there ? load_fresh<uint32_t>(from + i) : 0;
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < static_cast<int>(kFirstLater); ++i) {
    const int token = round * kRound + i * kGroup + lane();
    mark_tokens<kFast>(p, scratch, token, load_ids<kFast>(p, token), scratch.going(round) + i * ranks);
  }
}

// Routes the rounds after the first, by a warp. It stays as far ahead of the others as there is place.
template <bool kFast, class Tell>
__device__ __noinline__ static void route_rest(const DispatchParams& p, Step step, Tell tell) {
  constexpr int kLooks = 32;  // looks, of 0.7 us and more each
  const Scratch scratch(p);
  if (!begins_packets(p)) count_round(p, scratch, 0, lane(), 32, tell);
  bool made = await_marks(p, step, kLooks);
#pragma unroll 1
  for (int round = 1; round * kRound < p.tokens; ++round) {
    const auto left = [&] {  // the round whose place this one takes
      return lane() >= kWarps - 1 || peek(scratch.progress() + lane()) > round - static_cast<int>(p.at.rounds);
    };
#pragma unroll 1
    while (!__all_sync(~0u, left())) __nanosleep(200);
    __threadfence_block();
    __syncwarp();
    made = made || await_marks(p, step, 1);
    fetch_marks<kFast>(p, scratch, round, made);
    __syncwarp();
    count_round(p, scratch, round, lane(), 32, tell);
    __syncwarp();
    if (lane() == 0) {
      __threadfence_block();  // behind what the other threads have written, with which thread 0 has synchronised
      put(scratch.routed(), round + 1);
    }
  }
}
// Waits until a round is routed, and says that this warp has left the one before. By a sending warp.
__device__ inline void await_round(const Scratch& scratch, int round) {
  if (round == 0) return;
  __syncwarp();
  if (lane() == 0) {
    __threadfence_block();  // what was read of the round before may be overwritten
    put(scratch.progress() + threadIdx.x / 32, round);
  }
#pragma unroll 1
  while (peek_once(scratch.routed()) <= round) __nanosleep(100);
  __threadfence_block();
  __syncwarp();
}

// Whether a token goes to a rank, and its slot there.
struct Place {
  bool goes;
  int slot;
};

// Loads the marks of an exact layout, which the exchange of counts has made (dispatch/placed.cu).
__device__ inline GroupMarks load_marks(const DispatchParams& p, int token, int rank) {
  const int ranks = p.group.map.shape().ranks;
  if (rank >= ranks) return {0, 0};
  const uint64_t both = load_fresh<unsigned long long>(p.handle.marks + (int64_t{token / kGroup} * ranks + rank));
  return {static_cast<uint32_t>(both), static_cast<int32_t>(both >> 32)};
}
__device__ inline Place place_in(const GroupMarks& marks, int token) {
  const int bit = token % kGroup;
  return {(marks.going >> bit & 1) != 0, marks.before + __popc(marks.going & below(bit))};
}

// Gives whether a token goes to rank base + lane(), and its slot there.
template <bool kPlaced>
__device__ inline Place find_place(const DispatchParams& p, const Scratch& scratch, int token, int base) {
  const int rank = base + lane();
  if constexpr (kPlaced) return place_in(load_marks(p, token, rank), token);
  if (rank >= p.group.map.shape().ranks || !scratch.goes(token, rank)) return {false, 0};
  return {true, scratch.before(token, rank)};
}

}  // namespace tw::cuda
