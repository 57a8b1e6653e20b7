// Creates, destroys and finishes groups. Creation is a series of meetings over the bootstrap (opening, configurations,
// memory, windows), in which a rank with bad arguments takes part, so that the others hear at once. finish_group makes
// an error sticky and tells the peers; check_usable stops every later call (S6).
//
// The order of looking (this group's record, abort signals, what a device reported) decides which rank is blamed. A
// meeting that one rank leaves out makes the others wait until the timeout.
#include "core/group.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "core/free_memory.h"
#include "core/interrupt.h"
#include "core/steps.h"
#include "exchange/notes.h"
#include "layout/hosts_map.h"
#include "layout/inbox_map.h"
#include "layout/posts_map.h"

namespace {

std::vector<tw::ExpertMap> make_maps(const tw::GroupConfig& config, int32_t rank) {
  std::vector<tw::ExpertMap> maps;
  const tw::Placement placement{config.expert_rank.data(), config.expert_slot.data()};
  for (int32_t layer = 0; config.placement.given && layer < config.placement.layers; ++layer) {
    maps.emplace_back(config.placement, layer, config.placement.map(layer), config.placement.shares(layer), placement,
                      rank);
  }
  return maps;
}

// `in`: whose window the group is placed in, or NULL.
tw::Context make_context(const tw::GroupConfig& config, const std::vector<tw::ExpertMap>& maps, int32_t rank,
                         uint64_t number, const tw::Arena* in) {
  tw::Context context;
  context.spec = &config.placement;
  context.maps = &maps;
  context.map = config.map;
  context.me = rank;
  context.placement = {config.expert_rank.data(), config.expert_slot.data()};
  context.local_experts = config.local_experts[rank];
  context.replicas = tw::ReplicaSet::of(config.given.token_replicas, rank);
  context.domains = tw::Domains::make(config.given.domain, config.shape().ranks);
  context.ids = {config.given.id_dtype, config.given.id_space, config.given.invalid_id};
  context.first_step = config.first_step;
  if (in == nullptr) return context;
  context.growth = tw::placed_digest(static_cast<uint32_t>(number >> 16));
  context.former = in->former;  // rows may lie in views of groups that were here before
  return context;
}

}  // namespace

twGroup::twGroup(twComm* on, tw::GroupConfig checked, std::vector<int> ranks, int32_t rank, uint64_t called,
                 std::shared_ptr<tw::Arena> in)
    : comm(on),
      config(std::move(checked)),
      members(std::move(ranks)),
      number(called),
      arena(in != nullptr ? in : std::make_shared<tw::Arena>(called, config)),
      maps(make_maps(config, rank)),
      context(make_context(config, maps, rank, number, in.get())),
      channels(arena->channels) {
  if (in == nullptr) arena->first = this;
  if (config.placement.moves) moving = std::make_unique<tw::Moving>(config.placement.layers);
  tw::HandleArrays measured;
  handle_bytes = place_arrays(nullptr, &measured);
  ++comm->groups;
}

twGroup::~twGroup() {
  if (backend != nullptr) backend->settle();
  for (twHandle* handle : handles) {
    backend->forget(*handle);
    if (handle->owns_block) release(handle->block);
    delete handle;
  }
  for (std::byte* block : free_blocks_) release(block);
  std::erase(arena->groups, this);
  if (arena->first == this) {
    arena->first = nullptr;
    arena->parted.clear();
    arena->leases.reset();
  }
  leases.reset();  // first, so that the backend unmaps the window, unless others keep it
  backend.reset();
  --comm->groups;
}

int twGroup::rank_of(int member) const {
  return static_cast<int>(std::find(members.begin(), members.end(), member) - members.begin());
}

uint64_t twGroup::place_arrays(std::byte* block, tw::HandleArrays* arrays) const {
  return tw::place_arrays(shape(), context.local_experts, tw::dtype_bytes(config.given.id_dtype), config.on_device,
                          block, arrays);
}

void twGroup::grow(const tw::GroupConfig& larger) {
  for (twGroup* other : arena->groups) {
    if (other == this) continue;
    const std::lock_guard theirs(other->sizes);
    other->context.former.push_back(larger.map);  // its calls may be given rows there
  }
  const std::lock_guard lock(sizes);
  context.former.push_back(context.map);
  context.growth = tw::growth_digest(static_cast<uint32_t>(context.former.size()));
  arena->former.push_back(arena->map);
  arena->map = larger.map;
  const uint64_t loads = arena->room.loads;  // these stay where they are
  arena->room = config.room = larger.room;
  arena->room.loads = loads;
  config.given.max_tokens = larger.given.max_tokens;
  config.given.max_recv_tokens = larger.given.max_recv_tokens;
  config.given.inbox_tokens = larger.given.inbox_tokens;
  config.given.dispatch_room = larger.given.dispatch_room;
  config.given.combine_room = larger.given.combine_room;
  config.map = context.map = larger.map;
  for (std::byte* block : free_blocks_) release(block);  // they are too small now
  free_blocks_.clear();
  tw::HandleArrays measured;
  handle_bytes = place_arrays(nullptr, &measured);
}

std::byte* twGroup::allocate(size_t bytes) {
  if (config.given.alloc != nullptr) {
    void* const block = config.given.alloc(bytes, config.given.alloc_context);
    if (reinterpret_cast<uintptr_t>(block) % 64 == 0) return static_cast<std::byte*>(block);
    config.given.release(block, config.given.alloc_context);
    return nullptr;
  }
  if (config.on_device) return backend->allocate(bytes);
  return static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
}

void twGroup::release(std::byte* block) {
  if (config.given.release != nullptr) {
    config.given.release(block, config.given.alloc_context);
  } else if (config.on_device) {
    backend->release(block);
  } else {
    std::free(block);
  }
}

std::byte* twGroup::take_block() {
  if (free_blocks_.empty()) return allocate(handle_bytes);
  std::byte* const block = free_blocks_.back();
  free_blocks_.pop_back();
  return block;
}

void twGroup::give_block(const twHandle& handle) {
  const bool fits = handle.max_tokens == shape().max_tokens && handle.most_rows == shape().most_rows();
  fits ? free_blocks_.push_back(handle.block) : release(handle.block);
}

tw::ErrorRecord twGroup::error() {
  tw::ErrorRecord last = arena->error();
  if (last.sticky) return last;
  const std::lock_guard lock(error_mutex_);
  return error_;
}

void twGroup::set_error(tw::ErrorRecord record) {
  if (record.sticky) return arena->finish(std::move(record));
  const std::lock_guard lock(error_mutex_);
  error_ = std::move(record);
}

bool twGroup::is_sticky() { return arena->is_sticky(); }

namespace tw {
namespace {

// Meetings of a collective creation, as offsets from its tags, in order.
enum Stage : uint64_t { kCheckedStage, kCompareStage, kMemoryStage, kWindowStage, kMappedStage = kWindowStage + 32 };

constexpr char kOccasion[] = "creating a group";

}  // namespace

Status check_memory(const twComm& comm, const GroupConfig& config, const std::vector<int>& members, uint64_t there) {
  uint64_t needed = config.map.bytes() - there;
  auto ranks = static_cast<int32_t>(members.size());  // on this host
  FreeMemory free = find_free_memory();
  const Topology topology = comm.hosts != nullptr ? comm.hosts->topology(members) : Topology{};
  const bool folds = topology.divides_into(Domains::make(config.given.domain, ranks).size);
  if (comm.posts()) {
    const uint64_t loads = there > 0 ? 0 : config.map.room().loads;  // which do not grow
    needed += PostsMap::make(config.map, loads).bytes();
    needed += InboxMap::make(topology, config.map, comm.hosts->uses_of_inboxes(folds)).bytes();
  } else if (comm.hosts != nullptr) {
    const auto me = std::find(members.begin(), members.end(), comm.bootstrap->rank()) - members.begin();
    needed += HostsMap::make(topology, config.map, std::max(1, config.given.token_replicas), folds).bytes();
    ranks = static_cast<int32_t>(topology.mates(static_cast<int>(me)).size());
  }
#if TOKENWAY_WITH_CUDA
  if (comm.device >= 0) {
    TW_RETURN_IF_FAILED(device_memory(comm.device, &free.bytes));
    free.why = "on device " + std::to_string(comm.device);
    ranks = static_cast<int32_t>(std::count(comm.devices.begin(), comm.devices.end(), comm.device));
    ranks = std::max(ranks, 1);  // ranks are processes: each is taken to have the device to itself
  }
#else
  (void)comm;
#endif
  if (needed <= free.bytes / static_cast<uint64_t>(ranks)) return {};
  return fail(twOutOfMemory,
              "windows of {} ranks need {} x {}, and {} are free, {}; lower max_tokens ({}), lanes ({}), lease_bytes "
              "or the row sizes",
              ranks, ranks, bytes_text(needed), bytes_text(free.bytes), free.why, config.given.max_tokens,
              config.given.lanes);
}

BackendInit make_init(const twComm& comm, const twGroup& group, uint64_t tag, TimePoint deadline) {
  BackendInit init;
  init.context = &group.context;
  if (group.arena->first != &group) init.arena = group.arena->groups.front()->backend.get();
  init.bootstrap = comm.bootstrap.get();
  init.members = group.members;
  init.tag = tag;
  init.deadline = deadline;
  init.spin_us = comm.environment.spin_us;
  init.cache_bytes = comm.environment.cache_bytes;
  init.carrier = comm.carrier.get();
  init.hosts = comm.hosts.get();
  init.device = comm.device;
  init.devices = comm.devices;
  init.timeout_ms = group.config.given.timeout_ms;
  init.sm_limit = group.config.given.sm_limit;
  init.blocking = comm.environment.blocking;
  init.no_wait = comm.environment.no_wait;
  return init;
}

namespace {

Status make_group(twComm* comm, const twGroupConfig_t& given, const Status& readable, std::vector<int> members,
                  uint64_t tags, std::unique_ptr<twGroup>* made, Occasion occasion, const Left& left,
                  const Room& least) {
  Bootstrap& bootstrap = *comm->bootstrap;
  const std::shared_ptr<Arena> arena = given.arena != nullptr ? given.arena->arena : nullptr;
  const auto place = std::find(members.begin(), members.end(), bootstrap.rank());
  const auto rank = static_cast<int32_t>(place - members.begin());
  const auto ranks = static_cast<int32_t>(members.size());

  // A rank with a bad configuration takes part all the same, so that the others learn of it at once.
  GroupConfig config;
  const bool on_device = comm->device >= 0;
  const bool staged = comm->stages();
  twGroupConfig_t asked = given;
  if (arena != nullptr && asked.lanes == 0) asked.lanes = arena->channels.size();
  asked.arena = nullptr;
  Status checked =
      readable.ok() ? check_config(asked, ranks, on_device, comm->environment, &config, staged, least) : readable;
  if (checked.ok() && arena != nullptr) checked = place_in(*arena, &config);
  // Between hosts a placed group may need more memory beside the window, to which no step may be on its way.
  const bool moves = arena != nullptr && comm->hosts != nullptr && !on_device;
  if (checked.ok() && moves) checked = check_settled(*arena, "twGroupCreate");
  const TimePoint deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(comm->timeout_ms);
  Opening opening(bootstrap, occasion, left);
  Status opened = agree(opening, members, tags + kCheckedStage, deadline, kOccasion, checked);
  TW_RETURN_IF_FAILED(opening.mismatch());
  TW_RETURN_IF_FAILED(std::move(opened));
  std::vector<Parcel> configs;
  TW_RETURN_IF_FAILED(
      gather(bootstrap, members, tags + kCompareStage, {pack_config(config), {}}, deadline, kOccasion, &configs));
  TW_RETURN_IF_FAILED(compare_configs(configs));
  Status room = arena != nullptr ? Status{} : check_memory(*comm, config, members, 0);
  for (int channel = 0; moves && room.ok() && channel < arena->channels.size(); ++channel) {
    room = drain(*arena->groups.front(), channel, twPhaseNone, nullptr);
  }
  TW_RETURN_IF_FAILED(agree(bootstrap, members, tags + kMemoryStage, deadline, kOccasion, room));

  auto group = std::make_unique<twGroup>(comm, std::move(config), std::move(members), rank, tags, arena);
  const BackendInit init = make_init(*comm, *group, tags + kWindowStage, deadline);
  const auto on_host = comm->hosts != nullptr ? make_fabric_backend : make_cpu_backend;
  const auto make = comm->carrier != nullptr ? make_staged_backend : on_host;
#if TOKENWAY_WITH_CUDA
  const Status mapped = (on_device ? make_nvlink_backend : make)(init, &group->backend);
#else
  const Status mapped = make(init, &group->backend);
#endif
  Status agreed = agree(bootstrap, group->members, tags + kMappedStage, deadline, kOccasion, mapped);
  // The others may all have met, and would wait for this rank in their first step.
  if (agreed.code == twInterrupted && mapped.ok()) abort_group(*group);
  TW_RETURN_IF_FAILED(std::move(agreed));
  if (group->shape().leases()) {
    Backend& own = *group->backend;
    group->leases = std::make_shared<LeaseArea>(own.window() + group->config.map.leases(), group->shape().lease_bytes,
                                                own.keep_window());
    group->arena->leases = group->leases;
  }
  group->arena->groups.push_back(group.get());
  *made = std::move(group);
  return {};
}

}  // namespace

Status create_group(twComm* comm, const twGroupConfig_t& given, const Status& readable, std::vector<int> members,
                    uint64_t tags, std::unique_ptr<twGroup>* made, Occasion occasion, const Left& left,
                    const Room& least) {
  const std::vector<int> asked = members;
  Status created = make_group(comm, given, readable, std::move(members), tags, made, occasion, left, least);
  if (created.code == twInterrupted) comm->give_up(asked, occasion_of(tags));
  return created;
}

namespace {

// Tells ranks that shrink not to wait for this one, unless another group of its window might still be shrunk here.
void close_quietly(twGroup& group) {
  if (!group.shares()) leave_group(group);
}

}  // namespace

Status destroy_group(std::unique_ptr<twGroup> group) {
  twComm* const comm = group->comm;
  const uint64_t tags = comm->next_tags();
  const auto interrupted = [] {
    return fail(twInterrupted, "interrupted while peers had not come to destroy the group, which is destroyed here");
  };
  poll_device(*group);
  if (group->shares() && !group->is_sticky()) end_steps(*group);
  // Who has come through its steps has all that was put for them: so nobody's network ends under a peer's puts (T10).
  if (comm->posts() && !group->is_sticky()) group->backend->settle();
  const bool stopped = was_interrupted();  // in the wait for what was pending
  if (stopped) abort_group(*group);
  const auto finished = [&] { return group->is_sticky() || group->backend->find_abort().kind != 0; };
  Opening opening(*comm->bootstrap, {Call::kDestroy, group->number});
  if (finished()) {
    opening.give(group->members, tags);  // to peers that make another call at this occasion
    close_quietly(*group);
    return stopped ? interrupted() : Status{};
  }
  // The wait is bounded: a peer that never comes must not hold up an orderly exit for the whole timeout.
  const auto bound =
      std::min(std::chrono::milliseconds(group->config.given.timeout_ms), std::chrono::milliseconds(5000));
  std::vector<Parcel> all;
  const auto presence =
      opening.exchange(group->members, tags, {}, std::chrono::steady_clock::now() + bound, &all,
                       [&](int member) { return finished() || group->has_left(group->rank_of(member)); });
  if (was_interrupted()) {
    abort_group(*group);
    return interrupted();
  }
  bool together = !finished();
  const Occasion shrinking{Call::kShrink, group->number};  // it hears by this parcel that nobody comes
  for (size_t i = 0; i < all.size(); ++i) {
    together = together && presence[i] == Presence::kHere && opening.occasion(i).call == Call::kDestroy;
  }
  Status differ = opening.mismatch(&shrinking);
  if (!together || !differ.ok()) close_quietly(*group);
  if (!together || !differ.ok() || !group->config.on_device) return differ;
  // Device memory is free only when the last peer has let go of it too; then this call may say so.
  const std::vector<int> members = group->members;
  group.reset();
  comm->bootstrap->exchange(members, tags + 1, {}, std::chrono::steady_clock::now() + bound, &all);
  return was_interrupted() ? interrupted() : Status{};
}

namespace {

// Names what a rank does in a phase.
Sentence name_of(twPhase_t phase) {
  if (phase == twPhaseGather) return Function{"twAllGatherV"};
  if (phase == twPhaseReduce) return Function{"twReduceScatterV"};
  const char* const phases[] = {"an idle group", "creation", "dispatch", "combine", "shrink", "the exchange of counts"};
  return phases[phase];
}

// What may be the cause where ranks are on different lanes or banks: a lease that this rank has kept longer than its
// peers, which learnt late that it was refused a dispatch.
Sentence remember_refusal(twGroup& group) {
  for (int channel = 0; channel < group.channels.size(); ++channel) {
    if (!group.channels[channel].refused && !group.channels[channel].refused_before) continue;
    return compose(
        ". A dispatch was refused on this rank, and the handle still holds lane {}: combine or release it where peers "
        "combine theirs, before the next call",
        channel);
  }
  return {};
}

void announce(twGroup& group, const ErrorRecord& record) {
  group.backend->announce_abort({static_cast<uint32_t>(record.result), static_cast<uint32_t>(record.reporter),
                                 static_cast<uint32_t>(record.peer), group.arena->gave_up});
}

}  // namespace

void poll_device(twGroup& group) {
  ErrorRecord record = empty_record();
  if (group.is_sticky() || !group.backend->poll(&record)) return;
  if (record.sticky) {
    (void)finish_group(group, record);
  } else {
    group.set_error(record);
  }
}

Status check_usable(twGroup& group, twPhase_t phase) {
  poll_device(group);
  if (group.is_sticky()) {
    const ErrorRecord record = group.error();
    return fail(record.result, "the group is finished: {}", record.sentence);
  }
  const AbortSignal abort = group.backend->find_abort();
  if (abort.kind == 0) return {};
  // A device tells within a moment where this rank was.
  for (int look = 0; look < 30 && group.backend->on_device(); ++look) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    poll_device(group);
    if (group.is_sticky()) return check_usable(group, phase);
  }
  ErrorRecord record = empty_record();
  record.result = static_cast<twResult_t>(abort.kind);
  record.peer = static_cast<int32_t>(abort.culprit);
  record.reporter = static_cast<int32_t>(abort.reporter);
  record.phase = phase;
  return finish_group(group, record);
}

Status end_meeting(twGroup& group, uint64_t tags, Status met) {
  if (met.code == twInterrupted) {
    group.comm->give_up(group.members, occasion_of(tags));
    return heed_interrupt(group, std::move(met));
  }
  if (met.code == twPeerDied || met.code == twPeerAborted) TW_RETURN_IF_FAILED(check_usable(group, twPhaseNone));
  return met;
}

Status finish_group(twGroup& group, ErrorRecord record) {
  const ErrorRecord culprit = record;  // what peers are told; record.result may become twExcluded below
  const Sentence where = record.lane < 0 ? Sentence()
                                         : compose(" of step {} on lane {} (last seen: step {})", record.expected,
                                                   record.lane, record.seen);
  // The others found this rank late or gone, or it has found that it reaches nobody: they go on without it.
  const Status cut_off = group.arena->gave_up ? Status{} : group.backend->network_failure();
  const bool late = record.result == twTimeout || record.result == twPeerDied;
  const bool mine = record.peer == group.me() &&
                    (record.reporter != group.me() ? late : record.result == twPeerAborted && !cut_off.ok());
  const char* what = "broke a promise of the library";
  if (record.result == twTimeout) what = "did not arrive in time";
  if (record.result == twPeerDied) what = "is gone";
  if (record.result == twPeerAborted) what = "gave the group up";
  if (record.result == twCallMismatch) what = "made a different call";
  Sentence hint = record.result == twCallMismatch || record.result == twTimeout ? remember_refusal(group) : Sentence();
  if (mine && !cut_off.ok()) hint = compose(". Its network has failed: {}", cut_off.sentence);
  record.set_sentence(compose("rank {} {} in {}{}; found by rank {}{}{}", record.peer, what, name_of(record.phase),
                              where, record.reporter, mine ? ": this is that rank, and its peers go on without it" : "",
                              hint));
  if (mine) record.result = twExcluded;
  record.sticky = 1;
  group.set_error(record);
  announce(group, culprit);
  return {record.result, record.sentence};
}

void abort_group(twGroup& group) {
  if (group.arena->gave_up.exchange(true)) return;
  if (check_usable(group, twPhaseNone).ok()) {
    ErrorRecord record = empty_record();
    record.result = twPeerAborted;
    record.peer = record.reporter = group.me();
    (void)finish_group(group, record);
  } else {
    leave_group(group);  // finished by somebody else's error, which stays the reason
  }
}

Status interrupt_group(twGroup& group, twPhase_t phase, StepPlace at, int32_t peer) {
  abort_group(group);
  const std::string whom = peer >= 0 ? "rank " + std::to_string(peer) : "its peers";
  return fail(twInterrupted,
              "interrupted in {} of step {} on lane {} while it waited for {}: rank {} gave the group up",
              name_of(phase), at.step, at.channel, whom, group.me());
}

Status heed_interrupt(twGroup& group, Status status) {
  if (status.code == twInterrupted) abort_group(group);
  return status;
}

void leave_group(twGroup& group, bool went_on) {
  AbortSignal signal = group.backend->abort_of(group.me());
  if (signal.left || signal.went_on) return;
  (went_on ? signal.went_on : signal.left) = true;
  group.backend->announce_abort(signal);
}

}  // namespace tw
