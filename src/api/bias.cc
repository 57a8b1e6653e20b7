// Checks of the rows from which a combine's sums start. They take the structs of a call whose rows and outputs are
// checked, and give CombineCall::bias. Nothing of them is compared between ranks: they travel nowhere.
//
// What breaks if this changes: a bias that overlaps an output otherwise than element for element is overwritten while
// later sums still start from it; one in a bank is overwritten by peers (S3).
#include "api/places.h"

namespace tw::api {
namespace {

// Whether sums take the place of what they start from: each is written where its own term was read.
bool is_in_place(const twTensor_t& bias, const int64_t strides[2], const twTensor_t& tokens, const CombineCall& call) {
  return bias.data == tokens.data && bias.dtype == tokens.dtype &&
         (tokens.shape[0] <= 1 || strides[0] == call.out_stride);
}

}  // namespace

Status check_bias(twGroup& group, const twHandle& handle, const twCombineInput_t& input,
                  const twCombineOutput_t& output, CombineCall* call) {
  constexpr Argument kName("input.bias");
  const twTensor_t& bias = input.bias;
  if (!is_given(bias)) return {};
  const twDtype_t out = output.tokens.dtype;
  if (bias.dtype != twFloat32 && bias.dtype != out) {
    const Sentence other = out == twFloat32 ? Sentence(",") : compose(", or {}", dtype_name(out));
    return fail(twInvalidArgument, "{} has dtype {}; it must be float32{} as {} has", kName, dtype_text(bias.dtype),
                other, Argument("output.tokens"));
  }
  const int64_t tokens = handle.all.tokens;
  const int64_t row_bytes = call->sent.elements * dtype_bytes(bias.dtype);
  int64_t strides[2];
  TW_RETURN_IF_FAILED(check_rows({kName, bias.dtype, {tokens}, call->sent.elements}, bias, strides));
  TW_RETURN_IF_FAILED(check_outside(group, kName, bias.data));
  const auto* const data = static_cast<const std::byte*>(bias.data);
  call->bias = {data == nullptr ? nullptr : data + handle.all.begin * strides[0], strides[0], bias.dtype};
  Extents written;
  if (!is_in_place(bias, strides, output.tokens, *call)) {
    written.add("output.tokens", extent_of(call->all_out, tokens, call->out_stride, call->out_stride));
  }
  if (call->sent.values) written.add_contiguous("output.choice_values", output.choice_values);
  Extents read;
  read.add(kName, extent_of(data, tokens, strides[0], row_bytes));
  return check_apart(written, read);
}

}  // namespace tw::api
