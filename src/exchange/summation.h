// Defines the bits of a sum, by the conversions between float types and the loop that adds terms. A sum is float32:
// from the first term on, in the order of the terms, multiply then add, each rounded to nearest even, no fused
// multiply-add (the build says -ffp-contract=off). It is rounded once to the output type. Backends compile this for
// their machine and do not change it; the NumPy oracle returns the same bits (S9).
//
// The sum starts from the first term rather than from 0: then one term alone passes through, -0 and all.
#pragma once

#include <bit>
#include <cstdint>

namespace tw {

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

inline float widen(float value) { return value; }

inline float widen(Bf16 value) { return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }

// Widens without a branch and without a conversion instruction, so that compilers vectorise it on every machine.
// Subnormals are renormalised by a subtraction of normal numbers, which is exact and which flush-to-zero modes leave
// alone.
inline float widen(F16 value) {
  constexpr uint32_t kExponent = 0x7c00u << 13;
  uint32_t bits = (value.bits & 0x7fffu) << 13;
  const uint32_t exponent = bits & kExponent;
  bits += (127u - 15u) << 23;
  const uint32_t infinite = bits + ((128u - 16u) << 23);
  const float subnormal = std::bit_cast<float>(bits + (1u << 23)) - std::bit_cast<float>(113u << 23);
  bits = exponent == kExponent ? infinite : bits;
  bits = exponent == 0 ? std::bit_cast<uint32_t>(subnormal) : bits;
  return std::bit_cast<float>(bits | (value.bits & 0x8000u) << 16);
}

template <class T>
T narrow(float value);

template <>
inline float narrow<float>(float value) {
  return value;
}

template <>
inline Bf16 narrow<Bf16>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;  // rounding could carry a NaN into infinity
  return {static_cast<uint16_t>(nan ? (bits >> 16 | 0x40u) : rounded)};
}

template <>
inline F16 narrow<F16>(float value) {
  const uint32_t all = std::bit_cast<uint32_t>(value);
  const uint32_t sign = all >> 16 & 0x8000u;
  const uint32_t bits = all & 0x7fffffffu;
  // Below 2^-14 the addition of 0.5 puts the last place of a float16 subnormal at the last place of a float32: the
  // hardware rounds to nearest even.
  constexpr uint32_t kHalf = 126u << 23;
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(bits) + std::bit_cast<float>(kHalf)) - kHalf;
  const uint32_t normal = (bits - ((127u - 15u) << 23) + 0xfffu + (bits >> 13 & 1u)) >> 13;
  const uint32_t nan = 0x7e00u;
  uint32_t half = bits < (113u << 23) ? subnormal : normal;
  half = bits >= (143u << 23) ? 0x7c00u : half;
  half = bits > 0x7f800000u ? nan : half;
  return {static_cast<uint16_t>(sign | half)};
}

// Adds terms [weights[j] *] rows[j][i], j ascending, to sum[i]; with kFirst they are the first terms, and sum[i] is not
// read. Sums of many terms are made of several calls. The number of terms is known at compile time, so that a sum stays
// in a register while they are added.
template <int kTerms, bool kFirst, bool kWeighted, class In>
[[gnu::always_inline]] inline void add_terms(float* sum, const In* const* rows, const float* weights, int64_t n) {
  const In* row[kTerms];  // copies that no store to sum can touch, or loops would not vectorise
  float weight[kTerms];
  for (int j = 0; j < kTerms; ++j) {
    row[j] = rows[j];
    weight[j] = kWeighted ? weights[j] : 1.0f;
  }
  const auto term = [&](int j, int64_t i) { return kWeighted ? weight[j] * widen(row[j][i]) : widen(row[j][i]); };
  for (int64_t i = 0; i < n; ++i) {
    float value = kFirst ? term(0, i) : sum[i] + term(0, i);
    for (int j = 1; j < kTerms; ++j) value = value + term(j, i);
    sum[i] = value;
  }
}

}  // namespace tw
