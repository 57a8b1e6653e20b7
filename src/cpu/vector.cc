// Streaming copies and sums for this machine (cpu/vector.h). exchange/summation.h is compiled for several vector
// widths, and the loader picks the widest that the machine has. Blocks, groups and prefetching are speed alone; the
// order of terms and the rounding are the bits of results (S9), and must not depend on the width.
#include "cpu/vector.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "exchange/summation.h"

#if defined(__SSE2__) && !defined(TOKENWAY_SANITIZED)  // sanitizers do not see streaming stores
#include <emmintrin.h>
#define TW_STREAM 1
#endif

// One binary has the widest vectors of the machine it runs on. Sanitizers are not ready when the loader resolves these.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(TOKENWAY_SANITIZED)
#define TW_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TW_CLONES
#endif

namespace tw::cpu {
namespace {

constexpr int64_t kBlock = 256;  // sums in progress: 1 KiB, in the first-level cache
constexpr int kGroup = 4;        // terms added in one pass over a block

// A sum spends its time waiting for its rows, several at once from as many places. Prefetching two blocks ahead made it
// 1.5 times as fast (24.8 GB/s instead of 17 on one core of a Zen 5 server, four bfloat16 rows from memory).
constexpr int64_t kAhead = 2 * kBlock;

// A group of terms: the next rows of a block, up to kGroup.
struct Group {
  const void* rows[kGroup];
  float weights[kGroup];
  int count;
  bool first;
};

template <bool kFirst, bool kWeighted, class In>
[[gnu::always_inline]] inline void add_group(float* sum, const Group& group, int64_t n) {
  const In* rows[kGroup];
  for (int j = 0; j < kGroup; ++j) rows[j] = static_cast<const In*>(group.rows[j]);
  switch (group.count) {
    case 1:
      return add_terms<1, kFirst, kWeighted>(sum, rows, group.weights, n);
    case 2:
      return add_terms<2, kFirst, kWeighted>(sum, rows, group.weights, n);
    case 3:
      return add_terms<3, kFirst, kWeighted>(sum, rows, group.weights, n);
    default:
      return add_terms<4, kFirst, kWeighted>(sum, rows, group.weights, n);
  }
}

template <class In>
[[gnu::always_inline]] inline void add(float* sum, const Group& group, bool weighted, int64_t n) {
  if (group.first) {
    weighted ? add_group<true, true, In>(sum, group, n) : add_group<true, false, In>(sum, group, n);
  } else {
    weighted ? add_group<false, true, In>(sum, group, n) : add_group<false, false, In>(sum, group, n);
  }
}

template <class Out>
[[gnu::always_inline]] inline void round(void* out, const float* sum, int64_t n) {
  auto* const to = static_cast<Out*>(out);
  for (int64_t i = 0; i < n; ++i) to[i] = narrow<Out>(sum[i]);
}

// target_clones wants functions, not templates.
TW_CLONES void add_f32(float* sum, const Group& g, bool weighted, int64_t n) { add<float>(sum, g, weighted, n); }
TW_CLONES void add_bf16(float* sum, const Group& g, bool weighted, int64_t n) { add<Bf16>(sum, g, weighted, n); }
TW_CLONES void add_f16(float* sum, const Group& g, bool weighted, int64_t n) { add<F16>(sum, g, weighted, n); }
TW_CLONES void round_f32(void* out, const float* sum, int64_t n) { round<float>(out, sum, n); }
TW_CLONES void round_bf16(void* out, const float* sum, int64_t n) { round<Bf16>(out, sum, n); }
TW_CLONES void round_f16(void* out, const float* sum, int64_t n) { round<F16>(out, sum, n); }

struct Type {
  int bytes;
  void (*add)(float*, const Group&, bool, int64_t);
  void (*round)(void*, const float*, int64_t);
};

const Type& type_of(twDtype_t dtype) {
  static constexpr Type kFloat32{4, add_f32, round_f32};
  static constexpr Type kBfloat16{2, add_bf16, round_bf16};
  static constexpr Type kFloat16{2, add_f16, round_f16};
  return dtype == twFloat32 ? kFloat32 : dtype == twBfloat16 ? kBfloat16 : kFloat16;
}

void ask_ahead(const void* const* rows, int count, int64_t from, int64_t to) {
  constexpr int64_t kCacheLine = 64;
  for (int j = 0; j < count; ++j) {
    for (int64_t at = from; at < to; at += kCacheLine) __builtin_prefetch(static_cast<const std::byte*>(rows[j]) + at);
  }
}

}  // namespace

#ifdef TW_STREAM

void stream_copy(void* to, const void* from, size_t n) {
  constexpr size_t kCacheLine = 64;
  auto* out = static_cast<std::byte*>(to);
  auto* in = static_cast<const std::byte*>(from);
  const size_t head = std::min<size_t>(-reinterpret_cast<uintptr_t>(out) % kCacheLine, n);
  std::memcpy(out, in, head);
  out += head;
  in += head;
  n -= head;
  // Copies whole cache lines at a time: half a line would be read after all, to be completed.
  for (; n >= kCacheLine; n -= kCacheLine, in += kCacheLine, out += kCacheLine) {
    const auto* const source = reinterpret_cast<const __m128i*>(in);
    auto* const target = reinterpret_cast<__m128i*>(out);
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  std::memcpy(out, in, n);
}

void stream_fence() { _mm_sfence(); }

#else

void stream_copy(void* to, const void* from, size_t n) { std::memcpy(to, from, n); }
void stream_fence() {}

#endif

void sum_rows(void* out, const void* const* rows, const float* weights, int count, const RowTypes& types) {
  const Type& from = type_of(types.from);
  const Type& to = type_of(types.to);
  const Type& first = type_of(types.bias.dtype);
  const bool biased = types.bias.data != nullptr;
  const int64_t row_bytes = types.elements * from.bytes;
  for (int64_t begin = 0; begin < types.elements; begin += kBlock) {
    const int64_t n = std::min(kBlock, types.elements - begin);
    float sum[kBlock];
    if (biased) {
      first.add(sum, Group{{types.bias.data + begin * first.bytes}, {}, 1, true}, false, n);
    } else if (count == 0) {
      std::fill_n(sum, n, 0.0f);
    }
    const int64_t ahead = (begin + kAhead) * from.bytes;
    ask_ahead(rows, count, ahead, std::min(ahead + kBlock * from.bytes, row_bytes));
    for (int j = 0; j < count; j += kGroup) {
      Group group{{}, {}, std::min(kGroup, count - j), j == 0 && !biased};
      for (int k = 0; k < group.count; ++k) {
        group.rows[k] = static_cast<const std::byte*>(rows[j + k]) + begin * from.bytes;
        if (weights != nullptr) group.weights[k] = weights[j + k];
      }
      from.add(sum, group, weights != nullptr, n);
    }
    to.round(static_cast<std::byte*>(out) + begin * to.bytes, sum, n);
  }
}

void fill_nan(void* out, twDtype_t dtype, int64_t n) {
  if (dtype == twFloat32) {
    std::fill_n(static_cast<float*>(out), n, std::numeric_limits<float>::quiet_NaN());
  } else {
    std::fill_n(static_cast<uint16_t*>(out), n, static_cast<uint16_t>(dtype == twBfloat16 ? 0x7fc0 : 0x7e00));
  }
}

}  // namespace tw::cpu
