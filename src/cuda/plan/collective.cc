// The plan of a gather or reduce-scatter: collective.h tells what it reads and writes.
//
// What breaks if this changes: ranks must decide alike whether all rows are packets, how wide a row's packets are and
// how long chunks are (S4, S10: both ends look in the places that this gives); late_signal and own_pushed keep S3.
// Roles and tiles are speed alone.
#include "cuda/plan/collective.h"

#include <algorithm>

#include "cuda/plan/tiles.h"

namespace tw::cuda {

void plan_collective(const Budget& budget, const WindowMap& map, const CollectiveFacts& facts,
                     CollectiveParams* params) {
  CollectiveParams& p = *params;
  const Shape& shape = map.shape();
  const Tuning& tuning = *budget.tuning;
  uint64_t words = 0;
  uint64_t row_bytes = 0;
  for (int q = 0; q < p.tensors; ++q) {
    p.rows[q].first_word = static_cast<uint32_t>(words);
    words += words_of(p.rows[q].row_bytes);
    row_bytes += p.rows[q].row_bytes;
    p.pushed_parts += static_cast<int32_t>(p.rows[q].parts);
  }
  const uint64_t packet_row = kPacketBytes * packets_of(words);
  // A group's packets lie where they do whatever a step has in them (S10), so a flag is never another packet's data.
  const uint64_t room = static_cast<uint64_t>(budget.packet_tokens) * map.packet_row();
  const bool packets =
      shape.ranks > 1 && budget.packet_tokens > 0 && static_cast<uint64_t>(p.bound) * packet_row <= room;
  p.by_packets = packets;
  p.packets = PacketsAt::make(map, p.channel);
  p.packets.row = static_cast<uint32_t>(packet_row);
  // There are no more chunks than signals for them.
  p.chunk_rows = std::max(chunk_rows_of(row_bytes), shape.chunk_rows);
  p.turn_chunks = 1;
  p.drawn = turns_ahead(p.chunk_rows * p.pushed_parts);
  const CollectiveRows& first = p.rows[0];
  const bool same = !p.reduces || first.from == first.to;
  p.usual = p.tensors == 1 && same && first.width >= (packets ? 8 : 16);
  for (int q = 0; q < p.tensors; ++q) p.rows[q].width = p.rows[q].width == 16 ? 16 : p.rows[q].width >= 4 ? 4 : 1;

  const bool seen = facts.views && !packets;  // then the signals alone say that rows are there
  p.late_signal = facts.in_window || seen;
  p.own_pushed = facts.in_window || seen || facts.staged;
  const bool known = p.all_sizes || !p.flat;  // it is known where this rank's own rows belong
  const bool few = packets && p.bound <= tuning.own_by_senders;
  p.own_sent = few && !p.reduces && p.send && p.receive && !p.own_pushed && known;
  const bool others = packets && (p.reduces ? !p.own_pushed : p.own_sent);  // only the other ranks' rows are waited for
  const int32_t sources = facts.sources > 0 ? facts.sources : shape.ranks - (others ? 1 : 0);
  const int64_t rows = static_cast<int64_t>(sources) * p.bound;
  const int64_t for_rows = packets && p.bound <= kFewTokens ? 0 : p.bound;
  p.tiles = tiles_of(words, 0, for_rows, int64_t{budget.max_grid} * kWarps / 2);
  const bool both = p.send && p.receive;
  p.roles = packets ? packet_roles(budget, rows, p.tiles, both, tuning.packet_collective_sends, kWarps)
                    : roles_of(budget, rows * p.pushed_parts, p.tiles, both,
                               simple_senders(budget, tuning.collective_sends, tuning.collective_sends_most));
}

}  // namespace tw::cuda
