// Sums that token replicas share, behind a combine: each rank of a set sends those of its share to the others. It is a
// gather among the ranks of a set, in a step of all ranks. And the digest by which ranks see that a set holds the same
// tokens, which travels as the number in their signals.
//
// Takes SharingParams; gives the rows of the others at their places among the T, or NaN for all T. Floor: (R - 1) / R
// of T rows over the link each way, and one flight.
//
// What breaks if this changes: S2 (all ranks' signals are waited for, of other sets too), S4 (as in a gather), S6 (no
// row is waited for before the digests are seen to be alike: ranks that differ expect other rows of each other).
// Whether there is a step at all must be decided as in can_combine (combine/end.cuh).
#include <cuda_runtime.h>

#include "cuda/collective/collective.cuh"
#include "cuda/launch/loading.h"

namespace tw::cuda {

// A warp's view of the call. For the functions that move rows the set is all there is: `ranks` are its places. (It has
// a name outside of this file so that chunks.cuh finds push_item for it.)
struct Sharing {
  const SharingParams& p;
  Step step;
  static constexpr bool real = true;
  __device__ static constexpr bool yields() { return false; }

  __device__ int ranks() const { return p.replicas.size; }
  __device__ int me() const { return p.replicas.place; }
  __device__ int all_ranks() const { return p.group.map.shape().ranks; }
  __device__ int rank_at(int place) const { return p.replicas.first + place; }
  __device__ int chunk_rows() const { return p.chunk_rows; }
  __device__ int set() const { return static_cast<int>(threadIdx.x / 32); }
  __device__ bool sends() const { return p.send && is_sender(p.roles); }
  __device__ bool receives() const { return p.receive && is_receiver(p.roles); }
  __device__ bool concludes() const { return p.receive && blockIdx.x + 1 == static_cast<uint32_t>(p.roles.sending); }

  __device__ std::byte** windows() const { return shared_at<std::byte*>(p.at.windows); }
  __device__ int32_t* sizes() const { return shared_at<int32_t>(p.at.sizes); }
  __device__ int32_t* first() const { return shared_at<int32_t>(p.at.first); }
  __device__ int32_t* digests() const { return shared_at<int32_t>(p.at.came); }  // [N]
  __device__ int32_t* failed() const { return shared_at<int32_t>(p.at.failed); }
  __device__ std::byte* bank(int at) const { return windows()[at] + p.group.map.bank(step.channel, step.bank()); }

  __device__ int owners() const { return ranks() - 1; }
  __device__ bool is_direct(int at) const { return at == me(); }
  __device__ int rows_for(int) const { return sizes()[me()]; }
  __device__ const std::byte* row_in(const CollectiveRows& rows, int, int i) const {
    return rows.in + (int64_t{first()[me()]} + i) * rows.row_stride;
  }
  // Over a staged transport a bank has blocks of all ranks, as the carrier moves them.
  __device__ int source_at(int owner) const { return is_staged(p.group) ? rank_at(owner) : me(); }
  __device__ int block_of(int source) const { return is_staged(p.group) ? rank_at(source) : source; }
  __device__ uint64_t place(const CollectiveRows& rows, int block, int i) const {
    const uint64_t row = static_cast<uint64_t>(block) * static_cast<uint64_t>(p.bound) + static_cast<uint64_t>(i);
    return rows.begin + row * static_cast<uint64_t>(rows.block_stride);
  }
  __device__ std::byte* row_out(const CollectiveRows& rows, int source, int i) const {
    return rows.out + (int64_t{first()[source]} + i) * rows.out_stride;
  }
};

namespace {

// Publishes the step's signal before the rows go, as a gather does: with the digest of this rank's tokens. By a warp.
__device__ inline void publish_digest(const Sharing& s) {
  const SharingParams& p = s.p;
  uint32_t sum = lane() < kDigestBlocks ? load_fresh<uint32_t>(p.sums + lane()) : 0;
#pragma unroll
  for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
  const auto digest = static_cast<int>(tokens_digest(p.all_tokens, sum, p.rows[0].to));
#pragma unroll 1
  for (int i = lane(); i < s.all_ranks(); i += 32) publish_signal(p.group, s.step, i, Mode::kGather, digest, 0);
  __syncwarp();
}

__device__ inline bool is_unlike(const Sharing& s, int rank) {
  return s.digests()[rank] != s.digests()[rank / s.ranks() * s.ranks()];
}

// Waits for the signals of all ranks, and looks whether each set's digests are alike. By a block. False if not.
__device__ inline bool are_alike(const Sharing& s) {
  const GroupView& g = s.p.group;
  bool good = true;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < s.all_ranks(); i += kThreads) {
    const Source source = await_source(g, s.step, i, Look::kTakesPart, false);
    if (source.error == twTimeout) report_failure(g, s.step, twTimeout, i, source.signal);
    s.digests()[i] = source.n;
    good &= source.error == twSuccess || g.no_wait;
  }
  good = __syncthreads_and(good) != 0;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); good && !g.no_wait && i < s.all_ranks(); i += kThreads) {
    good &= !is_unlike(s, i);
  }
  if (__syncthreads_and(good) != 0) return true;
  *s.failed() = 1;
  return false;
}

// Ends the step, by one warp (S2): waits for all signals, and reports what is wrong once. Not what the combine before
// has failed with and reported: a refusal, or calls that differ.
__device__ inline void conclude(const Sharing& s) {
  const GroupView& g = s.p.group;
  bool good = true;
#pragma unroll 1
  for (int i = lane(); i < s.all_ranks(); i += 32) {
    const Source source = await_source(g, s.step, i, Look::kTakesPart, true);
    if (!s.receives()) s.digests()[i] = source.n;
    if (g.no_wait || source.error == twSuccess) continue;
    good = false;
    if (source.error != twPeerRefused && source.error != twBoundMismatch) report_source(g, s.step, i, source);
  }
  __syncwarp();
  good = __all_sync(~0u, good);
  int unlike = s.all_ranks();
#pragma unroll 1
  for (int i = lane(); good && !g.no_wait && i < s.all_ranks(); i += 32) {
    if (is_unlike(s, i)) unlike = min(unlike, i);
  }
  unlike = s.all_ranks() - __reduce_max_sync(~0u, s.all_ranks() - unlike);
  if (lane() != 0) return;
  if (!good || unlike < s.all_ranks()) *s.failed() = 1;
  if (unlike == s.all_ranks()) return;
  const auto like = static_cast<uint32_t>(unlike / s.ranks() * s.ranks());
  report_call(g, &g.pages[g.me]->call,
              [&](Report* to) { write_report(to, g, s.step, twReplicaMismatch, unlike, 0, like); });
}

// Stores a tile of a row out of packets.
template <bool kFast, int kGroups>
__device__ inline void store_shared(const Sharing& s, int source, int i, const Tile& tile,
                                    const Parts<1, kGroups>& parts) {
  const SharingParams& p = s.p;
  const uint32_t end = p.tiles.words;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    if (tile.begin + g >= tile.end) continue;
    const Vec16 pair = parts.value[g][0];
    const uint32_t w = first_word(tile.begin + g);
#pragma unroll
    for (uint32_t of = 0; of < 2; ++of) {
      if (w + of >= end || (of == 1 && is_flag())) continue;
      const uint64_t value = of == 0 ? pair.a : pair.b;
      const WordAt at = kFast ? WordAt{0, w + of} : word_at(p, w + of);
      std::byte* const to = s.row_out(p.rows[at.tensor], source, i) + 8 * uint64_t{at.word};
      if (kFast) {
        *reinterpret_cast<uint64_t*>(to) = value;
      } else {
        store_bytes(to, value, int64_t{p.rows[at.tensor].row_bytes} - 8 * int64_t{at.word});
      }
    }
  }
}

template <bool kFast, int kGroups>
__device__ inline void take_shared_packets(const Sharing& s) {
  const SharingParams& p = s.p;
  const Shares shares = received_shares(p.roles);
  const int sources = s.owners();
  const uint32_t all = static_cast<uint32_t>(p.bound * sources) * p.tiles.per_row.divisor;
#pragma unroll 1
  for (uint32_t u = shares.first; u < all; u += shares.step) {
    const Share in = share_of(p.tiles, static_cast<uint32_t>(sources), u);
    const int source = (s.me() + 1 + in.turn) % s.ranks();
    if (in.index >= s.sizes()[source]) continue;
    Parts<1, kGroups> parts;
    parts.cover(p.tiles, in.tile);
    parts.at[0] =
        s.windows()[s.me()] + packet_at(p.packets, s.step.bank(), source, in.index) + packet_place(in.tile.begin);
    parts.look();
    const bool here = await_packets(
        p.group, s.step, &parts, [&](int) { return s.rank_at(source); },
        [&](int rank) { return source_failed(p.group, s.step, rank); });
    if (!__all_sync(~0u, here)) {
      *s.failed() = 1;
      continue;
    }
    store_shared<kFast>(s, source, in.index, in.tile, parts);
  }
}

// Copies this warp's tiles of the rows that come in chunks out of the window.
__device__ inline void take_shared_chunks(const Sharing& s) {
  const SharingParams& p = s.p;
  const Shares shares = received_shares(p.roles);
  const auto parts = static_cast<uint32_t>(p.pushed_parts);
  const int sources = s.owners();
  const uint32_t all = static_cast<uint32_t>(p.bound * sources) * parts;
#pragma unroll 1
  for (uint32_t u = shares.first; u < all; u += shares.step) {
    const uint32_t row = u / parts;
    const int i = quotient(static_cast<int>(row), sources);
    const int source = (s.me() + 1 + static_cast<int>(row) - i * sources) % s.ranks();
    if (i >= s.sizes()[source]) continue;
    const bool here = lane() != 0 || await_chunk(p.group, s.step, s.rank_at(source), i / s.chunk_rows());
    if (!__all_sync(~0u, here)) {  // S4: what the thread that has looked has acquired, all have
      *s.failed() = 1;
      continue;
    }
    const Part part = part_of(p, u - row * parts);
    const CollectiveRows& rows = p.rows[part.tensor];
    copy_part(rows, s.row_out(rows, source, i), s.bank(s.me()) + s.place(rows, s.block_of(source), i), part.number);
  }
}

// Writes NaN for all T tokens, by a block.
__device__ __noinline__ static void spoil_shared(Sharing s) {
#pragma unroll 1
  for (int q = 0; q < s.p.tensors; ++q) {
    const CollectiveRows& rows = s.p.rows[q];
    const uint32_t nan = rows.to == twFloat32 ? 0x7fc00000u : rows.to == twBfloat16 ? 0x7fc0u : 0x7e00u;
#pragma unroll 1
    for (int32_t i = 0; i < s.p.all_tokens; ++i) {
      std::byte* const out = rows.out + i * rows.out_stride;
#pragma unroll 1
      for (uint32_t at = threadIdx.x; at < rows.elements; at += kThreads) {
        if (rows.to == twFloat32) {
          reinterpret_cast<uint32_t*>(out)[at] = nan;
        } else {
          reinterpret_cast<uint16_t*>(out)[at] = static_cast<uint16_t>(nan);
        }
      }
    }
  }
}

// Whether there is a step: if the combine before was one.
__device__ inline bool can_share(const SharingParams& p) {
  const int32_t status = *reinterpret_cast<const volatile int32_t*>(p.status);
  const bool good = !is_sticky(p.group) & (status == twSuccess);
  if (p.parts == 1) return good;
  const volatile ChannelState& channel = p.group.channels[p.channel];
  return good && channel.failed != channel.step;
}

template <bool kPackets, bool kFast, int kGroups>
__global__ void __launch_bounds__(kThreads, 1) sharing_kernel(const __grid_constant__ SharingParams p) {
  let_next_begin();
  const GroupView& g = p.group;
  const int thread = static_cast<int>(threadIdx.x);
  // The bound is in the digest: the number in a signal is no number of rows here, and may be larger.
  Sharing s{p, Step{0, p.channel, static_cast<int32_t>(kMaxCount), twPhaseGather, p.digest}};
#pragma unroll 1
  for (int i = thread; i < s.ranks(); i += kThreads) {
    s.windows()[i] = target_of(g, s.rank_at(i), p.send);
    s.sizes()[i] = p.replicas.count(p.all_tokens, i);
    s.first()[i] = p.replicas.begin(p.all_tokens, i);
  }
  if (thread == 0) *s.failed() = 0;
  if (!kPackets) begin_work(s);
  meet();
  await_earlier();
  [[maybe_unused]] Ahead<kFast, kGroups> ahead(s);
  if (kPackets) ahead.load(s);
  s.step.number = next_step(g, p.channel);
  begin_at_bank(g, p.bank, &s.step.number);
  if (__syncthreads_and(can_share(p)) == 0) {  // threads that differ would wait for each other
    if (p.receive && blockIdx.x == 0) spoil_shared(s);
    return;  // the step has not ended: it will be another kernel's, unless the group is finished
  }
  uint32_t arrived = 0;
  if constexpr (!kPackets) {
    if (p.receive && thread == 0) arrived = begin_end(g, s.step);
    if (thread == 0 && blockIdx.x == 0) clear_counters(g, s.step);
    if (p.send && thread == 0 && blockIdx.x == 0) say_sent(g, s.step);
  }
  const bool last = s.set() == kWarps - 1;
  if (s.sends()) {  // S7: nobody here waits
    if (blockIdx.x == 0 && last) publish_digest(s);
    if constexpr (kPackets) {
      send_packets(s, ahead, [](const OutgoingTile&, const auto&) {});
    } else {
      push_chunks<twDtypeNone, kFast>(s);
    }
  }
  if constexpr (kPackets) {
    arrived = begin_end(g, s.step, p.receive && thread == 0);
    if (thread == 0 && blockIdx.x == 0) clear_counters(g, s.step);
  }
  if (s.receives() && are_alike(s)) {
    if constexpr (kPackets) {
      take_shared_packets<kFast, kGroups>(s);
    } else {
      take_shared_chunks(s);
    }
  }
  if (s.concludes() && last) conclude(s);
  if (!p.receive) return;
  finish_block(g, s.step, arrived, s.failed(), [&] {
    await_others(g, s.step);
    spoil_shared(s);
  });
}

template <class Use>
int with_sharing_kernel(bool packets, bool fast, Use&& use) {
  if (!packets) return use(sharing_kernel<false, true, 1>);
  return use(fast ? sharing_kernel<true, true, kTileGroups> : sharing_kernel<true, false, kTileGroups>);
}

// Adds up what all choices of a routing add to its digest, a part of it in each block.
__global__ void __launch_bounds__(kThreads) digest_kernel(const __grid_constant__ DigestParams p) {
  uint32_t sum = 0;
  const int64_t threads = int64_t{kDigestBlocks} * kThreads;
#pragma unroll 4
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < p.choices; i += threads) {
    const int64_t token = i / p.top_k;
    const int64_t k = i - token * p.top_k;
    const int64_t at = token * p.id_stride[0] + k * p.id_stride[1];
    const int64_t id =
        p.wide ? static_cast<int64_t>(load_fresh<unsigned long long>(static_cast<const int64_t*>(p.ids) + at))
               : static_cast<int32_t>(load_fresh<uint32_t>(static_cast<const int32_t*>(p.ids) + at));
    uint32_t weight = 0x3f800000u;          // 1
    if (id >= 0 && p.weights != nullptr) {  // as choices_digest: weights of no expert are read by nobody
      weight = load_fresh<uint32_t>(p.weights + token * p.weight_stride[0] + k * p.weight_stride[1]);
    }
    sum += choice_digest(static_cast<uint32_t>(i), static_cast<uint32_t>(id < 0 ? -1 : id), weight);
  }
#pragma unroll
  for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
  auto* const of_warp = shared_at<uint32_t>(0);  // [kWarps]
  if (lane() == 0) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  uint32_t all = 0;
  for (int warp = 0; warp < kWarps; ++warp) all += of_warp[warp];
  p.sums[blockIdx.x] = all;
}

constexpr uint32_t kDigestShared = sizeof(uint32_t) * kWarps;

}  // namespace

int launch_sharing(const SharingParams& params, int grid, bool early, void* stream) {
  return with_sharing_kernel(params.by_packets != 0, params.usual != 0, [&](auto* kernel) {
    return launch_kernel(kernel, params, grid, params.at.bytes, early, stream);
  });
}

int launch_digest(const DigestParams& params, void* stream) {
  return launch_kernel(digest_kernel, params, kDigestBlocks, kDigestShared, false, stream);
}

int load_sharing(const Shape& shape) {
  for (const auto& [packets, fast] : {std::pair(false, true), {true, false}, {true, true}}) {
    const int error = with_sharing_kernel(packets, fast, [&](auto* kernel) {
      return allow_shared(reinterpret_cast<const void*>(kernel), CollectiveScratch::make(shape).bytes);
    });
    if (error != 0) return error;
  }
  return allow_shared(reinterpret_cast<const void*>(digest_kernel), kDigestShared);
}

}  // namespace tw::cuda
