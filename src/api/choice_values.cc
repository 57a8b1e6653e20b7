// Checks of the values of choices that a combine returns beside its rows. They take the structs of a call whose rows
// are checked, and give its ChoiceValues. Whether there are values at all belongs to what rows consist of
// (row_types.cc): ranks that differ in it must meet another note.
//
// What breaks if this changes: values that overlap an output are overwritten before a later part of the combine reads
// them.
#include "api/places.h"

namespace tw::api {
namespace {

Status check_overlap(const twHandle& handle, const CombineCall& call, const Lead& lead, int64_t row_bytes) {
  const int64_t tokens = handle.all.tokens;
  const auto top_k = static_cast<int64_t>(call.sent.map.shape().top_k);
  const auto* const out = reinterpret_cast<const std::byte*>(call.all_values);
  const NamedExtent values{"output.choice_values", {out, out + tokens * top_k * int64_t{sizeof(float)}}};
  Extents written;
  written.add("output.tokens", extent_of(call.all_out, tokens, call.out_stride, call.out_stride));
  written.add(values.name, values.bytes);
  Extents given;
  given.add("input.choice_values", extent(call.values.in, lead, row_bytes));
  TW_RETURN_IF_FAILED(check_apart(written, given));
  Extents last;
  last.add(values.name, values.bytes);
  Extents rows;
  rows.add("input.rows", extent(call.rows, lead, call.sent.elements * dtype_bytes(call.rows_dtype)));
  return check_apart(last, rows);
}

}  // namespace

Status check_choice_values(twGroup& group, const twHandle& handle, const twCombineInput_t& input,
                           const twCombineOutput_t& output, const Lead& lead, CombineCall* call) {
  if (is_given(output.choice_values) != call->sent.values) {
    const bool lacks = call->sent.values;
    return fail(twInvalidArgument, "{} is {}, and {} is {}; a combine has both or none",
                Argument("input.choice_values"), lacks ? "given" : "not given", Argument("output.choice_values"),
                lacks ? "not given" : "given");
  }
  if (!call->sent.values) return {};
  const Layout& layout = layout_of(input.layout);
  const int32_t top_k = group.shape().top_k;
  const int64_t per_row = layout.ids_per_row(top_k);
  int64_t strides[2];
  TW_RETURN_IF_FAILED(
      check_rows({"input.choice_values", twFloat32, lead.dimensions(), per_row, false, true, layout.by_expert},
                 input.choice_values, strides));
  TW_RETURN_IF_FAILED(check_alive(group, handle, "input.choice_values", input.choice_values));
  call->values.in = grid_of(handle, layout, input.choice_values, strides);
  TW_RETURN_IF_FAILED(
      check_rows({"output.choice_values", twFloat32, {handle.all.tokens}, top_k, true}, output.choice_values, strides));
  TW_RETURN_IF_FAILED(check_outside(group, "output.choice_values", output.choice_values.data));
  call->all_values = static_cast<float*>(output.choice_values.data);
  call->values.out = call->all_values + static_cast<int64_t>(handle.all.begin) * top_k;
  return check_overlap(handle, *call, lead, per_row * int64_t{sizeof(float)});
}

}  // namespace tw::api
