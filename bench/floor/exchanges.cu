// One exchange of rows, all GPUs with all others at once, in three ways. Banks take turns by step (see Side).
#include <algorithm>
#include <cstdio>

#include "floor.h"
#include "memory.cuh"

namespace {

// A unit is a part of a row; block b has units b, b + blocks, ...
struct Shape {
  int rows, row_bytes, parts;
  __host__ __device__ int units() const { return rows * parts; }
};

__device__ __forceinline__ uint32_t next_step(const Side& side) { return side.steps[blockIdx.x * kSlotWords] + 1; }

// After everything that the block has read and written for the step.
__device__ __forceinline__ void finish_step(const Side& side, uint32_t step) {
  __syncthreads();
  if (threadIdx.x == 0) side.steps[blockIdx.x * kSlotWords] = step;
}

// ---- lines: every 128 bytes carry their own flag, and are unpacked into rows

struct LineRange {
  int row, begin, end;  // groups of four lines, one group per warp access
};

__device__ __forceinline__ LineRange lines_of(const Shape& shape, int unit) {
  const int groups = static_cast<int>(line_bytes(shape.row_bytes) / 512);
  const int row = unit / shape.parts, part = unit % shape.parts;
  return {row, groups * part / shape.parts, groups * (part + 1) / shape.parts};
}

__device__ void send_lines(const Side& side, const Shape& shape, const LineRange& range, uint64_t step) {
  const int lane = threadIdx.x % 32;
  const bool flag = lane % 8 == 7;
  const char* from = reinterpret_cast<const char*>(side.source) + static_cast<size_t>(range.row) * shape.row_bytes;
  char* to = reinterpret_cast<char*>(side.bank_of(side.receiver(range.row), static_cast<uint32_t>(step))) +
             range.row * line_bytes(shape.row_bytes);
  for (int group = range.begin + threadIdx.x / 32; group < range.end; group += blockDim.x / 32) {
    const int at = (group * 4 + lane / 8) * 120 + lane % 8 * 16;
    uint64_t low = 0, high = 0;
    if (at + 8 <= shape.row_bytes) low = *reinterpret_cast<const uint64_t*>(from + at);
    if (!flag && at + 16 <= shape.row_bytes) high = *reinterpret_cast<const uint64_t*>(from + at + 8);
    store_line(to + static_cast<size_t>(group) * 512 + lane * 16, low, flag ? step : high);
  }
}

__device__ void receive_lines(const Side& side, const Shape& shape, const LineRange& range, uint64_t step) {
  const int lane = threadIdx.x % 32;
  const bool flag = lane % 8 == 7;
  char* to = reinterpret_cast<char*>(side.out) + static_cast<size_t>(range.row) * shape.row_bytes;
  const char* from = reinterpret_cast<const char*>(side.bank_of(side.index, static_cast<uint32_t>(step))) +
                     range.row * line_bytes(shape.row_bytes);
  Patience patience(side.expired);
  for (int group = range.begin + threadIdx.x / 32; group < range.end; group += blockDim.x / 32) {
    uint64_t low = 0, high = 0;
    while (true) {
      load_line(from + static_cast<size_t>(group) * 512 + lane * 16, &low, &high);
      // The last lane of each eight sees the flag; a warp goes on when all its lines are there.
      if (!__any_sync(~0u, flag && high != step)) break;
      if (__any_sync(~0u, patience.lost())) break;
    }
    const int at = (group * 4 + lane / 8) * 120 + lane % 8 * 16;
    if (at + 8 <= shape.row_bytes) *reinterpret_cast<uint64_t*>(to + at) = low;
    if (!flag && at + 16 <= shape.row_bytes) *reinterpret_cast<uint64_t*>(to + at + 8) = high;
  }
}

__global__ void __launch_bounds__(1024) lines(Side side, Shape shape) {
  const uint32_t step = next_step(side);
  for (int unit = blockIdx.x; unit < shape.units(); unit += gridDim.x) {
    send_lines(side, shape, lines_of(shape, unit), step);
  }
  for (int unit = blockIdx.x; unit < shape.units(); unit += gridDim.x) {
    receive_lines(side, shape, lines_of(shape, unit), step);
  }
  finish_step(side, step);
}

// ---- rows written to their places, and flags beside them

__device__ void put_unit(const Side& side, const Shape& shape, int unit, uint32_t step) {
  const int vectors = shape.row_bytes / 16;
  const int row = unit / shape.parts, part = unit % shape.parts;
  const uint4* from = side.source + static_cast<size_t>(row) * vectors;
  uint4* to = side.bank_of(side.receiver(row), step) + static_cast<size_t>(row) * vectors;
  const int end = vectors * (part + 1) / shape.parts;
  for (int i = vectors * part / shape.parts + threadIdx.x; i < end; i += blockDim.x) to[i] = from[i];
}

// The last block to finish tells all that everything is there, and waits for the last block of each.
__global__ void __launch_bounds__(1024) last_block(Side side, Shape shape) {
  const uint32_t step = next_step(side);
  for (int unit = blockIdx.x; unit < shape.units(); unit += gridDim.x) put_unit(side, shape, unit, step);
  __syncthreads();
  if (threadIdx.x == 0 && add_acq_rel(side.arrivals, 1) == gridDim.x - 1) {
    *side.arrivals = 0;
    fence_system();  // cumulative over the other blocks' stores, which the counter has ordered before
    for (int i = 0; i < side.gpus - 1; ++i) store_relaxed(side.signal(side.other(i), side.index), step);
    Patience patience(side.expired);
    for (int i = 0; i < side.gpus - 1; ++i) {
      while (before(load_relaxed(side.signal(side.index, side.other(i))), step)) {
        if (patience.lost()) break;
      }
    }
    fence_system();
  }
  finish_step(side, step);
}

__global__ void __launch_bounds__(1024) row_flags(Side side, Shape shape) {
  const uint32_t step = next_step(side);
  for (int unit = blockIdx.x; unit < shape.units(); unit += gridDim.x) {
    put_unit(side, shape, unit, step);
    __syncthreads();
    if (threadIdx.x == 0) {
      uint32_t* const flags = side.flags[side.receiver(unit / shape.parts)];
      store_release(flags + static_cast<size_t>(unit) * kSlotWords, step);
    }
  }
  if (threadIdx.x == 0) {
    Patience patience(side.expired);
    for (int unit = blockIdx.x; unit < shape.units(); unit += gridDim.x) {
      while (before(load_acquire(side.flags[side.index] + static_cast<size_t>(unit) * kSlotWords), step)) {
        if (patience.lost()) break;
      }
    }
  }
  finish_step(side, step);
}

// ---- is it an exchange at all

__global__ void compare(Side side, const uint4* rows, size_t words, size_t row_words) {
  const auto* got = reinterpret_cast<const uint32_t*>(rows);
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += stride) {
    if (got[i] != pattern(side.sender(static_cast<int>(i / row_words)), i)) atomicAdd(side.differences, 1);
  }
}

using Kernel = void (*)(Side, Shape);

struct Way {
  const char* name;
  Kernel kernel;
  bool unpacks;      // rows end in `out`, not in the inbox
  bool all_waiting;  // blocks wait for each other's counterparts, so all of them must be on the device
};
constexpr Way kWays[] = {
    {"lines", lines, true, false},
    {"last_block", last_block, false, false},
    {"row_flags", row_flags, false, true},
};

void check_received(Mesh& mesh, const Way& way, const Shape& shape) {
  for (int i = 0; i < mesh.gpus(); ++i) {
    const Side& side = mesh.side(i);
    CHECK_CUDA(cudaSetDevice(side.device));
    uint32_t step = 0, differences = 0;
    CHECK_CUDA(cudaMemcpy(&step, side.steps, sizeof step, cudaMemcpyDeviceToHost));
    const uint4* rows = way.unpacks ? side.out : side.bank_of(i, step);
    const size_t row_words = shape.row_bytes / sizeof(uint32_t);
    compare<<<1024, 256, 0, mesh.stream(i)>>>(side, rows, shape.rows * row_words, row_words);
    CHECK_CUDA(cudaGetLastError());
    CHECK_CUDA(cudaStreamSynchronize(mesh.stream(i)));
    CHECK_CUDA(cudaMemcpy(&differences, side.differences, sizeof differences, cudaMemcpyDeviceToHost));
    if (differences != 0) {
      fail(std::string(way.name) + ": " + std::to_string(differences) + " words differ from what was sent");
    }
  }
}

struct Result {
  Figures us;
  int blocks = 0, threads = 0;
};

Result time_shape(Mesh& mesh, const Way& way, const Shape& shape, int threads, int repeat) {
  int fit = 0;
  CHECK_CUDA(cudaSetDevice(mesh.device(0)));
  CHECK_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, way.kernel, threads, 0));
  const int resident = fit * mesh.properties().multiProcessorCount;
  const int blocks = way.all_waiting ? std::min(shape.units(), resident) : shape.units();
  mesh.reset();
  const auto launch = [&](const Side& side, cudaStream_t stream) {
    way.kernel<<<blocks, threads, 0, stream>>>(side, shape);
  };
  const int count = shape.rows <= 256 ? 20 : 8;
  const Result result = {mesh.time(launch, count, repeat, mesh.gpus()), blocks, threads};
  check_received(mesh, way, shape);
  return result;
}

// The block size and the parts of a row that do best.
Result time_way(Mesh& mesh, const Way& way, int rows, int row_bytes, int repeat) {
  Result best;
  for (const int parts : {1, 2, 4}) {
    if (parts > 1 && rows * parts > 2 * mesh.properties().multiProcessorCount) continue;
    for (const int threads : {256, 512, 1024}) {
      const Result found = time_shape(mesh, way, {rows, row_bytes, parts}, threads, repeat);
      if (best.blocks == 0 || found.us.median < best.us.median) best = found;
    }
  }
  return best;
}

}  // namespace

void print_exchanges(Mesh& mesh, const std::vector<int>& tokens, const std::vector<int>& row_bytes, int repeat) {
  std::printf(" \"exchanges\": [");
  const char* separator = "\n";
  for (const int bytes : row_bytes) {
    for (const int rows : tokens) {
      for (const Way& way : kWays) {
        const Result result = time_way(mesh, way, rows, bytes, repeat);
        std::printf(
            "%s  {\"kind\": \"%s\", \"tokens\": %d, \"row_bytes\": %d, \"blocks\": %d, \"threads\": %d, "
            "\"best_us\": %.3f, \"median_us\": %.3f}",
            separator, way.name, rows, bytes, result.blocks, result.threads, result.us.best, result.us.median);
        std::fflush(stdout);
        separator = ",\n";
      }
    }
  }
  std::printf("\n ]\n");
}
