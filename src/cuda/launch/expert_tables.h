// Tables of experts in device memory: a layer's map of logical to physical experts (core/placement.h), where a kernel
// finds ids and weights, and load statistics.
//
// The host writes the maps between two calls; kernels read them, and the block for load statistics writes LoadsView.
//
// What breaks if this changes: MapWords is the layout that host/ writes and exchange/replicas.h reads; where the two
// differ, ids become other physical experts than on peers, and rows meet other weights. kMaxTable is speed alone.
#pragma once

#include <cstdint>

#include "layout/shape.h"

namespace tw::cuda {

inline constexpr int kMaxTable = 8192;  // most words of expert tables that a dispatch keeps in shared memory

// The layout of a layer's map in device memory, in words of 4 bytes; Replicas points into it.
struct MapWords {
  static constexpr uint32_t kDigest = 0;
  static constexpr uint32_t kSeveral = 1;  // how many experts have several physical experts
  static constexpr uint32_t kFirst = 2;    // [E + 1], and after it, at offsets that count from here:
  static constexpr uint32_t slots(const Shape& shape) { return static_cast<uint32_t>(shape.choices()) + 1; }  // [P]
  static constexpr uint32_t lower(const Shape& shape) { return slots(shape) + shape.experts; }                // [P]
  static constexpr uint32_t several(const Shape& shape) { return lower(shape) + shape.experts; }              // [E]
  // Words that every policy's choice needs.
  static constexpr uint32_t used(const Shape& shape) { return shape.logical_experts > 0 ? several(shape) : 0; }
  static constexpr uint32_t all(const Shape& shape) { return kFirst + used(shape) + shape.logical_experts; }
};
// Whether a dispatch keeps its tables in shared memory.
constexpr bool fits_tables(const Shape& shape) {
  return static_cast<uint32_t>(shape.experts) + MapWords::used(shape) <= kMaxTable;
}

// Where a kernel finds the ids and weights of a routing, and what the ids mean. Strides count elements.
struct IdsIn {
  const void* ids;
  const float* weights;
  int64_t id_stride[2];
  int64_t weight_stride[2];
  int32_t wide;            // 1: ids are int64
  int32_t own;             // 1: ids and weights are the handle's own
  int32_t limit;           // valid ids are below this
  const uint32_t* map;     // MapWords: ids are logical experts and become physical ones. NULL: they are physical
  const uint32_t* digest;  // the digest of that map, or of the map from which own ids were made; NULL: there are none
};

// Maps that move (exchange/epochs.h), in a group that has them. A layer then has two maps, one behind the other.
struct MovingView {
  const uint32_t* heads;     // [layers] MapHead
  uint64_t* versions;        // [channels] MapVersion of the next dispatch
  uint64_t* versions_there;  // likewise, in memory that the host maps and reads when it likes
  const uint32_t* ready;     // ready_word, which changes when the host likes
};

// Load statistics of a group that counts: averages [channels, layers, E], and [channels, layers] dispatches and clocks
// (CountedCall). Each is kept twice: here, and (`_there`) in memory that the host maps and reads when it likes.
struct LoadsView {
  float* averages;
  float* averages_there;
  long long* dispatches;
  long long* dispatches_there;
  uint32_t* clocks;
  uint32_t* clocks_there;
  uint32_t* numbers;  // [channels] the number of the last dispatch of this group that ended, refused ones too
  uint32_t* told_of;  // [layers] dispatches of which this rank has told its counts, on whatever channel
  int32_t layers;
  float decay;
  MovingView moving;
};

// Which block of a dispatch gathers load statistics: none, an additional one, or, where there is no room for that, the
// last.
enum class LoadsBlock : int32_t { kNone, kApart, kLast };

}  // namespace tw::cuda
