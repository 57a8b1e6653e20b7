// twQuantizeFp8: what the caller gave is checked here, and computed in src/quantize.
#include <algorithm>
#include <functional>
#include <initializer_list>

#include "api/enter.h"
#include "core/config.h"
#include "quantize/fp8.h"

namespace {

using tw::fail;
using tw::Status;
using tw::quantize::Call;
using tw::quantize::kBlock;

std::string shape_text(std::initializer_list<int64_t> shape) {
  std::string text = "[";
  for (const int64_t n : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(n);
  return text + "]";
}

Status check_matrix(const char* name, const twTensor_t* tensor) {
  if (tensor == nullptr) return fail(twInvalidArgument, "%s is NULL", name);
  if (tensor->ndim != 2) {
    return fail(twInvalidArgument, "%s has %d dimensions; it must have 2, [T, %s]", name, tensor->ndim,
                name[0] == 's' ? "ceil(H / 128)" : "H");
  }
  for (int i = 0; i < 2; ++i) {
    if (tensor->shape[i] >= 0) continue;
    return fail(twInvalidArgument, "%s has shape %s; sizes are not negative", name,
                shape_text({tensor->shape[0], tensor->shape[1]}).c_str());
  }
  return {};
}

Status check_memory(const char* name, const twTensor_t& tensor) {
  if (tensor.shape[0] == 0 || tensor.shape[1] == 0) return {};
  if (tensor.data == nullptr) return fail(twInvalidArgument, "%s has data NULL", name);
  const auto bytes = static_cast<uintptr_t>(tw::dtype_bytes(tensor.dtype));
  if (reinterpret_cast<uintptr_t>(tensor.data) % bytes == 0) return {};
  return fail(twInvalidArgument, "%s has data %p; it must be aligned to %zu bytes", name, tensor.data,
              static_cast<size_t>(bytes));
}

Status check_stride(const char* name, const twTensor_t& tensor, int dimension, int64_t wanted, const char* why) {
  if (tensor.shape[dimension] <= 1 || tensor.stride[dimension] == wanted) return {};
  return fail(twInvalidArgument, "%s has stride %lld in dimension %d of shape %s; it must be %lld: %s", name,
              static_cast<long long>(tensor.stride[dimension]), dimension,
              shape_text({tensor.shape[0], tensor.shape[1]}).c_str(), static_cast<long long>(wanted), why);
}

Status check_rows(const twTensor_t* rows) {
  TW_RETURN_IF_FAILED(check_matrix("rows", rows));
  if (!tw::is_summable(rows->dtype)) {
    return fail(twInvalidArgument, "rows has dtype %s (%d); it must be float32, bfloat16 or float16",
                tw::dtype_name(rows->dtype), rows->dtype);
  }
  // All of it, and of what is computed from it, is a 64-bit offset in bytes.
  const int64_t largest = INT64_MAX / 32 / std::max<int64_t>(rows->shape[0], 1);
  if (rows->shape[1] > largest) {
    return fail(twInvalidArgument, "rows has shape %s; with so many rows one must have at most %lld elements",
                shape_text({rows->shape[0], rows->shape[1]}).c_str(), static_cast<long long>(largest));
  }
  TW_RETURN_IF_FAILED(check_memory("rows", *rows));
  if (rows->shape[0] == 0 || rows->shape[1] == 0) return {};
  TW_RETURN_IF_FAILED(check_stride("rows", *rows, 1, 1, "the elements of a row are contiguous"));
  if (rows->shape[0] > 1 && (rows->stride[0] > largest || rows->stride[0] < -largest)) {
    return fail(twInvalidArgument, "rows has stride %lld in dimension 0; it must be from %lld to %lld",
                static_cast<long long>(rows->stride[0]), static_cast<long long>(-largest),
                static_cast<long long>(largest));
  }
  return {};
}

Status check_output(const char* name, const twTensor_t* tensor, twDtype_t dtype, int64_t tokens, int64_t elements) {
  TW_RETURN_IF_FAILED(check_matrix(name, tensor));
  if (tensor->dtype != dtype) {
    return fail(twInvalidArgument, "%s has dtype %s (%d); it must be %s", name, tw::dtype_name(tensor->dtype),
                tensor->dtype, tw::dtype_name(dtype));
  }
  if (tensor->shape[0] != tokens || tensor->shape[1] != elements) {
    return fail(twInvalidArgument, "%s has shape %s; it must be %s, as rows has it", name,
                shape_text({tensor->shape[0], tensor->shape[1]}).c_str(), shape_text({tokens, elements}).c_str());
  }
  TW_RETURN_IF_FAILED(check_memory(name, *tensor));
  if (tokens == 0 || elements == 0) return {};
  TW_RETURN_IF_FAILED(check_stride(name, *tensor, 1, 1, "an output is C-contiguous"));
  return check_stride(name, *tensor, 0, elements, "an output is C-contiguous");
}

// Bytes from the first to the last that a tensor touches.
struct Extent {
  const char* name;
  const std::byte* begin;
  const std::byte* end;
};

Extent extent(const char* name, const twTensor_t& tensor) {
  const int64_t bytes = tw::dtype_bytes(tensor.dtype);
  const int64_t span = tensor.shape[0] > 1 ? (tensor.shape[0] - 1) * tensor.stride[0] * bytes : 0;
  const auto* const data = static_cast<const std::byte*>(tensor.data);
  return {name, data + std::min<int64_t>(span, 0), data + std::max<int64_t>(span, 0) + tensor.shape[1] * bytes};
}

Status check_apart(const Extent& a, const Extent& b) {
  if (std::less_equal<>()(a.end, b.begin) || std::less_equal<>()(b.end, a.begin)) return {};
  return fail(twInvalidArgument, "%s at %p overlaps %s at %p; each must have memory of its own", a.name,
              static_cast<const void*>(a.begin), b.name, static_cast<const void*>(b.begin));
}

Status check_call(const twTensor_t* rows, const twTensor_t* values, const twTensor_t* scales, int32_t power_of_two,
                  int32_t device, const void* stream, Call* call) {
  TW_RETURN_IF_FAILED(check_rows(rows));
  const int64_t tokens = rows->shape[0];
  const int64_t elements = rows->shape[1];
  TW_RETURN_IF_FAILED(check_output("values", values, twFloat8e4m3, tokens, elements));
  TW_RETURN_IF_FAILED(check_output("scales", scales, twFloat32, tokens, (elements + kBlock - 1) / kBlock));
  if (power_of_two != 0 && power_of_two != 1) {
    return fail(twInvalidArgument, "power_of_two is %d; it must be 0 or 1", power_of_two);
  }
  if (device < -1) {
    return fail(twInvalidArgument, "device is %d; it must be -1 (host memory) or a CUDA device from 0", device);
  }
  if (device == -1 && stream != nullptr) {
    return fail(twInvalidArgument, "stream is %p; it must be NULL for host memory (device -1)", stream);
  }
  if (tokens > 0 && elements > 0) {
    const Extent extents[] = {extent("rows", *rows), extent("values", *values), extent("scales", *scales)};
    for (const auto& [a, b] : {std::pair(1, 0), {2, 0}, {2, 1}}) {
      TW_RETURN_IF_FAILED(check_apart(extents[a], extents[b]));
    }
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
    Call call{};
    TW_RETURN_IF_FAILED(check_call(rows, values, scales, power_of_two, device, stream, &call));
    if (device >= 0) {
#if TOKENWAY_WITH_CUDA
      return tw::quantize::quantize_fp8_cuda(call, device, stream);
#else
      return fail(twUnsupported, "device is %d, but this library was built without CUDA; give host memory and -1",
                  device);
#endif
    }
    if (call.tokens > 0 && call.elements > 0) tw::quantize::quantize_fp8_cpu(call);
    return {};
  });
}
