// twQuantizeNvfp4 on the CPU: it takes a checked quantize::Nvfp4Call, finds the global scale if it is to be found, and
// fills values and scales of the valid rows, block by block, compiled for several vector widths. The bits are those of
// quantize/nvfp4.h, as on devices, and must not depend on the width.
#include "quantize/nvfp4.h"

#include "quantize/block.h"

namespace tw::quantize {
namespace {

template <class In>
[[gnu::always_inline]] inline uint32_t largest_finite(const Nvfp4Call& call) {
  uint32_t most = 0;
  each_row(
      call.rows, [&](int64_t row) __attribute__((always_inline)) {
        const auto* const from = reinterpret_cast<const In*>(call.from.row(row));
        for (int64_t at = 0; at < call.elements; at += kNvfp4Block) {
          float block[kNvfp4Block];
          const uint32_t magnitude = widen_block(from + at, kNvfp4Block, block);
          most = std::max(most, magnitude < kInfinity ? magnitude : 0);
        }
      });
  return most;
}

template <class In>
[[gnu::always_inline]] inline void nvfp4_rows(const Nvfp4Call& call) {
  if (call.find) *call.global_scale = nvfp4_global_scale(largest_finite<In>(call));
  const int64_t blocks = call.blocks();
  each_row(
      call.rows, [&](int64_t row) __attribute__((always_inline)) {
        const auto* const from = reinterpret_cast<const In*>(call.from.row(row));
        const float* const global_scale = call.global_scale + row * call.global_stride[0];
        for (int64_t at = 0; at < blocks; ++at) {
          const float global = global_scale[at * call.global_stride[1]];
          float block[kNvfp4Block];
          const uint8_t scale = nvfp4_scale(widen_block(from + at * kNvfp4Block, kNvfp4Block, block), global);
          call.scales.put(row, at, scale);
          const Nvfp4Step step = nvfp4_step(scale, global);
          uint8_t codes[kNvfp4Block];
          for (int i = 0; i < kNvfp4Block; ++i) codes[i] = static_cast<uint8_t>(nvfp4_value(block[i], step));
          uint8_t* const values = call.values + (row * call.elements + at * kNvfp4Block) / 2;
          for (int i = 0; i < kNvfp4Block / 2; ++i) {
            values[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
          }
        }
      });
}

// target_clones wants functions, not templates.
TW_CLONES void nvfp4_f32(const Nvfp4Call& call) { nvfp4_rows<float>(call); }
TW_CLONES void nvfp4_bf16(const Nvfp4Call& call) { nvfp4_rows<Bf16>(call); }
TW_CLONES void nvfp4_f16(const Nvfp4Call& call) { nvfp4_rows<F16>(call); }

}  // namespace

void quantize_nvfp4_cpu(const Nvfp4Call& call) {
  if (call.dtype == twFloat32) return nvfp4_f32(call);
  if (call.dtype == twBfloat16) return nvfp4_bf16(call);
  nvfp4_f16(call);
}

}  // namespace tw::quantize
