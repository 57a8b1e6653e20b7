// Rows of a combine that go into their owners' inboxes: in chunks of a few, each with a word. Chunks go to whichever
// block is free; in a block all warps but one send units of them, that one makes them known.
#pragma once

#include "nvlink/combine.cuh"

namespace tw::nvlink {

// Where the owner of a row wants its partial.
__device__ inline std::byte* place_of(const Sum& s, int owner, uint64_t header) {
  return s.windows()[owner] +
         s.p.group.map.inbox(s.step.lane, s.step.bank(), static_cast<int>(header), static_cast<int>(header >> 32));
}

// A unit of a plain row: 16 bytes a lane and several at once; they and the row's header are on their way together.
__device__ inline void copy_unit(const Sum& s, int owner, const std::byte* row, uint64_t header, uint32_t unit) {
  uint4 value[kUnitGroups];
  const uint32_t first = unit * kPushedVectors + static_cast<uint32_t>(lane());
#pragma unroll
  for (uint32_t u = 0; u < kUnitGroups; ++u) {
    if (first + 32 * u < s.p.vectors) value[u] = load_fresh<uint4>(row + uint64_t{16} * (first + 32 * u));
  }
  std::byte* const to = place_of(s, owner, header);
#pragma unroll
  for (uint32_t u = 0; u < kUnitGroups; ++u) {
    if (first + 32 * u < s.p.vectors) reinterpret_cast<uint4*>(to)[first + 32 * u] = value[u];
  }
}

// Of weighted rows, several rows to a partial, other types, odd sizes.
__device__ __noinline__ static void sum_into(Sum s, int owner, int slot, std::byte* to, const Unit& unit) {
  const CombineParams& p = s.p;
  const auto bytes = static_cast<int64_t>(p.group.map.shape().combine_bytes);
  const uint32_t end = min(p.units.words, unit.end * kGroupWords);
  __syncwarp();  // the set is about to be overwritten
  collect_terms(p, s.set(), owner, slot);
#pragma unroll 1
  for (uint32_t w = unit.begin * kGroupWords + lane(); w < end; w += 32) {
    const uint64_t value = sum_word(p, s.set(), w);
    if (p.words_fit) {
      reinterpret_cast<uint64_t*>(to)[w] = value;
    } else {
      store_bytes(to + 8 * static_cast<uint64_t>(w), value, bytes - 8 * static_cast<int64_t>(w));
    }
  }
}

// A unit of one row's partial into its owner's inbox, by a warp.
template <bool kFast>
__device__ inline void push_unit(const Sum& s, int owner, int slot, const Unit& unit) {
  const CombineParams& p = s.p;
  const uint64_t header = load_fresh<unsigned long long>(
      p.handle.meta + (static_cast<int64_t>(owner) * p.bound + slot) * (1 + p.group.map.shape().top_k));
  if (kFast || (p.plain && p.vectors_fit)) {
    copy_unit(s, owner, row_of(p, owner, slot), header, unit.number);
  } else {
    sum_into(s, owner, slot, place_of(s, owner, header), unit);
  }
}

// A chunk of rows that are no lines.
struct Chunk {
  int owner;
  int number;
  int rows;  // 0: there is no such chunk
};
// Chunks of all owners in turns, so that none waits for the others'. Own rows that are summed where they lie have none.
__device__ inline Chunk chunk_of(const Sum& s, int i) {
  const int owners = s.ranks() - (s.p.own_direct ? 1 : 0);
  const int owner = (s.p.group.me + 1 + i % owners) % s.ranks();
  const int number = i / owners;
  const int rows = s.first_line(owner, s.counts()[owner]);
  return {owner, number, max(0, min(s.chunk_rows(), rows - number * s.chunk_rows()))};
}

// Of all owners, those of which there are fewer left out.
__device__ inline int chunks_of(const Sum& s) {
  int most = 0;
#pragma unroll 1
  for (int i = 0; i < s.ranks(); ++i) {
    if (i != s.p.group.me || !s.p.own_direct) most = max(most, s.first_line(i, s.counts()[i]));
  }
  return (s.ranks() - (s.p.own_direct ? 1 : 0)) * ((most + s.chunk_rows() - 1) / s.chunk_rows());
}

constexpr int kPushing = kWarps - 1;  // warps of a block that send; the last publishes
constexpr int kDrawn = 3;             // chunks that a block draws before it needs them

// A block's chunks, in the order in which it has drawn them: the first few are given, then each is drawn by whoever
// begins the one kDrawn before. They are numbered (`turn`), and the place of number t is t % kChunks.
struct Work {
  int32_t* taken;      // entry_of; 0: nothing yet
  int32_t* sent;       // units sent of all chunks that have had the place
  int32_t* published;  // turns that are over
  int32_t* end;        // the first turn of which there is no chunk, if that is known

  __device__ explicit Work(const Sum& s)
      : taken(shared_at<int32_t>(s.p.at.taken)),
        sent(shared_at<int32_t>(s.p.at.sent)),
        published(shared_at<int32_t>(s.p.at.published)),
        end(published + 1) {}

  // A turn's chunk, and which turn: enough of its number to tell it from those that had the place before.
  static __device__ uint32_t entry_of(int turn, int chunk) {
    return static_cast<uint32_t>(kTurnBit | (turn / kChunks & kTurns) << kChunkBits | chunk);
  }
  static __device__ int chunk_of(uint32_t entry) { return static_cast<int>(entry & ((1u << kChunkBits) - 1)); }

  // Whether a turn has a chunk. Waits until that is known, as it is when the block's other warps get so far. By a warp.
  __device__ bool find(int turn, int* chunk) const {
#pragma unroll 1
    while (true) {
      const auto entry = static_cast<uint32_t>(peek_once(taken + turn % kChunks));
      *chunk = chunk_of(entry);
      if (entry == entry_of(turn, *chunk)) return true;
      if (peek_once(end) <= turn) return false;
      __nanosleep(20);
    }
  }
  // Makes known which chunk a turn has. By one thread.
  __device__ void give(int turn, int chunk, int chunks) const {
    if (chunk >= chunks) {
      put(end, turn);  // later ones are drawn later, so they have none either
      return;
    }
    while (turn - peek(published) >= kChunks) __nanosleep(100);  // the place is still another's
    put(taken + turn % kChunks, static_cast<int32_t>(entry_of(turn, chunk)));
  }

 private:
  static constexpr int kChunkBits = 26;
  static constexpr uint32_t kTurnBit = 1u << 31;
  static constexpr int kTurns = 31;
};

// Nobody has begun. By a block, before a barrier.
__device__ inline void begin_work(const Sum& s) {
  const Work work(s);
  for (int i = static_cast<int>(threadIdx.x); i < kChunks; i += kThreads) work.taken[i] = 0, work.sent[i] = 0;
  if (threadIdx.x == 0) *work.published = 0, *work.end = INT32_MAX;
}

// Makes chunks known when all their units are sent, by a warp that does nothing else: a fence takes as long as what is
// on the wire before it, and a sender that made it would be the last to end its next unit too, and so make the next
// fence as well. S4: the counter chains what the senders wrote, one fence brings all of that before the words.
__device__ inline void publish_chunks(const Sum& s) {
  const Work work(s);
  const int units = s.chunk_rows() * s.p.pushed_parts;
  int turn = 0;
#pragma unroll 1
  while (true) {
    const int mine = turn + lane();
    const auto entry = static_cast<uint32_t>(peek(work.taken + mine % kChunks));
    const int number = Work::chunk_of(entry);
    const bool full =
        entry == Work::entry_of(mine, number) && peek(work.sent + mine % kChunks) >= units * (mine / kChunks + 1);
    const int done = __ffs(static_cast<int>(~__ballot_sync(~0u, full && lane() < 31))) - 1;
    if (done == 0) {
      if (peek_once(work.end) <= turn) return;
      __nanosleep(100);
      continue;
    }
    __syncwarp();
    if (lane() < done) {
      fence_system();  // one instruction of all these lanes, each of which stores a word
      const Chunk chunk = chunk_of(s, number);
      if (chunk.rows > 0) {
        store_word(
            s.windows()[chunk.owner] + s.p.group.map.chunk_word(s.step.lane, s.step.bank(), s.p.group.me, chunk.number),
            s.step.number);
      }
    }
    turn += done;
    if (lane() == 0) put(work.published, turn);
  }
}

// One of a chunk's units, or nothing if it has not so many rows.
template <bool kFast>
__device__ inline void push_item(const Sum& s, int number, int item) {
  const int parts = s.p.pushed_parts;
  const Chunk chunk = chunk_of(s, number);
  const int row = item / parts;
  if (row >= chunk.rows) return;
  push_unit<kFast>(s, chunk.owner, chunk.number * s.chunk_rows() + row,
                   unit_of(s.p.units, static_cast<uint32_t>(item - row * parts)));
}

template <bool kFast>
__device__ inline void push_chunks(const Sum& s) {
  const Work work(s);
  const int chunks = chunks_of(s);
  const int items = s.chunk_rows() * s.p.pushed_parts;
  const int blocks = s.p.roles.sending;
  if (threadIdx.x == 0) {
    for (int turn = 0; turn < kDrawn && peek(work.end) > turn; ++turn) {
      work.give(turn, static_cast<int>(blockIdx.x) + turn * blocks, chunks);
    }
  }
  if (s.set() == kPushing) return publish_chunks(s);
#pragma unroll 1
  for (int x = s.set();; x += kPushing) {
    const int turn = x / items;
    const int item = x - turn * items;
    int number = 0;
    if (!work.find(turn, &number)) return;
    int drawn = 0;
    int before = 0;
    const bool draws = item == 0 && work.find(turn + kDrawn - 1, &before);  // so that they are drawn in order
    if (draws && lane() == 0) drawn = static_cast<int>(atomicAdd(tickets(s.p.group, s.step), 1));
    push_item<kFast>(s, number, item);
    __syncwarp();
    if (lane() != 0) continue;
    if (draws) work.give(turn + kDrawn, kDrawn * blocks + drawn, chunks);
    __threadfence_block();
    atomicAdd(shared_at<int32_t>(s.p.at.sent) + turn % kChunks, 1);
  }
}

}  // namespace tw::nvlink
