// Dispatch: one kernel, from ids to rows in place at their receivers.
//
// Few tokens of a rank go as lines: floor, one flight over the link with the data and its flag together. All blocks
// send their tokens' lines, then take the lines that arrive out into the slots.
//
// Many tokens go in bulk: floor, bytes over the link, then one fence, one word and its flight. A block carries a range
// of tokens; a few of its warps send their headers, ids and weights, which are announced as soon as all are written, so
// that unpacking them hides behind the payloads. After the last byte there is only the word to wait for (S4), and one
// block that does.
//
// The two ways are two kernels, and what few threads need is not inlined: neither way pays for the registers of the
// other.
#include <cuda_runtime.h>

#include "nvlink/received.cuh"

namespace tw::nvlink {
namespace {

constexpr int kMetaThreads = 128;  // of a bulk block: they send what travels beside the payloads
constexpr int kCarriers = kThreads - kMetaThreads;
static_assert(kThreads % 32 == 0 && kCarriers > 0);

struct Block {
  const DispatchParams& p;
  Scratch scratch;
  Step step;
  std::byte* bank;  // of the step, in this rank's window
  int first;        // of this block's range of tokens
  int count;

  __device__ int ranks() const { return p.group.map.shape().ranks; }
  __device__ int meta_words() const { return 1 + p.group.map.shape().top_k; }
  // Whether this block's range ends with the last token, so that it knows the sums.
  __device__ bool closes() const { return p.tokens == 0 ? blockIdx.x == 0 : count > 0 && first + count == p.tokens; }
};

// Moves to the bank that the caller's view needs, by a step without rows, where the lane does not stand before it. All
// blocks wait here before they send, so all must be there at once (S8). False if the wait failed.
__device__ __noinline__ bool skip_step(const DispatchParams& p, Step skipped) {
  const GroupView& g = p.group;
  skipped.number -= 1;
  if (blockIdx.x == 0) publish_unordered(g, skipped, Mode::kSkip, [](int) { return 0; });
  bool passed = true;
  for (int i = threadIdx.x; i < g.map.shape().ranks; i += blockDim.x) {
    const Source source = await_source(g, skipped, i, Look::kTakesPart);
    // A peer may already be past the step that follows: then it has seen this rank's word of that one.
    const uint32_t seen = unpack(source.word).step;
    if (source.mode == Mode::kSkip || g.no_wait || (reached(seen, skipped.low()) && seen != skipped.low())) continue;
    passed = false;
    if (source.error != twPeerAborted) {
      report_failure(g, skipped, source.error == twTimeout ? twTimeout : twCallMismatch, i, source.word);
    }
  }
  return __syncthreads_and(passed) != 0;
}

// Gives the sums to the handle, whose combine checks what comes back.
__device__ void keep_counts(const Block& b) {
  for (int i = threadIdx.x; i < b.ranks(); i += blockDim.x) b.p.handle.send_counts[i] = b.scratch.next()[i];
}

// ---- Lines

// The two words of a line that a thread has, of this row of the batch. Those of the payload may have been loaded early.
struct Pair {
  uint64_t a, b;
};
__device__ Pair payload_pair(const Block& b, int token, uint32_t w, bool flagged) {
  const auto meta_words = static_cast<uint32_t>(b.meta_words());
  Pair pair{0, b.step.number};
  if (w >= meta_words && w < b.p.words) pair.a = payload_word(b.p, token, w);
  if (!flagged) pair.b = w + 1 >= meta_words && w + 1 < b.p.words ? payload_word(b.p, token, w + 1) : 0;
  return pair;
}

__device__ uint32_t word_of(uint32_t lane) { return lane / kLineLanes * kLineWords + lane % kLineLanes * 2; }

// One row's lines to all its ranks, to this one last: it has no way to go, and no line.
__device__ void send_row(const Block& b, int row, uint32_t lane, Pair pair) {
  const DispatchParams& p = b.p;
  const uint32_t w = word_of(lane);
  const bool flagged = lane % kLineLanes == kLineLanes - 1;
  const auto meta_words = static_cast<uint32_t>(b.meta_words());
  if (w < meta_words) pair.a = b.scratch.meta()[row * meta_words + w];
  if (!flagged && w + 1 < meta_words) pair.b = b.scratch.meta()[row * meta_words + w + 1];
  const uint64_t mine = p.group.map.line(b.step.lane, b.step.bank(), p.group.me, 0) + 16 * lane;
  const Destination* const to = b.scratch.destinations() + row * p.group.map.shape().fan_out();
  const uint64_t header = w == 0 ? uint64_t{1} << 32 : 0;  // its second half says which of the token's ranks this is
  int own = -1;
#pragma unroll 1
  for (int position = 0; position < b.scratch.fan()[row]; ++position) {
    if (to[position].rank == p.group.me) {
      own = position;
      continue;
    }
    store_pair(b.scratch.windows()[to[position].rank] + mine + to[position].slot * p.group.map.line_row(),
               pair.a | header * position, pair.b);
  }
  if (own < 0) return;
  const int slot = to[own].slot;
  if (w < p.words) place_word(p, b.bank, p.group.me, slot, w, pair.a | header * own);
  if (!flagged && w + 1 < p.words) place_word(p, b.bank, p.group.me, slot, w + 1, pair.b);
}

__device__ void send_by_lines(const Block& b) {
  const DispatchParams& p = b.p;
  const uint32_t lanes = kLineLanes * static_cast<uint32_t>(lines_of(p.words));
  // The payload does not depend on where it goes: it is on its way while the block routes.
  Pair early{};
  const bool has_early = b.count > 0 && threadIdx.x < lanes;
  if (has_early) {
    early = payload_pair(b, b.first, word_of(threadIdx.x), threadIdx.x % kLineLanes == kLineLanes - 1);
  }
  Router router(p, b.scratch);
#pragma unroll 1
  for (int begin = b.first; begin < b.first + b.count; begin += kBatch) {
    const int count = min(kBatch, b.first + b.count - begin);
    if (begin != b.first) stage_meta(p, b.scratch, b.step, begin, count, threadIdx.x, blockDim.x);
    router.route(begin, count);
    if (begin + count == p.tokens) {  // the sums are known: others may learn them now (lines certify themselves)
      publish_unordered(p.group, b.step, Mode::kDispatchLines, [&](int rank) { return b.scratch.next()[rank]; });
    }
#pragma unroll 1
    for (int row = 0; row < count; ++row) {
#pragma unroll 1
      for (uint32_t lane = threadIdx.x; lane < lanes; lane += blockDim.x) {
        const bool loaded = has_early && begin + row == b.first && lane == threadIdx.x;
        send_row(b, row, lane,
                 loaded ? early : payload_pair(b, begin + row, word_of(lane), lane % kLineLanes == kLineLanes - 1));
      }
    }
    take_own_meta(p, b.scratch, count, threadIdx.x, blockDim.x);
    keep_destinations(p, b.scratch, begin, count, threadIdx.x, blockDim.x);
    if (begin + count == p.tokens) keep_counts(b);
    if (begin + kBatch < b.first + b.count) __syncthreads();  // the batch's arrays are about to be overwritten
  }
  if (p.tokens == 0 && blockIdx.x == 0) {
    publish_unordered(p.group, b.step, Mode::kDispatchLines, [](int) { return 0; });
    keep_counts(b);
  }
}

// ---- Bulk

// A payload's rows of a batch to all their ranks, by the carrying threads.
template <class V, int kAtOnce>
__device__ void carry_rows(const Block& b, int q, int begin, int count) {
  const DispatchParams& p = b.p;
  const WindowMap& map = p.group.map;
  const PayloadIn& payload = p.payloads[q];
  const int fan_out = map.shape().fan_out();
  const uint32_t vectors = payload.vectors.divisor;
  const uint32_t total = count * vectors;
  const uint64_t place = map.payload(b.step.lane, b.step.bank(), q, p.group.me, 0, p.bound);
  const uint64_t bytes = map.shape().payload_bytes[q];
#pragma unroll 1
  for (uint32_t base = threadIdx.x; base < total; base += kAtOnce * kCarriers) {
    V value[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const uint32_t i = base + u * kCarriers;
      if (i >= total) continue;
      const uint32_t row = divide(i, payload.vectors);
      value[u] = load_input<V>(payload.data + static_cast<int64_t>(begin + row) * payload.stride +
                               sizeof(V) * (i - row * vectors));
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const uint32_t i = base + u * kCarriers;
      if (i >= total) continue;
      const uint32_t row = divide(i, payload.vectors);
      const uint64_t column = sizeof(V) * (i - row * vectors);
#pragma unroll 1
      for (int position = 0; position < b.scratch.fan()[row]; ++position) {
        const Destination to = b.scratch.destinations()[row * fan_out + position];
        *reinterpret_cast<V*>(b.scratch.windows()[to.rank] + place + to.slot * bytes + column) = value[u];
      }
    }
  }
}

__device__ void carry(const Block& b, int begin, int count) {
#pragma unroll 1
  for (int q = 0; q < b.p.group.map.shape().payloads; ++q) {
    const int width = b.p.payloads[q].width;
    if (width == 16) {
      carry_rows<uint4, 4>(b, q, begin, count);
    } else if (width >= 4) {
      carry_rows<unsigned int, 2>(b, q, begin, count);
    } else {
      carry_rows<unsigned char, 2>(b, q, begin, count);
    }
  }
}

// Brings the rows of a batch into the second-level cache while the block finds out where they go.
__device__ void prefetch(const Block& b, int begin, int count) {
#pragma unroll 1
  for (int q = 0; q < b.p.group.map.shape().payloads; ++q) {
    const uint64_t bytes = b.p.group.map.shape().payload_bytes[q];
    const auto lines = static_cast<uint32_t>((bytes + 127) / 128);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < count * lines; i += blockDim.x) {
      const uint32_t row = i / lines;
      const std::byte* const at = b.p.payloads[q].data + static_cast<int64_t>(begin + row) * b.p.payloads[q].stride;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(at + min(uint64_t{128} * (i - row * lines), bytes - 1)));
    }
  }
}

// Headers, ids and weights of a batch, to every receiver. By the threads that carry nothing.
__device__ void send_meta(const Block& b, int count, int thread) {
  const DispatchParams& p = b.p;
  const WindowMap& map = p.group.map;
  const int fan_out = map.shape().fan_out();
  const int words = b.meta_words();
  const uint64_t place = map.meta(b.step.lane, b.step.bank(), p.group.me, 0, p.bound);
#pragma unroll 1
  for (int i = thread; i < count * words; i += kMetaThreads) {
    const int row = i / words;
    const int w = i - row * words;
    const uint64_t value = b.scratch.meta()[i];
#pragma unroll 1
    for (int position = 0; position < b.scratch.fan()[row]; ++position) {
      const Destination to = b.scratch.destinations()[row * fan_out + position];
      const uint64_t sent = value | (w == 0 ? static_cast<uint64_t>(position) << 32 : 0);
      reinterpret_cast<uint64_t*>(b.scratch.windows()[to.rank] + place)[static_cast<int64_t>(to.slot) * words + w] =
          sent;
    }
  }
}

__device__ void meta_barrier() { asm volatile("bar.sync 1, %0;" ::"n"(kMetaThreads) : "memory"); }

// The last of all blocks to come here publishes for them (S4: each has synchronised its threads, then the counter's
// acquire and release chain them, then one fence for the system). By one warp.
__device__ void publish_last(const Block& b, uint32_t* counter, uint64_t offset) {
  int last = 0;
  if (threadIdx.x % 32 == 0) {
    last = arrive(counter) == gridDim.x - 1;
    if (last) *counter = 0;
  }
  if (!__shfl_sync(~0u, last, 0)) return;
  __syncwarp();  // what lane 0 has synchronised with, all have
  const GroupView& g = b.p.group;
  const uint64_t place = g.map.word(b.step.lane, b.step.bank(), g.me);
  const int32_t* const counts = b.p.handle.send_counts;
  for (int i = threadIdx.x % 32; i < b.ranks(); i += 32) {
    store_word(b.scratch.windows()[i] + place + kNoteOffset, static_cast<uint64_t>(b.step.bound));
  }
  fence_system();
  for (int i = threadIdx.x % 32; i < b.ranks(); i += 32) {
    const auto n = static_cast<uint32_t>(load_received<int>(counts + i));
    store_word(b.scratch.windows()[i] + place + offset, pack(Word{b.step.low(), Mode::kDispatch, n}));
  }
}

__device__ void send_in_bulk(const Block& b) {
  const DispatchParams& p = b.p;
  LaneState& lane = p.group.lanes[b.step.lane];
  Router router(p, b.scratch);
  const bool carries = threadIdx.x < kCarriers;
  const int thread = static_cast<int>(threadIdx.x) - kCarriers;
  int begin = b.first;
#pragma unroll 1
  do {
    const int count = min(kBatch, b.first + b.count - begin);
    const bool ends = begin + count >= b.first + b.count;
    if (count > 0) {
      prefetch(b, begin, count);
      router.route(begin, count);
    }
    if (ends && b.closes()) keep_counts(b);
    __syncthreads();
    if (carries) {
      carry(b, begin, count);
    } else {
      if (begin != b.first) stage_meta(p, b.scratch, b.step, begin, count, thread, kMetaThreads);
      meta_barrier();
      send_meta(b, count, thread);
      take_own_meta(p, b.scratch, count, thread, kMetaThreads);
      keep_destinations(p, b.scratch, begin, count, thread, kMetaThreads);
      meta_barrier();
      if (ends && thread < 32) publish_last(b, &lane.announced, kAnnouncementOffset);
    }
    __syncthreads();
    begin += kBatch;
  } while (begin < b.first + b.count);
  if (threadIdx.x < 32) publish_last(b, &lane.sent, 0);
}

// ---- Receiving

// Every source's word or announcement, into shared memory.
template <bool kBulk>
__device__ void look_at_sources(const Block& b) {
  for (int i = threadIdx.x; i < b.ranks(); i += blockDim.x) {
    const Source source = await_source(b.p.group, b.step, i, kBulk ? Look::kEarly : Look::kWord);
    b.scratch.source_n()[i] = source.n;
    b.scratch.source_mode()[i] =
        source.error == twSuccess ? static_cast<int>(source.mode) : -static_cast<int>(source.error);
    if (blockIdx.x != 0) continue;
    report_source(b.p.group, b.step, i, source);
    b.p.shown.counts[i] = source.n;
    b.p.handle.counts[i] = source.n;
  }
  __syncthreads();  // S4: who has looked has fenced, and hands on what it saw
}

// Lines of one source, this block's slots of them: into the window, as bulk rows would lie there.
__device__ bool take_lines(const Block& b, int source, int n) {
  const DispatchParams& p = b.p;
  const int parts = static_cast<int>(gridDim.x);
  const int first = (static_cast<int>(blockIdx.x) + parts - source % parts) % parts;
  const uint32_t lanes = kLineLanes * static_cast<uint32_t>(lines_of(p.words));
  const std::byte* const lines =
      b.scratch.windows()[p.group.me] + p.group.map.line(b.step.lane, b.step.bank(), source, 0);
  bool here = true;
#pragma unroll 1
  for (int slot = first; slot < n && here; slot += parts) {
#pragma unroll 1
    for (uint32_t base = threadIdx.x / 32 * 32; base < lanes && here; base += blockDim.x) {
      const uint32_t lane = base + threadIdx.x % 32;
      const bool active = lane < lanes;
      Vec16 value{};
      here = await_lines(p.group, b.step, active, lines + slot * p.group.map.line_row() + 16 * lane, source, &value,
                         [](int) { return false; });
      if (!active || !here) continue;
      const uint32_t w = word_of(lane);
      if (w < p.words) place_word(p, b.bank, source, slot, w, value.a);
      if (lane % kLineLanes != kLineLanes - 1 && w + 1 < p.words) {
        place_word(p, b.bank, source, slot, w + 1, value.b);
      }
    }
  }
  return here;
}

// Headers, ids and weights of the slots that this block has taken out of lines. After a barrier.
__device__ void take_line_meta(const Block& b, int source, int n) {
  const DispatchParams& p = b.p;
  const int parts = static_cast<int>(gridDim.x);
  const int per_row = 1 + p.group.map.shape().top_k;
  const int first = (static_cast<int>(blockIdx.x) + parts - source % parts) % parts;
#pragma unroll 1
  for (int slot = first; slot < n; slot += parts) {
    for (int i = threadIdx.x; i < per_row; i += blockDim.x) take_meta(p, b.bank, b.step, source, slot, i);
  }
}

// This block's slots of a source hold nothing that can be trusted.
__device__ __noinline__ void give_up_lines(const DispatchParams& p, int source, int n) {
  const int parts = static_cast<int>(gridDim.x);
  const int first = (static_cast<int>(blockIdx.x) + parts - source % parts) % parts;
  for (int slot = first; slot < n; slot += parts) show_nothing(p, source, slot, slot + 1, 0, 1);
  if (threadIdx.x != 0) return;
  p.shown.counts[source] = p.handle.counts[source] = 0;
  *p.handle.status = twInternalError;
}

// Announced headers, ids and weights of one source, this block's part of them.
__device__ void take_announced(const Block& b, int source, int n) {
  const int per_row = 1 + b.p.group.map.shape().top_k;
#pragma unroll 1
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < static_cast<uint32_t>(n) * per_row;
       i += gridDim.x * blockDim.x) {
    const int slot = static_cast<int>(i / per_row);
    take_meta(b.p, b.bank, b.step, source, slot, static_cast<int>(i) - slot * per_row);
  }
}

// One block waits for the words that say that all rows are in place (S2), and clears away after what has failed.
__device__ void conclude(const Block& b) {
  const DispatchParams& p = b.p;
  bool whole = true;
  for (int i = threadIdx.x; i < b.ranks(); i += blockDim.x) {
    const int mode = b.scratch.source_mode()[i];
    whole &= mode > 0;
    if (mode != static_cast<int>(Mode::kDispatch)) continue;
    const Source source = await_source(p.group, b.step, i, Look::kWord);
    if (source.error == twSuccess) continue;
    report_source(p.group, b.step, i, source);
    b.scratch.source_mode()[i] = -static_cast<int>(source.error);
    whole = false;
  }
  if (__syncthreads_and(whole)) return;
  await_done(p.group, b.step);
  for (int source = 0; source < b.ranks(); ++source) {
    if (b.scratch.source_mode()[source] >= 0) continue;
    p.shown.counts[source] = p.handle.counts[source] = 0;
    show_nothing(p, source, 0, p.bound, 0, 1);
  }
  if (threadIdx.x == 0) *p.handle.status = twInternalError;
}

template <bool kBulk>
__device__ void receive(const Block& b) {
  const DispatchParams& p = b.p;
  look_at_sources<kBulk>(b);
#pragma unroll 1
  for (int i = 1; i <= b.ranks(); ++i) {
    const int source = (p.group.me + i) % b.ranks();
    const int n = b.scratch.source_n()[source];
    const int mode = b.scratch.source_mode()[source];
    if (source != p.group.me) {  // else they were taken when they were sent
      if (mode == static_cast<int>(Mode::kDispatchLines)) {
        const bool here = take_lines(b, source, n);
        if (__syncthreads_and(here)) {
          take_line_meta(b, source, n);
        } else {
          give_up_lines(p, source, n);
        }
      } else if (kBulk && mode == static_cast<int>(Mode::kDispatch)) {
        take_announced(b, source, n);
      }
    }
    if (n < p.bound) show_nothing(p, source, n, p.bound, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  }
  if (blockIdx.x == 0) conclude(b);
}

// The group is finished: nothing goes out, and what the caller sees is safe.
__device__ __noinline__ void show_failure(const DispatchParams& p) {
  const int ranks = p.group.map.shape().ranks;
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < ranks; i += blockDim.x) p.shown.counts[i] = p.handle.counts[i] = 0;
    if (threadIdx.x == 0) *p.handle.status = twInternalError;
  }
  for (int i = 0; i < ranks; ++i) {
    show_nothing(p, i, 0, p.bound, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  }
}

// kBulk: for bounds at which some rank may send in bulk; else all send lines.
template <bool kBulk>
__global__ void __launch_bounds__(kThreads, 1) dispatch_kernel(const __grid_constant__ DispatchParams p) {
  const GroupView& g = p.group;
  const Scratch scratch(p);
  Step step{next_step(g, p.lane), p.lane, p.bound, twPhaseDispatch};
  const bool sticky = is_sticky(g);
  // The ids come into the first-level cache while the tables are loaded; what is read here is not used.
  if (p.send && static_cast<int>(threadIdx.x) < p.tokens) (void)touch_ids(p, static_cast<int>(threadIdx.x));
  load_tables(p, scratch);
  const int each = (p.tokens + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  const int first = min(static_cast<int>(blockIdx.x) * each, p.tokens);
  const int mine = min(each, p.tokens - first);
  // Of the first batch, while the tables are on their way.
  if (p.send) stage_meta(p, scratch, step, first, min(kBatch, mine), threadIdx.x, blockDim.x);
  const bool skips = static_cast<int>(step.number & 1) != p.bank;
  if (skips) ++step.number;
  __syncthreads();
  uint32_t arrived = 0;
  if (p.receive && threadIdx.x == 0) {
    arrived = begin_end(g, step);
    if (blockIdx.x == 0) *p.handle.status = twSuccess;  // until somebody finds otherwise
  }
  const Block b{p, scratch, step, scratch.windows()[g.me] + g.map.bank(p.lane, step.bank()), first, mine};
  bool usable = !sticky;
  if (p.send && usable && skips) usable = skip_step(p, step);
  if (p.send && usable) {
    if (!kBulk || p.tokens <= g.line_tokens) {
      send_by_lines(b);
    } else if constexpr (kBulk) {
      send_in_bulk(b);
    }
  }
  if (p.receive) {
    if (usable) {
      receive<kBulk>(b);
    } else {
      show_failure(p);
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (!p.receive) return;
  end_step(g, step, arrived);
  say_done(g, step);
}

}  // namespace

int launch_dispatch(const DispatchParams& params, bool bulk, int grid, void* stream) {
  const auto kernel = bulk ? dispatch_kernel<true> : dispatch_kernel<false>;
  kernel<<<grid, kThreads, params.at.bytes, static_cast<cudaStream_t>(stream)>>>(params);
  return cudaGetLastError();
}

int load_dispatch(const Shape& shape) {
  const uint32_t bytes = DispatchScratch::make(shape).bytes;
  for (const auto kernel : {dispatch_kernel<true>, dispatch_kernel<false>}) {
    if (const int error = allow_shared(reinterpret_cast<const void*>(kernel), bytes); error != 0) return error;
  }
  return 0;
}

}  // namespace tw::nvlink
