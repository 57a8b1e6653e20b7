// The receiving side of a dispatch: warps that work alone, each on a tile of a row at a time.
//
// Takes a Block whose step the peers are in; gives rows and metadata in the window and the handle, counts, and what the
// caller is shown. One warp, the clerk, alone makes known how many rows came and what is wrong.
//
// What breaks if this changes: S2 (a kernel ends only when every signal and every row that its blocks take has been
// seen), S4 (await_rows, the packets' flags), S6. The order of sources and tiles is speed alone.
#pragma once

#include "cuda/dispatch/send.cuh"

namespace tw::cuda {

// Up to 32 sources, one to each thread of a warp. The sources are taken in turns, this rank's own last.
struct Sources {
  int begin;      // the first of them, in that order
  int count;      // how many of them are other ranks
  Source source;  // this thread's source
  int rank;

  __device__ int rank_of(const Block& b, int i) const { return (b.p.group.me + 1 + begin + i) % b.ranks(); }
};

// Points the thread's parts at the packets of one tile of one source.
__device__ inline void expect(const Block& b, const Sources& sources, const Share& in, Parts<1>* parts) {
  parts->cover(b.p.tiles, in.tile);
  parts->at[0] = b.scratch.windows()[b.p.group.me] +
                 packet_at(b.p.packets, b.step.bank(), sources.rank_of(b, in.turn), in.index) +
                 packet_place(in.tile.begin);
}

// Takes a tile of a row that came as packets: into the window, as rows lie there, and into what the caller sees.
template <bool kFast>
__device__ inline void take_packets(const Block& b, int64_t row, const Tile& tile, const Parts<1>& parts) {
  Vec16 pair[kTileGroups];
#pragma unroll
  for (int g = 0; g < kTileGroups; ++g) pair[g] = parts.value[g][0];
  place_words<kFast>(b.p, b.bank, row, tile, parts.groups, pair);
  if (!has_meta(tile)) return;
  uint64_t* const window = reinterpret_cast<uint64_t*>(b.bank + b.p.group.map.meta_begin()) + row * b.meta_words();
#pragma unroll
  for (int g = 0; g < (kFast ? 1 : kMetaGroups); ++g) {
    const uint32_t w = first_word(tile.begin + g);
    if (g >= parts.groups || w >= b.meta_words()) continue;
    window[w] = b.scratch.meta()[w] = parts.value[g][0].a;
    if (w + 1 < b.meta_words() && !is_flag()) window[w + 1] = b.scratch.meta()[w + 1] = parts.value[g][0].b;
  }
  __syncwarp();
  const uint64_t* const words = b.scratch.meta();
  take_meta(b.p, b.scratch, b.step, row, words, words[0]);
  __syncwarp();  // the place is the next row's
}

// Waits for the signals of 32 sources. Meanwhile the warp's first packet may come; it is then found in *first.
__device__ inline void await_signals(const Block& b, Sources* sources, Parts<1>* first) {
  bool waits = sources->begin + lane() < b.ranks();
  Patience patience(b.p.group);
#pragma unroll 1
  for (int looks = 0;; ++looks) {
    first->look();
    if (waits) {
      waits = !look_at(b.p.group, b.step, sources->rank, Look::kSignal, &patience, &sources->source);
    }
    if (!__any_sync(~0u, waits)) return;
    rest(looks);
  }
}

// Shows ids and weights of rows from `first` on, whose metadata is at `meta`, to the caller: a thread's part.
__device__ inline void show_items(const Block& b, const unsigned long long* meta, uint64_t first, int rows,
                                  uint32_t thread, uint32_t threads) {
  const DispatchParams& p = b.p;
  if (p.shown.ids == nullptr && p.shown.weights == nullptr) return;
  const auto top_k = static_cast<uint32_t>(p.group.map.shape().top_k);
#pragma unroll 1
  for (uint32_t i = thread; i < static_cast<uint32_t>(rows) * top_k; i += threads) {
    const uint32_t row = i / top_k;
    const auto* const items = reinterpret_cast<const uint32_t*>(meta + row * b.meta_words() + 1);
    show_item(p, b.scratch, first * top_k + i, load_fresh<uint32_t>(items + (i - row * top_k)),
              load_fresh<uint32_t>(items + top_k + (i - row * top_k)));
  }
}

// Takes the metadata of a source's rows that lies in the window, a warp's part: as one run of words, then as one of
// ids, so that each thread has about one of either.
__device__ __noinline__ static void take_plain(Block b, int source, int rows, uint32_t warp, uint32_t warps) {
  const DispatchParams& p = b.p;
  const uint64_t first = static_cast<uint64_t>(b.row(source, 0));
  const auto* const meta =
      reinterpret_cast<const unsigned long long*>(b.bank + p.group.map.meta_begin()) + first * b.meta_words();
  const auto thread = warp * 32 + static_cast<uint32_t>(lane());
  const uint32_t words = static_cast<uint32_t>(rows) * b.meta_words();
#pragma unroll 1
  for (uint32_t w = thread; w < words; w += warps * 32) {
    const uint64_t word = load_fresh<unsigned long long>(meta + w);
    p.handle.meta[first * b.meta_words() + w] = word;
    if (w % b.meta_words() == 0) check_header(p, b.step, word);
  }
  show_items(b, meta, first, rows, thread, warps * 32);
}

// Shows ids and weights of a source's rows that the handle has from an earlier dispatch, a warp's part.
__device__ __noinline__ static void show_known(Block b, int source, int rows, uint32_t warp, uint32_t warps) {
  const auto first = static_cast<uint64_t>(b.row(source, 0));
  const auto* const meta = reinterpret_cast<const unsigned long long*>(b.p.handle.meta) + first * b.meta_words();
  show_items(b, meta, first, rows, warp * 32 + static_cast<uint32_t>(lane()), warps * 32);
}

// Shows the i-th of the ids and weights of a row.
__device__ inline void show_half(const DispatchParams& p, const Scratch& scratch, int64_t row, uint32_t i,
                                 uint32_t value) {
  const auto top_k = static_cast<uint32_t>(p.group.map.shape().top_k);
  if (i < top_k) {
    if (p.shown.ids != nullptr) show_id(p.shown, row * top_k + i, shown_id(p, scratch, static_cast<int32_t>(value)));
  } else if (i < 2 * top_k && p.shown.weights != nullptr) {
    p.shown.weights[row * top_k + (i - top_k)] = __uint_as_float(value);
  }
}

// Takes a word of a row's metadata: into the window and the handle, and into what the caller sees.
__device__ inline void take_word(const Block& b, int64_t row, uint32_t w, uint64_t word) {
  const DispatchParams& p = b.p;
  if (w >= b.meta_words()) return;
  const int64_t at = row * b.meta_words() + w;
  reinterpret_cast<uint64_t*>(b.bank + p.group.map.meta_begin())[at] = p.handle.meta[at] = word;
  if (w == 0) return check_header(p, b.step, word);
  show_half(p, b.scratch, row, 2 * w - 2, static_cast<uint32_t>(word));
  show_half(p, b.scratch, row, 2 * w - 1, static_cast<uint32_t>(word >> 32));
}

// Takes the metadata packets of a source's first rows, a warp's part, four packets at a time.
__device__ inline void take_meta_packets(const Block& b, int source, int rows, uint32_t warp, uint32_t warps) {
  const DispatchParams& p = b.p;
  const auto per_row = static_cast<uint32_t>(p.group.map.meta_packet_row() / kPacketBytes);
  const uint32_t packets = static_cast<uint32_t>(rows) * per_row;
  const std::byte* const begin =
      b.scratch.windows()[p.group.me] +
      p.group.map.meta_packet(b.step.channel, b.step.bank(), static_cast<uint64_t>(b.row(source, 0)));
#pragma unroll 1
  for (uint32_t group = warp; 4 * group < packets; group += warps) {
    const uint32_t packet = 4 * group + static_cast<uint32_t>(lane()) / kPacketThreads;
    Parts<1, 1> parts{};
    parts.groups = packet < packets ? 1 : 0;
    parts.at[0] = begin + uint64_t{group} * kGroupBytes + packet_place(0);
    parts.look();
    const bool here = await_packets(p.group, b.step, &parts, [&](int) { return source; }, [](int) { return false; });
    if (!here) b.scratch.fail(source, twInternalError);
    if (!here || packet >= packets) continue;
    const uint32_t w = packet % per_row * kPacketWords + threadIdx.x % kPacketThreads * 2;
    const int64_t row = b.row(source, static_cast<int>(packet / per_row));
    take_word(b, row, w, parts.value[0][0].a);
    if (!is_flag()) take_word(b, row, w + 1, parts.value[0][0].b);
  }
}

// Takes what lies in the slots of 32 sources, and clears the slots that hold nothing, this rank's too. Nobody here
// reads the rows behind the metadata, so the clerk alone waits for them, and looks without a rest: when all warps did,
// with a rest, a dispatch of 1024 tokens took 1 us longer.
__device__ inline void take_slots(const Block& b, Sources* sources, uint32_t warp, uint32_t warps, bool clerk) {
  const DispatchParams& p = b.p;
  Source& source = sources->source;
  const int thread = static_cast<int>(warp) * 32 + lane();
  const int threads = static_cast<int>(warps * 32);
  const bool there = sources->begin + lane() < b.ranks();
  const bool other = there && sources->rank != p.group.me;
  if (clerk && other && source.plain > 0 && has_packets(source.mode)) {
    source.error = await_rows(p.group, b.step, sources->rank);
    if (source.error == twTimeout) report_failure(p.group, b.step, twTimeout, sources->rank, source.signal);
    if (source.error != twSuccess) source.n = source.plain = 0;
  }
  __syncwarp();  // S4: what the threads that have looked have acquired, all have
  uint32_t plain = __ballot_sync(~0u, other && source.plain > 0);
  uint32_t empty = __ballot_sync(~0u, there && source.n < expected_rows(b, sources->rank));
#pragma unroll 1
  for (; p.group.packet_tokens == 0 && plain != 0; plain &= plain - 1) {
    const int i = __ffs(static_cast<int>(plain)) - 1;
    take_plain(b, sources->rank_of(b, i), __shfl_sync(~0u, source.plain, i), warp, warps);
  }
#pragma unroll 1
  for (; empty != 0; empty &= empty - 1) {
    const int i = __ffs(static_cast<int>(empty)) - 1;
    const int rank = sources->rank_of(b, i);
    const int n = __shfl_sync(~0u, source.n, i);
    show_nothing(p, b.row(rank, n), b.row(rank, expected_rows(b, rank)), thread, threads);
  }
}

// Takes packets of 32 sources, a warp's tiles. `looked`: the first tile's have been looked at once, and are in `first`.
template <bool kFast>
__device__ inline void take_sources(const Block& b, const Sources& sources, uint32_t warp, uint32_t warps, bool looked,
                                    Parts<1>* first) {
  const DispatchParams& p = b.p;
  const int most = __reduce_max_sync(~0u, lane() < sources.count ? sources.source.n - sources.source.plain : 0);
  const uint32_t end = static_cast<uint32_t>(most) * p.tiles.per_row.divisor * static_cast<uint32_t>(sources.count);
#pragma unroll 1
  for (uint32_t u = warp; u < end; u += warps) {
    const Share in = share_of(p.tiles, static_cast<uint32_t>(sources.count), u);
    const int plain = __shfl_sync(~0u, sources.source.plain, in.turn);
    const int n = __shfl_sync(~0u, sources.source.n, in.turn);
    if (plain + in.index < n) {
      if (!looked) {
        expect(b, sources, in, first);
        first->look();
      }
      const int rank = sources.rank_of(b, in.turn);
      if (await_packets(p.group, b.step, first, [&](int) { return rank; }, [](int) { return false; })) {
        take_packets<kFast>(b, b.row(rank, plain + in.index), in.tile, *first);
      } else {
        b.scratch.fail(rank, twInternalError);  // nothing of this source can be trusted
      }
    }
    looked = false;
  }
}

// Checks that as many rows came as were announced, and that their metadata came if it had not come before; otherwise
// the peer dispatches another handle.
__device__ inline void check_count(const Block& b, int rank, bool known, Source* source) {
  if (source->error != twSuccess) return;
  if (source->n == expected_rows(b, rank) && (known || source->mode != Mode::kDispatchRows)) return;
  source->error = twCallMismatch;
  source->n = source->plain = 0;
}

// Takes the metadata of Simple rows, which comes with this dispatch or came with an earlier one: a warp's part. `rows`:
// whether the thread's source sends any. This rank's own metadata is taken where it is sent.
__device__ inline void take_metadata(const Block& b, const Sources& sources, bool rows, uint32_t warp, uint32_t warps) {
  const uint32_t known = __ballot_sync(~0u, sources.source.mode == Mode::kDispatchRows);
#pragma unroll 1
  for (uint32_t left = __ballot_sync(~0u, rows); left != 0; left &= left - 1) {
    const int i = __ffs(static_cast<int>(left)) - 1;
    const int rank = sources.rank_of(b, i);
    const int plain = __shfl_sync(~0u, sources.source.plain, i);
    if ((known >> i & 1) != 0) {
      show_known(b, rank, plain, warp, warps);
    } else if (rank != b.p.group.me) {
      take_meta_packets(b, rank, plain, warp, warps);
    }
  }
}

// Receives everything. `known`: is_known; it holds for the next dispatch, if nothing goes wrong: then all ranks have
// made the same call and have this rank's metadata, or the group is finished.
template <bool kFast>
__device__ inline void receive(const Block& b, bool known) {
  const DispatchParams& p = b.p;
  const auto [warp, warps] = received_shares(p.roles);
  if (p.group.map.shape().exact()) {  // rows beyond those of all sources
    show_nothing(p, b.row(b.ranks() - 1, expected_rows(b, b.ranks() - 1)), p.rows, static_cast<int>(warp) * 32 + lane(),
                 static_cast<int>(warps * 32));
  }
  // No source has more rows than the bound, so all are packets: then a packet's place is known before the signal.
  const bool few = p.bound <= p.group.packet_tokens;
  const bool clerk = warp == 0;  // it alone makes known how many came, and what is wrong
  bool good = true;
#pragma unroll 1
  for (int begin = 0; begin < (kFast ? 1 : b.ranks()); begin += 32) {
    Sources sources{begin, min(32, b.ranks() - 1 - begin), {}, 0};
    sources.rank = sources.rank_of(b, lane());
    Parts<1> packets{};
    const uint32_t possible =
        static_cast<uint32_t>(p.bound) * p.tiles.per_row.divisor * static_cast<uint32_t>(sources.count);
    const bool looked = few && warp < possible;
    if (looked) expect(b, sources, share_of(p.tiles, static_cast<uint32_t>(sources.count), warp), &packets);
    await_signals(b, &sources, &packets);
    const bool valid = begin + lane() < b.ranks();
    if (p.group.map.shape().exact() && valid) check_count(b, sources.rank, known, &sources.source);
    const twResult_t error = sources.source.error;
    // Each warp has a deadline of its own. When one passes the group has failed; otherwise this warp's rows would be
    // missing and nobody would know it.
    if (valid && error == twTimeout) {
      report_failure(p.group, b.step, twTimeout, sources.rank, sources.source.signal);
    }
    if (clerk && valid) {
      report_source(p.group, b.step, sources.rank, sources.source);
      // Packets of the ranks before may have been lost meanwhile: then nothing of these counts either.
      const bool lost = begin > 0 && is_sticky(p.group);
      p.shown.counts[sources.rank] = p.handle.counts[sources.rank] = lost ? 0 : sources.source.n;
    }
    if (p.group.packet_tokens > 0) take_metadata(b, sources, valid && sources.source.plain > 0, warp, warps);
    take_sources<kFast>(b, sources, warp, warps, looked, &packets);
    take_slots(b, &sources, warp, warps, clerk);
    if (clerk && valid) {
      if (error == twSuccess) report_source(p.group, b.step, sources.rank, sources.source);
      if (sources.source.error != twSuccess) b.scratch.fail(sources.rank, sources.source.error);
      good = good && sources.source.error == twSuccess;
    }
  }
  if (clerk && __all_sync(~0u, good) && lane() == 0 && !known && p.handle.metadata_step != nullptr) {
    *p.handle.metadata_step = b.step.low();
  }
}

}  // namespace tw::cuda
