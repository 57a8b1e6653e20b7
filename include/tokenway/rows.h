// Work on rows beside the exchange: quantising them to 8-bit floats before it, and the activation between experts'
// matrices. Needs no comm. Included by tokenway.h, which has the conventions.
#ifndef TOKENWAY_ROWS_H_
#define TOKENWAY_ROWS_H_

// -------------------------------------------------------------------------------------------------------- quantise

// Quantises rows to 8-bit floats with one scale per block of 128 elements, so that they can travel as two payloads:
//   scale[t, i] = largest |row[t, 128 i .. 128 i + 127]| / 448, or that rounded up to a power of two; 1 for zeros
//   values[t, j] = rows[t, j] / scale[t, j / 128], rounded to nearest even, as e4m3 without infinities
//
// rows: [T, H] twFloat32, twBfloat16 or twFloat16, rows may be strided. values: [T, H] twFloat8e4m3. scales: [T, ceil(H
// / 128)] twFloat32. device: -1 for host memory (synchronous, stream NULL), else the CUDA device of the three tensors
// (enqueued on `stream`). The bits are the same on the CPU and on a device. A block with NaN or infinity in it gives
// NaN there. A scale is at least 2^-116: a block whose largest magnitude is below 448 * 2^-116, 5.4e-33, loses
// precision, so that its bits do not depend on whether the processor flushes subnormal numbers to 0. Errors:
// twInvalidArgument; twUnsupported for a device in a build without CUDA.
TW_API twResult_t twQuantizeFp8(const twTensor_t* rows, const twTensor_t* values, const twTensor_t* scales,
                                int32_t power_of_two, int32_t device, void* stream);

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
// quantised from float32 as twQuantizeFp8 does it, with scales: twFloat32 [M, ceil(I / 128)], rows or columns
// contiguous (strides {s, 1} or {1, s}), and power_of_two as there. Outputs must have memory of their own. device,
// stream and errors: as twQuantizeFp8.
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
