// How rows of a call are shared out to warps.
#pragma once

#include "nvlink/params.h"

namespace tw::nvlink {

// While there are warps without work, in smaller parts. A warp has as much in flight as its unit holds, so large units
// are for when all warps have some. The first `whole` words of a row lie in one unit.
Units units_of(uint64_t words, uint64_t whole, int64_t rows, int64_t warps, uint32_t most = kUnitGroups);
// Rows that units are made for: of few tokens, a warp has one group of lines at a time.
constexpr int64_t unit_rows(bool lines, int32_t tokens, int32_t bound) {
  return lines && tokens <= kFewTokens ? 0 : bound;
}
// Vectors of a row in a unit.
uint32_t share_of(uint32_t vectors, const Units& units);

// As wide as leave every warp so many units, so that none is left with a long one. (Of 4096 tokens, a dispatch by 24
// SMs took 189 us with whole rows, 185 with halves, which is this, and 196 with quarters.)
inline constexpr int64_t kFewUnits = 16;
// The same of sums by expert, or weighted: what a unit is made of must be found first. (With 2 KB to a unit, as where
// rows are only moved, a combine of 4096 tokens took 640 us between two ranks of one device; so, 472.)
inline constexpr int64_t kSumUnits = 2;
WideUnits widen(const Units& units, int64_t rows, int64_t warps, int64_t each);
// With more SMs, those that each warp of a dispatch begins with are of two: what the link takes while the warps meet
// the instructions behind them.
WideUnits first_wide(const Units& units, int64_t rows, int64_t warps);
inline constexpr WideUnits kNoneWide{Divider{1, 0, 0}, 1, 0};
// Of a dispatch of rows alone by most SMs: usual units, but for the last rows and the lines, whose units (`units`) are
// half as large, so that warps have less left at the end. Then more SMs may send: with 44 of 132 a dispatch of 4096
// tokens took 166.4 us; with 34, usual units and 128 lines 167.5. (Of rows with scales it took 0.6 % longer so, with
// fewer SMs to receive than to send 1 %.)
WideUnits last_narrow(const Units& units, int64_t rows);
inline constexpr int kFillingKnown = 34;  // percent of the device's SMs
inline constexpr int kTailNarrow = 64;    // lines behind them, where others have kTailKnown

// Rows that a block sends in a turn (chunks.cuh), where the blocks do not fill the link. A turn costs a round trip and
// a fence, whatever is in it: with one row in each, 12 SMs took 113 us for the turns of 4096 rows alone. But what is in
// the last turns is known to its owners last. `rows`: that all blocks send, at most.
int turn_rows(int64_t rows, int sending, bool few_sms);

// Whether all that warps begin with are rows as they lie, which alone are rehearsed: and of the first round, where the
// kernel routes them itself.
bool may_rehearse(const DispatchParams& p);
// Of the lines behind other rows, units that go first: two for each block that sends, as up to twice as many receive,
// which are to take one each. They are none of those that warps begin with.
int32_t early_units(const DispatchParams& p);

}  // namespace tw::nvlink
