// The kernels of twQuantizeNvfp4: take a checked quantize::Nvfp4Call and enqueue one launch, or, where the global scale
// is to be found, a store of 4 bytes and two. Two lanes with 8 elements each take a block: a 16-byte load of 16-bit
// elements (two of float32) and a 4-byte store each, with a shuffle in between that finds the largest magnitude. The
// bits are those of quantize/nvfp4.h; e2m1 is made by integer arithmetic, as only newer devices have an instruction.
//
// Floor: memory. An element of 16 bits is 2 bytes in, 1/2 byte out and 1/16 byte of scale: 18.4 KB for a row of 7168.
// To find the global scale reads all of it once more.
//
// While it is found, the global scale's word holds 0, then the largest magnitude so far with the first bit set, which
// no found scale has set. So the second kernel reads either that, or what one of its threads has already made of it,
// and needs no third to convert it and no memory of its own.
#include "quantize/nvfp4.h"

#include "quantize/rows.cuh"

namespace tw::quantize {
namespace {

constexpr int kNvfp4Lanes = kNvfp4Block / kPerLane;
constexpr uint32_t kFound = ~kMagnitude;
constexpr int kWarpsOfRows = kRowThreads / 32;

template <twDtype_t kType>
__global__ void __launch_bounds__(kRowThreads) find_kernel(const Nvfp4Call call) {
  uint32_t most = 0;
  each_lane<kType>(call, [&](int64_t, int64_t, int, const float(&x)[kPerLane]) {
    const uint32_t magnitude = largest_of_lanes<kNvfp4Lanes>(largest_of(x));
    most = max(most, magnitude < kInfinity ? magnitude : 0u);
  });
  auto* const of_warps = shared_memory<uint32_t>();
  most = __reduce_max_sync(0xffffffffu, most);
  __syncthreads();  // all have read what each_row keeps there
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kWarpsOfRows; ++warp) most = max(most, of_warps[warp]);
  atomicMax(reinterpret_cast<uint32_t*>(call.global_scale), kFound | most);
}

// The global scale that find_kernel has left, converted or not.
__device__ __forceinline__ float found_global_scale(const Nvfp4Call& call) {
  const uint32_t bits = *reinterpret_cast<volatile const uint32_t*>(call.global_scale);
  return (bits & kFound) != 0 ? nvfp4_global_scale(bits & kMagnitude) : __uint_as_float(bits);
}

template <twDtype_t kType>
__global__ void __launch_bounds__(kRowThreads) nvfp4_kernel(const Nvfp4Call call) {
  const float found = call.find ? found_global_scale(call) : 0.0f;
  if (call.find && blockIdx.x == 0 && threadIdx.x == 0) {
    *reinterpret_cast<volatile uint32_t*>(call.global_scale) = __float_as_uint(found);
  }
  each_lane<kType>(call, [&](int64_t row, int64_t first, int count, const float(&x)[kPerLane]) {
    const uint32_t magnitude = largest_of_lanes<kNvfp4Lanes>(largest_of(x));
    if (count == 0) return;
    const int64_t block = first / kNvfp4Block;
    const float global =
        call.find ? found : call.global_scale[row * call.global_stride[0] + block * call.global_stride[1]];
    const uint8_t scale = nvfp4_scale(magnitude, global);
    const Nvfp4Step step = nvfp4_step(scale, global);
    uint32_t values = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) values |= nvfp4_value(x[i], step) << (4 * i);
    uint8_t* const to = call.values + (row * call.elements + first) / 2;
    if (reinterpret_cast<uintptr_t>(to) % sizeof values == 0) {
      *reinterpret_cast<uint32_t*>(to) = values;
    } else {
#pragma unroll
      for (int i = 0; i < kPerLane / 2; ++i) to[i] = static_cast<uint8_t>(values >> (8 * i));
    }
    if (threadIdx.x % kNvfp4Lanes == 0) call.scales.put(row, block, scale);
  });
}

struct Nvfp4Kernels {
  void (*find)(Nvfp4Call);
  void (*quantize)(Nvfp4Call);
};
template <twDtype_t kType>
Nvfp4Kernels nvfp4_kernels_of() {
  return {&find_kernel<kType>, &nvfp4_kernel<kType>};
}

Nvfp4Kernels nvfp4_kernels_of(twDtype_t dtype) {
  if (dtype == twFloat32) return nvfp4_kernels_of<twFloat32>();
  if (dtype == twBfloat16) return nvfp4_kernels_of<twBfloat16>();
  return nvfp4_kernels_of<twFloat16>();
}

}  // namespace

Status quantize_nvfp4_cuda(const Nvfp4Call& call, int32_t device, void* stream) {
  CurrentDevice current;
  TW_RETURN_IF_FAILED(enter(device, &current));
  const int halves = halves_of(call.elements);
  const int together = kRowThreads / kLanes / halves;
  const int64_t parts = parts_of(call.elements, halves);
  const Nvfp4Kernels kernels = nvfp4_kernels_of(call.dtype);
  if (call.find) {
    TW_RETURN_IF_CUDA_FAILED(cudaMemsetAsync(call.global_scale, 0, sizeof(float), static_cast<cudaStream_t>(stream)));
    TW_RETURN_IF_FAILED(launch_rows(kernels.find, call, together, parts, device, stream, true));
  }
  return launch_rows(kernels.quantize, call, together, parts, device, stream, call.find);
}

}  // namespace tw::quantize
