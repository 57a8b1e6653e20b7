// Combine of many rows. Some blocks push them into their owners' inboxes, in chunks of a few rows with a word each; the
// others sum the chunks that have arrived, while later ones are on the wire. Floor: bytes over the link, then the last
// chunk's fence, word and sum. Pushing all, waiting, then summing would be 1.3 times that.
//
// Within a block warps work alone, each on a slice of a row or of a token: none waits for the others but at the end of
// a chunk, and there the last one to finish publishes, not all. Slices are short, because what a combine ends with is
// one slice sent, a fence, a word, and one slice summed.
#include <cuda_runtime.h>

#include "nvlink/combine.cuh"

namespace tw::nvlink {
namespace {

constexpr uint32_t kSlice = 256;  // vectors of 16 bytes: 8 for each thread of a warp

// Slices of a row that is copied or summed by whole vectors.
__device__ int slices(const CombineParams& p) { return static_cast<int>((p.vectors + kSlice - 1) / kSlice); }

__device__ int warp() { return static_cast<int>(threadIdx.x / 32); }
__device__ int lane() { return static_cast<int>(threadIdx.x % 32); }

// 16 bytes a lane and several at once; rows as they lie.
__device__ void copy_slice(const Sum& s, const std::byte* row, std::byte* to, int slice) {
  constexpr int kAtOnce = 4;
  const uint32_t vectors = min(s.p.vectors, (slice + 1) * kSlice);
#pragma unroll 1
  for (uint32_t base = slice * kSlice + lane(); base < vectors; base += 32 * kAtOnce) {
    uint4 value[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (base + 32 * u < vectors) value[u] = load_input<uint4>(row + 16 * static_cast<uint64_t>(base + 32 * u));
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (base + 32 * u < vectors) reinterpret_cast<uint4*>(to)[base + 32 * u] = value[u];
    }
  }
}

// Weighted rows, several rows to a partial, other types, odd sizes.
__device__ void sum_row(const Sum& s, int owner, int slot, std::byte* to) {
  const CombineParams& p = s.p;
  const auto bytes = static_cast<int64_t>(p.group.map.shape().combine_bytes);
  __syncwarp();  // the set is about to be overwritten
  collect_terms(p, warp(), owner, slot);
#pragma unroll 1
  for (uint32_t w = lane(); w < s.words(); w += 32) {
    const uint64_t value = sum_word(p, warp(), w);
    if (p.words_fit) {
      reinterpret_cast<uint64_t*>(to)[w] = value;
    } else {
      store_odd(to + 8 * w, value, bytes - 8 * static_cast<int64_t>(w));
    }
  }
}

// A slice of one row's partial into its owner's inbox, by a warp; the first slice is all of what is no plain copy.
__device__ void push_slice(const Sum& s, int owner, int slot, int slice) {
  const CombineParams& p = s.p;
  const WindowMap& map = p.group.map;
  const uint64_t header = p.handle.meta[(static_cast<int64_t>(owner) * p.bound + slot) * (1 + map.shape().top_k)];
  std::byte* const to = s.windows()[owner] +
                        map.inbox(s.step.lane, s.step.bank(), static_cast<int>(header), static_cast<int>(header >> 32));
  if (p.plain && p.vectors_fit) {
    copy_slice(s, row_of(p, owner, slot), to, slice);
  } else if (slice == 0) {
    sum_row(s, owner, slot, to);
  }
}

// A chunk of rows, of an owner that gets chunks.
struct Chunk {
  int owner;
  int number;
  int rows;  // 0: there is no such chunk
};
// Chunks of all owners in turns, so that none waits for the others'. Own rows that are summed where they lie have none.
__device__ Chunk chunk_of(const Sum& s, int i) {
  const int owners = s.ranks() - (s.p.own_direct ? 1 : 0);
  Chunk chunk{(s.p.group.me + 1 + i % owners) % s.ranks(), i / owners, 0};
  const int rows = s.counts()[chunk.owner];
  if (!s.by_lines(chunk.owner, rows)) chunk.rows = max(0, min(s.chunk_rows(), rows - chunk.number * s.chunk_rows()));
  return chunk;
}

__device__ void push_chunks(const Sum& s) {
  const CombineParams& p = s.p;
  const int owners = s.ranks() - (p.own_direct ? 1 : 0);
  int most = 0;
#pragma unroll 1
  for (int i = 0; i < s.ranks(); ++i) most = max(most, s.counts()[i]);
  const int chunks = owners * ((most + s.chunk_rows() - 1) / s.chunk_rows());
  int32_t* const sent = shared_at<int32_t>(p.at.sent);
  const int parts = p.plain && p.vectors_fit ? slices(p) : 1;
  const int items = s.chunk_rows() * parts;  // of a chunk
#pragma unroll 1
  for (int begin = 0; begin * p.senders + static_cast<int>(blockIdx.x) < chunks; begin += kChunks) {
    __syncthreads();
    if (threadIdx.x < kChunks) sent[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll 1
    for (int x = warp(); x < kChunks * items; x += kWarps) {
      const int mine = x / items;
      const int i = (begin + mine) * p.senders + static_cast<int>(blockIdx.x);
      if (i >= chunks) break;
      const Chunk chunk = chunk_of(s, i);
      const int row = (x - mine * items) / parts;
      if (row >= chunk.rows) continue;
      push_slice(s, chunk.owner, chunk.number * s.chunk_rows() + row, x % parts);
      __syncwarp();
      if (lane() != 0) continue;
      // S4: the counter's acquire and release chain the chunk's rows, one fence then brings all before the word.
      __threadfence_block();
      if (atomicAdd(&sent[mine], 1) != chunk.rows * parts - 1) continue;
      fence_system();
      store_word(
          s.windows()[chunk.owner] + p.group.map.chunk_word(s.step.lane, s.step.bank(), p.group.me, chunk.number),
          s.step.number);
    }
  }
}

// Rows of owners that get few.
__device__ void push_lines(const Sum& s) {
  const CombineParams& p = s.p;
  const int senders = p.senders * kWarps;
  const int me = static_cast<int>(blockIdx.x) + warp() * p.senders;
#pragma unroll 1
  for (int i = 1; i < s.ranks(); ++i) {
    const int owner = (p.group.me + i) % s.ranks();
    const int rows = s.counts()[owner];
    if (!s.by_lines(owner, rows)) continue;
    std::byte* const lines = s.windows()[owner] + p.group.map.line(s.step.lane, s.step.bank(), p.group.me, 0);
#pragma unroll 1
    for (int slot = me; slot < rows; slot += senders) {
      if (!s.simple()) {
        __syncwarp();
        collect_terms(p, warp(), owner, slot);
      }
      send_line_row(s, lines + slot * p.group.map.line_row(), row_of(p, owner, slot), warp(), lane(), 32);
    }
  }
}

// The last sending block publishes, when all rows have been read and written (S3).
__device__ void publish_last(const Sum& s) {
  __syncthreads();
  bool last = false;
  if (threadIdx.x == 0) {
    uint32_t* const sent = &s.p.group.lanes[s.step.lane].sent;
    last = arrive(sent) == static_cast<uint32_t>(s.p.senders) - 1;
    if (last) *sent = 0;
  }
  if (!__syncthreads_or(last)) return;
  publish_words(s.p.group, s.step, 0, Mode::kCombine, [&](int rank) { return s.counts()[rank]; });
}

// ---- Summing

__device__ bool await_chunk(const Sum& s, int source, int chunk) {
  const GroupView& g = s.p.group;
  const std::byte* const word = s.window() + g.map.chunk_word(s.step.lane, s.step.bank(), source, chunk);
  Patience patience(g);
#pragma unroll 1
  while (load_word(word) != s.step.number) {
    bool late = false;
    if (patience.over(&late)) {
      if (late) {
        report_failure(g, s.step, twTimeout, source, 0);
      } else {
        report_stopped(g, s.step, source, 0);
      }
      return g.no_wait;
    }
    if (patience.looked() && source_failed(g, s.step, source)) return false;
    __nanosleep(100);
  }
  fence_system();  // S4
  return true;
}

// 16 bytes of the wire's type as floats, summed, to elements of the output's.
__device__ void store_sums(const CombineParams& p, std::byte* out, uint32_t vector, const Quad& low, const Quad& high) {
  if (p.wire_dtype == twFloat32) {  // 4 elements: two in each quad
    const float v[4] = {low.v[0], low.v[1], high.v[0], high.v[1]};
    if (p.out_dtype == twFloat32) {
      reinterpret_cast<float4*>(out)[vector] = make_float4(v[0], v[1], v[2], v[3]);
    } else {
      reinterpret_cast<uint2*>(out)[vector] =
          make_uint2(narrow_two(p.out_dtype, v[0], v[1]), narrow_two(p.out_dtype, v[2], v[3]));
    }
    return;
  }
  if (p.out_dtype == twFloat32) {
    reinterpret_cast<float4*>(out)[2 * vector] = make_float4(low.v[0], low.v[1], low.v[2], low.v[3]);
    reinterpret_cast<float4*>(out)[2 * vector + 1] = make_float4(high.v[0], high.v[1], high.v[2], high.v[3]);
    return;
  }
  reinterpret_cast<uint4*>(out)[vector] =
      make_uint4(narrow_two(p.out_dtype, low.v[0], low.v[1]), narrow_two(p.out_dtype, low.v[2], low.v[3]),
                 narrow_two(p.out_dtype, high.v[0], high.v[1]), narrow_two(p.out_dtype, high.v[2], high.v[3]));
}
__device__ uint64_t low_half(const uint4& v) { return v.x | static_cast<uint64_t>(v.y) << 32; }
__device__ uint64_t high_half(const uint4& v) { return v.z | static_cast<uint64_t>(v.w) << 32; }

// A slice of a token's sum of whole vectors, where own rows are plain and all else lies in the inbox.
__device__ void sum_vectors(const Sum& s, int token, int slice) {
  constexpr int kAtOnce = 2;
  constexpr int kTerms = 2;  // loaded before the first of them is added
  const CombineParams& p = s.p;
  const uint32_t vectors = min(p.vectors, (slice + 1) * kSlice);
  const int fan = s.fan()[warp()];
  const std::byte** const places = s.places(warp());
  std::byte* const out = p.out + static_cast<int64_t>(token) * p.out_stride;
#pragma unroll 1
  for (uint32_t base = slice * kSlice + lane(); base < vectors; base += 32 * kAtOnce) {
    Quad low[kAtOnce] = {};
    Quad high[kAtOnce] = {};
#pragma unroll 1
    for (int position = 0; position < fan; position += kTerms) {
      uint4 term[kAtOnce][kTerms];
#pragma unroll
      for (int t = 0; t < kTerms; ++t) {
        if (position + t >= fan) continue;
        const auto* const row = reinterpret_cast<const uint4*>(places[position + t]);
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u) {
          if (base + 32 * u < vectors) term[u][t] = load_received<uint4>(row + base + 32 * u);
        }
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
#pragma unroll
        for (int t = 0; t < kTerms; ++t) {
          if (position + t >= fan) continue;
          add(&low[u], widen_word(p.wire_dtype, low_half(term[u][t])), position + t == 0);
          add(&high[u], widen_word(p.wire_dtype, high_half(term[u][t])), position + t == 0);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (base + 32 * u < vectors) store_sums(p, out, base + 32 * u, low[u], high[u]);
    }
  }
}

// A slice of one token's sum, by a warp; the first slice is all of what is no sum of whole vectors.
__device__ void sum_slice(const Sum& s, int token, int slice) {
  const CombineParams& p = s.p;
  const int set = warp();
  const int fan = p.handle.fan[token];
  __syncwarp();  // the set is about to be overwritten
  if (lane() == 0) s.fan()[set] = fan;
  bool lines = false;
  bool here = true;
  int own = -1;
#pragma unroll 1
  for (int position = lane(); position < fan; position += 32) {
    const Destination from = p.handle.destinations[static_cast<int64_t>(token) * s.fan_out() + position];
    find_term<true>(s, set, token, position, from);
    const int kind = s.kinds(set)[position];
    lines |= kind == kLine;
    if (kind == kOwn) own = from.slot;
    if (kind == kInbox) here &= await_chunk(s, from.rank, from.slot / s.chunk_rows());
  }
  __syncwarp();
  here = __all_sync(~0u, here);  // S4: the lanes that have looked have fenced
  lines = __any_sync(~0u, lines);
  const uint32_t owns = __ballot_sync(~0u, own >= 0);
  if (here && owns != 0 && !s.simple()) {
    collect_terms(p, set, p.group.me, __shfl_sync(~0u, own, __ffs(static_cast<int>(owns)) - 1));
  }
  if (here && p.vectors_fit && !lines && (p.plain || owns == 0)) {
    sum_vectors(s, token, slice);
  } else if (slice > 0) {
    return;
  } else if (here) {
    here = __all_sync(~0u, sum_lines<true>(s, set, token, lane(), 32));
  }
  if (!here) fill_nan(p, token, 1, lane(), 32);
}

__global__ void __launch_bounds__(kThreads, 1) combine_bulk_kernel(const __grid_constant__ CombineParams p) {
  const Sum s{p, Step{next_step(p.group, p.lane), p.lane, p.bound, twPhaseCombine}};
  const bool usable = begin_combine(s);
  const int block = static_cast<int>(blockIdx.x);
  const int summer = block - (static_cast<int>(gridDim.x) - p.summers);
  __syncthreads();
  uint32_t arrived = 0;
  if (!usable) {
    if (p.receive && summer == 0) fill_nan(p, 0, p.tokens, threadIdx.x, blockDim.x);
  } else {
    if (p.receive && threadIdx.x == 0) arrived = begin_end(p.group, s.step);
    if (p.send && block < p.senders) {
      // Every row has a word of its own or certifies itself. The step's word also says that nothing of the other bank
      // is read any more (S3): where rows lie outside the window that is so from the start.
      if (!p.late_word && block == 0) {
        publish_unordered(p.group, s.step, Mode::kCombine, [&](int rank) { return s.counts()[rank]; });
      }
      push_lines(s);
      push_chunks(s);
      if (p.late_word) publish_last(s);
    }
    if (p.receive && summer >= 0) {
      const int parts = p.vectors_fit ? slices(p) : 1;
#pragma unroll 1
      for (int i = summer + warp() * p.summers; i < p.tokens * parts; i += kWarps * p.summers) {
        sum_slice(s, i / parts, i % parts);
      }
      __syncthreads();
      if (summer == p.summers - 1) conclude(s);
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (!usable || !p.receive) return;  // not done: this step will be another kernel's, unless the group is finished
  end_step(p.group, s.step, arrived);
  say_done(p.group, s.step);
}

}  // namespace

int launch_combine_bulk(const CombineParams& params, int grid, void* stream) {
  combine_bulk_kernel<<<grid, kThreads, params.at.bytes, static_cast<cudaStream_t>(stream)>>>(params);
  return cudaGetLastError();
}

int load_combine_bulk(const Shape& shape) {
  return allow_shared(reinterpret_cast<const void*>(combine_bulk_kernel), CombineScratch::make(shape, true).bytes);
}

}  // namespace tw::nvlink
