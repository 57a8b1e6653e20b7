// Sums to and of rows of e4m3, by blocks of 128 elements that stay in the first-level cache. sum_rows (cpu/vector.h)
// adds the terms, so their order and rounding is that of all combines (S9); quantize/wire.h fixes the bits of values.
#include "cpu/fp8_rows.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "cpu/vector.h"
#include "layout/fp8_rows.h"
#include "quantize/block.h"
#include "quantize/wire.h"

namespace tw::cpu {
namespace {

constexpr int64_t kOfScale = quantize::kBlock;
static_assert(kOfScale == static_cast<int64_t>(kFp8Elements));

std::array<float, 256> make_fp8_floats() {
  std::array<float, 256> floats{};
  for (int code = 0; code < 256; ++code) floats[code] = quantize::e4m3_float(static_cast<uint8_t>(code));
  return floats;
}
const std::array<float, 256> kFp8Floats = make_fp8_floats();

TW_CLONES float quantize_own(const float* from, int n, uint8_t* values) {
  return quantize::quantize_block(from, n, false, values);
}
TW_CLONES void quantize_given(const float* from, int n, float scale, uint8_t* values) {
  for (int i = 0; i < n; ++i) values[i] = quantize::e4m3_scaled(from[i], scale);
}
TW_CLONES void widen_values(const uint8_t* values, int n, float scale, float* to) {
  for (int i = 0; i < n; ++i) to[i] = kFp8Floats[values[i]] * scale;
}

}  // namespace

void sum_to_fp8(void* out, const void* const* rows, const float* weights, int count, const RowTypes& types) {
  const int64_t bytes = types.from == twFloat32 ? 4 : 2;
  auto* const values = static_cast<uint8_t*>(out);
  const bool in_blocks = types.scale == 0.0f;
  const uint64_t scales = fp8_scales_begin(static_cast<uint64_t>(types.elements));
  const uint64_t end = fp8_row_bytes(static_cast<uint64_t>(types.elements), in_blocks);
  for (int64_t begin = 0; begin < types.elements; begin += kOfScale) {
    const int64_t n = std::min(kOfScale, types.elements - begin);
    const void* terms[TW_MAX_TOP_K];
    for (int j = 0; j < count; ++j) terms[j] = static_cast<const std::byte*>(rows[j]) + begin * bytes;
    float sum[kOfScale];
    sum_rows(sum, terms, weights, count, {types.from, twFloat32, n, weights != nullptr});
    if (in_blocks) {
      const float scale = quantize_own(sum, static_cast<int>(n), values + begin);
      std::memcpy(values + scales + sizeof(float) * (begin / kOfScale), &scale, sizeof scale);
    } else {
      quantize_given(sum, static_cast<int>(n), types.scale, values + begin);
    }
  }
  std::fill(values + types.elements, values + scales, uint8_t{0});
  const uint64_t blocks = in_blocks ? static_cast<uint64_t>((types.elements + kOfScale - 1) / kOfScale) : 0;
  std::fill(values + scales + sizeof(float) * blocks, values + end, uint8_t{0});
}

void sum_of_fp8(void* out, const void* const* rows, const float* /*weights*/, int count, const RowTypes& types) {
  const int64_t bytes = types.to == twFloat32 ? 4 : 2;
  const int64_t bias_bytes = types.bias.dtype == twFloat32 ? 4 : 2;
  const uint64_t scales = fp8_scales_begin(static_cast<uint64_t>(types.elements));
  for (int64_t begin = 0; begin < types.elements; begin += kOfScale) {
    const int64_t n = std::min(kOfScale, types.elements - begin);
    float terms[TW_MAX_TOP_K][kOfScale];
    const void* places[TW_MAX_TOP_K];
    for (int j = 0; j < count; ++j) {
      const auto* const values = static_cast<const uint8_t*>(rows[j]);
      float scale = types.scale;
      if (scale == 0.0f) std::memcpy(&scale, values + scales + sizeof(float) * (begin / kOfScale), sizeof scale);
      widen_values(values + begin, static_cast<int>(n), scale, terms[j]);
      places[j] = terms[j];
    }
    RowTypes of_block{twFloat32, types.to, n, false, 0.0f, types.bias};
    if (types.bias.data != nullptr) of_block.bias.data += begin * bias_bytes;
    sum_rows(static_cast<std::byte*>(out) + begin * bytes, places, nullptr, count, of_block);
  }
}

}  // namespace tw::cpu
