// twSwiGlu and its backward on the CPU: takes a checked activation::Call, visits the valid rows and writes results,
// compiled for several vector widths. The bits are those of activation/swiglu.h and must not depend on the width; the
// blocks and arrays are there so that loops vectorise.
#include "activation/swiglu.h"

#include <algorithm>

#include "exchange/summation.h"
#include "quantize/block.h"

namespace tw::activation {
namespace {

using quantize::each_row;
using quantize::kBlock;

template <class In>
[[gnu::always_inline]] inline void forward(const Call& call) {
  each_row(
      call.rows, [&](int64_t row) __attribute__((always_inline)) {
        const auto* const gate = reinterpret_cast<const In*>(call.gate_up.row(row));
        const In* const up = gate + call.elements;
        const float weight = call.weights != nullptr ? call.weights[row] : 1.0f;  // a product with 1 is exact
        std::byte* const out = call.out.row(row);
        for (int64_t first = 0, block = 0; first < call.elements; first += kBlock, ++block) {
          const int n = static_cast<int>(std::min<int64_t>(kBlock, call.elements - first));
          float values[kBlock];
          for (int i = 0; i < n; ++i) values[i] = times(swiglu(widen(gate[first + i]), widen(up[first + i])), weight);
          if (call.scales.data == nullptr) {
            for (int i = 0; i < n; ++i) reinterpret_cast<In*>(out)[first + i] = narrow<In>(values[i]);
          } else {
            auto* const to = reinterpret_cast<uint8_t*>(out) + first;
            call.scales.put_either(row, block, quantize::quantize_block(values, n, call.power_of_two, to));
          }
        }
      });
}

// Adds the accumulators up, in the order of swiglu.h.
[[gnu::always_inline]] inline float total(float (&sums)[kAccumulators]) {
  for (int by = kGroup / 2; by > 0; by /= 2) {
    for (int group = 0; group < kAccumulators; group += kGroup) {
      for (int i = 0; i < by; ++i) sums[group + i] = plus(sums[group + i], sums[group + i + by]);
    }
  }
  for (int by = kAccumulators / 2; by >= kGroup; by /= 2) {
    for (int group = 0; group < by; group += kGroup) sums[group] = plus(sums[group], sums[group + by]);
  }
  return sums[0];
}

template <class In>
[[gnu::always_inline]] inline void backward(const Call& call) {
  each_row(
      call.rows, [&](int64_t row) __attribute__((always_inline)) {
        const auto* const gate = reinterpret_cast<const In*>(call.gate_up.row(row));
        const auto* const out = reinterpret_cast<const In*>(call.out.row(row));
        auto* const of_gate = reinterpret_cast<In*>(call.of_gate_up.row(row));
        const In* const up = gate + call.elements;
        In* const of_up = of_gate + call.elements;
        const float weight = call.weights != nullptr ? call.weights[row] : 1.0f;
        float sums[kAccumulators] = {};
        for (int64_t first = 0; first < call.elements; first += kAccumulators) {
          const int n = static_cast<int>(std::min<int64_t>(kAccumulators, call.elements - first));
          // Elements go through arrays: otherwise, for all the compiler knows, a store to the output could change what
          // is read next, and it does not vectorise.
          float gates[kAccumulators];
          float ups[kAccumulators];
          float outs[kAccumulators];
          for (int i = 0; i < n; ++i) gates[i] = widen(gate[first + i]);
          for (int i = 0; i < n; ++i) ups[i] = widen(up[first + i]);
          for (int i = 0; i < n; ++i) outs[i] = widen(out[first + i]);
          for (int i = 0; i < n; ++i) {
            const Gradient made = swiglu_gradient(gates[i], ups[i], outs[i], times(outs[i], weight));
            gates[i] = made.gate;
            ups[i] = made.up;
            sums[i] = plus(sums[i], made.weight);
          }
          for (int i = 0; i < n; ++i) of_gate[first + i] = narrow<In>(gates[i]);
          for (int i = 0; i < n; ++i) of_up[first + i] = narrow<In>(ups[i]);
        }
        if (call.of_weights != nullptr) call.of_weights[row] = total(sums);
      });
}

// target_clones wants functions, not templates.
TW_CLONES void forward_f32(const Call& call) { forward<float>(call); }
TW_CLONES void forward_bf16(const Call& call) { forward<Bf16>(call); }
TW_CLONES void forward_f16(const Call& call) { forward<F16>(call); }
TW_CLONES void backward_f32(const Call& call) { backward<float>(call); }
TW_CLONES void backward_bf16(const Call& call) { backward<Bf16>(call); }
TW_CLONES void backward_f16(const Call& call) { backward<F16>(call); }

}  // namespace

void swiglu_cpu(const Call& call) {
  if (call.dtype == twFloat32) return forward_f32(call);
  if (call.dtype == twBfloat16) return forward_bf16(call);
  forward_f16(call);
}

void swiglu_backward_cpu(const Call& call) {
  if (call.dtype == twFloat32) return backward_f32(call);
  if (call.dtype == twBfloat16) return backward_bf16(call);
  backward_f16(call);
}

}  // namespace tw::activation
