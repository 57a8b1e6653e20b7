// Combine of rows that all travel as packets, in calls of the usual kind (launch/tiles.h, Kind::kPackets). Takes
// CombineParams; gives the same sums as combine/combine.cu does. Each instruction counts, as in dispatch/ll128.cu.
//
// With kSums a partial is the sum of a row's answers by expert, not a row as it lies. Which answers those are is loaded
// where a plain row is, before it is known whether there is such a row; the answers follow when it is.
//
// What breaks if this changes: S3 (nothing is written before await_earlier), S4 (the flags), S7 (send before sum), and
// the bits of results (S9).
#include <cuda_runtime.h>

#include "cuda/combine/end.cuh"
#include "cuda/launch/launch.h"
#include "cuda/launch/loading.h"

namespace tw::cuda {
namespace {

// A tile of a row to be sent, by its number among those of all slots of the other ranks, and what this thread loads of
// it. Its place exists whether or not there is such a row: the caller's tensor has all slots up to the bound, and so
// has what a handle keeps.
template <int kGroups>
struct OutgoingPartial {
  int owner;
  int index;
  uint32_t begin;  // its first group of packets
  uint32_t end;
  uint32_t groups;         // groups in which the thread has a part of a packet
  uint32_t which;          // bit 2g + i: the thread has the i-th word of group g
  const std::byte* words;  // the thread's first word of the first group
  uint64_t packet;         // the thread's place in a window, for bank 0

  __device__ OutgoingPartial(const CombineParams& p, uint32_t u) : which(0) {
    const int ranks = p.group.map.shape().ranks;
    const Share share = share_of(p.tiles, static_cast<uint32_t>(ranks - 1), u);
    owner = p.group.me + 1 + share.turn < ranks ? p.group.me + 1 + share.turn : p.group.me + 1 + share.turn - ranks;
    index = share.index;
    begin = share.tile.begin;
    end = share.tile.end;
    words = row_of(p, owner, index) + 8 * static_cast<uint64_t>(first_word(share.tile.begin));
#pragma unroll
    for (uint32_t i = 0; i < 2 * kGroups; ++i) {
      const uint32_t w = first_word(share.tile.begin) + kGroupWords * (i / 2) + i % 2;
      const bool there = index < p.bound && i / 2 < share.tile.end - share.tile.begin && w < p.tiles.words;
      if (there && !(i % 2 == 1 && is_flag())) which |= 1u << i;
    }
    groups = part_of(p.tiles, share.tile);
    packet = packet_at(p.packets, 0, p.group.me, index) + packet_place(share.tile.begin);
  }
};

// Loads a choice of a row: slots of a source lie one after the other in layouts whose rows all go as packets.
__device__ inline KeptChoice choice_in(const CombineParams& p, int source, int slot) {
  return load_choice(p, static_cast<int64_t>(source) * p.bound + slot, lane());
}

template <int kGroups, bool kSums>
struct Loaded {
  Vec16 pair[kGroups];
  KeptChoice choice{};

  __device__ Loaded(const CombineParams& p, const OutgoingPartial<kGroups>& out) {
    if constexpr (kSums) {
      if (out.index < p.bound) choice = choice_in(p, out.owner, out.index);
    } else {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const std::byte* const at = out.words + 8 * kGroupWords * g;
        pair[g] = {};
        if ((out.which >> (2 * g) & 1) != 0) pair[g].a = load_fresh<unsigned long long>(at);
        if ((out.which >> (2 * g + 1) & 1) != 0) pair[g].b = load_fresh<unsigned long long>(at + 8);
      }
    }
  }
};

template <twDtype_t kWire, int kGroups, bool kSums>
__device__ inline void send_tile(const Sum& s, const OutgoingPartial<kGroups>& out, Loaded<kGroups, kSums> loaded) {
  if (out.index >= s.counts()[out.owner]) return;
  if (kSums) {
    collect_terms(s.p, s.set(), out.owner, out.index, loaded.choice);
    sum_pairs<kWire, kGroups>(s.p, s.set(), out.begin, out.end, loaded.pair);
  }
  std::byte* const packet = s.windows()[out.owner] + out.packet + bank_offset(s.p.packets, s.step);
  const bool together = is_together();
#pragma unroll
  for (uint32_t g = 0; g < kGroups; ++g) {
    if (g >= out.groups) continue;
    store_packet(together, packet + g * kGroupBytes, loaded.pair[g].a, is_flag() ? s.step.number : loaded.pair[g].b);
  }
}

// Sums a tile of a token; thread i of the warp has the token's i-th rank. False if packets did not come.
template <twDtype_t kWire, int kGroups, bool kSums>
__device__ inline bool sum_packet_tile(const Sum& s, int token, const Tile& tile, const Sent& sent) {
  static_assert(kTerms == 2);
  const CombineParams& p = s.p;
  const auto address = reinterpret_cast<unsigned long long>(
      sent.to.rank == p.group.me
          ? row_of(p, sent.to.rank, sent.to.slot)
          : s.window() + packet_at(p.packets, 0, sent.to.rank, sent.to.slot) + bank_offset(s.p.packets, s.step));
  std::byte* out = p.out + static_cast<int64_t>(token) * p.out_stride;
  pin(out);  // before the wait
  Quad sum[kGroups][2] = {};
  Parts<kTerms, kGroups> parts;
  parts.cover(p.tiles, tile);
#pragma unroll 1
  for (int base = 0; base < sent.fan; base += kTerms) {
    int rank[kTerms];
    int own_term = -1;
#pragma unroll
    for (int t = 0; t < kTerms; ++t) {
      const auto* const at = reinterpret_cast<const std::byte*>(__shfl_sync(~0u, address, base + t));
      rank[t] = __shfl_sync(~0u, sent.to.rank, base + t);
      const bool own = rank[t] == p.group.me;
      parts.at[t] = base + t < sent.fan && !own ? at + packet_place(tile.begin) : nullptr;
      if (base + t >= sent.fan || !own) continue;
      own_term = t;
#pragma unroll
      for (int g = 0; g < kGroups && !kSums; ++g) {
        if (tile.begin + g < tile.end) parts.value[g][t] = load_two(at, first_word(tile.begin + g), p.tiles.words);
      }
    }
    parts.look();
    if (kSums && own_term >= 0) {  // while packets may be on their way
      const int slot = __shfl_sync(~0u, sent.to.slot, base + own_term);
      collect_terms(p, s.set(), p.group.me, slot, choice_in(p, p.group.me, slot));
      Vec16 here[kGroups] = {};
      sum_pairs<kWire, kGroups>(p, s.set(), tile.begin, tile.end, here);
#pragma unroll
      for (int t = 0; t < kTerms; ++t) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          if (t == own_term) parts.value[g][t] = here[g];
        }
      }
    }
    if (!await_packets(
            p.group, s.step, &parts, [&](int t) { return t == 0 ? rank[0] : rank[1]; },
            [&](int source) { return source_failed(p.group, s.step, source); })) {
      return false;
    }
#pragma unroll
    for (int t = 0; t < kTerms; ++t) {
      if (base + t >= sent.fan) continue;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        add(&sum[g][0], widen_word(kWire, parts.value[g][t].a), base + t == 0);
        add(&sum[g][1], widen_word(kWire, parts.value[g][t].b), base + t == 0);
      }
    }
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const uint32_t w = first_word(tile.begin + g);
    if (tile.begin + g >= tile.end) continue;
    if (w < p.tiles.words) store_quad<kWire, true>(p, out, w, sum[g][0]);
    if (w + 1 < p.tiles.words && !is_flag()) store_quad<kWire, true>(p, out, w + 1, sum[g][1]);
  }
  return true;
}

// Where thread i of a warp loads what it needs for the i-th rank of a token.
struct SentAt {
  const std::byte* fan;
  const std::byte* destination;

  __device__ SentAt(const CombineParams& p, int token) {
    const int fan_out = p.group.map.shape().fan_out();
    fan = token < p.tokens ? reinterpret_cast<const std::byte*>(p.handle.fan + token) : nullptr;
    destination = token < p.tokens && lane() < fan_out
                      ? reinterpret_cast<const std::byte*>(p.handle.destinations + token * fan_out + lane())
                      : nullptr;
  }
  __device__ Sent load() const {
    Sent sent{{-1, 0}, 0};
    if (fan != nullptr) sent.fan = static_cast<int>(load_fresh<uint32_t>(fan));
    if (destination == nullptr) return sent;
    sent.to = load_both(reinterpret_cast<const Destination*>(destination));
    return sent;
  }
};

template <twDtype_t kWire, int kGroups, bool kSums>
__device__ inline void send_tiles(const Sum& s, OutgoingPartial<kGroups> out, Loaded<kGroups, kSums> loaded) {
  const Shares shares = sent_shares(s.p.roles);
  const uint32_t all = static_cast<uint32_t>(s.p.bound * (s.ranks() - 1)) * s.p.tiles.per_row.divisor;
#pragma unroll 1
  for (uint32_t u = shares.first; u < all;) {
    const bool draws = all > shares.step;  // there are more than those that everybody begins with
    const uint32_t work_item =
        draw(work_counters(s.p.group, s.step), draws && lane() == 0);  // on its way while this tile is sent
    send_tile<kWire>(s, out, loaded);
    if (!draws) break;
    u = shares.step + __shfl_sync(~0u, work_item, 0);
    if (u >= all) break;
    out = OutgoingPartial<kGroups>(s.p, u);
    loaded = Loaded<kGroups, kSums>(s.p, out);
  }
}

template <twDtype_t kWire, int kGroups, bool kSums>
__device__ inline void sum_tiles(const Sum& s, int token, Sent sent) {
  const CombineParams& p = s.p;
  const Shares shares = received_shares(p.roles);
  const uint32_t all = static_cast<uint32_t>(p.tokens) * p.tiles.per_row.divisor;
#pragma unroll 1
  for (uint32_t u = shares.first; u < all;) {
    const Tile tile = tile_of(p.tiles, u - static_cast<uint32_t>(token) * p.tiles.per_row.divisor);
    u += shares.step;
    const auto next = static_cast<int>(divide(u, p.tiles.per_row));
    const Sent after = SentAt(p, next).load();  // on its way while this one is summed
    if (!__all_sync(~0u, sum_packet_tile<kWire, kGroups, kSums>(s, token, tile, sent))) {
      give_up_token(s, token);
    }
    token = next;
    sent = after;
  }
}

template <twDtype_t kWire, int kGroups, bool kSums>
__global__ void __launch_bounds__(kThreads, 1) combine_packets_kernel(const __grid_constant__ CombineParams p) {
  let_next_begin();
  const GroupView& g = p.group;
  const int thread = static_cast<int>(threadIdx.x);
  Sum s{p, Step{0, p.channel, p.bound, twPhaseCombine, p.rows_digest}};
  if (thread < s.ranks()) s.windows()[thread] = window_of(g, thread);
  if (thread == 0) *s.failed() = 0;
  warm(p);
  OutgoingPartial<kGroups> out(p, sent_shares(p.roles).first);
  auto token = static_cast<int>(divide(received_shares(p.roles).first, p.tiles.per_row));
  SentAt sent_at(p, token);
  if (!s.sends()) out.which = 0, out.index = p.bound;
  if (!s.sums()) sent_at.fan = sent_at.destination = nullptr;
  pin(out.owner, out.index, out.groups, out.which, out.words, out.packet, sent_at.fan, sent_at.destination, token);
  await_earlier();
  const Loaded<kGroups, kSums> loaded(p, out);
  const Sent sent = sent_at.load();
  const Counts counts = load_counts<true>(s, thread);
  s.step.number = next_step(g, p.channel);
  const bool good = can_combine<true>(p);
  keep_counts<true>(s, counts);
  if (__syncthreads_and(good) == 0) {  // threads that differ would wait for each other
    if (p.receive) give_up<true>(s);
    return;  // the step has not ended: it will be another kernel's, unless the group is finished
  }
  const bool last = thread / 32 == kWarps - 1;      // the warp with least to do
  if (s.sends()) {                                  // S7: nobody here waits
    if (blockIdx.x == 0 && last) publish_first(s);  // such rows never lie in the window
    send_tiles<kWire>(s, out, loaded);
  }
  const uint32_t arrived = begin_end(g, s.step, p.receive && thread == 0);
  if (thread == 0 && blockIdx.x == 0) clear_counters(g, s.step);
  if (s.sums()) sum_tiles<kWire, kGroups, kSums>(s, token, sent);
  if (concludes(s) && last) await_signals(s);
  if (p.receive) finish_combine<true>(s, arrived);
}

// Calls use(kernel). With few tokens a warp has one group at a time, so that no instructions are there twice.
template <twDtype_t kWire, bool kSums, class Use>
int with_groups(uint32_t groups, Use&& use) {
  if (groups == 1) return use(combine_packets_kernel<kWire, 1, kSums>);
  if constexpr (!kSums) {
    if (groups > kSummedGroups) return use(combine_packets_kernel<kWire, kTileGroups, kSums>);
  }
  return use(combine_packets_kernel<kWire, kSummedGroups, kSums>);
}
template <bool kSums, class Use>
int with_wire(twDtype_t wire, uint32_t groups, Use&& use) {
  if (wire == twBfloat16) return with_groups<twBfloat16, kSums>(groups, use);
  return wire == twFloat16 ? with_groups<twFloat16, kSums>(groups, use) : with_groups<twFloat32, kSums>(groups, use);
}
template <class Use>
int with_kernel(twDtype_t wire, uint32_t groups, bool sums, Use&& use) {
  return sums ? with_wire<true>(wire, groups, use) : with_wire<false>(wire, groups, use);
}

}  // namespace

int launch_combine_packets(const CombineParams& params, int grid, bool early, void* stream) {
  return with_kernel(params.wire_dtype, params.tiles.tile_groups, params.plain == 0,
                     [&](auto* kernel) { return launch_kernel(kernel, params, grid, params.at.bytes, early, stream); });
}

int load_combine_packets(const Shape& shape) {
  for (const twDtype_t wire : {twBfloat16, twFloat16, twFloat32}) {
    for (const uint32_t groups : {1, 2, kTileGroups}) {
      for (const bool sums : {false, true}) {
        const int error = with_kernel(wire, groups, sums, [&](auto* kernel) {
          return allow_shared(reinterpret_cast<const void*>(kernel), CombineScratch::make(shape).bytes);
        });
        if (error != 0) return error;
      }
    }
  }
  return 0;
}

}  // namespace tw::cuda
