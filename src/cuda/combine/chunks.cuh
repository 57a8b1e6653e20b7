// Rows of a combine that go into their owners' inboxes: in chunks of a few rows, each with a signal. Chunks go to
// whichever block is free; in a block all warps but one send tiles of them, and that one publishes them. Collectives
// use the same (Call is a Sum, or a Collect of collective/collective.cuh).
//
// Takes rows_for() rows for each of owners() owners; gives each in its owner's inbox, with the signal of its chunk.
//
// What breaks if this changes: S4 (a gate chains the senders, one fence precedes the signals), S7 (only warps of one
// block wait for each other), and that all pushing warps pass all turns, or a gate never opens. Turns and orders are
// speed alone.
#pragma once

#include "cuda/combine/sums.cuh"

namespace tw::cuda {

// Gives where the owner of a row wants its partial. `header`: the row's, whose low half is the token, and whose place
// is counted from the part's first token; over a staged transport, its slot.
__device__ inline std::byte* place_of(const Sum& s, int owner, uint64_t header) {
  header -= static_cast<uint32_t>(s.p.part.begin);
  return s.windows()[owner] + inbox_target(s.p.group, s.step.channel, s.step.bank(), owner, header, s.p.bound);
}

// Copies a tile of a plain row: 16 bytes a thread and several at once. The first and the row's header are on their way
// together, and later ones while those before them are stored.
__device__ inline void copy_tile(const Sum& s, int owner, const std::byte* row, uint64_t header, uint32_t tile) {
  const uint32_t end = s.real ? min(s.p.vectors, (tile + 1) * s.p.pushed) : 0;
  constexpr uint32_t kAtOnce = 32 * kTileGroups;
  const auto load = [&](uint32_t first, uint4* value) {
#pragma unroll
    for (uint32_t u = 0; u < kTileGroups; ++u) {
      if (first + 32 * u < end) value[u] = load_fresh<uint4>(row + uint64_t{16} * (first + 32 * u));
    }
  };
  const auto store = [&](std::byte* to, uint32_t first, const uint4* value) {
#pragma unroll
    for (uint32_t u = 0; u < kTileGroups; ++u) {
      if (first + 32 * u < end) put_data(reinterpret_cast<uint4*>(to) + first + 32 * u, value[u]);
    }
  };
  uint4 even[kTileGroups];
  uint32_t first = tile * s.p.pushed + static_cast<uint32_t>(lane());
  load(first, even);
  std::byte* const to = place_of(s, owner, header);
  if (s.p.pushed == kAtOnce) return store(to, first, even);  // as where all SMs work: nothing comes next
  uint4 odd[kTileGroups];  // beside `even`, as what is still on its way cannot be moved
#pragma unroll 1
  for (; first < end; first += 2 * kAtOnce) {
    load(first + kAtOnce, odd);
    store(to, first, even);
    load(first + 2 * kAtOnce, even);
    store(to, first + kAtOnce, odd);
  }
}

// Sums weighted rows, or several rows to a partial, in vectors, into the inbox.
template <twDtype_t kWire>
__device__ __noinline__ static void sum_vectors_into(Sum s, int owner, int slot, uint64_t header, uint32_t part) {
  constexpr int kAtOnce = 2;
  const CombineParams& p = s.p;
  const uint32_t end = min(p.vectors, (part + 1) * p.pushed);
  collect_terms(p, s.set(), owner, slot, load_choice(p, meta_row(p, owner, slot), lane()));
  std::byte* const to = place_of(s, owner, header);  // it came with the choices
#pragma unroll 1
  for (uint32_t v = part * p.pushed + static_cast<uint32_t>(lane()); v < end; v += 32 * kAtOnce) {
    uint4 bits[kAtOnce];
    sum_partial<kWire>(p, s.set(), v, end, bits);
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (v + 32 * u < end) put_data(reinterpret_cast<uint4*>(to) + v + 32 * u, bits[u]);
    }
  }
}

// Does so for other types and odd sizes.
__device__ __noinline__ static void sum_into(Sum s, int owner, int slot, std::byte* to, const Tile& tile) {
  const CombineParams& p = s.p;
  const auto bytes = static_cast<int64_t>(p.group.map.shape().combine_bytes);
  const uint32_t end = min(p.tiles.words, tile.end * kGroupWords);
  collect_terms(p, s.set(), owner, slot, load_choice(p, meta_row(p, owner, slot), lane()));
#pragma unroll 1
  for (uint32_t w = tile.begin * kGroupWords + lane(); w < end; w += 32) {
    const uint64_t value = sum_word(p, s.set(), w);
    if (p.words_fit) {
      put_data(reinterpret_cast<uint64_t*>(to) + w, value);
    } else {
      store_bytes(to + 8 * static_cast<uint64_t>(w), value, bytes - 8 * static_cast<int64_t>(w));
    }
  }
}

// Puts a tile of one row's partial into its owner's inbox, by a warp.
template <twDtype_t kWire, bool kFast>
__device__ inline void push_tile(const Sum& s, int owner, int slot, const Tile& tile) {
  const CombineParams& p = s.p;
  auto header = static_cast<uint64_t>(slot);
  if (asks_header(p.group) && s.real) {
    header = load_fresh<unsigned long long>(p.handle.meta + meta_row(p, owner, slot) * (1 + p.group.map.shape().top_k));
  }
  if (kFast || (p.plain && p.vectors_fit)) {
    copy_tile(s, owner, row_in(p, owner, slot), header, tile.number);
  } else if (p.sums_fit) {
    sum_vectors_into<kWire>(s, owner, slot, header, tile.number);
  } else {
    sum_into(s, owner, slot, place_of(s, owner, header), tile);
  }
}

// A chunk of Simple rows.
struct Chunk {
  int owner;
  int number;
  int rows;  // 0: there is no such chunk
};
// Gives whose chunk is the i-th of all, whether or not it exists. Owners take turns, so that none waits for the
// others'. `Call`: a Sum, or a Collect (collective/collective.cuh). chunk_of() also gives how many rows it has.
template <class Call>
__device__ inline Chunk place_of_chunk(const Call& s, int i) {
  const int number = quotient(i, s.owners());
  const int owner = s.me() + 1 + i - number * s.owners();
  return {owner < s.ranks() ? owner : owner - s.ranks(), number, s.chunk_rows()};
}
template <class Call>
__device__ inline Chunk chunk_of(const Call& s, int i) {
  Chunk chunk = place_of_chunk(s, i);
  chunk.rows = max(0, min(chunk.rows, s.rows_for(chunk.owner) - chunk.number * chunk.rows));
  return chunk;
}

// Gives how many chunks all owners have together, if each had as many as the one with most.
template <class Call>
__device__ inline int chunks_of(const Call& s) {
  int most = 0;
#pragma unroll 1
  for (int i = 0; i < s.ranks(); ++i) {
    if (!s.is_direct(i)) most = max(most, s.rows_for(i));
  }
  return s.owners() * quotient(most + s.chunk_rows() - 1, s.chunk_rows());
}

constexpr int kPushing = kWarps - 1;  // warps of a block that send; the last one publishes

// A block's chunks, in turns, as it has drawn them; turn t has place t % kChunks. The first p.drawn turns are given.
// After that the warp that publishes draws one for each turn that is sent, in order, so that no turn with a chunk
// follows the first turn without one. All pushing warps pass all turns up to that one.
//
// Warps meet at gates, because a word that is looked at again and again is either a race by the language's rules or an
// atomic operation; with the latter a combine of 1024 tokens took 72 us instead of 54.
struct Work {
  uint64_t* given;
  uint64_t* sent;
  int32_t* taken;
  int drawn;  // turns ahead of what is sent; at most half of the places

  template <class Call>
  __device__ explicit Work(const Call& s)
      : given(shared_at<uint64_t>(s.p.at.given)),
        sent(shared_at<uint64_t>(s.p.at.sent)),
        taken(shared_at<int32_t>(s.p.at.taken)),
        drawn(s.p.drawn) {}

  static __device__ int place_of(int turn) { return turn % kChunks; }
  static __device__ uint32_t parity_of(int turn) { return static_cast<uint32_t>(turn / kChunks % 2); }

  // Gives a turn's first chunk, -1 if it has none. Waits until that is known.
  __device__ int find(int turn) const {
    await_gate(given + place_of(turn), parity_of(turn));
    return taken[place_of(turn)];
  }
  // Makes known which chunks a turn has: those from `chunk` on; none if that is not below `chunks`. By one thread. The
  // place is free: the turn that had it is sent, so all warps have read it.
  __device__ void give(int turn, int chunk, int chunks) const {
    taken[place_of(turn)] = chunk < chunks ? chunk : -1;
    arrive_at(given + place_of(turn));
  }
};

// Prepares the gates: nobody has begun. By a block, before a barrier.
template <class Call>
__device__ inline void begin_work(const Call& s) {
  const Work work(s);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kChunks; i += kThreads) {
    make_gate(work.given + i, 1);
    make_gate(work.sent + i, kPushing);
  }
}

// Whether a block leaves the last chunks to others. SMs that share their way to the link with several that send are
// slower, and what one of them has drawn ahead would be the last to be sent. `turn`: the first that is not sent. Turns
// must be of one chunk: then not all blocks are slower than the mean, and those that are not draw what is left. (A
// combine of 4096 tokens took 0.4 us longer without this; 0.2 us with half as many chunks left, or with a limit of 85 %
// instead of 90.)
__device__ inline bool leaves(const Work& work, int turn, int blocks, int chunks) {
  constexpr int kLast = 8;  // chunks, for each block
  const int drawn = turn + work.drawn;
  const int last = work.taken[Work::place_of(drawn - 1)];
  return last < 0 || (last + kLast * blocks >= chunks && drawn * blocks < last - last / 10);
}

// Draws chunks, and publishes them when all their tiles are sent. One warp does nothing else, because a fence takes as
// long as what is on the wire before it: a sender that made it would be the last to end its next tile too, and so make
// the next fence as well. S4: the gate chains what the senders wrote, one fence brings all of that before the signals.
template <class Call>
__device__ inline void publish_chunks(const Call& s) {
  const Work work(s);
  const int chunks = chunks_of(s);
  const int blocks = s.p.roles.sending;
  const int together = s.p.turn_chunks;
  if (lane() < work.drawn) work.give(lane(), (static_cast<int>(blockIdx.x) + lane() * blocks) * together, chunks);
  __syncwarp();
  int turn = 0;
#pragma unroll 1
  while (work.find(turn) >= 0) {
    await_gate(work.sent + Work::place_of(turn), Work::parity_of(turn));
    const int mine = turn + lane();  // turns after it may be sent too: one fence serves all
    const int place = Work::place_of(mine);
    const bool full =
        lane() < work.drawn && work.taken[place] >= 0 && has_opened(work.sent + place, Work::parity_of(mine));
    const int done = __ffs(static_cast<int>(~__ballot_sync(~0u, full))) - 1;
    int drawn = 0;  // the reply is on its way while the signals are stored
    const bool ends = s.yields() && leaves(work, turn, blocks, chunks);
    if (lane() == 0 && !ends) {
      drawn = static_cast<int>(atomicAdd(work_counters(s.p.group, s.step), static_cast<uint32_t>(done)));
    }
#pragma unroll 1
    for (int i = lane(); i < done * together; i += 32) {
      const int of = i / together;
      const Chunk chunk = chunk_of(s, work.taken[Work::place_of(turn + of)] + i - of * together);
      fence_system();  // one instruction of all these threads, each of which stores a signal
      if (chunk.rows > 0 && signals_parts(s.p.group)) {
        put_word(s.windows()[chunk.owner] +
                     s.p.group.map.chunk_signal(s.step.channel, s.step.bank(), s.p.group.me, chunk.number),
                 s.step.number);
      }
    }
    __syncwarp();  // all have read what is about to be overwritten
    drawn = __shfl_sync(~0u, drawn, 0);
    const int next = ends ? chunks : (work.drawn * blocks + drawn + lane()) * together;
    if (lane() < done) work.give(mine + work.drawn, next, chunks);
    __syncwarp();
    turn += done;
  }
}

// Sends one of a chunk's tiles, or nothing if the chunk has fewer rows.
template <twDtype_t kWire, bool kFast>
__device__ inline void push_item(const Sum& s, int number, int item) {
  const int parts = s.p.pushed_parts;
  const Chunk chunk = chunk_of(s, number);
  const int row = s.chunk_rows() == 1 ? 0 : item / parts;
  if (s.real && row >= chunk.rows) return;
  push_tile<kWire, kFast>(s, chunk.owner, chunk.number * s.chunk_rows() + row,
                          tile_of(s.p.tiles, static_cast<uint32_t>(item - row * parts)));
}

// The tile that a pushing warp begins with, in usual calls, out of the chunks that the block is given (publish_chunks).
// It is loaded while nobody knows yet whether there is such a row, and stored as soon as that is known. From there a
// warp takes 4 us to meet the instructions that find and send any other tile, and meanwhile the link has these first
// tiles to carry. (With two for each warp, chunks were published 4 us later, and 4096 tokens took 176 us instead of
// 174.5.)
struct FirstPush {
  bool given;
  int owner;
  int slot;
  uint32_t begin;    // the thread's first vector of the row
  uint32_t vectors;  // how many vectors the thread has
  const std::byte* row;
  const uint64_t* header;
  uint64_t to = 0;  // the row's header
  uint4 value[kTileGroups] = {};

  __device__ explicit FirstPush(const Sum& s) {
    const CombineParams& p = s.p;
    const int items = s.chunk_rows() * p.pushed_parts;
    const int turn = s.set() / (items * p.turn_chunks);
    const int item = s.set() % items;
    const int number =
        (static_cast<int>(blockIdx.x) + turn * p.roles.sending) * p.turn_chunks + s.set() / items % p.turn_chunks;
    given = s.sends() && s.set() < kPushing && s.owners() > 0 && p.pushed == kPushedVectors &&
            p.bound > p.group.packet_tokens && turn < p.drawn;
    const Chunk chunk = given ? place_of_chunk(s, number) : Chunk{};
    owner = chunk.owner;
    slot = chunk.number * s.chunk_rows() + item / p.pushed_parts;
    given = given && slot < p.bound;
    begin = static_cast<uint32_t>(item % p.pushed_parts) * kPushedVectors + static_cast<uint32_t>(lane());
    vectors = given && begin < p.vectors ? min(uint32_t{kTileGroups}, (p.vectors - begin + 31) / 32) : 0;
  }
  // Finds where the row lies; in an exact layout, counted from the row at which the owner's rows begin.
  __device__ void find(const CombineParams& p) {
    const int64_t source = p.group.map.shape().exact() ? 0 : int64_t{owner} * p.bound;
    row = p.rows + owner * p.block_stride + slot * p.row_stride + uint64_t{16} * begin;
    header = p.handle.meta + (source + slot) * (1 + p.group.map.shape().top_k);
    pin(row, header, begin, vectors);
  }
  // Starts to load the row; but not in an exact layout, where nobody knows yet where rows begin.
  __device__ void bring_near(const CombineParams& p) const {
    constexpr uint32_t kVectors = 8;  // vectors that one prefetch brings
    if (!given || p.group.map.shape().exact()) return;
    const uint32_t v = begin + (kVectors - 1) * static_cast<uint32_t>(lane());
    if (kVectors * static_cast<uint32_t>(lane()) < kPushedVectors && v < p.vectors) {
      prefetch(row + uint64_t{16} * (kVectors - 1) * static_cast<uint32_t>(lane()));
    }
    if (lane() == 31) prefetch(header);
  }
  // Loads the tile. `first`, `rows`: in an exact layout, the row at which the owner's begin, and how many there are.
  // (Elsewhere each slot has a place.)
  __device__ void load(const CombineParams& p, int first, int rows) {
    if (!given) return;
    if (p.group.map.shape().exact()) {
      row += first * p.row_stride;
      header += int64_t{first} * (1 + p.group.map.shape().top_k);
      if (slot >= rows) vectors = 0;
    }
    if (vectors > 0) to = load_fresh<unsigned long long>(header);
#pragma unroll
    for (uint32_t i = 0; i < kTileGroups; ++i) {
      if (i < vectors) value[i] = load_fresh<uint4>(row + 512 * i);
    }
  }
  __device__ void store(const Sum& s) const {
    auto* const at = reinterpret_cast<uint4*>(place_of(s, owner, to)) + begin;
#pragma unroll
    for (uint32_t i = 0; i < kTileGroups; ++i) {
      if (i < vectors) put_data(at + 32 * i, value[i]);
    }
  }
};

// Sends all chunks' tiles that fall to this warp, or publishes. `begun`: the warp's first tile is sent, or there is
// none.
template <twDtype_t kWire, bool kFast, class Call>
__device__ inline void push_chunks(const Call& s, bool begun = false) {
  if (s.set() == kPushing) {
    if (s.real) publish_chunks(s);
    return;
  }
  const Work work(s);
  const int items = s.chunk_rows() * s.p.pushed_parts;
  int x = s.set() + (begun ? kPushing : 0);  // the warp's next tile, counted over all chunks of all turns
  int begin = 0;
#pragma unroll 1
  for (int turn = 0;; ++turn) {
    const int first = s.real ? work.find(turn) : 0;
    if (first < 0) return;
#pragma unroll 1
    for (int i = 0; i < s.p.turn_chunks; ++i, begin += items) {
#pragma unroll 1
      for (; x < begin + items; x += kPushing) push_item<kWire, kFast>(s, first + i, x - begin);
    }
    if (!s.real) return;
    __syncwarp();
    if (lane() == 0) arrive_at(work.sent + Work::place_of(turn));
  }
}

}  // namespace tw::cuda
