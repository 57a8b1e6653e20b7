// The floor: what two GPUs of one host can do at best, measured beside the library in the same run.
//
// One process drives both GPUs, a thread each, with peer access. Everything is timed inside a CUDA graph, between two
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

// One GPU's view of both memories. Banks alternate by step, as in the library.
struct Side {
  int device;
  const uint4* source;    // what this GPU sends
  uint4* out;             // where received lines are unpacked to
  uint4* inbox;           // two banks that the peer writes to
  uint4* peer_inbox;      // the peer's
  size_t bank;            // uint4 of one bank
  uint32_t* flags;        // [slots] the peer writes
  uint32_t* peer_flags;   // the peer's
  uint32_t* steps;        // [slots] this GPU's own, one per block
  uint32_t* arrivals;     // blocks that have finished their copies
  uint32_t* expired;      // not 0: a wait was given up
  uint32_t* differences;  // of a check
};

struct Figures {
  double best = 0, median = 0;
};

// Enqueues one kernel of a measurement.
using Launch = std::function<void(const Side&, cudaStream_t)>;

class Pair {
 public:
  // Room for exchanges of `rows` rows of `row_bytes`, and for copies of kCopyBytes.
  Pair(int rows, int row_bytes);
  ~Pair();
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;

  // Microseconds per kernel of `count` in one graph, the slower GPU's. With `ways` 1 only the first GPU works.
  Figures time(const Launch& launch, int count, int repeat, int ways);

  // Flags, counters and inboxes to zero: before kernels of another shape, which count their steps anew.
  void reset();

  const Side& side(int index) const { return sides_[index]; }
  cudaStream_t stream(int index) const { return streams_[index]; }
  const cudaDeviceProp& properties() const { return properties_; }
  int device(int index) const { return sides_[index].device; }
  size_t slots() const { return slots_; }

  static constexpr size_t kCopyBytes = size_t{128} << 20;  // beyond any second-level cache

 private:
  void replay(cudaGraphExec_t* graphs, cudaEvent_t (*events)[2], int repeat, int ways, std::vector<float>* times);
  void find_devices();

  Side sides_[2] = {};
  cudaStream_t streams_[2] = {};
  cudaDeviceProp properties_ = {};
  size_t slots_ = 0;
};

// What is measured; each prints its part of the JSON document.
void print_flags(Pair& pair, int repeat);
void print_ceilings(Pair& pair, int repeat);
void print_exchanges(Pair& pair, const std::vector<int>& tokens, const std::vector<int>& row_bytes, int repeat);

// Bytes of one row as lines: 120 of every 128 are data, four lines are written at once.
__host__ __device__ constexpr size_t line_bytes(int row_bytes) {
  return (static_cast<size_t>(row_bytes) + 479) / 480 * 512;
}

// Word i of what device `index` (0 or 1) sends.
__host__ __device__ inline uint32_t pattern(int index, size_t i) {
  return (static_cast<uint32_t>(i) * 2654435761u) ^ (index == 0 ? 0x5bd1e995u : 0x27d4eb2fu);
}

#endif  // TOKENWAY_BENCH_FLOOR_FLOOR_H_
