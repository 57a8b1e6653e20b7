// The entry points of tokenway/placement.h, except twHandleCreateForLayer, which stands beside twHandleCreate in
// tokenway.cc. They check a layer and its map, and replace, show or read it. A replaced map must reach the backend
// before the host's own copy changes: a rank whose digest and map differ sends rows to another expert's weights.
#include "core/placement.h"

#include <algorithm>
#include <utility>

#include "api/check.h"
#include "api/enter.h"
#include "api/registry.h"

namespace tw::api {

Status check_layer(const twGroup& group, int32_t layer) {
  const int32_t layers = group.config.placement.layers;
  return check_range("layer", layer, 0, layers - 1);
}

Status check_next_map(const PlacementSpec& spec, const int32_t* slot_expert, const float* slot_shares) {
  TW_CHECK_NOT_NULL(slot_expert);
  if (slot_shares != nullptr && spec.policy != twReplicaShares) {
    return fail(twInvalidArgument, "{} is given; only policy {} has them", Argument("slot_shares"),
                TW_CONSTANT(twReplicaShares));
  }
  return check_map(spec, -1, slot_expert, slot_shares);
}

namespace {

Status check_mapped(twGroup_t group, int32_t layer) {
  if (!group->config.placement.given) {
    return fail(twInvalidUsage, "the group was created without {}, so its experts have no map",
                Argument("config.placement"));
  }
  return check_layer(*group, layer);
}

}  // namespace
}  // namespace tw::api

using tw::Argument;
using tw::fail;
using tw::Status;
using tw::api::check_mapped;
using tw::api::enter_group;

twResult_t twGroupReplaceMap(twGroup_t group, int32_t layer, const int32_t* slot_expert, const float* slot_shares,
                             void* stream) {
  return enter_group("twGroupReplaceMap", group, [&]() -> Status {
    TW_RETURN_IF_FAILED(check_mapped(group, layer));
    TW_RETURN_IF_FAILED(tw::check_usable(*group, twPhaseNone));
    tw::PlacementSpec& spec = group->config.placement;
    if (spec.moves) {
      return fail(twInvalidUsage, "the group was created with {} 1: its maps are staged, by {}",
                  Argument("config.placement->moves"), tw::Function{"twGroupStageMap"});
    }
    TW_RETURN_IF_FAILED(tw::api::check_next_map(spec, slot_expert, slot_shares));
    TW_RETURN_IF_FAILED(group->backend->check_stream(stream));
    tw::ExpertMap map(spec, layer, slot_expert, slot_shares, group->context.placement, group->me());
    TW_RETURN_IF_FAILED(tw::heed_interrupt(*group, group->backend->replace_map(layer, map, stream)));
    spec.replace(layer, slot_expert, slot_shares);
    group->maps[layer] = std::move(map);
    return {};
  });
}

twResult_t twGroupMap(twGroup_t group, int32_t layer, int32_t* slot_expert, float* slot_shares) {
  return enter_group("twGroupMap", group, [&]() -> Status {
    TW_RETURN_IF_FAILED(check_mapped(group, layer));
    if (group->moving != nullptr) TW_RETURN_IF_FAILED(tw::close_epochs(*group));
    const tw::PlacementSpec& spec = group->config.placement;
    if (slot_expert != nullptr) std::copy_n(spec.map(layer), spec.slots, slot_expert);
    const float* const shares = spec.shares(layer);
    if (slot_shares != nullptr && shares != nullptr) std::copy_n(shares, spec.slots, slot_shares);
    if (slot_shares != nullptr && shares == nullptr) std::fill_n(slot_shares, spec.slots, 1.0f);
    return {};
  });
}

twResult_t twGroupLoads(twGroup_t group, float* loads, int64_t* dispatches) {
  return enter_group("twGroupLoads", group, [&]() -> Status {
    TW_RETURN_IF_FAILED(check_mapped(group, 0));
    TW_CHECK_NOT_NULL(loads);
    if (!group->config.placement.counts_loads) {
      return fail(twInvalidUsage, "the group was created with {} 0, so nothing is counted",
                  Argument("config.placement->count_loads"));
    }
    group->backend->read_loads(loads, dispatches);
    return {};
  });
}
