#include "cpu/vector.h"

#include <algorithm>
#include <limits>

#include "exchange/summation.h"

// One binary, the widest vectors of the machine it runs on. Sanitizers are not ready when the loader resolves these.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(TOKENWAY_SANITIZED)
#define TW_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TW_CLONES
#endif

namespace tw::cpu {
namespace {

struct Sum {
  void* out;
  const void* const* rows;
  const float* weights;
  int count;
  int64_t n;
};

template <class In, class Out>
[[gnu::always_inline]] inline void run(const Sum& sum) {
  tw::sum_rows(static_cast<Out*>(sum.out), reinterpret_cast<const In* const*>(sum.rows), sum.weights, sum.count, sum.n);
}

// target_clones wants functions, not templates.
TW_CLONES void f32_f32(const Sum& sum) { run<float, float>(sum); }
TW_CLONES void f32_bf16(const Sum& sum) { run<float, Bf16>(sum); }
TW_CLONES void f32_f16(const Sum& sum) { run<float, F16>(sum); }
TW_CLONES void bf16_f32(const Sum& sum) { run<Bf16, float>(sum); }
TW_CLONES void bf16_bf16(const Sum& sum) { run<Bf16, Bf16>(sum); }
TW_CLONES void bf16_f16(const Sum& sum) { run<Bf16, F16>(sum); }
TW_CLONES void f16_f32(const Sum& sum) { run<F16, float>(sum); }
TW_CLONES void f16_bf16(const Sum& sum) { run<F16, Bf16>(sum); }
TW_CLONES void f16_f16(const Sum& sum) { run<F16, F16>(sum); }

int index_of(twDtype_t dtype) { return dtype == twFloat32 ? 0 : dtype == twBfloat16 ? 1 : 2; }

}  // namespace

void sum_rows(void* out, const void* const* rows, const float* weights, int count, const RowTypes& types) {
  static constexpr void (*kFunctions[3][3])(const Sum&) = {
      {f32_f32, f32_bf16, f32_f16}, {bf16_f32, bf16_bf16, bf16_f16}, {f16_f32, f16_bf16, f16_f16}};
  kFunctions[index_of(types.from)][index_of(types.to)]({out, rows, weights, count, types.elements});
}

void fill_nan(void* out, twDtype_t dtype, int64_t n) {
  if (dtype == twFloat32) {
    std::fill_n(static_cast<float*>(out), n, std::numeric_limits<float>::quiet_NaN());
  } else {
    std::fill_n(static_cast<uint16_t*>(out), n, static_cast<uint16_t>(dtype == twBfloat16 ? 0x7fc0 : 0x7e00));
  }
}

}  // namespace tw::cpu
