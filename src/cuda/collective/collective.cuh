// What gathers and reduces have in common. Each rank sends rows for each other rank (a gather the same ones to all)
// into its places there (layout/collective_map.h) or, if they are few, as packets; what becomes of them there is in
// collective/gather.cu and collective/reduce.cu. The kernels are those of a combine without its routing: the same
// packets (device/ll128.cuh), chunks with a signal each (combine/chunks.cuh), and ends.
//
// Takes CollectiveParams and three functions: sent, receive and clear (collect, below). Gives the step's end, counts
// and offsets.
//
// What breaks if this changes: S2 (await_signals), S3 (late_signal, own_pushed), S4, S7 (send before receive), S8
// (skip_step), and that ranks agree on sizes (digest_of).
#pragma once

#include "cuda/combine/chunks.cuh"
#include "cuda/device/ids.cuh"
#include "cuda/launch/collective.h"
#include "cuda/launch/launch.h"

namespace tw::cuda {

// A warp's view of the call.
struct Collect {
  const CollectiveParams& p;
  Step step;
  static constexpr bool real = true;
  __device__ static constexpr bool yields() { return false; }

  __device__ int ranks() const { return p.group.map.shape().ranks; }
  __device__ int me() const { return p.group.me; }
  __device__ int chunk_rows() const { return p.chunk_rows; }
  __device__ int set() const { return static_cast<int>(threadIdx.x / 32); }
  __device__ bool sends() const { return p.send && is_sender(p.roles); }
  __device__ bool receives() const { return p.receive && is_receiver(p.roles); }
  // Whether this block waits for the signals: the last block that sends, or where none sends the last.
  __device__ bool concludes() const { return p.receive && blockIdx.x + 1 == static_cast<uint32_t>(p.roles.sending); }

  __device__ std::byte** windows() const { return shared_at<std::byte*>(p.at.windows); }
  __device__ int32_t* sizes() const { return shared_at<int32_t>(p.at.sizes); }
  __device__ int32_t* first() const { return shared_at<int32_t>(p.at.first); }
  __device__ int32_t* came() const { return shared_at<int32_t>(p.at.came); }
  __device__ int32_t* failed() const { return shared_at<int32_t>(p.at.failed); }
  __device__ std::byte* bank(int rank) const { return windows()[rank] + p.group.map.bank(step.channel, step.bank()); }

  // Gives how many ranks rows are sent to: the others, and itself where the caller's rows lie in the window, which a
  // peer may overwrite once this rank has published (S3).
  __device__ int owners() const { return ranks() - (p.own_pushed ? 0 : 1); }
  // Whether this rank's own rows are read from where the caller has them.
  __device__ bool is_direct(int rank) const { return rank == me() && !p.own_pushed; }
  // Gives whose rows this rank's are where an owner gets them.
  __device__ int source_at(int owner) const { return tw::cuda::source_at(p.group, owner); }
  // Gives how many rows this rank sends to a rank.
  __device__ int rows_for(int rank) const {
    if (p.reduces && !p.all_sizes) return p.bound;
    return sizes()[p.reduces ? rank : me()];
  }
  // row_in() gives row i for a rank, of one tensor; place() gives its place there, in a bank.
  __device__ const std::byte* row_in(const CollectiveRows& rows, int rank, int i) const {
    const int64_t row = p.reduces ? first()[rank] + int64_t{i} : i;
    return rows.in + rank * rows.block_stride + row * rows.row_stride;
  }
  __device__ uint64_t place(const CollectiveRows& rows, int source, int i) const {
    return rows.begin +
           (static_cast<uint64_t>(source) * static_cast<uint64_t>(p.bound) + static_cast<uint64_t>(i)) * rows.row_bytes;
  }
};

// Reports a size in device memory that is out of range; one for each step.
__device__ __noinline__ static void report_size(const GroupView& g, Step step, int rank, int64_t size) {
  report_id(g, step, rank, -1, size);
}

// Loads this rank's own size, or all ranks'; by a block, before a barrier. A size that is out of range is taken for the
// nearest one within, on all ranks alike.
__device__ inline void load_sizes(const Collect& s) {
  const CollectiveParams& p = s.p;
  const int count = p.all_sizes ? s.ranks() : 1;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    int64_t size = 0;
    if (p.sizes_at == nullptr) {
      size = p.sizes[i];
    } else if (p.wide_sizes) {
      size = static_cast<int64_t>(load_fresh<unsigned long long>(static_cast<const int64_t*>(p.sizes_at) + i));
    } else {
      size = static_cast<int32_t>(load_fresh<uint32_t>(static_cast<const int32_t*>(p.sizes_at) + i));
    }
    const int rank = p.all_sizes ? i : s.me();
    s.sizes()[rank] = static_cast<int32_t>(min(max(size, int64_t{0}), int64_t{p.bound}));
    if (size < 0 || size > p.bound) s.came()[rank] = 1;  // to be reported when the step is known
  }
}
__device__ inline void report_sizes(const Collect& s) {
  const CollectiveParams& p = s.p;
  if (blockIdx.x != 0) return;
#pragma unroll 1
  for (int rank = static_cast<int>(threadIdx.x); rank < s.ranks(); rank += kThreads) {
    if (s.came()[rank] == 0) continue;
    const int i = p.all_sizes ? rank : 0;
    report_size(p.group, s.step, rank,
                p.wide_sizes ? static_cast<const volatile int64_t*>(p.sizes_at)[i]
                             : static_cast<const volatile int32_t*>(p.sizes_at)[i]);
  }
}

// Finds where each rank's rows begin in the tensor of all; `counts` are the ranks' sizes. By a block, between barriers.
__device__ inline void find_first(const Collect& s, const int32_t* counts) {
  const CollectiveParams& p = s.p;
#pragma unroll 1
  for (int rank = static_cast<int>(threadIdx.x); rank <= s.ranks(); rank += kThreads) {
    int32_t row = 0;
    if (p.flat) {
      for (int before = 0; before < rank; ++before) row += counts[before];
    } else if (!p.reduces) {
      row = rank * p.bound;
    }
    s.first()[rank] = row;
  }
}
// Whether that is known from the start: it is not where a gather learns the sizes.
__device__ inline bool knows_first(const Collect& s) { return s.p.reduces || s.p.all_sizes || !s.p.flat; }

// Gives the digest of what all ranks must have alike; sizes in device memory are part of it. By all threads.
__device__ inline uint32_t digest_of(const Collect& s) {
  uint32_t digest = s.p.digest;
  if (s.p.sizes_at == nullptr || !s.p.all_sizes) return digest;
#pragma unroll 1
  for (int rank = 0; rank < s.ranks(); ++rank) digest = mix_digest(digest, static_cast<uint64_t>(s.sizes()[rank]));
  return digest;
}

// ---- Signals

// Publishes the step's signal before the rows go: nothing of the other bank is read any more from the start (S3), and
// all rows certify themselves or have a chunk's signal. By a warp.
__device__ inline void publish_first(const Collect& s) {
#pragma unroll 1
  for (int i = lane(); i < s.ranks(); i += 32) {
    publish_signal(s.p.group, s.step, i, mode_of(s.step.phase), s.rows_for(i), 0);
  }
  __syncwarp();  // packets come next, and a warp that has come apart writes them more slowly
}

// Publishes from the last block whose rows are sent, when all have been read and written (S3, S4).
__device__ inline void publish_last(const Collect& s) {
  meet();
  if (threadIdx.x >= 32) return;
  const int last = threadIdx.x == 0 && last_to_send(s.p.group, s.step, s.p.roles);
  if (!__shfl_sync(~0u, last, 0)) return;
  __syncwarp();  // all threads have now synchronised with what thread 0 has
  publish_signals(s.p.group, s.step, mode_of(s.step.phase), [&](int rank) { return s.rows_for(rank); });
}

// Waits for every signal, by one warp (S2), and tells how many rows came where the caller wants to know.
__device__ inline void await_signals(const Collect& s) {
  const CollectiveParams& p = s.p;
  bool good = true;
#pragma unroll 1
  for (int i = lane(); i < s.ranks(); i += 32) {
    // The digest has told that all give the same sizes.
    const int told = p.reduces ? s.rows_for(s.me()) : p.all_sizes ? s.sizes()[i] : -1;
    s.came()[i] = told;
    if (told >= 0 && !p.late_signal && await_usual(p.group, s.step, i, told)) continue;
    const Look look = p.late_signal ? Look::kSignal : Look::kTakesPart;
    const Source source = await_signal(p.group, s.step, i, look, told, twInternalError);
    s.came()[i] = source.n;
    good &= source.error == twSuccess;
  }
  __syncwarp();
  if (!__all_sync(~0u, good)) {
    if (lane() == 0) *s.failed() = 1;
    return;
  }
  if (p.counts == nullptr && p.offsets == nullptr) return;
#pragma unroll 1
  for (int i = lane(); i < s.ranks(); i += 32) {
    int32_t before = 0;
    for (int j = 0; p.offsets != nullptr && j < i; ++j) before += s.came()[j];
    if (p.counts != nullptr) p.counts[i] = s.came()[i];
    if (p.offsets == nullptr) continue;
    p.offsets[i] = before;
    if (i + 1 == s.ranks()) p.offsets[i + 1] = before + s.came()[i];
  }
}

// ---- Simple rows. `s` is from here on a Collect, or what sums are shared by (collective/sharing.cu).

// A tile of a row, counted over all its tensors: the tensor, and the tile's number there.
struct Part {
  int tensor;
  uint32_t number;
};
__device__ inline Part part_of(const CollectiveParams& p, uint32_t item) {
  int q = 0;
  while (q + 1 < p.tensors && item >= p.rows[q].parts) item -= p.rows[q++].parts;
  return {q, item};
}

constexpr uint32_t kPartBytes = 16 * kPushedVectors;

__device__ __noinline__ static void copy_any(std::byte* to, const std::byte* from, uint32_t begin, uint32_t end,
                                             int width) {
  if (width == 4) {
#pragma unroll 4
    for (uint32_t at = begin + 4 * static_cast<uint32_t>(lane()); at < end; at += 128) {
      put_data(reinterpret_cast<uint32_t*>(to + at), load_fresh<uint32_t>(from + at));
    }
    return;
  }
#pragma unroll 4
  for (uint32_t at = begin + static_cast<uint32_t>(lane()); at < end; at += 32) {
    put_data(to + at, static_cast<std::byte>(load_fresh<unsigned char>(from + at)));
  }
}
// Copies a tile by a warp; all of it is on its way at once.
__device__ inline void copy_part(const CollectiveRows& rows, std::byte* to, const std::byte* from, uint32_t part) {
  const uint32_t begin = part * kPartBytes;
  if (rows.width != 16) {
    return copy_any(to, from, begin, min(rows.row_bytes, begin + kPartBytes), rows.width);
  }
  uint4 value[kTileGroups];
  const uint32_t first = part * kPushedVectors + static_cast<uint32_t>(lane());
  const uint32_t end = rows.row_bytes / 16;
#pragma unroll
  for (uint32_t u = 0; u < kTileGroups; ++u) {
    if (first + 32 * u < end) value[u] = load_fresh<uint4>(from + uint64_t{16} * (first + 32 * u));
  }
#pragma unroll
  for (uint32_t u = 0; u < kTileGroups; ++u) {
    if (first + 32 * u < end) put_data(reinterpret_cast<uint4*>(to) + first + 32 * u, value[u]);
  }
}

template <twDtype_t kWire, bool kFast>
__device__ inline void push_item(const auto& s, int number, int item) {
  const Chunk chunk = chunk_of(s, number);
  const int row = item / s.p.pushed_parts;
  if (row >= chunk.rows) return;
  const Part part = part_of(s.p, static_cast<uint32_t>(item - row * s.p.pushed_parts));
  const CollectiveRows& rows = s.p.rows[part.tensor];
  const int i = chunk.number * s.chunk_rows() + row;
  copy_part(rows, s.bank(chunk.owner) + s.place(rows, s.source_at(chunk.owner), i), s.row_in(rows, chunk.owner, i),
            part.number);
}

// ---- Rows that are packets

// The tensor in which a word of a row's stream lies, and the word there.
struct WordAt {
  int tensor;
  uint32_t word;
};
__device__ inline WordAt word_at(const CollectiveParams& p, uint32_t w) {
  int q = p.tensors - 1;
  while (q > 0 && w < p.rows[q].first_word) --q;
  return {q, w - p.rows[q].first_word};
}
__device__ __noinline__ static uint64_t load_any_word(auto s, int rank, int i, uint32_t w) {
  const WordAt at = word_at(s.p, w);
  const CollectiveRows& rows = s.p.rows[at.tensor];
  return load_bytes(s.row_in(rows, rank, i) + 8 * uint64_t{at.word}, int64_t{rows.row_bytes} - 8 * int64_t{at.word});
}

// Loads the thread's words of the g-th group of a tile of row i for a rank. `row`: where that row of the first tensor
// is.
template <bool kFast>
__device__ inline Vec16 load_group(const auto& s, const std::byte* row, int rank, int i, const Tile& tile, uint32_t g) {
  const uint32_t w = first_word(tile.begin + g);
  const uint32_t end = s.p.tiles.words;
  if (tile.begin + g >= tile.end) return {};
  if (kFast) return load_two(row, w, end);
  Vec16 pair{};
  if (w < end) pair.a = load_any_word(s, rank, i, w);
  if (w + 1 < end && !is_flag()) pair.b = load_any_word(s, rank, i, w + 1);
  return pair;
}
template <bool kFast, int kGroups>
__device__ inline void load_tile(const auto& s, const std::byte* row, int rank, int i, const Tile& tile,
                                 Vec16 (&pair)[kGroups]) {
#pragma unroll
  for (int g = 0; g < kGroups; ++g) pair[g] = load_group<kFast>(s, row, rank, i, tile, g);
}

// One of a warp's tiles of packets to send: whose, which row, which part.
struct OutgoingTile {
  int owner = 0;
  int there = 0;  // whether there is such a row
  Share share{};
  const std::byte* row = nullptr;  // the row of the first tensor
  std::byte* packet = nullptr;     // the thread's place for it, in bank 0
};
__device__ inline OutgoingTile outgoing(const auto& s, uint32_t u) {
  const CollectiveParams& p = s.p;
  OutgoingTile out;
  out.share = share_of(p.tiles, static_cast<uint32_t>(s.owners()), u);
  const int owner = s.me() + 1 + out.share.turn;
  out.owner = owner < s.ranks() ? owner : owner - s.ranks();
  out.there = out.share.index < s.rows_for(out.owner);
  out.row = s.row_in(p.rows[0], out.owner, out.share.index);
  out.packet =
      s.windows()[out.owner] + packet_at(p.packets, 0, s.me(), out.share.index) + packet_place(out.share.tile.begin);
  return out;
}
// Gives how many tiles of packets there are to send; in a reduce as if each owner got rows up to the bound.
__device__ inline uint32_t tiles_to_send(const auto& s) {
  const int most = s.p.reduces ? s.p.bound : s.sizes()[s.me()];
  return static_cast<uint32_t>(most * s.owners()) * s.p.tiles.per_row.divisor;
}

// The warp's first tile: found before the wait for earlier kernels, if sizes are known there, and loaded before the
// step is known.
template <bool kFast, int kGroups>
struct Ahead {
  OutgoingTile out;
  Vec16 pair[kGroups] = {};

  __device__ explicit Ahead(const auto& s) {
    const uint32_t u = sent_shares(s.p.roles).first;
    if (s.sends() && u < tiles_to_send(s)) out = outgoing(s, u);
    pin(out.owner, out.there, out.row, out.packet, out.share.index, out.share.turn, out.share.tile.begin,
        out.share.tile.end);
  }
  __device__ void load(const auto& s) {
    if (out.there) load_tile<kFast>(s, out.row, out.owner, out.share.index, out.share.tile, pair);
  }
};

// Sends a warp's tiles of packets. `sent(out, pair)` is called for each tile when it is on its way.
template <bool kFast, int kGroups, class Sent>
__device__ inline void send_packets(const auto& s, Ahead<kFast, kGroups> ahead, Sent&& sent) {
  const CollectiveParams& p = s.p;
  const Shares shares = sent_shares(p.roles);
  const uint32_t all = tiles_to_send(s);
  const uint64_t bank = bank_offset(p.packets, s.step);
#pragma unroll 1
  for (uint32_t u = shares.first; u < all; u += shares.step) {
    if (u != shares.first) ahead.out = outgoing(s, u), ahead.load(s);
    if (!ahead.out.there) continue;
    std::byte* const packet = ahead.out.packet + bank;
    const uint32_t groups = part_of(p.tiles, ahead.out.share.tile);
    const bool together = is_together();
#pragma unroll
    for (uint32_t g = 0; g < kGroups; ++g) {
      if (g >= groups) continue;
      store_packet(together, packet + g * kGroupBytes, ahead.pair[g].a, is_flag() ? s.step.number : ahead.pair[g].b);
    }
    sent(ahead.out, ahead.pair);
  }
}

// ---- The kernel

// Is the whole kernel. `sent(s, out, pair)` is called for each tile of packets that is on its way; `receive(s)` by all
// threads of a block that receives; `clear(s)` makes outputs safe after an error, by a block.
template <bool kPackets, bool kFast, int kGroups, class Sent, class Receive, class Clear>
__device__ inline void collect(const CollectiveParams& p, twPhase_t phase, Sent&& sent, Receive&& receive,
                               Clear&& clear) {
  let_next_begin();
  const GroupView& g = p.group;
  const int thread = static_cast<int>(threadIdx.x);
  Collect s{p, Step{0, p.channel, p.bound, phase}};
#pragma unroll 1
  for (int i = thread; i < s.ranks(); i += kThreads) s.windows()[i] = target_of(g, i, p.send), s.came()[i] = 0;
  if (thread == 0) *s.failed() = 0;
  if (!kPackets) begin_work(s);
  warm(p, offsetof(CollectiveParams, rows) + 2 * sizeof(CollectiveRows));
  if (p.sizes_at != nullptr) meet();
  if (p.sizes_at != nullptr) await_earlier();
  load_sizes(s);
  meet();
  if (knows_first(s)) find_first(s, s.sizes());
  meet();
  [[maybe_unused]] Ahead<kFast, kGroups> ahead(s);
  if (p.sizes_at == nullptr) await_earlier();
  if (kPackets) ahead.load(s);
  s.step.number = next_step(g, p.channel);
  s.step.digest = digest_of(s);
  const bool skips = p.bank >= 0 && static_cast<int>(s.step.number & 1) != p.bank;
  if (skips) ++s.step.number;
  bool usable = __syncthreads_or(is_sticky(g)) == 0;  // threads that differ would wait for each other
  if (usable && p.send && skips && tells_skips(g)) usable = skip_step(g, s.step);
  if (!usable) {
    if (p.receive) clear(s);
    return;  // the step has not ended: the group is finished
  }
  uint32_t arrived = 0;
  if constexpr (!kPackets) {
    if (p.receive && thread == 0) arrived = begin_end(g, s.step);
    if (thread == 0 && blockIdx.x == 0) clear_counters(g, s.step);
    if (p.send && thread == 0 && blockIdx.x == 0) say_sent(g, s.step);  // over a staged transport there are no packets
  }
  if (p.sizes_at != nullptr) {
    if (p.send) report_sizes(s);
    meet();  // what was noted of them is about to be overwritten
  }
  const bool last = s.set() == kWarps - 1;
  if (s.sends()) {  // S7: nobody here waits
    if (!p.late_signal && blockIdx.x == 0 && last) publish_first(s);
    if constexpr (kPackets) {
      send_packets(s, ahead, [&](const OutgoingTile& out, const auto& pair) { sent(s, out, pair); });
    } else {
      push_chunks<twDtypeNone, kFast>(s);
    }
    if (p.late_signal) publish_last(s);
  }
  if constexpr (kPackets) {  // what no peer needs, behind what they wait for: 0.1 us less
    arrived = begin_end(g, s.step, p.receive && thread == 0);
    if (thread == 0 && blockIdx.x == 0) clear_counters(g, s.step);
  }
  if (s.receives()) receive(s);
  if (s.concludes() && last) await_signals(s);
  if (!p.receive) return;
  finish_block(g, s.step, arrived, s.failed(), [&] {
    await_others(g, s.step);
    clear(s);
  });
}

}  // namespace tw::cuda
