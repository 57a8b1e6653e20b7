// What both ways of a combine share: what a token's sum is made of, sums of lines, and the end of the step.
//
// Whether rows go as lines follows from their number, which both ends know: the owner counted what it sent.
#pragma once

#include "nvlink/sum.cuh"

namespace tw::nvlink {

enum Kind : int32_t { kOwn, kInbox, kLine };

struct Sum {
  const CombineParams& p;
  Step step;

  __device__ int ranks() const { return p.group.map.shape().ranks; }
  __device__ int fan_out() const { return p.group.map.shape().fan_out(); }
  __device__ int chunk_rows() const { return p.group.map.shape().chunk_rows; }
  __device__ bool by_lines(int owner, int rows) const { return owner != p.group.me && rows <= p.group.line_tokens; }
  __device__ uint32_t words() const { return static_cast<uint32_t>(words_of(p.group.map.shape().combine_bytes)); }
  __device__ uint32_t lanes() const { return kLineLanes * static_cast<uint32_t>(lines_of(words())); }
  // A partial is a row as it lies, and rows allow 8 bytes at a time.
  __device__ bool simple() const { return p.plain && p.words_fit; }
  __device__ std::byte* window() const { return window_of(p.group, p.group.me); }

  __device__ std::byte** windows() const { return shared_at<std::byte*>(p.at.windows); }
  __device__ int32_t* counts() const { return shared_at<int32_t>(p.at.counts); }
  __device__ int32_t* fan() const { return shared_at<int32_t>(p.at.fan); }
  __device__ const std::byte** places(int set) const {
    return shared_at<const std::byte*>(p.at.places) + set * fan_out();
  }
  __device__ int32_t* kinds(int set) const { return shared_at<int32_t>(p.at.kinds) + set * fan_out(); }
  __device__ Destination* from(int set) const { return shared_at<Destination>(p.at.from) + set * fan_out(); }
};

__device__ inline uint32_t word_of(uint32_t lane) { return lane / kLineLanes * kLineWords + lane % kLineLanes * 2; }
__device__ inline bool is_flag(uint32_t lane) { return lane % kLineLanes == kLineLanes - 1; }

// 8 bytes of a partial: of the row itself where that is all there is to it.
__device__ inline uint64_t partial_word(const Sum& s, const std::byte* row, int set, uint32_t w) {
  if (s.simple()) return load_input<unsigned long long>(row + 8 * w);
  return sum_word(s.p, set, w);
}

// A row of this rank's as lines to its owner, by `threads` threads that are whole warps.
__device__ inline void send_line_row(const Sum& s, std::byte* line, const std::byte* row, int set, uint32_t thread,
                                     uint32_t threads) {
#pragma unroll 1
  for (uint32_t lane = thread; lane < s.lanes(); lane += threads) {
    const uint32_t w = word_of(lane);
    uint64_t second = s.step.number;
    if (!is_flag(lane)) second = w + 1 < s.words() ? partial_word(s, row, set, w + 1) : 0;
    store_pair(line + 16 * lane, w < s.words() ? partial_word(s, row, set, w) : 0, second);
  }
}

// Whether a source's word says that its rows will not come. Looked at only now and then.
__device__ __noinline__ static bool source_failed(const GroupView& g, Step step, int rank) {
  const std::byte* const place = window_of(g, g.me) + g.map.word(step.lane, step.bank(), rank);
  Source source;
  source.word = load_word(place);
  if (!reached(unpack(source.word).step, step.low())) return false;
  fence_system();
  source.note = static_cast<uint32_t>(load_word(place + kNoteOffset));
  judge(step, &source);
  return source.error != twSuccess;
}

// Where one term of a token's sum is found. Not kInboxes: it is a line unless it is this rank's own.
template <bool kInboxes>
__device__ inline void find_term(const Sum& s, int set, int token, int position, Destination from) {
  const CombineParams& p = s.p;
  const WindowMap& map = p.group.map;
  s.from(set)[position] = from;
  if (from.rank == p.group.me && p.own_direct) {
    s.kinds(set)[position] = kOwn;
    s.places(set)[position] = row_of(p, from.rank, from.slot);
  } else if (!kInboxes || s.by_lines(from.rank, p.handle.send_counts[from.rank])) {
    s.kinds(set)[position] = kLine;
    s.places(set)[position] =
        s.window() + map.line(s.step.lane, s.step.bank(), from.rank, 0) + from.slot * map.line_row();
  } else {
    s.kinds(set)[position] = kInbox;
    s.places(set)[position] = s.window() + map.inbox(s.step.lane, s.step.bank(), token, position);
  }
}

// 8 bytes of an inbox row, of which some may not exist.
__device__ __noinline__ static uint64_t inbox_word(const std::byte* row, uint32_t w, int64_t row_bytes) {
  uint64_t bits = 0;
  for (int64_t at = 8 * static_cast<int64_t>(w); at < min(row_bytes, 8 * static_cast<int64_t>(w) + 8); at += 2) {
    bits |= static_cast<uint64_t>(load_received<unsigned short>(reinterpret_cast<const unsigned short*>(row + at)))
            << (8 * (at % 8));
  }
  return bits;
}

// A token's sum by the geometry of lines, 16 bytes a thread; terms that are no lines are read alike. By `threads`
// threads that are whole warps, of which this is number `thread`. False if lines did not come.
template <bool kInboxes>
__device__ inline bool sum_lines(const Sum& s, int set, int token, uint32_t thread, uint32_t threads) {
  const CombineParams& p = s.p;
  const int fan = s.fan()[set];
#pragma unroll 1
  for (uint32_t base = thread / 32 * 32; base < s.lanes(); base += threads) {
    const uint32_t lane = base + thread % 32;
    const uint32_t w = word_of(lane);
    const bool has_a = lane < s.lanes() && w < s.words();
    const bool has_b = has_a && !is_flag(lane) && w + 1 < s.words();
    Quad sum_a{};
    Quad sum_b{};
    Vec16 own{};  // is loaded before lines are waited for
#pragma unroll 1
    for (int position = 0; position < fan; ++position) {
      if (s.kinds(set)[position] != kOwn) continue;
      if (has_a) own.a = partial_word(s, s.places(set)[position], set, w);
      if (has_b) own.b = partial_word(s, s.places(set)[position], set, w + 1);
    }
#pragma unroll 1
    for (int position = 0; position < fan; ++position) {
      const std::byte* const place = s.places(set)[position];
      const int kind = s.kinds(set)[position];
      Vec16 value = own;
      if (kind == kLine) {
        const bool here = await_lines(p.group, s.step, lane < s.lanes(), place + 16 * lane, s.from(set)[position].rank,
                                      &value, [&](int source) { return source_failed(p.group, s.step, source); });
        if (!here) return false;
      } else if (kInboxes && kind == kInbox) {
        const auto bytes = static_cast<int64_t>(p.group.map.shape().combine_bytes);
        if (has_a) value.a = inbox_word(place, w, bytes);
        if (has_b) value.b = inbox_word(place, w + 1, bytes);
      }
      add(&sum_a, widen_word(p.wire_dtype, value.a), position == 0);
      add(&sum_b, widen_word(p.wire_dtype, value.b), position == 0);
    }
    std::byte* const out = p.out + static_cast<int64_t>(token) * p.out_stride;
    if (has_a) store_quad(p, out, w, sum_a);
    if (has_b) store_quad(p, out, w + 1, sum_b);
  }
  return true;
}

// NaN for tokens [begin, begin + count), by `threads` threads.
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

// One block waits for every word (S2) and sees that every row that went out came back.
__device__ inline void conclude(const Sum& s) {
  const CombineParams& p = s.p;
  bool good = true;
  for (int i = threadIdx.x; i < s.ranks(); i += blockDim.x) {
    Source source = await_source(p.group, s.step, i, Look::kTakesPart);
    if (p.group.no_wait) continue;
    if (source.error == twSuccess && source.n != p.handle.send_counts[i]) source.error = twCallMismatch;
    report_source(p.group, s.step, i, source);
    good &= source.error == twSuccess;
  }
  if (__syncthreads_and(good)) return;
  await_done(p.group, s.step);
  fill_nan(p, 0, p.tokens, threadIdx.x, blockDim.x);
}

// How both kernels begin: false if there is nothing to do. A dispatch that failed is answered by nobody: all ranks have
// seen it fail, and skip this step alike.
__device__ inline bool begin_combine(const Sum& s) {
  const GroupView& g = s.p.group;
  const bool usable = !is_sticky(g) && *reinterpret_cast<volatile int32_t*>(s.p.handle.status) == twSuccess;
  for (int i = threadIdx.x; i < s.ranks(); i += blockDim.x) {
    s.windows()[i] = window_of(g, i);
    s.counts()[i] = s.p.handle.counts[i];
  }
  return usable;
}

}  // namespace tw::nvlink
