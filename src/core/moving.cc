// The epochs of a group on the host: moving.h says what each function does. Closing an epoch makes its map the layer's,
// so it must not happen before each lane of this rank has its version: versions choose between the layer's map and the
// open one.
#include "core/moving.h"

#include <algorithm>
#include <utility>

#include "core/group.h"

namespace tw {

void Moving::stage(int32_t layer, Open open) {
  staged_ = open.epoch;
  open_[static_cast<size_t>(layer)] = std::move(open);
}

uint32_t Moving::make_ready(uint32_t epoch, bool failed) {
  voids_ = voids_ << (epoch - ready_) | (failed ? 1u : 0u);
  ready_ = epoch;
  return ready_word(ready_, voids_ & 0xffff);
}

namespace {

// The least version of the lanes of this rank.
MapVersion agreed_of(twGroup& group, uint32_t* versions) {
  MapVersion agreed = group.backend->version(0);
  for (int channel = 0; channel < group.shape().channels; ++channel) {
    const MapVersion version = group.backend->version(channel);
    if (versions != nullptr) versions[channel] = version.epoch;
    if (!has_epoch(version.epoch, agreed.epoch)) agreed = version;
  }
  return agreed;
}

}  // namespace

Status close_epochs(twGroup& group, MapVersion* known, uint32_t* versions) {
  const MapVersion agreed = agreed_of(group, versions);
  if (known != nullptr) *known = agreed;
  for (int32_t layer = 0; layer < group.config.placement.layers; ++layer) {
    std::optional<Moving::Open>& open = group.moving->all()[static_cast<size_t>(layer)];
    if (!open || !has_epoch(agreed.epoch, open->epoch)) continue;
    const bool used = agreed.uses(open->epoch);
    TW_RETURN_IF_FAILED(group.backend->close_map(layer, used));
    if (used) {
      const float* const shares = open->slot_shares.empty() ? nullptr : open->slot_shares.data();
      group.config.placement.replace(layer, open->slot_expert.data(), shares);
      group.maps[layer] = std::move(open->map);
    }
    open.reset();
  }
  return {};
}

uint32_t oldest_of(const twGroup& group, uint32_t agreed) {
  uint32_t oldest = agreed;
  for (const twHandle* const handle : group.handles) {
    const MapOfRouting& map = handle->map;
    if (map.bound && !map.captured && !has_epoch(map.version, oldest)) oldest = map.version;
  }
  return oldest;
}

void bind_routing(twGroup& group, twHandle& handle, int channel, const void* stream) {
  if (group.moving == nullptr || (handle.map.bound && !handle.source.unread)) return;
  const MapVersion version = group.backend->version(channel);
  handle.map.bound = true;
  handle.map.version = version.epoch;
  handle.map.captured = group.backend->captures(stream);
  if (group.backend->on_device()) return;  // where the version is known
  const std::optional<Moving::Open>& open = group.moving->open(handle.map.layer);
  const bool next = open && version.uses(open->epoch);
  const ExpertMap& map = next ? open->map : group.maps[handle.map.layer];
  handle.map.digest = map.digest();
  choose_slots(group.shape(), group.context.placement, map, group.config.placement.policy, &handle.routing);
  assign_slots(group.shape(), group.context.placement, &handle.routing);
}

}  // namespace tw
