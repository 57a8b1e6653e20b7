// Dispatch: one kernel, from ids to rows in place at their receivers.
//
// Floor: bytes over the link, then one flight with the last of them and its flag. The last tokens of a rank, or all if
// they are few, go as lines, which certify themselves. Those before them go as they lie; the fence and the word that
// these need (S4) take some 4 us, which pass while the lines are on the wire.
//
// Some of the blocks send, the others receive, and their warps work alone, on a unit of a row at a time: the senders
// need a bit for each token and rank (routing.cuh) and find the slots of their row from it; the receivers need a word
// of each source, which they look at while their first line comes. Nothing is handed over by way of barriers and memory
// but the bits, as each such step is half a microsecond.
#include <cuda_runtime.h>

#include "nvlink/dispatch_course.cuh"
#include "nvlink/dispatch_end.cuh"
#include "nvlink/dispatch_receive.cuh"
#include "nvlink/launch.h"
#include "nvlink/tally.cuh"

namespace tw::nvlink {

int load_dispatch_lines(const Shape& shape);

namespace {

template <Kind kKind>
__global__ void __launch_bounds__(kThreads, 1) dispatch_kernel(const __grid_constant__ DispatchParams p) {
  constexpr bool kFast = kKind != Kind::kAny;
  let_next_begin();
  if (does_nothing_else(p)) return tally_alone(p);
  const GroupView& g = p.group;
  const Shape& shape = g.map.shape();
  const Scratch scratch(p);
  const int thread = static_cast<int>(threadIdx.x);
  const bool sends = p.send && is_sender(p.roles);
  const bool receives = p.receive && is_receiver(p.roles);
  warm(p);
  if (p.table) fill_table(p, scratch);
#pragma unroll 1
  for (int i = thread; i < shape.ranks; i += kThreads) {
    scratch.windows()[i] = target_of(g, i, p.send);
    scratch.base(0)[i] = 0;
    scratch.source_error()[i] = twSuccess;
  }
  if (thread == 0) *scratch.failed() = 0, *scratch.plain() = 0, *scratch.routed() = 1;
  if (thread < kWarps) scratch.progress()[thread] = 0;
  // What a sending warp sends first, though nobody knows yet where it goes.
  const uint32_t u = sent_shares(p.roles).first;
  const bool begins = sends && u < sending_warps(p);
  const bool begins_plain = kFast && begins && u < units_before(p, p.first_line);
  PlainUnit plain{};
  if constexpr (kFast) {
    plain.find(p, u, begins_plain);
    plain.pin();
  }
  IdsAt ids_from = ids_at(p, thread);
  pin(ids_from.from, ids_from.bytes);
  meet();  // the table
  await_earlier();
  Ids ids{};
  if (sends && kFast) {
    ids = load_ids(ids_from);
    plain.load(p);
  }
  const uint32_t digest = load_digest(p.in.digest);
  Step step{next_step(g, p.lane),           p.lane,      p.bound, twPhaseDispatch,
            mix_counted(digest, p.counted), g.note_bits, p.lands};
  const bool sticky = is_sticky(g);
  Ahead ahead{};
  if (begins && !begins_plain) {
    const Item item = sent_item(p, u);
    const auto token = static_cast<int>(item.row);
    if (token < p.tokens) load_ahead<kFast>(p, token, item.unit, &ahead);
  }
  place_rows(p, scratch);
  if (sends) mark_tokens<kFast>(p, scratch, thread, ids, scratch.marks(thread));
  const bool skips = static_cast<int>(step.number & 1) != p.bank;
  if (skips) ++step.number;
  bool usable = __syncthreads_or(sticky) == 0;  // threads that differ would wait for each other
  const Block b{p, scratch, step, scratch.windows()[g.me] + g.map.bank(p.lane, step.bank())};
  if (p.send && usable && skips && !is_carried(g)) usable = skip_step(g, step);
  // To meet the instructions for any other unit takes a warp 4 us from here; so long the link has these. Not of later
  // rounds, of which nobody knows yet where tokens go.
  const auto token = static_cast<int>(plain.item.row);
  const bool stored = begins_plain && token < kRound;
  if (stored && usable) send_plain(b, &plain, find_place(p, scratch, token, 0));
  mark_rest<kFast>(p, scratch, step);
  const bool first = thread == 0 && blockIdx.x == 0;
  if (first && p.send && usable) say_sent(g, step);
  if (usable && sends) send<kKind>(b, plain, stored, ahead);  // S7: nobody here waits
  uint32_t arrived = 0;
  if (p.receive && thread == 0) arrived = begin_end(g, step);
  if (first) {  // what no peer waits for
    // Until a block that has seen an error knows all others to be done, or the group is finished, which a combine sees
    // first. Rows that do not fit go nowhere, and no combine answers.
    const bool overflow = g.map.shape().exact() && load_fresh<uint32_t>(p.handle.overflow) != 0;
    if (p.receive) *p.handle.status = overflow ? twRecvOverflow : twSuccess;
    if (p.in.map != nullptr) *p.handle.digest = digest;
    clear_counters(g, step);
  }
  if (usable) {
    if (receives) receive<kFast>(b);
    if (p.tally == Tally::kLast && blockIdx.x == gridDim.x - 1) tally(p);
  } else if (p.receive) {
    give_up(b);
  }
  if (!p.receive) return;
  __syncthreads();
  if (*scratch.failed() != 0) clear_failed(b);
  if (threadIdx.x != 0) return;
  end_step(g, step, arrived);
  say_done(g, step);
}

template <class Use>
int with_kernel(Kind kind, Use&& use) {
  return with_kind(kind, [&](auto of) { return use(dispatch_kernel<decltype(of)::value>); });
}

}  // namespace

int launch_dispatch(const DispatchParams& params, int grid, bool early, void* stream) {
  if (params.kind == Kind::kLines) return launch_dispatch_lines(params, grid, early, stream);
  return with_kernel(params.kind,
                     [&](auto* kernel) { return launch_kernel(kernel, params, grid, params.at.bytes, early, stream); });
}

int load_dispatch(const Shape& shape) {
  const uint32_t bytes = DispatchScratch::make(shape).bytes;
  if (const int error = load_dispatch_lines(shape)) return error;
  for (const Kind kind : kBulkKinds) {
    const int error =
        with_kernel(kind, [&](auto* kernel) { return allow_shared(reinterpret_cast<const void*>(kernel), bytes); });
    if (error != 0) return error;
  }
  return 0;
}

}  // namespace tw::nvlink
