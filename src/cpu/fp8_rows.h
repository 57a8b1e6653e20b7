// Partials as e4m3 on the CPU: how a row of a combine becomes values with scales, and how such rows become a sum. Both
// have the signature of sum_rows (cpu/vector.h), and its order of terms; the bits of values are quantize/wire.h's.
//
// types.scale is the scale of all elements; 0: each block of 128 has one of its own, which lies behind the values
// (layout/fp8_rows.h).
#pragma once

#include "exchange/combine.h"

namespace tw::cpu {

// Sums `count` rows of types.from in float32 and quantises that once: out is a row of fp8_row_bytes.
void sum_to_fp8(void* out, const void* const* rows, const float* weights, int count, const RowTypes& types);

// Sums `count` such rows: each value times its scale in float32, added in order behind types.bias, rounded once to
// types.to. weights: NULL.
void sum_of_fp8(void* out, const void* const* rows, const float* weights, int count, const RowTypes& types);

}  // namespace tw::cpu
