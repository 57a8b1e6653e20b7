// Groups that share a window (core/arena.h): where a group is placed in it, and what becomes of the lanes when one of
// them ends. place_in must come to the same on all ranks (S10): it looks at the arena's map and at which groups live,
// which follow from the calls made so far.
#include "core/arena.h"

#include <algorithm>

#include "core/group.h"
#include "core/steps.h"

namespace tw {

bool Arena::is_sticky() {
  const std::lock_guard lock(error_mutex_);
  return error_.sticky != 0;
}

ErrorRecord Arena::error() {
  const std::lock_guard lock(error_mutex_);
  return error_;
}

void Arena::finish(ErrorRecord record) {
  const std::lock_guard lock(error_mutex_);
  if (!error_.sticky) error_ = std::move(record);  // whole or not at all: copying may run out of memory
}

namespace {

Status too_little(const char* what, uint64_t needed, uint64_t there) {
  return fail(twOutOfMemory,
              "this group needs {} bytes {} on each lane, and the window of {} has {}: {} bytes are missing; name this "
              "configuration in {} of the group that makes the window, or grow that group first ({})",
              needed, what, Argument("config.arena"), there, needed - there, Argument("config.room_for"),
              Function{"twGroupReserve"});
}

// Finds the first gap of so many bytes between the load statistics of the groups that live.
Status place_loads(const Arena& arena, GroupConfig* config) {
  const uint64_t bytes = WindowMap::loads_bytes(config->shape());
  std::vector<std::pair<uint64_t, uint64_t>> taken{{arena.room.loads, 0}};
  for (const twGroup* group : arena.groups) {
    if (const uint64_t size = WindowMap::loads_bytes(group->shape())) taken.emplace_back(group->config.loads, size);
  }
  std::sort(taken.begin(), taken.end());
  uint64_t at = 0;
  uint64_t widest = 0;
  for (const auto& [begin, size] : taken) {
    const uint64_t gap = begin - std::min(begin, at);
    if (gap >= bytes) {
      config->loads = at;
      return {};
    }
    widest = std::max(widest, gap);
    at = begin + size;
  }
  return fail(
      twOutOfMemory,
      "this group needs {} bytes for load statistics on each lane, and the window of {} has {} in one piece: {} "
      "bytes are missing; name this configuration in {} of the group that makes the window",
      bytes, Argument("config.arena"), widest, bytes - widest, Argument("config.room_for"));
}

}  // namespace

Status place_in(const Arena& arena, GroupConfig* config) {
  const int32_t channels = arena.map.shape().channels;
  if (config->given.lanes != channels) {
    return fail(twInvalidArgument, "{} is {}; in the window of {} it must be {}, or 0", Argument("config.lanes"),
                Value(config->given.lanes), Argument("config.arena"), channels);
  }
  // A combine that its group leaves behind is followed by a step that nobody would make.
  if (config->given.token_replicas > 1) {
    return fail(twInvalidArgument, "{} is {}; in the window of {} it must be 1", Argument("config.token_replicas"),
                Value(config->given.token_replicas), Argument("config.arena"));
  }
  for (const twGroup* group : arena.groups) {
    if (group->context.replicas.size == 1) continue;
    return fail(twInvalidArgument, "{} has {} token replicas; a group whose window others use must have 1",
                Argument("config.arena"), group->context.replicas.size);
  }
  if (config->given.lease_bytes > 0) {
    return fail(twInvalidArgument, "{} is {}; in the window of {} it must be 0, as leases are the first group's",
                Argument("config.lease_bytes"), Value(config->given.lease_bytes), Argument("config.arena"));
  }
  if (config->shape().weight_bytes > 0) {
    return fail(twInvalidArgument, "{} is {}; in the window of {} it must be 0, as weights are the first group's",
                Argument("config.placement->weight_bytes"), Value(config->shape().weight_bytes),
                Argument("config.arena"));
  }
  const Room& needed = config->room;
  const Room& there = arena.room;
  if (needed.bank > there.bank) return too_little("for a bank of rows", needed.bank, there.bank);
  if (needed.unpacked > there.unpacked) {
    return too_little("for unpacked rows of a bank", needed.unpacked, there.unpacked);
  }
  if (needed.chunk_signals > there.chunk_signals) {
    return too_little("for a bank of chunk signals", needed.chunk_signals, there.chunk_signals);
  }
  if (needed.packets > there.packets) return too_little("for a bank of LL128 packets", needed.packets, there.packets);
  if (config->shape().counts_loads != 0) TW_RETURN_IF_FAILED(place_loads(arena, config));
  config->arena = arena.number;
  config->map = config->map.share(arena.map, config->loads);
  return {};
}

Status check_settled(Arena& arena, const char* call) {
  for (const twGroup* each : arena.groups) {
    for (const twHandle* handle : each->handles) {
      if (handle->pending == Pending::kNone) continue;
      return fail(twInvalidUsage, "a handle has a send_only call pending on lane {}; call {} before {}",
                  handle->channel, Function{"twComplete"}, Function{call});
    }
  }
  for (int channel = 0; channel < arena.channels.size(); ++channel) {
    if (arena.channels[channel].request == 0) continue;
    return fail(twInvalidUsage, "a send_only gather or reduce is pending on lane {}; call {} before {}", channel,
                Function{"twCompleteRequest"}, Function{call});
  }
  return {};
}

namespace {

void end_step(twGroup& group, StepPlace at, const Refusal& sent) {
  Channel& state = group.channels[at.channel];
  state.request = 0;
  state.draining = true;
  if (!group.backend->abandon(at, sent).ok()) return abort_group(group);
  (void)drain(group, at.channel, sent.phase, sent.stream);
}

void end_pending(twGroup& group, twHandle& handle) {
  Refusal sent;
  if (handle.pending == Pending::kDispatch) {
    sent.phase = twPhaseDispatch;
    sent.views = true;
    sent.stream = handle.dispatch.stream;
    end_step(group, handle.dispatch.at, sent);
  } else if (handle.pending == Pending::kCombine) {
    sent.phase = twPhaseCombine;
    sent.combining = &handle;
    sent.skips = handle.combine.part > 0;
    sent.stream = handle.combine.stream;
    end_step(group, handle.combine.at, sent);
  } else if (handle.pending == Pending::kCounts) {
    sent.phase = twPhaseCounts;
    sent.stream = handle.counting.stream;
    end_step(group, handle.counting.at, sent);
  }
  handle.pending = Pending::kNone;
}

}  // namespace

void end_steps(twGroup& group) {
  for (int channel = 0; channel < group.channels.size(); ++channel) {
    const Channel& state = group.channels[channel];
    if (state.request == 0 || state.requester != &group) continue;
    const CollectiveCall call = group.requests.at(state.request).call;
    Refusal sent;
    sent.phase = call.phase();
    sent.views = call.views;
    sent.stream = call.stream;
    end_step(group, call.at, sent);
  }
  for (twHandle* handle : group.handles) {
    end_pending(group, *handle);
    part_leases(group, *handle);
    give_back(group, *handle);
  }
}

}  // namespace tw
