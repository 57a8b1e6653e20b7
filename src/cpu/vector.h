// The loops over bytes that are compiled for this machine: copies past the caches, and the sums of
// exchange/summation.h. Sums take rows and weights and give a row with the bits that summation.h fixes (S9); copies are
// speed alone, but need stream_fence before anything is published (S4).
#pragma once

#include <cstddef>

#include "exchange/combine.h"

namespace tw::cpu {

// Copies like memcpy, but past the caches. For more bytes than they hold, a plain store reads each cache line before it
// overwrites it, a third of the traffic for nothing. It needs stream_fence before anything is published, as such stores
// are not ordered.
void stream_copy(void* to, const void* from, size_t n);
void stream_fence();

// Sums: out[elements] of types.to = the sum of `count` rows[elements] of types.from, each times its weight unless
// weights is NULL, added to the row of types.bias if there is one, which may be `out` where the types are the same.
void sum_rows(void* out, const void* const* rows, const float* weights, int count, const RowTypes& types);

// Fills n elements of a float dtype with NaN.
void fill_nan(void* out, twDtype_t dtype, int64_t n);

}  // namespace tw::cpu
