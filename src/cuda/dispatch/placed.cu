// Dispatch of an exact layout (high throughput): the exchange of counts before it has made the marks of all tokens
// (counts/counts.cu), so that every row's place is a load away, which goes out with the row's own. Nothing is routed
// here, and a warp that sends waits for nobody at all: what it begins with is on the wire before its block has met.
//
// Otherwise it takes and gives what dispatch/dispatch.cu does, whose halves these are too. Floor: the same; in a
// dispatch of a routing that was dispatched before, that of the rows alone.
//
// What breaks if this changes: S3 (nothing is written before await_earlier), S7 (send before receive), S8 (skip_step),
// S9 (slots are the marks').
#include <cuda_runtime.h>

#include "cuda/device/loads.cuh"
#include "cuda/device/passes.cuh"
#include "cuda/dispatch/end.cuh"
#include "cuda/dispatch/receive.cuh"
#include "cuda/dispatch/send_loop.cuh"
#include "cuda/launch/bulk.h"

namespace tw::cuda {
namespace {

// Loads the slots that a rank's packets follow, by the rank's thread, before a barrier. They are asked for with all
// else that a block begins with: an answer that came behind its first stores had all its warps wait (0.3 us of a
// dispatch, 1 us of a pair).
__device__ inline GroupMarks load_before_packets(const DispatchParams& p) {
  const bool some = p.first_packet > 0 && p.first_packet < p.tokens;
  return some ? load_marks(p, p.first_packet, static_cast<int>(threadIdx.x)) : GroupMarks{};
}
__device__ inline void keep_before_packets(const DispatchParams& p, const Scratch& scratch, GroupMarks marks) {
  if (p.first_packet <= 0 || p.first_packet >= p.tokens) return;
#pragma unroll 1
  for (int rank = static_cast<int>(threadIdx.x); rank < p.group.map.shape().ranks; rank += kThreads) {
    scratch.before_packets()[rank] = place_in(marks, p.first_packet).slot;
    marks = load_marks(p, p.first_packet, rank + kThreads);
  }
}

// Gives where a row goes in usual calls, from its marks and its target's beginning. Both: for rank lane().
__device__ inline Target target_of_row(const GroupMarks& marks, int token, const Begins& begins) {
  const Place place = place_in(marks, token);
  if (!place.goes || place.slot >= begins.limit) return {false, 0};
  return {true, static_cast<uint64_t>(int64_t{begins.there} + place.slot)};
}

// The kernel of one kind. A usual call's senders rehearse (device/passes.cuh).
template <Kind kKind>
__global__ void __launch_bounds__(kThreads, 1) placed_kernel(const __grid_constant__ DispatchParams p) {
  constexpr bool kFast = kKind != Kind::kGeneric;
  let_next_begin();
  if (does_nothing_else(p)) return count_loads_apart(p);
  const GroupView& g = p.group;
  const Scratch scratch(p);
  const int thread = static_cast<int>(threadIdx.x);
  const bool sends = p.send && is_sender(p.roles);
  const bool receives = p.receive && is_receiver(p.roles);
  warm(p);
  begin_block(p, scratch);
  const uint32_t u = sent_shares(p.roles).first;
  const bool begins = sends && u < sending_warps(p);
  FirstTile<kFast> found(p, u, begins);
  if (kFast && begins) {
    found.tile.bring_near(p);
    if (found.is && lane() == 0) prefetch(p.handle.marks + found.token() / kGroup * g.map.shape().ranks);
  }
  if (thread < g.map.shape().ranks) bring_begins_near(p, thread);
  if (thread == 0) prefetch(&g.channels[p.channel]), prefetch(g.state);
  meet();  // the table is filled
#pragma unroll 1
  for (bool real = !(kFast && p.rehearses && sends && !receives);; real = true) {
    begin_pass(real);
    const Begins rows = load_begins(p, kFast ? lane() : thread);
    const GroupMarks before_packets = load_before_packets(p);
    const uint32_t digest = load_digest(p.in.digest);
    const uint32_t since = load_since(p);
    Step step{next_step(g, p.channel), p.channel, p.bound, twPhaseDispatch};
    const bool sticky = is_sticky(g);
    found.begin(real);
    if (kFast) found.tile.load(p);
    GroupMarks marks{};  // for rank lane()
    if (kFast && found.is) marks = load_marks(p, found.token(), lane());
    Ahead ahead{};
    if (!kFast && begins) load_first(p, u, &ahead);
    const bool skips = static_cast<int>(step.number & 1) != p.bank;
    if (skips) ++step.number;
    step.digest = digest_of(p, digest), step.note_bits = g.note_bits, step.has_offsets = p.has_offsets;
    const bool known = is_known(step, since);
    const Block b{p, scratch, step, scratch.windows()[g.me] + g.map.bank(p.channel, step.bank())};
    // This comes before all else: the link has it to carry while a warp finds and loads its next tile. Only a skip
    // comes before it.
    const bool stored = __all_sync(~0u, found.is && real && !sticky && !skips);
    if (kFast && (stored || !real)) {
      send_plain(b, &found.tile, real ? target_of_row(marks, found.token(), rows) : Target{lane() == 0, 0});
    }
    keep_begins<kFast>(p, scratch, rows);
    keep_before_packets(p, scratch, before_packets);
    bool usable = __syncthreads_or(sticky) == 0;  // threads that differ would wait for each other
    if (real && p.send && usable && skips && tells_skips(g)) usable = skip_step(g, step);
    if (real && thread == 0 && blockIdx.x == 0 && p.send && usable) say_sent(g, step, false, p.rows_digest);
    if ((usable || !real) && sends) {
      send<kKind, true>(b, found.tile, found.is, stored, ahead, real, known);  // S7: nobody here waits
    }
    if (!real) continue;
    const uint32_t arrived = p.receive && thread == 0 ? begin_end(g, step) : 0;
    // Rows that do not fit go nowhere, and no combine answers them.
    const bool overflow = thread == 0 && blockIdx.x == 0 && load_fresh<uint32_t>(p.handle.overflow) != 0;
    leave_status(b, digest, overflow ? twRecvOverflow : twSuccess);
    if (usable && receives) receive<kFast>(b, known);
    return finish_dispatch(b, usable, arrived);
  }
}

// Calls use(kernel) with the kernel of one kind.
constexpr auto kWithPlaced = [](Kind kind, auto&& use) {
  return with_kind(kind, [&](auto of) { return use(placed_kernel<decltype(of)::value>); });
};

}  // namespace

int launch_dispatch_placed(const DispatchParams& params, int grid, bool early, void* stream) {
  return launch_bulk(params, grid, early, stream, kWithPlaced);
}

int load_dispatch_placed(const Shape& shape) { return load_bulk(DispatchScratch::make(shape).bytes, kWithPlaced); }

}  // namespace tw::cuda
