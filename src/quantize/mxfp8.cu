// The kernel of twQuantizeMxfp8: takes a checked quantize::MxCall and enqueues one launch. Four lanes with 8 elements
// each take a block: a 16-byte load of 16-bit elements (two of float32) and an 8-byte store each, with two shuffles in
// between that find the largest magnitude. The bits are those of quantize/mxfp8.h.
//
// Floor: memory. An element of 16 bits is 2 bytes in, 1 byte out and 1/32 byte of scale: 21.7 KB for a row of 7168.
#include "quantize/mxfp8.h"

#include "quantize/rows.cuh"

namespace tw::quantize {
namespace {

constexpr int kMxLanes = kMxBlock / kPerLane;

// Two values, the first in the low byte. The instruction rounds and saturates as mx_value does.
template <class Format>
__device__ uint32_t mx_pair(float low, float high, MxInverse inverse) {
#if __CUDA_ARCH__ >= 890
  const auto quotient = [&](float x) {
    const uint32_t all = __float_as_uint(x);
    return __uint_as_float(__float_as_uint(mx_quotient(all & kMagnitude, inverse)) | (all & ~kMagnitude));
  };
  uint16_t pair;
  if constexpr (Format::kBias == E4m3::kBias) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(quotient(high)), "f"(quotient(low)));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(quotient(high)), "f"(quotient(low)));
  }
  return pair;
#else
  return mx_value<Format>(low, inverse) | static_cast<uint32_t>(mx_value<Format>(high, inverse)) << 8;
#endif
}

template <twDtype_t kType, class Format>
__global__ void __launch_bounds__(kRowThreads) mx_kernel(const MxCall call) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  each_lane<kType>(call, [&](int64_t row, int64_t first, int count, const float(&x)[kPerLane]) {
    const uint32_t magnitude = largest_of_lanes<kMxLanes>(largest_of(x));
    if (count == 0) return;
    const uint8_t scale = mx_scale<Format>(magnitude);
    uint64_t values = 0x0101010101010101u * kNanValue;
    if (scale != kMxNanScale) {
      const MxInverse inverse = mx_inverse(scale);
      values = 0;
#pragma unroll
      for (int i = 0; i < kPerLane; i += 2) {
        values |= static_cast<uint64_t>(mx_pair<Format>(x[i], x[i + 1], inverse)) << (8 * i);
      }
    }
    store(call.values + row * call.elements + first, count, values);
    if (lane % kMxLanes == 0) call.scales.put(row, first / kMxBlock, scale);
  });
}

template <twDtype_t kType>
auto mx_kernel_of(bool e5m2) {
  return e5m2 ? &mx_kernel<kType, E5m2> : &mx_kernel<kType, E4m3>;
}

auto mx_kernel_of(const MxCall& call) {
  if (call.dtype == twFloat32) return mx_kernel_of<twFloat32>(call.e5m2);
  if (call.dtype == twBfloat16) return mx_kernel_of<twBfloat16>(call.e5m2);
  return mx_kernel_of<twFloat16>(call.e5m2);
}

}  // namespace

Status quantize_mxfp8_cuda(const MxCall& call, int32_t device, void* stream) {
  CurrentDevice current;
  TW_RETURN_IF_FAILED(enter(device, &current));
  const int halves = halves_of(call.elements);
  return launch_rows(mx_kernel_of(call), call, kRowThreads / kLanes / halves, parts_of(call.elements, halves), device,
                     stream);
}

}  // namespace tw::quantize
