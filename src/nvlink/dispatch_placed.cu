// Dispatch of an exact layout: the exchange of counts before it has made the marks of all tokens (counts.cu), so that
// every row's place is a load away, which goes out with the row's own. Nothing is routed here, and a warp that sends
// waits for nobody at all: what it begins with is on the wire before its block has met.
//
// Otherwise as dispatch.cu, whose halves these are too. Floor: likewise; of a routing that was dispatched before, of
// the rows alone.
#include <cuda_runtime.h>

#include "nvlink/bulk.h"
#include "nvlink/dispatch_course.cuh"
#include "nvlink/dispatch_end.cuh"
#include "nvlink/dispatch_receive.cuh"
#include "nvlink/tally.cuh"

namespace tw::nvlink {
namespace {

// The slots that a rank's lines follow, by its thread, before a barrier. Asked for with all else that a block begins
// with: an answer that came behind its first stores had all its warps wait (0.3 us of a dispatch, 1 us of a pair).
__device__ inline GroupMarks load_before_lines(const DispatchParams& p) {
  const bool some = p.first_line > 0 && p.first_line < p.tokens;
  return some ? load_marks(p, p.first_line, static_cast<int>(threadIdx.x)) : GroupMarks{};
}
__device__ inline void keep_before_lines(const DispatchParams& p, const Scratch& scratch, GroupMarks marks) {
  if (p.first_line <= 0 || p.first_line >= p.tokens) return;
#pragma unroll 1
  for (int rank = static_cast<int>(threadIdx.x); rank < p.group.map.shape().ranks; rank += kThreads) {
    scratch.before_lines()[rank] = place_in(marks, p.first_line).slot;
    marks = load_marks(p, p.first_line, rank + kThreads);
  }
}

// What a warp that sends begins with, found before the wait for the kernel before.
template <bool kFast>
struct Beginning {
  bool plain = false;  // it is a unit of a row as it lies, in usual calls
  PlainUnit unit{};
  uint32_t vectors = 0;
  const std::byte* second = nullptr;
  GroupMarks marks{};  // of rank lane()

  __device__ Beginning(const DispatchParams& p, uint32_t u, bool begins) {
    if (!kFast) return;
    plain = begins && u < units_before(p, p.first_line);
    unit.find(p, u, plain);
    unit.pin();
    vectors = unit.vectors, second = unit.second;
    if (!begins) return;
    unit.bring_near(p);
    if (plain && lane() == 0) prefetch(p.handle.marks + token() / kGroup * p.group.map.shape().ranks);
  }
  __device__ int token() const { return static_cast<int>(unit.item.row); }
  // `real`: else nothing of it is loaded or sent.
  __device__ void load(const DispatchParams& p, bool real) {
    if (!kFast) return;
    unit.vectors = real ? vectors : 0;
    unit.second = real ? second : nullptr;
    unit.there = real && plain;
    for (int i = 0; i < kUnitGroups; ++i) unit.even[i] = unit.odd[i] = {};
    unit.beside = {};
    unit.load(p);
    if (plain) marks = load_marks(p, token(), lane());
  }
  // `begins`: of rank lane().
  __device__ Target target(const Begins& begins) const {
    const Place place = place_in(marks, token());
    if (!place.goes || place.slot >= begins.limit) return {false, 0};
    return {true, static_cast<uint64_t>(int64_t{begins.there} + place.slot)};
  }
};

// A usual call's senders rehearse, as dispatch.cu says.
template <Kind kKind>
__global__ void __launch_bounds__(kThreads, 1) placed_kernel(const __grid_constant__ DispatchParams p) {
  constexpr bool kFast = kKind != Kind::kAny;
  let_next_begin();
  if (does_nothing_else(p)) return tally_alone(p);
  const GroupView& g = p.group;
  const Scratch scratch(p);
  const int thread = static_cast<int>(threadIdx.x);
  const bool sends = p.send && is_sender(p.roles);
  const bool receives = p.receive && is_receiver(p.roles);
  warm(p);
  begin_block(p, scratch);
  const uint32_t u = sent_shares(p.roles).first;
  const bool begins = sends && u < sending_warps(p);
  Beginning<kFast> beginning(p, u, begins);
  if (thread < g.map.shape().ranks) bring_begins_near(p, thread);
  if (thread == 0) prefetch(&g.lanes[p.lane]), prefetch(g.state);
  meet();  // the table
#pragma unroll 1
  for (bool real = !(kFast && p.rehearses && sends && !receives);; real = true) {
    if (real) await_earlier();
    const Begins rows = load_begins(p, kFast ? lane() : thread);
    const GroupMarks before_lines = load_before_lines(p);
    const uint32_t digest = load_digest(p.in.digest);
    const uint32_t since = load_since(p);
    Step step{next_step(g, p.lane), p.lane, p.bound, twPhaseDispatch};
    const bool sticky = is_sticky(g);
    beginning.load(p, real);
    Ahead ahead{};
    if (!kFast && begins) {
      const Item item = sent_item(p, u);
      const auto token = static_cast<int>(item.row);
      if (token < p.tokens) load_ahead<kFast>(p, token, item.unit, &ahead);
    }
    const bool skips = static_cast<int>(step.number & 1) != p.bank;
    if (skips) ++step.number;
    step.digest = mix_counted(digest, p.counted), step.note_bits = g.note_bits, step.lands = p.lands;
    const bool known = is_known(step, since);
    const Block b{p, scratch, step, scratch.windows()[g.me] + g.map.bank(p.lane, step.bank())};
    // Before all else: so long as a warp finds and loads its next unit, the link has these. A skip comes before.
    const bool stored = __all_sync(~0u, beginning.plain && real && !sticky && !skips);
    if (kFast && (stored || !real)) {
      send_plain(b, &beginning.unit, real ? beginning.target(rows) : Target{lane() == 0, 0});
    }
    keep_begins<kFast>(p, scratch, rows);
    keep_before_lines(p, scratch, before_lines);
    bool usable = __syncthreads_or(sticky) == 0;  // threads that differ would wait for each other
    if (real && p.send && usable && skips && !is_carried(g)) usable = skip_step(g, step);
    if (real && thread == 0 && blockIdx.x == 0 && p.send && usable) say_sent(g, step);
    if ((usable || !real) && sends) {
      send<kKind, true>(b, beginning.unit, beginning.plain, stored, ahead, real, known);  // S7: nobody here waits
    }
    if (!real) continue;
    const uint32_t arrived = p.receive && thread == 0 ? begin_end(g, step) : 0;
    if (thread == 0 && blockIdx.x == 0) leave_status(b, digest);
    if (usable && receives) receive<kFast>(b, known);
    return finish_dispatch(b, usable, arrived);
  }
}

// Of one kind.
constexpr auto kWithKernel = [](Kind kind, auto&& use) {
  return with_kind(kind, [&](auto of) { return use(placed_kernel<decltype(of)::value>); });
};

}  // namespace

int launch_dispatch_placed(const DispatchParams& params, int grid, bool early, void* stream) {
  return launch_bulk(params, grid, early, stream, kWithKernel);
}

int load_dispatch_placed(const Shape& shape) { return load_bulk(DispatchScratch::make(shape).bytes, kWithKernel); }

}  // namespace tw::nvlink
