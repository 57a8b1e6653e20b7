#include "quantize/fp8.h"

#include <algorithm>

#include "exchange/summation.h"

// One binary, the widest vectors of the machine it runs on. Sanitizers are not ready when the loader resolves these.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(TOKENWAY_SANITIZED)
#define TW_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TW_CLONES
#endif

namespace tw::quantize {
namespace {

// Three passes over a block that lies in the first-level cache; each of them is a loop that compilers vectorise.
template <class In>
[[gnu::always_inline]] inline float quantize_block(const In* from, int n, bool power_of_two, uint8_t* values) {
  float block[kBlock];
  for (int i = 0; i < n; ++i) block[i] = widen(from[i]);
  uint32_t magnitude = 0;
  for (int i = 0; i < n; ++i) magnitude = std::max(magnitude, std::bit_cast<uint32_t>(block[i]) & kMagnitude);
  const float scale = scale_of(magnitude, power_of_two);
  if (magnitude >= kInfinity) {
    std::fill_n(values, n, kNanValue);
  } else {
    for (int i = 0; i < n; ++i) values[i] = e4m3(divide(block[i], scale));
  }
  return scale;
}

template <class In>
[[gnu::always_inline]] inline void quantize_rows(const Call& call) {
  const int64_t blocks = call.blocks();
  for (int64_t token = 0; token < call.tokens; ++token) {
    const auto* const row = reinterpret_cast<const In*>(call.rows + token * call.row_stride);
    uint8_t* const values = call.values + token * call.elements;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = block * kBlock;
      const int n = static_cast<int>(std::min<int64_t>(kBlock, call.elements - first));
      call.scales[token * blocks + block] = quantize_block(row + first, n, call.power_of_two, values + first);
    }
  }
}

// target_clones wants functions, not templates.
TW_CLONES void quantize_f32(const Call& call) { quantize_rows<float>(call); }
TW_CLONES void quantize_bf16(const Call& call) { quantize_rows<Bf16>(call); }
TW_CLONES void quantize_f16(const Call& call) { quantize_rows<F16>(call); }

}  // namespace

void quantize_fp8_cpu(const Call& call) {
  if (call.dtype == twFloat32) return quantize_f32(call);
  if (call.dtype == twBfloat16) return quantize_bf16(call);
  quantize_f16(call);
}

}  // namespace tw::quantize
