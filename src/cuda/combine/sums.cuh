// What a token's sum is made of, and how a warp sums the tiles that hold packets (combine/tiles.cuh has the others).
// What is sent is in combine/combine.cu and combine/chunks.cuh; where all rows are packets, both sides are in
// combine/ll128.cu.
//
// Takes CombineParams and the handle's destinations; gives sums in the caller's output, and NaN for a token whose rows
// did not come. Whether a row travels as a packet follows from its slot and from how many rows its owner has sent,
// which both ends know.
//
// What breaks if this changes: the bits of results (terms are added in order of positions whenever they came, S9); S4
// (await_chunk acquires, packets certify themselves); first_packet must be the same rule at both ends.
#pragma once

#include "cuda/device/ll128.cuh"
#include "cuda/device/sum.cuh"

namespace tw::cuda {

enum TermKind : int32_t { kOwn, kInbox, kPacket };

// A warp's view of the call. What a set holds is the warp's own.
struct Sum {
  const CombineParams& p;
  Step step;
  bool real = true;  // otherwise this is a rehearsal

  __device__ int ranks() const { return p.group.map.shape().ranks; }
  __device__ int fan_out() const { return p.group.map.shape().fan_out(); }
  __device__ int chunk_rows() const { return p.group.map.shape().chunk_rows; }
  // Gives the first that goes as a packet, of the `rows` rows between this rank and another.
  __device__ int first_packet(int other, int rows) const {
    if (other == p.group.me) return rows;
    return rows <= p.group.packet_tokens ? 0 : rows - p.tail_packets;
  }
  __device__ int me() const { return p.group.me; }
  // Whether a slow block leaves the last chunks to others (combine/chunks.cuh, leaves): only where a turn is one chunk.
  __device__ bool yields() const { return p.kind == Kind::kUsual && p.turn_chunks == 1; }
  // Chunks (combine/chunks.cuh) take the rows of owners() owners: of all, or of all but this rank where its own rows
  // are summed where they lie (is_direct). rows_for() gives how many of an owner's rows go in chunks.
  __device__ int owners() const { return ranks() - (p.own_direct ? 1 : 0); }
  __device__ bool is_direct(int owner) const { return owner == me() && p.own_direct; }
  __device__ int rows_for(int owner) const { return first_packet(owner, counts()[owner]); }
  // Whether a partial is a row as it lies, and rows allow 8 bytes at a time.
  __device__ bool simple() const { return p.plain && p.words_fit; }
  __device__ std::byte* window() const { return window_of(p.group, p.group.me); }

  __device__ bool sends() const { return p.send && is_sender(p.roles); }
  __device__ bool sums() const { return p.receive && is_receiver(p.roles); }

  __device__ int set() const { return static_cast<int>(threadIdx.x / 32); }
  __device__ std::byte** windows() const { return shared_at<std::byte*>(p.at.windows); }
  __device__ int32_t* counts() const { return shared_at<int32_t>(p.at.counts); }
  __device__ int32_t* sent_rows() const { return shared_at<int32_t>(p.at.sent_rows); }
  __device__ int32_t* sent_first() const { return sent_rows() + ranks(); }
  __device__ int32_t* failed() const { return shared_at<int32_t>(p.at.failed); }
  __device__ const std::byte** places() const { return shared_at<const std::byte*>(p.at.places) + set() * fan_out(); }
  __device__ int32_t* kinds() const { return shared_at<int32_t>(p.at.kinds) + set() * fan_out(); }
  __device__ Destination* from() const { return shared_at<Destination>(p.at.from) + set() * fan_out(); }
};

// Whether a source's signal says that its rows will not come. It is looked at only now and then.
__device__ __noinline__ static bool source_failed(const GroupView& g, Step step, int rank) {
  Source source;
  return saw(g, step, rank, Look::kTakesPart, &source) && source.error != twSuccess;
}

// Waits for the signal of a source's chunk. A thread that gets true may read its rows (S4). False if the wait ended
// otherwise (S6).
__device__ __noinline__ static bool await_chunk(const GroupView& g, Step step, int source, int chunk) {
  const std::byte* const signal = window_of(g, g.me) + g.map.chunk_signal(step.channel, step.bank(), source, chunk);
  if (!signals_parts(g)) return true;  // the step's signal says that all is there
  Patience patience(g);
#pragma unroll 1
  while (load_acquire(signal) != step.number) {  // S4
    bool late = false;
    if (patience.over(&late)) {
      if (late) {
        report_failure(g, step, twTimeout, source, 0);
      } else {
        report_stopped(g, step, source, 0);
      }
      return g.no_wait;
    }
    if (patience.looked() && source_failed(g, step, source)) return false;
    __nanosleep(100);
  }
  return true;
}

// What a token's sum is made of; alike in all threads of a warp.
struct Terms {
  int fan;
  bool here;     // everything that must lie in the inbox does
  bool packets;  // some terms are packets
  int own;       // this rank's slot, if its partial is made here; otherwise -1
};

// A thread's part of a token's destinations.
struct Sent {
  Destination to;
  int fan;  // the token's number of ranks
};
__device__ inline Sent load_sent(const CombineParams& p, int token, int position) {
  const int fan_out = p.group.map.shape().fan_out();
  const auto fan = static_cast<int>(load_fresh<uint32_t>(p.handle.fan + token));
  if (position >= fan_out) return {{}, fan};
  return {load_both(p.handle.destinations + static_cast<int64_t>(token) * fan_out + position), fan};
}

// The row of one of a token's destinations, its slot counted from the part's first. A row for which the receiver of an
// exact layout had no room has not been sent, and is no term.
struct SentRow {
  Destination from;
  bool kept;
};
__device__ inline SentRow sent_row(const Sum& s, const Sent& sent, int position) {
  SentRow row{sent.to, false};
  if (position >= sent.fan) return row;
  row.from.slot -= s.sent_first()[row.from.rank];
  row.kept = row.from.slot < s.sent_rows()[row.from.rank];
  return row;
}
// Waits for the chunk that a row which returns is in, as await_chunk does.
__device__ inline bool await_row(const Sum& s, const Destination& from) {
  return await_chunk(s.p.group, s.step, from.rank, quotient(from.slot, s.chunk_rows()));
}

// Finds where the terms of a token's sum are, into the warp's set, and waits for those in the inbox. `first`: the
// thread's first destination.
__device__ inline Terms find_terms(const Sum& s, int token, const Sent& first) {
  const CombineParams& p = s.p;
  __syncwarp();  // the set is about to be overwritten
  Terms terms{0, true, false, -1};
#pragma unroll 1
  for (int base = 0; base < s.fan_out(); base += 32) {
    const int position = base + lane();
    const auto [from, kept] = sent_row(s, base == 0 ? first : load_sent(p, token, position), position);
    const uint32_t all = __ballot_sync(~0u, kept);
    const int term = terms.fan + __popc(all & below(lane()));
    terms.fan += __popc(all);
    if (!kept) continue;
    s.from()[term] = from;
    const int first_packet = s.first_packet(from.rank, s.sent_rows()[from.rank]);
    if (from.rank == p.group.me && p.own_direct) {
      s.kinds()[term] = kOwn;
      s.places()[term] = row_in(p, from.rank, from.slot);
      terms.own = from.slot;
    } else if (from.slot >= first_packet) {
      s.kinds()[term] = kPacket;
      s.places()[term] = s.window() + packet_at(p.packets, s.step.bank(), from.rank, from.slot - first_packet);
      terms.packets = true;
    } else {
      s.kinds()[term] = kInbox;
      s.places()[term] = s.window() + inbox_source(p.group, s.step.channel, s.step.bank(), from.rank, from.slot,
                                                   p.bound, token, position);
      terms.here &= await_row(s, from);
    }
  }
  __syncwarp();
  terms.here = __all_sync(~0u, terms.here);  // S4: the threads that have looked have acquired
  terms.packets = __any_sync(~0u, terms.packets);
  terms.own = __reduce_max_sync(~0u, terms.own);
  return terms;
}

// Loads 8 bytes of a term that is no packet; some of them may not exist.
__device__ __noinline__ static uint64_t load_any_term(Sum s, const std::byte* row, bool own, uint32_t w) {
  if (own) return sum_word(s.p, s.set(), w);
  const auto bytes = static_cast<int64_t>(s.p.group.map.shape().combine_bytes);
  uint64_t bits = 0;
#pragma unroll 1
  for (int64_t at = 8 * static_cast<int64_t>(w); at < min(bytes, 8 * static_cast<int64_t>(w) + 8); at += 2) {
    bits |= static_cast<uint64_t>(load_fresh<unsigned short>(reinterpret_cast<const unsigned short*>(row + at)))
            << (8 * (at % 8));
  }
  return bits;
}

// Does what load_two does, for a row that does not allow 8 bytes at a time.
__device__ inline Vec16 load_any_pair(const Sum& s, const std::byte* row, bool own, uint32_t w) {
  Vec16 value{};
  if (w < s.p.tiles.words) value.a = load_any_term(s, row, own, w);
  if (w + 1 < s.p.tiles.words && !is_flag()) value.b = load_any_term(s, row, own, w + 1);
  return value;
}

// Sums the thread's words of some groups of a set's partial, where word_sums_fit.
template <twDtype_t kWire, int kGroups>
__device__ inline void sum_pairs(const CombineParams& p, int set, uint32_t begin, uint32_t end,
                                 Vec16 (&pair)[kGroups]) {
  constexpr int kRows = 4 / kGroups;  // rows that are on their way at once; registers allow no more
  const int top_k = p.group.map.shape().top_k;
  const auto rows = shared_at<const std::byte*>(p.at.rows) + set * top_k;
  const auto weights = shared_at<float>(p.at.weights) + set * top_k;
  const int count = shared_at<int32_t>(p.at.row_counts)[set];
  Quad sum[kGroups][2] = {};
#pragma unroll 1
  for (int j = 0; j < count; j += kRows) {
    Vec16 term[kRows][kGroups] = {};
#pragma unroll
    for (int t = 0; t < kRows; ++t) {
      if (j + t >= count) continue;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (begin + g < end) term[t][g] = load_two(rows[j + t], first_word(begin + g), p.tiles.words);
      }
    }
    if (count == 1 && !p.weighted) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) pair[g] = term[0][g];
      return;
    }
#pragma unroll
    for (int t = 0; t < kRows; ++t) {
      if (j + t >= count) continue;
      const float weight = p.weighted ? weights[j + t] : 1.0f;  // which changes no number
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        Quad both[2] = {widen_word(kWire, term[t][g].a), widen_word(kWire, term[t][g].b)};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int e = 0; e < 4; ++e) both[half].v[e] = __fmul_rn(weight, both[half].v[e]);
          add(&sum[g][half], both[half], j + t == 0);
        }
      }
    }
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const uint4 bits = narrow_vector<kWire>(sum[g][0], sum[g][1]);
    pair[g] = {low_half(bits), high_half(bits)};
  }
}

// The terms and groups that are on their way to a thread at once.
constexpr int kTerms = 2;
constexpr int kGroups = 2;

// Points the thread's parts at some terms of a tile; terms that are no packets are loaded at once.
template <twDtype_t kWire, bool kFast>
__device__ inline void expect_terms(const Sum& s, int fan, int base, const Tile& tile, Parts<kTerms, kGroups>* parts) {
#pragma unroll
  for (int t = 0; t < kTerms; ++t) {
    parts->at[t] = nullptr;
    if (base + t >= fan) continue;
    const std::byte* const place = s.places()[base + t];
    const int kind = s.kinds()[base + t];
    if (kind == kPacket) {
      parts->at[t] = place + packet_place(tile.begin);
      continue;
    }
    if (!kFast && kind == kOwn && !s.simple() && s.p.word_sums_fit) {
      Vec16 own[kGroups] = {};
      sum_pairs<kWire, kGroups>(s.p, s.set(), tile.begin, tile.end, own);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) parts->value[g][t] = own[g];
      continue;
    }
    const bool fast = kFast || (kind == kOwn ? s.simple() : s.p.words_fit != 0);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const uint32_t w = first_word(tile.begin + g);
      if (tile.begin + g >= tile.end) continue;
      parts->value[g][t] = fast ? load_two(place, w, s.p.tiles.words) : load_any_pair(s, place, kind == kOwn, w);
    }
  }
  parts->look();
}

// Sums some groups of a token. False if packets did not come.
template <twDtype_t kWire, bool kFast>
__device__ inline bool sum_groups(const Sum& s, int token, int fan, const Tile& tile) {
  const CombineParams& p = s.p;
  Quad sum[kGroups][2] = {};
  Parts<kTerms, kGroups> parts;
  parts.cover(p.tiles, tile);
#pragma unroll 1
  for (int base = 0; base < fan; base += kTerms) {
    expect_terms<kWire, kFast>(s, fan, base, tile, &parts);
    const auto source_of = [&](int t) { return s.from()[base + t].rank; };
    if (!await_packets(p.group, s.step, &parts, source_of,
                       [&](int source) { return source_failed(p.group, s.step, source); })) {
      return false;
    }
#pragma unroll
    for (int t = 0; t < kTerms; ++t) {
      if (base + t >= fan) continue;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (tile.begin + g >= tile.end) continue;
        add(&sum[g][0], widen_word(kWire, parts.value[g][t].a), base + t == 0);
        add(&sum[g][1], widen_word(kWire, parts.value[g][t].b), base + t == 0);
      }
    }
  }
  std::byte* const out = p.out + static_cast<int64_t>(token) * p.out_stride;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const uint32_t w = first_word(tile.begin + g);
    if (tile.begin + g >= tile.end) continue;
    if (w < p.tiles.words) store_quad<kWire, kFast>(p, out, w, sum[g][0]);
    if (w + 1 < p.tiles.words && !is_flag()) store_quad<kWire, kFast>(p, out, w + 1, sum[g][1]);
  }
  return true;
}

// Sums a tile of a token by the geometry of packets.
template <twDtype_t kWire, bool kFast>
__device__ inline bool sum_packets(const Sum& s, int token, int fan, const Tile& tile) {
  bool here = true;
#pragma unroll 1
  for (uint32_t begin = tile.begin; begin < tile.end && here; begin += kGroups) {
    here = sum_groups<kWire, kFast>(s, token, fan, {tile.number, begin, min(tile.end, begin + kGroups), 1});
  }
  return here;
}

// Writes NaN for tokens [begin, begin + count), by `threads` threads. Tokens are counted from the first of the part.
__device__ __noinline__ static void fill_nan(const CombineParams& p, int begin, int count, int thread, int threads) {
  const uint32_t nan = p.out_dtype == twFloat32 ? 0x7fc00000u : p.out_dtype == twBfloat16 ? 0x7fc0u : 0x7e00u;
#pragma unroll 1
  for (int64_t i = thread; i < count * p.elements; i += threads) {
    std::byte* const out = p.out + (begin + i / p.elements) * p.out_stride;
    if (p.out_dtype == twFloat32) {
      reinterpret_cast<uint32_t*>(out)[i % p.elements] = nan;
    } else {
      reinterpret_cast<uint16_t*>(out)[i % p.elements] = static_cast<uint16_t>(nan);
    }
  }
}
// Writes NaN for a token whose rows did not come, by a warp. The block then says that the step has failed.
__device__ inline void give_up_token(const Sum& s, int token) {
  fill_nan(s.p, token, 1, lane(), 32);
  *s.failed() = 1;
}

}  // namespace tw::cuda
