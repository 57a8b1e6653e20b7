// The sending side of a dispatch: half of a block's warps, each on a unit of a row at a time.
#pragma once

#include "nvlink/received.cuh"

namespace tw::nvlink {

struct Block {
  const DispatchParams& p;
  Scratch scratch;
  Step step;
  std::byte* bank;  // of the step, in this rank's window

  __device__ int ranks() const { return p.group.map.shape().ranks; }
  __device__ uint32_t meta_words() const { return 1 + static_cast<uint32_t>(p.group.map.shape().top_k); }
  // Whether a unit holds what travels beside the payloads: all of it lies in the first.
  __device__ bool has_meta(const Unit& unit) const { return unit.number == 0; }
  // Rows for a rank that are no lines.
  __device__ int plain_before(int rank) const { return p.first_line > 0 ? scratch.before(p.first_line, rank) : 0; }
};

// What a warp has loaded of a unit before it knows where the row goes.
struct Ahead {
  Vec16 pair[kUnitGroups];  // of lines
  Choice choice;
};

__device__ inline void load_ahead(const DispatchParams& p, int token, const Unit& unit, Ahead* ahead) {
  if (unit.number == 0) ahead->choice = load_choice(p, token, static_cast<int>(threadIdx.x % 32));
  if (token >= p.first_line) load_words(p, token, unit, ahead->pair);
}

// A unit of a row's lines to all its ranks, and to this one's window, where no line is needed.
__device__ inline void send_lines(const Block& b, const Unit& unit, int fan, Ahead* ahead) {
  const DispatchParams& p = b.p;
  const Destination* const to = b.scratch.destinations();
  const uint64_t mine = p.group.map.line(b.step.lane, b.step.bank(), p.group.me, 0) + line_place(unit.begin);
  Parts<1> parts;
  parts.cover(p.units, unit);
  if (b.has_meta(unit)) {
    const uint32_t meta_words = b.meta_words();
#pragma unroll
    for (int g = 0; g < kMetaGroups; ++g) {
      const uint32_t w = first_word(unit.begin + g);
      if (w < meta_words) ahead->pair[g].a = b.scratch.meta()[w];
      if (w + 1 < meta_words) ahead->pair[g].b = b.scratch.meta()[w + 1];
    }
  }
#pragma unroll 1
  for (int position = 0; position < fan; ++position) {
    const Destination dest = to[position];
    if (dest.rank == p.group.me) {
      const int64_t row = row_at(p, dest.rank, dest.slot);
#pragma unroll
      for (int g = 0; g < kUnitGroups; ++g) {
        if (g < parts.groups) place_words(p, b.bank, row, unit, g, ahead->pair[g]);
      }
      continue;
    }
    const int index = dest.slot - b.plain_before(dest.rank);
    std::byte* const line = b.scratch.windows()[dest.rank] + mine + index * p.group.map.line_row();
    // The header's second half says which of the token's ranks this is.
    const uint64_t header = first_word(unit.begin) == 0 ? static_cast<uint64_t>(position) << 32 : 0;
#pragma unroll
    for (int g = 0; g < kUnitGroups; ++g) {
      if (g >= parts.groups) continue;
      store_pair(line + g * kGroupBytes, g == 0 ? ahead->pair[g].a | header : ahead->pair[g].a,
                 is_flag() ? b.step.number : ahead->pair[g].b);
    }
  }
}

// A unit of a payload's row to all its ranks.
template <class V, int kAtOnce>
__device__ inline void carry(const Block& b, int q, int token, uint32_t unit, int fan) {
  const PayloadIn& payload = b.p.payloads[q];
  const WindowMap& map = b.p.group.map;
  const Destination* const to = b.scratch.destinations();
  const std::byte* const from = payload.data + static_cast<int64_t>(token) * payload.stride;
  const uint64_t place = map.payload(b.step.lane, b.step.bank(), q, b.p.group.me, 0, b.p.bound);
  const uint64_t bytes = map.shape().payload_bytes[q];
  const uint32_t begin = unit * payload.per_unit;
  const uint32_t end = min(payload.vectors, begin + payload.per_unit);
#pragma unroll 1
  for (uint32_t base = begin + threadIdx.x % 32; base < end; base += 32 * kAtOnce) {
    V value[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (base + 32 * i < end) value[i] = load_fresh<V>(from + sizeof(V) * (base + 32 * i));
    }
#pragma unroll 1
    for (int position = 0; position < fan; ++position) {
      std::byte* const row = b.scratch.windows()[to[position].rank] + place + to[position].slot * bytes;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (base + 32 * i < end) *reinterpret_cast<V*>(row + sizeof(V) * (base + 32 * i)) = value[i];
      }
    }
  }
}

__device__ __noinline__ static void carry_narrow(const Block& b, int q, int token, uint32_t unit, int fan) {
  if (b.p.payloads[q].width >= 4) {
    carry<uint32_t, 2>(b, q, token, unit, fan);
  } else {
    carry<unsigned char, 2>(b, q, token, unit, fan);
  }
}

__device__ inline void send_plain(const Block& b, int token, uint32_t unit, int fan) {
#pragma unroll 1
  for (int q = 0; q < b.p.group.map.shape().payloads; ++q) {
    const int width = b.p.payloads[q].width;
    if (width == 16) {
      carry<uint4, 4>(b, q, token, unit, fan);
    } else {
      carry_narrow(b, q, token, unit, fan);
    }
  }
}

// Header, ids and weights of a row to where they lie in the window: of a row that is no line to all its ranks, of one
// that is to this rank alone. What stays here is taken at once. And the handle's copies of the routing, which its
// combine and later dispatches read.
__device__ inline void send_meta(const Block& b, int token, int fan) {
  const DispatchParams& p = b.p;
  const WindowMap& map = p.group.map;
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const int top_k = map.shape().top_k;
  const Destination* const to = b.scratch.destinations();
  const uint64_t* const words = b.scratch.meta();
  const uint64_t place = map.meta(b.step.lane, b.step.bank(), p.group.me, 0, p.bound);
#pragma unroll 1
  for (int position = 0; position < fan; ++position) {
    const Destination dest = to[position];
    if (token >= p.first_line && dest.rank != p.group.me) continue;
    const uint64_t header = words[0] | static_cast<uint64_t>(position) << 32;
    auto* const row =
        reinterpret_cast<uint64_t*>(b.scratch.windows()[dest.rank] + place) + int64_t{dest.slot} * (1 + top_k);
#pragma unroll 1
    for (int w = lane; w <= top_k; w += 32) row[w] = w == 0 ? header : words[w];
    if (dest.rank == p.group.me) take_meta(p, b.scratch, b.step, row_at(p, dest.rank, dest.slot), words, header);
  }
  if (lane == 0) p.handle.fan[token] = fan;
  Destination* const kept = p.handle.destinations + int64_t{token} * map.shape().fan_out();
#pragma unroll 1
  for (int i = lane; i < fan; i += 32) kept[i] = to[i];
  if (p.in.own) return;
  const auto* const items = reinterpret_cast<const uint32_t*>(words + 1);
#pragma unroll 1
  for (int k = lane; k < top_k; k += 32) {
    p.handle.ids[int64_t{token} * top_k + k] = static_cast<int32_t>(items[k]);
    p.handle.weights[int64_t{token} * top_k + k] = __uint_as_float(items[top_k + k]);
  }
}

__device__ inline void send_unit(const Block& b, int token, const Unit& unit, Ahead* ahead) {
  __syncwarp();  // the warp's places are about to be overwritten
  const int fan = find_destinations(b.p, b.scratch, token);
  if (b.has_meta(unit)) stage_meta(b.p, b.scratch, b.step, token, ahead->choice);
  __syncwarp();
  if (token >= b.p.first_line) {
    send_lines(b, unit, fan, ahead);
  } else {
    send_plain(b, token, unit.number, fan);
  }
  if (b.has_meta(unit)) send_meta(b, token, fan);
}

// The last of all warps that have sent rows as they lie tells the peers. S4: each warp has synchronised its threads,
// then counters chain them, in the block and on the device, then one fence is made for the system.
__device__ __noinline__ static void finish_plain(const Block& b) {
  const DispatchParams& p = b.p;
  const GroupView& g = p.group;
  __syncwarp();
  int last = 0;
  if (threadIdx.x % 32 == 0) {
    __threadfence_block();
    last = atomicAdd(b.scratch.plain(), 1) == kSendWarps - 1;
    if (last) {
      __threadfence_block();  // the counter in the block, too, is acquired
      last = last_to_send(g, b.step);
    }
  }
  if (!__shfl_sync(~0u, last, 0)) return;
  __syncwarp();  // what lane 0 has synchronised with, all have
  const auto lane = static_cast<int>(threadIdx.x % 32);
  if (p.first_line == p.tokens) {  // there are no lines
    const int token = p.tokens - 1;
    const auto count = [&](int rank) { return b.scratch.before(token, rank) + (b.scratch.goes(token, rank) ? 1 : 0); };
    return publish_words(g, b.step, Mode::kDispatch, count, lane, 32);
  }
  fence_system();
  const uint64_t place = g.map.word(b.step.lane, b.step.bank(), g.me) + kRowsOffset;
  for (int i = lane; i < b.ranks(); i += 32) store_word(b.scratch.windows()[i] + place, b.step.number);
}

// Unit u of all, of a row. The first of a row is the one with most to do, so it is another warp's from row to row.
__device__ inline Unit sent_unit(const Units& units, uint32_t u, uint32_t row) {
  const uint32_t per_row = units.per_row.divisor;
  return unit_of(units, per_row == 1 ? 0 : (u - row * per_row + row) % per_row);
}

// Units of all tokens in order, a warp's share of them. Tokens become known round by round. `ahead`: of the first unit.
__device__ inline void send(const Block& b, Ahead ahead) {
  const DispatchParams& p = b.p;
  const uint32_t per_row = p.units.per_row.divisor;
  const uint32_t warps = gridDim.x * kSendWarps;
  const uint32_t first_line = static_cast<uint32_t>(p.first_line) * per_row;
  uint32_t u = blockIdx.x + threadIdx.x / 32 * gridDim.x;
  bool plain = p.first_line > 0;  // and not finished yet
  bool loaded = true;
#pragma unroll 1
  for (int round = 0; round * kRound < p.tokens; ++round) {
    const uint32_t end = static_cast<uint32_t>(min((round + 1) * kRound, p.tokens)) * per_row;
    bool known = false;
#pragma unroll 1
    for (; u < end; u += warps) {
      const uint32_t row = divide(u, p.units.per_row);
      const Unit unit = sent_unit(p.units, u, row);
      if (!loaded) load_ahead(p, static_cast<int>(row), unit, &ahead);
      loaded = false;
      if (!known) meet<kThreads>(kRouted);
      known = true;
      if (plain && u >= first_line) finish_plain(b), plain = false;
      send_unit(b, static_cast<int>(row), unit, &ahead);
    }
    if (!known) meet<kThreads>(kRouted);
  }
  if (plain) finish_plain(b);
}

}  // namespace tw::nvlink
