// Checks of tensors of rows, and of which of them overlap (api/rows.h). They take what is wanted and a tensor, and give
// a Status and byte strides. The limits on strides keep every byte offset within 64 bits; check_apart is what keeps a
// kernel or copy from reading what the same call has overwritten.
#include "api/rows.h"

#include <algorithm>
#include <functional>

#include "core/config.h"

namespace tw::api {

std::string shape_text(const int64_t* shape, int ndim) {
  std::string text = "[";
  for (int i = 0; i < ndim; ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

std::string shape_text(const twTensor_t& tensor) {
  return shape_text(tensor.shape, std::clamp(tensor.ndim, 0, TW_MAX_DIMS));
}

namespace {

Status check_dtype(const RowsWanted& wanted, const twTensor_t& tensor) {
  if (tensor.dtype == wanted.dtype) return {};
  return fail(twInvalidArgument, "{} has dtype {}; it must be {}", wanted.name, dtype_text(tensor.dtype),
              dtype_name(wanted.dtype));
}

Status wrong_shape(const RowsWanted& wanted, const twTensor_t& tensor) {
  std::vector<int64_t> shape(wanted.lead);
  if (!wanted.single) shape.push_back(wanted.elements);
  return fail(twInvalidArgument, "{} has shape {}; it must be {}", wanted.name, shape_text(tensor),
              shape_text(shape.data(), static_cast<int>(shape.size())));
}

// The number of leading dimensions that match, 0 if none do.
int match_lead(const RowsWanted& wanted, const twTensor_t& tensor) {
  const int lead = static_cast<int>(wanted.lead.size());
  if (tensor.ndim >= lead && std::equal(wanted.lead.begin(), wanted.lead.end(), tensor.shape)) return lead;
  if (lead == 2 && tensor.ndim >= 1 && tensor.shape[0] == wanted.lead[0] * wanted.lead[1]) return 1;
  return 0;
}

bool has_elements(const RowsWanted& wanted, const twTensor_t& tensor, int lead) {
  int64_t product = 1;
  for (int i = lead; i < tensor.ndim; ++i) {
    if (tensor.shape[i] <= 0 || product > wanted.elements / tensor.shape[i]) return false;
    product *= tensor.shape[i];
  }
  return product == wanted.elements;
}

}  // namespace

Status check_stride(const Argument& name, const twTensor_t& tensor, int dimension) {
  const int64_t stride = tensor.stride[dimension];
  if (tensor.shape[dimension] <= 1) return {};
  const int64_t largest = INT64_MAX / 32 / tensor.shape[dimension];  // every byte of it still has a 64-bit offset
  if (stride <= largest && stride >= -largest) return {};
  return fail(twInvalidArgument, "{} has stride {} in dimension {}; it must be from {} to {}", name, stride, dimension,
              -largest, largest);
}

Status check_rows(const RowsWanted& wanted, const twTensor_t& tensor, int64_t strides[2]) {
  TW_RETURN_IF_FAILED(check_dtype(wanted, tensor));
  if (tensor.ndim < 1 || tensor.ndim > TW_MAX_DIMS) {
    return fail(twInvalidArgument, "{} has {} dimensions; it must have from {} to {}", wanted.name, tensor.ndim, 1,
                TW_MAX_DIMS);
  }
  // [N, b] and [N*b, 1] cannot be told apart by the product alone: try two leading dimensions first.
  const int lead = match_lead(wanted, tensor);
  if (lead == 0 || !has_elements(wanted, tensor, lead)) return wrong_shape(wanted, tensor);
  const int64_t bytes = dtype_bytes(tensor.dtype);
  int64_t contiguous = 1;
  int64_t rows = 1;
  for (const int64_t n : wanted.lead) rows *= n;
  for (int i = tensor.ndim - 1; i >= 0 && rows > 0; --i) {
    const bool within = i >= lead;
    if (tensor.shape[i] > 1 && (within || wanted.output) && tensor.stride[i] != contiguous) {
      return fail(twInvalidArgument, "{} has stride {} in dimension {} of shape {}; it must be {}: {}", wanted.name,
                  tensor.stride[i], i, shape_text(tensor), contiguous,
                  wanted.output ? "an output is C-contiguous" : "the elements of a row are contiguous");
    }
    TW_RETURN_IF_FAILED(check_stride(wanted.name, tensor, i));
    contiguous *= tensor.shape[i];
  }
  if (rows > 0 && tensor.data == nullptr) return fail(twInvalidArgument, "{} has data NULL", wanted.name);
  if (wanted.typed && reinterpret_cast<uintptr_t>(tensor.data) % static_cast<uintptr_t>(bytes) != 0) {
    return fail(twInvalidArgument, "{} has data {}; it must be aligned to {} bytes", wanted.name, tensor.data, bytes);
  }
  const auto step = [&](int i) { return tensor.shape[i] > 1 ? tensor.stride[i] * bytes : 0; };
  strides[0] = step(0);
  strides[1] = lead == 2 ? step(1) : 0;
  if (lead == 1 && wanted.lead.size() == 2) {  // [D0 * D1, ...] for [D0, D1, ...]
    strides[1] = strides[0];
    strides[0] *= wanted.lead[1];
  }
  return {};
}

twTensor_t contiguous_tensor(void* data, twDtype_t dtype, const std::vector<int64_t>& shape) {
  twTensor_t tensor{};
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.ndim = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), tensor.shape);
  int64_t stride = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    tensor.stride[i] = stride;
    stride *= tensor.shape[i];
  }
  return tensor;
}

Extent extent_of(const void* data, int64_t rows, int64_t stride, int64_t row_bytes) {
  const auto* const begin = static_cast<const std::byte*>(data);
  if (rows <= 0) return {begin, begin};
  const int64_t span = (rows - 1) * stride;
  return {begin + std::min<int64_t>(span, 0), begin + std::max<int64_t>(span, 0) + row_bytes};
}

Extent extent_of_pairs(const void* data, int64_t tokens, int64_t top_k, const int64_t stride[2], int64_t element) {
  const Extent one = extent_of(data, tokens > 0 ? top_k : 0, stride[1] * element, element);
  const int64_t span = tokens > 0 ? (tokens - 1) * stride[0] * element : 0;
  return {one.begin + std::min<int64_t>(span, 0), one.end + std::max<int64_t>(span, 0)};
}

bool disjoint(const Extent& a, const Extent& b) {
  return std::less_equal<>()(a.end, b.begin) || std::less_equal<>()(b.end, a.begin);
}

void Extents::add_contiguous(const Argument& name, const twTensor_t& tensor) {
  int64_t elements = tensor.data == nullptr ? 0 : 1;
  for (int i = 0; i < tensor.ndim; ++i) elements *= tensor.shape[i];
  add(name, extent_of(tensor.data, 1, 0, elements * dtype_bytes(tensor.dtype)));
}

namespace {

Status check_pair(const NamedExtent& a, const NamedExtent& b) {
  if (disjoint(a.bytes, b.bytes)) return {};
  return fail(twInvalidArgument, "{} at {} overlaps {} at {}; each must have memory of its own", a.name, a.bytes.begin,
              b.name, b.bytes.begin);
}

}  // namespace

Status check_apart(const Extents& outputs, const Extents& inputs, bool pairs_may) {
  for (const NamedExtent& output : outputs) {
    for (const NamedExtent& input : inputs) {
      const int64_t of = output.name.indices[0];
      if (pairs_may && of >= 0 && of == input.name.indices[0]) continue;
      TW_RETURN_IF_FAILED(check_pair(output, input));
    }
    for (const NamedExtent* other = outputs.begin(); other != &output; ++other) {
      TW_RETURN_IF_FAILED(check_pair(output, *other));
    }
  }
  return {};
}

}  // namespace tw::api
