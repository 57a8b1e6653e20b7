// Where a kernel's stores for a rank go, and what follows from how they get there. Kernels ask here and nowhere else
// how a peer is reached, so another transport (a network's) is added in this room alone. Takes a GroupView; gives
// addresses, and answers about the transport.
//
// Three transports are known. Windows: all devices of the group map each other's windows, and a store is at its place
// at once. Staged: nobody writes to a peer; rows and signals for it go into this rank's own outgoing blocks, by rank
// where a window has them by source, and what comes behind the kernel moves them (staged.h).
//
// Where a carrier's collectives do that, nobody but this rank's own stream writes into its window either, so its banks
// are its own affair: the host names one, and a step is left out where the number would give the other, without a
// signal to the peers, who all do so alike. Where kernels post the blocks (posted.h), peers write into the window as
// they do where it is mapped, so kernels count its banks, and a step that is left out for the sake of a view is one of
// all ranks, which a kernel before makes.
//
// What breaks if this changes: S1 and S2, where two ranks no longer agree which block of memory a step is in.
#pragma once

#include "cuda/launch/group_view.h"
#include "cuda/transport/store.cuh"

namespace tw::cuda {

__device__ inline bool is_staged(const GroupView& g) { return g.out != nullptr; }
// Whether a carrier's collectives move the blocks, in stream order.
__device__ inline bool over_carrier(const GroupView& g) { return is_staged(g) && g.posts == 0; }

// ---- Addresses

// Gives the window of a rank, from where it is found soonest. A peer's only where windows are mapped.
__device__ inline std::byte* window_of(const GroupView& g, int rank) {
  std::byte* const window = rank < kNear ? g.near_windows[rank] : g.windows[rank];
  return rank == g.me ? window : reachable(window);
}

// Gives where a kernel finds what belongs to a rank: its window, or, in a staged kernel that sends, what goes out.
__device__ inline std::byte* target_of(const GroupView& g, int rank, bool sends) {
  return sends && is_staged(g) ? g.out : window_of(g, rank);
}

// Gives the index under which this rank's rows lie there: a window has them by source, outgoing blocks by rank.
__device__ inline int source_at(const GroupView& g, int rank) { return is_staged(g) ? rank : g.me; }

// Gives where this rank's signal of a step for a rank goes.
__device__ inline std::byte* signal_target(const GroupView& g, int channel, int bank, int rank) {
  if (is_staged(g)) return g.out_signals + g.posts * bank + kSignalStride * static_cast<uint32_t>(rank);
  return window_of(g, rank) + g.map.signal(channel, bank, g.me);
}

// Gives in which bank of the load statistics the words of a dispatch come to lie. Over a carrier one bank is enough:
// the move of a dispatch's words comes behind the kernel that takes those of the one before.
__device__ inline int loads_bank(const GroupView& g, uint32_t dispatch) {
  return over_carrier(g) ? 0 : static_cast<int>(dispatch % WindowMap::kLoadsBanks);
}
// Gives where this rank's words of a dispatch for a rank go (exchange/loads.h).
__device__ inline std::byte* loads_target(const GroupView& g, int channel, uint32_t dispatch, int rank) {
  if (!is_staged(g)) return window_of(g, rank) + g.map.loads(channel, loads_bank(g, dispatch), g.me);
  const uint64_t words = WindowMap::loads_words(g.map.shape()) * static_cast<uint64_t>(rank);
  // Posted words are in the bank of their step, which the network may still read while the next one is written (T3).
  const auto bank = g.posts != 0 ? static_cast<int>((g.channels[channel].step + 1) & 1) : 0;
  return g.out_signals + g.posts * bank + outgoing_loads(g.map.shape().ranks) + sizeof(uint64_t) * words;
}

// Gives a partial's place in its owner's inbox, as an offset from target_of: by the owner's token and position where
// they are known, otherwise by the slot that its row came in. `header`: the row's header, or its slot.
__device__ inline uint64_t inbox_target(const GroupView& g, int channel, int bank, int owner, uint64_t header,
                                        int bound) {
  if (is_staged(g)) return g.map.inbox_slot(channel, bank, owner, static_cast<int>(header), bound);
  return g.map.inbox(channel, bank, static_cast<int>(header), static_cast<int>(header >> 32));
}
// Gives the same place as its owner reads it: where `from` has sent the partial of `slot`, for a token and position.
__device__ inline uint64_t inbox_source(const GroupView& g, int channel, int bank, int from, int slot, int bound,
                                        int token, int position) {
  return is_staged(g) ? g.map.inbox_slot(channel, bank, from, slot, bound)
                      : g.map.inbox(channel, bank, token, position);
}

// The same of the values of choices that return beside a partial.
__device__ inline uint64_t values_target(const GroupView& g, int channel, int bank, int owner, int slot, int bound,
                                         int token, int position) {
  return is_staged(g) ? g.map.slot_values(channel, bank, owner, slot, bound)
                      : g.map.inbox_values(channel, bank, token, position);
}
__device__ inline uint64_t values_source(const GroupView& g, int channel, int bank, int from, int slot, int bound,
                                         int token, int position) {
  return is_staged(g) ? g.map.slot_values(channel, bank, from, slot, bound)
                      : g.map.inbox_values(channel, bank, token, position);
}

// ---- What follows

// Whether rows of an exact layout go where the receiver wants them; otherwise they arrive in blocks by source and are
// moved.
__device__ inline bool places_rows(const GroupView& g) { return !is_staged(g); }
// Whether a partial's place at its owner must be looked up in its row's header.
__device__ inline bool asks_header(const GroupView& g) { return !is_staged(g); }
// Whether parts of a step have signals of their own; otherwise all of it is there when the step's signals are.
__device__ inline bool signals_parts(const GroupView& g) { return !is_staged(g); }
// Whether peers are told of a step that is left out for the sake of its bank.
__device__ inline bool tells_skips(const GroupView& g) { return !is_staged(g); }
// Whether the host watches how far this rank's steps are, and must be told.
__device__ inline bool tells_host(const GroupView& g) { return over_carrier(g); }

__device__ inline void begin_at_bank(const GroupView& g, int bank, uint64_t* number) {
  if (over_carrier(g) && static_cast<int>(*number & 1) != bank) ++*number;
}

}  // namespace tw::cuda
