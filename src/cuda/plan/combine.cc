// The plan of a combine: combine.h tells what it reads and writes. All percentages and row counts come from Tuning.
//
// What breaks if this changes: tail_packets must follow from what all ranks have alike (S4, S10: sender and owner count
// packets by one rule). Everything else is speed alone: terms are added in order of positions whatever the tiles (S9).
#include "cuda/plan/combine.h"

#include <algorithm>

#include "cuda/plan/tiles.h"

namespace tw::cuda {
namespace {

// Decides the tiles of a combine whose roles are known. `full`: its senders fill the link, or all rows are packets.
void share_out(const Budget& budget, const Shape& shape, int64_t returning, bool full, CombineParams* params) {
  CombineParams& p = *params;
  const Tuning& tuning = *budget.tuning;
  const bool any = p.kind == Kind::kGeneric;
  const bool sums = any && !p.plain && p.sums_fit;
  const bool wide = sums || !full;
  const int64_t each = sums ? tuning.summed_tiles : tuning.low_sm_tiles;
  // Tokens whose rows come as packets are in narrow tiles anyway, and stay so.
  p.wide = wide ? widen(p.tiles, p.tokens - p.tail_packets, int64_t{p.roles.receiving} * kWarps, each) : kNoneWide;
  p.single = p.wide.tiles() - std::min(p.wide.tiles(), static_cast<uint32_t>(p.roles.receiving) * kWarps * 7 / 8);
  p.per_tile = share_of(p.vectors, p.tiles);
  p.joins = wide ? 1 : 0;
  p.pushed = kPushedVectors;
  const auto parts = [&p](uint32_t pushed) { return (p.vectors + pushed - 1) / pushed; };
  // Usual calls by few SMs send whole rows where so few blocks send that the link has room for more; otherwise halves,
  // with which warps end sooner. (By 24 SMs a combine of 4096 tokens took 2 us longer with whole rows; by 16 it takes
  // 20 us longer with halves.) More SMs send usual tiles: by 64 it took 183 us with halves, 171 us with usual tiles.
  const bool large = sums || (p.plain && p.vectors_fit && wide && (any || budget.low_sm()));
  const uint32_t least = any || p.roles.sending < budget.device_sms / 16 ? 1 : 2;
  while (large && parts(p.pushed) > least &&
         returning * parts(2 * p.pushed) >= int64_t{p.roles.sending} * kWarps * each) {
    p.pushed *= 2;
  }
  p.pushed_parts = static_cast<int32_t>(p.sums_fit ? parts(p.pushed) : p.tiles.per_row.divisor);
  const int items = shape.chunk_rows * p.pushed_parts;
  const int turn = turn_rows(tuning, returning, p.roles.sending, budget.low_sm());
  const int chunks = any ? kWarps / 2 / items : turn / shape.chunk_rows;
  p.turn_chunks = full ? 1 : std::max(1, chunks);
  p.drawn = turns_ahead(p.turn_chunks * items);
}

}  // namespace

void plan_combine(const Budget& budget, const Shape& shape, const CombineFacts& facts, CombineParams* params) {
  CombineParams& p = *params;
  const Tuning& tuning = *budget.tuning;
  const bool same = p.rows_dtype == p.wire_dtype;
  const bool fits = p.vectors_fit && p.out_dtype == p.wire_dtype;
  const bool direct = fits && p.own_direct;
  // Rows that lie in a bank of the window go through the inbox, this rank's own too, in the same kernel.
  const bool usual = fits && p.plain && (p.own_direct || (p.late_signal && shape.staged == 0));
  const bool packets =
      !facts.parted && direct && (p.plain || (p.expert_major && same)) && all_packets(budget, shape, p.bound);
  p.kind = kind_of(budget, usual, packets);
  p.tail_packets = std::min(budget.packet_tokens, budget.summed_tail);
  const int64_t returning = static_cast<int64_t>(shape.ranks - (p.own_direct ? 1 : 0)) * p.bound;
  const int64_t rows = std::max<int64_t>(p.tokens, returning);
  p.tiles = tiles_of(words_of(shape.combine_bytes), 0, tile_rows(packets, p.tokens, p.bound),
                     int64_t{budget.max_grid} * kWarps / 2, packets && !p.plain ? kSummedGroups : kTileGroups);
  const bool both = p.send && p.receive;
  if (packets) {
    const int sends = p.plain ? tuning.packet_combine_sends : tuning.packet_combine_sends_summed;
    p.roles = packet_roles(budget, rows, p.tiles, both, sends, tuning.busy);
  } else {
    const bool simple = p.bound > budget.packet_tokens && p.plain;
    const int most =
        simple ? simple_senders(budget, tuning.combine_sends, tuning.combine_sends_most) : budget.max_grid / 2;
    p.roles = roles_of(budget, rows, p.tiles, both && facts.apart && returning > 0, most);
  }
  share_out(budget, shape, returning, packets || !underfills(budget, p.roles, tuning.combine_sends), &p);
  p.rehearses = p.roles.apart && p.bound > budget.packet_tokens;
}

// No row is a packet here, on any rank, as the type of rows says: scales of a block of 128 elements do not lie where
// packets of 120 bytes could bring them along. Most blocks send, as quantising takes longer than sums, in
// which they join when that is done. This rank's own rows go through its inbox like the others.
void plan_fp8(const Budget& budget, const Shape& shape, const CombineFacts& facts, CombineParams* params) {
  CombineParams& p = *params;
  p.kind = Kind::kGeneric;
  p.group.packet_tokens = p.tail_packets = 0;
  p.own_direct = p.plain = p.rehearses = 0;
  const auto parts = static_cast<int32_t>((p.elements + kFp8Tile - 1) / kFp8Tile);
  p.tiles = {};
  p.tiles.per_row = Divider::make(static_cast<uint32_t>(parts));
  p.wide = kNoneWide;
  const int64_t returning = static_cast<int64_t>(shape.ranks) * p.bound;
  const bool apart = p.send && p.receive && facts.apart && returning > 0;
  p.roles = roles_of(budget, std::max<int64_t>(p.tokens, returning), p.tiles, apart,
                     std::max(1, budget.max_grid * budget.tuning->fp8_combine_sends / 100));
  p.joins = 1;
  p.pushed_parts = parts;
  p.turn_chunks = 1;
  // A warp has up to two tiles that it has not sent when it looks for the next (combine/fp8_send.cuh).
  const int32_t items = shape.chunk_rows * parts;
  p.drawn = std::min(kChunks / 2, turns_ahead(items) + (2 * kWarps + items - 1) / items);
}

void plan_choices(const Budget& budget, const Shape& shape, bool packets, bool apart, CombineParams* params) {
  CombineParams& p = *params;
  const Tuning& tuning = *budget.tuning;
  p.kind = Kind::kGeneric;
  if (!packets) p.group.packet_tokens = p.tail_packets = 0;
  const int64_t returning = static_cast<int64_t>(shape.ranks) * p.bound;
  const int64_t rows = std::max<int64_t>(p.tokens, returning);
  p.tiles = tiles_of(words_of(shape.combine_bytes), 0, tile_rows(packets, p.tokens, p.bound),
                     int64_t{budget.max_grid} * kWarps / 2, kTileGroups);
  const bool both = p.send && p.receive;
  const int most = std::max(1, budget.max_grid * tuning.choices_sends / 100);
  p.roles = packets ? packet_roles(budget, rows, p.tiles, both, tuning.packet_combine_sends_summed, tuning.busy)
                    : roles_of(budget, rows, p.tiles, both && apart, most);
  p.per_tile = share_of(p.vectors, p.tiles);
  if (packets) return;
  p.pushed_parts = static_cast<int32_t>(p.tiles.per_row.divisor);
  p.turn_chunks = 1;
  p.drawn = turns_ahead(shape.chunk_rows * p.pushed_parts);
}

}  // namespace tw::cuda
