// The entry points twQuantizeFp8, twQuantizeMxfp8 and twQuantizeNvfp4: they check shapes, dtypes, strides and overlap
// of what the caller gave, and hand a call to src/quantize, for host memory or for a device. What passes here is taken
// as right behind it: a shape that is not checked is read out of bounds.
#include <algorithm>

#include "api/enter.h"
#include "api/matrix.h"
#include "core/config.h"
#include "quantize/fp8.h"
#include "quantize/mxfp8.h"
#include "quantize/nvfp4.h"

namespace {

using tw::Argument;
using tw::check_switch;
using tw::fail;
using tw::Status;
using tw::Value;
using tw::api::check_apart;
using tw::api::check_counts;
using tw::api::check_float_rows;
using tw::api::check_matrix;
using tw::api::check_memory;
using tw::api::check_place;
using tw::api::check_stride;
using tw::api::extent;
using tw::api::extent_of_all;
using tw::api::Extents;
using tw::api::given;
using tw::api::shape_text;
using tw::quantize::kBlock;
using tw::quantize::kMxBlock;
using tw::quantize::kNvfp4Block;

// An output as it must be: [tokens, elements] of a dtype. text: its shape in letters.
struct Wanted {
  twDtype_t dtype;
  const char* text;
  int64_t tokens, elements;
};

// Checks all of an output but the order in which it lies.
Status check_shape(const Argument& name, const twTensor_t* tensor, const Wanted& wanted) {
  TW_RETURN_IF_FAILED(check_matrix(name, tensor, wanted.text));
  if (tensor->dtype != wanted.dtype) {
    return fail(twInvalidArgument, "{} has dtype {}; it must be {}", name, tw::dtype_text(tensor->dtype),
                tw::dtype_name(wanted.dtype));
  }
  if (tensor->shape[0] != wanted.tokens || tensor->shape[1] != wanted.elements) {
    return fail(twInvalidArgument, "{} has shape {}; it must be {}, as {} has it", name,
                shape_text({tensor->shape[0], tensor->shape[1]}), shape_text({wanted.tokens, wanted.elements}),
                Argument("rows"));
  }
  return check_memory(name, *tensor);
}

Status check_output(const Argument& name, const twTensor_t* tensor, const Wanted& wanted) {
  TW_RETURN_IF_FAILED(check_shape(name, tensor, wanted));
  if (wanted.tokens == 0 || wanted.elements == 0) return {};
  TW_RETURN_IF_FAILED(check_stride(name, *tensor, 1, 1, "an output is C-contiguous"));
  return check_stride(name, *tensor, 0, wanted.elements, "an output is C-contiguous");
}

// Checks rows of whole blocks.
Status check_whole_rows(const twTensor_t* rows, int64_t block) {
  TW_RETURN_IF_FAILED(check_float_rows("rows", rows, "[T, H]"));
  if (rows->shape[1] % block == 0) return {};
  return fail(twInvalidArgument, "{} has shape {}; {} elements share a scale, so a row must have a multiple of {}",
              Argument("rows"), shape_text({rows->shape[0], rows->shape[1]}), block, block);
}

// Scales are float32, or, as powers of two, bytes of UE8M0 in int32; both by row or by column.
Status check_fp8_scales(const twTensor_t* scales, int32_t power_of_two, tw::quantize::Call* call) {
  const int64_t blocks = tw::quantize::Scales::blocks_of(call->elements);
  const bool packed = scales != nullptr && scales->dtype == twInt32;
  const Wanted wanted = packed ? Wanted{twInt32, "[T, ceil(H / 512)]", call->rows.total, (blocks + 3) / 4}
                               : Wanted{twFloat32, "[T, ceil(H / 128)]", call->rows.total, blocks};
  TW_RETURN_IF_FAILED(check_shape("scales", scales, wanted));
  TW_RETURN_IF_FAILED(check_switch("power_of_two", power_of_two));
  call->power_of_two = power_of_two == 1;
  if (packed && !call->power_of_two) {
    return fail(twInvalidArgument, "{} has dtype int32, of packed powers of two, but {} is {}; it must be 1",
                Argument("scales"), Argument("power_of_two"), Value(power_of_two));
  }
  call->scales = {static_cast<float*>(scales->data), {}, blocks, packed};
  if (call->rows.total == 0 || call->elements == 0) return {};
  return tw::api::check_scale_order(*scales, call->scales.stride);
}

Status check_fp8(const twTensor_t* rows, const twTensor_t* counts, const twTensor_t* values, const twTensor_t* scales,
                 int32_t power_of_two, int32_t device, const void* stream, tw::quantize::Call* call) {
  TW_RETURN_IF_FAILED(check_float_rows("rows", rows, "[T, H]"));
  TW_RETURN_IF_FAILED(check_counts(counts, rows->shape[0], &call->rows));
  call->from = tw::api::matrix_of(*rows);
  call->dtype = rows->dtype;
  call->elements = rows->shape[1];
  TW_RETURN_IF_FAILED(check_output("values", values, {twFloat8e4m3, "[T, H]", call->rows.total, call->elements}));
  call->values = static_cast<uint8_t*>(values->data);
  TW_RETURN_IF_FAILED(check_fp8_scales(scales, power_of_two, call));
  TW_RETURN_IF_FAILED(check_place(device, stream));
  if (call->rows.total == 0 || call->elements == 0) return {};
  Extents inputs;
  Extents outputs;
  inputs.add("rows", extent(*rows));
  if (given(counts)) inputs.add("counts", extent_of_all(*counts));
  outputs.add("values", extent(*values));
  outputs.add("scales", extent_of_all(*scales));
  return check_apart(outputs, inputs);
}

// Scales of a byte each: [T, blocks] by row, C-contiguous, or in tiles, [G, ceil(T / G / 128), ceil(blocks / 4), 32, 4,
// 4], which six dimensions say.
Status check_byte_scales(const twTensor_t* scales, twDtype_t dtype, const char* text, const twTensor_t* counts,
                         const tw::quantize::Rows& rows, int64_t blocks, tw::quantize::ByteScales* to) {
  constexpr Argument kName("scales");
  using tw::quantize::kTileRows;
  using tw::quantize::kTileScales;
  const bool tiled = scales != nullptr && scales->ndim == 6;
  if (!tiled) {
    TW_RETURN_IF_FAILED(check_output(kName, scales, {dtype, text, rows.total, blocks}));
  } else {
    if (scales->dtype != dtype) {
      return fail(twInvalidArgument, "{} has dtype {}; it must be {}", kName, tw::dtype_text(scales->dtype),
                  tw::dtype_name(dtype));
    }
    const int64_t row_blocks = given(counts) ? counts->shape[0] : 1;
    const int64_t wanted[6] = {
        row_blocks, (rows.each + kTileRows - 1) / kTileRows, (blocks + kTileScales - 1) / kTileScales, 32, 4, 4};
    if (!std::equal(wanted, wanted + 6, scales->shape)) {
      return fail(twInvalidArgument, "{} has shape {}; in tiles it must be {}, as {} has it", kName,
                  shape_text(*scales), tw::api::shape_text(wanted, 6), Argument("rows"));
    }
    int64_t stride = 1;
    for (int i = 5; i >= 0; --i) {
      if (wanted[i] > 1 && scales->stride[i] != stride && rows.total > 0 && blocks > 0) {
        return fail(twInvalidArgument, "{} has stride {} in dimension {} of shape {}; it must be {}: {}", kName,
                    scales->stride[i], i, shape_text(*scales), stride, "an output is C-contiguous");
      }
      stride *= wanted[i];
    }
    if (scales->data == nullptr && stride > 0) return fail(twInvalidArgument, "{} has data NULL", kName);
  }
  *to = {static_cast<uint8_t*>(scales->data), blocks, rows.each, tiled};
  return {};
}

// What mxfp8 and nvfp4 have in common: rows, which of them are valid, and outputs. A Call has these members.
template <class Call>
Status check_blocks(const twTensor_t* rows, const twTensor_t* counts, const twTensor_t* values,
                    const twTensor_t* scales, const Wanted& wanted, Extents* inputs, Extents* outputs, Call* call) {
  TW_RETURN_IF_FAILED(check_counts(counts, rows->shape[0], &call->rows));
  TW_RETURN_IF_FAILED(
      check_byte_scales(scales, wanted.dtype, wanted.text, counts, call->rows, wanted.elements, &call->scales));
  call->elements = rows->shape[1];
  call->dtype = rows->dtype;
  call->from = tw::api::matrix_of(*rows);
  call->values = static_cast<uint8_t*>(values->data);
  if (given(counts) && counts->shape[0] > 0) inputs->add("counts", extent_of_all(*counts));
  if (call->rows.total == 0 || call->elements == 0) return {};
  inputs->add("rows", extent(*rows));
  outputs->add("values", extent(*values));
  outputs->add("scales", extent_of_all(*scales));
  return {};
}

// One float32, or a matrix of a global scale for all rows or each, and for all blocks of a row or each.
Status check_global_scale(const twTensor_t* scale, bool find, tw::quantize::Nvfp4Call* call) {
  constexpr Argument kName("global_scale");
  if (!given(scale)) return fail(twInvalidArgument, "{} is NULL", kName);
  if (scale->dtype != twFloat32) {
    return fail(twInvalidArgument, "{} has dtype {}; it must be float32", kName, tw::dtype_text(scale->dtype));
  }
  const int64_t most[2] = {call->rows.total, call->blocks()};
  if (scale->ndim < 0 || scale->ndim > 2) {
    return fail(twInvalidArgument, "{} has {} dimensions; it must have at most 2", kName, scale->ndim);
  }
  for (int i = 0; i < scale->ndim; ++i) {
    const int at = 2 - scale->ndim + i;
    const int64_t size = scale->shape[i];
    if (size == 1) continue;
    if (find) return fail(twInvalidArgument, "{} has size {}; one that is to be found is one number", kName, size);
    if (scale->ndim == 1 || size != most[at]) {
      return fail(twInvalidArgument,
                  "{} has size {} in dimension {} of {}; it must be one number, or [{} or 1, {} or 1]", kName, size, i,
                  scale->ndim, most[0], most[1]);
    }
    const int64_t largest = INT64_MAX / 32 / std::max<int64_t>(size, 1);
    if (scale->stride[i] < 0 || scale->stride[i] > largest) {
      return fail(twInvalidArgument, "{} has stride {} in dimension {}; it must be from 0 to {}", kName,
                  scale->stride[i], i, largest);
    }
    call->global_stride[at] = scale->stride[i];
  }
  if (scale->data == nullptr && (find || (most[0] > 0 && most[1] > 0))) {
    return fail(twInvalidArgument, "{} has data NULL", kName);
  }
  if (reinterpret_cast<uintptr_t>(scale->data) % sizeof(float) != 0) {
    return fail(twInvalidArgument, "{} has data {}; it must be aligned to 4 bytes", kName, scale->data);
  }
  call->global_scale = static_cast<float*>(scale->data);
  call->find = find;
  return {};
}

}  // namespace

twResult_t twQuantizeFp8(const twTensor_t* rows, const twTensor_t* counts, const twTensor_t* values,
                         const twTensor_t* scales, int32_t power_of_two, int32_t device, void* stream) {
  return tw::api::enter([&]() -> Status {
    tw::quantize::Call call{};
    TW_RETURN_IF_FAILED(check_fp8(rows, counts, values, scales, power_of_two, device, stream, &call));
    if (device >= 0) {
#if TOKENWAY_WITH_CUDA
      return tw::quantize::quantize_fp8_cuda(call, device, stream);
#else
      return tw::api::without_cuda(device);
#endif
    }
    if (call.elements > 0) tw::quantize::quantize_fp8_cpu(call);
    return {};
  });
}

twResult_t twQuantizeMxfp8(const twTensor_t* rows, const twTensor_t* counts, const twTensor_t* values,
                           const twTensor_t* scales, int32_t device, void* stream) {
  return tw::api::enter([&]() -> Status {
    TW_RETURN_IF_FAILED(check_whole_rows(rows, kMxBlock));
    const int64_t tokens = rows->shape[0];
    const int64_t elements = rows->shape[1];
    tw::quantize::MxCall call{};
    call.e5m2 = values != nullptr && values->dtype == twFloat8e5m2;
    const twDtype_t dtype = call.e5m2 ? twFloat8e5m2 : twFloat8e4m3;
    TW_RETURN_IF_FAILED(check_output("values", values, {dtype, "[T, H]", tokens, elements}));
    Extents inputs;
    Extents outputs;
    const Wanted wanted{twUint8, "[T, H / 32]", tokens, elements / kMxBlock};
    TW_RETURN_IF_FAILED(check_blocks(rows, counts, values, scales, wanted, &inputs, &outputs, &call));
    TW_RETURN_IF_FAILED(check_place(device, stream));
    TW_RETURN_IF_FAILED(check_apart(outputs, inputs));
    if (device >= 0) {
#if TOKENWAY_WITH_CUDA
      return tw::quantize::quantize_mxfp8_cuda(call, device, stream);
#else
      return tw::api::without_cuda(device);
#endif
    }
    if (elements > 0) tw::quantize::quantize_mxfp8_cpu(call);
    return {};
  });
}

twResult_t twQuantizeNvfp4(const twTensor_t* rows, const twTensor_t* counts, const twTensor_t* values,
                           const twTensor_t* scales, const twTensor_t* global_scale, int32_t find_global_scale,
                           int32_t device, void* stream) {
  return tw::api::enter([&]() -> Status {
    TW_RETURN_IF_FAILED(check_whole_rows(rows, kNvfp4Block));
    const int64_t tokens = rows->shape[0];
    const int64_t elements = rows->shape[1];
    tw::quantize::Nvfp4Call call{};
    TW_RETURN_IF_FAILED(check_output("values", values, {twUint8, "[T, H / 2]", tokens, elements / 2}));
    Extents inputs;
    Extents outputs;
    const Wanted wanted{twFloat8e4m3, "[T, H / 16]", tokens, elements / kNvfp4Block};
    TW_RETURN_IF_FAILED(check_blocks(rows, counts, values, scales, wanted, &inputs, &outputs, &call));
    TW_RETURN_IF_FAILED(check_switch("find_global_scale", find_global_scale));
    TW_RETURN_IF_FAILED(check_global_scale(global_scale, find_global_scale == 1, &call));
    TW_RETURN_IF_FAILED(check_place(device, stream));
    if (call.find || call.blocks() > 0) {
      (call.find ? outputs : inputs).add("global_scale", extent_of_all(*global_scale));
    }
    TW_RETURN_IF_FAILED(check_apart(outputs, inputs));
    if (device >= 0) {
#if TOKENWAY_WITH_CUDA
      return tw::quantize::quantize_nvfp4_cuda(call, device, stream);
#else
      return tw::api::without_cuda(device);
#endif
    }
    tw::quantize::quantize_nvfp4_cpu(call);
    return {};
  });
}
