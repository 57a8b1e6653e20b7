// What every combine does beside its rows: counts of rows, the step's signals, and what it leaves when it has failed.
//
// Takes a Sum; can_combine must be asked before anything is sent. Gives the end of the step in device memory, or NaN
// for all tokens.
//
// What breaks if this changes: S2 (await_signals waits for every rank), S3 (publish_last follows the last read of the
// window), S6, and that outputs are safe after an error (docs/PROTOCOL.md, Errors).
#pragma once

#include "cuda/combine/chunks.cuh"
#include "cuda/combine/sums.cuh"

namespace tw::cuda {

// How many rows came from a rank in the dispatch, and go back to it; and how many went to it, and come back.
struct Counts {
  uint32_t received;
  uint32_t sent;
  uint32_t first;       // exact layouts: the row at which those that came begin
  uint32_t sent_first;  // the slot at which those that went begin
};
// `kPackets`: all rows of the call go as packets, so its layout is not exact.
template <bool kPackets = false>
__device__ inline Counts load_counts(const Sum& s, int rank) {
  if (rank >= s.ranks()) return {};
  const HandleView& handle = s.p.handle;
  Counts counts{load_fresh<uint32_t>(handle.counts + rank), load_fresh<uint32_t>(handle.send_counts + rank), 0, 0};
  if (!kPackets && s.p.group.map.shape().exact()) counts.first = load_fresh<uint32_t>(handle.source + rank);
  if (!kPackets && s.p.part.counts != nullptr) {
    const int32_t* const received = s.p.part.counts + 2 * s.p.part.number * s.ranks() + rank;
    const int32_t* const sent = received + s.ranks();
    const uint32_t before = load_fresh<uint32_t>(received);
    counts.received = load_fresh<uint32_t>(received + 2 * s.ranks()) - before;
    counts.first += before;
    counts.sent_first = load_fresh<uint32_t>(sent);
    counts.sent = load_fresh<uint32_t>(sent + 2 * s.ranks()) - counts.sent_first;
  }
  return counts;
}
__device__ inline void bring_counts_near(const CombineParams& p, int rank) {
  prefetch(p.handle.counts + rank);
  prefetch(p.handle.send_counts + rank);
  if (p.group.map.shape().exact()) prefetch(p.handle.source + rank);
}
// Keeps those of all ranks for the block, before a barrier. `counts`: for rank threadIdx.x.
template <bool kPackets = false>
__device__ inline void keep_counts(const Sum& s, Counts counts) {
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < s.ranks(); i += kThreads) {
    s.counts()[i] = static_cast<int>(counts.received);
    s.sent_rows()[i] = static_cast<int>(counts.sent);
    shared_at<int32_t>(s.p.at.first)[i] = static_cast<int32_t>(counts.first);
    if (!kPackets) s.sent_first()[i] = static_cast<int32_t>(counts.sent_first);
    counts = load_counts<kPackets>(s, i + kThreads);
  }
}

// Whether there is anything to combine. Nobody answers a dispatch that failed: all ranks have seen it fail, and all
// skip this step. So they do with the parts behind one that failed, which was the channel's last step.
template <bool kPackets = false>
__device__ inline bool can_combine(const CombineParams& p) {
  const int32_t status = *reinterpret_cast<volatile int32_t*>(p.handle.status);
  const bool good = !is_sticky(p.group) & (status == twSuccess);  // both are on their way at once
  if (kPackets || p.part.number == 0) return good;
  const volatile ChannelState& channel = p.group.channels[p.channel];
  return good && channel.failed != channel.step;
}

// Publishes the step's signal before the rows go: every row has its chunk's signal or certifies itself. The step's
// signal also says that nothing of the other bank is read any more (S3), which is so from the start where rows lie
// outside the window. By a warp.
__device__ inline void publish_first(const Sum& s) {
#pragma unroll 1
  for (int i = lane(); i < s.ranks(); i += 32) {
    publish_signal(s.p.group, s.step, i, Mode::kCombine, s.counts()[i], 0);
  }
}

// Publishes from the last block whose rows are sent, when all have been read and written (S3).
__device__ inline void publish_last(const Sum& s) {
  meet();
  if (threadIdx.x >= 32) return;
  const int last = threadIdx.x == 0 && last_to_send(s.p.group, s.step, s.p.roles);
  if (!__shfl_sync(~0u, last, 0)) return;
  __syncwarp();  // all threads have now synchronised with what thread 0 has
  publish_signals(s.p.group, s.step, Mode::kCombine, [&](int rank) { return s.counts()[rank]; });
}

// Sends rows in chunks, by push(), and the step's signal before them or behind them. By a block that sends. S7: nobody
// here waits.
template <class Push>
__device__ inline void send_in_chunks(const Sum& s, Push&& push) {
  if (!s.p.late_signal && blockIdx.x == 0 && s.set() == 0) publish_first(s);
  push();
  if (s.p.late_signal) publish_last(s);
}

// Whether this block waits for the signals: the last block that sends, or where none sends the last.
__device__ inline bool concludes(const Sum& s) {
  return s.p.receive && blockIdx.x + 1 == static_cast<uint32_t>(s.p.roles.sending);
}
// Waits for every signal, by one warp (S2), and sees that every row that went out came back.
__device__ inline void await_signals(const Sum& s) {
  const GroupView& g = s.p.group;
  bool good = true;
#pragma unroll 1
  for (int i = lane(); i < s.ranks(); i += 32) {
    const int n = s.sent_rows()[i];
    if (await_usual(g, s.step, i, n)) continue;
    good &= await_signal(g, s.step, i, Look::kTakesPart, n, twCallMismatch).error == twSuccess;
  }
  if (!__all_sync(~0u, good) && lane() == 0) *s.failed() = 1;
}

// Writes NaN for all tokens, those of other parts too, by `threads` threads.
template <bool kPackets>
__device__ inline void spoil(const Sum& s, int thread, int threads) {
  const PartOfCombine& part = s.p.part;
  fill_nan(s.p, kPackets ? 0 : -part.first_token, kPackets ? s.p.tokens : part.all_tokens, thread, threads);
}

// Nothing was sent or summed: writes NaN, by the blocks that would have summed.
template <bool kPackets = false>
__device__ __noinline__ static void give_up(Sum s) {
  if (!s.sums()) return;
  const auto block = static_cast<int>(blockIdx.x - first_receiver(s.p.roles));
  spoil<kPackets>(s, block * kThreads + static_cast<int>(threadIdx.x), s.p.roles.receiving * kThreads);
}

// Begins a kernel that sends, and perhaps sums: gives the Sum its step, and the block its windows, counts and, where
// rows go in chunks, their gates. `whole`: all of the kernel's parameters. False if there is nothing to do: then the
// output is NaN, and the step has not ended; it will be another kernel's, unless the group is finished. By a block.
template <bool kInChunks, class Params>
__device__ inline bool begin_step(Sum* s, const Params& whole) {
  const CombineParams& p = s->p;
  const GroupView& g = p.group;
  const auto thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int i = thread; i < s->ranks(); i += kThreads) s->windows()[i] = target_of(g, i, p.send);
  if (thread == 0) *s->failed() = 0;
  if (kInChunks) begin_work(*s);
  warm(whole);
  await_earlier();
  const Counts counts = load_counts(*s, thread);
  s->step.number = next_step(g, p.channel);
  const bool good = can_combine(p);
  begin_at_bank(g, p.bank, &s->step.number);
  if (p.part.skips) ++s->step.number;
  keep_counts(*s, counts);
  bool usable = __syncthreads_and(good) != 0;  // threads that differ would wait for each other
  if (p.part.skips && p.send && usable) usable = skip_step(g, s->step);
  if (!usable) {
    if (p.receive) give_up(*s);
    return false;
  }
  if (p.send && thread == 0 && blockIdx.x == 0) say_sent(g, s->step);
  return true;
}

// Begins a kernel that sums what another has had sent: gives the Sum its step, and the block its counts. False if there
// is nothing to sum: the output is NaN then. By a block.
__device__ inline bool begin_sums(Sum* s) {
  const CombineParams& p = s->p;
  if (threadIdx.x == 0) *s->failed() = 0;
  const Counts counts = load_counts(*s, static_cast<int>(threadIdx.x));
  s->step.number = next_step(p.group, p.channel);
  const bool good = can_combine(p);
  begin_at_bank(p.group, p.bank, &s->step.number);
  if (p.part.skips) ++s->step.number;
  keep_counts(*s, counts);
  if (__syncthreads_and(good) != 0) return true;  // threads that differ would wait for each other
  give_up(*s);
  return false;
}

// Ends a kernel that receives. `arrived`: from begin_end, in thread 0.
template <bool kPackets = false>
__device__ inline void finish_combine(const Sum& s, uint32_t arrived) {
  finish_block(s.p.group, s.step, arrived, s.failed(), [&] {
    await_others(s.p.group, s.step);
    if (!kPackets && threadIdx.x == 0) s.p.group.channels[s.step.channel].failed = s.step.number;
    spoil<kPackets>(s, static_cast<int>(threadIdx.x), kThreads);
  });
}

// Does what is left of a step when a block has sent: lets it sum, waits for the step's signals, and ends it. `sums()`
// is called by all blocks, also by those that have no sums to make.
template <class Sums>
__device__ inline void conclude_step(const Sum& s, Sums&& sums) {
  uint32_t arrived = 0;
  if (s.p.receive && threadIdx.x == 0) arrived = begin_end(s.p.group, s.step);
  if (threadIdx.x == 0 && blockIdx.x == 0) clear_counters(s.p.group, s.step);
  sums();
  if (concludes(s) && s.set() == kWarps - 1) await_signals(s);
  if (s.p.receive) finish_combine(s, arrived);
}

}  // namespace tw::cuda
