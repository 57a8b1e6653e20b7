// How rows return as e4m3: partials are made, quantised and put into their owners' inboxes, a tile at a time. Usual
// calls, rows of bfloat16 in whole tiles, each a partial as it lies, have a way of their own, in which a warp finds and
// loads its next tile before it quantises the present one.
//
// Takes the chunks that its block draws (combine/chunks.cuh, Work); gives each row's tiles in its owner's inbox, and
// arrives at the gates of their turns.
//
// What breaks if this changes: S4 and S7 as in combine/chunks.cuh: a warp arrives at every turn, in order, when all its
// tiles of that turn are stored, and waits for no turn that its own could hold up (Walk).
#pragma once

#include "cuda/combine/chunks.cuh"
#include "cuda/combine/fp8.cuh"

namespace tw::cuda {

// A warp's view of the call.
struct Fp8Sum : Sum {
  const Fp8Params& q;

  // Whether a partial is a row, without a weight.
  __device__ bool whole_rows() const { return !p.expert_major && !p.weighted; }
  __device__ bool in_blocks() const { return q.scale == 0.0f; }
};

// Quantises a thread's part of a tile into its place in an inbox. `begin`: its first element; `largest`: the largest
// magnitude of each step.
__device__ __forceinline__ void put_tile(const Fp8Sum& s, std::byte* to, int64_t begin, const Sixteen (&sum)[kFp8Steps],
                                         uint32_t (&largest)[kFp8Steps]) {
  const bool in_blocks = s.in_blocks();
  float scale[kFp8Steps];
#pragma unroll
  for (int u = 0; u < kFp8Steps; ++u) {
    if (in_blocks) largest[u] = block_largest(largest[u]);
    scale[u] = in_blocks ? block_scale(largest[u]) : s.q.scale;
  }
#pragma unroll
  for (int u = 0; u < kFp8Steps; ++u) {
    const int64_t first = begin + u * kFp8Step;
    if (first >= s.p.elements) continue;
    put_data(reinterpret_cast<uint4*>(to + first), narrow_sixteen(sum[u], scale[u], largest[u], in_blocks));
    if (in_blocks && lane() % kFp8Sharing == 0) {
      put_data(reinterpret_cast<float*>(to + s.q.scales_from) + first / static_cast<int64_t>(kFp8Elements), scale[u]);
    }
  }
}

// ---- Calls of any types and layouts

// Whether a thread's part of the tile is loaded by load_whole. `begin`: the thread's first element; alike in a warp.
__device__ __forceinline__ bool loads_whole(const Fp8Sum& s, int64_t begin) {
  const CombineParams& p = s.p;
  const int64_t end = begin - int64_t{lane()} * kFp8Each + kFp8Tile;
  return p.sums_fit != 0 && float_bytes(p.rows_dtype) == 2 && end <= p.elements;
}
__device__ __forceinline__ void load_tile(const Fp8Sum& s, const std::byte* row, int64_t begin,
                                          Sixteen (&to)[kFp8Steps], uint32_t (&largest)[kFp8Steps]) {
  const CombineParams& p = s.p;
  if (loads_whole(s, begin)) {
    if (p.rows_dtype == twBfloat16) return load_whole<twBfloat16>(row, begin, to, largest);
    return load_whole<twFloat16>(row, begin, to, largest);
  }
#pragma unroll
  for (int u = 0; u < kFp8Steps; ++u) {
    load_sixteen(row, p.rows_dtype, begin + u * kFp8Step, p.elements, p.sums_fit != 0, &to[u]);
    largest[u] = largest_of(to[u]);
  }
}
// Adds a term of the thread's part of a tile to a partial; `first`: it begins the sum.
__device__ __forceinline__ void add_row(const Fp8Sum& s, const std::byte* row, const float* weight, int64_t begin,
                                        bool first, Sixteen (&sum)[kFp8Steps]) {
  Sixteen term[kFp8Steps];
  uint32_t largest[kFp8Steps];
  load_tile(s, row, begin, term, largest);
#pragma unroll
  for (int u = 0; u < kFp8Steps; ++u) {
#pragma unroll
    for (int i = 0; i < kFp8Each; ++i) {
      const float value = weight != nullptr ? __fmul_rn(*weight, term[u].v[i]) : term[u].v[i];
      sum[u].v[i] = first ? value : __fadd_rn(sum[u].v[i], value);
    }
  }
}

// Sends one of a chunk's tiles, or nothing if the chunk has fewer rows (combine/chunks.cuh, push_chunks). Usual calls
// have send_usual instead.
template <twDtype_t kWire, bool kFast>
__device__ inline void push_item(const Fp8Sum& s, int number, int item) {
  const CombineParams& p = s.p;
  const Chunk chunk = chunk_of(s, number);
  const auto row = static_cast<int>(divide(static_cast<uint32_t>(item), p.tiles.per_row));
  if (row >= chunk.rows) return;
  const int slot = chunk.number * s.chunk_rows() + row;
  auto header = static_cast<uint64_t>(slot);
  if (asks_header(p.group)) {
    const int64_t meta = meta_row(p, chunk.owner, slot) * (1 + p.group.map.shape().top_k);
    header = load_fresh<unsigned long long>(p.handle.meta + meta);
  }
  const int64_t begin = int64_t{item - row * p.pushed_parts} * kFp8Tile + int64_t{lane()} * kFp8Each;
  Sixteen sum[kFp8Steps];
  uint32_t largest[kFp8Steps];
  if (s.whole_rows()) {
    load_tile(s, row_in(p, chunk.owner, slot), begin, sum, largest);
  } else {
    collect_terms(p, s.set(), chunk.owner, slot, load_choice(p, meta_row(p, chunk.owner, slot), lane()));
    const int set = s.set() * p.group.map.shape().top_k;
    const auto rows = shared_at<const std::byte*>(p.at.rows) + set;
    const auto weights = shared_at<float>(p.at.weights) + set;
    const int count = shared_at<int32_t>(p.at.row_counts)[s.set()];
#pragma unroll 1
    for (int j = 0; j < count; ++j) add_row(s, rows[j], p.weighted ? weights + j : nullptr, begin, j == 0, sum);
#pragma unroll
    for (int u = 0; u < kFp8Steps; ++u) largest[u] = largest_of(sum[u]);
  }
  put_tile(s, place_of(s, chunk.owner, header), begin, sum, largest);
}

// ---- Usual calls

// A tile as it is found, before it is needed.
struct Found {
  bool given = false;
  int owner = 0;
  int64_t begin = 0;  // the thread's first element
  const std::byte* row = nullptr;
  uint64_t header = 0;
};

// A warp's way through its tiles, in the order of push_chunks, ahead of what it has sent. A turn is drawn when the one
// that lies work.drawn turns before it is sent, by all warps: so one that this warp would hold up itself is not looked
// for yet.
struct Walk {
  const Fp8Sum& s;
  Work work;
  int items;  // tiles in a turn
  int item;   // the next tile, counted from the turn's first
  int turn = -1;
  int chunk = 0;
  int sent = 0;  // the first turn that the warp has not sent
  bool ended = false;

  __device__ explicit Walk(const Fp8Sum& of)
      : s(of), work(of), items(of.chunk_rows() * of.p.pushed_parts), item(of.set() + items) {}

  // Comes to the turn of the next tile. False: there is none, or it is not drawn yet.
  __device__ __forceinline__ bool come() {
#pragma unroll 1
    while (item >= items && !ended && turn + 1 < sent + work.drawn) {
      chunk = work.find(++turn);
      ended = chunk < 0;
      item -= items;
    }
    return !ended && item < items;
  }
  // Finds the next tile, whose header is then on its way.
  __device__ __forceinline__ Found find() {
    const CombineParams& p = s.p;
    Found found;
#pragma unroll 1
    while (come()) {
      const Chunk of = chunk_of(s, chunk);
      const auto row = static_cast<int>(divide(static_cast<uint32_t>(item), p.tiles.per_row));
      const int tile = item - row * p.pushed_parts;
      item += kPushing;
      if (row >= of.rows) continue;
      const int slot = of.number * s.chunk_rows() + row;
      found.given = true;
      found.owner = of.owner;
      found.begin = int64_t{tile} * kFp8Tile + int64_t{lane()} * kFp8Each;
      found.row = row_in(p, of.owner, slot);
      found.header = static_cast<uint64_t>(slot);
      if (asks_header(p.group)) {
        const int64_t meta = meta_row(p, of.owner, slot) * (1 + p.group.map.shape().top_k);
        found.header = load_fresh<unsigned long long>(p.handle.meta + meta);
      }
      return found;
    }
    return found;
  }
  // Makes known that all tiles of the turns before `next` are sent. By a warp.
  __device__ __forceinline__ void pass(int next) {
    __syncwarp();
    if (lane() == 0) {
#pragma unroll 1
      for (int i = sent; i < next; ++i) arrive_at(work.sent + Work::place_of(i));
    }
    sent = max(sent, next);
  }
};

// A tile on its way to a warp. What is on its way cannot be moved, so a warp has two of these and uses them in turns.
struct LoadedTile {
  Found tile;
  uint4 raw[kFp8Steps][2];
};
__device__ __forceinline__ void load_next(Walk* walk, LoadedTile* to) {
  to->tile = walk->find();
  if (to->tile.given) load_raw(to->tile.row, to->tile.begin, to->raw);
}
// Quantises and stores it, and makes known what is sent. The other tile is the last that the walk has found.
__device__ __forceinline__ void send_loaded(Walk* walk, const LoadedTile& loaded) {
  const Fp8Sum& s = walk->s;
  if (loaded.tile.given) {
    Sixteen sum[kFp8Steps];
    uint32_t largest[kFp8Steps];
    widen_raw<twBfloat16>(loaded.raw, sum, largest);
    put_tile(s, place_of(s, loaded.tile.owner, loaded.tile.header), loaded.tile.begin, sum, largest);
  }
  walk->pass(walk->turn);
}

// Sends all tiles that fall to this warp, or publishes.
//
// A tile took 7600 cycles where it was looked for after the one before (2x H200, 4096 tokens): 2300 of them until its
// place was known, as the compiler puts the load of a header behind the first use of the row, and 3800 for the row.
// With the next one on its way the combine took 123.1 us instead of 127.5.
//
// Rejected: three tiles of a warp on their way to shared memory. They took 128.2 us.
__device__ inline void send_usual(const Fp8Sum& s) {
  if (s.set() == kPushing) return publish_chunks(s);
  Walk walk(s);
  LoadedTile even, odd;
  load_next(&walk, &even);
#pragma unroll 1
  while (even.tile.given || !walk.ended) {
    load_next(&walk, &odd);
    send_loaded(&walk, even);
    load_next(&walk, &even);
    send_loaded(&walk, odd);
  }
  walk.pass(walk.turn);
}

}  // namespace tw::cuda
