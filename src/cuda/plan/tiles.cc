// How wide tiles are: tiles.h tells what each function takes and gives.
//
// What breaks if this changes: speed, and the promise that every tile of every row is some warp's: per_row, parts and
// rows must together cover each row once, as the kernels count tiles by the same structs.
#include "cuda/plan/tiles.h"

#include <algorithm>

namespace tw::cuda {

Tiles tiles_of(uint64_t words, uint64_t whole, int64_t rows, int64_t warps, uint32_t most) {
  Tiles tiles{};
  tiles.words = static_cast<uint32_t>(words);
  tiles.packet_bytes = static_cast<uint32_t>(kPacketBytes * packets_of(words));
  tiles.groups = (tiles.packet_bytes + 4 * kPacketBytes - 1) / (4 * kPacketBytes);
  static_assert(words_of(meta_bytes(TW_MAX_TOP_K)) <= uint64_t{kMetaGroups} * 4 * kPacketWords);
  tiles.tile_groups = whole > 4 * kPacketWords ? kMetaGroups : 1;
  while (tiles.tile_groups < most && rows * tiles.groups > warps * tiles.tile_groups) tiles.tile_groups *= 2;
  tiles.per_row = Divider::make((tiles.groups + tiles.tile_groups - 1) / tiles.tile_groups);
  return tiles;
}

namespace {

// Gives the tiles of a row where each joins `parts` of the usual ones.
uint32_t per_row(const Tiles& tiles, uint32_t parts) { return (tiles.per_row.divisor + parts - 1) / parts; }
// Puts the first `rows` rows into such tiles.
WideTiles in_parts(const Tiles& tiles, uint32_t parts, int64_t rows) {
  return {Divider::make(per_row(tiles, parts)), parts, static_cast<uint32_t>(std::max<int64_t>(rows, 0))};
}
uint32_t two_of(const Tiles& tiles) { return std::min(2u, tiles.per_row.divisor); }

}  // namespace

WideTiles widen(const Tiles& tiles, int64_t rows, int64_t warps, int64_t each) {
  uint32_t parts = 1;
  while (per_row(tiles, parts) > 1 && rows * per_row(tiles, 2 * parts) >= warps * each) parts *= 2;
  return in_parts(tiles, parts, rows);
}

WideTiles first_wide(const Tiles& tiles, int64_t rows, int64_t warps) {
  const uint32_t parts = two_of(tiles);
  return in_parts(tiles, parts, std::min(rows, warps / per_row(tiles, parts)));
}

WideTiles last_narrow(const Tiles& tiles, int64_t rows, int64_t narrow) {
  return in_parts(tiles, two_of(tiles), rows - narrow);
}

int turn_rows(const Tuning& tuning, int64_t rows, int sending, bool low_sm) {
  const int64_t most = low_sm ? tuning.turn_rows_low_sm : tuning.turn_rows;
  const int64_t together = std::min<int64_t>(most, rows / tuning.turn_rows_share);
  return static_cast<int>(std::clamp<int64_t>(together / sending, 1, kWarps));
}

bool may_rehearse(const DispatchParams& p) {
  if (p.roles.apart == 0) return false;
  const int32_t rows = p.handle.marks != nullptr ? p.first_packet : kRound;
  if (p.first_packet < rows || p.wide.rows > static_cast<uint32_t>(rows)) return false;
  const int64_t tiles = p.wide.tiles() + (int64_t{rows} - p.wide.rows) * p.tiles.per_row.divisor;
  return tiles >= int64_t{p.roles.sending} * kWarps;
}

int32_t early_tiles(const DispatchParams& p) {
  const auto packets = static_cast<int64_t>(p.tokens - p.first_packet) * p.tiles.per_row.divisor;
  const int64_t begun = int64_t{p.roles.sending} * (kWarps - 1);
  const int64_t drawn = p.wide.tiles() + (int64_t{p.tokens} - p.wide.rows) * p.tiles.per_row.divisor - begun;
  return static_cast<int32_t>(std::clamp<int64_t>(std::min(packets / 4, drawn), 0, 2 * p.roles.sending));
}

uint32_t share_of(uint32_t vectors, const Tiles& tiles) {
  return (vectors + tiles.per_row.divisor - 1) / tiles.per_row.divisor;
}

}  // namespace tw::cuda
