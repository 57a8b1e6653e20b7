// The kernel of twQuantizeFp8: takes a checked quantize::Call and enqueues one launch. Half a warp takes a block: 16
// lanes with 8 elements each, which are one 16-byte load of 16-bit elements (two of float32) and one 8-byte store; four
// shuffles in between find the largest magnitude. The grid is speed alone; the bits are those of quantize/fp8.h.
//
// Floor: memory. An element of 16 bits is 2 bytes in, 1 byte out and 4/128 bytes of scale: 3.03 bytes, 21.7 KB for a
// row of 7168. Nothing is read twice, and nothing waits for another block.
#include "quantize/device.cuh"
#include "quantize/fp8.h"
#include "quantize/launch.h"

namespace tw::quantize {
namespace {

constexpr int kThreads = 128;  // of a thread block, at most: 8 blocks of elements; a row of 7168 is 7 whole ones
constexpr int64_t kMaxGridRows = 65535;  // gridDim.y; more rows are taken in turn
constexpr int64_t kMaxGridColumns = INT32_MAX;

// The grid: x goes over the blocks of a row, blockDim.x / kLanes of them in each thread block; y goes over rows.
template <twDtype_t kType, bool kPowerOfTwo>
__global__ void __launch_bounds__(kThreads) quantize_kernel(const Call call) {
  constexpr int kBytes = sizeof(typename Element<kType>::Raw);
  const int64_t blocks = call.blocks();
  const int64_t block = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int64_t first = block * kBlock + lane * kPerLane;
  // Channels beyond the row have no elements but stay, for the shuffles of the lanes that share their warp.
  const int64_t left = call.elements - first;
  const int count = left >= kPerLane ? kPerLane : left > 0 ? static_cast<int>(left) : 0;
  for (int64_t row = blockIdx.y; row < call.tokens; row += gridDim.y) {
    float x[kPerLane];
    load<kType>(call.rows + row * call.row_stride + first * kBytes, count, x);
    uint64_t values;
    const float scale = quantize_lanes<kPowerOfTwo>(x, &values);
    store(call.values + row * call.elements + first, count, values);
    if (lane == 0 && block < call.places()) put_scale(call, row, block, block < blocks ? scale : 0.0f);
  }
}

template <twDtype_t kType>
auto kernel_of(bool power_of_two) {
  return power_of_two ? &quantize_kernel<kType, true> : &quantize_kernel<kType, false>;
}

auto kernel_of(const Call& call) {
  if (call.dtype == twFloat32) return kernel_of<twFloat32>(call.power_of_two);
  if (call.dtype == twBfloat16) return kernel_of<twBfloat16>(call.power_of_two);
  return kernel_of<twFloat16>(call.power_of_two);
}

}  // namespace

Status quantize_fp8_cuda(const Call& call, int32_t device, void* stream) {
  CurrentDevice current;
  TW_RETURN_IF_FAILED(enter(device, &current));
  if (call.tokens == 0 || call.elements == 0) return {};
  const int64_t lanes = call.places() * kLanes;
  const int threads = lanes >= kThreads ? kThreads : static_cast<int>((lanes + 31) / 32 * 32);
  const int64_t columns = (lanes + threads - 1) / threads;
  if (columns > kMaxGridColumns) {
    return fail(twInvalidArgument, "{} has {} elements a row; on a device it must have at most {}", Argument("rows"),
                call.elements, kMaxGridColumns * (kThreads / kLanes) * kBlock);
  }
  const dim3 grid(static_cast<unsigned>(columns),
                  static_cast<unsigned>(call.tokens < kMaxGridRows ? call.tokens : kMaxGridRows));
  TW_RETURN_IF_CUDA_FAILED(launch(kernel_of(call), call, grid, threads, stream));
  return {};
}

}  // namespace tw::quantize
