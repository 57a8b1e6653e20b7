// Kernels for rows that go to each host once (launch/posts.h; layout/inbox_map.h). pack_kernel comes behind the kernel
// that has written blocks for each rank, and lays out a message for each other host that has several ranks: each row
// that any of them gets, once, and for each rank which of these rows are in its slots. (Where all ranks get all rows, a
// block is such a message.) post_kernel (step/post.cu) puts it to this rank's rail peer there, before the signal of
// that one. pull_kernel waits for that signal where it lies, at the rail peer, and copies this rank's rows to where a
// peer that puts straight would have put them: so whatever reads rows knows nothing of messages. gate_kernel tries
// whether a rank may read like that at all.
//
// Takes PostParams and GateParams, from the host alone; gives messages, rows in place, and a count of trials gone
// wrong.
//
// Which number a row has in its message is decided by whichever warp comes first. Nothing that is read later depends on
// it. (Numbers in the order of tokens would need a count of them before the first row moves.)
//
// What breaks if this changes: T2 (rows at a mate are read before this rank's next signal: the kernel is in its stream)
// and T5 (a signal that does not stand behind its message in one queue tells of rows that are not there).
#include <cuda_runtime.h>

#include "cuda/launch/launch.h"
#include "cuda/launch/loading.h"
#include "cuda/launch/posts.h"
#include "cuda/step/posted.cuh"
#include "cuda/transport/net.cuh"

namespace tw::cuda {
namespace {

constexpr int kPullThreads = 512;
constexpr int kPullWarps = kPullThreads / 32;
constexpr int kGateThreads = 256;

// The parts of a message in memory.
struct Message {
  std::byte* at;
  __device__ uint32_t& tokens() const { return *reinterpret_cast<uint32_t*>(at); }
  __device__ uint32_t* list(int rail, uint32_t tokens) const {
    return reinterpret_cast<uint32_t*>(at + InboxMap::kHead) + static_cast<uint64_t>(rail) * tokens;
  }
};

__device__ Message outgoing(const HostRows& once, int bank, int message) {
  return {once.at + message_here(once, bank, message)};
}
__device__ Message incoming(const HostRows& once, int bank, const RankRoute& from) {
  return {once.near.begins[from.keeper] + once.near.offset + message_there(once, bank, from.list)};
}

// One of a token's destinations, as a thread knows it.
struct Way {
  Destination to{};
  RankRoute route{-1, 0, -1, 0};
};

// A warp's token: thread i has destinations i and i + 32.
struct SentToken {
  static constexpr int kEach = 2;
  static_assert(kEach * 32 >= TW_MAX_TOP_K);
  Way ways[kEach];

  __device__ SentToken(const PostParams& p, int bank, int token) {
    const auto fan = static_cast<int>(load_fresh<uint32_t>(p.sent.fan + token));
    for (int i = 0; i < kEach; ++i) {
      const int at = lane() + 32 * i;
      if (at >= fan) continue;
      Way& way = ways[i];
      way.to = load_both(p.sent.destinations + static_cast<int64_t>(token) * p.sent.fan_out + at);
      // What the receiver has no room for goes nowhere.
      if (way.to.slot < static_cast<int>(told_of(p.group, p.signals, bank, way.to.rank).n))
        way.route = p.once.ranks[way.to.rank];
    }
  }
  // Of the threads that have a destination for which is(way): bits of destination i, then of i + 32.
  template <class Is>
  __device__ uint64_t ballot(Is&& is) const {
    return __ballot_sync(~0u, is(ways[0])) | static_cast<uint64_t>(__ballot_sync(~0u, is(ways[1]))) << 32;
  }
  __device__ int from(int which, int first, int second) const {
    return __shfl_sync(~0u, which < 32 ? first : second, which % 32);
  }
};

// Writes a row of a token into a message; by a warp. `lead`: one of the token's destinations there.
__device__ void pack_row(const PostParams& p, const SentToken& token, int bank, int message, int lead) {
  const Message to = outgoing(p.once, bank, message);
  uint32_t row = lane() == 0 ? atomicAdd(&p.once.rows[message], 1) : 0;
  row = __shfl_sync(~0u, row, 0);
  for (const Way& way : token.ways) {
    if (way.route.message != message) continue;
    to.list(way.route.rail, static_cast<uint32_t>(p.sent.tokens))[way.to.slot] = row;
  }
  const int rank = token.from(lead, token.ways[0].to.rank, token.ways[1].to.rank);
  const int slot = token.from(lead, token.ways[0].to.slot, token.ways[1].to.slot);
  for (int i = 0; i < p.count; ++i) {
    const PostRegion& region = p.regions[i];
    if (region.in_message == 0) continue;
    const std::byte* const from = region.at + block_here(region, bank, rank) + region.row * static_cast<uint64_t>(slot);
    copy_bytes(from, to.at + region.in_message + region.row * row, region.row, static_cast<uint64_t>(lane()), 32);
  }
}

__global__ void __launch_bounds__(kPullThreads) pack_kernel(const __grid_constant__ PostParams p) {
  const GroupView& g = p.group;
  const uint64_t number = next_step(g, p.channel);
  const int bank = bank_of(static_cast<uint32_t>(number));
  const Signal told = told_of(g, p.signals, bank, g.me);
  if (__syncthreads_or(is_sticky(g) || !is_made(told, number) || !brings(told.mode)) != 0) return;
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < p.once.others; i += kPullThreads) {
      outgoing(p.once, bank, i).tokens() = static_cast<uint32_t>(p.sent.tokens);
    }
  }
  const auto warps = static_cast<int>(gridDim.x) * kPullWarps;
  for (int t = static_cast<int>(blockIdx.x) * kPullWarps + static_cast<int>(threadIdx.x) / 32; t < p.sent.tokens;
       t += warps) {
    const SentToken token(p, bank, t);
    uint64_t left = token.ballot([](const Way& way) { return way.route.message >= 0; });
    while (left != 0) {
      const int lead = __ffsll(static_cast<long long>(left)) - 1;
      const int message = token.from(lead, token.ways[0].route.message, token.ways[1].route.message);
      pack_row(p, token, bank, message, lead);
      left &= ~token.ballot([&](const Way& way) { return way.route.message == message; });
    }
  }
}

// Waits for a source's signal to this rank, and if it brings rows for that to their keeper; by one thread. False where
// there are none, or nothing comes any more, which has been reported. What else is wrong the kernel behind finds.
__device__ bool await_message(const GroupView& g, const PostSignals& signals, const Step& step, int rank, int keeper) {
  const Source source = await_source(g, step, rank, Look::kSignal, true);
  const Signal told = unpack(source.signal);
  twResult_t error = source.error == twTimeout || source.error == twPeerAborted ? source.error : twSuccess;
  if (error == twSuccess && (!brings(told.mode) || told.n == 0)) return false;
  int late = rank;
  uint64_t seen = source.signal;
  if (error == twSuccess) {
    const std::byte* const word = signals.near.begins[keeper] + signals.near.offset +
                                  kSignalStride * static_cast<uint64_t>(g.map.shape().ranks * step.bank() + rank);
    error = await_word(g, Patience(g, true), word,
                       [&](uint64_t signal) { return reached(unpack(signal).step, step.low()); });
    // The source has told this rank in the same moment, so it is the keeper's network that stands.
    if (error != twSuccess) late = keeper, seen = load_word(word);
  }
  if (error == twTimeout) report_failure(g, step, twTimeout, late, seen);
  if (error == twPeerAborted) report_stopped(g, step, late, seen);
  return error == twSuccess;
}

// Takes a part of a source's rows, by a block.
__device__ void pull_from(const PostParams& p, const Step& step, int rank, const RankRoute& route, int part) {
  const GroupView& g = p.group;
  const Signal own = told_of(g, p.signals, step.bank(), g.me);  // who refuses wants nothing
  const bool wants = threadIdx.x == 0 && !is_sticky(g) && is_made(own, step.number) && brings(own.mode);
  if (__syncthreads_or(wants && await_message(g, p.signals, step, rank, route.keeper)) == 0) return;
  const std::byte* const signal = window_of(g, g.me) + g.map.signal(p.channel, step.bank(), rank);
  const Message message = incoming(p.once, step.bank(), route);
  // A message of another call, whose bound differs, is laid out otherwise. The kernel behind finds that out; here
  // nothing is read or written beyond what there is.
  const auto most = static_cast<uint32_t>(p.once.bound);
  const uint32_t tokens = p.once.all != 0 ? most : min(load_fresh<uint32_t>(&message.tokens()), most);
  const auto rows = static_cast<int>(min(unpack(load_word(signal)).n, tokens));
  const uint32_t* const list = message.list(p.once.ranks[g.me].rail, tokens);
  for (int slot = part * kPullWarps + static_cast<int>(threadIdx.x) / 32; slot < rows; slot += p.parts * kPullWarps) {
    const uint32_t row = p.once.all != 0 ? static_cast<uint32_t>(slot) : load_fresh<uint32_t>(list + slot);
    for (int i = 0; i < p.count && row < most; ++i) {
      const PostRegion& region = p.regions[i];
      if (region.in_message == 0) continue;
      std::byte* const to = region.near.begins[g.me] + region.near.offset + block_there(region, step.bank(), rank) +
                            region.row * static_cast<uint64_t>(slot);
      copy_bytes(message.at + region.in_message + region.row * row, to, region.row, static_cast<uint64_t>(lane()), 32);
    }
  }
}

// Blocks take the parts of all sources whose rows come by messages, by turns.
__global__ void __launch_bounds__(kPullThreads) pull_kernel(const __grid_constant__ PostParams p) {
  const GroupView& g = p.group;
  const Step step{next_step(g, p.channel), p.channel, 0, p.phase};
  const int ranks = g.map.shape().ranks;
  int number = 0;  // of a part
  for (int i = 1; i < ranks; ++i) {
    const int rank = (g.me + i) % ranks;
    const RankRoute route = p.once.ranks[rank];
    for (int part = 0; part < p.parts && route.keeper >= 0; ++part) {
      if (number++ % static_cast<int>(gridDim.x) == static_cast<int>(blockIdx.x)) pull_from(p, step, rank, route, part);
    }
  }
}

// The word that a source writes at a place of a trial.
__device__ uint64_t tried(int rank, int trial, uint64_t at) {
  return (static_cast<uint64_t>(rank + 1) << 40 | static_cast<uint64_t>(trial + 1) << 32) + at;
}

// By a block for each rank. That of this rank puts trials into the messages of its rail peers, and adds one to their
// words for each; the others each watch what a source puts at its keeper.
__global__ void __launch_bounds__(kGateThreads) gate_kernel(const __grid_constant__ GateParams p) {
  const auto rank = static_cast<int>(blockIdx.x);
  const uint64_t words = p.bytes / sizeof(uint64_t);
  if (rank == p.me) {
    for (int m = 0; m < p.once.others; ++m) {
      auto* const to = reinterpret_cast<uint64_t*>(outgoing(p.once, 0, m).at);
      for (uint64_t i = threadIdx.x; i < kGateTrials * words; i += kGateThreads) {
        to[i] = tried(rank, static_cast<int>(i / words), i % words);
      }
    }
    fence_system();
    __syncthreads();
    for (int trial = 0; trial < kGateTrials && threadIdx.x == 0; ++trial) {
      for (int m = 0; m < p.once.others; ++m) {
        const MessageRoute to = p.once.messages[m];
        if (to.peer < 0) continue;
        const uint64_t begin = p.bytes * static_cast<uint64_t>(trial);
        net_put(p.net, 0, to.peer, beyond(p.once.to, message_there(p.once, 0, to.list) + begin),
                beyond(p.once.from, message_here(p.once, 0, m) + begin), p.bytes);
        net_add(p.net, 0, to.peer, beyond(p.words, InboxMap::kAlignment * static_cast<uint64_t>(to.list)), 1);
      }
    }
    return;
  }
  const RankRoute route = p.once.ranks[rank];
  if (route.keeper < 0) return;
  const std::byte* const word = p.near_words.begins[route.keeper] + p.near_words.offset +
                                InboxMap::kAlignment * static_cast<uint64_t>(route.list);
  const auto* const seen = reinterpret_cast<const uint64_t*>(incoming(p.once, 0, route).at);
  const uint64_t start = now_ns();
  for (int trial = 0; trial < kGateTrials; ++trial) {
    bool came = false;
    while (threadIdx.x == 0 && !came && now_ns() - start < p.timeout_ns) {
      came = load_acquire(word) > static_cast<uint64_t>(trial);
    }
    bool wrong = __syncthreads_or(came) == 0;
    for (uint64_t i = threadIdx.x; i < words && !wrong; i += kGateThreads) {
      wrong = load_fresh<unsigned long long>(seen + words * static_cast<uint64_t>(trial) + i) != tried(rank, trial, i);
    }
    if (__syncthreads_or(wrong) != 0 && threadIdx.x == 0) atomicAdd(p.wrong, 1);
  }
}

}  // namespace

int launch_pack(const PostParams& params, int blocks, void* stream) {
  const int grid = max(1, min(blocks, (params.sent.tokens + kPullWarps - 1) / kPullWarps));
  return launch_kernel(pack_kernel, params, grid, 0, false, stream, kPullThreads);
}
int launch_pull(const PostParams& params, int blocks, void* stream) {
  return launch_kernel(pull_kernel, params, blocks, 0, false, stream, kPullThreads);
}
int launch_gate(const GateParams& params, void* stream) {
  return launch_kernel(gate_kernel, params, params.ranks, 0, false, stream, kGateThreads);
}

int load_pulls() {
  return load_all({reinterpret_cast<const void*>(pack_kernel), reinterpret_cast<const void*>(pull_kernel),
                   reinterpret_cast<const void*>(gate_kernel)});
}

}  // namespace tw::cuda
