// Tensors of rows: what one must be, where its rows lie, and which bytes it touches. check_rows takes what is wanted
// and a tensor, and gives byte strides; Extents and check_apart find overlap. The calls behind trust the strides that
// come from here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/status.h"

namespace tw::api {

// Whether a caller has given an optional tensor.
inline bool is_given(const twTensor_t& tensor) {
  return tensor.data != nullptr || tensor.ndim != 0 || tensor.dtype != twDtypeNone;
}

std::string shape_text(const int64_t* shape, int ndim);
std::string shape_text(const twTensor_t& tensor);

// What a tensor of rows must be. `lead` are the dimensions that count rows; elements come after them, in one dimension
// or more. Two leading dimensions may also be given as one.
struct RowsWanted {
  Argument name;
  twDtype_t dtype;
  std::vector<int64_t> lead;
  int64_t elements;
  bool output = false;  // C-contiguous throughout
  bool typed = true;    // read or written as its dtype, so it must be aligned to it
  bool single = false;  // `lead` is the whole shape, with 1 element each
};

Status check_stride(const Argument& name, const twTensor_t& tensor, int dimension);

// Checks a tensor of rows and gives the byte strides of its one or two leading dimensions.
Status check_rows(const RowsWanted& wanted, const twTensor_t& tensor, int64_t strides[2]);

// Makes the tensor of an output that the library fills in.
twTensor_t contiguous_tensor(void* data, twDtype_t dtype, const std::vector<int64_t>& shape);

// The bytes from the first to the last that a tensor touches.
struct Extent {
  const std::byte* begin;
  const std::byte* end;
};

// The extent of rows a stride apart, which may be negative.
Extent extent_of(const void* data, int64_t rows, int64_t stride, int64_t row_bytes);
// The extent of a tensor [tokens, top_k]. stride: in elements; element: bytes of one.
Extent extent_of_pairs(const void* data, int64_t tokens, int64_t top_k, const int64_t stride[2], int64_t element);
bool disjoint(const Extent& a, const Extent& b);

// The extent of one tensor of a call.
struct NamedExtent {
  Argument name{""};
  Extent bytes;
};

// The extents of the tensors of a call. Empty tensors touch nothing.
class Extents {
 public:
  void add(const Argument& name, const Extent& bytes) {
    if (bytes.begin != bytes.end && count_ < kMost) all_[count_++] = {name, bytes};
  }
  // Adds a tensor without gaps.
  void add_contiguous(const Argument& name, const twTensor_t& tensor);
  const NamedExtent* begin() const { return all_; }
  const NamedExtent* end() const { return all_ + count_; }

 private:
  static constexpr int kMost = 16;
  NamedExtent all_[kMost];
  int count_ = 0;
};

// Checks that every output has memory of its own, apart from the other outputs and from the inputs. pairs_may: an input
// and an output of the same index have been checked in another way.
Status check_apart(const Extents& outputs, const Extents& inputs, bool pairs_may = false);

}  // namespace tw::api
