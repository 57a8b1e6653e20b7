// The exchange of counts, in one kernel: exchange/counts.h says what is told and what follows from it. Takes the
// caller's ids; gives the handle's ids, marks and places of rows, and what the host wants to know.
//
// Floor: a flight, as for any signal; the counts themselves are a few KiB. All blocks count tokens; the last one to
// finish tells the peers and takes what they tell, so that no block waits for another (S7). Ids are read here, once:
// the handle's copy serves the dispatches that follow.
//
// What breaks if this changes: S2 and S4, as in any step; S9, as the marks are the slots of every later dispatch; and
// that all ranks come to the same decision about an overflow, which they do because all have the same counts.
#include <cuda_runtime.h>

#include "cuda/device/ids.cuh"
#include "cuda/launch/counts.h"
#include "cuda/launch/launch.h"
#include "cuda/launch/loading.h"

namespace tw::cuda {
namespace {

// A block's working memory: its own counters, if there are few enough, and what its warps tell each other.
struct CountsScratch {
  unsigned long long*
      worst;        // [1] the first rank with too little room: its number in the upper bits, its rows in the lower 40
  int64_t* sums;    // [kWarps]
  uint32_t* marks;  // [kCounted / kGroup, N] marks of the block's tokens
  int32_t* own;     // [N + E], or NULL

  static constexpr uint32_t kMarks = 8 * (1 + kWarps);
  static __host__ __device__ uint32_t own_begin(const Shape& shape) {
    return kMarks + 4 * (kCounted / kGroup) * static_cast<uint32_t>(shape.ranks);
  }
  static uint32_t bytes(const Shape& shape) {
    const int64_t own = int64_t{shape.ranks} + shape.experts;
    return own_begin(shape) + static_cast<uint32_t>(own <= kMaxTable ? 4 * own : 0);
  }
  __device__ explicit CountsScratch(const Shape& shape)
      : worst(shared_at<unsigned long long>(0)),
        sums(shared_at<int64_t>(8)),
        marks(shared_at<uint32_t>(kMarks)),
        own(shape.ranks + shape.experts <= kMaxTable ? shared_at<int32_t>(own_begin(shape)) : nullptr) {}
  // Marks that a token of the block goes to a rank.
  __device__ void mark(const Shape& shape, int token, int32_t rank) const {
    atomicOr(&marks[token % kCounted / kGroup * shape.ranks + rank], 1u << (token % kGroup));
  }
};

// Adds one to a counter for each thread that `counts`; threads with the same counter do so together. By a warp.
__device__ void count_together(int32_t* counters, int at, bool counts) {
  const uint32_t same = __match_any_sync(~0u, counts ? at : -1);
  if (counts && (same & below(lane())) == 0) atomicAdd(&counters[at], __popc(same));
}

// Gives how many tokens a warp counts at a time, a thread for each id: so many as divide a block's.
constexpr int together(int top_k) { return top_k <= 8 ? kCounted / kWarps : top_k <= 16 ? 2 : 1; }

// Copies ids and weights of together() tokens from `first` on into the handle, and counts and marks their rows. A bad
// id acts as -1 and is reported. `top_k`: up to 32.
__device__ void count_tokens(const CountsParams& p, const Step& step, const uint32_t* map, const CountsScratch& scratch,
                             int32_t* counters, int first) {
  const Shape& shape = p.group.map.shape();
  const int token = first + lane() / shape.top_k;
  const int k = lane() % shape.top_k;
  const bool there = lane() < together(shape.top_k) * shape.top_k && token < p.tokens;
  const int64_t raw = there ? raw_id(p.in, token, k) : -1;
  const float weight = there ? raw_weight(p.in, token, k) : 0.0f;
  int32_t id = slot_of(p.group, map, valid_id(p.in, raw), token);
  // An id counts once in a token, and so does a rank.
  const auto key = [&](int32_t what) { return static_cast<long long>(lane() / shape.top_k) << 32 | what; };
  const uint32_t same = __match_any_sync(~0u, id < 0 ? -1 - static_cast<long long>(lane()) : key(id));
  if ((same & below(lane())) != 0) id = -1;
  if (there && id < 0 && raw != -1) report_id(p.group, step, token, k, raw);
  const int32_t rank = id < 0 ? -1 : expert_rank(p.group.experts[id]);
  const uint32_t others = __match_any_sync(~0u, id < 0 ? -1 - static_cast<long long>(lane()) : key(rank));
  count_together(counters, shape.ranks + id, id >= 0);
  const bool first_there = id >= 0 && (others & below(lane())) == 0;
  count_together(counters, rank, first_there);
  if (first_there) scratch.mark(shape, token, rank);
  if (!there || p.in.own) return;
  if (shape.counts_loads != 0 && id >= 0) atomicAdd(&p.handle.choices[raw], 1);
  p.handle.ids[static_cast<int64_t>(token) * shape.top_k + k] = id;
  p.handle.weights[static_cast<int64_t>(token) * shape.top_k + k] = weight;
}

// Does the same for one token, by one thread, for any top_k.
__device__ void count_token(const CountsParams& p, const Step& step, const uint32_t* map, const CountsScratch& scratch,
                            int32_t* counters, int token) {
  const Shape& shape = p.group.map.shape();
  int32_t* const ids = p.handle.ids + static_cast<int64_t>(token) * shape.top_k;
#pragma unroll 1
  for (int k = 0; k < shape.top_k; ++k) {
    const int64_t raw = raw_id(p.in, token, k);
    int32_t id = slot_of(p.group, map, valid_id(p.in, raw), token);
    const int32_t rank = id < 0 ? -1 : expert_rank(p.group.experts[id]);
    bool counted = false;
    for (int i = 0; i < k; ++i) {
      if (ids[i] < 0) continue;
      if (ids[i] == id) id = -1;
      counted |= expert_rank(p.group.experts[ids[i]]) == rank;
    }
    if (id < 0 && raw != -1) report_id(p.group, step, token, k, raw);
    if (!p.in.own) {
      ids[k] = id;
      p.handle.weights[static_cast<int64_t>(token) * shape.top_k + k] = raw_weight(p.in, token, k);
    }
    if (id < 0) continue;
    if (shape.counts_loads != 0 && !p.in.own) atomicAdd(&p.handle.choices[raw], 1);
    atomicAdd(&counters[shape.ranks + id], 1);
    if (counted) continue;
    atomicAdd(&counters[rank], 1);
    scratch.mark(shape, token, rank);
  }
}

// Counts kCounted tokens from `first` on, and puts their marks into the handle. By a block.
__device__ void count_some(const CountsParams& p, const Step& step, const uint32_t* map, const CountsScratch& scratch,
                           int32_t* counters, int first) {
  const Shape& shape = p.group.map.shape();
  const auto thread = static_cast<int>(threadIdx.x);
  const int marks = kCounted / kGroup * shape.ranks;
  for (int i = thread; i < marks; i += kThreads) scratch.marks[i] = 0;
  __syncthreads();
  const int end = min(first + kCounted, p.tokens);
  if (shape.top_k <= 32) {
    const int each = together(shape.top_k);
    for (int token = first + thread / 32 * each; token < end; token += kWarps * each) {
      count_tokens(p, step, map, scratch, counters, token);
    }
  } else if (first + thread < end) {
    count_token(p, step, map, scratch, counters, first + thread);
  }
  __syncthreads();
  const int there = min(marks, (end - first + kGroup - 1) / kGroup * shape.ranks);
  for (int i = thread; i < there; i += kThreads) {
    p.handle.marks[int64_t{first / kGroup} * shape.ranks + i].going = scratch.marks[i];
  }
  __syncthreads();
}

// Counts a block's share of the tokens, into the counters of the kernel.
__device__ void count_share(const CountsParams& p, const Step& step, const uint32_t* map,
                            const CountsScratch& scratch) {
  const Shape& shape = p.group.map.shape();
  const int counts = shape.ranks + shape.experts;
  const auto thread = static_cast<int>(threadIdx.x);
  for (int i = thread; scratch.own != nullptr && i < counts; i += kThreads) scratch.own[i] = 0;
  int32_t* const counters = scratch.own != nullptr ? scratch.own : p.told;
  const auto blocks = static_cast<int>(gridDim.x);
  for (int first = static_cast<int>(blockIdx.x) * kCounted; first < p.tokens; first += blocks * kCounted) {
    count_some(p, step, map, scratch, counters, first);
  }
  __syncthreads();
  for (int i = thread; scratch.own != nullptr && i < counts; i += kThreads) {
    if (scratch.own[i] != 0) atomicAdd(&p.told[i], scratch.own[i]);
  }
}

// Tells each rank what it is told, and sets the counters to 0 again. By a block.
__device__ void tell_counts(const CountsParams& p, const Step& step) {
  const GroupView& g = p.group;
  const Shape& shape = g.map.shape();
  const auto place = [&](int rank) {
    return target_of(g, rank, true) + g.map.counts(step.channel, step.bank(), source_at(g, rank));
  };
  for (int rank = 0; rank < shape.ranks; ++rank) {
    auto* const to = reinterpret_cast<int32_t*>(place(rank));
    for (int i = static_cast<int>(threadIdx.x); i < shape.ranks; i += blockDim.x) put_data(to + i, p.told[i]);
    auto* const receive_offset = reinterpret_cast<uint64_t*>(place(rank) + WindowMap::receive_offsets_begin(shape));
    for (int q = static_cast<int>(threadIdx.x); shape.leases() && q < shape.payloads; q += blockDim.x) {
      put_data(receive_offset + q, p.receive_offset[q]);
    }
  }
  for (int id = static_cast<int>(threadIdx.x); id < shape.experts; id += blockDim.x) {
    const uint32_t expert = g.experts[id];
    auto* const to = reinterpret_cast<int32_t*>(place(expert_rank(expert))) + shape.ranks;
    put_data(to + expert_slot(expert), p.told[shape.ranks + id]);
  }
  __syncthreads();  // S4: the fence of the signals follows this
  for (int i = static_cast<int>(threadIdx.x); i < shape.ranks + shape.experts; i += blockDim.x) p.told[i] = 0;
  if (threadIdx.x < 32) publish_signals(g, step, Mode::kCounts, [](int) { return 0; });
}

// Finds how many tokens go to each rank before those of a group. It runs when all are marked, while the signals are on
// their way. By a block, a warp for each rank.
__device__ void sum_marks(const CountsParams& p) {
  constexpr int kEach = 4;  // groups of one thread at a time
  const int ranks = p.group.map.shape().ranks;
  const int groups = (p.tokens + kGroup - 1) / kGroup;
#pragma unroll 1
  for (int rank = static_cast<int>(threadIdx.x) / 32; rank < ranks; rank += kWarps) {
    int before = 0;
#pragma unroll 1
    for (int first = kEach * lane(); first - kEach * lane() < groups; first += kEach * 32) {
      GroupMarks* const marks = p.handle.marks + int64_t{first} * ranks + rank;
      int count[kEach] = {};
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (first + i < groups) count[i] = __popc(load_fresh<uint32_t>(&marks[int64_t{i} * ranks].going));
      }
      int mine = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) mine += count[i];
      const int through = sum_through(mine);
      int here = before + through - mine;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (first + i < groups) marks[int64_t{i} * ranks].before = here;
        here += count[i];
      }
      before += __shfl_sync(~0u, through, 31);
    }
  }
}

// Waits for all ranks' counts. By a block; all threads learn whether they came.
__device__ bool await_counts(const CountsParams& p, const Step& step) {
  bool good = true;
  for (int i = static_cast<int>(threadIdx.x); i < p.group.map.shape().ranks; i += blockDim.x) {
    const Source source = await_source(p.group, step, i, Look::kSignal, true);
    if (source.error == twTimeout) {
      report_failure(p.group, step, twTimeout, i, source.signal);
    } else {
      report_source(p.group, step, i, source);
    }
    good &= source.error == twSuccess;
  }
  return __syncthreads_and(good) != 0;
}

// Gives the i-th number that a rank has told this one.
__device__ int32_t told_by(const CountsParams& p, const Step& step, int rank, int i) {
  const GroupView& g = p.group;
  const std::byte* const told = window_of(g, g.me) + g.map.counts(step.channel, step.bank(), rank);
  return static_cast<int32_t>(load_fresh<uint32_t>(reinterpret_cast<const int32_t*>(told) + i));
}

// Takes where rows for a rank are to arrive there. By one thread for each rank.
__device__ void take_receive_offset(const CountsParams& p, const Step& step, int rank) {
  const GroupView& g = p.group;
  const Shape& shape = g.map.shape();
  const std::byte* const told = window_of(g, g.me) + g.map.counts(step.channel, step.bank(), rank);
  const auto* const receive_offset = reinterpret_cast<const uint64_t*>(told + WindowMap::receive_offsets_begin(shape));
  for (int q = 0; shape.leases() && q < shape.payloads; ++q) {
    p.handle.receive_offset[rank * shape.payloads + q] = load_fresh<unsigned long long>(receive_offset + q);
  }
}

// Finds where the rows for one rank begin, from each rank, and whether there is room. By one thread for each rank. What
// several ranks tell is on its way at once, as each load takes longer than all else here.
__device__ void place_rank(const CountsParams& p, const Step& step, int to, unsigned long long* worst) {
  constexpr int kAtOnce = 8;
  const GroupView& g = p.group;
  const Shape& shape = g.map.shape();
  int64_t row = 0;
  int64_t wanted = 0;
#pragma unroll 1
  for (int base = 0; base < shape.ranks; base += kAtOnce) {
    int32_t told[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) told[i] = base + i < shape.ranks ? told_by(p, step, base + i, to) : 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int from = base + i;
      if (from >= shape.ranks) break;
      int32_t rows = told[i];
      wanted += rows;
      if (p.drop) rows = static_cast<int32_t>(min(static_cast<int64_t>(rows), p.room - row));
      p.handle.sent_rows[static_cast<int64_t>(from) * shape.ranks + to] = rows;
      if (from == g.me) p.handle.begin[to] = row;
      if (to == g.me) p.handle.source[from] = row;
      row += rows;
    }
  }
  if (to == g.me) p.handle.source[shape.ranks] = row;
  if (wanted > p.room) {
    atomicMin(worst, static_cast<unsigned long long>(to) << 40 | static_cast<unsigned long long>(wanted));
  }
}

// Makes no rank send anything. All ranks do so alike, as all have the same counts.
__device__ void send_nothing(const CountsParams& p) {
  const Shape& shape = p.group.map.shape();
  for (int i = static_cast<int>(threadIdx.x); i < shape.ranks * shape.ranks; i += blockDim.x) p.handle.sent_rows[i] = 0;
  for (int i = static_cast<int>(threadIdx.x); i <= shape.ranks; i += blockDim.x) {
    p.handle.source[i] = 0;
    if (i < shape.ranks) p.handle.begin[i] = 0;
  }
}

// Gives the rows that come for a local expert. Rows for which a receiver has no room are counted too, as on the host:
// which those are is known when rows have come.
__device__ int32_t rows_for(const CountsParams& p, const Step& step, int expert) {
  const int ranks = p.group.map.shape().ranks;
  int32_t rows = 0;
#pragma unroll 4
  for (int from = 0; from < ranks; ++from) rows += told_by(p, step, from, ranks + expert);
  return rows;
}

// Finds how many rows each local expert has, and where they begin in a grouped layout. `none`: nobody has any. By a
// block.
__device__ void place_experts(const CountsParams& p, const Step& step, const CountsScratch& scratch, bool none) {
  const int experts = p.group.local_experts;
  const auto thread = static_cast<int>(threadIdx.x);
  int64_t before = 0;  // rows of the experts below `base`
#pragma unroll 1
  for (int base = 0; base <= experts; base += kThreads) {
    const int expert = base + thread;
    const int32_t rows = expert < experts && !none ? rows_for(p, step, expert) : 0;
    const int64_t padded = int64_t{rows + p.alignment - 1} / p.alignment * p.alignment;
    int64_t through = sum_through(static_cast<long long>(padded));
    if (lane() == 31) scratch.sums[thread / 32] = through;
    __syncthreads();
    int64_t total = before;
    for (int warp = 0; warp < kWarps; ++warp) {
      if (warp < thread / 32) through += scratch.sums[warp];
      total += scratch.sums[warp];
    }
    const int64_t begin = before + through - padded;
    if (expert < experts) p.handle.experts[expert] = rows;
    if (expert <= experts)
      p.handle.expert_begin[expert] = begin, p.handle.offsets[expert] = static_cast<int32_t>(begin);
    before = total;
    __syncthreads();  // the sums are about to be overwritten
  }
}

// Lets the host look. By one thread, which has synchronised with those that wrote.
__device__ void finish_telling(const CountsParams& p) {
  fence_system();
  store_word(&p.on_host->serial, p.serial);
}
// Writes what the host wants to know, then lets it look. By a block.
__device__ void tell_host(const CountsParams& p, unsigned long long worst) {
  const Shape& shape = p.group.map.shape();
  for (int i = static_cast<int>(threadIdx.x); i < shape.ranks; i += blockDim.x) {
    p.on_host->received[i] = static_cast<int32_t>(p.handle.source[i + 1] - p.handle.source[i]);
  }
  for (int i = static_cast<int>(threadIdx.x); i < p.group.local_experts; i += blockDim.x) {
    p.expert_rows[i] = p.handle.experts[i];
  }
  if (threadIdx.x == 0) {
    p.on_host->failed = 0;
    p.on_host->overflow_rank = worst == ~0ull ? -1 : static_cast<int32_t>(worst >> 40);
    p.on_host->overflow_rows = static_cast<int64_t>(worst & ((1ull << 40) - 1));
    p.on_host->grouped_rows = p.handle.expert_begin[p.group.local_experts];
  }
  __syncthreads();
  if (threadIdx.x == 0) finish_telling(p);
}

// Takes what has come into the handle. By a block.
__device__ void take_counts(const CountsParams& p, const Step& step, const CountsScratch& scratch) {
  const Shape& shape = p.group.map.shape();
  for (int to = static_cast<int>(threadIdx.x); to < shape.ranks; to += kThreads) {
    place_rank(p, step, to, scratch.worst);
    take_receive_offset(p, step, to);
  }
  __syncthreads();
  const unsigned long long worst = *scratch.worst;
  const bool refused = worst != ~0ull && !p.drop;
  if (refused) send_nothing(p);
  place_experts(p, step, scratch, refused);
  if (threadIdx.x == 0) *p.handle.overflow = refused ? 1 : 0;
  if (refused && threadIdx.x == 0) {
    report_call(p.group, &p.group.pages[p.group.me]->call, [&](Report* to) {
      // The host records the same, and may find the same in its page: an overflow is told once.
      const uint64_t seen = pack(Signal{step.low(), Mode::kCounts, 0});
      write_report(to, p.group, step, twRecvOverflow, static_cast<int>(worst >> 40), seen,
                   static_cast<uint32_t>(shape.recv_rows));
      volatile Report& report = *to;
      report.value = static_cast<int64_t>(worst & ((1ull << 40) - 1));
    });
  }
  if (p.on_host != nullptr) tell_host(p, worst);
}

// Cleans up after counts that did not come: nothing may go out by them, and nothing be shown. By a block; blocks that
// do so at once write the same.
__device__ void leave_nothing(const CountsParams& p, const Step& step, const CountsScratch& scratch) {
  send_nothing(p);
  place_experts(p, step, scratch, true);
  if (threadIdx.x != 0) return;
  *p.handle.overflow = 1;
  if (p.on_host == nullptr) return;
  p.on_host->failed = 1;
  finish_telling(p);
}

__global__ void __launch_bounds__(kThreads) counts_kernel(const __grid_constant__ CountsParams p) {
  const GroupView& g = p.group;
  const CountsScratch scratch(g.map.shape());
  const uint32_t* const map = map_of(g, p.in, p.channel);
  const uint32_t digest = load_digest(p.in.head == nullptr ? p.in.digest : map + MapWords::kDigest);
  Step step{next_step(g, p.channel), p.channel, p.room, twPhaseCounts,
            mix_rows(digest, p.growth)};  // ranks must have one room alike
  begin_at_bank(g, p.bank, &step.number);
  if (p.in.map != nullptr && threadIdx.x == 0 && blockIdx.x == 0) *p.handle.digest = digest;
  // This is done even if the counts are known already, since ranks may differ in that: one that refused an exchange
  // still knows the counts of the one before, and its peers do not.
  if (p.handle.metadata_step != nullptr && threadIdx.x == 0 && blockIdx.x == 0) *p.handle.metadata_step = 0;
  if (__syncthreads_or(is_sticky(g)) != 0) {  // then no other block is the last
    if (p.receive) leave_nothing(p, step, scratch);
    return;
  }
  const uint32_t arrived = p.receive && threadIdx.x == 0 ? begin_end(g, step) : 0;
  if (threadIdx.x == 0 && blockIdx.x == 0) clear_counters(g, step);
  bool last = blockIdx.x == 0;
  if (p.send) {
    count_share(p, step, map, scratch);
    __syncthreads();
    last = __syncthreads_or(threadIdx.x == 0 && last_to_send(g, step, Roles::one(static_cast<int>(gridDim.x)))) != 0;
    if (last) tell_counts(p, step);
    if (last) sum_marks(p);
    if (last && threadIdx.x == 0) say_sent(g, step);
  }
  if (p.receive && last) {
    if (threadIdx.x == 0) *scratch.worst = ~0ull;
    if (await_counts(p, step)) {
      take_counts(p, step, scratch);
    } else {
      leave_nothing(p, step, scratch);
    }
  }
  if (p.receive && threadIdx.x == 0) end_step(g, step, arrived);
}

}  // namespace

int launch_counts(const CountsParams& params, int grid, void* stream) {
  return launch_kernel(counts_kernel, params, grid, CountsScratch::bytes(params.group.map.shape()), false, stream);
}

int load_counts(const Shape& shape) {
  return allow_shared(reinterpret_cast<const void*>(counts_kernel), CountsScratch::bytes(shape));
}

}  // namespace tw::cuda
