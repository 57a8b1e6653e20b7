// How kernels go over the valid rows of a call, and how they are launched; for .cu files of src/quantize and
// src/activation. There are as many thread blocks as the device holds at once; they go from one valid row to the next,
// as many as counts in device memory say there are. So a launch that a graph has captured costs what came, not what
// could have come. The grid is speed alone.
#pragma once

#include "quantize/device.cuh"
#include "quantize/launch.h"
#include "quantize/rows.h"

namespace tw::quantize {

inline constexpr int kRowThreads = 256;
inline constexpr int kGroupsAtOnce = 1024;  // groups whose rows are counted at a time
inline constexpr int kBlocksPerSm = 4;      // limited by registers; more would not load more at once

// How many valid rows the groups before each group have.
struct RowSums {
  int64_t before[kGroupsAtOnce + 1];
};

// Sums up the valid rows of groups [low, low + n). All threads take part.
inline __device__ void sum_counts(const Rows& rows, int32_t low, int n, RowSums& sums) {
  for (int i = threadIdx.x; i < n; i += kRowThreads) sums.before[i + 1] = rows.count(low + i);
  if (threadIdx.x == 0) sums.before[0] = 0;
  __syncthreads();
  for (int by = 1; by < n; by *= 2) {
    int64_t add[kGroupsAtOnce / kRowThreads];
    for (int k = 0; k < kGroupsAtOnce / kRowThreads; ++k) {
      const int i = static_cast<int>(threadIdx.x) + k * kRowThreads;
      add[k] = i >= by && i < n ? sums.before[i + 1 - by] : 0;
    }
    __syncthreads();
    for (int k = 0; k < kGroupsAtOnce / kRowThreads; ++k) {
      const int i = static_cast<int>(threadIdx.x) + k * kRowThreads;
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
  RowSums& sums = *shared_memory<RowSums>();
  for (int32_t low = 0; low < rows.groups; low += kGroupsAtOnce) {
    const int n = min(kGroupsAtOnce, rows.groups - low);
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

inline __device__ int count_of(int64_t left) {
  return left >= kPerLane ? kPerLane : left > 0 ? static_cast<int>(left) : 0;
}

// How many half warps a row has at a time: a power of two, so that they fill a thread block.
TW_HOST_DEVICE inline int halves_of(int64_t elements) {
  int halves = 1;
  while (halves < kRowThreads / kLanes && halves * kBlock < elements) halves *= 2;
  return halves;
}

// In how many parts so many half warps visit a row.
TW_HOST_DEVICE inline int64_t parts_of(int64_t elements, int halves) {
  return (elements + halves * kBlock - 1) / (halves * kBlock);
}

// Calls visit(row or -1, first, count, x) for the elements [first, first + count) of each valid row that are a lane's.
template <twDtype_t kType, class Call, class Visit>
__device__ __forceinline__ void each_lane(const Call& call, Visit&& visit) {
  constexpr int kBytes = sizeof(typename Element<kType>::Raw);
  const int halves = halves_of(call.elements);
  const int half = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  each_row(call.rows, kRowThreads / kLanes / halves, half / halves, parts_of(call.elements, halves),
           [&](int64_t row, int64_t part) {
             const int64_t first = (part * halves + half % halves) * kBlock + lane * kPerLane;
             const int count = row < 0 ? 0 : count_of(call.elements - first);
             float x[kPerLane];
             load<kType>(call.from.row(row < 0 ? 0 : row) + first * kBytes, count, x);
             visit(row, first, count, x);
           });
}

// Launches a kernel on the current device. `together`: how many rows a thread block has at a time. always: also where
// there is nothing to visit.
template <class Call>
Status launch_rows(void (*kernel)(Call), const Call& call, int64_t together, int64_t parts, int32_t device,
                   void* stream, bool always = false) {
  if (!always && (call.rows.total == 0 || call.elements == 0)) return {};
  int processors = 0;
  TW_RETURN_IF_CUDA_FAILED(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  const int64_t tiles = (call.rows.total + together - 1) / together * parts;
  const int64_t most = int64_t{processors} * kBlocksPerSm;
  const int64_t blocks = tiles < 1 ? 1 : tiles < most ? tiles : most;
  TW_RETURN_IF_CUDA_FAILED(
      launch(kernel, call, dim3(static_cast<unsigned>(blocks)), kRowThreads, stream, sizeof(RowSums)));
  return {};
}

}  // namespace tw::quantize
