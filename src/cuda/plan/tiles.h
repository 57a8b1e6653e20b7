// How wide the tiles of a call are. A tile is what a warp sends, receives or sums at a time.
//
// What breaks if this changes: speed, and the promise that every tile of every row is somebody's (the kernels count
// tiles by the same structs, launch/tiles.h).
#pragma once

#include "cuda/launch/dispatch.h"
#include "cuda/plan/tuning.h"

namespace tw::cuda {

// While there are warps without work, in smaller parts. A warp has as much in flight as its tile holds, so large tiles
// are for when all warps have some. The first `whole` words of a row lie in one tile.
Tiles tiles_of(uint64_t words, uint64_t whole, int64_t rows, int64_t warps, uint32_t most = kTileGroups);
// Rows that tiles are made for: of few tokens, a warp has one group of packets at a time.
constexpr int64_t tile_rows(bool packets, int32_t tokens, int32_t bound) {
  return packets && tokens <= kFewTokens ? 0 : bound;
}
// Vectors of a row in a tile.
uint32_t share_of(uint32_t vectors, const Tiles& tiles);

// The first `rows` rows in tiles as wide as leave each of `warps` warps `each` tiles, so that none is left with a long
// one.
WideTiles widen(const Tiles& tiles, int64_t rows, int64_t warps, int64_t each);
// With more SMs, those that each warp of a dispatch begins with are of two: what the link takes while the warps meet
// the instructions behind them.
WideTiles first_wide(const Tiles& tiles, int64_t rows, int64_t warps);
inline constexpr WideTiles kNoneWide{Divider{1, 0, 0}, 1, 0};
// For a dispatch of rows alone by most SMs: usual tiles for all but the last `narrow` of `rows` rows. Those, and the
// packets behind them, go in `tiles`, which are half as large, so that warps have less left at the end.
WideTiles last_narrow(const Tiles& tiles, int64_t rows, int64_t narrow);

// Rows that a block sends in a turn (combine/chunks.cuh), where the blocks do not fill the link. A turn costs a round
// trip and a fence, whatever is in it: with one row in each, 12 SMs took 113 us for the turns of 4096 rows alone. But
// what is in the last turns is known to its owners last. `rows`: that all blocks send, at most.
int turn_rows(const Tuning& tuning, int64_t rows, int sending, bool low_sm);

// Whether all that warps begin with are rows as they lie, which alone are rehearsed: and of the first round, where the
// kernel routes them itself.
bool may_rehearse(const DispatchParams& p);
// Of the packets behind other rows, tiles that go first: two for each block that sends, as up to twice as many receive,
// which are to take one each. They are none of those that warps begin with.
int32_t early_tiles(const DispatchParams& p);

}  // namespace tw::cuda
