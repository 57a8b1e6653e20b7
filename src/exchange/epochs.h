// Epochs: how ranks agree, without a wait of their own, from which dispatch on a layer has its next map
// (docs/PROTOCOL.md, Moving weights). This file has what a rank tells of them, and the version that follows from what
// all have told. The code is the hosts' and the kernels'.
//
// An epoch is one layer's next map with the weights that it needs, numbered from 1 in an order that all ranks have. In
// each dispatch a rank tells up to which epoch it has all of them (ready_word). The least of what all ranks have told
// in a dispatch is the channel's version behind it. All ranks have the same N words, so they have the same version in
// the same dispatch (M2).
//
// What breaks if this changes: ranks that make other versions of the same words route by unlike maps. They find out by
// the digest in the note, as twBoundMismatch in every dispatch that follows.
#pragma once

#include <cstdint>

namespace tw {

// Epochs that may be open at a time: told ones lie so close to each other that 16 bits tell them apart, and that the
// bits of those which are void still have a place.
inline constexpr uint32_t kMostOpenEpochs = 15;

// How many epochs a version is past an epoch; kFarEpochs or more where it has not come as far. Epochs are compared
// modulo 2^31, so that one fits into MapHead.
inline constexpr uint32_t kFarEpochs = 1u << 30;
constexpr uint32_t epochs_past(uint32_t version, uint32_t epoch) { return (version - epoch) & 0x7fffffffu; }
constexpr bool has_epoch(uint32_t version, uint32_t epoch) { return epochs_past(version, epoch) < kFarEpochs; }

// What a rank tells in a dispatch: void:16 | epoch:16. It has weights and maps of all epochs up to this one, save those
// that it says are void: bit i is the epoch i before it.
constexpr uint32_t ready_word(uint32_t epoch, uint32_t voids) { return voids << 16 | (epoch & 0xffff); }

// A channel's version: epochs up to this one are decided. Bit i of `voids`: the epoch i before it is void, on all
// ranks.
struct MapVersion {
  uint32_t epoch = 0;
  uint32_t voids = 0;

  // Whether a dispatch of this version goes by the map of an epoch, rather than by the one before it. An epoch that is
  // too old to have a bit is not void: a map that is void is given up before so many epochs can come.
  constexpr bool uses(uint32_t of) const {
    const uint32_t past = epochs_past(epoch, of);
    return past < kFarEpochs && (past > 31 || (voids >> past & 1) == 0);
  }
  friend constexpr bool operator==(const MapVersion&, const MapVersion&) = default;
};
constexpr uint64_t pack(MapVersion version) { return static_cast<uint64_t>(version.voids) << 32 | version.epoch; }
constexpr MapVersion unpack_version(uint64_t bits) {
  return {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)};
}

// Which of a layer's two maps is the later one, on a device, and its epoch: in one word, as kernels may read it while
// the host writes it.
struct MapHead {
  static constexpr uint32_t word(uint32_t epoch, uint32_t later) { return epoch << 1 | later; }
  // The map by which a dispatch of this version goes: 0 or 1.
  static constexpr uint32_t chosen(uint32_t word, MapVersion version) {
    return version.uses(word >> 1) ? word & 1 : ~word & 1;
  }
};

// How many epochs a rank that has told this is ahead of a version. It is never behind: the version is the least of all
// ranks.
constexpr uint32_t ahead_of(MapVersion version, uint32_t told) { return (told - version.epoch) & 0xffff; }
// Which of the next `least` epochs a rank that has told this has void, as MapVersion::voids has them after these.
constexpr uint32_t voids_in(MapVersion before, uint32_t told, uint32_t least) {
  return told >> 16 >> (ahead_of(before, told) - least) & ((1u << least) - 1);
}
// The version after `least` epochs more. least: of what all ranks are ahead; more than can be open is no rank's word.
constexpr MapVersion advanced(MapVersion before, uint32_t least, uint32_t voids) {
  if (least == 0 || least > kMostOpenEpochs) return before;
  return {before.epoch + least, before.voids << least | voids};
}

// Gives the version behind a dispatch in which rank r has told told(r). before: the channel's version in it.
template <class Told>
constexpr MapVersion agreed_version(MapVersion before, int ranks, Told&& told) {
  uint32_t least = ahead_of(before, told(0));
  for (int rank = 1; rank < ranks; ++rank) {
    const uint32_t ahead = ahead_of(before, told(rank));
    if (ahead < least) least = ahead;
  }
  uint32_t voids = 0;
  for (int rank = 0; rank < ranks && least <= kMostOpenEpochs; ++rank) voids |= voids_in(before, told(rank), least);
  return advanced(before, least, voids);
}

}  // namespace tw
