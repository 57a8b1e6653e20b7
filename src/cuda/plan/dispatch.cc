// The plan of a dispatch: dispatch.h tells what it reads and writes. All percentages and row counts come from Tuning.
//
// What breaks if this changes: speed alone. Receivers learn from the note how many rows are packets, so ranks need not
// agree on first_packet; slots do not depend on tiles or roles (S9).
#include "cuda/plan/dispatch.h"

#include <algorithm>

#include "cuda/plan/tiles.h"

namespace tw::cuda {
namespace {

// Gives the percentage of the device's SMs that fill the link with Simple rows.
int sends_of(const Tuning& tuning, const Shape& shape) {
  if (shape.payloads > 1) return tuning.dispatch_sends_payloads;
  return shape.exact() ? tuning.dispatch_sends_exact : tuning.dispatch_sends;
}

// Gives the token from which on rows travel as packets: as many rows do as pass the link in the time of the fence and
// the signal behind the Simple rows.
int32_t first_packet(const Budget& budget, const Shape& shape, int32_t tokens, int all, bool few) {
  const int32_t tail = tail_of(*budget.tuning, shape, all, few);
  return tokens <= budget.packet_tokens ? 0 : tokens - std::min<int32_t>(budget.packet_tokens, tail);
}

}  // namespace

void plan_dispatch(const Budget& budget, const Shape& shape, const DispatchFacts& facts, DispatchParams* params) {
  DispatchParams& p = *params;
  const Tuning& tuning = *budget.tuning;
  const bool packets = facts.usual && all_packets(budget, shape, p.bound);
  const bool usual = facts.usual && !packets;
  p.kind = kind_of(budget, facts.usual, packets);
  const bool both = p.send && p.receive;
  const int64_t rows = std::max<int64_t>(p.tokens, static_cast<int64_t>(shape.ranks - 1) * p.bound);
  const auto tiles = [&](uint32_t most) {
    return tiles_of(facts.words, words_of(meta_bytes(shape.top_k)), tile_rows(packets, p.tokens, p.bound),
                    int64_t{budget.max_grid} * kWarps / 2, most);
  };
  // A dispatch draws its packets from a work counter, so narrower tiles stay better up to larger calls: 256 tokens took
  // 15.1 us with two groups to a tile, 16.3 with four. (1024 took 60 with two and 49 with four.)
  p.tiles = tiles(packets && p.bound <= kRound ? kTileGroups / 2 : kTileGroups);
  const int sends = sends_of(tuning, shape);
  const auto simple = [&](int percent) {
    const int most = p.bound > budget.packet_tokens ? simple_senders(budget, percent, tuning.dispatch_sends_most)
                                                    : budget.max_grid / 2;
    return roles_of(budget, rows, p.tiles, both, most);
  };
  p.roles =
      packets ? packet_roles(budget, rows, p.tiles, both, tuning.packet_dispatch_sends, tuning.busy) : simple(sends);
  const bool few = underfills(budget, p.roles, sends);
  const Roles more = simple(tuning.dispatch_sends_known);
  const bool narrow = facts.metadata_known && usual && !few && shape.payloads == 1 && p.tokens > budget.packet_tokens &&
                      more.apart != 0 && more.sending <= more.receiving;
  const int tail = narrow                 ? tuning.dispatch_tail_narrow
                   : facts.metadata_known ? tuning.dispatch_tail_known
                                          : tuning.dispatch_tail;
  p.first_packet = first_packet(budget, shape, p.tokens, tail, few);
  if (narrow) {
    p.roles = more;
    p.tiles = tiles(kTileGroups / 2);
    p.wide = last_narrow(p.tiles, p.first_packet, tuning.narrow_rows);
  } else if (few) {
    p.wide = widen(p.tiles, p.first_packet, int64_t{p.roles.sending} * kWarps, tuning.low_sm_tiles);
  } else {
    p.wide = usual ? first_wide(p.tiles, p.first_packet, int64_t{p.roles.sending} * (kWarps - 1)) : kNoneWide;
  }
  // Blocks that receive Simple rows have little to do, so the other SMs are left to the kernel that comes next.
  if (!packets && !few && p.roles.apart) p.roles.receiving = std::min(p.roles.receiving, budget.max_grid / 2);
  if (usual && !few && p.first_packet > 0 && p.tokens > kRound) p.early = early_tiles(p);
  for (int q = 0; q < shape.payloads; ++q) p.payloads[q].per_tile = share_of(p.payloads[q].vectors, p.tiles);
  p.rehearses = may_rehearse(p);
}

}  // namespace tw::cuda
