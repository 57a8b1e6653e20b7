// The exchange of counts, in one kernel: exchange/counts.h says what is told and what follows from it.
//
// Floor: a flight, as of any word; the counts themselves are a few KiB. All blocks count tokens; the last to have done
// so tells the peers and takes what they tell, so that no block waits for another (S7). Ids are read here, once: the
// handle's copy serves the dispatches that follow.
#include <cuda_runtime.h>

#include "nvlink/ids.cuh"
#include "nvlink/launch.h"

namespace tw::nvlink {
namespace {

// A token's ids and weights into the handle, and its rows counted, by one thread. A bad id acts as -1 and is reported.
__device__ void count_token(const CountsParams& p, const Step& step, int token) {
  const Shape& shape = p.group.map.shape();
  int32_t* const ids = p.handle.ids + static_cast<int64_t>(token) * shape.top_k;
#pragma unroll 1
  for (int k = 0; k < shape.top_k; ++k) {
    const int64_t raw = raw_id(p.in, token, k);
    int32_t id = valid_id(p.group, raw);
    const int32_t rank = id < 0 ? -1 : expert_rank(p.group.experts[id]);
    bool counted = id < 0;
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
    atomicAdd(&p.told[shape.ranks + id], 1);
    if (!counted) atomicAdd(&p.told[rank], 1);
  }
}

// What is told to each rank; and the counters are 0 again. By a block.
__device__ void tell_counts(const CountsParams& p, const Step& step) {
  const GroupView& g = p.group;
  const Shape& shape = g.map.shape();
  const uint64_t place = g.map.counts(step.lane, step.bank(), g.me);
  for (int rank = 0; rank < shape.ranks; ++rank) {
    auto* const to = reinterpret_cast<int32_t*>(window_of(g, rank) + place);
    for (int i = static_cast<int>(threadIdx.x); i < shape.ranks; i += blockDim.x) to[i] = p.told[i];
  }
  for (int id = static_cast<int>(threadIdx.x); id < shape.experts; id += blockDim.x) {
    const uint32_t expert = g.experts[id];
    auto* const to = reinterpret_cast<int32_t*>(window_of(g, expert_rank(expert)) + place) + shape.ranks;
    to[expert_slot(expert)] = p.told[shape.ranks + id];
  }
  __syncthreads();  // S4: what the fence of the words follows
  for (int i = static_cast<int>(threadIdx.x); i < shape.ranks + shape.experts; i += blockDim.x) p.told[i] = 0;
  if (threadIdx.x < 32) publish_words(g, step, Mode::kCounts, [](int) { return 0; });
}

// Waits for all ranks' counts. By a block; all threads learn whether they came.
__device__ bool await_counts(const CountsParams& p, const Step& step) {
  bool good = true;
  for (int i = static_cast<int>(threadIdx.x); i < p.group.map.shape().ranks; i += blockDim.x) {
    const Source source = await_source(p.group, step, i, Look::kWord, true);
    if (source.error == twTimeout) {
      report_failure(p.group, step, twTimeout, i, source.word);
    } else {
      report_source(p.group, step, i, source);
    }
    good &= source.error == twSuccess;
  }
  return __syncthreads_and(good) != 0;
}

// Rows for one rank, from each: where they begin, and whether there is room. By one thread for each rank.
__device__ void place_rank(const CountsParams& p, const Step& step, int to, unsigned long long* worst) {
  const GroupView& g = p.group;
  const Shape& shape = g.map.shape();
  int64_t row = 0;
  int64_t wanted = 0;
  for (int from = 0; from < shape.ranks; ++from) {
    const auto* const told =
        reinterpret_cast<const int32_t*>(window_of(g, g.me) + g.map.counts(step.lane, step.bank(), from));
    auto rows = static_cast<int32_t>(load_fresh<uint32_t>(told + to));
    wanted += rows;
    if (p.drop) rows = static_cast<int32_t>(min(static_cast<int64_t>(rows), shape.recv_rows - row));
    p.handle.sent_rows[static_cast<int64_t>(from) * shape.ranks + to] = rows;
    if (from == g.me) p.handle.begin[to] = row;
    if (from == g.me) p.handle.send_counts[to] = rows;
    if (to == g.me) p.handle.source[from] = row;
    row += rows;
  }
  if (to == g.me) p.handle.source[shape.ranks] = row;
  // The first rank that has too little room: its number above, how many rows below.
  if (wanted > shape.recv_rows) {
    atomicMin(worst, static_cast<unsigned long long>(to) << 40 | static_cast<unsigned long long>(wanted));
  }
}

// No rank sends anything: the same on all, as all have the same counts.
__device__ void send_nothing(const CountsParams& p) {
  const Shape& shape = p.group.map.shape();
  for (int i = static_cast<int>(threadIdx.x); i < shape.ranks * shape.ranks; i += blockDim.x) p.handle.sent_rows[i] = 0;
  for (int i = static_cast<int>(threadIdx.x); i <= shape.ranks; i += blockDim.x) {
    p.handle.source[i] = 0;
    if (i < shape.ranks) p.handle.begin[i] = p.handle.send_counts[i] = 0;
  }
  for (int i = static_cast<int>(threadIdx.x); i < p.group.local_experts; i += blockDim.x) p.handle.experts[i] = 0;
}

// Rows of each local expert; then, by one thread, where each begins in a grouped layout. Rows that a receiver has no
// room for are counted too, as on the host: which they are is known when rows have come.
__device__ void count_local(const CountsParams& p, const Step& step) {
  const GroupView& g = p.group;
  const Shape& shape = g.map.shape();
  for (int expert = static_cast<int>(threadIdx.x); expert < g.local_experts; expert += blockDim.x) {
    int32_t rows = 0;
    for (int from = 0; from < shape.ranks; ++from) {
      const auto* const told =
          reinterpret_cast<const int32_t*>(window_of(g, g.me) + g.map.counts(step.lane, step.bank(), from));
      rows += static_cast<int32_t>(load_fresh<uint32_t>(told + shape.ranks + expert));
    }
    p.handle.experts[expert] = rows;
  }
}
__device__ void place_experts(const CountsParams& p) {
  int64_t row = 0;
  for (int expert = 0; expert <= p.group.local_experts; ++expert) {
    p.handle.expert_begin[expert] = row;
    p.handle.offsets[expert] = static_cast<int32_t>(row);
    if (expert == p.group.local_experts) break;
    row += (p.handle.experts[expert] + p.alignment - 1) / p.alignment * p.alignment;
  }
}

__device__ void tell_host(const CountsParams& p, unsigned long long worst) {
  const Shape& shape = p.group.map.shape();
  for (int i = static_cast<int>(threadIdx.x); i < shape.ranks; i += blockDim.x) {
    p.on_host->received[i] = static_cast<int32_t>(p.handle.source[i + 1] - p.handle.source[i]);
  }
  if (threadIdx.x == 0) {
    p.on_host->overflow_rank = worst == ~0ull ? -1 : static_cast<int32_t>(worst >> 40);
    p.on_host->overflow_rows = static_cast<int64_t>(worst & ((1ull << 40) - 1));
    p.on_host->grouped_rows = p.handle.expert_begin[p.group.local_experts];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  fence_system();
  store_word(&p.on_host->serial, p.serial);
}

// What has come, into the handle. By a block.
__device__ void take_counts(const CountsParams& p, const Step& step, unsigned long long* worst) {
  const Shape& shape = p.group.map.shape();
  for (int to = static_cast<int>(threadIdx.x); to < shape.ranks; to += blockDim.x) place_rank(p, step, to, worst);
  count_local(p, step);
  __syncthreads();
  const bool refused = *worst != ~0ull && !p.drop;
  if (refused) send_nothing(p);
  if (threadIdx.x == 0) *p.handle.overflow = refused ? 1 : 0;
  __syncthreads();
  if (threadIdx.x == 0) place_experts(p);
  __syncthreads();
  if (refused && threadIdx.x == 0) {
    report_call(p.group, &p.group.pages[p.group.me]->call, [&](Report* to) {
      write_report(to, p.group, step, twRecvOverflow, static_cast<int>(*worst >> 40), 0, 0);
      volatile Report& report = *to;
      report.bound = static_cast<uint32_t>(shape.recv_rows);
      report.value = static_cast<int64_t>(*worst & ((1ull << 40) - 1));
    });
  }
  if (p.on_host != nullptr) tell_host(p, *worst);
}

__global__ void __launch_bounds__(kThreads) counts_kernel(const __grid_constant__ CountsParams p) {
  const GroupView& g = p.group;
  auto* const worst = shared_at<unsigned long long>(0);  // [1]
  const Step step{next_step(g, p.lane), p.lane, 0, twPhaseCounts};
  if (__syncthreads_or(is_sticky(g)) != 0) return;
  const uint32_t arrived = p.receive && threadIdx.x == 0 ? begin_end(g, step) : 0;
  if (threadIdx.x == 0 && blockIdx.x == 0) clear_tickets(g, step);
  bool last = blockIdx.x == 0;
  if (p.send) {
    const int stride = static_cast<int>(gridDim.x * blockDim.x);
    for (int token = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); token < p.tokens; token += stride) {
      count_token(p, step, token);
    }
    __syncthreads();
    last = __syncthreads_or(threadIdx.x == 0 && last_to_send(g, step, Roles::one(static_cast<int>(gridDim.x)))) != 0;
    if (last) tell_counts(p, step);
  }
  if (p.receive && last) {
    if (threadIdx.x == 0) *worst = ~0ull;
    const bool came = await_counts(p, step);
    if (came) {
      take_counts(p, step, worst);
    } else {  // nothing may go out by counts that are not known
      send_nothing(p);
      if (threadIdx.x == 0) *p.handle.overflow = 1;
      __syncthreads();
      if (threadIdx.x == 0) place_experts(p);
    }
  }
  if (p.receive && threadIdx.x == 0) end_step(g, step, arrived);
}

}  // namespace

int launch_counts(const CountsParams& params, int grid, void* stream) {
  return launch_kernel(counts_kernel, params, grid, sizeof(unsigned long long), false, stream);
}

int load_counts(const Shape&) { return allow_shared(reinterpret_cast<const void*>(counts_kernel), 0); }

}  // namespace tw::nvlink
