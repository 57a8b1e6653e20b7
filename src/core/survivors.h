// What survivors of a group whose maps move begin with: the maps in force by the newest version that any of them has,
// without the slots of ranks that are gone (M7). Each survivor keeps its slots at their places. Experts that were on
// ranks alone that are gone are lost: they get empty slots, and somebody must load their weights.
//
// What breaks if this changes: survivors find it each for itself, of what they have agreed on, so it must come out
// alike; an older version's maps may name slots that have been filled again.
#pragma once

#include <cstdint>
#include <vector>

#include "core/placement.h"
#include "core/status.h"
#include "exchange/epochs.h"
#include "exchange/routing.h"

struct twGroup;

namespace tw {

// Slots of survivors, by rank and place, and the maps of all layers.
struct Remains {
  std::vector<int32_t> expert_rank;  // [P'] of each slot
  std::vector<int32_t> expert_slot;  // [P'] its place there
  PlacementSpec placement;           // of P' slots
  std::vector<uint8_t> lost;         // [layers, P'] 1: the slot's expert was on no survivor
};

// The latest version that a lane of this rank has.
MapVersion newest_version(twGroup& group);
// The later of two versions.
MapVersion newer(MapVersion one, MapVersion other);

// Finds what ranks `members` of a group, ascending, begin with. before: its maps, those in force; places: of its slots,
// on `ranks` ranks. A lost expert gets the first empty slot of the rank that has most of them in the layer; each rank
// keeps one. If there are too few, all ranks get as many slots more behind their own as that takes, and as much more
// memory for weights, in proportion.
Remains remains_of(const PlacementSpec& before, const Placement& places, int32_t ranks,
                   const std::vector<int>& members);
// Likewise of a group, whose maps are those of version `newest`.
Remains remains_of(const twGroup& group, MapVersion newest, const std::vector<int>& members);

}  // namespace tw
