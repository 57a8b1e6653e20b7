// What the calls beside the exchange check of their tensors, [rows, elements] in host or device memory. Each function
// takes a tensor and its name, and gives a Status whose sentence names argument, value and range. What passes is read
// and written without further checks.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <string>

#include "api/rows.h"
#include "core/status.h"
#include "quantize/rows.h"

namespace tw::api {

// Whether an optional tensor is there: neither NULL nor a descriptor of nothing.
bool given(const twTensor_t* tensor);

std::string shape_text(std::initializer_list<int64_t> shape);

// Checks that a tensor has two dimensions, none negative. wanted: what they are, for the sentence.
Status check_matrix(const Argument& name, const twTensor_t* tensor, const char* wanted);
// Checks that data is there, and aligned to its elements.
Status check_memory(const Argument& name, const twTensor_t& tensor);
Status check_stride(const Argument& name, const twTensor_t& tensor, int dimension, int64_t wanted, const char* why);
// Checks for a matrix of float32, bfloat16 or float16 whose rows are contiguous.
Status check_float_rows(const Argument& name, const twTensor_t* rows, const char* wanted);
// Checks for a vector: [n], contiguous.
Status check_vector(const Argument& name, const twTensor_t& tensor, twDtype_t dtype);
// Checks the counts of valid rows, which may be absent, and says which of the `total` rows of a call are valid.
Status check_counts(const twTensor_t* counts, int64_t total, quantize::Rows* rows);
// Checks that scales [rows, columns] lie by row or by column, without overlap. stride: what is found, in elements.
Status check_scale_order(const twTensor_t& scales, int64_t stride[2]);

// Where the rows of a matrix lie.
quantize::Matrix matrix_of(const twTensor_t& tensor);
// The bytes that a matrix's rows touch.
Extent extent(const twTensor_t& matrix);
// The bytes that any tensor without negative strides touches, in whatever order it lies.
Extent extent_of_all(const twTensor_t& tensor);

Status check_place(int32_t device, const void* stream);
// The error of a call for a device in a library without CUDA.
Status without_cuda(int32_t device);

}  // namespace tw::api
