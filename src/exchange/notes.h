// The notes of gathers and reduces: what ranks must give alike beside the bound, as one number.
#pragma once

#include <cstdint>

namespace tw {

// Of all that ranks must give alike, beside the bound in a note: as soon as two ranks differ, each meets a note that is
// not its own. FNV-1a, by 32 bits at a time.
constexpr uint32_t kDigestSeed = 2166136261u;
constexpr uint32_t mix_digest(uint32_t digest, uint64_t value) {
  digest = (digest ^ static_cast<uint32_t>(value)) * 16777619u;
  return (digest ^ static_cast<uint32_t>(value >> 32)) * 16777619u;
}
constexpr uint64_t collective_note(int32_t bound, uint32_t digest) {
  return static_cast<uint64_t>(digest) << 32 | static_cast<uint32_t>(bound);
}

}  // namespace tw
