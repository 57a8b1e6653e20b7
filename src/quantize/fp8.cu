// The kernel of twQuantizeFp8: takes a checked quantize::Call and enqueues one launch. Half a warp takes a block: 16
// lanes with 8 elements each, which are one 16-byte load of 16-bit elements (two of float32) and one 8-byte store; four
// shuffles in between find the largest magnitude. The grid is speed alone; the bits are those of quantize/fp8.h.
//
// Where counts say which rows are valid, thread blocks go from one valid row to the next (quantize/rows.cuh), so that a
// captured launch costs what came. Without them there is a thread block for each row and part of one: nothing is read
// before the elements, and those are as many as there are.
//
// Floor: memory. An element of 16 bits is 2 bytes in, 1 byte out and 4/128 bytes of scale: 3.03 bytes, 21.7 KB for a
// row of 7168. Nothing is read twice, and nothing waits for another block.
#include "quantize/fp8.h"

#include "quantize/rows.cuh"

namespace tw::quantize {
namespace {

constexpr int kThreads = 128;  // of a thread block, at most: 8 blocks of elements; a row of 7168 is 7 whole ones
constexpr int64_t kMaxGridRows = 65535;  // gridDim.y; more rows are taken in turn
constexpr int64_t kMaxGridColumns = INT32_MAX;

// The grid: x goes over the blocks of a row, blockDim.x / kLanes of them in each thread block; y goes over rows.
template <twDtype_t kType, bool kPowerOfTwo>
__global__ void __launch_bounds__(kThreads) quantize_kernel(const Call call) {
  constexpr int kBytes = sizeof(typename Element<kType>::Raw);
  const int64_t block = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int64_t first = block * kBlock + lane * kPerLane;
  // Channels beyond the row have no elements but stay, for the shuffles of the lanes that share their warp.
  const int64_t left = call.elements - first;
  const int count = left >= kPerLane ? kPerLane : left > 0 ? static_cast<int>(left) : 0;
  for (int64_t row = blockIdx.y; row < call.rows.total; row += gridDim.y) {
    float x[kPerLane];
    load<kType>(call.from.row(row) + first * kBytes, count, x);
    uint64_t values;
    const float scale = quantize_lanes<kPowerOfTwo>(x, &values);
    store(call.values + row * call.elements + first, count, values);
    if (lane == 0 && block < call.scales.blocks) {
      if constexpr (kPowerOfTwo) {
        call.scales.put_either(row, block, scale);
      } else {
        call.scales.put(row, block, scale);
      }
    }
  }
}

// Both kinds of scales in one kernel: the way over valid rows is most of it.
template <twDtype_t kType>
__global__ void __launch_bounds__(kRowThreads) quantize_valid_kernel(const Call call) {
  each_lane<kType>(call, [&](int64_t row, int64_t first, int count, const float(&x)[kPerLane]) {
    uint64_t values;
    const float scale = call.power_of_two ? quantize_lanes<true>(x, &values) : quantize_lanes<false>(x, &values);
    if (count == 0) return;
    store(call.values + row * call.elements + first, count, values);
    if (first % kBlock == 0) call.scales.put_either(row, first / kBlock, scale);
  });
}

template <twDtype_t kType>
auto kernel_of(bool power_of_two) {
  return power_of_two ? &quantize_kernel<kType, true> : &quantize_kernel<kType, false>;
}

auto valid_kernel_of(const Call& call) {
  if (call.dtype == twFloat32) return &quantize_valid_kernel<twFloat32>;
  if (call.dtype == twBfloat16) return &quantize_valid_kernel<twBfloat16>;
  return &quantize_valid_kernel<twFloat16>;
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
  if (call.rows.total == 0 || call.elements == 0) return {};
  if (call.rows.counts != nullptr) {
    const int halves = halves_of(call.elements);
    return launch_rows(valid_kernel_of(call), call, kRowThreads / kLanes / halves, parts_of(call.elements, halves),
                       device, stream);
  }
  const int64_t lanes = call.scales.blocks * kLanes;
  const int threads = lanes >= kThreads ? kThreads : static_cast<int>((lanes + 31) / 32 * 32);
  const int64_t columns = (lanes + threads - 1) / threads;
  if (columns > kMaxGridColumns) {
    return fail(twInvalidArgument, "{} has {} elements a row; on a device it must have at most {}", Argument("rows"),
                call.elements, kMaxGridColumns * (kThreads / kLanes) * kBlock);
  }
  const dim3 grid(static_cast<unsigned>(columns),
                  static_cast<unsigned>(call.rows.total < kMaxGridRows ? call.rows.total : kMaxGridRows));
  TW_RETURN_IF_CUDA_FAILED(launch(kernel_of(call), call, grid, threads, stream));
  return {};
}

}  // namespace tw::quantize
