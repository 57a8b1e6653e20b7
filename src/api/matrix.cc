// Checks of matrices for the calls beside the exchange (api/matrix.h). They take a tensor and its name and give a
// Status. The limits on sizes and strides keep every byte offset that src/quantize and src/activation compute within 64
// bits: a wider limit lets their kernels and loops read and write elsewhere.
#include "api/matrix.h"

#include <algorithm>
#include <functional>

#include "core/config.h"

namespace tw::api {

std::string shape_text(std::initializer_list<int64_t> shape) {
  std::string text = "[";
  for (const int64_t n : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(n);
  return text + "]";
}

Status check_matrix(const Argument& name, const twTensor_t* tensor, const char* wanted) {
  if (tensor == nullptr) return fail(twInvalidArgument, "{} is NULL", name);
  if (tensor->ndim != 2) {
    return fail(twInvalidArgument, "{} has {} dimensions; it must have 2, {}", name, tensor->ndim, wanted);
  }
  for (int i = 0; i < 2; ++i) {
    if (tensor->shape[i] >= 0) continue;
    return fail(twInvalidArgument, "{} has shape {}; sizes are not negative", name,
                shape_text({tensor->shape[0], tensor->shape[1]}));
  }
  return {};
}

Status check_memory(const Argument& name, const twTensor_t& tensor) {
  if (tensor.shape[0] == 0 || tensor.shape[1] == 0) return {};
  if (tensor.data == nullptr) return fail(twInvalidArgument, "{} has data NULL", name);
  const auto bytes = static_cast<uintptr_t>(tw::dtype_bytes(tensor.dtype));
  if (reinterpret_cast<uintptr_t>(tensor.data) % bytes == 0) return {};
  return fail(twInvalidArgument, "{} has data {}; it must be aligned to {} bytes", name, tensor.data, bytes);
}

Status check_stride(const Argument& name, const twTensor_t& tensor, int dimension, int64_t wanted, const char* why) {
  if (tensor.shape[dimension] <= 1 || tensor.stride[dimension] == wanted) return {};
  return fail(twInvalidArgument, "{} has stride {} in dimension {} of shape {}; it must be {}: {}", name,
              tensor.stride[dimension], dimension, shape_text({tensor.shape[0], tensor.shape[1]}), wanted, why);
}

Status check_float_rows(const Argument& name, const twTensor_t* rows, const char* wanted) {
  TW_RETURN_IF_FAILED(check_matrix(name, rows, wanted));
  if (!tw::is_summable(rows->dtype)) {
    return fail(twInvalidArgument, "{} has dtype {}; it must be float32, bfloat16 or float16", name,
                tw::dtype_text(rows->dtype));
  }
  // Every byte of it, and of what is computed from it, has a 64-bit offset.
  const int64_t largest = INT64_MAX / 32 / std::max<int64_t>(rows->shape[0], 1);
  if (rows->shape[1] > largest) {
    return fail(twInvalidArgument, "{} has shape {}; with so many rows one must have at most {} elements", name,
                shape_text({rows->shape[0], rows->shape[1]}), largest);
  }
  TW_RETURN_IF_FAILED(check_memory(name, *rows));
  if (rows->shape[0] == 0 || rows->shape[1] == 0) return {};
  TW_RETURN_IF_FAILED(check_stride(name, *rows, 1, 1, "the elements of a row are contiguous"));
  if (rows->shape[0] > 1 && (rows->stride[0] > largest || rows->stride[0] < -largest)) {
    return fail(twInvalidArgument, "{} has stride {} in dimension 0; it must be from {} to {}", name, rows->stride[0],
                -largest, largest);
  }
  return {};
}

Extent extent(const twTensor_t& matrix) {
  const int64_t bytes = tw::dtype_bytes(matrix.dtype);
  return extent_of(matrix.data, matrix.shape[0], matrix.stride[0] * bytes, matrix.shape[1] * bytes);
}

Status check_place(int32_t device, const void* stream) {
  if (device < -1) {
    return fail(twInvalidArgument, "{} is {}; it must be -1 (host memory) or a CUDA device from 0", Argument("device"),
                Value(device));
  }
  if (device == -1 && stream != nullptr) {
    return fail(twInvalidArgument, "{} is {}; it must be NULL for host memory (device -1)", Argument("stream"), stream);
  }
  return {};
}

Status without_cuda(int32_t device) {
  return fail(twUnsupported, "{} is {}, but this library was built without CUDA; give host memory and -1",
              Argument("device"), Value(device));
}

}  // namespace tw::api
