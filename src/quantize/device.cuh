// What the kernels beside the exchange share: how they read, write and quantise elements, and how they find their
// device; for .cu files. A lane of a warp has 8 elements. The bits are those of quantize/fp8.h, so conversions round to
// nearest even and divisions are IEEE's, whatever the compiler's flags.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "quantize/fp8.h"

namespace tw::quantize {

inline constexpr int kLanes = 16;                 // lanes that share a block of 128 elements
inline constexpr int kPerLane = kBlock / kLanes;  // elements of a lane
static_assert(kPerLane == 8, "a lane's values are one 8-byte store");

// How elements of a type lie in memory, and their conversion from and to float32.
template <twDtype_t kType>
struct Element;

template <>
struct Element<twFloat32> {
  using Raw = uint32_t;
  static __device__ uint32_t narrow(float value) { return __float_as_uint(value); }
  static __device__ float widen(uint32_t bits) { return __uint_as_float(bits); }
};
template <>
struct Element<twBfloat16> {
  using Raw = uint16_t;
  static __device__ uint32_t narrow(float value) { return __bfloat16_as_ushort(__float2bfloat16_rn(value)); }
  static __device__ float widen(uint32_t bits) { return __uint_as_float(bits << 16); }
};
template <>
struct Element<twFloat16> {
  using Raw = uint16_t;
  static __device__ uint32_t narrow(float value) { return __half_as_ushort(__float2half_rn(value)); }
  static __device__ float widen(uint32_t bits) { return __half2float(__ushort_as_half(static_cast<uint16_t>(bits))); }
};

// Loads a lane's elements, `count` of them; 0 beyond, which changes no largest magnitude.
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

// Converts two values to e4m3, the first in the low byte. The instruction differs from e4m3() beyond 464, where it
// saturates; quotients end at 448 and a rounding.
inline __device__ uint32_t e4m3_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return e4m3(low) | static_cast<uint32_t>(e4m3(high)) << 8;
#endif
}

inline __device__ void store(uint8_t* to, int count, uint64_t values) {
  if (count == kPerLane && reinterpret_cast<uintptr_t>(to) % sizeof(uint64_t) == 0) {
    *reinterpret_cast<uint64_t*>(to) = values;
    return;
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (i < count) to[i] = static_cast<uint8_t>(values >> (8 * i));
  }
}

// The largest magnitude of a lane's elements, as bits: NaN is larger than infinity, and infinity than all numbers.
inline __device__ uint32_t largest_of(const float (&x)[kPerLane]) {
  uint32_t magnitude = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) magnitude = max(magnitude, __float_as_uint(x[i]) & kMagnitude);
  return magnitude;
}

// The largest of so many neighbouring lanes' magnitudes. Every lane of the warp takes part.
template <int kTogether>
__device__ __forceinline__ uint32_t largest_of_lanes(uint32_t magnitude) {
#pragma unroll
  for (int distance = kTogether / 2; distance > 0; distance /= 2) {
    magnitude = max(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, distance));
  }
  return magnitude;
}

// Stores a lane's elements as a dtype, `count` of them.
template <twDtype_t kType>
__device__ __forceinline__ void store(std::byte* to, int count, const float (&x)[kPerLane]) {
  using Raw = typename Element<kType>::Raw;
  constexpr int kVectors = kPerLane * sizeof(Raw) / sizeof(uint4);
  constexpr int kPerWord = sizeof(uint32_t) / sizeof(Raw);
  if (count == kPerLane && reinterpret_cast<uintptr_t>(to) % sizeof(uint4) == 0) {
    uint32_t words[4 * kVectors] = {};
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      words[i / kPerWord] |= Element<kType>::narrow(x[i]) << (i % kPerWord * 8 * static_cast<int>(sizeof(Raw)));
    }
    auto* const vectors = reinterpret_cast<uint4*>(to);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      vectors[i] = uint4{words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (i < count) reinterpret_cast<Raw*>(to)[i] = static_cast<Raw>(Element<kType>::narrow(x[i]));
  }
}

// Quantises a block's elements, of which each lane of half a warp has some; every lane of the warp takes part. Returns
// the scale; *to: this lane's e4m3 values.
template <bool kPowerOfTwo>
__device__ __forceinline__ float quantize_lanes(const float (&x)[kPerLane], uint64_t* to) {
  const uint32_t magnitude = largest_of_lanes<kLanes>(largest_of(x));
  const float scale = scale_of(magnitude, kPowerOfTwo);
  // For a power of two, multiplying with the reciprocal is the same as dividing: both are exact up to the one rounding.
  const float inverse = kPowerOfTwo ? divide(1.0f, scale) : 0.0f;
  uint64_t values = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; i += 2) {
    const float low = kPowerOfTwo ? __fmul_rn(x[i], inverse) : divide(x[i], scale);
    const float high = kPowerOfTwo ? __fmul_rn(x[i + 1], inverse) : divide(x[i + 1], scale);
    values |= static_cast<uint64_t>(e4m3_pair(low, high)) << (8 * i);
  }
  if (magnitude >= kInfinity) values = 0x0101010101010101u * kNanValue;
  *to = values;
  return scale;
}

inline Status failed(const char* what, cudaError_t error) {
  cudaGetLastError();  // clears the error, or the caller's next look would find it
  const bool absent = error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver;
  return fail(absent ? twUnsupported : twSystemError, "{}: {} ({})", what, cudaGetErrorString(error),
              cudaGetErrorName(error));
}

#define TW_RETURN_IF_CUDA_FAILED(call) \
  if (const cudaError_t error = (call); error != cudaSuccess) return ::tw::quantize::failed(#call, error)

// Makes a device current for as long as this object lives.
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

// Makes the device of a call current; twInvalidArgument for one that is not there.
inline Status enter(int32_t device, CurrentDevice* current) {
  int devices = 0;
  TW_RETURN_IF_CUDA_FAILED(cudaGetDeviceCount(&devices));
  if (device >= devices) {
    return fail(twInvalidArgument, "{} is {}; it must be from -1 (host memory) to {}", Argument("device"),
                Value(device), devices - 1);
  }
  return current->set(device);
}

}  // namespace tw::quantize
