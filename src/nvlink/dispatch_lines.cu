// Dispatch of rows that all travel as lines, in calls of the usual kind (params.h, Kind::kLines).
//
// Floor: an exchange of lines, 2.5 us and the bytes over the link. What comes on top is instructions: a warp runs one
// in about 5 cycles, and one that it meets for the first time in 5 to 10; and each load that waits for another is 0.6
// us. So whatever does not need the step, the ids or the payload is worked out before the kernel waits for the one
// before it; then all that is needed is loaded at once; no warp waits for another but where tokens are routed; and what
// the caller needs but no peer does comes after the stores.
#include <cuda_runtime.h>

#include "nvlink/dispatch_end.cuh"
#include "nvlink/launch.h"
#include "nvlink/tally.cuh"

namespace tw::nvlink {
namespace {

// ---- Routing: of up to 32 tokens each warp makes it by itself, in registers; of up to a round a block does.

template <bool kAlone>
struct Routing {
  uint32_t going = 0;  // alone: which tokens go to rank lane()

  // `ids`: of token lane(), or of token threadIdx.x, before a barrier.
  __device__ void make(const DispatchParams& p, const Scratch& scratch, const Ids& ids) {
    if (kAlone) {
      going = route_warp<true>(p, scratch, lane(), 0, ids);
    } else {
      mark_tokens<true>(p, scratch, static_cast<int>(threadIdx.x), ids);
    }
  }
  // Whether a token goes to rank lane(), and its slot there.
  __device__ Place find(const Block& b, int token) const {
    if (kAlone) return {(going >> token & 1) != 0, __popc(going & below(token))};
    return find_place(b.p, b.scratch, token, 0);
  }
  // How many tokens go to a rank.
  __device__ int count(const Block& b, int rank) const {
    if (kAlone) return __popc(__shfl_sync(~0u, going, rank));
    return rank < b.ranks() ? b.scratch.through(kRound - 1, rank) : 0;
  }
};

// ---- Sending

// A unit of a token's row and what of it this thread loads; beside it, if they lie there, the token's lane()-th id and
// weight.
template <int kGroups>
struct Outgoing {
  int token;
  Unit unit;
  Rows<const std::byte> rows;
  uint32_t which;         // bit 2g + i: the i-th word of group g; bit 8 + 2g + i: it is of the second payload
  uint32_t groups;        // of lines in which it has a part
  uint64_t line;          // in a window, of bank 0 and slot 0
  const std::byte* id;    // nullptr: none
  const std::byte* high;  // half of an id of 64 bits
  const std::byte* weight;

  __device__ Outgoing(const DispatchParams& p, uint32_t u);
  __device__ void pin() {
    nvlink::pin(token, unit.number, unit.begin, unit.end, rows.at[0], rows.at[1], which, groups, line, id, high,
                weight);
  }
};

template <int kGroups>
__device__ inline Outgoing<kGroups>::Outgoing(const DispatchParams& p, uint32_t u)
    : token(static_cast<int>(divide(u, p.units.per_row))),
      unit(unit_of(p.units, u - static_cast<uint32_t>(token) * p.units.per_row.divisor)),
      rows(p, first_word(unit.begin), [&](int q) { return p.payloads[q].data + token * p.payloads[q].stride; }),
      which(0),
      groups(part_of(p.units, unit)),
      line(p.lines.bank[0] + static_cast<uint32_t>(p.group.me) * p.lines.source + line_place(unit.begin)),
      id(nullptr),
      high(nullptr),
      weight(nullptr) {
  if (token >= p.tokens) return;
  const uint32_t second = p.group.map.shape().payloads > 1 ? p.payloads[1].first_word : ~0u;
#pragma unroll
  for (uint32_t i = 0; i < 2 * kGroups; ++i) {
    const uint32_t w = first_word(unit.begin) + kGroupWords * (i / 2) + i % 2;
    const bool there = i / 2 < unit.end - unit.begin && w >= p.payloads[0].first_word && w < p.units.words;
    if (there && !(i % 2 == 1 && is_flag())) which |= 1u << i;
    if (w >= second) which |= 256u << i;
  }
  if (!has_meta(unit) || lane() >= p.group.map.shape().top_k) return;
  const int64_t at = token * p.in.id_stride[0] + lane();
  id = static_cast<const std::byte*>(p.in.ids) + (at << (p.in.wide ? 3 : 2));
  if (p.in.wide) high = id + sizeof(uint32_t);
  if (p.in.weights == nullptr) return;
  weight =
      reinterpret_cast<const std::byte*>(p.in.weights + token * p.in.weight_stride[0] + lane() * p.in.weight_stride[1]);
}

constexpr uint32_t kOne = 0x3f800000;  // 1.0f

// All of that, on its way at once; nothing is made of it yet.
template <int kGroups>
struct Loaded {
  Vec16 pair[kGroups];
  uint32_t id;
  uint32_t high;
  uint32_t weight;

  __device__ explicit Loaded(const Outgoing<kGroups>& out) : id(~0u), high(~0u), weight(kOne) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      pair[g] = {};
      if ((out.which >> (2 * g) & 1) != 0) pair[g].a = word(out, g, 0);
      if ((out.which >> (2 * g + 1) & 1) != 0) pair[g].b = word(out, g, 1);
    }
    if (out.id != nullptr) id = load_fresh<uint32_t>(out.id);
    if (out.high != nullptr) high = load_fresh<uint32_t>(out.high);
    if (out.weight != nullptr) weight = load_fresh<uint32_t>(out.weight);
  }
  __device__ static uint64_t word(const Outgoing<kGroups>& out, int g, int i) {
    const std::byte* const row = (out.which >> (8 + 2 * g + i) & 1) != 0 ? out.rows.at[1] : out.rows.at[0];
    return load_fresh<unsigned long long>(row + 8 * (static_cast<int>(kGroupWords) * g + i));
  }
  __device__ Choice choice(const DispatchParams& p) const {
    return {p.in.wide ? static_cast<int64_t>(id | static_cast<uint64_t>(high) << 32) : static_cast<int32_t>(id),
            __uint_as_float(weight)};
  }
};

// Lane j: the j-th of the token's 2K ids and weights, as they travel. A bad id acts as -1.
__device__ inline uint32_t checked_item(const Block& b, int token, const Choice& choice) {
  const int top_k = b.p.group.map.shape().top_k;
  int32_t id = valid_id(b.p.in, choice.id);
  if ((__match_any_sync(~0u, id) & below(lane())) != 0) id = -1;
  if (lane() < top_k && id < 0 && choice.id != -1) report_id(b.p.group, b.step, token, lane(), choice.id);
  id = find_slot(b.p, id, token);
  const uint32_t weight = __shfl_sync(~0u, __float_as_uint(choice.weight), lane() - top_k);
  return lane() < top_k ? static_cast<uint32_t>(id) : weight;
}

// Puts what travels beside the payloads in front of a group's words; all of it lies in the first line.
__device__ inline void put_items(const Block& b, int token, uint32_t item, Vec16* pair) {
  static_assert(kFastIds < kLineWords);
  const auto two = [&](int at) {
    const uint32_t low = __shfl_sync(~0u, item, at);
    return low | static_cast<uint64_t>(__shfl_sync(~0u, item, at + 1)) << 32;
  };
  const int w = 2 * lane();
  const uint64_t even = two(2 * w - 2);
  const uint64_t odd = two(2 * w);
  if (w < static_cast<int>(b.meta_words())) pair->a = w == 0 ? static_cast<uint32_t>(token) : even;
  if (w + 1 < static_cast<int>(b.meta_words())) pair->b = odd;
}

// The same out of what has come: the j-th.
__device__ inline uint32_t item_of(const Vec16& pair, int j) {
  const int at = j + 2;  // the first word is the header
  const uint32_t half[4] = {__shfl_sync(~0u, static_cast<uint32_t>(pair.a), at / 4),
                            __shfl_sync(~0u, static_cast<uint32_t>(pair.a >> 32), at / 4),
                            __shfl_sync(~0u, static_cast<uint32_t>(pair.b), at / 4),
                            __shfl_sync(~0u, static_cast<uint32_t>(pair.b >> 32), at / 4)};
  const uint32_t low = (at & 1) != 0 ? half[1] : half[0];
  return (at & 2) == 0 ? low : (at & 1) != 0 ? half[3] : half[2];
}

// What a rank keeps and shows of a row. `pair`: of its first group; `id`, `weight`: the lane()-th.
__device__ inline void take_items(const Block& b, int64_t row, const Vec16& pair, uint32_t id, uint32_t weight) {
  const DispatchParams& p = b.p;
  auto* const window = reinterpret_cast<uint64_t*>(b.bank + p.group.map.meta_begin()) + row * b.meta_words();
  uint64_t* const kept = p.handle.meta + row * b.meta_words();
  const uint32_t w = 2 * static_cast<uint32_t>(lane());
  if (w < b.meta_words()) window[w] = kept[w] = pair.a;
  if (w + 1 < b.meta_words()) window[w + 1] = kept[w + 1] = pair.b;
  const int top_k = p.group.map.shape().top_k;
  if (lane() < top_k) show_item(p, b.scratch, static_cast<uint64_t>(row * top_k + lane()), id, weight);
}

// The handle's copy of a token's routing.
__device__ inline void keep_token(const Block& b, int token, const Place& place, uint32_t ranks, uint32_t item,
                                  const Choice& choice) {
  const DispatchParams& p = b.p;
  const Shape& shape = p.group.map.shape();
  if (lane() == 0) p.handle.fan[token] = __popc(ranks);
  if (place.goes) {
    p.handle.destinations[token * shape.fan_out() + __popc(ranks & below(lane()))] = {lane(), place.slot};
  }
  if (p.in.own || lane() >= shape.top_k) return;
  p.handle.ids[token * shape.top_k + lane()] = static_cast<int32_t>(item);
  p.handle.weights[token * shape.top_k + lane()] = choice.weight;
}

__device__ inline uint64_t bank_offset(const Block& b) {
  return b.step.bank() != 0 ? b.p.lines.bank[1] - b.p.lines.bank[0] : 0;
}

// A unit of a token's row to all its ranks.
template <int kGroups>
__device__ inline void send_unit(const Block& b, const Place& place, const Outgoing<kGroups>& out,
                                 Loaded<kGroups> loaded) {
  const DispatchParams& p = b.p;
  Vec16& pair = loaded.pair[0];
  const Choice choice = loaded.choice(p);
  uint32_t item = 0;
  if (has_meta(out.unit)) {
    item = checked_item(b, out.token, choice);
    put_items(b, out.token, item, &pair);
  }
  const uint32_t ranks = __ballot_sync(~0u, place.goes);
  const uint32_t own = ranks & 1u << p.group.me;
  // The header's second half says which of the token's ranks this is.
  const bool header = has_meta(out.unit) && lane() == 0;
  const auto addressed = [&](int rank) {
    return header ? pair.a | static_cast<uint64_t>(__popc(ranks & below(rank))) << 32 : pair.a;
  };
  const uint64_t line = out.line + bank_offset(b);
#pragma unroll 1
  for (uint32_t others = ranks & ~own; others != 0; others &= others - 1) {
    const int rank = __ffs(static_cast<int>(others)) - 1;
    const auto slot = static_cast<uint32_t>(__shfl_sync(~0u, place.slot, rank));
    std::byte* const to = b.scratch.windows()[rank] + line + uint64_t{slot} * p.lines.row;
    const uint64_t first = addressed(rank);
    const bool together = is_together();
#pragma unroll
    for (uint32_t g = 0; g < kGroups; ++g) {
      if (g >= out.groups) continue;
      store_line(together, to + g * kGroupBytes, g == 0 ? first : loaded.pair[g].a,
                 is_flag() ? b.step.number : loaded.pair[g].b);
    }
  }
  if (own != 0) {  // what nobody waits for comes last
    const int64_t row = row_at(p, p.group.me, __shfl_sync(~0u, place.slot, p.group.me));
    place_words<true>(p, b.bank, row, out.unit, out.unit.end - out.unit.begin, loaded.pair);
    if (has_meta(out.unit)) take_items(b, row, {addressed(p.group.me), pair.b}, item, loaded.weight);
  }
  if (has_meta(out.unit)) keep_token(b, out.token, place, ranks, item, choice);
}

// How many rows go to each rank, by the warp that has least to send.
__device__ inline bool is_teller() { return blockIdx.x == 0 && threadIdx.x / 32 == kWarps - 1; }
template <bool kAlone>
__device__ inline void tell_counts(const Block& b, const Routing<kAlone>& routing) {
  const DispatchParams& p = b.p;
  const int n = routing.count(b, lane());
  if (lane() >= b.ranks()) return;
  publish_word(p.group, b.step, lane(), Mode::kDispatchLines, n, 0);
  p.handle.send_counts[lane()] = n;
}

// How many rows are this rank's own, and slots that hold none of them: by the first `warps` warps of a side. Which one
// follows from the launch alone: rows may be sent by a kernel of another kind, which leaves this to whoever receives.
__device__ inline void show_own(const Block& b, int own, uint32_t warp, uint32_t warps) {
  const DispatchParams& p = b.p;
  const int me = p.group.me;
  if (warp == 0 && lane() == 0) p.shown.counts[me] = p.handle.counts[me] = own;
  if (own == p.bound) return;
  show_nothing(p, row_at(p, me, own), row_at(p, me, p.bound), static_cast<int>(warp) * 32 + lane(),
               static_cast<int>(warps) * 32);
}

template <int kGroups, bool kAlone>
__device__ inline void send_units(const Block& b, const Routing<kAlone>& routing, Outgoing<kGroups> out,
                                  Loaded<kGroups> loaded) {
  const DispatchParams& p = b.p;
  const Shares shares = sent_shares(p.roles);
  const uint32_t all = static_cast<uint32_t>(p.tokens) * p.units.per_row.divisor;
  if (is_teller()) tell_counts(b, routing);
#pragma unroll 1
  for (uint32_t u = shares.first; u < all;) {
    const bool draws = all > shares.step;  // beyond those that everybody begins with
    const uint32_t ticket = draws && lane() == 0 ? atomicAdd(tickets(p.group, b.step), 1) : 0;
    send_unit(b, routing.find(b, out.token), out, loaded);
    if (!draws) break;
    u = shares.step + __shfl_sync(~0u, ticket, 0);
    if (u >= all) break;
    out = Outgoing<kGroups>(p, u);
    loaded = Loaded<kGroups>(out);
  }
  const uint32_t warps = all > 0 ? min(all, shares.step) : shares.step;
  if (p.receive && shares.first < warps) show_own(b, routing.count(b, p.group.me), shares.first, warps);
}

// ---- Receiving

// A unit of a slot of another rank, in this rank's window: where the thread's part of its lines is, of bank 0.
struct Incoming {
  int rank;
  int slot;
  Unit unit;
  uint64_t line;
  uint64_t word;  // of the rank

  __device__ Incoming(const DispatchParams& p, uint32_t u) {
    const int ranks = p.group.map.shape().ranks;
    const Share in = share_of(p.units, static_cast<uint32_t>(ranks - 1), u);
    rank = p.group.me + 1 + in.turn < ranks ? p.group.me + 1 + in.turn : p.group.me + 1 + in.turn - ranks;
    slot = in.index;
    unit = in.unit;
    line = line_at(p.lines, 0, rank, slot) + line_place(unit.begin);
    word = p.group.map.word(p.lane, 0, rank);
  }
  __device__ void pin() { nvlink::pin(rank, slot, unit.number, unit.begin, unit.end, line, word); }
};

// Waits for a source's word and, if it has a row for the slot, for the lines.
template <int kGroups>
__device__ inline Source await_unit(const Block& b, const Incoming& in, Parts<1, kGroups>* lines) {
  const GroupView& g = b.p.group;
  const auto bound = static_cast<uint32_t>(b.p.bound);
  const uint64_t note = b.step.note(0);
  const std::byte* const place =
      b.scratch.windows()[g.me] + in.word + (b.step.bank() != 0 ? g.map.word(0, 1, 0) - g.map.word(0, 0, 0) : 0);
  const uint64_t usual = pack(Word{b.step.low(), Mode::kDispatchLines, 0});
  Source source;
  bool known = false;
  Patience patience(g);
#pragma unroll 1
  for (int looks = 0;; ++looks) {
    lines->look();
    if (!known) {
      const Vec16 word = load_pair(place);
      const uint32_t n = static_cast<uint32_t>(word.a) & kMaxCount;
      source.word = word.a;
      source.n = static_cast<int>(n);
      known = __all_sync(~0u, (word.a ^ usual) >> 28 == 0 && word.b == note && n <= bound);
      if (!known && __any_sync(~0u, g.no_wait || reached(unpack(word.a).step, b.step.low()))) {
        known = true;  // something else, which that function judges
        source = await_source(g, b.step, in.rank, Look::kTakesPart, false);
      }
    }
    if (known && __any_sync(~0u, source.error != twSuccess || in.slot >= source.n)) return source;
    if (known && !__any_sync(~0u, lines->missing(b.step) >= 0)) {
      if (__any_sync(~0u, lines->apart)) {  // all is there, but data may have been looked at before the flags
        fence_system();
        lines->look();
      }
      return source;
    }
    bool late = false;
    const bool over = patience.over(&late);
    if (g.no_wait) return source;
    if (__any_sync(~0u, over)) {
      if (late) report_failure(g, b.step, twTimeout, in.rank, source.word);
      source.error = __any_sync(~0u, late) ? twTimeout : twPeerAborted;
      return source;
    }
    rest(looks);
  }
}

// What came for a unit of a slot, or nothing. The first of a source also makes known how many came and what is wrong.
template <int kGroups>
__device__ inline void take_unit(const Block& b, const Incoming& in) {
  const DispatchParams& p = b.p;
  Parts<1, kGroups> lines;
  lines.cover(p.units, in.unit);
  lines.at[0] = b.scratch.windows()[p.group.me] + in.line + bank_offset(b);
  const Source source = await_unit(b, in, &lines);
  const bool good = !__any_sync(~0u, source.error != twSuccess);
  const bool first = in.slot == 0 && has_meta(in.unit);
  if (good && in.slot < source.n) {
    Vec16 pair[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) pair[g] = lines.value[g][0];
    const int64_t row = row_at(p, in.rank, in.slot);
    place_words<true>(p, b.bank, row, in.unit, lines.groups, pair);
    if (has_meta(in.unit)) {
      const uint32_t id = item_of(pair[0], lane());
      take_items(b, row, pair[0], id, item_of(pair[0], lane() + p.group.map.shape().top_k));
      if (lane() == 0) check_header(p, b.step, pair[0].a);
    }
  } else if (good && has_meta(in.unit)) {
    const int64_t row = row_at(p, in.rank, in.slot);
    show_nothing(p, row, row + 1, lane(), 32);
  }
  if (lane() != 0) return;
  if (!good) b.scratch.fail(in.rank, source.error);
  if (!first) return;
  p.shown.counts[in.rank] = p.handle.counts[in.rank] = good ? source.n : 0;
  if (!good) report_source(p.group, b.step, in.rank, source);
}

template <int kGroups>
__device__ inline void take_units(const Block& b, Incoming in) {
  const DispatchParams& p = b.p;
  const Shares shares = received_shares(p.roles);
  const uint32_t all = static_cast<uint32_t>(p.bound * (b.ranks() - 1)) * p.units.per_row.divisor;
  if (!p.send) {  // an earlier kernel has
    show_own(b, static_cast<int>(load_fresh<uint32_t>(p.handle.send_counts + p.group.me)), shares.first, shares.step);
  }
#pragma unroll 1
  for (uint32_t u = shares.first; u < all;) {
    take_unit<kGroups>(b, in);
    u += shares.step;
    if (u < all) in = Incoming(p, u);
  }
}

// ---- The kernel

template <int kGroups, bool kAlone>
__global__ void __launch_bounds__(kThreads, 1) dispatch_lines_kernel(const __grid_constant__ DispatchParams p) {
  let_next_begin();
  if (does_nothing_else(p)) return tally_alone(p);
  const GroupView& g = p.group;
  const Shape& shape = g.map.shape();
  const Scratch scratch(p);
  const int thread = static_cast<int>(threadIdx.x);
  warm(p);
  if (thread < shape.ranks) {
    scratch.windows()[thread] = window_of(g, thread);
    scratch.base(0)[thread] = 0;
    scratch.source_error()[thread] = twSuccess;
  }
  if (thread == 0) *scratch.failed() = 0;
  fill_table(p, scratch);
  const bool sends = p.send && is_sender(p.roles);
  const uint32_t none = static_cast<uint32_t>(p.tokens) * p.units.per_row.divisor;
  Outgoing<kGroups> out(p, sends ? sent_shares(p.roles).first : none);
  Incoming in(p, received_shares(p.roles).first);
  IdsAt ids_from = ids_at(p, kAlone ? lane() : thread);
  const bool routes = sends && (!kAlone || sent_shares(p.roles).first < none || is_teller());
  if (!routes) ids_from.bytes = 0;
  out.pin();
  in.pin();
  pin(ids_from.from, ids_from.bytes);
  meet();  // the table
  await_earlier();
  const Ids ids = load_ids(ids_from);
  const Loaded<kGroups> loaded(out);
  const uint32_t digest = load_digest(p.in.digest);
  Step step{next_step(g, p.lane), p.lane, p.bound, twPhaseDispatch, mix_counted(digest, p.counted), g.note_bits};
  const bool sticky = is_sticky(g);
  Routing<kAlone> routing;
  if (routes) routing.make(p, scratch, ids);
  const bool skips = static_cast<int>(step.number & 1) != p.bank;
  if (skips) ++step.number;
  bool usable = __syncthreads_or(sticky) == 0;  // threads that differ would wait for each other
  uint32_t arrived = 0;
  if (p.receive && thread == 0) {
    arrived = begin_end(g, step);
    if (blockIdx.x == 0) *p.handle.status = twSuccess;  // until somebody finds otherwise
  }
  if (p.in.map != nullptr && thread == 0 && blockIdx.x == 0) *p.handle.digest = digest;
  if (thread == 0 && blockIdx.x == 0) clear_tickets(g, step);
  const Block b{p, scratch, step, scratch.windows()[g.me] + g.map.bank(p.lane, step.bank())};
  if (p.send && usable && skips) usable = skip_step(g, step);
  if (usable) {
    if (sends) send_units(b, routing, out, loaded);  // S7: nobody here waits
    if (p.receive && is_receiver(p.roles)) take_units<kGroups>(b, in);
    if (p.tally == Tally::kLast && blockIdx.x == gridDim.x - 1) tally(p);
  } else if (p.receive) {
    give_up(b);
  }
  if (!p.receive) return;
  __syncthreads();
  if (*scratch.failed() != 0) clear_failed(b);
  if (thread != 0) return;
  end_step(g, step, arrived);
  say_done(g, step);
}

// Of few tokens a warp has one group at a time, so that nothing is there twice.
template <class Use>
int with_kernel(bool alone, uint32_t groups, Use&& use) {
  if (alone) return use(dispatch_lines_kernel<1, true>);
  return use(groups <= 2 ? dispatch_lines_kernel<2, false> : dispatch_lines_kernel<kUnitGroups, false>);
}

}  // namespace

int launch_dispatch_lines(const DispatchParams& params, int grid, bool early, void* stream) {
  return with_kernel(params.tokens <= kFewTokens && params.units.unit_groups == 1, params.units.unit_groups,
                     [&](auto* kernel) { return launch_kernel(kernel, params, grid, params.at.bytes, early, stream); });
}

int load_dispatch_lines(const Shape& shape) {
  for (const uint32_t groups : {1, 2, kUnitGroups}) {
    const int error = with_kernel(groups == 1, groups, [&](auto* kernel) {
      return allow_shared(reinterpret_cast<const void*>(kernel), DispatchScratch::make(shape).bytes);
    });
    if (error != 0) return error;
  }
  return 0;
}

}  // namespace tw::nvlink
