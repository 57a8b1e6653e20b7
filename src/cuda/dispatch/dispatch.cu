// Dispatch, low latency: one kernel, from ids to rows in place at their receivers. Takes DispatchParams; gives rows in
// the receivers' banks and all that a handle keeps of them. launch_dispatch also chooses between this kernel and the
// two others.
//
// Floor: bytes over the link, then one flight with the last of them and its flag. The last tokens of a rank, or all if
// they are few, go as packets, which certify themselves. Those before go as Simple rows; the fence and the signal that
// these need (S4) take some 4 us, which pass while the packets are on the wire.
//
// What breaks if this changes: S3 (nothing is written before await_earlier), S7 (send before receive), S8 (skip_step),
// S9.
#include <cuda_runtime.h>

#include "cuda/device/loads.cuh"
#include "cuda/device/passes.cuh"
#include "cuda/dispatch/end.cuh"
#include "cuda/dispatch/receive.cuh"
#include "cuda/dispatch/send_loop.cuh"
#include "cuda/launch/bulk.h"

namespace tw::cuda {

int load_dispatch_packets(const Shape& shape);
int load_dispatch_placed(const Shape& shape);

namespace {

// Is the dispatch kernel of one kind.
//
// Some blocks send and the others receive, and their warps work alone, on a tile of a row at a time. Senders need a bit
// for each token and rank (device/routing.cuh), and find the slots of their row from it. Receivers need a signal of
// each source, which they look at while their first packet comes. Only the bits are handed over by barriers and memory,
// because each such step takes half a microsecond.
//
// Blocks that send rehearse where they come onto the device early (Kind::kUsual, device/passes.cuh).
template <Kind kKind>
__global__ void __launch_bounds__(kThreads, 1) dispatch_kernel(const __grid_constant__ DispatchParams p) {
  constexpr bool kFast = kKind != Kind::kGeneric;
  let_next_begin();
  if (does_nothing_else(p)) return count_loads_apart(p);
  const GroupView& g = p.group;
  const Shape& shape = g.map.shape();
  const Scratch scratch(p);
  const int thread = static_cast<int>(threadIdx.x);
  const bool sends = p.send && is_sender(p.roles);
  const bool receives = p.receive && is_receiver(p.roles);
  warm(p);
  begin_block(p, scratch);
  // This is what a sending warp sends first, though nobody knows yet where it goes.
  const uint32_t u = sent_shares(p.roles).first;
  const bool begins = sends && u < sending_warps(p);
  FirstTile<kFast> found(p, u, begins);
  IdsAt ids_from = ids_at(p, thread);
  pin(ids_from.from, ids_from.bytes);
  // What is loaded first comes to the second-level cache while the previous kernel runs: between bulk kernels more
  // passes through that cache than it holds.
  if (sends && kFast) {
    if (ids_from.bytes > 0) prefetch(ids_from.from);
    found.tile.bring_near(p);
  }
  if (thread < shape.ranks) bring_begins_near(p, thread);
  if (thread == 0) prefetch(&g.channels[p.channel]), prefetch(g.state);
  meet();  // the table is filled
  const int bytes = ids_from.bytes;
#pragma unroll 1
  for (bool real = !(kKind == Kind::kUsual && p.rehearses && sends && !receives);; real = true) {
    begin_pass(real);
    ids_from.bytes = real ? bytes : 0;
    found.begin(real);
    Ids ids{};
    if (sends && kFast) ids = load_ids(ids_from);
    const Begins rows = load_begins(p, thread);
    const uint32_t digest = load_digest(p.in.digest);
    Step step{next_step(g, p.channel), p.channel, p.bound, twPhaseDispatch};
    const bool sticky = is_sticky(g);
    if (sends && kFast) found.tile.load(p);
    Ahead ahead{};
    if (!kFast && begins) load_first(p, u, &ahead);
    keep_begins<kFast>(p, scratch, rows);
    if (sends) mark_tokens<kFast>(p, scratch, thread, ids, scratch.marks(thread));
    const bool skips = static_cast<int>(step.number & 1) != p.bank;
    if (skips) ++step.number;
    step.digest = digest_of(p, digest), step.note_bits = g.note_bits, step.has_offsets = p.has_offsets;
    bool usable = __syncthreads_or(sticky) == 0;  // threads that differ would wait for each other
    const Block b{p, scratch, step, scratch.windows()[g.me] + g.map.bank(p.channel, step.bank())};
    if (real && p.send && usable && skips && tells_skips(g)) usable = skip_step(g, step);
    // These come before all else: the link has them to carry while a warp finds and loads its next tile. Tiles of later
    // rounds cannot, as nobody knows yet where their tokens go.
    const bool stored = found.is && found.token() < kRound;
    if ((stored && usable) || !real) {
      const Place to = find_place<false>(p, scratch, found.token(), 0);
      send_plain(b, &found.tile, real ? b.target(to) : Target{lane() == 0, 0});
    }
    if (real) mark_rest<kFast>(p, scratch, step);
    if (real && thread == 0 && blockIdx.x == 0 && p.send && usable) say_sent(g, step, false, p.rows_digest);
    if ((usable || !real) && sends) {
      send<kKind, false>(b, found.tile, found.is, stored && real, ahead, real, false);  // S7: nobody here waits
    }
    if (!real) continue;
    const uint32_t arrived = p.receive && thread == 0 ? begin_end(g, step) : 0;
    leave_status(b, digest, twSuccess);
    if (usable && receives) receive<kFast>(b, false);
    return finish_dispatch(b, usable, arrived);
  }
}

// Calls use(kernel) with the kernel of one kind.
constexpr auto kWithKernel = [](Kind kind, auto&& use) {
  return with_kind(kind, [&](auto of) { return use(dispatch_kernel<decltype(of)::value>); });
};

}  // namespace

int launch_dispatch(const DispatchParams& params, int grid, bool early, void* stream) {
  if (params.kind == Kind::kPackets) return launch_dispatch_packets(params, grid, early, stream);
  if (params.handle.marks != nullptr) return launch_dispatch_placed(params, grid, early, stream);
  return launch_bulk(params, grid, early, stream, kWithKernel);
}

int load_dispatch(const Shape& shape) {
  if (const int error = load_dispatch_packets(shape)) return error;
  if (const int error = load_dispatch_placed(shape)) return error;
  return load_bulk(DispatchScratch::make(shape).bytes, kWithKernel);
}

}  // namespace tw::cuda
