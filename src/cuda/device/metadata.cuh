// Metadata of rows (header, ids, weights), and the words that packets are made of: out of the caller's tensors, into
// the window, the handle and what the caller sees.
//
// Takes DispatchParams and a token or a row; a warp works on one row at a time, and its place in shared memory
// (Scratch::meta) is its own. Gives checked ids: a bad one is reported and acts as -1.
//
// What breaks if this changes: the bits of what receivers see, and of the header, which a combine uses as a place at
// the owner (check_header keeps it from a stray write). Both ends must agree on the stream's words (S4, S10).
#pragma once

#include "cuda/device/ll128.cuh"
#include "cuda/device/routing.cuh"
#include "cuda/launch/dispatch.h"

namespace tw::cuda {

// A token's k-th id and weight, held by thread k % 32 of a warp. An id of 32 bits is not widened before it is used, as
// whoever loads a choice would wait for it there.
struct Choice {
  uint32_t low;
  uint32_t high;  // half of an id of 64 bits
  float weight;

  __device__ int64_t id(const IdsIn& in) const {
    return in.wide ? static_cast<int64_t>(low | static_cast<uint64_t>(high) << 32) : static_cast<int32_t>(low);
  }
};
__device__ inline Choice load_choice(const DispatchParams& p, int token, int k) {
  if (k >= p.group.map.shape().top_k) return {~0u, ~0u, 0.0f};
  const auto* const id = static_cast<const std::byte*>(p.in.ids) + id_offset(p.in, token, k);
  Choice choice{load_fresh<uint32_t>(id), ~0u, 0.0f};
  if (p.in.wide) choice.high = load_fresh<uint32_t>(id + sizeof(uint32_t));
  choice.weight = raw_weight(p.in, token, k);
  return choice;
}

// Whether this id is among the first 32 of its token too; for tokens of more ids than that.
__device__ __noinline__ static bool stands_before(int64_t first, int64_t id) {
  bool twice = false;
#pragma unroll 1
  for (int i = 0; i < 32; ++i) twice |= __shfl_sync(~0u, first, i) == id;
  return twice;
}

// Puts a token's metadata into the warp's place, as it lies in memory. A bad id acts as -1.
__device__ inline void stage_meta(const DispatchParams& p, const Scratch& scratch, const Step& step, int token,
                                  const Choice& first) {
  const int top_k = p.group.map.shape().top_k;
  auto* const meta = reinterpret_cast<uint32_t*>(scratch.meta());
  if (lane() == 0) *scratch.meta() = static_cast<uint32_t>(token);
#pragma unroll 1
  for (int base = 0; base < top_k; base += 32) {
    const int k = base + lane();
    const Choice choice = base == 0 ? first : load_choice(p, token, k);
    const int64_t raw = choice.id(p.in);
    int32_t id = valid_id(p.in, raw);
    const uint32_t same = __match_any_sync(~0u, id);
    bool twice = (same & below(lane())) != 0;
    if (base > 0) twice |= stands_before(first.id(p.in), raw);
    if (twice) id = -1;
    if (k >= top_k) continue;
    if (id < 0 && raw != -1) report_id(p.group, step, token, k, raw);
    meta[2 + k] = static_cast<uint32_t>(find_slot(p, id, token));
    meta[2 + top_k + k] = __float_as_uint(choice.weight);
  }
}

__device__ inline void show_id(const Shown& shown, int64_t at, int32_t id) {
  if (shown.wide) {
    static_cast<long long*>(shown.ids)[at] = id;
  } else {
    static_cast<int32_t*>(shown.ids)[at] = id;
  }
}

// Gives an id as its receiver shows it: views/rank_major.h, IdStyle::show.
__device__ inline int32_t shown_id(const DispatchParams& p, const Scratch& scratch, int32_t id) {
  if (id < 0 || id >= p.group.map.shape().experts) return p.shown.invalid;
  if (!p.shown.local) return id;
  const uint32_t expert = find_expert(p, scratch, id);
  return expert_rank(expert) == p.group.me ? expert_slot(expert) : p.shown.invalid;
}

// Shows one id and one weight of a row, bit for bit; `at` counts in [N * b * K].
__device__ inline void show_item(const DispatchParams& p, const Scratch& scratch, uint64_t at, uint32_t id,
                                 uint32_t weight) {
  const auto shown = static_cast<int32_t>(id);
  if (p.shown.ids != nullptr) show_id(p.shown, static_cast<int64_t>(at), shown_id(p, scratch, shown));
  if (p.shown.weights != nullptr) p.shown.weights[at] = __uint_as_float(weight);
}

// Checks a header, because combine writes where it says.
__device__ inline void check_header(const DispatchParams& p, const Step& step, uint64_t header) {
  const bool right = static_cast<uint32_t>(header) < static_cast<uint32_t>(p.bound) &&
                     static_cast<uint32_t>(header >> 32) < static_cast<uint32_t>(p.group.map.shape().fan_out());
  if (!right) report_failure(p.group, step, twInternalError, p.group.me, 0);
}

// Keeps and shows a row's metadata that has arrived: words as they travel, in shared memory. By a warp.
__device__ inline void take_meta(const DispatchParams& p, const Scratch& scratch, const Step& step, int64_t row,
                                 const uint64_t* words, uint64_t header) {
  const int top_k = p.group.map.shape().top_k;
  uint64_t* const kept = p.handle.meta + row * (1 + top_k);
  const auto* const items = reinterpret_cast<const uint32_t*>(words + 1);
#pragma unroll 1
  for (int i = lane(); i <= top_k; i += 32) kept[i] = i == 0 ? header : words[i];
  if (lane() == 0) check_header(p, step, header);
#pragma unroll 1
  for (int k = lane(); k < top_k; k += 32) {
    show_item(p, scratch, static_cast<uint64_t>(row * top_k + k), items[k], items[top_k + k]);
  }
}

// Gives row (source, slot) of [N, b]. Exact layouts number rows otherwise: Block::row.
__device__ inline int64_t row_at(const DispatchParams& p, int source, int slot) {
  return static_cast<int64_t>(source) * p.bound + slot;
}

// Gives the payload in which a word of the stream lies, and its byte in the row.
__device__ inline int payload_of(const DispatchParams& p, uint32_t w, uint64_t* at) {
  int q = 0;
#pragma unroll 1
  while (q + 1 < p.group.map.shape().payloads && w >= p.payloads[q + 1].first_word) ++q;
  *at = uint64_t{8} * (w - p.payloads[q].first_word);
  return q;
}

// Gives where the rows of a payload begin that have come to this rank.
__device__ inline std::byte* rows_begin(const DispatchParams& p, std::byte* bank, int payload) {
  std::byte* const receive_offset = p.receive_offset[payload];
  return receive_offset != nullptr ? receive_offset : bank + p.group.map.payload_begin(payload);
}

// Loads a word of a row's payloads as it is sent for a token, or stores one at its place in this rank's window. These
// serve calls of many payloads, and rows that are no multiple of 8 bytes or lie at odd addresses.
__device__ __noinline__ static uint64_t load_any_word(const DispatchParams& p, int token, uint32_t w) {
  uint64_t at = 0;
  const int q = payload_of(p, w, &at);
  const std::byte* const from = p.payloads[q].data + token * p.payloads[q].stride + at;
  if (p.whole) return load_fresh<unsigned long long>(from);
  return load_bytes(from, static_cast<int64_t>(p.group.map.shape().payload_bytes[q]) - static_cast<int64_t>(at));
}
__device__ __noinline__ static void place_any_word(const DispatchParams& p, std::byte* bank, int64_t row, uint32_t w,
                                                   uint64_t value) {
  uint64_t at = 0;
  const int q = payload_of(p, w, &at);
  const auto bytes = static_cast<int64_t>(p.group.map.shape().payload_bytes[q]);
  std::byte* const to = rows_begin(p, bank, q) + row * bytes + at;
  if (p.whole) {
    *reinterpret_cast<uint64_t*>(to) = value;
  } else if (static_cast<int64_t>(at) < bytes) {  // else padding of the last packet
    store_bytes(to, value, bytes - static_cast<int64_t>(at));
  }
}

// Where a thread's words of a tile's first group lie in a row of each payload, if they do. The distance from a group to
// the next is always the same.
template <class Byte>
struct Rows {
  Byte* at[kFastPayloads];

  // row_of(q) gives the row of payload q; `first`: the thread's first word of the group.
  template <class RowOf>
  __device__ Rows(const DispatchParams& p, uint32_t first, RowOf&& row_of) {
#pragma unroll
    for (int q = 0; q < kFastPayloads; ++q) {
      at[q] = row_of(q) + int64_t{8} * (static_cast<int32_t>(first) - static_cast<int32_t>(p.payloads[q].first_word));
    }
  }
  __device__ Byte* word(const DispatchParams& p, uint32_t w, int group, int next) const {
    static_assert(kFastPayloads == 2);
    const bool second = p.group.map.shape().payloads > 1 && w + next >= p.payloads[1].first_word;
    return (second ? at[1] : at[0]) + 8 * (static_cast<int>(kGroupWords) * group + next);
  }
};

// Loads the thread's words of a tile's groups out of the payloads of a token; other words are 0.
template <bool kFast>
__device__ inline void load_words(const DispatchParams& p, int token, const Tile& tile, Vec16 (&pair)[kTileGroups]) {
  const uint32_t begin = p.payloads[0].first_word;
  const uint32_t first = first_word(tile.begin);
  const Rows<const std::byte> rows(p, first, [&](int q) { return p.payloads[q].data + token * p.payloads[q].stride; });
#pragma unroll
  for (int g = 0; g < kTileGroups; ++g) {
    const uint32_t w = first + kGroupWords * g;
    pair[g] = {};
    if (tile.begin + g >= tile.end) continue;
    const bool a = w >= begin && w < p.tiles.words;
    const bool b = w + 1 >= begin && w + 1 < p.tiles.words && !is_flag();
    if (kFast) {
      if (a) pair[g].a = load_fresh<unsigned long long>(rows.word(p, w, g, 0));
      if (b) pair[g].b = load_fresh<unsigned long long>(rows.word(p, w, g, 1));
    } else {
      if (a) pair[g].a = load_any_word(p, token, w);
      if (b) pair[g].b = load_any_word(p, token, w + 1);
    }
  }
}
// Stores such words at their place in the window.
template <bool kFast>
__device__ inline void place_words(const DispatchParams& p, std::byte* bank, int64_t row, const Tile& tile,
                                   uint32_t groups, const Vec16 (&pair)[kTileGroups]) {
  const uint32_t begin = p.payloads[0].first_word;
  const uint32_t first = first_word(tile.begin);
  const Rows<std::byte> rows(
      p, first, [&](int q) { return rows_begin(p, bank, q) + row * p.group.map.shape().payload_bytes[q]; });
#pragma unroll
  for (int g = 0; g < kTileGroups; ++g) {
    const uint32_t w = first + kGroupWords * g;
    if (g >= groups) continue;
    const bool a = w >= begin && w < p.tiles.words;
    const bool b = w + 1 >= begin && w + 1 < p.tiles.words && !is_flag();
    if (kFast) {
      if (a) *reinterpret_cast<uint64_t*>(rows.word(p, w, g, 0)) = pair[g].a;
      if (b) *reinterpret_cast<uint64_t*>(rows.word(p, w, g, 1)) = pair[g].b;
    } else {
      if (a) place_any_word(p, bank, row, w, pair[g].a);
      if (b) place_any_word(p, bank, row, w + 1, pair[g].b);
    }
  }
}

// Clears ids and weights of rows [from, to), which hold nothing. By `threads` threads.
__device__ __noinline__ static void show_nothing(const DispatchParams& p, int64_t from, int64_t to, int thread,
                                                 int threads) {
  if (from >= to || (p.shown.ids == nullptr && p.shown.weights == nullptr)) return;
  const int top_k = p.group.map.shape().top_k;
  const int64_t begin = from * top_k;
  const int64_t count = (to - from) * top_k;
#pragma unroll 1
  for (int64_t i = thread; i < count; i += threads) {
    if (p.shown.ids != nullptr) show_id(p.shown, begin + i, p.shown.invalid);
    if (p.shown.weights != nullptr) p.shown.weights[begin + i] = 0.0f;
  }
}

}  // namespace tw::cuda
