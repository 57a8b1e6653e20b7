// The table of layouts: what each order of received rows is, said once. The checks of the C API and both backends ask
// this table, and Python asks twGroupLayout, which tells it for a group; so shapes of outputs are known here alone.
//
// A new layout is a row here and a value of twLayout_t, with kernels or loops for what the columns do not say: where a
// row stands. If a column is changed, outputs have shapes that their writers do not follow.
#pragma once

#include <algorithm>

#include "tokenway/tokenway.h"

namespace tw {

struct Layout {
  twLayout_t id;
  const char* name;  // of the constant
  // Whether there are as many rows as came: high throughput. Else a call's bound says how many.
  bool exact;
  // Whether a row stands under each local expert that its token chose, with that id alone. Else it stands once, under
  // its source, with all K ids.
  bool by_expert;
  // Whether rows stand in one dimension, the blocks one behind the other. Else each block has as much room.
  bool packed;

  // Whether rows are views of the window, where they arrive by source. By expert they are copied.
  constexpr bool views() const { return !by_expert; }
  // Whether the outputs have offsets. (By expert there are origins, counts by source and payloads by column too.)
  constexpr bool has_offsets() const { return packed && by_expert; }
  // Whether the receiver finds out where blocks begin, from the rows that have come.
  constexpr bool placed_by_receiver() const { return packed && !exact; }
  // How many blocks rows stand in, each with a count: one for each source or local expert.
  constexpr int64_t blocks(int64_t ranks, int64_t local_experts) const { return by_expert ? local_experts : ranks; }
  // Rows of a block for each of a call's bound; packed, of all blocks together, as a row stands under so many of its K
  // choices at most. The exact layouts have no places that may stay empty.
  constexpr int64_t rows_per_bound(int64_t ranks, int64_t top_k, int64_t local_experts) const {
    if (exact) return 0;
    if (packed) return ranks * std::min(top_k, local_experts);
    return by_expert ? ranks : 1;
  }
  constexpr int64_t ids_per_row(int64_t top_k) const { return by_expert ? 1 : top_k; }
};

inline constexpr Layout kLayouts[] = {
    {twRankMajor, "twRankMajor", false, false, false},
    {twExpertMajor, "twExpertMajor", false, true, false},
    {twFlat, "twFlat", true, false, true},
    {twGrouped, "twGrouped", true, true, true},
    {twGroupedByBound, "twGroupedByBound", false, true, true},
};

// The rows of all experts, where so many come at most and each expert's are padded to multiples of `alignment`.
constexpr int64_t padded_rows(int64_t rows, int64_t experts, int64_t alignment) {
  return (rows + experts * (alignment - 1)) / alignment * alignment;
}

// The layout with a value of the API; nullptr if there is none.
constexpr const Layout* find_layout(twLayout_t id) {
  for (const Layout& layout : kLayouts) {
    if (layout.id == id) return &layout;
  }
  return nullptr;
}

// The layout of a call that has been checked.
constexpr const Layout& layout_of(twLayout_t id) { return *find_layout(id); }

}  // namespace tw
