// Growing a group: a series of meetings as in creation (core/group.cc), in which each rank makes room for the larger
// window beside the one that there is. Only when all have said that they are ready do ranks take the larger map over:
// until then every rank may fail, and the group is as before.
//
// What must hold: all ranks change maps between the same two steps, which the calls' order gives (S5), and agree on the
// larger sizes (S10). Context::growth goes into every note, so a rank that did not grow, because it lost its peers in
// the last meeting, or that replays a graph from before, gets twBoundMismatch instead of wrong rows.
#include <algorithm>

#include "core/group.h"
#include "core/steps.h"

namespace tw {
namespace {

// Meetings of a growth, as offsets from its tags, in order.
enum Meeting : uint64_t { kOpen, kSizes, kRoom, kWindows, kReady = kWindows + 32 };

constexpr char kGrowing[] = "growing a group";

// Whether nothing is under way that a growth would disturb.
Status check_idle(twGroup& group, const twReserve_t& given) {
  TW_RETURN_IF_FAILED(check_settled(*group.arena, "twGroupReserve"));
  TW_RETURN_IF_FAILED(group.backend->check_stream(given.stream));
  if (!group.backend->captures(given.stream) && !group.backend->captures_any()) return {};
  return fail(twInvalidUsage, "a CUDA graph is captured; {} allocates and waits for other ranks, which no graph can",
              Function{"twGroupReserve"});
}

// Whether the window is this group's to make larger. The others are as large as they were made.
Status check_first(const twGroup& group) {
  if (group.arena->first == &group) return {};
  return fail(twInvalidUsage,
              "this group is in the window of another and does not grow; grow that one, destroy this one and create it "
              "anew in {}",
              Argument("config.arena"));
}

// Makes the larger configuration. *more: whether it is larger than the group's.
Status enlarge(twGroup& group, const twReserve_t& given, GroupConfig* larger, bool* more) {
  TW_RETURN_IF_FAILED(check_range("reserve.max_tokens", given.max_tokens, 0, TW_MAX_TOKENS));
  for (const auto& [name, room] : {std::pair(Argument("reserve.dispatch_room"), given.dispatch_room),
                                   {"reserve.combine_room", given.combine_room}}) {
    if (room <= static_cast<uint64_t>(INT64_MAX / 16)) continue;
    return fail(twInvalidArgument, "{} is {}; it must be from {} to {}", name, Value(room), Least(0),
                Most(INT64_MAX / 16));
  }
  const Shape& shape = group.shape();
  twGroupConfig_t config = group.config.given;
  config.expert_rank = group.config.expert_rank.data();
  config.expert_slot = group.config.expert_slot.data();
  const twPlacement_t placement = group.config.placement.as_given();
  config.placement = group.config.placement.given ? &placement : nullptr;
  config.max_tokens = std::max(config.max_tokens, given.max_tokens);
  // A combine takes at most kMaxParts parts, and as long as that is so, an inbox stays as it was asked for.
  const int32_t least_inbox = (config.max_tokens + kMaxParts - 1) / kMaxParts;
  if (config.inbox_tokens > 0) config.inbox_tokens = std::max(config.inbox_tokens, least_inbox);
  config.dispatch_room = std::max(shape.most_dispatch_bytes(), given.dispatch_room);
  config.combine_room = std::max(shape.most_combine_bytes(), given.combine_room);
  const auto all = static_cast<int64_t>(shape.ranks) * shape.max_tokens;
  if (config.max_recv_tokens == all) config.max_recv_tokens = 0;  // as many as can come
  *more = config.max_tokens > shape.max_tokens || config.dispatch_room > shape.most_dispatch_bytes() ||
          config.combine_room > shape.most_combine_bytes();
  TW_RETURN_IF_FAILED(check_config(config, shape.ranks, group.config.on_device, group.comm->environment, larger,
                                   group.comm->stages(), group.config.room));
  if (group.context.map.grow(larger->shape(), &larger->map, larger->room)) return {};
  return fail(twInvalidArgument, "{} is {}; with these rows the window passes 64 bits", Argument("reserve.max_tokens"),
              Value(given.max_tokens));
}

// Visits what ranks must have alike, by name: what they ask for, and what they have.
template <class Visit>
void each_size(const twReserve_t& given, const Shape& shape, Visit&& visit) {
  visit("reserve.max_tokens", given.max_tokens);
  visit("reserve.dispatch_room", static_cast<int64_t>(given.dispatch_room));
  visit("reserve.combine_room", static_cast<int64_t>(given.combine_room));
  visit("config.max_tokens", shape.max_tokens);
  visit("config.dispatch_room", static_cast<int64_t>(shape.most_dispatch_bytes()));
  visit("config.combine_room", static_cast<int64_t>(shape.most_combine_bytes()));
}

std::string pack(const twReserve_t& given, const Shape& shape) {
  Packer packer;
  each_size(given, shape, [&](const char*, int64_t value) { packer.add<int64_t>(value); });
  return packer.take();
}

Status compare(const std::vector<Parcel>& parcels) {
  for (size_t rank = 1; rank < parcels.size(); ++rank) {
    Unpacker first(parcels[0].bytes);
    Unpacker other(parcels[rank].bytes);
    Status difference;
    each_size({}, {}, [&](const char* name, int64_t) {
      const auto a = first.get<int64_t>();
      const auto b = other.get<int64_t>();
      if (a == b || !difference.ok()) return;
      difference = fail(twConfigMismatch, "{} differs: rank 0 has {}, rank {} has {}", Argument(name), a, rank, b);
    });
    TW_RETURN_IF_FAILED(std::move(difference));
    if (!first.ok() || !other.ok()) return fail(twConfigMismatch, "what rank {} reserves cannot be read", rank);
  }
  return {};
}

// Whether a rank that fails so in the last meeting knows that no other has succeeded: it has heard, or said, that one
// is not ready.
bool is_certain(const Status& mine, const Status& agreed) {
  return !mine.ok() || (agreed.code != twTimeout && agreed.code != twPeerDied && agreed.code != twPeerAborted &&
                        agreed.code != twInterrupted);
}

Status meet_and_grow(twGroup& group, const twReserve_t& given, const Status& readable, uint64_t tags) {
  twComm& comm = *group.comm;
  Bootstrap& bootstrap = *comm.bootstrap;
  const TimePoint deadline =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(group.config.given.timeout_ms);
  GroupConfig larger;
  bool more = false;
  Status mine = readable;
  if (mine.ok()) mine = check_first(group);
  if (mine.ok()) mine = check_idle(group, given);
  if (mine.ok()) mine = enlarge(group, given, &larger, &more);
  const auto finished = [&] { return group.is_sticky() || group.backend->find_abort().kind != 0; };
  Opening opening(bootstrap, {Call::kGrow, group.number},
                  [&](int member) { return finished() || group.has_left(group.rank_of(member)); });
  Status opened = agree(opening, group.members, tags + kOpen, deadline, kGrowing, mine);
  TW_RETURN_IF_FAILED(opening.mismatch());
  TW_RETURN_IF_FAILED(std::move(opened));
  std::vector<Parcel> asked;
  TW_RETURN_IF_FAILED(
      gather(bootstrap, group.members, tags + kSizes, {pack(given, group.shape()), {}}, deadline, kGrowing, &asked));
  TW_RETURN_IF_FAILED(compare(asked));
  if (!more) return {};
  // Steps that this rank refused end here: the peers have made them, as they have come to this call.
  Status settled;
  for (int channel = 0; channel < group.channels.size() && settled.ok(); ++channel) {
    settled = drain(group, channel, twPhaseNone, given.stream);
  }
  if (settled.ok()) settled = check_memory(comm, larger, group.members, group.context.map.bytes());
  TW_RETURN_IF_FAILED(agree(bootstrap, group.members, tags + kRoom, deadline, kGrowing, settled));

  const Status ready = group.backend->prepare_growth(make_init(comm, group, tags + kWindows, deadline), &larger.map);
  Status agreed = agree(bootstrap, group.members, tags + kReady, deadline, kGrowing, ready);
  if (agreed.ok()) group.grow(larger);
  group.backend->end_growth(agreed.ok(), agreed.ok() || is_certain(ready, agreed));
  return agreed;
}

}  // namespace

Status grow_group(twGroup& group, const twReserve_t& given, const Status& readable) {
  const uint64_t tags = group.comm->next_tags();
  if (Status usable = check_usable(group, twPhaseNone); !usable.ok()) {
    // Peers that do something else at this occasion hear that this rank does not come.
    Opening(*group.comm->bootstrap, {Call::kGrow, group.number}).give(group.members, tags);
    return usable;
  }
  return end_meeting(group, tags, meet_and_grow(group, given, readable, tags));
}

}  // namespace tw
