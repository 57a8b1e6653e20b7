// The floor: what two or more GPUs of one host can do at best, measured beside the library in the same run.
//
// One process drives all GPUs, a thread each, with peer access. Everything is timed inside a CUDA graph, between two
// events that are nodes of the graph, so neither the host's launches nor the ranks' different starts count.
#ifndef TOKENWAY_BENCH_FLOOR_FLOOR_H_
#define TOKENWAY_BENCH_FLOOR_FLOOR_H_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

[[noreturn]] void fail(const std::string& sentence);
void check(cudaError_t error, const char* what);
#define CHECK_CUDA(call) check((call), #call)

constexpr int kSlotWords = 32;  // flags and counters lie 128 bytes apart
constexpr int kMaxGpus = 16;

// One GPU's view of all memories. Each GPU sends row r to one other, in turn, and has row r from one other: with two
// GPUs all rows go to the peer. There are as many banks as GPUs, in turn by step. A GPU that is ahead has heard from
// someone who has heard from ... its receiver, less than one step per GPU ago, so it never writes to a bank in use.
struct Side {
  int device;
  int index;                  // of this GPU
  int gpus;                   // that take part
  const uint4* source;        // what this GPU sends
  uint4* out;                 // where received lines are unpacked to
  uint4* inboxes[kMaxGpus];   // [gpus] banks of each that others write to
  size_t bank;                // uint4 of one bank
  uint32_t* flags[kMaxGpus];  // of each, that others write: [slots], then a slot for each sender
  size_t slots;
  uint32_t* steps;        // [slots] this GPU's own, one per block
  uint32_t* arrivals;     // blocks that have finished their copies
  uint32_t* expired;      // not 0: a wait was given up
  uint32_t* differences;  // of a check

  __host__ __device__ int receiver(int row) const { return (index + 1 + row % (gpus - 1)) % gpus; }
  __host__ __device__ int sender(int row) const { return (index + 2 * gpus - 1 - row % (gpus - 1)) % gpus; }
  __host__ __device__ int other(int number) const { return (index + 1 + number) % gpus; }
  __host__ __device__ uint4* bank_of(int gpu, uint32_t step) const { return inboxes[gpu] + step % gpus * bank; }
  // Where `from` tells `to` that it has come so far.
  __host__ __device__ uint32_t* signal(int to, int from) const { return flags[to] + (slots + from) * kSlotWords; }
};

struct Figures {
  double best = 0, median = 0;
};

// Enqueues one kernel of a measurement.
using Launch = std::function<void(const Side&, cudaStream_t)>;

class Mesh {
 public:
  // The first `gpus` devices that all reach each other, with room for exchanges of `rows` rows of `row_bytes`, and for
  // copies of kCopyBytes.
  Mesh(int gpus, int rows, int row_bytes);
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  // Microseconds per kernel of `count` in one graph, the slowest GPU's. The first `ways` GPUs take part.
  Figures time(const Launch& launch, int count, int repeat, int ways);

  // Flags, counters and inboxes to zero: before kernels of another shape, which count their steps anew.
  void reset();

  const Side& side(int index) const { return sides_[index]; }
  cudaStream_t stream(int index) const { return streams_[index]; }
  const cudaDeviceProp& properties() const { return properties_; }
  int device(int index) const { return sides_[index].device; }
  int gpus() const { return gpus_; }

  static constexpr size_t kCopyBytes = size_t{128} << 20;  // beyond any second-level cache

 private:
  void replay(cudaGraphExec_t* graphs, cudaEvent_t (*events)[2], int repeat, int ways, std::vector<float>* times);
  cudaGraphExec_t capture(const Launch& launch, int count, int ways, int index, const cudaEvent_t* events);
  void find_devices();
  void check_waits(int ways) const;

  int gpus_;
  Side sides_[kMaxGpus] = {};
  cudaStream_t streams_[kMaxGpus] = {};
  cudaDeviceProp properties_ = {};
  size_t slots_ = 0;
};

// What is measured; each prints its part of the JSON document.
void print_flags(Mesh& mesh, int repeat);
void print_ceilings(Mesh& mesh, int repeat);
void print_exchanges(Mesh& mesh, const std::vector<int>& tokens, const std::vector<int>& row_bytes, int repeat);

// Bytes of one row as lines: 120 of every 128 are data, four lines are written at once.
__host__ __device__ constexpr size_t line_bytes(int row_bytes) {
  return (static_cast<size_t>(row_bytes) + 479) / 480 * 512;
}

// Word i of what GPU `index` sends.
__host__ __device__ inline uint32_t pattern(int index, size_t i) {
  return (static_cast<uint32_t>(i) * 2654435761u) ^ (0x5bd1e995u * static_cast<uint32_t>(2 * index + 1));
}

#endif  // TOKENWAY_BENCH_FLOOR_FLOOR_H_
