// The kernel of twQuantizeFp8. Half a warp takes a block: 16 lanes with 8 elements each, which are one 16-byte load of
// 16-bit elements (two of float32) and one 8-byte store, with the largest magnitude found by four shuffles in between.
//
// Floor: memory. An element of 16 bits is 2 bytes in, 1 byte out and 4/128 bytes of scale: 3.03 bytes, 21.7 KB for a
// row of 7168. Nothing is read twice, and nothing waits for another block.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "quantize/fp8.h"

namespace tw::quantize {
namespace {

constexpr int kLanes = 16;                 // of a block
constexpr int kPerLane = kBlock / kLanes;  // elements
constexpr int kThreads = 128;              // of a thread block, at most: 8 blocks, so a row of 7168 is 7 whole ones
constexpr int64_t kMaxGridRows = 65535;    // gridDim.y; more rows are taken in turn
constexpr int64_t kMaxGridColumns = INT32_MAX;
static_assert(kPerLane == 8, "a lane's values are one 8-byte store");

// How elements lie in 32-bit words, and what they are as float32.
template <twDtype_t kType>
struct Element;

template <>
struct Element<twFloat32> {
  using Raw = uint32_t;
  static __device__ float widen(uint32_t bits) { return __uint_as_float(bits); }
};
template <>
struct Element<twBfloat16> {
  using Raw = uint16_t;
  static __device__ float widen(uint32_t bits) { return __uint_as_float(bits << 16); }
};
template <>
struct Element<twFloat16> {
  using Raw = uint16_t;
  static __device__ float widen(uint32_t bits) { return __half2float(__ushort_as_half(static_cast<uint16_t>(bits))); }
};

// A lane's elements, `count` of them; 0 beyond, which no magnitude is below.
template <twDtype_t kType>
__device__ __forceinline__ void load(const std::byte* from, int count, float (&x)[kPerLane]) {
  using Raw = typename Element<kType>::Raw;
  constexpr int kVectors = kPerLane * sizeof(Raw) / sizeof(uint4);
  constexpr int kPerWord = sizeof(uint32_t) / sizeof(Raw);
  constexpr int kBits = 8 * sizeof(Raw);
  constexpr uint32_t kMask = 0xffffffffu >> (32 - kBits);
  if (count == kPerLane && reinterpret_cast<uintptr_t>(from) % sizeof(uint4) == 0) {
    const auto* const vectors = reinterpret_cast<const uint4*>(from);
    uint32_t words[4 * kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const uint4 vector = vectors[i];
      words[4 * i] = vector.x;
      words[4 * i + 1] = vector.y;
      words[4 * i + 2] = vector.z;
      words[4 * i + 3] = vector.w;
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      x[i] = Element<kType>::widen(words[i / kPerWord] >> (i % kPerWord * kBits) & kMask);
    }
  } else {
    const auto* const elements = reinterpret_cast<const Raw*>(from);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x[i] = i < count ? Element<kType>::widen(elements[i]) : 0.0f;
  }
}

// Two values as e4m3, the first in the low byte. The instruction differs from e4m3() beyond 464, where it saturates;
// quotients end at 448 and a rounding.
__device__ __forceinline__ uint32_t e4m3_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return e4m3(low) | static_cast<uint32_t>(e4m3(high)) << 8;
#endif
}

__device__ __forceinline__ void store(uint8_t* to, int count, uint64_t values) {
  if (count == kPerLane && reinterpret_cast<uintptr_t>(to) % sizeof(uint64_t) == 0) {
    *reinterpret_cast<uint64_t*>(to) = values;
    return;
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (i < count) to[i] = static_cast<uint8_t>(values >> (8 * i));
  }
}

// The largest of the half warp's. Every lane of the warp takes part.
__device__ __forceinline__ uint32_t largest_of_block(uint32_t magnitude) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    magnitude = max(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, distance));
  }
  return magnitude;
}

// Grid: x over the blocks of a row, blockDim.x / kLanes of them each; y over rows.
template <twDtype_t kType, bool kPowerOfTwo>
__global__ void __launch_bounds__(kThreads) quantize_kernel(const Call call) {
  constexpr int kBytes = sizeof(typename Element<kType>::Raw);
  const int64_t blocks = call.blocks();
  const int64_t block = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int64_t first = block * kBlock + lane * kPerLane;
  // Lanes beyond the row have no elements but stay, for the shuffles of those that share their warp.
  const int64_t left = call.elements - first;
  const int count = left >= kPerLane ? kPerLane : left > 0 ? static_cast<int>(left) : 0;
  for (int64_t row = blockIdx.y; row < call.tokens; row += gridDim.y) {
    float x[kPerLane];
    load<kType>(call.rows + row * call.row_stride + first * kBytes, count, x);
    uint32_t magnitude = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) magnitude = max(magnitude, __float_as_uint(x[i]) & kMagnitude);
    magnitude = largest_of_block(magnitude);
    const float scale = scale_of(magnitude, kPowerOfTwo);
    // By a power of two, multiplying with the reciprocal is the same division: both are exact up to the one rounding.
    const float inverse = kPowerOfTwo ? divide(1.0f, scale) : 0.0f;
    uint64_t values = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; i += 2) {
      const float low = kPowerOfTwo ? __fmul_rn(x[i], inverse) : divide(x[i], scale);
      const float high = kPowerOfTwo ? __fmul_rn(x[i + 1], inverse) : divide(x[i + 1], scale);
      values |= static_cast<uint64_t>(e4m3_pair(low, high)) << (8 * i);
    }
    if (magnitude >= kInfinity) values = 0x0101010101010101u * kNanValue;
    store(call.values + row * call.elements + first, count, values);
    if (lane == 0 && block < blocks) call.scales[row * blocks + block] = scale;
  }
}

template <twDtype_t kType>
const void* kernel_of(bool power_of_two) {
  return power_of_two ? reinterpret_cast<const void*>(&quantize_kernel<kType, true>)
                      : reinterpret_cast<const void*>(&quantize_kernel<kType, false>);
}

const void* kernel_of(const Call& call) {
  if (call.dtype == twFloat32) return kernel_of<twFloat32>(call.power_of_two);
  if (call.dtype == twBfloat16) return kernel_of<twBfloat16>(call.power_of_two);
  return kernel_of<twFloat16>(call.power_of_two);
}

Status failed(const char* what, cudaError_t error) {
  cudaGetLastError();  // or the caller's next look at it would find this one
  const bool absent = error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver;
  return fail(absent ? twUnsupported : twSystemError, "%s: %s (%s)", what, cudaGetErrorString(error),
              cudaGetErrorName(error));
}

#define TW_RETURN_IF_CUDA_FAILED(call) \
  if (const cudaError_t error = (call); error != cudaSuccess) return failed(#call, error)

// Makes a device current for as long as it lives.
class CurrentDevice {
 public:
  Status set(int device) {
    TW_RETURN_IF_CUDA_FAILED(cudaGetDevice(&before_));
    if (before_ == device) return {};
    TW_RETURN_IF_CUDA_FAILED(cudaSetDevice(device));
    changed_ = true;
    return {};
  }
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(before_);
  }

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace

Status quantize_fp8_cuda(const Call& call, int32_t device, void* stream) {
  int devices = 0;
  TW_RETURN_IF_CUDA_FAILED(cudaGetDeviceCount(&devices));
  if (device >= devices) {
    return fail(twInvalidArgument, "device is %d; it must be from -1 (host memory) to %d", device, devices - 1);
  }
  if (call.tokens == 0 || call.elements == 0) return {};
  const int64_t lanes = call.blocks() * kLanes;
  const int threads = lanes >= kThreads ? kThreads : static_cast<int>((lanes + 31) / 32 * 32);
  const int64_t columns = (lanes + threads - 1) / threads;
  if (columns > kMaxGridColumns) {
    return fail(twInvalidArgument, "rows has %lld elements a row; on a device it must have at most %lld",
                static_cast<long long>(call.elements),
                static_cast<long long>(kMaxGridColumns * (kThreads / kLanes) * kBlock));
  }
  const dim3 grid(static_cast<unsigned>(columns),
                  static_cast<unsigned>(call.tokens < kMaxGridRows ? call.tokens : kMaxGridRows));
  CurrentDevice current;
  TW_RETURN_IF_FAILED(current.set(device));
  void* arguments[] = {const_cast<Call*>(&call)};
  TW_RETURN_IF_CUDA_FAILED(
      cudaLaunchKernel(kernel_of(call), grid, dim3(threads), arguments, 0, static_cast<cudaStream_t>(stream)));
  return {};
}

}  // namespace tw::quantize
