// Kernels that post (launch/posts.h): what another kernel has written for each rank goes to its rank, and the signal
// behind it. To ranks of this host it is copied over NVLink; to others it is put by the network (transport/net.cuh),
// and the signal is a word to which the difference from the one before in its bank is added.
//
// Takes PostParams and PaceParams, from the host alone; gives what a kernel whose stores reach all windows would have
// left there: rows, note and signal of this rank, in that order (S4, T5).
//
// What breaks if this changes: T6 (tell is the one place where words are added), T5 (one thread posts all that goes to
// a rank), T2 and S2 (a step that is left out is told to all, and waited for).
#include <cuda_runtime.h>

#include "cuda/launch/launch.h"
#include "cuda/launch/loading.h"
#include "cuda/launch/posts.h"
#include "cuda/step/posted.cuh"
#include "cuda/step/waits.cuh"
#include "cuda/transport/net.cuh"

namespace tw::cuda {
namespace {

constexpr int kPostThreads = 512;
constexpr int kPaceThreads = 256;

// Tells a rank of a step: its note and rows signal, which lie behind the signal's own place, and then the
// signal. By one thread, which has ordered the rows before.
__device__ void tell(const GroupView& g, const NetView& net, const PostSignals& signals, int channel, int rank,
                     uint64_t signal) {
  const int bank = bank_of(unpack(signal).step);
  const int ranks = g.map.shape().ranks;
  const auto here = static_cast<uint64_t>(g.posts * bank) + kSignalStride * static_cast<uint64_t>(rank);
  const auto there = kSignalStride * static_cast<uint64_t>(ranks * bank + g.me);
  if (std::byte* const window = signals.near.begins[rank]; window != nullptr) {
    std::byte* const to = window + signals.near.offset + there;
    for (uint64_t at = kNoteOffset; at <= kRowsOffset; at += sizeof(uint64_t)) {
      put_word(to + at, load_word(signals.at + here + at));
    }
    fence_system();
    return put_word(to, signal);
  }
  const NetPlace to = beyond(signals.to, there);
  net_put(net, channel, rank, beyond(to, kNoteOffset), beyond(signals.from, here + kNoteOffset),
          kRowsOffset + sizeof(uint64_t) - kNoteOffset);
  uint64_t& told = signals.told[ranks * bank + rank];
  net_add(net, channel, rank, to, signal - told);
  told = signal;
}

// Puts a message to another host, to the rank that keeps it there, before that one's signal; by one thread. `told`:
// what that signal says.
__device__ void put_message(const PostParams& p, int bank, int message, const Signal& told) {
  const HostRows& once = p.once;
  const auto rows = static_cast<uint64_t>(once.all != 0 ? told.n : load_fresh<uint32_t>(&once.rows[message]));
  if (rows == 0) return;
  const MessageRoute& route = once.messages[message];
  const uint64_t here = message_here(once, bank, message);
  const uint64_t there = message_there(once, bank, route.list);
  const auto put = [&](uint64_t at, const NetPlace& from, uint64_t bytes) {
    net_put(p.net, p.channel, route.peer, beyond(once.to, there + at), from, bytes);
  };
  if (once.all == 0) {
    once.rows[message] = 0;  // for the next step's kernel
    const auto lists = static_cast<uint64_t>(p.served == Served::kOwners ? 1 : route.ranks);
    const uint64_t listed = lists * static_cast<uint64_t>(p.sent.tokens);
    put(0, beyond(once.from, here), InboxMap::kHead + sizeof(uint32_t) * listed);
  }
  for (int i = 0; i < p.count; ++i) {
    const PostRegion& region = p.regions[i];
    if (region.in_message == 0) continue;
    put(region.in_message,
        once.all != 0 ? beyond(region.from, block_here(region, bank, route.peer))
                      : beyond(once.from, here + region.in_message),
        region.row * rows);
  }
}

// A block or several for each rank. Blocks that have nothing to do for it end at once.
__global__ void __launch_bounds__(kPostThreads) post_kernel(const __grid_constant__ PostParams p) {
  const GroupView& g = p.group;
  const int rank = (g.me + 1 + static_cast<int>(blockIdx.x) / p.parts) % g.map.shape().ranks;
  const int part = static_cast<int>(blockIdx.x) % p.parts;
  const bool near = p.signals.near.begins[rank] != nullptr;
  const int message = p.once.ranks != nullptr ? p.once.ranks[rank].message : -1;
  const bool keeps = message >= 0 && p.once.messages[message].peer == rank;
  if ((!near && part != 0) || (p.served != Served::kAll && keeps != (p.served == Served::kOwners))) return;
  const uint64_t number = next_step(g, p.channel);
  const auto bank = static_cast<int>(number & 1);
  const Signal told = told_of(g, p.signals, bank, rank);
  if (__syncthreads_or(is_sticky(g) || !is_made(told, number)) != 0) return;
  const bool served = rank >= p.first && rank < p.first + p.ranks;
  if (keeps && p.served != Served::kOthers && brings(told.mode) && threadIdx.x == 0)
    put_message(p, bank, message, told);
  for (int i = 0; i < p.count; ++i) {
    const PostRegion& region = p.regions[i];
    if (message >= 0 && region.in_message != 0) continue;
    const bool counts = i == p.loads;  // told by those that refuse too
    const uint64_t bytes = region.row != 0 ? min(region.row * told.n, region.block) : region.block;
    if (bytes == 0 || (!counts && (!served || !brings(told.mode)))) continue;
    const uint64_t here = block_here(region, bank, rank);
    // There load statistics are in the banks of their dispatch, of which the kernel before has told.
    const auto of_dispatch = counts ? load_fresh<uint32_t>(&g.loads.numbers[p.channel].told) : 0;
    const uint64_t there =
        block_there(region, counts ? static_cast<int>(of_dispatch % WindowMap::kLoadsBanks) : bank, g.me);
    if (near) {
      std::byte* const to = region.near.begins[rank] + region.near.offset + there;
      copy_bytes(region.at + here, to, bytes, static_cast<uint64_t>(part) * kPostThreads + threadIdx.x,
                 static_cast<uint64_t>(p.parts) * kPostThreads);
    } else if (threadIdx.x == 0) {
      net_put(p.net, p.channel, rank, beyond(region.to, there), beyond(region.from, here), bytes);
    }
  }
  if (!near) {
    if (threadIdx.x == 0) tell(g, p.net, p.signals, p.channel, rank, pack(told));
    return;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  fence_system();
  if (arrive(&p.arrived[rank]) != static_cast<uint32_t>(p.parts) - 1) return;
  p.arrived[rank] = 0;
  tell(g, p.net, p.signals, p.channel, rank, pack(told));
  if (rank == g.me) atomicAdd(&g.pages[g.me]->posted, 1);  // T9
}

// Leaves a step out where the one that comes would have the other bank than the caller's view (device/wait.cuh,
// skip_step). By one block.
__global__ void __launch_bounds__(kPaceThreads) pace_kernel(const __grid_constant__ PaceParams p) {
  const GroupView& g = p.group;
  const Step step{next_step(g, p.channel), p.channel, 0, p.phase};
  if (is_sticky(g) || step.bank() == p.bank) return;
  const uint64_t signal = pack(Signal{step.low(), Mode::kSkip, 0});
  for (int rank = threadIdx.x; rank < g.map.shape().ranks; rank += kPaceThreads) {
    tell(g, p.net, p.signals, p.channel, rank, signal);
  }
  const uint32_t arrived = threadIdx.x == 0 ? begin_end(g, step) : 0;
  if (threadIdx.x == 0) clear_counters(g, step);
  if (await_skip(g, step) && threadIdx.x == 0) end_step(g, step, arrived);
}

// Waits until all ranks' signals of the step are there, before a kernel that takes it for granted that rows are. What
// the signals say, that one judges.
__global__ void __launch_bounds__(kPaceThreads) await_signals_kernel(const __grid_constant__ PaceParams p) {
  const GroupView& g = p.group;
  const Step step{next_step(g, p.channel), p.channel, 0, p.phase};
  const Signal own = told_of(g, p.signals, step.bank(), g.me);
  if (is_sticky(g) || !is_made(own, step.number)) return;
  // Whoever folds for this rank waits for its mates, so it is to blame only if these have told of the step.
  const auto folds = [&](int rank) {
    return p.local > 0 && rank / p.local != g.me / p.local && rank % p.local == g.me % p.local;
  };
  await_ranks(g, step, Look::kSignal, [&](int rank) { return !folds(rank); });
  if (p.local > 0) await_ranks(g, step, Look::kSignal, folds);
}

}  // namespace

int launch_post(const PostParams& params, void* stream) {
  return launch_kernel(post_kernel, params, params.parts * params.group.map.shape().ranks, 0, false, stream,
                       kPostThreads);
}
int launch_pace(const PaceParams& params, void* stream) {
  return launch_kernel(pace_kernel, params, 1, 0, false, stream, kPaceThreads);
}
int launch_await_signals(const PaceParams& params, void* stream) {
  return launch_kernel(await_signals_kernel, params, 1, 0, false, stream, kPaceThreads);
}

int load_posts() {
  return load_all({reinterpret_cast<const void*>(post_kernel), reinterpret_cast<const void*>(pace_kernel),
                   reinterpret_cast<const void*>(await_signals_kernel)});
}

}  // namespace tw::cuda
