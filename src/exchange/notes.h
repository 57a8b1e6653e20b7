// Notes: the bound of a step, and what ranks must give alike beside it.
#pragma once

#include <cstdint>

namespace tw {

// In a dispatch's note, beside the bound: its rows go where the exchange of counts before it has announced. Ranks that
// differ in that would write and read at different places.
inline constexpr uint32_t kLanding = 1u << 31;

// Of gathers and reduces. Of all that ranks must give alike, beside the bound in a note: as soon as two ranks differ,
// each meets a note that is not its own. FNV-1a, by 32 bits at a time.
constexpr uint32_t kDigestSeed = 2166136261u;
constexpr uint32_t mix_digest(uint32_t digest, uint64_t value) {
  digest = (digest ^ static_cast<uint32_t>(value)) * 16777619u;
  return (digest ^ static_cast<uint32_t>(value >> 32)) * 16777619u;
}
constexpr uint64_t collective_note(int32_t bound, uint32_t digest) {
  return static_cast<uint64_t>(digest) << 32 | static_cast<uint32_t>(bound);
}

}  // namespace tw
