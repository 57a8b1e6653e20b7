// What the calls beside the exchange check of their tensors, [rows, elements] in host or device memory. Each function
// takes a tensor and its name, and gives a Status whose sentence names argument, value and range. What passes is read
// and written without further checks.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <string>

#include "api/rows.h"
#include "core/status.h"

namespace tw::api {

std::string shape_text(std::initializer_list<int64_t> shape);

// Checks that a tensor has two dimensions, none negative. wanted: what they are, for the sentence.
Status check_matrix(const Argument& name, const twTensor_t* tensor, const char* wanted);
// Checks that data is there, and aligned to its elements.
Status check_memory(const Argument& name, const twTensor_t& tensor);
Status check_stride(const Argument& name, const twTensor_t& tensor, int dimension, int64_t wanted, const char* why);
// Checks for a matrix of float32, bfloat16 or float16 whose rows are contiguous.
Status check_float_rows(const Argument& name, const twTensor_t* rows, const char* wanted);

// The bytes that a matrix's rows touch.
Extent extent(const twTensor_t& matrix);

Status check_place(int32_t device, const void* stream);
// The error of a call for a device in a library without CUDA.
Status without_cuda(int32_t device);

}  // namespace tw::api
