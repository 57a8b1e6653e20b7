// Where rows stand by expert, found by each block that receives, out of the first packets of all rows (S9).
//
// Takes ByExpertParams and a block's shared memory, cleared (RowPlaces::clear) before a barrier; find_rows waits for
// all sources' signals and for the first packet of each row, which holds its ids. Gives each row's number among its
// expert's rows, in order of source and slot; and what stands where no row does.
//
// What breaks if this changes: S9 (places are those of view/few_rows.cu and view/by_expert.cu, bit for bit, and alike
// in all blocks), S6 (waits end). How rows are shared out is speed alone.
#pragma once

#include "cuda/dispatch/ll128_tiles.cuh"
#include "cuda/launch/by_expert.h"
#include "cuda/view/by_expert.cuh"

namespace tw::cuda {

// What a block knows of rows and experts. Rows are numbered as ByExpertScratch says. An expert has a bit for each row,
// so whoever sets one waits for nobody, and a row's number is that of the bits below its own.
class RowPlaces {
 public:
  __device__ explicit RowPlaces(const ByExpertParams& x) : x_(x) {}
  __device__ int32_t* came() const { return shared_at<int32_t>(x_.at.came); }
  __device__ int16_t* experts() const { return shared_at<int16_t>(x_.at.experts); }
  __device__ const ViewParams& view() const { return x_.view; }
  __device__ int64_t slots() const { return static_cast<int64_t>(x_.slots.divisor) * x_.ranks.divisor; }

  // Before a barrier, by a block.
  __device__ void clear() const {
    const auto end = (x_.at.experts - x_.at.mine) / 4;  // bits lie behind mine, found and begin
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < end; i += kThreads) mine()[i] = 0;
  }
  // How many warps have found what they can, and how many will: by a whole warp.
  __device__ void add_found() const {
    __syncwarp();
    if (lane() == 0) atomicAdd(shared_at<int32_t>(x_.at.found), 1);
  }
  __device__ bool all_found() const {
    return peek_once(shared_at<int32_t>(x_.at.found)) >= min(kWarps, (static_cast<int>(slots()) + 3) / 4);
  }
  __device__ void set(uint32_t row, int expert) const {
    atomicOr(bits() + static_cast<uint32_t>(expert) * x_.at.pitch + row / 32, bit_of(static_cast<int>(row % 32)));
  }

  // This rank's tokens that go to itself: which they are, how many, and how many are before one. The latter two by a
  // whole warp.
  __device__ void set_mine(int token) const { atomicOr(mine() + token / 32, bit_of(token % 32)); }
  __device__ bool is_mine(int token) const { return (mine()[token / 32] >> (token % 32) & 1) != 0; }
  __device__ int own_slot(int token) const {
    int before = 0;
#pragma unroll 1
    for (int i = 0; i < token / 32; ++i) before += __popc(mine()[i]);
    return before + __popc(mine()[token / 32] & below(token % 32));
  }
  __device__ int own_rows() const {
    const int bound = static_cast<int>(x_.slots.divisor);
    return own_slot(bound - 1) + (is_mine(bound - 1) ? 1 : 0);
  }

  // Gives a row's number among an expert's, and how many that has. kAlone: with few rows they are counted where they
  // are needed; else add_up has done so.
  template <bool kAlone>
  __device__ int nth(int expert, uint32_t row) const {
    const uint32_t at = static_cast<uint32_t>(expert) * x_.at.pitch;
    const int here = __popc(bits()[at + row / 32] & below(static_cast<int>(row % 32)));
    return here + (kAlone ? through(at, row / 32) : before()[at + row / 32]);
  }
  template <bool kAlone>
  __device__ int total(int expert) const {
    const uint32_t at = static_cast<uint32_t>(expert) * x_.at.pitch;
    return kAlone ? through(at, x_.at.words) : before()[at + x_.at.words];
  }

  // Gives where an expert's rows begin.
  __device__ int64_t begin_of(int expert) const {
    return x_.view.alignment > 0 ? begin()[expert] : static_cast<int64_t>(expert) * slots();
  }

  // Adds up bits, behind a barrier and before another, by a block; and finds where experts begin.
  template <bool kAlone>
  __device__ void add_up() const {
    const int experts = x_.view.group.local_experts;
    if (!kAlone) {
#pragma unroll 1
      for (int expert = static_cast<int>(threadIdx.x); expert < experts; expert += kThreads) {
        const uint32_t at = static_cast<uint32_t>(expert) * x_.at.pitch;
        int sum = 0;
#pragma unroll 4
        for (uint32_t i = 0; i < x_.at.words; ++i) {
          before()[at + i] = static_cast<uint16_t>(sum);
          sum += __popc(bits()[at + i]);
        }
        before()[at + x_.at.words] = static_cast<uint16_t>(sum);
      }
      __syncthreads();
    }
    if (x_.view.alignment == 0) return;
    if (threadIdx.x < 32) {
      begin_experts(begin(), experts, 0, x_.view.alignment, [&](int expert) { return total<kAlone>(expert); });
    }
    __syncthreads();
  }

 private:
  __device__ uint32_t* mine() const { return shared_at<uint32_t>(x_.at.mine); }
  __device__ int32_t* begin() const { return shared_at<int32_t>(x_.at.begin); }
  __device__ uint32_t* bits() const { return shared_at<uint32_t>(x_.at.bits); }
  __device__ uint16_t* before() const { return shared_at<uint16_t>(x_.at.before); }
  __device__ int through(uint32_t at, uint32_t words) const {
    int sum = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < words; ++i) sum += __popc(bits()[at + i]);
    return sum;
  }

  const ByExpertParams& x_;
};

// ---- The first packets of all rows. Eight threads have a row at a time, kRows of them on their way; in a row of this
// rank's own each of them has an id.

constexpr uint32_t kEights = kThreads / kPacketThreads;
__device__ inline int eighth() { return static_cast<int>(threadIdx.x % kPacketThreads); }

template <int kRows>
struct Heads {
  Parts<kRows, 1> packets;  // at: nullptr where no packet is awaited
  uint32_t row[kRows];
  int source[kRows];  // -1: there is no such row

  // Begins with rows `first`, first + kEights, ...
  __device__ void begin(const Block& b, const ByExpertParams& x, uint32_t first) {
    const DispatchParams& p = b.p;
    const std::byte* const window = b.scratch.windows()[p.group.me];
    const auto slots = x.slots.divisor * x.ranks.divisor;
    packets.groups = 1;
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      row[j] = first + static_cast<uint32_t>(j) * kEights;
      const uint32_t from = divide(row[j], x.slots);
      const int slot = slot_of_row(x, j, from);
      source[j] = row[j] < slots ? static_cast<int>(from) : -1;
      packets.at[j] = nullptr;
      packets.value[0][j] = {~uint64_t{0}, 0};
      if (source[j] < 0) continue;
      if (source[j] != p.group.me) {
        packets.at[j] = window + packet_at(p.packets, p.bank, source[j], slot) + 16 * eighth();
      } else if (slot < p.tokens && eighth() < p.group.map.shape().top_k) {
        packets.value[0][j].a = static_cast<uint64_t>(raw_id(p.in, slot, eighth()));
      }
    }
  }
  __device__ int slot_of_row(const ByExpertParams& x, int j, uint32_t from) const {
    return static_cast<int>(row[j] - from * x.slots.divisor);
  }
  __device__ int source_of(int missing) const {
    int found = -1;
#pragma unroll
    for (int j = 0; j < kRows; ++j) found = j == missing ? source[j] : found;
    return found;
  }
  // Forgets slots that no row comes to. `n`: rows of source lane(). By a whole warp.
  __device__ void leave(const ByExpertParams& x, int n) {
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const int rows = __shfl_sync(~0u, n, max(source[j], 0));
      if (slot_of_row(x, j, static_cast<uint32_t>(source[j])) >= rows) packets.at[j] = nullptr;
    }
  }
};

// What a warp knows of the sources' signals: its thread i of source i's.
struct Signals {
  const std::byte* at;
  Source source;
  bool waits;  // the signal has not come

  __device__ explicit Signals(const DispatchParams& p, const Scratch& scratch)
      : at(scratch.windows()[p.group.me] + p.group.map.signal(p.channel, p.bank, lane())),
        waits(lane() < p.group.map.shape().ranks && lane() != p.group.me) {}

  // Judges what a look has found.
  __device__ void see(const GroupView& g, const Step& step, const Vec16& signal) {
    const uint64_t usual = pack(Signal{step.low(), Mode::kDispatchPackets, 0});
    const uint32_t n = static_cast<uint32_t>(signal.a) & kMaxCount;
    source.signal = signal.a;
    if ((signal.a ^ usual) >> 28 == 0 && signal.b == step.note(0) && n <= static_cast<uint32_t>(step.bound)) {
      source.n = static_cast<int>(n);
      waits = false;
    } else if (g.no_wait || reached(unpack(signal.a).step, step.low())) {
      source = await_source(g, step, lane(), Look::kTakesPart, false);
      waits = false;
    }
  }
};

// Waits for all signals and a warp's heads. False if a source failed, which the block then knows (S6).
template <int kRows>
__device__ inline bool await_heads(const Block& b, const ByExpertParams& x, Heads<kRows>* heads, Signals* signals) {
  const GroupView& g = b.p.group;
  Parts<kRows, 1>& packets = heads->packets;
  Patience patience(g);
  bool known = !__any_sync(~0u, signals->waits);
  if (known) heads->leave(x, signals->source.n);
#pragma unroll 1
  for (int looks = 0;; ++looks) {
    packets.look();
    if (!known) {
      if (signals->waits) signals->see(g, b.step, load_pair(signals->at));
      known = !__any_sync(~0u, signals->waits);
      if (known) heads->leave(x, signals->source.n);
    }
    const bool wrong = signals->source.error != twSuccess;
    if (wrong) b.scratch.fail(lane(), signals->source.error);
    if (known && __any_sync(~0u, wrong)) return false;
    const int missing = packets.missing(b.step);
    if (known && (g.no_wait || !__any_sync(~0u, missing >= 0))) {
      if (__any_sync(~0u, packets.apart)) {  // all is there, but data may have been looked at before the flags
        fence_system();
        packets.look();
      }
      return true;
    }
    bool late = false;
    if (__any_sync(~0u, patience.over(&late))) {
      late = __any_sync(~0u, late);
      int from = signals->waits ? lane() : -1;
      if (known && missing >= 0) from = heads->source_of(missing);
      if (from < 0) return false;
      if (late) report_failure(g, b.step, twTimeout, from, signals->source.signal);
      if (!late) report_stopped(g, b.step, from, signals->source.signal);
      b.scratch.fail(from, late ? twTimeout : twPeerAborted);
      return false;
    }
    rest(looks);
  }
}

// Makes known what is wrong with sources, and how many rows have come; by one warp of the grid. This rank's own are
// counted later (show_counts).
__device__ inline void tell_sources(const Block& b, const Source& source) {
  const DispatchParams& p = b.p;
#pragma unroll 1
  for (int i = 0; i < b.ranks(); ++i) {
    if (lane() == i && source.error != twSuccess) report_source(p.group, b.step, i, source);
  }
  if (lane() >= b.ranks() || lane() == p.group.me) return;
  p.shown.counts[lane()] = p.handle.counts[lane()] = source.error == twSuccess ? source.n : 0;
}

// Notes the experts of a row. By a whole warp, whose eights have a row each.
__device__ inline void note_row(const Block& b, const RowPlaces& s, uint32_t row, int source, bool came,
                                const Vec16& pair) {
  const DispatchParams& p = b.p;
  const int top_k = p.group.map.shape().top_k;
  const int first = lane() - eighth();
  const bool own = source == p.group.me;
  int32_t id = static_cast<int32_t>(item_of(pair, eighth(), first));
  if (__any_sync(~0u, own)) {
    const int token = static_cast<int>(row) - p.group.me * p.bound;
    int32_t mine = own ? valid_id(p.in, static_cast<int64_t>(pair.a)) : -1;
    // Which of the warp's rows an id is of makes it another one.
    const uint32_t same = __match_any_sync(~0u, mine < 0 ? -1 : mine * 4 + first / 8);
    if ((same & below(lane())) != 0) mine = -1;  // the second one in its token
    if (own) id = find_slot(p, mine, token);
  }
  const auto experts = static_cast<uint32_t>(p.group.map.shape().experts);
  const uint32_t found =
      (came || own) && eighth() < top_k ? b.scratch.table()[min(static_cast<uint32_t>(id), experts)] : kNoExpert;
  const int expert = expert_rank(found) == p.group.me ? expert_slot(found) : -1;
  const uint32_t here = __ballot_sync(~0u, expert >= 0) & packet_threads();
  if (source < 0) return;
  s.experts()[row * kFastIds + static_cast<uint32_t>(eighth())] = static_cast<int16_t>(expert);
  if (expert >= 0) s.set(row, expert);
  if (own && eighth() == 0 && here != 0) s.set_mine(static_cast<int>(row) - p.group.me * p.bound);
}

// Finds the experts of a warp's share of all rows, before a barrier.
template <int kRows>
__device__ inline void find_share(const Block& b, const ByExpertParams& x, const RowPlaces& s) {
  const DispatchParams& p = b.p;
  const auto slots = static_cast<uint32_t>(s.slots());
  const bool tells = threadIdx.x < 32;
  Signals signals(p, b.scratch);
  bool first = true;
#pragma unroll 1
  for (uint32_t base = threadIdx.x / 32 * 4; base < slots; base += kRows * kEights) {
    Heads<kRows> heads;
    heads.begin(b, x, base + static_cast<uint32_t>(lane()) / 8);
    const bool good = await_heads(b, x, &heads, &signals);
    if (first && tells && blockIdx.x == first_receiver(p.roles)) tell_sources(b, signals.source);
    if (first && tells && lane() < b.ranks()) s.came()[lane()] = signals.source.n;
    first = false;
    if (!good) return;
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const bool came = heads.packets.at[j] != nullptr;
      note_row(b, s, heads.row[j], heads.source[j], came, heads.packets.value[0][j]);
    }
  }
}

// Finds the experts of all rows, by a block. A warp without rows waits for nobody.
template <int kRows>
__device__ inline void find_rows(const Block& b, const ByExpertParams& x, const RowPlaces& s) {
  if (threadIdx.x / 32 * 4 >= static_cast<uint32_t>(s.slots())) return;
  find_share<kRows>(b, x, s);
  s.add_found();
}

// ---- What is told beside rows

// Shows how many rows are this rank's own.
__device__ inline void show_counts(const Block& b, const RowPlaces& s) {
  const DispatchParams& p = b.p;
  if (blockIdx.x != first_receiver(p.roles) || threadIdx.x != kThreads - 1) return;
  p.shown.counts[p.group.me] = p.handle.counts[p.group.me] = s.own_rows();
}

// Writes the experts' counts, and what stands where no row does. Warps begin that have least to receive; several share
// an expert, as padding may be more bytes than rows, unless few rows are waited for and nothing is padded.
template <bool kAlone>
__device__ inline void finish_experts(const RowPlaces& s, const Shares& shares) {
  const ViewParams& v = s.view();
  const auto experts = static_cast<uint32_t>(v.group.local_experts);
  const uint32_t last = shares.step - 1 - shares.first;
  const uint32_t parts = kAlone && v.alignment <= 1 ? 1 : max(1u, shares.step / max(experts, 1u));
#pragma unroll 1
  for (uint32_t i = last; i < experts * parts; i += shares.step) {
    const auto expert = static_cast<int>(i / parts);
    const auto part = static_cast<int>(i - static_cast<uint32_t>(expert) * parts);
    const int total = s.total<kAlone>(expert);
    const int64_t begin = s.begin_of(expert);
    const int64_t end = s.begin_of(expert + 1);
    if (part == 0 && lane() == 0) {
      v.handle.expert_counts[expert] = v.shown.counts[expert] = total;
      if (v.offsets != nullptr) v.offsets[expert] = static_cast<int32_t>(begin);
    }
    const int thread = 32 * part + lane();
    show_empty(v, begin + total, end, thread, 32 * static_cast<int>(parts));
    if (v.alignment > 0) clear_rows(v, begin + total, end, thread, 32 * static_cast<int>(parts));
  }
  if (v.alignment == 0) return;
  const int64_t end = s.begin_of(static_cast<int>(experts));
  show_empty(v, end, v.rows, 32 * static_cast<int>(last) + lane(), 32 * static_cast<int>(shares.step));
  if (last == 0 && lane() == 0 && v.offsets != nullptr) v.offsets[experts] = static_cast<int32_t>(end);
}

}  // namespace tw::cuda
