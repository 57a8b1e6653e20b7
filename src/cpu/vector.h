// exchange/summation.h compiled for this machine.
#pragma once

#include "exchange/combine.h"

namespace tw::cpu {

// out[elements] of types.to = sum of count rows[elements] of types.from, each times its weight unless weights is NULL.
void sum_rows(void* out, const void* const* rows, const float* weights, int count, const RowTypes& types);

// n elements of a float dtype become NaN.
void fill_nan(void* out, twDtype_t dtype, int64_t n);

}  // namespace tw::cpu
