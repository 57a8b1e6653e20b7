// What arrives at a rank: headers, ids and weights, into the handle and into what the caller sees; whole rows out of
// lines.
#pragma once

#include "nvlink/routing.cuh"

namespace tw::nvlink {

__device__ inline void show_id(const Shown& shown, int64_t at, int32_t id) {
  if (shown.wide) {
    static_cast<long long*>(shown.ids)[at] = id;
  } else {
    static_cast<int32_t*>(shown.ids)[at] = id;
  }
}

// The id as its receiver shows it: views/rank_major.h, IdStyle::show.
__device__ inline int32_t shown_id(const DispatchParams& p, const Scratch& scratch, int32_t id) {
  if (id < 0 || id >= p.group.map.shape().experts) return p.shown.invalid;
  if (!p.shown.local) return id;
  const uint32_t expert = find_expert(p, scratch, id);
  return expert_rank(expert) == p.group.me ? expert_slot(expert) : p.shown.invalid;
}

// Row (source, slot) of the handle's copy of what travels beside payloads.
__device__ inline uint64_t* kept_meta(const DispatchParams& p, int source, int slot) {
  const int64_t row = static_cast<int64_t>(source) * p.bound + slot;
  return p.handle.meta + row * (1 + p.group.map.shape().top_k);
}

// Keeps and shows the k-th id and weight of a slot.
__device__ inline void take_choice(const DispatchParams& p, int source, int slot, int k, int32_t id, float weight) {
  const int top_k = p.group.map.shape().top_k;
  const int64_t at = (static_cast<int64_t>(source) * p.bound + slot) * top_k + k;
  auto* const kept = reinterpret_cast<uint32_t*>(kept_meta(p, source, slot));
  kept[2 + k] = static_cast<uint32_t>(id);
  kept[2 + top_k + k] = __float_as_uint(weight);
  if (p.shown.ids != nullptr) show_id(p.shown, at, shown_id(p, Scratch(p), id));
  if (p.shown.weights != nullptr) p.shown.weights[at] = weight;
}

// Takes part i of what has arrived beside the payloads of a slot: 0 is the header, which is checked because combine
// writes where it says; 1 + k the k-th id and weight.
__device__ inline void take_meta(const DispatchParams& p, const std::byte* bank, const Step& step, int source, int slot,
                                 int i) {
  const WindowMap& map = p.group.map;
  const int top_k = map.shape().top_k;
  const int64_t row = static_cast<int64_t>(source) * p.bound + slot;
  const auto* const meta = reinterpret_cast<const uint32_t*>(bank + map.meta_begin()) + row * (2 + 2 * top_k);
  if (i > 0) {
    take_choice(p, source, slot, i - 1, static_cast<int32_t>(load_received<unsigned int>(meta + 1 + i)),
                __uint_as_float(load_received<unsigned int>(meta + 1 + top_k + i)));
    return;
  }
  const uint32_t token = load_received<unsigned int>(meta);
  const uint32_t position = load_received<unsigned int>(meta + 1);
  *kept_meta(p, source, slot) = token | static_cast<uint64_t>(position) << 32;
  const bool right = token < static_cast<uint32_t>(p.bound) && position < static_cast<uint32_t>(map.shape().fan_out());
  if (!right) report_failure(p.group, step, twInternalError, p.group.me, 0);
}

// The same for the rows of a batch that stay here, out of shared memory. By `threads` threads.
__device__ inline void take_own_meta(const DispatchParams& p, const Scratch& scratch, int count, int thread,
                                     int threads) {
  const int top_k = p.group.map.shape().top_k;
  const int fan_out = p.group.map.shape().fan_out();
#pragma unroll 1
  for (int i = thread; i < count * top_k; i += threads) {
    const int row = i / top_k;
    const int k = i - row * top_k;
    int own = 0;
    const Destination* const to = scratch.destinations() + row * fan_out;
    while (own < scratch.fan()[row] && to[own].rank != p.group.me) ++own;
    if (own == scratch.fan()[row]) continue;
    const auto* const meta = reinterpret_cast<const uint32_t*>(scratch.meta() + row * (1 + top_k));
    take_choice(p, p.group.me, to[own].slot, k, static_cast<int32_t>(meta[2 + k]),
                __uint_as_float(meta[2 + top_k + k]));
    if (k == 0) *kept_meta(p, p.group.me, to[own].slot) = meta[0] | static_cast<uint64_t>(own) << 32;
  }
}

// Payload of a word of the stream, and its byte in the row.
__device__ inline int payload_of(const DispatchParams& p, uint32_t w, uint64_t* at) {
  int q = 0;
#pragma unroll 1
  while (q + 1 < p.group.map.shape().payloads && w >= p.payloads[q + 1].first_word) ++q;
  *at = uint64_t{8} * (w - p.payloads[q].first_word);
  return q;
}

// Rows that are no multiple of 8 bytes, or lie at odd addresses.
__device__ __noinline__ static void store_odd(std::byte* to, uint64_t value, int64_t bytes) {
  store_bytes(to, value, bytes);
}
__device__ __noinline__ static uint64_t load_odd(const std::byte* from, int64_t bytes) {
  return load_bytes(from, bytes);
}

// Word w of a row's stream, to its place in this rank's window. `bank`: that of the step.
__device__ inline void place_word(const DispatchParams& p, std::byte* bank, int source, int slot, uint32_t w,
                                  uint64_t value) {
  const WindowMap& map = p.group.map;
  const int64_t row = static_cast<int64_t>(source) * p.bound + slot;
  const auto meta_words = static_cast<uint32_t>(1 + map.shape().top_k);
  if (w < meta_words) {
    reinterpret_cast<uint64_t*>(bank + map.meta_begin())[row * meta_words + w] = value;
    return;
  }
  uint64_t at = 0;
  const int q = payload_of(p, w, &at);
  const auto bytes = static_cast<int64_t>(map.shape().payload_bytes[q]);
  std::byte* const to = bank + map.payload_begin(q) + row * bytes + at;
  if (p.whole) {
    *reinterpret_cast<uint64_t*>(to) = value;
  } else if (static_cast<int64_t>(at) < bytes) {  // else padding of the last line
    store_odd(to, value, bytes - static_cast<int64_t>(at));
  }
}

// Word w of what is sent for a token: the payload part.
__device__ inline uint64_t payload_word(const DispatchParams& p, int token, uint32_t w) {
  uint64_t at = 0;
  const int q = payload_of(p, w, &at);
  const std::byte* const from = p.payloads[q].data + token * p.payloads[q].stride + at;
  if (p.whole) return load_input<unsigned long long>(from);
  return load_odd(from, static_cast<int64_t>(p.group.map.shape().payload_bytes[q]) - static_cast<int64_t>(at));
}

// Sets ids and weights of slots that hold nothing: [from, to) of a source, this block's part of them.
__device__ __noinline__ static void show_nothing(const DispatchParams& p, int source, int from, int to, int part,
                                                 int parts) {
  if (from >= to || (p.shown.ids == nullptr && p.shown.weights == nullptr)) return;
  const int top_k = p.group.map.shape().top_k;
  const int64_t begin = (static_cast<int64_t>(source) * p.bound + from) * top_k;
  const int64_t count = static_cast<int64_t>(to - from) * top_k;
#pragma unroll 1
  for (int64_t i = static_cast<int64_t>(part) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<int64_t>(parts) * blockDim.x) {
    if (p.shown.ids != nullptr) show_id(p.shown, begin + i, p.shown.invalid);
    if (p.shown.weights != nullptr) p.shown.weights[begin + i] = 0.0f;
  }
}

// A line, as eight neighbouring threads see it: 16 bytes each, the last 8 of them the flag. Waits until the whole
// warp's lines have the step's flag; `active` threads have one, each of its own source. False if the wait ended
// otherwise; failed(source) is asked now and then.
template <class Failed>
__device__ inline bool await_lines(const GroupView& g, const Step& step, bool active, const std::byte* at, int source,
                                   Vec16* value, Failed&& failed) {
  const bool flagged = active && threadIdx.x % kLineLanes == kLineLanes - 1;
  Patience patience(g);
#pragma unroll 1
  for (;;) {
    if (active) *value = load_pair(at);
    const bool here = !flagged || value->b == step.number;
    if (!__any_sync(~0u, !here)) return true;
    bool late = false;
    const bool over = patience.over(&late);
    if (g.no_wait) return true;
    const bool lost = patience.looked() && active && failed(source);
    if (late && !here) report_failure(g, step, twTimeout, source, 0);
    if (over && !late && !here) report_stopped(g, step, source, 0);
    if (__any_sync(~0u, over || lost)) return false;
  }
}

}  // namespace tw::nvlink
