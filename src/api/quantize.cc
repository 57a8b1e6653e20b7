// The entry point twQuantizeFp8: it checks shapes, dtypes, strides and overlap of what the caller gave, and hands a
// quantize::Call to src/quantize, for host memory or for a device. What passes here is taken as right behind it: a
// shape that is not checked is read out of bounds.
#include "api/enter.h"
#include "api/matrix.h"
#include "core/config.h"
#include "quantize/fp8.h"

namespace {

using tw::Argument;
using tw::check_switch;
using tw::fail;
using tw::Status;
using tw::api::check_apart;
using tw::api::check_float_rows;
using tw::api::check_matrix;
using tw::api::check_memory;
using tw::api::check_place;
using tw::api::check_stride;
using tw::api::extent;
using tw::api::Extents;
using tw::api::shape_text;
using tw::quantize::kBlock;

Status check_output(const Argument& name, const twTensor_t* tensor, twDtype_t dtype, int64_t tokens, int64_t elements) {
  TW_RETURN_IF_FAILED(check_matrix(name, tensor, dtype == twFloat32 ? "[T, ceil(H / 128)]" : "[T, H]"));
  if (tensor->dtype != dtype) {
    return fail(twInvalidArgument, "{} has dtype {}; it must be {}", name, tw::dtype_text(tensor->dtype),
                tw::dtype_name(dtype));
  }
  if (tensor->shape[0] != tokens || tensor->shape[1] != elements) {
    return fail(twInvalidArgument, "{} has shape {}; it must be {}, as {} has it", name,
                shape_text({tensor->shape[0], tensor->shape[1]}), shape_text({tokens, elements}), Argument("rows"));
  }
  TW_RETURN_IF_FAILED(check_memory(name, *tensor));
  if (tokens == 0 || elements == 0) return {};
  TW_RETURN_IF_FAILED(check_stride(name, *tensor, 1, 1, "an output is C-contiguous"));
  return check_stride(name, *tensor, 0, elements, "an output is C-contiguous");
}

Status check_call(const twTensor_t* rows, const twTensor_t* values, const twTensor_t* scales, int32_t power_of_two,
                  int32_t device, const void* stream, tw::quantize::Call* call) {
  TW_RETURN_IF_FAILED(check_float_rows("rows", rows, "[T, H]"));
  const int64_t tokens = rows->shape[0];
  const int64_t elements = rows->shape[1];
  TW_RETURN_IF_FAILED(check_output("values", values, twFloat8e4m3, tokens, elements));
  TW_RETURN_IF_FAILED(check_output("scales", scales, twFloat32, tokens, (elements + kBlock - 1) / kBlock));
  TW_RETURN_IF_FAILED(check_switch("power_of_two", power_of_two));
  TW_RETURN_IF_FAILED(check_place(device, stream));
  if (tokens > 0 && elements > 0) {
    Extents inputs;
    Extents outputs;
    inputs.add("rows", extent(*rows));
    outputs.add("values", extent(*values));
    outputs.add("scales", extent(*scales));
    TW_RETURN_IF_FAILED(check_apart(outputs, inputs));
  }
  call->rows = static_cast<const std::byte*>(rows->data);
  call->row_stride = tokens > 1 ? rows->stride[0] * tw::dtype_bytes(rows->dtype) : 0;
  call->dtype = rows->dtype;
  call->tokens = tokens;
  call->elements = elements;
  call->values = static_cast<uint8_t*>(values->data);
  call->scales = static_cast<float*>(scales->data);
  call->power_of_two = power_of_two == 1;
  return {};
}

}  // namespace

twResult_t twQuantizeFp8(const twTensor_t* rows, const twTensor_t* values, const twTensor_t* scales,
                         int32_t power_of_two, int32_t device, void* stream) {
  return tw::api::enter([&]() -> Status {
    tw::quantize::Call call{};
    TW_RETURN_IF_FAILED(check_call(rows, values, scales, power_of_two, device, stream, &call));
    if (device >= 0) {
#if TOKENWAY_WITH_CUDA
      return tw::quantize::quantize_fp8_cuda(call, device, stream);
#else
      return tw::api::without_cuda(device);
#endif
    }
    if (call.tokens > 0 && call.elements > 0) tw::quantize::quantize_fp8_cpu(call);
    return {};
  });
}
