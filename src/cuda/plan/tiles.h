// How wide the tiles of a call are. A tile is what a warp sends, receives or sums at a time.
//
// Pure: takes sizes of rows, how many there are and how many warps; gives Tiles, WideTiles and numbers for a kernel's
// parameters.
//
// What breaks if this changes: speed, and the promise that every tile of every row is some warp's (the kernels count
// tiles by the same structs, launch/tiles.h).
#pragma once

#include "cuda/launch/dispatch.h"
#include "cuda/plan/tuning.h"

namespace tw::cuda {

// Cuts rows into tiles of up to `most` groups: smaller ones while there are warps without work. A warp has as much in
// flight as its tile holds, so large tiles are for when all warps have some. The first `whole` words of a row lie in
// one tile.
Tiles tiles_of(uint64_t words, uint64_t whole, int64_t rows, int64_t warps, uint32_t most = kTileGroups);
// Gives the rows for which tiles are made: with few tokens 0, so that a warp has one group of packets at a time.
constexpr int64_t tile_rows(bool packets, int32_t tokens, int32_t bound) {
  return packets && tokens <= kFewTokens ? 0 : bound;
}
// Gives the vectors of a row that a tile holds.
uint32_t share_of(uint32_t vectors, const Tiles& tiles);

// Puts the first `rows` rows into tiles as wide as they can be while each of `warps` warps still has `each` of them, so
// that no warp is left with a long one at the end.
WideTiles widen(const Tiles& tiles, int64_t rows, int64_t warps, int64_t each);
// Where more SMs work, puts the rows with which each warp of a dispatch begins into tiles of two: the link takes these
// while the warps meet the instructions behind them for the first time.
WideTiles first_wide(const Tiles& tiles, int64_t rows, int64_t warps);
inline constexpr WideTiles kNoneWide{Divider{1, 0, 0}, 1, 0};
// Serves a dispatch of rows alone by most SMs: tiles of two for all but the last `narrow` of `rows` rows. Those, and
// the packets behind them, go in `tiles`, which are half as large, so that warps have less left at the end.
WideTiles last_narrow(const Tiles& tiles, int64_t rows, int64_t narrow);

// Gives the rows that a block sends in a turn (combine/chunks.cuh), where the blocks do not fill the link. A turn costs
// a round trip and a fence, whatever is in it: with one row in each, 12 SMs took 113 us for the turns of 4096 rows
// alone. But what is in the last turns is known to its owners last. `rows`: what all blocks send, at most.
int turn_rows(const Tuning& tuning, int64_t rows, int sending, bool low_sm);

// Whether a dispatch may rehearse: everything that warps begin with must be Simple rows, as only those are rehearsed,
// and must be of the first round where the kernel routes them itself.
bool may_rehearse(const DispatchParams& p);
// Gives how many tiles of the packets behind Simple rows are sent before all other rows: two for each block that sends,
// so that each of up to twice as many receiving blocks can take one. None of them is a tile that a warp begins with.
int32_t early_tiles(const DispatchParams& p);

}  // namespace tw::cuda
