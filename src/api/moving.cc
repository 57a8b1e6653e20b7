// The entry points of tokenway/moving.h: they check a layer, its map and an epoch, show how far epochs have come, and
// let ranks meet that move weights otherwise. The order of epochs must be that of the calls: peers take the number
// alone for the map.
#include "core/moving.h"

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <string>

#include "api/check.h"
#include "api/enter.h"
#include "api/registry.h"

namespace {

using tw::Argument;
using tw::fail;
using tw::Status;
using tw::Value;
using tw::api::enter_group;
using tw::api::groups;
using tw::api::visit;

Status check_moves(twGroup_t group) {
  TW_RETURN_IF_FAILED(tw::check_usable(*group, twPhaseNone));
  if (group->moving != nullptr) return {};
  return fail(twInvalidUsage, "the group was created with {} 0, so its maps do not move",
              Argument("config.placement->moves"));
}

Status check_closed(twGroup& group, int32_t layer) {
  tw::MapVersion known;
  TW_RETURN_IF_FAILED(tw::close_epochs(group, &known));
  const uint32_t agreed = known.epoch;
  if (const auto& open = group.moving->open(layer)) {
    return fail(twInvalidUsage, "layer {} has epoch {} open, and the lanes of this rank have come to epoch {}", layer,
                open->epoch, agreed);
  }
  if (group.moving->staged() - agreed < tw::kMostOpenEpochs) return {};
  return fail(twInvalidUsage, "{} epochs are open, {} to {}, and no more can be", tw::kMostOpenEpochs, agreed + 1,
              group.moving->staged());
}

Status check_weights(twGroup& group, int32_t rank) {
  if (group.shape().weight_bytes == 0) {
    return fail(twInvalidUsage, "the group has no memory for weights: {} is 0",
                Argument("config.placement->weight_bytes"));
  }
  return tw::check_range("rank", rank, 0, group.ranks() - 1);
}

constexpr int64_t kMostMeetBytes = 1 << 16;

Status check_meeting(const void* mine, uint64_t bytes, int32_t timeout_ms, const void* all) {
  const auto asked = static_cast<int64_t>(std::min<uint64_t>(bytes, INT64_MAX));
  TW_RETURN_IF_FAILED(tw::check_range("bytes", asked, 0, kMostMeetBytes));
  TW_RETURN_IF_FAILED(tw::check_range("timeout_ms", timeout_ms, 0, INT32_MAX));
  if (bytes == 0) return {};
  TW_CHECK_NOT_NULL(mine);
  TW_CHECK_NOT_NULL(all);
  return {};
}

Status check_range_of_weights(twGroup& group, const Argument& name, uint64_t at, uint64_t bytes) {
  const uint64_t all = group.shape().weight_bytes;
  if (at <= all && bytes <= all - at) return {};
  return fail(twInvalidArgument, "{} is {}, and bytes {}; both together must be from 0 to {}, the memory for weights",
              name, Value(static_cast<int64_t>(at)), bytes, all);
}

}  // namespace

twResult_t twGroupStageMap(twGroup_t group, int32_t layer, const int32_t* slot_expert, const float* slot_shares,
                           uint32_t* epoch) {
  return enter_group("twGroupStageMap", group, [&]() -> Status {
    TW_CHECK_NOT_NULL(epoch);
    TW_RETURN_IF_FAILED(check_moves(group));
    TW_RETURN_IF_FAILED(tw::api::check_layer(*group, layer));
    const tw::PlacementSpec& spec = group->config.placement;
    TW_RETURN_IF_FAILED(tw::api::check_next_map(spec, slot_expert, slot_shares));
    TW_RETURN_IF_FAILED(check_closed(*group, layer));
    const uint32_t next = group->moving->staged() + 1;
    tw::ExpertMap map(spec, layer, slot_expert, slot_shares, group->context.placement, group->me());
    tw::Moving::Open open{next, std::move(map), {slot_expert, slot_expert + spec.slots}, {}};
    if (slot_shares != nullptr) open.slot_shares.assign(slot_shares, slot_shares + spec.slots);
    TW_RETURN_IF_FAILED(group->backend->stage_map(layer, next, open.map));  // nothing may fail behind it
    group->moving->stage(layer, std::move(open));
    *epoch = next;
    return {};
  });
}

twResult_t twGroupReady(twGroup_t group, uint32_t epoch, int32_t failed) {
  return enter_group("twGroupReady", group, [&]() -> Status {
    TW_RETURN_IF_FAILED(check_moves(group));
    TW_RETURN_IF_FAILED(tw::check_range("failed", failed, 0, 1));
    tw::Moving& moving = *group->moving;
    const uint32_t next = moving.ready() + 1;
    if (moving.ready() == moving.staged()) {
      return fail(twInvalidUsage, "no epoch is staged that is not ready: the last is {}", moving.staged());
    }
    if (epoch != next) {
      return fail(twInvalidArgument, "{} is {}; it must be {}, the next that is staged", Argument("epoch"),
                  Value(static_cast<int64_t>(epoch)), next);
    }
    return group->backend->tell_ready(moving.make_ready(epoch, failed != 0));
  });
}

twResult_t twGroupEpochs(twGroup_t group, twEpochs_t* epochs, uint32_t* versions) {
  return enter_group("twGroupEpochs", group, [&]() -> Status {
    TW_CHECK_NOT_NULL(epochs);
    TW_RETURN_IF_FAILED(check_moves(group));
    tw::MapVersion agreed;
    TW_RETURN_IF_FAILED(tw::close_epochs(*group, &agreed, versions));
    twEpochs_t known{};
    known.staged = group->moving->staged();
    known.ready = group->moving->ready();
    known.agreed = agreed.epoch;
    known.voids = agreed.voids;
    known.oldest = tw::oldest_of(*group, agreed.epoch);
    return tw::api::write_struct("epochs", known, epochs);
  });
}

twResult_t twGroupLost(twGroup_t group, int32_t layer, int32_t* slot_lost) {
  return enter_group("twGroupLost", group, [&]() -> Status {
    TW_CHECK_NOT_NULL(slot_lost);
    if (group->moving == nullptr) return check_moves(group);
    TW_RETURN_IF_FAILED(tw::api::check_layer(*group, layer));
    const int32_t slots = group->config.placement.slots;
    std::fill_n(slot_lost, slots, 0);
    if (!group->lost.empty()) std::copy_n(group->lost.begin() + int64_t{layer} * slots, slots, slot_lost);
    return {};
  });
}

twResult_t twGroupWeights(twGroup_t group, int32_t rank, void** memory, uint64_t* bytes) {
  return visit(groups, "group", group, [&]() -> Status {
    TW_CHECK_NOT_NULL(memory);
    TW_CHECK_NOT_NULL(bytes);
    TW_RETURN_IF_FAILED(check_weights(*group, rank));
    const std::shared_lock sizes(group->sizes);
    std::byte* const window = group->backend->window_of(rank);
    *memory = window == nullptr ? nullptr : window + group->context.map.weights();
    *bytes = group->shape().weight_bytes;
    return {};
  });
}

twResult_t twGroupPull(twGroup_t group, int32_t rank, uint64_t from, uint64_t to, uint64_t bytes, void* stream) {
  return visit(groups, "group", group, [&]() -> Status {
    TW_RETURN_IF_FAILED(check_weights(*group, rank));
    TW_RETURN_IF_FAILED(check_range_of_weights(*group, "from", from, bytes));
    TW_RETURN_IF_FAILED(check_range_of_weights(*group, "to", to, bytes));
    const std::byte* source = nullptr;
    std::byte* target = nullptr;
    {
      const std::shared_lock sizes(group->sizes);  // growth need not wait for the copy: weights stay where they are
      const uint64_t weights = group->context.map.weights();
      source = group->backend->window_of(rank);
      if (source != nullptr) source += weights + from;
      target = group->backend->window() + weights + to;
    }
    if (source == nullptr) {
      return fail(twUnsupported, "rank {} has no memory in common with this rank: its weights cannot be read", rank);
    }
    return group->backend->copy(target, source, bytes, stream);
  });
}

twResult_t twGroupMeet(twGroup_t group, const void* mine, uint64_t bytes, int32_t timeout_ms, void* all) {
  return enter_group("twGroupMeet", group, [&]() -> Status {
    tw::Turn meeting;
    TW_RETURN_IF_FAILED(tw::api::take_turn(*group->comm, "twGroupMeet", &meeting));
    // An error in this rank's arguments is told to the others, which wait in the same call.
    const Status readable = check_meeting(mine, bytes, timeout_ms, all);
    const std::span given(static_cast<const std::byte*>(mine), readable.ok() ? bytes : 0);
    return tw::meet_in_group(*group, given, readable, std::max(timeout_ms, 0), static_cast<std::byte*>(all));
  });
}

twResult_t twGroupAddress(twGroup_t group, const char** address) {
  static thread_local std::string found;
  return visit(groups, "group", group, [&]() -> Status {
    TW_CHECK_NOT_NULL(address);
    found = tw::own_address(*group->comm->bootstrap, group->members);
    *address = found.c_str();
    return {};
  });
}
