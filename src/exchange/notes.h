// Notes: 64 bits beside each signal, with the bound of a step and a digest of what ranks must give alike beside it.
// Takes the arguments of a call, gives the note that its ranks write and compare; a difference becomes twBoundMismatch
// on all ranks. Host and kernels use the same functions. A change that leaves an argument out lets ranks read rows at
// wrong places (S9, S10) without an error.
#pragma once

#include <bit>
#include <cstdint>

namespace tw {

// A bit in a dispatch's note, beside the bound: the rows go to the receive offsets that the exchange of counts before
// it has announced. Ranks that differ in that would write and read at different places.
inline constexpr uint32_t kHasOffsets = 1u << 31;
constexpr uint32_t with_receive_offsets(int32_t bound, bool has_offsets) {
  return static_cast<uint32_t>(bound) | (has_offsets ? kHasOffsets : 0);
}

// The digest of all that ranks of a gather or reduce must give alike, beside the bound in a note: as soon as two ranks
// differ, each meets a note that is not its own. It is FNV-1a, by 32 bits at a time.
constexpr uint32_t kDigestSeed = 2166136261u;
constexpr uint32_t mix_digest(uint32_t digest, uint64_t value) {
  digest = (digest ^ static_cast<uint32_t>(value)) * 16777619u;
  return (digest ^ static_cast<uint32_t>(value >> 32)) * 16777619u;
}
// The digest of a dispatch is that of its map, which has the layer in it, mixed with whether it counts. 0 without a
// map.
constexpr uint32_t mix_counted(uint32_t digest, bool counted) {
  return counted || digest == 0 ? digest : digest ^ 0x80402010u;
}
// Mixes in what the rows of a dispatch or combine consist of; `rows` is a digest itself, and 0 for the group's own. One
// instruction, since with FNV-1a again 128 tokens took 0.7 % longer on 2x H100
// (bench/results/row-types-2-gpus.json).
constexpr uint32_t mix_rows(uint32_t digest, uint32_t rows) { return digest ^ rows; }
// Mixed in likewise: how often the group has grown, so that calls of before, as graphs replay them, do not meet calls
// of after. An odd factor keeps numbers apart in however few low bits a note has for digests: eight in 3.
constexpr uint32_t growth_digest(uint32_t times) { return times * 2654435761u; }
// The same for a group in another's window, by the call of the comm that made it: no group grows so often.
constexpr uint32_t placed_digest(uint32_t call) { return growth_digest((1u << 16) + call); }
// Mixed in likewise, in a group of both modes: a low-latency call, whose rows lie in slots. The highest bit is in every
// note.
inline constexpr uint32_t kSlotsDigest = 1u << 31;
// Mixed in likewise, in a combine that returns values of choices beside its rows.
inline constexpr uint32_t kChoiceValuesDigest = 0x2545f491u;
// On devices the upper half of the note also has the number of Simple rows. Bound and Simple rows each take one bit
// more than max_tokens does (beside a bound that bit is kHasOffsets), and the digest takes the bits that are left, in
// either half.
constexpr int note_bits(int32_t max_tokens) { return std::bit_width(static_cast<uint32_t>(max_tokens)) + 1; }
constexpr uint32_t noted(uint32_t half, int bits) { return half & ((1u << bits) - 1); }
constexpr uint32_t noted_bound(uint64_t note, int bits) {
  const uint32_t bound = noted(static_cast<uint32_t>(note), bits - 1);
  return bound | (static_cast<uint32_t>(note) >> (bits - 1) & 1) << 31;
}
// bound: with kHasOffsets or without.
constexpr uint64_t dispatch_note(uint32_t bound, int32_t plain, uint32_t digest, int bits) {
  const uint32_t low = (bound & ~kHasOffsets) | (bound >> 31) << (bits - 1) | digest << bits;
  const uint32_t high = static_cast<uint32_t>(plain) | digest >> bits << bits;
  return static_cast<uint64_t>(high) << 32 | low;
}
constexpr uint64_t collective_note(uint32_t bound, uint32_t digest) {
  return static_cast<uint64_t>(digest) << 32 | bound;
}

}  // namespace tw
