// The kernels of twSwiGlu and its backward: they take a checked activation::Call and are one launch each. There are as
// many thread blocks as the device holds at once; they go from one valid row to the next, as many as counts in device
// memory say there are. So a launch that a graph has captured costs what came, not what could have come. The grid is
// speed alone; the bits are those of activation/swiglu.h.
//
// Floor: memory. Forward, an element of 16 bits is 4 bytes in and 2 out (quantised, 1.03). Backward, it is 6 in and 4
// out.
#include "activation/swiglu.h"
#include "quantize/device.cuh"
#include "quantize/rows.cuh"

namespace tw::activation {
namespace {

using quantize::count_of;
using quantize::each_row;
using quantize::Element;
using quantize::halves_of;
using quantize::kBlock;
using quantize::kLanes;
using quantize::kPerLane;
using quantize::load;
using quantize::store;

constexpr int kThreads = quantize::kRowThreads;
constexpr int kHalves = kThreads / kLanes;  // half warps of a thread block, each with 128 elements at a time
constexpr int kWarps = kThreads / 32;
constexpr uint32_t kAll = 0xffffffffu;
static_assert(kPerLane == kGroup, "a lane's elements of a row are one group of accumulators");

template <twDtype_t kType, bool kQuantised, bool kPowerOfTwo>
__global__ void __launch_bounds__(kThreads) forward_kernel(const Call call) {
  constexpr int kBytes = sizeof(typename Element<kType>::Raw);
  const int halves = halves_of(call.elements);
  const int half = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t parts = quantize::parts_of(call.elements, halves);
  each_row(call.rows, kHalves / halves, half / halves, parts, [&](int64_t row, int64_t part) {
    const int64_t block = part * halves + half % halves;
    const int64_t first = block * kBlock + lane * kPerLane;
    const int count = row < 0 ? 0 : count_of(call.elements - first);
    const std::byte* const gate = call.gate_up.row(row < 0 ? 0 : row) + first * kBytes;
    float x[kPerLane];
    float up[kPerLane];
    load<kType>(gate, count, x);
    load<kType>(gate + call.elements * kBytes, count, up);
    const float weight = call.weights != nullptr && row >= 0 ? call.weights[row] : 1.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x[i] = times(swiglu(x[i], up[i]), weight);
    if constexpr (kQuantised) {
      uint64_t values;
      // Beyond the row there are zeros, but they were multiplied by a weight that may be infinite.
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) x[i] = i < count ? x[i] : 0.0f;
      const float scale = quantize::quantize_lanes<kPowerOfTwo>(x, &values);
      if (count > 0) store(reinterpret_cast<uint8_t*>(call.out.row(row)) + first, count, values);
      if (count > 0 && lane == 0) {
        if constexpr (kPowerOfTwo) {
          call.scales.put_either(row, block, scale);
        } else {
          call.scales.put(row, block, scale);
        }
      }
    } else {
      if (count > 0) store<kType>(call.out.row(row) + first * kBytes, count, x);
    }
  });
}

// Each warp has a row, so that the sum of the gradient of its weight has an order.
template <twDtype_t kType>
__global__ void __launch_bounds__(kThreads) backward_kernel(const Call call) {
  constexpr int kBytes = sizeof(typename Element<kType>::Raw);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  each_row(call.rows, kWarps, static_cast<int>(threadIdx.x) / 32, 1, [&](int64_t row, int64_t) {
    if (row < 0) return;  // a whole warp
    const std::byte* const gate = call.gate_up.row(row);
    const std::byte* const gradient = call.out.row(row);
    std::byte* const of_gate = call.of_gate_up.row(row);
    const int64_t to_up = call.elements * kBytes;
    const float weight = call.weights != nullptr ? call.weights[row] : 1.0f;
    float sums[kPerLane] = {};
    for (int64_t first = lane * kPerLane; first < call.elements; first += kAccumulators) {
      const int count = count_of(call.elements - first);
      const int64_t at = first * kBytes;
      float x[kPerLane];
      float up[kPerLane];
      float out[kPerLane];
      load<kType>(gate + at, count, x);
      load<kType>(gate + to_up + at, count, up);
      load<kType>(gradient + at, count, out);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const Gradient made = swiglu_gradient(x[i], up[i], out[i], times(out[i], weight));
        x[i] = made.gate;
        up[i] = made.up;
        if (i < count) sums[i] = plus(sums[i], made.weight);
      }
      store<kType>(of_gate + at, count, x);
      store<kType>(of_gate + to_up + at, count, up);
    }
    if (call.of_weights == nullptr) return;
#pragma unroll
    for (int by = kGroup / 2; by > 0; by /= 2) {
#pragma unroll
      for (int i = 0; i < by; ++i) sums[i] = plus(sums[i], sums[i + by]);
    }
    __syncwarp();
    float total = sums[0];
#pragma unroll
    for (int by = 16; by > 0; by /= 2) total = plus(total, __shfl_xor_sync(kAll, total, by));
    if (lane == 0) call.of_weights[row] = total;
  });
}

template <twDtype_t kType>
auto forward_of(const Call& call) {
  if (call.scales.data == nullptr) return &forward_kernel<kType, false, false>;
  return call.power_of_two ? &forward_kernel<kType, true, true> : &forward_kernel<kType, true, false>;
}

auto forward_of(const Call& call) {
  if (call.dtype == twFloat32) return forward_of<twFloat32>(call);
  if (call.dtype == twBfloat16) return forward_of<twBfloat16>(call);
  return forward_of<twFloat16>(call);
}

auto backward_of(const Call& call) {
  if (call.dtype == twFloat32) return &backward_kernel<twFloat32>;
  if (call.dtype == twBfloat16) return &backward_kernel<twBfloat16>;
  return &backward_kernel<twFloat16>;
}

}  // namespace

Status swiglu_cuda(const Call& call, int32_t device, void* stream) {
  quantize::CurrentDevice current;
  TW_RETURN_IF_FAILED(quantize::enter(device, &current));
  const int halves = halves_of(call.elements);
  return quantize::launch_rows(forward_of(call), call, kHalves / halves, quantize::parts_of(call.elements, halves),
                               device, stream);
}

Status swiglu_backward_cuda(const Call& call, int32_t device, void* stream) {
  quantize::CurrentDevice current;
  TW_RETURN_IF_FAILED(quantize::enter(device, &current));
  return quantize::launch_rows(backward_of(call), call, kWarps, 1, device, stream);
}

}  // namespace tw::activation
