// Where the rows of a call lie: the leading dimensions of a layout in a group, the bytes that its rows touch, and
// whether memory is the window's. The checks of dispatches and combines share it; it takes what is known of the call
// and gives numbers alone.
//
// What breaks if this changes: an extent that is too small lets a call overwrite what it still reads, and memory that
// is taken for the caller's is overwritten by peers (S3).
#pragma once

#include <algorithm>
#include <vector>

#include "api/check.h"
#include "api/rows.h"

namespace tw::api {

// The leading dimensions of a layout: [N, b] or [L, N*b]; for a packed layout its rows, in one dimension.
struct Lead {
  int64_t blocks;
  int64_t rows;
  bool packed = false;

  // The dimensions as RowsWanted takes them.
  std::vector<int64_t> dimensions() const {
    return packed ? std::vector<int64_t>{rows} : std::vector<int64_t>{blocks, rows};
  }
};

inline Lead lead_of(const twGroup& group, const twHandle& handle, const Layout& layout, int32_t bound) {
  if (layout.exact) return {1, shown_rows(group, handle, layout, handle.is_sized()), true};
  const int64_t experts = group.context.local_experts;
  const int64_t rows = layout.rows_per_bound(group.ranks(), group.shape().top_k, experts) * bound;
  if (layout.packed) return {1, padded_rows(rows, experts, group.config.given.row_alignment), true};
  return {layout.blocks(group.ranks(), experts), rows};
}

inline Extent extent(const Grid& grid, const Lead& lead, int64_t row_bytes) {
  if (lead.blocks == 0 || lead.rows == 0) return {grid.data, grid.data};
  const int64_t spans[] = {(lead.blocks - 1) * grid.block_stride, (lead.rows - 1) * grid.row_stride};
  Extent all{grid.data, grid.data + row_bytes};
  for (const int64_t span : spans) (span < 0 ? all.begin : all.end) += span;
  return all;
}

// The rows of a checked tensor, whose byte strides check_rows has given.
inline Grid grid_of(const twHandle& handle, const Layout& layout, const twTensor_t& tensor, const int64_t strides[2]) {
  const auto* const data = static_cast<const std::byte*>(tensor.data);
  if (!layout.packed) return {data, strides[0], strides[1]};
  const int64_t* const of_experts = layout.exact ? handle.experts.begin : handle.experts.slot_begin;
  return {data, 0, strides[0], layout.by_expert ? of_experts : handle.counts.source};
}

// Whether memory belongs to a channel of the window, now or before a growth. Leases do not: they are the caller's.
inline bool in_banks(twGroup& group, const void* data) {
  if (!group.backend->in_window(data)) return false;
  const uint64_t offset = static_cast<uint64_t>(static_cast<const std::byte*>(data) - group.backend->window());
  const auto has = [&](const WindowMap& map) { return map.in_channels(offset); };
  return has(group.context.map) || std::any_of(group.context.former.begin(), group.context.former.end(), has);
}

// Fails for an output in a bank: what peers send next would overwrite it, and it what they have sent (S3).
inline Status check_outside(twGroup& group, const Argument& name, const void* data) {
  if (!in_banks(group, data)) return {};
  return fail(twInvalidArgument, "{} lies among the received rows of the window, where peers write; give other memory",
              name);
}

inline Status check_outside(twGroup& group, const Extents& outputs) {
  for (const NamedExtent& output : outputs) TW_RETURN_IF_FAILED(check_outside(group, output.name, output.bytes.begin));
  return {};
}

// Fails for rows in a bank that a later step has overwritten.
inline Status check_alive(twGroup& group, const twHandle& handle, const Argument& name, const twTensor_t& tensor) {
  if (!group.backend->in_window(tensor.data) || view_is_alive(group, handle)) return {};
  return fail(twInvalidUsage,
              "{} is a view of the window, and its lane has made another step since the handle's dispatch; combine "
              "from other memory, or dispatch again",
              name);
}

// Checks what a combine per expert has of its own, and that another has none of it; the checks of rows and of outputs
// have passed. Gives the weights of the call. In per_expert.cc.
Status check_per_expert(twGroup& group, const twHandle& handle, const twCombineInput_t& input, CombineCall* call);

// Checks the values of choices that a combine returns beside its rows, whose own checks have passed; in
// choice_values.cc. `lead`: that of the rows.
Status check_choice_values(twGroup& group, const twHandle& handle, const twCombineInput_t& input,
                           const twCombineOutput_t& output, const Lead& lead, CombineCall* call);

// Checks the rows from which sums start, where the output has been checked; in bias.cc.
Status check_bias(twGroup& group, const twHandle& handle, const twCombineInput_t& input,
                  const twCombineOutput_t& output, CombineCall* call);

}  // namespace tw::api
