// Tables of experts in device memory: maps (core/placement.h), and what is counted of them.
#pragma once

#include <cstdint>

#include "layout/shape.h"

namespace tw::cuda {

inline constexpr int kMaxTable = 8192;  // words of tables of experts that a dispatch keeps in shared memory

// A layer's map in device memory, in words: what Replicas points to.
struct MapWords {
  static constexpr uint32_t kDigest = 0;
  static constexpr uint32_t kSeveral = 1;  // how many experts have several slots
  static constexpr uint32_t kFirst = 2;    // [E + 1], and behind it, counted from there:
  static constexpr uint32_t slots(const Shape& shape) { return static_cast<uint32_t>(shape.choices()) + 1; }  // [P]
  static constexpr uint32_t lower(const Shape& shape) { return slots(shape) + shape.experts; }                // [P]
  static constexpr uint32_t several(const Shape& shape) { return lower(shape) + shape.experts; }              // [E]
  // Of what all choices need.
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
  int32_t wide;            // int64
  int32_t own;             // these are the handle's own
  int32_t limit;           // ids are below this
  const uint32_t* map;     // MapWords: ids are experts, of which it has the slots. NULL: they are what experts are here
  const uint32_t* digest;  // of that map, or of the one that own ids are from. NULL: there are none
};

// Averages of a group that counts, [lanes, layers, E], and [lanes, layers] of their dispatches and clocks
// (CountedCall): here, and in memory that the host maps, where it reads them when it likes.
struct LoadsView {
  float* averages;
  float* averages_there;
  long long* dispatches;
  long long* dispatches_there;
  uint32_t* clocks;
  uint32_t* clocks_there;
  uint32_t* told_of;  // [layers] dispatches that this rank has told, on whatever lane
  int32_t layers;
  float decay;
};

// Which block of a dispatch counts: none, one more than the others are, or, where there is no room for it, the last.
enum class LoadsBlock : int32_t { kNone, kApart, kLast };

}  // namespace tw::cuda
