// Loops on the CPU that src/quantize and src/activation share: over valid rows, and over one block of fp8, of which it
// takes up to 128 elements and gives e4m3 values and their scale with the bits that quantize/fp8.h defines. For .cc
// files; kernels and the oracle have the same bits. The order of the passes is speed alone.
#pragma once

#include <algorithm>

#include "exchange/summation.h"
#include "quantize/fp8.h"
#include "quantize/rows.h"

// One binary has the widest vectors of the machine it runs on. Sanitizers are not ready when the loader resolves these.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(TOKENWAY_SANITIZED)
#define TW_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TW_CLONES
#endif

namespace tw::quantize {

// Visits each valid row of a call.
template <class Visit>
[[gnu::always_inline]] inline void each_row(const Rows& rows, Visit&& visit) {
  for (int32_t group = 0; group < rows.groups; ++group) {
    const int64_t count = rows.count(group);
    for (int64_t i = 0; i < count; ++i) visit(group * rows.each + i);
  }
}

// The largest of n magnitudes, as bits: NaN is larger than infinity, and infinity than all numbers.
template <int kMost, class In>
[[gnu::always_inline]] inline uint32_t widen_block(const In* from, int n, float (&block)[kMost]) {
  for (int i = 0; i < n; ++i) block[i] = widen(from[i]);
  uint32_t magnitude = 0;
  for (int i = 0; i < n; ++i) magnitude = std::max(magnitude, std::bit_cast<uint32_t>(block[i]) & kMagnitude);
  return magnitude;
}

// Quantises up to 128 elements to values; returns their scale. It makes three passes over a block that lies in the
// first-level cache; each pass is a loop that compilers vectorise.
template <class In>
[[gnu::always_inline]] inline float quantize_block(const In* from, int n, bool power_of_two, uint8_t* values) {
  float block[kBlock];
  const uint32_t magnitude = widen_block(from, n, block);
  const float scale = scale_of(magnitude, power_of_two);
  if (magnitude >= kInfinity) {
    std::fill_n(values, n, kNanValue);
  } else {
    for (int i = 0; i < n; ++i) values[i] = e4m3(divide(block[i], scale));
  }
  return scale;
}

}  // namespace tw::quantize
