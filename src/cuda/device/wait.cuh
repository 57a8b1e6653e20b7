// Waiting, and what ends it (S6): the signal comes, or time is up, or somebody has given the group up. Also how a step
// begins and ends on a device, how signals are published and judged, and how errors are reported.
//
// Takes a GroupView and the Step; every wait gives either what came or an error, and every error is reported once.
//
// What breaks if this changes: S2 (end_step, when the next step may begin), S4 (publish_signals on the writer's side,
// saw and await_rows on the reader's), S5 (clear_counters), S6 (Patience), S8 (skip_step, where all blocks wait).
#pragma once

#include "cuda/device/block.cuh"
#include "cuda/transport/target.cuh"
#include "exchange/notes.h"
#include "exchange/signals.h"

namespace tw::cuda {

// What a rank knows of the step that it is in.
struct Step {
  uint64_t number;
  int32_t channel;
  int32_t bound;
  twPhase_t phase;
  uint32_t digest = 0;      // digest of what all ranks must have alike, beside the bound (exchange/notes.h)
  int32_t note_bits = 29;   // bits of a number of rows in a dispatch's note
  int32_t has_offsets = 0;  // 1 in a dispatch whose rows have receive offsets; noted beside its bound

  __device__ int bank() const { return static_cast<int>(number & 1); }
  __device__ uint32_t low() const { return static_cast<uint32_t>(number); }
  // Gives what this rank notes. `plain`: in a dispatch, the number of Simple rows.
  __device__ uint64_t note(int plain) const {
    return phase == twPhaseDispatch ? dispatch_note(full_bound(), plain, digest, note_bits)
                                    : collective_note(bound, digest);
  }
  __device__ uint32_t full_bound() const { return with_receive_offsets(bound, has_offsets != 0); }
  __device__ int plain_of(uint64_t note) const {
    return static_cast<int>(noted(static_cast<uint32_t>(note >> 32), note_bits));
  }
  __device__ uint32_t bound_of(uint64_t note) const {
    return phase == twPhaseDispatch ? noted_bound(note, note_bits) : static_cast<uint32_t>(note);
  }
  // Whether a note comes from a rank that makes the same call.
  __device__ bool matches(uint64_t seen) const { return seen == note(plain_of(seen)); }
};

__device__ inline Mode mode_of(twPhase_t phase) {
  if (phase == twPhaseGather) return Mode::kGather;
  if (phase == twPhaseReduce) return Mode::kReduce;
  return phase == twPhaseCounts ? Mode::kCounts : Mode::kCombine;
}

// Whether a dispatch's signal of this mode may come before its rows.
__device__ inline bool has_packets(Mode mode) { return mode == Mode::kDispatchPackets || mode == Mode::kDispatchRows; }

// Gives the first step of a kernel on a channel: the one after the last that ended. A kernel loads before this whatever
// it can load without knowing the step, so that all of it is on its way at once: what depends on the step waits for it.
__device__ inline uint64_t next_step(const GroupView& g, int channel) {
  keep_order();  // otherwise the compiler puts it first
  return *reinterpret_cast<const volatile uint64_t*>(&g.channels[channel].step) + 1;
}
// Whether the group is finished: then a kernel writes nothing to peers any more.
__device__ inline bool is_sticky(const GroupView& g) {
  return *reinterpret_cast<const volatile uint32_t*>(&g.state->sticky) != 0;
}

// Begins the host's watch; by one thread of the kernel that sends. `refused`: nothing is known of the peers' call.
// `rows`: what a dispatch's rows consist of.
__device__ inline void say_sent(const GroupView& g, const Step& step, bool refused = false, uint32_t rows = 0) {
  if (!tells_host(g)) return;
  StagedChannel& to = g.pages[g.me]->staged[step.channel];
  *reinterpret_cast<volatile int32_t*>(&to.phase) = step.phase;
  // The digest has only what makes blocks differ in size. A digest of maps is not in it, nor the room of an exchange of
  // counts: calls that differ in these end, and tell of it then.
  const bool counting = step.phase == twPhaseCounts;
  const bool of_map = step.phase == twPhaseDispatch || counting;
  const auto bound = static_cast<uint32_t>(counting ? 0 : step.bound);
  const uint64_t blocks = collective_note(bound, of_map ? rows : step.digest);
  const uint32_t call = mix_digest(static_cast<uint32_t>(step.phase), blocks);
  const uint64_t known = refused ? 0 : max(call, 1u);
  store_half(&to.patience, static_cast<uint32_t>(g.timeout_ns / 1000000));
  store_word(&to.sent, known << 32 | step.low());
  if (g.waits) store_half(&to.waits, step.low());
}

// A step ends in device memory when every block of the kernel has read the number of the step before. Each block says
// so, by one thread, and looks at the reply much later. The counter counts down (device/ptx.cuh, draw).
__device__ inline uint32_t begin_end(const GroupView& g, const Step& step) {
  return 0 - atomicAdd(&g.channels[step.channel].arrived, ~0u);
}
// Does the same by the one thread that `says` it; nobody waits for the reply. It is for kernels where all rows go as
// packets: with one token it saves 0.1 us, but a bulk combine of 4096 tokens took 183 us instead of 176.
__device__ inline uint32_t begin_end(const GroupView& g, const Step& step, bool says) {
  return draw(&g.channels[step.channel].arrived, says);
}
// Ends the step (S2), if this block was the last to say so. `before`: from begin_end.
__device__ inline void end_step(const GroupView& g, const Step& step, uint32_t before) {
  if (before != gridDim.x - 1) return;
  g.channels[step.channel].arrived = 0;
  g.channels[step.channel].step = step.number;
  if (tells_host(g)) store_half(&g.pages[g.me]->staged[step.channel].ended, step.low());
}

// Whichever warp is free draws work, because groups of SMs share the way to the link, and some sent twice as fast as
// others. A work counter serves every fourth step. A kernel clears the counters of the two steps after its own (two, as
// a dispatch may skip one): that follows their last use and precedes the next in stream order (S5).
__device__ inline uint32_t* work_counters(const GroupView& g, const Step& step) {
  return &g.channels[step.channel].work_counters[step.number % kWorkCounters];
}
__device__ inline uint32_t* marked(const GroupView& g, const Step& step) {
  return &g.channels[step.channel].marked[step.number % kWorkCounters];
}
__device__ inline uint32_t* sum_counters(const GroupView& g, const Step& step) {
  return &g.channels[step.channel].sums[step.number % kWorkCounters];
}
__device__ inline void clear_counters(const GroupView& g, const Step& step) {
  for (const int ahead : {1, 2}) {
    g.channels[step.channel].work_counters[(step.number + ahead) % kWorkCounters] = 0;
    g.channels[step.channel].sums[(step.number + ahead) % kWorkCounters] = 0;
    g.channels[step.channel].marked[(step.number + ahead) % kWorkCounters] = 0;
  }
}

// Called by one thread of each block that has sent: whether the block is the last of all (S4: the thread has
// synchronised with the others).
__device__ inline bool last_to_send(const GroupView& g, const Step& step, const Roles& roles) {
  uint32_t* const sent = &g.channels[step.channel].sent;
  if (arrive(sent) != static_cast<uint32_t>(roles.sending) - 1) return false;
  *sent = 0;
  return true;
}

__device__ inline std::byte* own_signal_at(const GroupView& g, const Step& step, int rank) {
  return signal_target(g, step.channel, step.bank(), rank);
}

// Says that this block has finished, in a place of its own. It waits for no reply and makes no fence, for which every
// kernel would pay: whoever acts on it does so after an error, and sleeps long enough for any store to arrive.
__device__ inline void say_done(const GroupView& g, const Step& step) {
  *reinterpret_cast<volatile uint32_t*>(&g.channels[step.channel].done[blockIdx.x]) = step.low();
}
// Waits for all other blocks of the kernel; only on the way of an error.
__device__ __noinline__ static void await_done(const GroupView& g, Step step) {
  constexpr int kMostLooks = 20000;  // 10 ms: a block that waits for tile after tile looks around once in 0.2 ms
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < gridDim.x; i += blockDim.x) {
    // In a finished group some blocks may have left at once.
#pragma unroll 1
    for (int look = 0; i != blockIdx.x && !(is_sticky(g) && look > kMostLooks); ++look) {
      if (*reinterpret_cast<volatile uint32_t*>(&g.channels[step.channel].done[i]) == step.low()) break;
      __nanosleep(500);
    }
  }
#pragma unroll 1
  for (int i = 0; i < 50; ++i) __nanosleep(1000);
  __threadfence();
  __syncthreads();
}

// Fills in a report; finish_report() makes it known, by its serial, behind a fence.
__device__ __noinline__ static void write_report(Report* report, const GroupView& g, Step step, twResult_t result,
                                                 int peer, uint64_t seen, uint32_t note) {
  volatile Report& to = *report;
  to.result = result;
  to.peer = peer;
  to.phase = step.phase;
  to.channel = step.channel;
  to.step = step.low();
  to.seen = static_cast<uint32_t>(seen >> 32);
  to.note = note;
  to.bound = step.full_bound();
  to.token = -1;
  to.k = -1;
  to.value = 0;
  to.group = reinterpret_cast<uintptr_t>(g.experts);
}

__device__ inline void finish_report(Report* report) {
  fence_system();
  store_half(&report->serial, load_half(&report->serial) + 1);
}

// Makes an error the group's: tells it to this rank's host, and to the peers, with the culprit, so that they do not
// blame each other.
__device__ __noinline__ static void report_failure(const GroupView& g, Step step, twResult_t result, int peer,
                                                   uint64_t seen) {
  store_half(&g.state->sticky, 1);
  if (atomicExch(&g.state->reported, 1) != 0) return;
  ControlPage* const own = g.pages[g.me];
  write_report(&own->failure, g, step, result, peer, seen, 0);
  finish_report(&own->failure);
  const uint64_t signal =
      pack(AbortSignal{static_cast<uint32_t>(result), static_cast<uint32_t>(g.me), static_cast<uint32_t>(peer), false});
#pragma unroll 1
  for (int rank = 0; rank < g.map.shape().ranks; ++rank) {
    store_word(&g.pages[rank]->abort[g.me], signal);
    fence_system();
    store_half(&g.pages[rank]->stop, 1);
  }
}

// Tells this rank's host what it waited for, where somebody else has found the error.
__device__ __noinline__ static void report_stopped(const GroupView& g, Step step, int peer, uint64_t seen) {
  if (g.no_wait || atomicExch(&g.state->stopped, 1) != 0) return;
  Report* const stopped = &g.pages[g.me]->stopped;
  write_report(stopped, g, step, twPeerAborted, peer, seen, 0);
  finish_report(stopped);
}

// Reports what ended one call and leaves the group usable.
template <class Write>
__device__ inline void report_call(const GroupView& g, Report* report, Write&& write) {
#pragma unroll 1
  while (atomicCAS(&g.state->lock, 0, 1) != 0) __nanosleep(200);
  write(report);
  finish_report(report);
  atomicExch(&g.state->lock, 0);
}

// How a wait stands. Functions return it by value, because a variable that a called function takes by reference lives
// in memory everywhere around the call.
enum class Outlook { kOpen, kOver, kLate };

// Looks around, in a wait that began at `start`: at the sticky flag, the clock and, if it looks far, the host's memory.
__device__ __noinline__ static Outlook look_around(const GroupView& g, uint64_t start, bool looks_far) {
  if (is_sticky(g)) return Outlook::kOver;
  if (looks_far && load_half(&g.pages[g.me]->stop) != 0) {
    store_half(&g.state->sticky, 1);
    return Outlook::kOver;
  }
  return now_ns() - start >= g.timeout_ns ? Outlook::kLate : Outlook::kOpen;
}

// Decides how long a wait goes on. One look in kLooks is followed by a look around. The last of a kernel's blocks then
// looks into the host's memory too, and tells the others. (So does the block before it, if the last one may be that
// which gathers load statistics and waits for nobody.) The other blocks look there rarely, as thousands of waiting
// warps would choke the way.
class Patience {
 public:
  __device__ explicit Patience(const GroupView& g, bool far = false) : g_(g), far_(far) {}

  // Called after each vain look. True when the group is finished, or when time is up: *late says which.
  __device__ bool over(bool* late) {
    *late = false;
    if (g_.no_wait) return true;
    if (++looks_ % kLooks != 0) return false;
    if (start_ == 0) start_ = now_ns();
    const bool looks_far =
        far_ || blockIdx.x + 1 + (g_.loads.averages != nullptr ? 1 : 0) >= gridDim.x || looks_ % (64 * kLooks) == 0;
    const Outlook outlook = look_around(g_, start_, looks_far);
    *late = outlook == Outlook::kLate;
    return outlook != Outlook::kOpen;
  }
  // Whether the last call looked around.
  __device__ bool looked() const { return looks_ % kLooks == 0; }

 private:
  static constexpr uint32_t kLooks = 256;

  const GroupView& g_;
  const bool far_;
  uint64_t start_ = 0;
  uint32_t looks_ = 0;
};

// What a source's signal says of a step.
struct Source {
  Mode mode = Mode::kNone;  // kNone: nothing came
  int32_t n = 0;            // rows, 0 if there was an error
  int32_t plain = 0;        // Simple rows, which come first; the others are packets
  twResult_t error = twSuccess;
  uint64_t signal = 0;
  uint64_t note = 0;
};

// Judges a signal that has the step's number.
__device__ inline void judge(const Step& step, Source* source) {
  const Signal signal = unpack(source->signal);
  source->mode = signal.mode;
  const bool dispatching = step.phase == twPhaseDispatch;
  const bool fits =
      dispatching ? signal.mode == Mode::kDispatch || has_packets(signal.mode) : signal.mode == mode_of(step.phase);
  const auto plain = has_packets(signal.mode) ? static_cast<uint32_t>(step.plain_of(source->note)) : signal.n;
  if (signal.step != step.low()) {
    source->error = twInternalError;  // S2 says that nobody is further ahead on this bank
  } else if (signal.mode == Mode::kRefused) {
    source->error = twPeerRefused;
  } else if (!fits) {
    source->error = twCallMismatch;
  } else if (!step.matches(source->note)) {
    source->error = twBoundMismatch;
  } else if (signal.n > static_cast<uint32_t>(step.bound) || plain > signal.n) {
    source->error = twInternalError;
  } else {
    source->n = static_cast<int32_t>(signal.n);
    source->plain = static_cast<int32_t>(plain);
  }
}

// What a wait for a source's signal is for.
enum class Look {
  kSignal,    // the signal, and all that was written before it (S4)
  kTakesPart  // the signal alone: rows are seen otherwise
};

// Whether a source's signal of the step is there; *source then holds what it says.
__device__ inline bool saw(const GroupView& g, const Step& step, int rank, Look look, Source* source) {
  const std::byte* const place = window_of(g, g.me) + g.map.signal(step.channel, step.bank(), rank);
  const Vec16 pair = load_pair(place);
  source->signal = pair.a;
  source->note = pair.b;
  if (!reached(unpack(pair.a).step, step.low())) return false;
  if (look != Look::kTakesPart && !has_packets(unpack(pair.a).mode)) (void)load_acquire(place);
  // The note was written before the signal or with it, but PTX does not promise that one load shows both.
  if (!step.matches(source->note)) {
    fence_system();
    source->note = load_word(place + kNoteOffset);
  }
  judge(step, source);
  return true;
}

// Looks once at a source's signal. True when there is nothing more to wait for.
__device__ inline bool look_at(const GroupView& g, const Step& step, int rank, Look look, Patience* patience,
                               Source* source) {
  if (saw(g, step, rank, look, source)) return true;
  bool late = false;
  if (!patience->over(&late)) return false;
  if (g.no_wait) {  // as if it had come
    source->signal = pack(Signal{step.low(), unpack(source->signal).mode, unpack(source->signal).n});
    source->note = step.note(step.plain_of(source->note));
    judge(step, source);
    return true;
  }
  source->error = late ? twTimeout : twPeerAborted;
  return true;
}

// Waits for a source's signal of a step. `far`: this is the one wait of a kernel that may last (Patience).
__device__ __noinline__ static Source await_source(const GroupView& g, Step step, int rank, Look look, bool far) {
  Source source;
  Patience patience(g, far);
#pragma unroll 1
  while (!look_at(g, step, rank, look, &patience, &source)) {
  }
  return source;
}

// Waits until a word says what is_there wants of it; by one thread, so that each look may acquire.
template <class IsThere>
__device__ inline twResult_t await_word(const GroupView& g, Patience patience, const std::byte* word,
                                        IsThere&& is_there) {
#pragma unroll 1
  for (bool late = false; !is_there(load_acquire(word));) {
    if (patience.over(&late)) return g.no_wait ? twSuccess : late ? twTimeout : twPeerAborted;
  }
  return twSuccess;
}
// Waits for the Simple rows of a source, where its signal says that there are some before its packets (S4): one more
// look, at the signal when it is there, would take 0.7 us.
__device__ __noinline__ static twResult_t await_rows(const GroupView& g, Step step, int rank) {
  const std::byte* const place = window_of(g, g.me) + g.map.signal(step.channel, step.bank(), rank) + kRowsOffset;
  return await_word(g, Patience(g), place, [&](uint64_t word) { return word == step.number; });
}

// Makes known what is wrong with a source, if anything is; by one warp of a kernel.
__device__ __noinline__ static void report_source(const GroupView& g, Step step, int rank, Source source) {
  const twResult_t error = source.error;
  if (error == twSuccess) return;
  if (error == twPeerAborted) return report_stopped(g, step, rank, source.signal);
  if (error != twPeerRefused && error != twBoundMismatch) {
    report_failure(g, step, error, error == twInternalError ? g.me : rank, source.signal);
    return;
  }
  report_call(g, &g.pages[g.me]->call,
              [&](Report* to) { write_report(to, g, step, error, rank, source.signal, step.bound_of(source.note)); });
}

// Waits a while for a source's signal in a kernel that knows what it will say: true if the signal says so. False:
// another one has come, or none in that while. Judging whatever may come takes some hundred instructions that no warp
// has met before, and a reduce of 1 row took 0.7 us longer with them.
__device__ inline bool await_usual(const GroupView& g, const Step& step, int rank, int n) {
  constexpr int kMostLooks = 64;
  const std::byte* const place = window_of(g, g.me) + g.map.signal(step.channel, step.bank(), rank);
  const uint64_t usual = pack(Signal{step.low(), mode_of(step.phase), static_cast<uint32_t>(n)});
  const uint64_t note = step.note(0);
#pragma unroll 1
  for (int looks = 0; looks < kMostLooks; ++looks) {
    const Vec16 signal = load_pair(place);
    if (signal.a == usual && signal.b == note) return true;
    if (g.no_wait || reached(unpack(signal.a).step, step.low())) return false;
  }
  return false;
}
// Waits for a source's signal, whatever it says, and reports what is wrong. `n`: the rows that it must tell of, or the
// error is `otherwise`; -1: any number.
__device__ __noinline__ static Source await_signal(const GroupView& g, Step step, int rank, Look look, int n,
                                                   twResult_t otherwise) {
  Source source = await_source(g, step, rank, look, true);
  if (g.no_wait) {
    source.error = twSuccess;
    return source;
  }
  if (source.error == twSuccess && n >= 0 && source.n != n) source.error = otherwise;
  report_source(g, step, rank, source);
  return source;
}

// Waits, by a block that has seen an error, until no other block writes what the caller sees: it is about to be made
// safe.
__device__ inline void await_others(const GroupView& g, const Step& step) {
  if (threadIdx.x == 0) say_done(g, step);  // others may wait here too
  await_done(g, step);
}

// Ends a block that receives; by all its threads, of which thread 0 has `arrived` from begin_end. Where *failed, in
// shared memory, is set, clear() makes safe what the caller sees, by the whole block: it begins with await_others, as
// what others have received or summed then does not count either.
template <class Clear>
__device__ inline void finish_block(const GroupView& g, const Step& step, uint32_t arrived, const int32_t* failed,
                                    Clear&& clear) {
  __syncthreads();
  if (*failed != 0) clear();
  if (threadIdx.x != 0) return;
  end_step(g, step, arrived);
  say_done(g, step);
}

// Publishes this rank's signal of a step to every rank, with count(rank) rows. The fence brings the note before the
// signals, and the rows with which the caller has synchronised (S4). By a warp.
template <class Count>
__device__ inline void publish_signals(const GroupView& g, const Step& step, Mode mode, Count count) {
  const int ranks = g.map.shape().ranks;
#pragma unroll 1
  for (int i = lane(); i < ranks; i += 32) {
    put_word(own_signal_at(g, step, (g.me + 1 + i) % ranks) + kNoteOffset, step.note(0));
  }
  if (lane() < ranks) fence_system();
#pragma unroll 1
  for (int i = lane(); i < ranks; i += 32) {
    const int rank = (g.me + 1 + i) % ranks;
    put_word(own_signal_at(g, step, rank), pack(Signal{step.low(), mode, static_cast<uint32_t>(count(rank))}));
  }
}

// Publishes the signal to one rank, without an order to anything: signal and note go in one store, for steps whose rows
// certify themselves. `plain`: in a dispatch, the number of Simple rows, which a rows signal makes known. Where such
// stores may be torn there are no packets, and the note goes first, behind a fence of its own.
__device__ inline void publish_signal(const GroupView& g, const Step& step, int rank, Mode mode, int n, int plain) {
  std::byte* const place = own_signal_at(g, step, rank);
  const uint64_t signal = pack(Signal{step.low(), mode, static_cast<uint32_t>(n)});
  const uint64_t note = step.note(plain);
  if (g.packet_tokens > 0) return put_pair(place, signal, note);
  put_word(place + kNoteOffset, note);
  fence_system();
  put_word(place, signal);
}
// Publishes a step without rows to all ranks; by a block.
__device__ inline void publish_empty(const GroupView& g, const Step& step, Mode mode) {
#pragma unroll 1
  for (int rank = threadIdx.x; rank < g.map.shape().ranks; rank += blockDim.x) {
    publish_signal(g, step, rank, mode, 0, 0);
  }
}

// Waits, by a block, until all ranks have left out a step without rows. False if the wait failed.
__device__ __noinline__ static bool await_skip(const GroupView& g, Step skipped) {
  bool passed = true;
#pragma unroll 1
  for (int i = threadIdx.x; i < g.map.shape().ranks; i += blockDim.x) {
    const Source source = await_source(g, skipped, i, Look::kTakesPart, false);
    // A peer may already be past the next step: then it has seen this rank's signal of the skipped one.
    const uint32_t seen = unpack(source.signal).step;
    if (source.mode == Mode::kSkip || g.no_wait || (reached(seen, skipped.low()) && seen != skipped.low())) continue;
    passed = false;
    if (source.error != twPeerAborted) {
      report_failure(g, skipped, source.error == twTimeout ? twTimeout : twCallMismatch, i, source.signal);
    }
  }
  return __syncthreads_and(passed) != 0;
}

// Makes a step without rows, where the channel does not stand before the bank that the caller's view needs; so it moves
// to that bank. All blocks wait here before they send, so all must be on the device at once (S8). False if the wait
// failed.
__device__ __noinline__ static bool skip_step(const GroupView& g, Step skipped) {
  skipped.number -= 1;
  if (blockIdx.x == 0) publish_empty(g, skipped, Mode::kSkip);
  return await_skip(g, skipped);
}

}  // namespace tw::cuda
