// twQuantizeMxfp8 on the CPU: it takes a checked quantize::MxCall and fills values and scales of the valid rows, block
// by block, compiled for several vector widths. The bits are those of quantize/mxfp8.h, as on devices, and must not
// depend on the width.
#include "quantize/mxfp8.h"

#include "quantize/block.h"

namespace tw::quantize {
namespace {

template <class In, class Format>
[[gnu::always_inline]] inline void mx_rows(const MxCall& call) {
  const int64_t blocks = call.blocks();
  each_row(
      call.rows, [&](int64_t row) __attribute__((always_inline)) {
        const auto* const from = reinterpret_cast<const In*>(call.from.row(row));
        for (int64_t at = 0; at < blocks; ++at) {
          float block[kMxBlock];
          const uint8_t scale = mx_scale<Format>(widen_block(from + at * kMxBlock, kMxBlock, block));
          uint8_t* const values = call.values + row * call.elements + at * kMxBlock;
          call.scales.put(row, at, scale);
          if (scale == kMxNanScale) {
            std::fill_n(values, kMxBlock, kNanValue);
          } else {
            const MxInverse inverse = mx_inverse(scale);
            for (int i = 0; i < kMxBlock; ++i) values[i] = mx_value<Format>(block[i], inverse);
          }
        }
      });
}

// target_clones wants functions, not templates.
TW_CLONES void mx_f32_e4m3(const MxCall& call) { mx_rows<float, E4m3>(call); }
TW_CLONES void mx_bf16_e4m3(const MxCall& call) { mx_rows<Bf16, E4m3>(call); }
TW_CLONES void mx_f16_e4m3(const MxCall& call) { mx_rows<F16, E4m3>(call); }
TW_CLONES void mx_f32_e5m2(const MxCall& call) { mx_rows<float, E5m2>(call); }
TW_CLONES void mx_bf16_e5m2(const MxCall& call) { mx_rows<Bf16, E5m2>(call); }
TW_CLONES void mx_f16_e5m2(const MxCall& call) { mx_rows<F16, E5m2>(call); }

}  // namespace

void quantize_mxfp8_cpu(const MxCall& call) {
  if (call.dtype == twFloat32) return call.e5m2 ? mx_f32_e5m2(call) : mx_f32_e4m3(call);
  if (call.dtype == twBfloat16) return call.e5m2 ? mx_bf16_e5m2(call) : mx_bf16_e4m3(call);
  call.e5m2 ? mx_f16_e5m2(call) : mx_f16_e4m3(call);
}

}  // namespace tw::quantize
