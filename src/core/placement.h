// A group's maps from experts to physical experts, one for each layer. PlacementSpec is what callers give, alike on all
// ranks; ExpertMap is what routing on one rank uses; sum_channels makes what twGroupLoads shows. Digests of maps stand
// in notes (exchange/notes.h): a rank with another map sends rows to another expert's weights, and must be found out.
#pragma once

#include <vector>

#include "core/status.h"
#include "exchange/replicas.h"
#include "exchange/routing.h"

namespace tw {

// The placement as all ranks have it.
struct PlacementSpec {
  bool given = false;
  int32_t layers = 1;
  int32_t experts = 0;  // E
  int32_t slots = 0;    // P
  twReplicaPolicy_t policy = twReplicaRoundRobin;
  bool counts_loads = false;
  bool moves = false;  // layers get new maps by epochs (core/moving.h)
  uint64_t weight_bytes = 0;
  float decay = 0.0f;
  std::vector<int32_t> slot_expert;  // [layers, P]
  std::vector<float> slot_shares;    // likewise, or empty

  // As a caller would give it, for another group. Points into this object.
  twPlacement_t as_given() const {
    return {sizeof(twPlacement_t),
            layers,
            slots,
            slot_expert.data(),
            slot_shares.empty() ? nullptr : slot_shares.data(),
            policy,
            counts_loads ? 1 : 0,
            decay,
            weight_bytes,
            moves ? 1 : 0};
  }
  // Takes another map for a layer. shares_of: NULL: alike.
  void replace(int32_t layer, const int32_t* experts_of, const float* shares_of);
  const int32_t* map(int32_t layer) const { return slot_expert.data() + int64_t{layer} * slots; }
  const float* shares(int32_t layer) const {
    return slot_shares.empty() ? nullptr : slot_shares.data() + int64_t{layer} * slots;
  }
};

// Checks a caller's placement. `experts`: E. Errors name the field, its value and the allowed range.
Status check_placement(const twPlacement_t* given, int32_t experts, PlacementSpec* spec);
// Checks one map in the same way. shares: NULL, or as in twPlacement_t. layer: that of a configuration whose map it is,
// or -1 where the map is an argument by itself.
Status check_map(const PlacementSpec& spec, int32_t layer, const int32_t* slot_expert, const float* shares);

// A layer's map as a rank uses it.
class ExpertMap {
 public:
  // experts_of: [P] the expert in each slot. shares_of: likewise its share, or NULL.
  ExpertMap(const PlacementSpec& spec, int32_t layer, const int32_t* experts_of, const float* shares_of,
            const Placement& placement, int32_t me);

  // Points into this object.
  Replicas view() const;
  uint32_t digest() const { return digest_; }

 private:
  int32_t rank_;
  uint32_t digest_;
  std::vector<int32_t> first_;
  std::vector<int32_t> slots_;
  std::vector<uint32_t> lower_;
  std::vector<int32_t> several_;
};

// By which of a placement's maps the ids became slots.
struct MapOfRouting {
  int32_t layer = 0;
  uint32_t digest = 0;         // the map's; 0 without a placement
  int32_t* choices = nullptr;  // [E] how often its tokens choose each expert, in a group that counts
  // Where maps move: whether a dispatch or an exchange of counts has made the ids slots, and the version which that had
  // at least, or that it was captured and takes another one in each replay.
  bool bound = false;
  bool captured = false;
  uint32_t version = 0;
};

// The averages that a backend keeps for each channel.
struct ChannelLoads {
  const float* averages;      // [channels, layers, E]
  const int64_t* dispatches;  // [channels, layers]
  const uint32_t* clocks;     // [channels, layers] the CountedCall clock of the last dispatch that is in the averages
};
// Makes what twGroupLoads shows. Each channel's average is aged to the channel that has counted last; their sum is the
// average over all dispatches in one row. counted: [layers], or NULL.
void sum_channels(const PlacementSpec& spec, const Shape& shape, const ChannelLoads& channels, float* loads,
                  int64_t* counted);

// Counts how often a routing's tokens choose each expert: [E]. Its ids are still experts.
void count_choices(const Shape& shape, const Routing& routing, int32_t* choices);

// Replaces the experts in a routing's ids by slots.
void choose_slots(const Shape& shape, const Placement& placement, const ExpertMap& map, twReplicaPolicy_t policy,
                  Routing* routing);

}  // namespace tw
