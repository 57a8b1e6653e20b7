// What dispatch/ll128.cu loads and stores of a tile: a thread's words of a row's payloads, and the metadata, which lies
// in the first packet of a row alone.
//
// Takes DispatchParams, a tile and where rows lie; gives addresses that are worked out before the kernel waits, and the
// stores and shuffles that use them. Usual calls only: at most 2 payloads, 8 ids.
//
// What breaks if this changes: the bits of what receivers see. Sender and receiver must agree on the stream (S4, S10).
// When the addresses are worked out is speed alone.
#pragma once

#include "cuda/dispatch/send.cuh"

namespace tw::cuda {

// ---- Payloads

// The thread's words of a tile's groups, in a row of the payloads.
template <int kGroups, class Byte>
struct Words {
  Rows<Byte> rows;
  uint32_t which;  // bit 2g + i: the i-th word of group g is a payload's; bit 8 + 2g + i: it is the second payload's

  // row_of(q) gives the row of payload q.
  template <class RowOf>
  __device__ Words(const DispatchParams& p, const Tile& tile, RowOf&& row_of)
      : rows(p, first_word(tile.begin), row_of), which(0) {
    const uint32_t second = p.group.map.shape().payloads > 1 ? p.payloads[1].first_word : ~0u;
#pragma unroll
    for (uint32_t i = 0; i < 2 * kGroups; ++i) {
      const uint32_t w = first_word(tile.begin) + kGroupWords * (i / 2) + i % 2;
      const bool there = i / 2 < tile.end - tile.begin && w >= p.payloads[0].first_word && w < p.tiles.words;
      if (there && !(i % 2 == 1 && is_flag())) which |= 1u << i;
      if (w >= second) which |= 256u << i;
    }
  }
  __device__ bool has(int g, int i) const { return (which >> (2 * g + i) & 1) != 0; }
  __device__ Byte* at(int g, int i) const {
    Byte* const row = (which >> (8 + 2 * g + i) & 1) != 0 ? rows.at[1] : rows.at[0];
    return row + 8 * (static_cast<int>(kGroupWords) * g + i);
  }
  __device__ void store(const Vec16* pair) const {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (has(g, 0)) *reinterpret_cast<uint64_t*>(at(g, 0)) = pair[g].a;
      if (has(g, 1)) *reinterpret_cast<uint64_t*>(at(g, 1)) = pair[g].b;
    }
  }
  __device__ void pin() { cuda::pin(rows.at[0], rows.at[1], which); }
};

// Gives the words of a row in this rank's window.
template <int kGroups>
__device__ inline Words<kGroups, std::byte> words_here(const DispatchParams& p, std::byte* bank, int64_t row,
                                                       const Tile& tile) {
  return {p, tile, [&](int q) { return rows_begin(p, bank, q) + row * p.group.map.shape().payload_bytes[q]; }};
}

// ---- Metadata

// Gives thread j of the warp the j-th of the token's 2K ids and weights, as they travel. A bad id acts as -1.
__device__ inline uint32_t checked_item(const Block& b, int token, const Choice& choice) {
  const int top_k = b.p.group.map.shape().top_k;
  const int64_t raw = choice.id(b.p.in);
  int32_t id = valid_id(b.p.in, raw);
  if ((__match_any_sync(~0u, id) & below(lane())) != 0) id = -1;
  if (lane() < top_k && id < 0 && raw != -1) report_id(b.p.group, b.step, token, lane(), raw);
  id = find_slot(b.p, id, token);
  const uint32_t weight = __shfl_sync(~0u, __float_as_uint(choice.weight), lane() - top_k);
  return lane() < top_k ? static_cast<uint32_t>(id) : weight;
}

// Puts the metadata in front of a group's words; all of it lies in the first packet.
__device__ inline void put_items(const Block& b, int token, uint32_t item, Vec16* pair) {
  static_assert(kFastIds < kPacketWords);
  const auto two = [&](int at) {
    const uint32_t low = __shfl_sync(~0u, item, at);
    return low | static_cast<uint64_t>(__shfl_sync(~0u, item, at + 1)) << 32;
  };
  const int w = 2 * lane();
  const uint64_t even = two(2 * w - 2);
  const uint64_t odd = two(2 * w);
  if (w < static_cast<int>(b.meta_words())) pair->a = w == 0 ? static_cast<uint32_t>(token) : even;
  if (w + 1 < static_cast<int>(b.meta_words())) pair->b = odd;
}

// Gives the j-th id or weight out of a packet that has come. `first`: the packet's first thread in the warp.
__device__ inline uint32_t item_of(const Vec16& pair, int j, int first = 0) {
  const int at = j + 2;  // the first word is the header
  const uint32_t half[4] = {__shfl_sync(~0u, static_cast<uint32_t>(pair.a), first + at / 4),
                            __shfl_sync(~0u, static_cast<uint32_t>(pair.a >> 32), first + at / 4),
                            __shfl_sync(~0u, static_cast<uint32_t>(pair.b), first + at / 4),
                            __shfl_sync(~0u, static_cast<uint32_t>(pair.b >> 32), first + at / 4)};
  const uint32_t low = (at & 1) != 0 ? half[1] : half[0];
  return (at & 2) == 0 ? low : (at & 1) != 0 ? half[3] : half[2];
}

// Where a rank keeps and shows a row's metadata: the thread's two words, and the lane()-th id and weight.
struct ItemsAt {
  uint64_t* window;
  uint64_t* kept;
  uint64_t shown;

  __device__ ItemsAt(const DispatchParams& p, std::byte* bank, int64_t row)
      : window(reinterpret_cast<uint64_t*>(bank + p.group.map.meta_begin())), kept(p.handle.meta) {
    const int top_k = p.group.map.shape().top_k;
    window += row * (1 + top_k) + 2 * lane();
    kept += row * (1 + top_k) + 2 * lane();
    shown = static_cast<uint64_t>(row * top_k + lane());
  }
  __device__ void pin() { cuda::pin(window, kept, shown); }
};
// Keeps the metadata of a row of [N, b] in the handle alone. `pair`: the words of the row's first group.
__device__ inline void keep_items(const Block& b, int64_t row, const Vec16& pair) {
  const uint32_t w = 2 * static_cast<uint32_t>(lane());
  uint64_t* const kept = b.p.handle.meta + row * b.meta_words() + w;
  if (w < b.meta_words()) kept[0] = pair.a;
  if (w + 1 < b.meta_words()) kept[1] = pair.b;
}
// Stores them. `pair`: the words of the row's first group; `id`, `weight`: the lane()-th.
__device__ inline void take_items(const Block& b, const ItemsAt& at, const Vec16& pair, uint32_t id, uint32_t weight) {
  const uint32_t w = 2 * static_cast<uint32_t>(lane());
  if (w < b.meta_words()) at.window[0] = at.kept[0] = pair.a;
  if (w + 1 < b.meta_words()) at.window[1] = at.kept[1] = pair.b;
  if (lane() < b.p.group.map.shape().top_k) show_item(b.p, b.scratch, at.shown, id, weight);
}

}  // namespace tw::cuda
