// The table of layouts: what each order of received rows is, said once. The checks of the C API and both backends ask
// this table, and Python asks twGroupLayout, which tells it for a group; so shapes of outputs are known here alone.
//
// A new layout is a row here and a value of twLayout_t, with kernels or loops for what the columns do not say: where a
// row stands. If a column is changed, outputs have shapes that their writers do not follow.
#pragma once

#include "tokenway/tokenway.h"

namespace tw {

struct Layout {
  twLayout_t id;
  const char* name;  // of the constant
  // Whether there are as many rows as came, in one dimension: high throughput. Else a call's bound says how many.
  bool exact;
  // Whether a row stands under each local expert that its token chose, with that id alone. Else it stands once, under
  // its source, with all K ids.
  bool by_expert;

  // Whether rows are views of the window, where they arrive by source. By expert they are copied.
  constexpr bool views() const { return !by_expert; }
  // Whether the outputs have offsets. (By expert there are origins, counts by source and payloads by column too.)
  constexpr bool has_offsets() const { return exact && by_expert; }
  // How many blocks rows stand in, each with a count: one for each source or local expert.
  constexpr int64_t blocks(int64_t ranks, int64_t local_experts) const { return by_expert ? local_experts : ranks; }
  // Rows of a block for each of a call's bound. The exact layouts have no places that may stay empty.
  constexpr int64_t rows_per_bound(int64_t ranks) const { return exact ? 0 : by_expert ? ranks : 1; }
  constexpr int64_t ids_per_row(int64_t top_k) const { return by_expert ? 1 : top_k; }
};

inline constexpr Layout kLayouts[] = {
    {twRankMajor, "twRankMajor", false, false},
    {twExpertMajor, "twExpertMajor", false, true},
    {twFlat, "twFlat", true, false},
    {twGrouped, "twGrouped", true, true},
};

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
