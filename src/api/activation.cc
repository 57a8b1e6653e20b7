// The entry points twSwiGlu and twSwiGluBackward: they check shapes, dtypes, strides and overlap of what the caller
// gave, and hand an activation::Call to src/activation, for host memory or for a device. What passes here is taken as
// right behind it: a shape that is not checked is read out of bounds.
#include "activation/swiglu.h"

#include "api/enter.h"
#include "api/matrix.h"
#include "core/config.h"
#include "quantize/fp8.h"

namespace {

using tw::Argument;
using tw::fail;
using tw::Status;
using tw::api::check_apart;
using tw::api::check_matrix;
using tw::api::check_memory;
using tw::api::check_stride;
using tw::api::check_vector;
using tw::api::extent;
using tw::api::extent_of_all;
using tw::api::Extents;
using tw::api::given;
using tw::api::matrix_of;
using tw::api::shape_text;

constexpr Argument kGateUp("gate_up");

Status check_row_vector(const Argument& name, const twTensor_t& tensor, int64_t rows) {
  TW_RETURN_IF_FAILED(check_vector(name, tensor, twFloat32));
  if (tensor.shape[0] == rows) return {};
  return fail(twInvalidArgument, "{} has {} elements; it must have one for each of the {} rows", name, tensor.shape[0],
              rows);
}

// Checks a matrix like gate_up: [M, I] or [M, 2 * I] of its dtype.
Status check_like(const Argument& name, const twTensor_t* tensor, const twTensor_t& gate_up, int64_t elements) {
  TW_RETURN_IF_FAILED(tw::api::check_float_rows(name, tensor, "one row for each of gate_up"));
  if (tensor->dtype != gate_up.dtype) {
    return fail(twInvalidArgument, "{} has dtype {}; it must be {}, as {} has it", name, tw::dtype_text(tensor->dtype),
                tw::dtype_name(gate_up.dtype), kGateUp);
  }
  if (tensor->shape[0] == gate_up.shape[0] && tensor->shape[1] == elements) return {};
  return fail(twInvalidArgument, "{} has shape {}; it must be {}, as {} has it", name,
              shape_text({tensor->shape[0], tensor->shape[1]}), shape_text({gate_up.shape[0], elements}), kGateUp);
}

Status check_inputs(const twTensor_t* gate_up, const twTensor_t* counts, const twTensor_t* weights,
                    tw::activation::Call* call) {
  TW_RETURN_IF_FAILED(tw::api::check_float_rows("gate_up", gate_up, "[M, 2 * I]"));
  const int64_t rows = gate_up->shape[0];
  if (gate_up->shape[1] % 2 != 0) {
    return fail(twInvalidArgument, "{} has shape {}; a row is gate and up, so it must have an even number", kGateUp,
                shape_text({rows, gate_up->shape[1]}));
  }
  TW_RETURN_IF_FAILED(tw::api::check_counts(counts, rows, &call->rows));
  if (given(weights)) {
    TW_RETURN_IF_FAILED(check_row_vector("weights", *weights, rows));
    call->weights = static_cast<const float*>(weights->data);
  }
  call->elements = gate_up->shape[1] / 2;
  call->dtype = gate_up->dtype;
  call->gate_up = matrix_of(*gate_up);
  return {};
}

// Checks quantised results: e4m3 values, and scales by row or by column.
Status check_quantised(const twTensor_t* out, const twTensor_t* scales, int32_t power_of_two,
                       tw::activation::Call* call) {
  TW_RETURN_IF_FAILED(check_matrix("out", out, "[M, I]"));
  if (out->shape[0] != call->rows.total || out->shape[1] != call->elements) {
    return fail(twInvalidArgument, "{} has shape {}; it must be {}, as {} has it", Argument("out"),
                shape_text({out->shape[0], out->shape[1]}), shape_text({call->rows.total, call->elements}), kGateUp);
  }
  TW_RETURN_IF_FAILED(check_memory("out", *out));
  if (!given(scales)) {
    return fail(twInvalidArgument, "{} is NULL; {} of dtype float8_e4m3fn has scales", Argument("scales"),
                Argument("out"));
  }
  TW_RETURN_IF_FAILED(check_matrix("scales", scales, "[M, ceil(I / 128)] or packed [M, ceil(I / 512)]"));
  const int64_t blocks = tw::quantize::Scales::blocks_of(call->elements);
  const bool packed = scales->dtype == twInt32;
  const int64_t columns = packed ? (blocks + 3) / 4 : blocks;
  if ((!packed && scales->dtype != twFloat32) || scales->shape[0] != call->rows.total || scales->shape[1] != columns) {
    return fail(twInvalidArgument, "{} is {} {}; it must be float32 {}, or packed int32 {}", Argument("scales"),
                tw::dtype_name(scales->dtype), shape_text({scales->shape[0], scales->shape[1]}),
                shape_text({call->rows.total, blocks}), shape_text({call->rows.total, (blocks + 3) / 4}));
  }
  TW_RETURN_IF_FAILED(check_memory("scales", *scales));
  TW_RETURN_IF_FAILED(tw::check_switch("power_of_two", power_of_two));
  if (packed && power_of_two == 0) {
    return fail(twInvalidArgument, "{} has dtype int32, of packed powers of two, but {} is {}; it must be 1",
                Argument("scales"), Argument("power_of_two"), tw::Value(power_of_two));
  }
  if (call->rows.total > 0 && call->elements > 0) {
    TW_RETURN_IF_FAILED(check_stride("out", *out, 1, 1, "the elements of a row are contiguous"));
    TW_RETURN_IF_FAILED(check_stride("out", *out, 0, call->elements, "quantised rows are C-contiguous"));
  }
  call->scales = {static_cast<float*>(scales->data), {}, blocks, packed};
  TW_RETURN_IF_FAILED(tw::api::check_scale_order(*scales, call->scales.stride));
  call->power_of_two = power_of_two == 1;
  return {};
}

void add_inputs(const twTensor_t* gate_up, const twTensor_t* counts, const twTensor_t* weights, Extents* inputs) {
  inputs->add("gate_up", extent(*gate_up));
  if (given(counts)) inputs->add("counts", extent_of_all(*counts));
  if (given(weights)) inputs->add("weights", extent_of_all(*weights));
}

}  // namespace

twResult_t twSwiGlu(const twTensor_t* gate_up, const twTensor_t* counts, const twTensor_t* weights,
                    const twTensor_t* out, const twTensor_t* scales, int32_t power_of_two, int32_t device,
                    void* stream) {
  return tw::api::enter([&]() -> Status {
    tw::activation::Call call{};
    TW_RETURN_IF_FAILED(check_inputs(gate_up, counts, weights, &call));
    const bool quantised = out != nullptr && out->dtype == twFloat8e4m3;
    if (quantised) {
      TW_RETURN_IF_FAILED(check_quantised(out, scales, power_of_two, &call));
    } else {
      TW_RETURN_IF_FAILED(check_like("out", out, *gate_up, call.elements));
      if (given(scales)) {
        return fail(twInvalidArgument, "{} is given, but {} has dtype {}; only float8_e4m3fn has scales",
                    Argument("scales"), Argument("out"), tw::dtype_name(out->dtype));
      }
    }
    TW_RETURN_IF_FAILED(tw::api::check_place(device, stream));
    call.out = matrix_of(*out);
    if (call.rows.total > 0 && call.elements > 0) {
      Extents outputs;
      Extents inputs;
      outputs.add("out", extent(*out));
      if (quantised) outputs.add("scales", extent_of_all(*scales));
      add_inputs(gate_up, counts, weights, &inputs);
      TW_RETURN_IF_FAILED(check_apart(outputs, inputs));
    }
    if (device >= 0) {
#if TOKENWAY_WITH_CUDA
      return tw::activation::swiglu_cuda(call, device, stream);
#else
      return tw::api::without_cuda(device);
#endif
    }
    if (call.elements > 0) tw::activation::swiglu_cpu(call);
    return {};
  });
}

twResult_t twSwiGluBackward(const twTensor_t* gate_up, const twTensor_t* counts, const twTensor_t* weights,
                            const twTensor_t* gradient, const twTensor_t* of_gate_up, const twTensor_t* of_weights,
                            int32_t device, void* stream) {
  return tw::api::enter([&]() -> Status {
    tw::activation::Call call{};
    TW_RETURN_IF_FAILED(check_inputs(gate_up, counts, weights, &call));
    TW_RETURN_IF_FAILED(check_like("gradient", gradient, *gate_up, call.elements));
    TW_RETURN_IF_FAILED(check_like("of_gate_up", of_gate_up, *gate_up, 2 * call.elements));
    call.out = matrix_of(*gradient);
    call.of_gate_up = matrix_of(*of_gate_up);
    if (given(of_weights)) {
      TW_RETURN_IF_FAILED(check_row_vector("of_weights", *of_weights, call.rows.total));
      call.of_weights = static_cast<float*>(of_weights->data);
    }
    TW_RETURN_IF_FAILED(tw::api::check_place(device, stream));
    if (call.rows.total > 0 && call.elements > 0) {
      Extents outputs;
      Extents inputs;
      outputs.add("of_gate_up", extent(*of_gate_up));
      if (given(of_weights)) outputs.add("of_weights", extent_of_all(*of_weights));
      add_inputs(gate_up, counts, weights, &inputs);
      inputs.add("gradient", extent(*gradient));
      TW_RETURN_IF_FAILED(check_apart(outputs, inputs));
    }
    if (device >= 0) {
#if TOKENWAY_WITH_CUDA
      return tw::activation::swiglu_backward_cuda(call, device, stream);
#else
      return tw::api::without_cuda(device);
#endif
    }
    if (call.elements > 0) tw::activation::swiglu_backward_cpu(call);
    return {};
  });
}
