// Counting (exchange/loads.h), by a block of its own in each dispatch that sends: it reads the ids, tells all ranks how
// often each expert was chosen, and takes what all have told of the dispatch before on this lane. That has long come,
// so it waits for nobody; and no block waits for it.
//
// The words of a dispatch lie in one of four banks, by its number on the lane, which all ranks have alike: a refusal
// counts too. A rank that makes dispatch d reads those of d - 1; its peers are at d + 1 at most (S2), so nothing of d +
// 3 is written there meanwhile.
#pragma once

#include "exchange/loads.h"
#include "nvlink/routing.cuh"

namespace tw::nvlink {

// Whether this block of a dispatch only counts.
__device__ inline bool does_nothing_else(const DispatchParams& p) {
  return p.tally == Tally::kApart && blockIdx.x == gridDim.x - 1;
}

// A word to all ranks. By a thread.
__device__ inline void tell_word(const GroupView& g, int lane_of, uint32_t dispatch, uint64_t word, uint32_t value) {
  const int bank = static_cast<int>(dispatch % WindowMap::kLoadsBanks);
  const uint64_t place = g.map.loads(lane_of, bank, g.me) + sizeof(uint64_t) * word;
#pragma unroll 1
  for (int rank = 0; rank < g.map.shape().ranks; ++rank) {
    store_word(window_of(g, rank) + place, told_word(dispatch, value));
  }
}

// What a source has told in a dispatch. False if it never comes, as of a group that has ended.
__device__ inline bool take_word(const GroupView& g, int lane_of, uint32_t dispatch, int source, uint64_t word,
                                 uint32_t* value) {
  const int bank = static_cast<int>(dispatch % WindowMap::kLoadsBanks);
  const std::byte* const place = window_of(g, g.me) + g.map.loads(lane_of, bank, source) + sizeof(uint64_t) * word;
  Patience patience(g);
#pragma unroll 1
  for (;;) {
    const uint64_t told = load_word(place);
    *value = told_value(told);
    if (told_tag(told) == dispatch) return true;
    bool late = false;
    if (patience.over(&late)) return false;
    __nanosleep(50);
  }
}

// How often this rank's tokens choose each expert, into the counters. A bad id counts as none. By a block.
__device__ inline void count_ids(const DispatchParams& p, int32_t* counts) {
  const Shape& shape = p.group.map.shape();
  const auto thread = static_cast<int>(threadIdx.x);
  for (int e = thread; e < shape.choices(); e += kThreads) counts[e] = 0;
  __syncthreads();
  visit_choices(p.in, p.tokens, shape.top_k, [counts](int64_t, int, int, int64_t, int32_t id) {
    if (id >= 0) atomicAdd(&counts[id], 1);
  });
  __syncthreads();
}

// The averages after what all ranks have told of a dispatch. Nothing changes unless all have counted the same layer: a
// rank that refused the dispatch has told that it counts none. By a block.
__device__ __noinline__ static void take_told(const GroupView& g, int lane_of, uint32_t dispatch) {
  const Shape& shape = g.map.shape();
  const auto thread = static_cast<int>(threadIdx.x);
  const TallyView& loads = g.loads;
  uint32_t mine = 0;
  bool good = take_word(g, lane_of, dispatch, g.me, 0, &mine) && mine != 0;
  const int32_t layer = CountedCall::layer(mine);
  for (int source = thread; good && source < shape.ranks; source += static_cast<int>(blockDim.x)) {
    uint32_t told = 0;
    good = take_word(g, lane_of, dispatch, source, 0, &told) && CountedCall::layer(told) == layer;
  }
  if (__syncthreads_and(good) == 0) return;
  const int64_t row = int64_t{lane_of} * loads.layers + layer;
  const uint32_t before_it = load_fresh<uint32_t>(&loads.clocks[row]);
  uint32_t later = CountedCall::kTurns;
  for (int source = 0; source < shape.ranks; ++source) {
    uint32_t told = 0;
    if (!take_word(g, lane_of, dispatch, source, 0, &told)) continue;  // it has come
    later = min(later, CountedCall::since(CountedCall::clock(told), before_it));
  }
  later = max(later, 1u);  // a rank that has refused dispatches is behind
#pragma unroll 1
  for (int e = thread; e < shape.choices(); e += static_cast<int>(blockDim.x)) {
    uint32_t sum = 0;
    bool all = true;
    for (int source = 0; all && source < shape.ranks; ++source) {
      uint32_t told = 0;
      all = take_word(g, lane_of, dispatch, source, 1 + static_cast<uint64_t>(e), &told);
      sum += told;
    }
    if (!all) continue;
    const int64_t at = row * shape.choices() + e;
    const float before = __uint_as_float(load_fresh<uint32_t>(&loads.averages[at]));
    const float average = average_load(aged_load(before, loads.decay, later - 1), loads.decay, sum);
    loads.averages[at] = average;
    *const_cast<volatile float*>(&loads.averages_there[at]) = average;
  }
  __syncthreads();  // all have read the clock
  if (thread != 0) return;
  loads.clocks[row] = before_it + later;
  *const_cast<volatile uint32_t*>(&loads.clocks_there[row]) = before_it + later;
  const auto counted = static_cast<long long>(load_fresh<unsigned long long>(&loads.dispatches[row])) + 1;
  loads.dispatches[row] = counted;
  *const_cast<volatile long long*>(&loads.dispatches_there[row]) = counted;
}

// All of it. By a block that does nothing else, or by the last one when it is done with its part.
__device__ __noinline__ static void tally(const DispatchParams& p) {
  const GroupView& g = p.group;
  const Shape& shape = g.map.shape();
  const auto thread = static_cast<int>(threadIdx.x);
  LaneState& lane_state = g.lanes[p.lane];
  const uint32_t dispatch = load_fresh<uint32_t>(&lane_state.dispatches) + 1;
  const bool routed = !p.in.own;  // else whoever made the ids the handle's own has counted them
  const bool shared = routed && p.table != 0;
  int32_t* const counts = shared ? shared_at<int32_t>(p.at.table) : p.handle.choices;
  __syncthreads();  // the table is not needed any more
  if (routed) count_ids(p, counts);
  // A dispatch that is made although its counts were refused for lack of room moves nothing.
  const bool moves = !shape.exact() || load_fresh<uint32_t>(p.handle.overflow) == 0;
  if (thread == 0) {
    const bool counted = p.counted && moves;
    const uint32_t turn = counted ? atomicAdd(&g.loads.told_of[p.layer], 1) + 1 : 0;
    tell_word(g, p.lane, dispatch, 0, counted ? CountedCall::value(p.layer, turn) : 0);
  }
  for (int e = thread; e < shape.choices(); e += kThreads) {
    const uint32_t chosen = shared ? static_cast<uint32_t>(counts[e]) : load_fresh<uint32_t>(&p.handle.choices[e]);
    if (shared) p.handle.choices[e] = static_cast<int32_t>(chosen);
    tell_word(g, p.lane, dispatch, 1 + static_cast<uint64_t>(e), chosen);
  }
  if (dispatch > 1) take_told(g, p.lane, dispatch - 1);
  __syncthreads();
  if (thread == 0) lane_state.dispatches = dispatch;
}

// A dispatch that this rank refuses: it counts for nobody. By a block.
__device__ inline void tell_refusal(const GroupView& g, int lane_of) {
  if (g.map.shape().counts_loads == 0) return;
  const uint32_t dispatch = load_fresh<uint32_t>(&g.lanes[lane_of].dispatches) + 1;
  __syncthreads();  // all have read it
  if (threadIdx.x == 0) tell_word(g, lane_of, dispatch, 0, 0);
  if (dispatch > 1) take_told(g, lane_of, dispatch - 1);
  if (threadIdx.x == 0) g.lanes[lane_of].dispatches = dispatch;
}

}  // namespace tw::nvlink
