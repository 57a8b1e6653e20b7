// The life of groups: the entry points by which ranks create, grow, shrink, end or give up one together. They find the
// objects, take the turn of group and comm, and read the arguments; src/core does the rest. An error in this rank's
// arguments must not return alone: the peers wait in the same call, and are told.
#include <numeric>

#include "api/check.h"
#include "api/enter.h"
#include "api/registry.h"

namespace {

using tw::Argument;
using tw::fail;
using tw::Function;
using tw::Status;
using tw::api::comms;
using tw::api::enter;
using tw::api::enter_group;
using tw::api::groups;
using tw::api::handles;
using tw::api::visit;

// Takes the turn of the group whose window a new one is to share.
Status take_arena(twComm& comm, twGroup_t arena, tw::Turn* turn) {
  TW_RETURN_IF_FAILED(
      groups.find("config.arena", arena, [&] { return tw::api::take_turn(*arena, "twGroupCreate", turn); }));
  if (arena->comm != &comm) {
    return fail(twInvalidArgument, "{} is a group of another comm", Argument("config.arena"));
  }
  Status usable = tw::check_usable(*arena, twPhaseCreate);
  if (usable.ok()) return {};
  return fail(usable.code, "{}: {}", Argument("config.arena"), usable.sentence);
}

void forget_handles(twGroup& group) {
  for (twHandle* handle : group.handles) handles.remove(handle);
}

}  // namespace

twResult_t twGroupCreate(twGroup_t* group, twComm_t comm, const twGroupConfig_t* given) {
  return enter([&]() -> Status {
    tw::Turn meeting;
    TW_RETURN_IF_FAILED(comms.find("comm", comm, [&] { return tw::api::take_turn(*comm, "twGroupCreate", &meeting); }));
    tw::api::ReadConfig known;
    // An error in this rank's arguments is told to the others, which wait in the same call.
    Status readable = tw::api::read_config(given, &known);
    if (group == nullptr) readable = fail(twInvalidArgument, "{} is NULL", Argument("group"));
    std::vector<int> members(comm->bootstrap->size());
    std::iota(members.begin(), members.end(), 0);
    tw::Turn sharing;
    if (known.config.arena != nullptr && readable.ok()) readable = take_arena(*comm, known.config.arena, &sharing);
    if (!readable.ok()) known.config.arena = nullptr;
    if (known.config.arena != nullptr) members = known.config.arena->members;
    std::unique_ptr<twGroup> made;
    TW_RETURN_IF_FAILED(tw::create_group(comm, known.config, readable, std::move(members), comm->next_tags(), &made));
    groups.add(made.get());
    *group = made.release();
    return {};
  });
}

twResult_t twGroupDestroy(twGroup_t group) {
  return enter([&]() -> Status {
    std::shared_ptr<tw::Arena> arena;  // whose turn this call has: it may end with the group
    tw::Turn turn;
    tw::Turn meeting;
    static constexpr char kName[] = "twGroupDestroy";  // other threads read it while this call is under way
    TW_RETURN_IF_FAILED(groups.find("group", group, [&] {
      arena = group->arena;
      return tw::api::take_turn(*group, kName, &turn);
    }));
    if (tw::Guest::is_here(group->occupied)) {
      return fail(twInvalidUsage, "a callback of {} cannot destroy the group that is given up",
                  Function{"twGroupAbort"});
    }
    // A finished group is destroyed without a meeting, and it must end even where another creation waits.
    if (!group->is_sticky()) TW_RETURN_IF_FAILED(tw::api::take_turn(*group->comm, kName, &meeting));
    forget_handles(*group);
    tw::api::withdraw(groups, group);
    return tw::destroy_group(std::unique_ptr<twGroup>(group));
  });
}

twResult_t twGroupShrink(twGroup_t group, const twGroupConfig_t* given, twGroup_t* survivors) {
  return enter_group("twGroupShrink", group, [&]() -> Status {
    tw::Turn meeting;
    TW_RETURN_IF_FAILED(tw::api::take_turn(*group->comm, "twGroupShrink", &meeting));
    tw::api::ReadConfig known;
    Status readable = given != nullptr ? tw::api::read_config(given, &known) : Status{};
    if (readable.ok() && known.config.arena != nullptr) {
      readable = fail(twInvalidArgument, "{} is given; survivors have memory of their own, so it must be NULL",
                      Argument("config.arena"));
    }
    if (survivors == nullptr) readable = fail(twInvalidArgument, "{} is NULL", Argument("survivors"));
    std::unique_ptr<twGroup> made;
    TW_RETURN_IF_FAILED(tw::shrink_group(*group, given != nullptr ? &known.config : nullptr, readable, &made));
    groups.add(made.get());
    *survivors = made.release();
    return {};
  });
}

twResult_t twGroupReserve(twGroup_t group, const twReserve_t* given) {
  return enter_group("twGroupReserve", group, [&]() -> Status {
    tw::Turn meeting;
    TW_RETURN_IF_FAILED(tw::api::take_turn(*group->comm, "twGroupReserve", &meeting));
    twReserve_t asked = TW_RESERVE_INIT;
    const Status readable = tw::api::read_struct("reserve", given, &asked);
    return tw::grow_group(*group, asked, readable);
  });
}

twResult_t twGroupAbort(twGroup_t group) {
  return visit(groups, "group", group, [&]() -> Status {
    tw::abort_group(*group);
    return {};
  });
}
