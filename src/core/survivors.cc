// What survivors begin with (core/survivors.h): whose slots remain, which experts are lost, and where these go. It is a
// function of what all survivors know alike, so none of it may depend on a rank's own version or number.
#include "core/survivors.h"

#include <algorithm>

#include "core/group.h"

namespace tw {
namespace {

constexpr int32_t kNowhere = -1;  // a slot that the former group did not have

// Slots of the former group by rank and place: [ranks][places].
using SlotsOfRanks = std::vector<std::vector<int32_t>>;

SlotsOfRanks slots_of_ranks(const Placement& places, int32_t slots, int32_t ranks) {
  SlotsOfRanks found(ranks);
  for (int32_t p = 0; p < slots; ++p) {
    std::vector<int32_t>& own = found[places.rank[p]];
    own.resize(std::max<size_t>(own.size(), places.slot[p] + size_t{1}), kNowhere);
    own[places.slot[p]] = p;
  }
  return found;
}

// Which experts of a layer are in none of these slots.
std::vector<int32_t> lost_experts(const PlacementSpec& before, int32_t layer, const SlotsOfRanks& kept) {
  std::vector<bool> held(before.experts, false);
  for (const std::vector<int32_t>& own : kept) {
    for (const int32_t p : own) {
      if (const int32_t expert = before.map(layer)[p]; expert >= 0) held[expert] = true;
    }
  }
  std::vector<int32_t> lost;
  for (int32_t e = 0; e < before.experts; ++e) {
    if (!held[e]) lost.push_back(e);
  }
  return lost;
}

int32_t empty_slots(const int32_t* map, const std::vector<int32_t>& own) {
  return static_cast<int32_t>(std::count_if(own.begin(), own.end(), [&](int32_t p) { return map[p] < 0; }));
}

// How many slots more each rank needs, so that lost experts of every layer have a place and a slot of each rank is
// still empty.
int32_t further_slots(const PlacementSpec& before, const SlotsOfRanks& kept) {
  int32_t more = 0;
  for (int32_t layer = 0; layer < before.layers; ++layer) {
    const auto lost = static_cast<int64_t>(lost_experts(before, layer, kept).size());
    const auto room = [&] {
      int64_t sum = 0;
      for (const std::vector<int32_t>& own : kept) sum += std::max(0, empty_slots(before.map(layer), own) + more - 1);
      return sum;
    };
    while (room() < lost) ++more;
  }
  return more;
}

// Puts lost experts of a layer into empty slots of `map`, [P'].
void place_lost(const std::vector<int32_t>& lost, const std::vector<int32_t>& rank_of_slot, int32_t ranks, int32_t* map,
                uint8_t* is_lost) {
  std::vector<int32_t> empty(ranks, 0);
  for (size_t p = 0; p < rank_of_slot.size(); ++p) empty[rank_of_slot[p]] += map[p] < 0 ? 1 : 0;
  for (const int32_t expert : lost) {
    const auto rank = static_cast<int32_t>(std::max_element(empty.begin(), empty.end()) - empty.begin());
    size_t p = 0;
    while (rank_of_slot[p] != rank || map[p] >= 0) ++p;
    map[p] = expert;
    is_lost[p] = 1;
    --empty[rank];
  }
}

// Under twReplicaShares an expert may have had its share where nobody is left: what is left of it serves alike.
void mend_shares(PlacementSpec* after, int32_t layer) {
  const int32_t* const map = after->map(layer);
  float* const shares = after->slot_shares.data() + int64_t{layer} * after->slots;
  std::vector<double> sums(after->experts, 0.0);
  for (int32_t p = 0; p < after->slots; ++p) {
    if (map[p] >= 0) sums[map[p]] += static_cast<double>(shares[p]);
  }
  for (int32_t p = 0; p < after->slots; ++p) {
    if (map[p] >= 0 && sums[map[p]] <= 0.0) shares[p] = 1.0f;
  }
}

}  // namespace

MapVersion newer(MapVersion one, MapVersion other) { return has_epoch(one.epoch, other.epoch) ? one : other; }

MapVersion newest_version(twGroup& group) {
  MapVersion newest;
  for (int channel = 0; group.moving != nullptr && channel < group.shape().channels; ++channel) {
    const MapVersion version = group.backend->version(channel);
    newest = channel == 0 ? version : newer(newest, version);
  }
  return newest;
}

Remains remains_of(const PlacementSpec& before, const Placement& places, int32_t ranks,
                   const std::vector<int>& members) {
  const SlotsOfRanks all = slots_of_ranks(places, before.slots, ranks);
  SlotsOfRanks kept;
  for (const int rank : members) kept.push_back(all[rank]);
  const int32_t more = further_slots(before, kept);
  Remains found;
  std::vector<int32_t> former;  // [P'] the slot that it was
  uint64_t most = 0;
  for (size_t rank = 0; rank < kept.size(); ++rank) {
    std::vector<int32_t> own = kept[rank];
    own.resize(own.size() + more, kNowhere);
    for (size_t place = 0; place < own.size(); ++place) {
      found.expert_rank.push_back(static_cast<int32_t>(rank));
      found.expert_slot.push_back(static_cast<int32_t>(place));
    }
    former.insert(former.end(), own.begin(), own.end());
    most = std::max<uint64_t>(most, own.size());
  }
  PlacementSpec& after = found.placement = before;
  after.slots = static_cast<int32_t>(former.size());
  const size_t entries = static_cast<size_t>(before.layers) * former.size();
  after.slot_expert.assign(entries, -1);
  after.slot_shares.assign(before.slot_shares.empty() ? 0 : entries, 1.0f);
  found.lost.assign(entries, 0);
  for (int32_t layer = 0; layer < before.layers; ++layer) {
    const size_t begin = static_cast<size_t>(layer) * former.size();
    for (size_t p = 0; p < former.size(); ++p) {
      if (former[p] == kNowhere) continue;
      after.slot_expert[begin + p] = before.map(layer)[former[p]];
      if (!after.slot_shares.empty()) after.slot_shares[begin + p] = before.shares(layer)[former[p]];
    }
    place_lost(lost_experts(before, layer, kept), found.expert_rank, static_cast<int32_t>(kept.size()),
               after.slot_expert.data() + begin, found.lost.data() + begin);
    if (!after.slot_shares.empty()) mend_shares(&after, layer);
  }
  uint64_t had = 0;
  for (const std::vector<int32_t>& own : all) had = std::max<uint64_t>(had, own.size());
  if (most > had) after.weight_bytes = (before.weight_bytes + had - 1) / had * most;
  return found;
}

Remains remains_of(const twGroup& group, MapVersion newest, const std::vector<int>& members) {
  PlacementSpec before = group.config.placement;
  for (int32_t layer = 0; layer < before.layers; ++layer) {
    // A rank that is behind has staged what the newest version has: that took the words of all.
    const std::optional<Moving::Open>& open = group.moving->open(layer);
    if (!open || !newest.uses(open->epoch)) continue;
    before.replace(layer, open->slot_expert.data(), open->slot_shares.empty() ? nullptr : open->slot_shares.data());
  }
  return remains_of(before, group.context.placement, group.ranks(), members);
}

}  // namespace tw
