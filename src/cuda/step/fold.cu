// Kernels for sums by domain that are folded on the host that sends (launch/folds.h; docs/PROTOCOL_ON_DEVICES.md,
// "Folds on the way"). A token's partials of a host go to its owner as one row: the owner's rail peer there reads them
// in its mates' outgoing memory, over NVLink, where their combine has written them as ever, and adds them over ranks
// ascending.
//
// Takes FoldParams, from the host alone; gives tags, messages of folds, and folds in the owner's inbox, which a kernel
// behind sums as if they were partials (combine/bias.cu, domains_kernel).
//
// Floor: each fold crosses the network once, at its 50 GB/s; partials are read over NVLink, at several times that, by
// four vectors of four rows at once in each thread.
//
// Which number a fold has in its message is decided by whichever warp comes first. Nothing that is read later depends
// on it.
//
// What breaks if this changes: S9 (ranks ascending, rounded once), S8 (fold_kernel waits), and T2 (its reads at mates
// precede this rank's next signal: it is in its stream).
#include "cuda/launch/folds.h"

#include <cuda_runtime.h>

#include "cuda/device/sum.cuh"
#include "cuda/launch/launch.h"
#include "cuda/launch/loading.h"
#include "cuda/step/posted.cuh"
#include "cuda/step/waits.cuh"

namespace tw::cuda {
namespace {

constexpr int kFoldThreads = 512;
constexpr int kFoldWarps = kFoldThreads / 32;

// What a rank notes of a partial: the step that it is of, and its slot, which is less than a signal's count. What it
// has noted in an earlier step has that one's number, so nobody clears it; none has the number of memory that is zero.
constexpr uint64_t kSlots = uint64_t{kMaxCount} + 1;
__device__ inline uint64_t make_tag(uint64_t step, int slot) { return step * kSlots + static_cast<uint64_t>(slot); }

// Where the tag of a rank's token is: bytes from where tags begin.
__device__ inline uint64_t tag_place(const FoldParams& f, int bank, int rank, int token) {
  return f.tags_bank * static_cast<uint64_t>(bank) +
         sizeof(uint64_t) *
             (static_cast<uint64_t>(rank) * static_cast<uint64_t>(f.tokens) + static_cast<uint64_t>(token));
}

// Threads and warps of the whole grid.
__device__ inline int thread_of_all() {
  return static_cast<int>(blockIdx.x) * kFoldThreads + static_cast<int>(threadIdx.x);
}
__device__ inline int all_threads() { return static_cast<int>(gridDim.x) * kFoldThreads; }

// Whether this rank takes part in the step with rows. By a block.
__device__ inline bool takes_part(const PostParams& p, const Step& step) {
  const Signal own = told_of(p.group, p.signals, step.bank(), p.group.me);
  return __syncthreads_or(is_sticky(p.group) || !is_made(own, step.number) || !brings(own.mode)) == 0;
}
__device__ inline Step step_of(const PostParams& p) { return {next_step(p.group, p.channel), p.channel, 0, p.phase}; }

__global__ void __launch_bounds__(kFoldThreads) tags_kernel(const __grid_constant__ FoldParams f) {
  const PostParams& p = f.post;
  const GroupView& g = p.group;
  const Step step = step_of(p);
  if (!takes_part(p, step)) return;
#pragma unroll 1
  for (int rank = 0; rank < g.map.shape().ranks; ++rank) {
    if (p.once.ranks[rank].message < 0) continue;  // of this host
    const auto rows =
        static_cast<int>(min(told_of(g, p.signals, step.bank(), rank).n, static_cast<uint32_t>(p.once.bound)));
    const int64_t first = f.returned.first != nullptr ? f.returned.first[rank] : int64_t{rank} * p.once.bound;
    for (int slot = thread_of_all(); slot < rows; slot += all_threads()) {
      const auto token = load_fresh<uint32_t>(f.returned.meta + (first + slot) * f.returned.words);
      if (token >= static_cast<uint32_t>(f.tokens)) continue;
      store_word(f.tags + tag_place(f, step.bank(), rank, static_cast<int>(token)), make_tag(step.number, slot));
    }
  }
}

// Finds the partials that this host's ranks have for a token of an owner, ranks ascending: their places, in shared
// memory. Returns how many. By a warp.
__device__ inline int find_partials(const FoldParams& f, const Step& step, int owner, int token,
                                    const std::byte** places) {
  const PostRegion& region = f.post.regions[0];
  const int first = f.post.group.me / f.local * f.local;
  int found = 0;
  __syncwarp();  // places are about to be overwritten
#pragma unroll 1
  for (int base = 0; base < f.local; base += 32) {
    const int rank = first + base + lane();
    uint64_t tag = 0;
    if (base + lane() < f.local) {
      tag = load_fresh<unsigned long long>(f.near_tags.begins[rank] + f.near_tags.offset +
                                           tag_place(f, step.bank(), owner, token));
    }
    const uint64_t slot = tag - make_tag(step.number, 0);  // beyond all slots in tags of other steps
    const bool has = tag != 0 && slot < static_cast<uint64_t>(f.post.once.bound);
    const uint32_t all = __ballot_sync(~0u, has);
    if (has) {
      places[found + __popc(all & below(lane()))] =
          f.partials.begins[rank] + f.partials.offset + block_here(region, step.bank(), owner) + region.row * slot;
    }
    found += __popc(all);
  }
  __syncwarp();
  return found;
}

// Folds rows of an even number of bytes; by a warp.
template <twDtype_t kWire>
__device__ inline void fold_rows(const std::byte* const* places, int count, uint64_t bytes, std::byte* to) {
  constexpr int kAtOnce = 2;  // 3 took as long on 2x H200
  if (bytes % sizeof(uint4) == 0) {
    const auto vectors = static_cast<uint32_t>(bytes / sizeof(uint4));
#pragma unroll 1
    for (uint32_t first = static_cast<uint32_t>(lane()); first < vectors; first += 32 * kAtOnce) {
      uint4 bits[kAtOnce];
      sum_vectors<kWire, kAtOnce>(places, nullptr, false, count, first, vectors, bits);
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (first + 32 * u < vectors) reinterpret_cast<uint4*>(to)[first + 32 * u] = bits[u];
      }
    }
    return;
  }
  const auto elements = static_cast<int64_t>(bytes) / float_bytes(kWire);
#pragma unroll 1
  for (int64_t i = lane(); i < elements; i += 32) {
    float sum = load_element(places[0], kWire, i);
    for (int term = 1; term < count; ++term) sum = __fadd_rn(sum, load_element(places[term], kWire, i));
    const uint32_t bits = narrow(kWire, sum);
    if (kWire == twFloat32) {
      reinterpret_cast<uint32_t*>(to)[i] = bits;
    } else {
      reinterpret_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(bits);
    }
  }
}

// Each warp takes tokens of all owners for whom this rank folds, by turns.
template <twDtype_t kWire>
__global__ void __launch_bounds__(kFoldThreads) fold_kernel(const __grid_constant__ FoldParams f) {
  const PostParams& p = f.post;
  const GroupView& g = p.group;
  const Step step = step_of(p);
  if (!takes_part(p, step)) return;
  await_ranks(g, step, Look::kSignal, [&](int rank) { return rank / f.local == g.me / f.local; });
  if (__syncthreads_or(is_sticky(g)) != 0) return;
  const PostRegion& region = p.regions[0];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const std::byte** const places = reinterpret_cast<const std::byte**>(shared_bytes()) + warp * f.local;
  const int bound = p.once.bound;
  const int all = p.once.others * bound;
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.x) * kFoldWarps + warp; i < all;
       i += static_cast<int>(gridDim.x) * kFoldWarps) {
    const int message = i / bound;
    const int token = i % bound;
    std::byte* const to = p.once.at + message_here(p.once, step.bank(), message);
    const int count = find_partials(f, step, p.once.messages[message].peer, token, places);
    uint32_t row = InboxMap::kNoRow;
    if (lane() == 0) {
      if (count > 0) row = atomicAdd(&p.once.rows[message], 1);
      reinterpret_cast<uint32_t*>(to + InboxMap::kHead)[token] = row;
    }
    row = __shfl_sync(~0u, row, 0);
    if (count > 0) fold_rows<kWire>(places, count, region.row, to + region.in_message + region.row * row);
  }
}

// Where a token's fold of a host goes at its owner: a destination of that host, the first that has a partial; none: -1.
struct FirstOfHost {
  Destination to;
  int host;
};
// Of a warp's token: the thread's destination of those from `base` on, if it is a fold's. `before`: the host of the
// last one that had a partial; changes to that of these.
__device__ inline FirstOfHost first_of_host(const FoldParams& f, const Step& step, int token, int base, int* before) {
  const GroupView& g = f.post.group;
  const SentTokens& sent = f.post.sent;
  const auto fan = static_cast<int>(load_fresh<uint32_t>(sent.fan + token));
  FirstOfHost found{{-1, 0}, -1};
  if (base + lane() < fan) {
    found.to = load_both(sent.destinations + static_cast<int64_t>(token) * sent.fan_out + base + lane());
    // A row for which its receiver had no room has no partial.
    const std::byte* const signal = window_of(g, g.me) + g.map.signal(step.channel, step.bank(), found.to.rank);
    if (found.to.slot < static_cast<int>(unpack(load_word(signal)).n)) found.host = found.to.rank / f.local;
  }
  const uint32_t here = __ballot_sync(~0u, found.host >= 0);
  const uint32_t earlier = here & below(lane());
  const int last = __shfl_sync(~0u, found.host, earlier != 0 ? 31 - __clz(static_cast<int>(earlier)) : 0);
  const bool follows = (earlier != 0 ? last : *before) == found.host;
  const int newest = __shfl_sync(~0u, found.host, here != 0 ? 31 - __clz(static_cast<int>(here)) : 0);
  if (here != 0) *before = newest;
  if (follows || found.host == g.me / f.local) found.host = -1;
  return found;
}

// Each warp takes tokens of this rank, by turns. Behind all signals.
__global__ void __launch_bounds__(kFoldThreads) unfold_kernel(const __grid_constant__ FoldParams f) {
  const PostParams& p = f.post;
  const GroupView& g = p.group;
  const Step step = step_of(p);
  if (!takes_part(p, step)) return;
  const PostRegion& region = p.regions[0];
  std::byte* const window = region.near.begins[g.me] + region.near.offset;
  const int warps = static_cast<int>(gridDim.x) * kFoldWarps;
#pragma unroll 1
  for (int t = static_cast<int>(blockIdx.x) * kFoldWarps + static_cast<int>(threadIdx.x) / 32; t < p.sent.tokens;
       t += warps) {
    int before = -1;
#pragma unroll 1
    for (int base = 0; base < p.sent.fan_out; base += 32) {
      const FirstOfHost first = first_of_host(f, step, t, base, &before);
#pragma unroll 1
      for (uint32_t left = __ballot_sync(~0u, first.host >= 0); left != 0; left &= left - 1) {
        const int lead = __ffs(static_cast<int>(left)) - 1;
        const int rank = __shfl_sync(~0u, first.to.rank, lead);
        const int slot = __shfl_sync(~0u, first.to.slot, lead);
        const int folder = rank / f.local * f.local + g.me % f.local;
        const std::byte* const message = p.once.near.begins[g.me] + p.once.near.offset +
                                         message_there(p.once, step.bank(), p.once.ranks[folder].list);
        const auto row = load_fresh<uint32_t>(message + InboxMap::kHead + sizeof(uint32_t) * static_cast<uint64_t>(t));
        if (row >= static_cast<uint32_t>(p.once.bound)) continue;  // of another call: the kernel behind finds that out
        copy_bytes(message + region.in_message + region.row * row,
                   window + block_there(region, step.bank(), rank) + region.row * static_cast<uint64_t>(slot),
                   region.row, static_cast<uint64_t>(lane()), 32);
      }
    }
  }
}

auto fold_of(twDtype_t wire) {
  if (wire == twBfloat16) return fold_kernel<twBfloat16>;
  return wire == twFloat16 ? fold_kernel<twFloat16> : fold_kernel<twFloat32>;
}

// Blocks for so many warps, but at most `most`.
int blocks_for(int64_t warps, int most) {
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(most, (warps + kFoldWarps - 1) / kFoldWarps)));
}

}  // namespace

int launch_tags(const FoldParams& params, int blocks, void* stream) {
  const int grid = blocks_for((params.post.once.bound + 31) / 32, blocks);
  return launch_kernel(tags_kernel, params, grid, 0, false, stream, kFoldThreads);
}
int launch_fold(const FoldParams& params, int blocks, void* stream) {
  const int grid = blocks_for(int64_t{params.post.once.others} * params.post.once.bound, blocks);
  const auto shared = static_cast<uint32_t>(sizeof(std::byte*) * kFoldWarps) * static_cast<uint32_t>(params.local);
  return launch_kernel(fold_of(params.returned.wire), params, grid, shared, false, stream, kFoldThreads);
}
int launch_unfold(const FoldParams& params, int blocks, void* stream) {
  return launch_kernel(unfold_kernel, params, blocks_for(params.post.sent.tokens, blocks), 0, false, stream,
                       kFoldThreads);
}

int load_folds() {
  for (const twDtype_t wire : {twBfloat16, twFloat16, twFloat32}) {
    if (const int error = allow_shared(reinterpret_cast<const void*>(fold_of(wire)),
                                       sizeof(std::byte*) * kFoldWarps * TW_MAX_RANKS)) {
      return error;
    }
  }
  return load_all({reinterpret_cast<const void*>(tags_kernel), reinterpret_cast<const void*>(unfold_kernel)});
}

}  // namespace tw::cuda
