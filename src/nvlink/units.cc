// How rows of a call are shared out to warps.
#include "nvlink/units.h"

#include <algorithm>

namespace tw::nvlink {

Units units_of(uint64_t words, uint64_t whole, int64_t rows, int64_t warps, uint32_t most) {
  Units units{};
  units.words = static_cast<uint32_t>(words);
  units.line_bytes = static_cast<uint32_t>(kLineBytes * lines_of(words));
  units.groups = (units.line_bytes + 4 * kLineBytes - 1) / (4 * kLineBytes);
  static_assert(words_of(meta_bytes(TW_MAX_TOP_K)) <= uint64_t{kMetaGroups} * 4 * kLineWords);
  units.unit_groups = whole > 4 * kLineWords ? kMetaGroups : 1;
  while (units.unit_groups < most && rows * units.groups > warps * units.unit_groups) units.unit_groups *= 2;
  units.per_row = Divider::make((units.groups + units.unit_groups - 1) / units.unit_groups);
  return units;
}

namespace {

// Units of so many of the others that a row has.
uint32_t per_row(const Units& units, uint32_t parts) { return (units.per_row.divisor + parts - 1) / parts; }
// The first rows in such units.
WideUnits in_parts(const Units& units, uint32_t parts, int64_t rows) {
  return {Divider::make(per_row(units, parts)), parts, static_cast<uint32_t>(std::max<int64_t>(rows, 0))};
}
uint32_t two_of(const Units& units) { return std::min(2u, units.per_row.divisor); }

}  // namespace

WideUnits widen(const Units& units, int64_t rows, int64_t warps, int64_t each) {
  uint32_t parts = 1;
  while (per_row(units, parts) > 1 && rows * per_row(units, 2 * parts) >= warps * each) parts *= 2;
  return in_parts(units, parts, rows);
}

WideUnits first_wide(const Units& units, int64_t rows, int64_t warps) {
  const uint32_t parts = two_of(units);
  return in_parts(units, parts, std::min(rows, warps / per_row(units, parts)));
}

WideUnits last_narrow(const Units& units, int64_t rows) {
  constexpr int64_t kNarrow = 64;
  return in_parts(units, two_of(units), rows - kNarrow);
}

int turn_rows(int64_t rows, int sending, bool few_sms) {
  // All blocks' together. By 24 SMs a combine of 4096 tokens took 180 us with 100 rows, 181 with 80 and 160; by 64 SMs
  // 171 with 52 and 78, 175 with 104. Of fewer tokens fewer: by 96 SMs 2048 took 93 us with 40, 99 with 80.
  const int64_t together = std::min<int64_t>(few_sms ? 104 : 80, rows / 28);
  return static_cast<int>(std::clamp<int64_t>(together / sending, 1, kWarps));
}

bool may_rehearse(const DispatchParams& p) {
  if (p.roles.apart == 0) return false;
  const int32_t rows = p.handle.marks != nullptr ? p.first_line : kRound;
  if (p.first_line < rows || p.wide.rows > static_cast<uint32_t>(rows)) return false;
  const int64_t units = p.wide.units() + (int64_t{rows} - p.wide.rows) * p.units.per_row.divisor;
  return units >= int64_t{p.roles.sending} * kWarps;
}

int32_t early_units(const DispatchParams& p) {
  const auto lines = static_cast<int64_t>(p.tokens - p.first_line) * p.units.per_row.divisor;
  const int64_t begun = int64_t{p.roles.sending} * (kWarps - 1);
  const int64_t drawn = p.wide.units() + (int64_t{p.tokens} - p.wide.rows) * p.units.per_row.divisor - begun;
  return static_cast<int32_t>(std::clamp<int64_t>(std::min(lines / 4, drawn), 0, 2 * p.roles.sending));
}

uint32_t share_of(uint32_t vectors, const Units& units) {
  return (vectors + units.per_row.divisor - 1) / units.per_row.divisor;
}

}  // namespace tw::nvlink
