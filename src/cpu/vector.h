// The loops over bytes, compiled for this machine: copies, and exchange/summation.h.
#pragma once

#include <cstddef>

#include "exchange/combine.h"

namespace tw::cpu {

// As memcpy, past the caches: for more bytes than they hold, a plain store reads each line before it overwrites it, a
// third of the traffic for nothing. Needs stream_fence before anything is published, as such stores are not ordered.
void stream_copy(void* to, const void* from, size_t n);
void stream_fence();

// out[elements] of types.to = sum of count rows[elements] of types.from, each times its weight unless weights is NULL.
void sum_rows(void* out, const void* const* rows, const float* weights, int count, const RowTypes& types);

// n elements of a float dtype become NaN.
void fill_nan(void* out, twDtype_t dtype, int64_t n);

}  // namespace tw::cpu
