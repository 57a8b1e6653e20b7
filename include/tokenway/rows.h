// Work on rows beside the exchange: quantising them to floats of 8 and 4 bits before it, and the activation between
// experts' matrices. Needs no comm. Included by tokenway.h, which has the conventions.
#ifndef TOKENWAY_ROWS_H_
#define TOKENWAY_ROWS_H_

// -------------------------------------------------------------------------------------------------------- quantise

// Quantises rows to 8-bit floats with one scale per block of 128 elements, so that they can travel as two payloads:
//   scale[t, i] = largest |row[t, 128 i .. 128 i + 127]| / 448, or that rounded up to a power of two; 1 for zeros
//   values[t, j] = rows[t, j] / scale[t, j / 128], rounded to nearest even, as e4m3 without infinities
//
// rows: [T, H] twFloat32, twBfloat16 or twFloat16, rows may be strided. counts: which rows are valid, as twSwiGlu;
// NULL: all. Other rows are neither read nor written. values: [T, H] twFloat8e4m3. scales: [T, ceil(H / 128)]
// twFloat32, or, with power_of_two, packed: [T, ceil(H / 512)] twInt32, whose byte i % 4 (the lowest is 0) of word i /
// 4 is the scale of block i as UE8M0, 2^(byte - 127), 255 for NaN; bytes behind the last block are 0. Rows or columns
// of scales are contiguous (strides {s, 1} or {1, s}). device: -1 for host memory (synchronous, stream NULL), else the
// CUDA device of the three tensors (enqueued on `stream`). The bits are the same on the CPU and on a device. A block
// with NaN or infinity in it gives NaN there. A scale is at least 2^-116: a block whose largest magnitude is below 448
// * 2^-116, 5.4e-33, loses precision, so that its bits do not depend on whether the processor flushes subnormal numbers
// to 0. Errors: twInvalidArgument; twUnsupported for a device in a build without CUDA.
TW_API twResult_t twQuantizeFp8(const twTensor_t* rows, const twTensor_t* counts, const twTensor_t* values,
                                const twTensor_t* scales, int32_t power_of_two, int32_t device, void* stream);

// Quantises valid rows to mxfp8, the MXFP8 formats of the OCP Microscaling specification 1.0: 32 elements share a scale
// of UE8M0, one byte, 2^(byte - 127). By the specification's rule, which floors the exponent:
//   byte[t, i] = 127 + floor(log2(largest |row[t, 32 i .. 32 i + 31]|)) - 8 (e5m2: - 15), at least 0; 0 for zeros
//   values[t, j] = rows[t, j] / 2^(byte[t, j / 32] - 127), rounded to nearest even, at most 448 (e5m2: 57344)
//
// A block's largest elements, from 1.75 * 2^n on, so lose up to an eighth where they saturate. NaN or infinity in a
// block makes its byte 255, NaN, and its values 0x7f, NaN.
//
// rows and counts: as twQuantizeFp8, H a multiple of 32. values: [T, H] twFloat8e4m3 or twFloat8e5m2. scales: [T, H /
// 32] twUint8; both C-contiguous. device, stream and errors: as twQuantizeFp8. The bits are the same on the CPU and on
// a device, whether or not the processor flushes subnormal numbers to 0.
//
// Or scales lie in tiles of 128 rows by 4 scales, as block-scaled matrix products of cuBLAS and CUTLASS read them. Six
// dimensions say so, [G, ceil(T / G / 128), ceil(H / 128), 32, 4, 4], C-contiguous, G being the elements of counts (1
// without): scale c of row r of a block of rows lies at [block, r / 128, c / 4, r % 32, r % 128 / 32, c % 4]. Behind
// the last scale of a valid row its tile has zeros; rows that are not valid or only fill a tile are not written.
TW_API twResult_t twQuantizeMxfp8(const twTensor_t* rows, const twTensor_t* counts, const twTensor_t* values,
                                  const twTensor_t* scales, int32_t device, void* stream);

// Quantises valid rows to nvfp4: 16 elements share a scale of e4m3, and all of them one float32 behind it. In float32,
// each operation rounded to nearest even:
//   global_scale = largest |row| of all valid rows / (6 * 448), at least 2^-116; 1 if all are zeros
//   scale[t, i] = e4m3(min(largest |row[t, 16 i .. 16 i + 15]| / (6 * global_scale), 448))
//   element[t, j] = e2m1(rows[t, j] / (scale[t, j / 16] * global_scale)), at most 6; 0 where the divisor is 0
//
// e2m1 is 0, 0.5, 1, 1.5, 2, 3, 4, 6 as codes 0 to 7, and a sign in bit 3; two lie in a byte, the first in its low
// half. A block with NaN or infinity has the scale NaN and counts for no global scale.
//
// rows: as twQuantizeFp8, H a multiple of 16. counts: as twQuantizeMxfp8. values: [T, H / 2] twUint8. scales: [T, H /
// 16] twFloat8e4m3; both C-contiguous; or in tiles as there, [G, ceil(T / G / 128), ceil(H / 64), 32, 4, 4].
// global_scale: twFloat32. With find_global_scale it is one number, which is
// found, in a pass before, and written; on a device nothing waits for it. Else it is read: one number, or [T or 1,
// H / 16 or 1]. The receiver of such rows needs it. device, stream, errors and bits: as twQuantizeMxfp8, for a global
// scale of at least 2^-116.
TW_API twResult_t twQuantizeNvfp4(const twTensor_t* rows, const twTensor_t* counts, const twTensor_t* values,
                                  const twTensor_t* scales, const twTensor_t* global_scale, int32_t find_global_scale,
                                  int32_t device, void* stream);

// ------------------------------------------------------------------------------------------------------ activation

// Computes SwiGLU, what experts do between their two matrices, over the valid rows of a dispatch's layout:
//   out[i, j] = silu(gate_up[i, j]) * gate_up[i, I + j] [* weights[i]], silu(g) = g / (1 + exp(-g))
//
// in float32, rounded once. src/activation/swiglu.h defines every bit, so that the CPU and devices have the same.
//
// gate_up: [M, 2 * I] twFloat32, twBfloat16 or twFloat16, rows may be strided. counts: [G] twInt32, in the same memory
// as the other tensors. The rows are G blocks of M / G rows; in block g the first counts[g] are valid, and only they
// are read and written. counts is read when the call runs, so a captured graph follows it, and so does the cost.
// rank_major and expert_major: the dispatch's counts; flat and grouped: the last of the offsets, alone. NULL, or data
// NULL and no dimensions: all rows. weights: [M] twFloat32, or likewise none.
//
// out: [M, I] of the type of gate_up, rows may be strided; scales is then NULL. Or out is twFloat8e4m3, C-contiguous,
// quantised from float32 as twQuantizeFp8 does it, with scales: twFloat32 [M, ceil(I / 128)] or, with power_of_two,
// packed twInt32 [M, ceil(I / 512)], rows or columns contiguous (strides {s, 1} or {1, s}), as there. Outputs must have
// memory of their own. device, stream and errors: as twQuantizeFp8.
TW_API twResult_t twSwiGlu(const twTensor_t* gate_up, const twTensor_t* counts, const twTensor_t* weights,
                           const twTensor_t* out, const twTensor_t* scales, int32_t power_of_two, int32_t device,
                           void* stream);

// Computes the backward of twSwiGlu, over the same rows. From the gradient of out, [M, I], it makes those of gate_up,
// [M, 2 * I], both of the type of gate_up, and of weights, [M] twFloat32 (NULL: not wanted), whose sums over a row have
// a fixed order.
TW_API twResult_t twSwiGluBackward(const twTensor_t* gate_up, const twTensor_t* counts, const twTensor_t* weights,
                                   const twTensor_t* gradient, const twTensor_t* of_gate_up,
                                   const twTensor_t* of_weights, int32_t device, void* stream);

#endif  // TOKENWAY_ROWS_H_
