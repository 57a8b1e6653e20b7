// What the library should compute, written a second time: rounding through double, placement, arrivals and sums from
// the documentation alone. Nothing here includes the library's own arithmetic.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "tokenway/tokenway.h"

namespace tw::test {

// A well mixed 32-bit number from small ones (splitmix64).
inline uint32_t mix(std::initializer_list<uint64_t> parts) {
  uint64_t h = 0x9e3779b97f4a7c15ull;
  for (const uint64_t part : parts) {
    h += part + 0x9e3779b97f4a7c15ull;
    h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9ull;
    h = (h ^ h >> 27) * 0x94d049bb133111ebull;
    h ^= h >> 31;
  }
  return static_cast<uint32_t>(h);
}

// A 16-bit float format: fraction bits and the exponent of its smallest normal number.
struct Format {
  int fraction;
  int least;
  double largest;
};
inline constexpr Format kBf16{7, -126, 0x1.fep127};
inline constexpr Format kF16{10, -14, 65504.0};
inline const Format& format_of(twDtype_t dtype) { return dtype == twBfloat16 ? kBf16 : kF16; }

// Round to nearest even by scaling the last place to 1; exact in double for every float32.
inline double round_to(const Format& format, double x) {
  if (std::isnan(x) || std::isinf(x) || x == 0) return x;
  int exponent = 0;
  std::frexp(x, &exponent);
  const int last = std::max(exponent - 1, format.least) - format.fraction;
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(x, -last)), last);
  return std::fabs(rounded) > format.largest ? std::copysign(INFINITY, x) : rounded;
}

// The bits of a value that the format holds exactly.
inline uint16_t encode(const Format& format, double x) {
  const int exponent_bits = 15 - format.fraction;
  const uint32_t sign = std::signbit(x) ? 0x8000u : 0;
  const uint32_t infinite = ((1u << exponent_bits) - 1) << format.fraction;
  if (std::isnan(x)) return static_cast<uint16_t>(sign | infinite | 1u << (format.fraction - 1));
  if (std::isinf(x)) return static_cast<uint16_t>(sign | infinite);
  int exponent = 0;
  const double fraction = std::frexp(std::fabs(x), &exponent);
  if (x == 0 || exponent - 1 < format.least) {  // zero or subnormal: a count of last places
    return static_cast<uint16_t>(sign |
                                 static_cast<uint32_t>(std::ldexp(std::fabs(x), format.fraction - format.least)));
  }
  const auto biased = static_cast<uint32_t>(exponent - format.least);
  const auto rest = static_cast<uint32_t>(std::ldexp(fraction * 2 - 1, format.fraction));
  return static_cast<uint16_t>(sign | biased << format.fraction | rest);
}

inline double decode(const Format& format, uint16_t bits) {
  const uint32_t rest = bits & ((1u << format.fraction) - 1);
  const uint32_t biased = (bits & 0x7fffu) >> format.fraction;
  const uint32_t most = (1u << (15 - format.fraction)) - 1;
  double x = 0;
  if (biased == most) {
    x = rest == 0 ? INFINITY : NAN;
  } else if (biased == 0) {
    x = std::ldexp(rest, format.least - format.fraction);
  } else {
    x = std::ldexp(1 + std::ldexp(rest, -format.fraction), static_cast<int>(biased) + format.least - 1);
  }
  return (bits & 0x8000u) != 0 ? -x : x;
}

inline int float_bytes(twDtype_t dtype) { return dtype == twFloat32 ? 4 : 2; }

inline void store(twDtype_t dtype, void* at, int64_t i, float value) {
  if (dtype == twFloat32) {
    static_cast<float*>(at)[i] = value;
  } else {
    static_cast<uint16_t*>(at)[i] = encode(format_of(dtype), round_to(format_of(dtype), value));
  }
}

inline float rounded(twDtype_t dtype, float value) {
  return dtype == twFloat32 ? value : static_cast<float>(round_to(format_of(dtype), value));
}

// A sum as the header words it: from the first term on, multiply then add.
class Total {
 public:
  void add(float term) {
    value_ = empty_ ? term : value_ + term;
    empty_ = false;
  }
  float value() const { return empty_ ? 0.0f : value_; }
  bool empty() const { return empty_; }

 private:
  float value_ = 0;
  bool empty_ = true;
};

// Who holds each expert.
struct Homes {
  std::vector<int32_t> rank;
  std::vector<int32_t> slot;
  std::vector<int32_t> held;  // [N]

  Homes(const twGroupConfig_t& config, int ranks) : held(ranks, 0) {
    for (int32_t e = 0; e < config.num_experts; ++e) {
      int32_t home = 0;
      if (config.expert_rank != nullptr) {
        home = config.expert_rank[e];
      } else {  // count along the blocks
        int32_t end = 0;
        for (home = -1; end <= e;) {
          ++home;
          end += config.num_experts / ranks + (home < config.num_experts % ranks ? 1 : 0);
        }
      }
      rank.push_back(home);
      slot.push_back(config.expert_slot != nullptr ? config.expert_slot[e] : held[home]);
      ++held[home];
    }
  }
  bool here(int32_t id, int32_t me) const { return id >= 0 && rank[id] == me; }
};

// What expert e makes of a token: different for every (call, source, token, expert, element); -0 among them.
inline float answer(uint32_t salt, int source, int token, int expert, int64_t i) {
  const uint32_t h = mix({salt, static_cast<uint64_t>(source), static_cast<uint64_t>(token),
                          static_cast<uint64_t>(expert), static_cast<uint64_t>(i)});
  if (h % 13 == 0) return -0.0f;
  return std::ldexp(static_cast<float>(static_cast<int32_t>(h >> 8 & 0xffff) - 32768), static_cast<int>(h % 7) - 12);
}

}  // namespace tw::test
