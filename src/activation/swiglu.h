// SwiGLU over the valid rows of what experts' first matrices gave: it defines every bit, for the host and for devices.
// A change here changes the bits of results, and must be made in the oracle too (python/tokenway/reference.py).
//
// A row is [2 * I] elements, gate and up. Everything is float32; each operation is rounded to nearest even, none is
// fused:
//
//   d = 1 + exp(-gate)                           exp as below
//   out = gate / d * up [* weight]               rounded once to the output type, or quantised as quantize/fp8.h says
//
// Backward, from the gradient `out` of the result:
//
//   s = 1 / d,  a = gate * s,  t = out [* weight]
//   up' = t * a,  gate' = t * up * (s + a * (1 - s)),  weight' = sum over the row of out * (a * up)
//
// The sum has an order that vectors, warps and NumPy can all keep. Element i belongs to accumulator i mod 256, which
// adds its elements i ascending, from 0 on. The 256 accumulators are 32 groups of 8, and halves are added to halves: 4,
// 2, 1 within a group, then groups 16, 8, 4, 2, 1 apart.
//
// Libraries round exp differently, so it is defined here. The argument is limited to +-104, where the sum with 1 has
// long stopped to change; n = argument * log2(e) is rounded, by an addition that leaves it in the last bits; the
// remainder is found in two subtractions, of which the first is exact; a polynomial of degree 7 follows (Cephes' expf,
// https://www.netlib.org/cephes/), and the result is multiplied by 2^n in two steps. It is within 1 unit in the last
// place of the true value, and a sigmoid within 3.
#pragma once

#include "core/status.h"
#include "quantize/fp8.h"

namespace tw::activation {

using quantize::Matrix;
using quantize::Rows;
using quantize::times;

inline constexpr int kAccumulators = 256;
inline constexpr int kGroup = 8;  // accumulators that a lane of a warp has

TW_HOST_DEVICE inline float plus(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

TW_HOST_DEVICE inline float exponential(float x) {
  x = x < -104.0f ? -104.0f : x;  // a NaN stays a NaN
  x = x > 104.0f ? 104.0f : x;
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23
  const float shifted = plus(times(x, 1.44269504f), kShift);
  const uint32_t n = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kShift);
  const float whole = plus(shifted, -kShift);
  const float r = plus(plus(x, -times(whole, 0.693359375f)), times(whole, 2.12194440e-4f));
  float y = 1.9875691500e-4f;
  y = plus(times(y, r), 1.3981999507e-3f);
  y = plus(times(y, r), 8.3334519073e-3f);
  y = plus(times(y, r), 4.1665795894e-2f);
  y = plus(times(y, r), 1.6666665459e-1f);
  y = plus(times(y, r), 5.0000001201e-1f);
  y = plus(plus(times(y, times(r, r)), r), 1.0f);
  const auto half = static_cast<uint32_t>(static_cast<int32_t>(n) >> 1);
  const float low = std::bit_cast<float>((half + 127u) << 23);
  const float high = std::bit_cast<float>((n - half + 127u) << 23);
  return times(times(y, low), high);
}

TW_HOST_DEVICE inline float swiglu(float gate, float up) {
  return times(quantize::divide(gate, plus(1.0f, exponential(-gate))), up);
}

struct Gradient {
  float gate, up;
  float weight;  // a term of the weight's sum
};
// The gradients of one element. `out`: the gradient of the result; `weighted`: that times the weight.
TW_HOST_DEVICE inline Gradient swiglu_gradient(float gate, float up, float out, float weighted) {
  const float s = quantize::divide(1.0f, plus(1.0f, exponential(-gate)));
  const float a = times(gate, s);
  return {times(times(weighted, up), plus(s, times(a, plus(1.0f, -s)))), times(weighted, a), times(out, times(a, up))};
}

// One call, checked. Forward: `out` is of `dtype`, or e4m3 with scales.
struct Call {
  Rows rows;
  int64_t elements;  // I
  twDtype_t dtype;   // twFloat32, twBfloat16 or twFloat16
  Matrix gate_up;
  const float* weights;     // [total], NULL: all 1
  Matrix out;               // backward: the gradient of the result
  quantize::Scales scales;  // data NULL: not quantised
  bool power_of_two;
  // For backward alone.
  Matrix of_gate_up;
  float* of_weights;  // NULL: not wanted
};

// Compute on the calling thread.
void swiglu_cpu(const Call& call);
void swiglu_backward_cpu(const Call& call);

// Enqueue the kernels on `stream`; as quantize_fp8_cuda. Their cost follows the number of rows that counts say are
// there.
Status swiglu_cuda(const Call& call, int32_t device, void* stream);
Status swiglu_backward_cuda(const Call& call, int32_t device, void* stream);

}  // namespace tw::activation
