// Checks of matrices for the calls beside the exchange (api/matrix.h). They take a tensor and its name and give a
// Status. The limits on sizes and strides keep every byte offset that src/quantize and src/activation compute within 64
// bits: a wider limit lets their kernels and loops read and write elsewhere.
#include "api/matrix.h"

#include <algorithm>
#include <functional>

#include "core/config.h"

namespace tw::api {

bool given(const twTensor_t* tensor) { return tensor != nullptr && (tensor->data != nullptr || tensor->ndim != 0); }

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

Status check_vector(const Argument& name, const twTensor_t& tensor, twDtype_t dtype) {
  if (tensor.dtype != dtype) {
    return fail(twInvalidArgument, "{} has dtype {}; it must be {}", name, tw::dtype_text(tensor.dtype),
                tw::dtype_name(dtype));
  }
  if (tensor.ndim != 1 || tensor.shape[0] < 0) {
    return fail(twInvalidArgument, "{} has {} dimensions; it must have 1", name, tensor.ndim);
  }
  if (tensor.shape[0] > 1 && tensor.stride[0] != 1) {
    return fail(twInvalidArgument, "{} has stride {}; it must be 1: it is contiguous", name, tensor.stride[0]);
  }
  if (tensor.shape[0] == 0) return {};
  if (tensor.data == nullptr) return fail(twInvalidArgument, "{} has data NULL", name);
  if (reinterpret_cast<uintptr_t>(tensor.data) % sizeof(int32_t) == 0) return {};
  return fail(twInvalidArgument, "{} has data {}; it must be aligned to 4 bytes", name, tensor.data);
}

Status check_counts(const twTensor_t* counts, int64_t total, quantize::Rows* rows) {
  *rows = {total, total, total > 0 ? 1 : 0, nullptr};
  if (!given(counts)) return {};
  TW_RETURN_IF_FAILED(check_vector("counts", *counts, twInt32));
  const int64_t n = counts->shape[0];
  if (n > INT32_MAX || (n == 0 ? total != 0 : total % n != 0)) {
    return fail(twInvalidArgument, "{} has {} elements; their number must divide that of the rows, {}",
                Argument("counts"), n, total);
  }
  *rows = {total, n > 0 ? total / n : 0, total > 0 ? static_cast<int32_t>(n) : 0,
           static_cast<const int32_t*>(counts->data)};
  return {};
}

Status check_scale_order(const twTensor_t& scales, int64_t stride[2]) {
  const int64_t* const shape = scales.shape;
  for (const int i : {0, 1}) stride[i] = shape[i] > 1 ? scales.stride[i] : 0;
  const bool by_row = shape[1] <= 1 || (stride[1] == 1 && (shape[0] <= 1 || stride[0] >= shape[1]));
  const bool by_column = shape[0] <= 1 || (stride[0] == 1 && (shape[1] <= 1 || stride[1] >= shape[0]));
  // With one row or one column a stride alone does not tell where others lie: any that is positive is right.
  const auto right = [&](int i) {
    return shape[i] <= 1 ? stride[i] == 0 : stride[i] > 0 && stride[i] <= INT64_MAX / 32 / shape[i];
  };
  if ((by_row || by_column) && right(0) && right(1)) return {};
  return fail(twInvalidArgument, "{} has strides [{}, {}]; rows or columns must be contiguous, and apart",
              Argument("scales"), scales.stride[0], scales.stride[1]);
}

quantize::Matrix matrix_of(const twTensor_t& tensor) {
  const int64_t stride = tensor.shape[0] > 1 ? tensor.stride[0] * tw::dtype_bytes(tensor.dtype) : 0;
  return {static_cast<std::byte*>(tensor.data), stride};
}

Extent extent(const twTensor_t& matrix) {
  const int64_t bytes = tw::dtype_bytes(matrix.dtype);
  return extent_of(matrix.data, matrix.shape[0], matrix.stride[0] * bytes, matrix.shape[1] * bytes);
}

Extent extent_of_all(const twTensor_t& tensor) {
  int64_t last = 0;
  for (int i = 0; i < tensor.ndim; ++i) last += tensor.shape[i] > 1 ? (tensor.shape[i] - 1) * tensor.stride[i] : 0;
  const auto* const data = static_cast<const std::byte*>(tensor.data);
  return {data, data + (last + 1) * tw::dtype_bytes(tensor.dtype)};
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
