// The kernels of twSwiGlu and its backward: they take a checked activation::Call and are one launch each. There are as
// many thread blocks as the device holds at once; they go from one valid row to the next, as many as counts in device
// memory say there are. So a launch that a graph has captured costs what came, not what could have come. The grid is
// speed alone; the bits are those of activation/swiglu.h.
//
// Floor: memory. Forward, an element of 16 bits is 4 bytes in and 2 out (quantised, 1.03). Backward, it is 6 in and 4
// out.
#include "activation/swiglu.h"
#include "quantize/device.cuh"
#include "quantize/launch.h"

namespace tw::activation {
namespace {

using quantize::Element;
using quantize::kBlock;
using quantize::kLanes;
using quantize::kPerLane;
using quantize::load;
using quantize::store;

constexpr int kThreads = 256;
constexpr int kHalves = kThreads / kLanes;  // half warps of a thread block, each with 128 elements at a time
constexpr int kWarps = kThreads / 32;
constexpr int kGroups = 1024;    // groups whose rows are counted at a time
constexpr int kBlocksPerSm = 4;  // limited by registers; more would not load more at once
constexpr uint32_t kAll = 0xffffffffu;
static_assert(kPerLane == kGroup, "a lane's elements of a row are one group of accumulators");

// How many valid rows the groups before each group have.
struct Sums {
  int64_t before[kGroups + 1];
};

// Sums up the valid rows of groups [low, low + n). All threads take part.
__device__ void sum_counts(const Rows& rows, int32_t low, int n, Sums& sums) {
  for (int i = threadIdx.x; i < n; i += kThreads) sums.before[i + 1] = rows.count(low + i);
  if (threadIdx.x == 0) sums.before[0] = 0;
  __syncthreads();
  for (int by = 1; by < n; by *= 2) {
    int64_t add[kGroups / kThreads];
    for (int k = 0; k < kGroups / kThreads; ++k) {
      const int i = static_cast<int>(threadIdx.x) + k * kThreads;
      add[k] = i >= by && i < n ? sums.before[i + 1 - by] : 0;
    }
    __syncthreads();
    for (int k = 0; k < kGroups / kThreads; ++k) {
      const int i = static_cast<int>(threadIdx.x) + k * kThreads;
      if (i < n) sums.before[i + 1] += add[k];
    }
    __syncthreads();
  }
}

// Calls visit(row or -1, part) for every valid row, `together` of them at a time in each thread block; `which` of these
// is the calling thread's. A row is cut into `parts`, and visited once for each. All threads of a block come along,
// even where there is no row for them.
template <class Visit>
__device__ void each_row(const Rows& rows, int together, int which, int64_t parts, Visit&& visit) {
  Sums& sums = *quantize::shared_memory<Sums>();
  for (int32_t low = 0; low < rows.groups; low += kGroups) {
    const int n = min(kGroups, rows.groups - low);
    __syncthreads();
    sum_counts(rows, low, n, sums);
    const int64_t valid = sums.before[n];
    const int64_t tiles = (valid + together - 1) / together * parts;
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const int64_t at = parts == 1 ? tile : tile / parts;
      const int64_t i = at * together + which;
      int64_t row = -1;
      if (i < valid) {
        int from = 0;
        int to = n;
        while (to - from > 1) {
          const int middle = (from + to) / 2;
          (sums.before[middle] <= i ? from : to) = middle;
        }
        row = (low + from) * rows.each + i - sums.before[from];
      }
      visit(row, tile - at * parts);
    }
  }
}

__device__ __forceinline__ int count_of(int64_t left) {
  return left >= kPerLane ? kPerLane : left > 0 ? static_cast<int>(left) : 0;
}

// How many half warps a row has at a time: a power of two, so that they fill a thread block.
TW_HOST_DEVICE inline int halves_of(int64_t elements) {
  int halves = 1;
  while (halves < kHalves && halves * kBlock < elements) halves *= 2;
  return halves;
}

template <twDtype_t kType, bool kQuantised, bool kPowerOfTwo>
__global__ void __launch_bounds__(kThreads) forward_kernel(const Call call) {
  constexpr int kBytes = sizeof(typename Element<kType>::Raw);
  const int halves = halves_of(call.elements);
  const int half = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t parts = (call.elements + halves * kBlock - 1) / (halves * kBlock);
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
      if (count > 0 && lane == 0) call.scales[row * call.scale_stride[0] + block * call.scale_stride[1]] = scale;
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
  if (call.scales == nullptr) return &forward_kernel<kType, false, false>;
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

// Launches a kernel. `together`: how many rows a thread block has at a time.
Status run(void (*kernel)(Call), const Call& call, int64_t together, int64_t parts, int32_t device, void* stream) {
  quantize::CurrentDevice current;
  TW_RETURN_IF_FAILED(quantize::enter(device, &current));
  if (call.rows.total == 0 || call.elements == 0) return {};
  int processors = 0;
  TW_RETURN_IF_CUDA_FAILED(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  const int64_t tiles = (call.rows.total + together - 1) / together * parts;
  const int64_t blocks = tiles < int64_t{processors} * kBlocksPerSm ? tiles : int64_t{processors} * kBlocksPerSm;
  TW_RETURN_IF_CUDA_FAILED(
      quantize::launch(kernel, call, dim3(static_cast<unsigned>(blocks)), kThreads, stream, sizeof(Sums)));
  return {};
}

}  // namespace

Status swiglu_cuda(const Call& call, int32_t device, void* stream) {
  const int halves = halves_of(call.elements);
  const int64_t parts = (call.elements + halves * kBlock - 1) / (halves * kBlock);
  return run(forward_of(call), call, kHalves / halves, parts, device, stream);
}

Status swiglu_backward_cuda(const Call& call, int32_t device, void* stream) {
  return run(backward_of(call), call, kWarps, 1, device, stream);
}

}  // namespace tw::activation
