// twQuantizeFp8 on the CPU: it takes a checked quantize::Call and fills values and scales of the valid rows, block by
// block, compiled for several vector widths. The bits are those of quantize/fp8.h, as on devices, and must not depend
// on the width.
#include "quantize/fp8.h"

#include "quantize/block.h"

namespace tw::quantize {
namespace {

template <class In>
[[gnu::always_inline]] inline void quantize_rows(const Call& call) {
  each_row(
      call.rows, [&](int64_t row) __attribute__((always_inline)) {
        const auto* const from = reinterpret_cast<const In*>(call.from.row(row));
        uint8_t* const values = call.values + row * call.elements;
        for (int64_t block = 0; block < call.scales.blocks; ++block) {
          const int64_t first = block * kBlock;
          const int n = static_cast<int>(std::min<int64_t>(kBlock, call.elements - first));
          const float scale = quantize_block(from + first, n, call.power_of_two, values + first);
          call.scales.put_either(row, block, scale);
        }
      });
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
