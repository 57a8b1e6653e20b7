// Checks of combines that return a row for each (token, k): of their layout, and of the weights by which the owner
// multiplies. They take the structs of a call whose rows are checked, and give CombineCall::weights.
//
// What breaks if this changes: weights that the output overlaps are overwritten while later tokens still need them.
#include "api/places.h"

namespace tw::api {
namespace {

// Checks weights of the call.
Status check_weights(twGroup& group, const twHandle& handle, const twCombineInput_t& input, CombineCall* call) {
  constexpr Argument kName("input.weights");
  if (input.weighting != twWeightNone) {
    return fail(twInvalidArgument,
                "{} is given, and {} is {}, which takes the handle's; with weights of the call it must be {}", kName,
                Argument("input.weighting"), Value(input.weighting), TW_CONSTANT(twWeightNone));
  }
  const int64_t tokens = handle.routing.tokens;
  const int32_t top_k = group.shape().top_k;
  int64_t strides[2];
  TW_RETURN_IF_FAILED(check_rows({kName, twFloat32, {tokens}, top_k}, input.weights, strides));
  TW_RETURN_IF_FAILED(check_outside(group, kName, input.weights.data));
  call->weights = {static_cast<const float*>(input.weights.data), strides[0] / int64_t{sizeof(float)}};
  Extents read;
  read.add(kName, extent_of(input.weights.data, tokens, strides[0], top_k * int64_t{sizeof(float)}));
  Extents written;
  written.add("output.tokens", extent_of(call->out, tokens, call->out_stride, call->out_stride));
  if (call->sent.values) {
    const int64_t row = top_k * int64_t{sizeof(float)};
    written.add("output.choice_values", extent_of(call->values.out, tokens, row, row));
  }
  return check_apart(written, read);
}

}  // namespace

Status check_per_expert(twGroup& group, const twHandle& handle, const twCombineInput_t& input, CombineCall* call) {
  const bool weighted = is_given(input.weights);
  if (group.shape().per_expert == 0) {
    if (!weighted) return {};
    return fail(twInvalidArgument, "{} is given, which {} of {} alone takes; this group has {}",
                Argument("input.weights"), Argument("config.combine_rows"), TW_CONSTANT(twRowPerExpert),
                TW_CONSTANT(twRowPerRank));
  }
  if (!layout_of(input.layout).by_expert) {
    return fail(twInvalidArgument, "{} is {}; with {} of {} it must be {} or {}", Argument("input.layout"),
                Value(input.layout), Argument("config.combine_rows"), TW_CONSTANT(twRowPerExpert),
                TW_CONSTANT(twExpertMajor), TW_CONSTANT(twGrouped));
  }
  if (call->sent.scales != twScalesNone) {
    return fail(twInvalidArgument, "{} is {}; with {} of {} it must be float32, bfloat16 or float16",
                Argument("input.wire_dtype"), dtype_text(input.wire_dtype), Argument("config.combine_rows"),
                TW_CONSTANT(twRowPerExpert));
  }
  if (weighted) return check_weights(group, handle, input, call);
  if (call->weighted) call->weights = {handle.routing.weights, group.shape().top_k};
  return {};
}

}  // namespace tw::api
