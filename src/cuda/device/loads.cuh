// Load statistics (exchange/loads.h), by a block of its own in each dispatch that sends. The block reads the ids, tells
// all ranks how often each expert was chosen, and takes what all have told of the dispatch before on this channel. That
// came long ago, so the block waits for nobody; and no block waits for it.
//
// The words of a dispatch lie in one of four banks, by its number among the group's on the channel, which all ranks
// have alike: a refusal counts too. A rank that makes dispatch d reads those of d - 1; its peers are at d + 1 at most
// (S2), so nothing of d + 3 is written there meanwhile. Over a staged transport the words are a block for each rank, in
// one bank, that the dispatch's moves bring (transport/target.cuh).
//
// What breaks if this changes: averages differ between ranks, and with them what they decide; the bits of results do
// not.
#pragma once

#include "cuda/device/routing.cuh"
#include "cuda/launch/dispatch.h"
#include "exchange/epochs.h"
#include "exchange/loads.h"

namespace tw::cuda {

// Whether this block of a dispatch only gathers load statistics.
__device__ inline bool does_nothing_else(const DispatchParams& p) {
  return p.loads_block == LoadsBlock::kApart && blockIdx.x >= gridDim.x - kLoadsBlocks;
}

// Stores a word at all ranks. By a thread.
__device__ inline void tell_word(const GroupView& g, int channel, uint32_t dispatch, uint64_t word, uint32_t value) {
#pragma unroll 1
  for (int rank = 0; rank < g.map.shape().ranks; ++rank) {
    put_word(loads_target(g, channel, dispatch, rank) + sizeof(uint64_t) * word, told_word(dispatch, value));
  }
}

// Counts how often this rank's tokens choose each expert, into `counts`. A bad id counts as none. By a block.
__device__ inline void count_ids(const DispatchParams& p, int32_t* counts) {
  const Shape& shape = p.group.map.shape();
  const auto thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int e = thread; e < shape.choices(); e += kThreads) counts[e] = 0;
  __syncthreads();
  visit_choices(p.routed, p.tokens, shape.top_k, [counts](int64_t, int, int, int64_t, int32_t id) {
    if (id >= 0) atomicAdd(&counts[id], 1);
  });
  __syncthreads();
}

// Waits for what a source has told in a dispatch; `told` is what was found at first. Gives a word of another dispatch
// if it never comes, as in a group that has ended.
__device__ __noinline__ static uint64_t await_told(const GroupView& g, const std::byte* place, uint32_t dispatch,
                                                   uint64_t told) {
  Patience patience(g);
  bool late = false;
#pragma unroll 1
  while (told_tag(told) != dispatch && !patience.over(&late)) {
    __nanosleep(50);
    told = load_word(place);
  }
  return told;
}

// What all ranks together have told of a dispatch.
struct Told {
  bool good;       // all of it is there, and all have counted the same layer
  int32_t layer;   // -1: none
  uint32_t clock;  // the least clock of all ranks
  uint32_t sum;    // the choices of one expert
};
// Loads it. `expert`: the thread's, or -1. The words of several sources are on their way at once. A function of its
// own, as it has two callers in every dispatch kernel, and ptxas takes long for each.
__device__ __noinline__ static Told load_told(const GroupView& g, int channel, uint32_t dispatch, int expert) {
  constexpr int kAtOnce = 4;
  const int ranks = g.map.shape().ranks;
  const int bank = loads_bank(g, dispatch);
  const auto place = [&](int source, int word) {
    return window_of(g, g.me) + g.map.loads(channel, bank, source) + sizeof(uint64_t) * static_cast<uint64_t>(word);
  };
  Told told{true, -1, 0, 0};
#pragma unroll 1
  for (int base = 0; base < ranks && told.good; base += kAtOnce) {
    uint64_t call[kAtOnce];
    uint64_t chosen[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (base + i >= ranks) continue;
      call[i] = load_word(place(base + i, 0));
      chosen[i] = load_word(place(base + i, 1 + max(expert, 0)));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (base + i >= ranks || !told.good) continue;
      const auto await = [&](uint64_t& word, int number) {
        if (told_tag(word) != dispatch) word = await_told(g, place(base + i, number), dispatch, word);
        return told_tag(word) == dispatch;
      };
      told.good = await(call[i], 0);
      const uint32_t value = told_value(call[i]);
      const uint32_t clock = CountedCall::clock(value);
      if (base + i == 0) told.layer = CountedCall::layer(value), told.clock = clock;
      if (CountedCall::since(told.clock, clock) != 0) told.clock = clock;
      // A rank that has refused tells nothing more.
      told.good =
          told.good && value != 0 && CountedCall::layer(value) == told.layer && await(chosen[i], 1 + max(expert, 0));
      told.sum += told_value(chosen[i]);
    }
  }
  return told;
}

// Takes what all ranks have told of a dispatch into the averages. Nothing changes unless all have counted the same
// layer: a rank that refused the dispatch has told that it counts none. By a block.
__device__ __noinline__ static void take_told(const GroupView& g, int channel, uint32_t dispatch) {
  const int experts = g.map.shape().choices();
  const auto thread = static_cast<int>(threadIdx.x);
  const auto threads = static_cast<int>(blockDim.x);
  const LoadsView& loads = g.loads;
  Told told = load_told(g, channel, dispatch, thread < experts ? thread : -1);
  if (__syncthreads_and(told.good) == 0) return;
  const int64_t row = int64_t{channel} * loads.layers + told.layer;
  const uint32_t before_it = load_fresh<uint32_t>(&loads.clocks[row]);
  const long long counted = thread == 0 ? load_fresh<unsigned long long>(&loads.dispatches[row]) + 1 : 0;
  // A rank that has refused dispatches is behind the others.
  const uint32_t later = max(CountedCall::since(told.clock, before_it), 1u);
#pragma unroll 1
  for (int e = thread; e < experts && told.good; e += threads) {
    const int64_t at = row * experts + e;
    const float before = __uint_as_float(load_fresh<uint32_t>(&loads.averages[at]));
    const float average = average_load(aged_load(before, loads.decay, later - 1), loads.decay, told.sum);
    loads.averages[at] = average;
    *const_cast<volatile float*>(&loads.averages_there[at]) = average;
    if (e + threads < experts) told = load_told(g, channel, dispatch, e + threads);
  }
  __syncthreads();  // all have read the clock
  if (thread != 0) return;
  loads.clocks[row] = before_it + later;
  *const_cast<volatile uint32_t*>(&loads.clocks_there[row]) = before_it + later;
  loads.dispatches[row] = counted;
  *const_cast<volatile long long*>(&loads.dispatches_there[row]) = counted;
}

// Tells how far this rank is with maps that move: one word, once, for all peers (M2). By a thread.
__device__ inline void tell_ready(const GroupView& g, int channel, uint32_t dispatch) {
  const uint64_t word = WindowMap::loads_words(g.map.shape()) - 1;
  tell_word(g, channel, dispatch, word, load_fresh<uint32_t>(g.loads.moving.ready));
}

// Gives what a source has told of that in a dispatch. *good becomes false if that never comes.
__device__ inline uint32_t told_ready(const GroupView& g, int channel, uint32_t dispatch, int source, bool* good) {
  const uint64_t place = g.map.loads(channel, loads_bank(g, dispatch), source);
  const std::byte* const at =
      window_of(g, g.me) + place + sizeof(uint64_t) * (WindowMap::loads_words(g.map.shape()) - 1);
  uint64_t told = load_word(at);
  if (told_tag(told) != dispatch) told = await_told(g, at, dispatch, told);
  *good = *good && told_tag(told) == dispatch;
  return told_value(told);
}

// Makes the channel's next version of what all ranks have told in a dispatch. By a warp.
__device__ __noinline__ static void take_version(const GroupView& g, int channel, uint32_t dispatch) {
  const int ranks = g.map.shape().ranks;
  const MovingView& moving = g.loads.moving;
  const MapVersion before = unpack_version(load_fresh<unsigned long long>(&moving.versions[channel]));
  bool good = true;
  uint32_t least = ~0u;
#pragma unroll 1
  for (int source = lane(); source < ranks; source += 32) {
    least = min(least, ahead_of(before, told_ready(g, channel, dispatch, source, &good)));
  }
  for (int by = 16; by > 0; by /= 2) least = min(least, __shfl_xor_sync(~0u, least, by));
  if (!__all_sync(~0u, good) || least == 0 || least > kMostOpenEpochs) return;
  uint32_t voids = 0;
#pragma unroll 1
  for (int source = lane(); source < ranks; source += 32) {
    voids |= voids_in(before, told_ready(g, channel, dispatch, source, &good), least);
  }
  for (int by = 16; by > 0; by /= 2) voids |= __shfl_xor_sync(~0u, voids, by);
  if (lane() != 0) return;
  const uint64_t version = pack(advanced(before, least, voids));
  moving.versions[channel] = version;
  *const_cast<volatile uint64_t*>(&moving.versions_there[channel]) = version;
}

// Tells what this rank's tokens choose, and how far it is with maps that move. `dispatch`: its number. By a block.
__device__ __noinline__ static void tell_loads(const DispatchParams& p, uint32_t dispatch) {
  const GroupView& g = p.group;
  const Shape& shape = g.map.shape();
  const auto thread = static_cast<int>(threadIdx.x);
  const bool routed = !p.routed.own;  // otherwise whoever made the ids the handle's own has counted them
  const bool shared = routed && p.table != 0;
  int32_t* const counts = shared ? shared_at<int32_t>(p.at.table) : p.handle.choices;
  __syncthreads();               // the table is not needed any more, and all have the number
  if (thread == kThreads - 1) {  // whose warp seldom has tokens to count
    if (shape.moves != 0) tell_ready(g, p.channel, dispatch);
    // A dispatch that is made although its counts were refused for lack of room moves nothing.
    const bool moves = !shape.exact() || load_fresh<uint32_t>(p.handle.overflow) == 0;
    const bool counted = p.counted && moves;
    const uint32_t turn = counted ? atomicAdd(&g.loads.told_of[p.layer], 1) + 1 : 0;
    tell_word(g, p.channel, dispatch, 0, counted ? CountedCall::value(p.layer, turn) : 0);
    g.loads.numbers[p.channel].told = dispatch;
  }
  if (routed) count_ids(p, counts);
#pragma unroll 1
  for (int e = thread; e < shape.choices(); e += kThreads) {
    const uint32_t chosen = shared ? static_cast<uint32_t>(counts[e]) : load_fresh<uint32_t>(&p.handle.choices[e]);
    if (shared) p.handle.choices[e] = static_cast<int32_t>(chosen);
    tell_word(g, p.channel, dispatch, 1 + static_cast<uint64_t>(e), chosen);
  }
}

// Takes what all ranks have told of the dispatch before. `dispatch`: this one's number. By a block.
__device__ __noinline__ static void take_loads(const GroupView& g, int channel, uint32_t dispatch) {
  const auto thread = static_cast<int>(threadIdx.x);
  const auto threads = static_cast<int>(blockDim.x);
  // By a warp that seldom has an expert: the others' words are on their way meanwhile.
  if (dispatch > 1 && g.map.shape().moves != 0 && thread >= threads - 32) take_version(g, channel, dispatch - 1);
  if (dispatch > 1) take_told(g, channel, dispatch - 1);
  __syncthreads();  // all have the number
  if (thread == 0) g.loads.numbers[channel].taken = dispatch;
}

// Does both, in the last block of a dispatch when its other part is done.
__device__ __noinline__ static void count_loads(const DispatchParams& p) {
  const DispatchNumbers* const numbers = &p.group.loads.numbers[p.channel];
  const uint32_t told = load_fresh<uint32_t>(&numbers->told);
  const uint32_t taken = load_fresh<uint32_t>(&numbers->taken);
  tell_loads(p, told + 1);
  take_loads(p.group, p.channel, taken + 1);
}

// Is the whole kernel for blocks that do nothing else: the last one tells, the one before takes. Each has a number of
// its own to count by, as neither waits for the other; with few tokens the dispatch waits for them, by the longer of
// two ways and not by their sum. They do without what other blocks prepare, so with 128 tokens and more they end before
// these do.
__device__ __noinline__ static void count_loads_apart(const DispatchParams& p) {
  const GroupView& g = p.group;
  const bool tells = blockIdx.x == gridDim.x - 1;
  const DispatchNumbers* const numbers = &g.loads.numbers[p.channel];
  await_earlier();
  const uint32_t before = load_fresh<uint32_t>(tells ? &numbers->told : &numbers->taken);
  Step step{next_step(g, p.channel), p.channel, p.bound, twPhaseDispatch};
  if (static_cast<int>(step.number & 1) != p.bank) ++step.number;  // the others skip one
  const bool usable = __syncthreads_or(is_sticky(g)) == 0;
  const uint32_t arrived = p.receive && threadIdx.x == 0 ? begin_end(g, step) : 0;
  if (usable && tells) tell_loads(p, before + 1);
  if (usable && !tells) take_loads(g, p.channel, before + 1);
  __syncthreads();
  if (!p.receive || threadIdx.x != 0) return;
  end_step(g, step, arrived);
  say_done(g, step);
}

// Tells that a dispatch which this rank refuses counts for nobody. By a block.
__device__ inline void tell_refusal(const GroupView& g, int channel) {
  if (g.map.shape().counts_loads == 0) return;
  DispatchNumbers* const numbers = &g.loads.numbers[channel];
  const uint32_t told = load_fresh<uint32_t>(&numbers->told);
  const uint32_t taken = load_fresh<uint32_t>(&numbers->taken);
  __syncthreads();  // all have read them
  if (threadIdx.x == 0) {
    tell_word(g, channel, told + 1, 0, 0);
    if (g.map.shape().moves != 0) tell_ready(g, channel, told + 1);
    numbers->told = told + 1;
  }
  take_loads(g, channel, taken + 1);
}

}  // namespace tw::cuda
