// Shrinking: survivors of an error agree on who they are, and create a new group. Each starts from what it knows (the
// rank that its error blames, ranks that have left the group, and those whose process is gone) and tells all others
// that it does not suspect; suspicions are joined, round by round. News of a rank that comes while this rank waits for
// its answer ends that wait: only a rank that is silently stuck costs the deadline.
//
// A round is calm for a rank if every rank that it asked answered with the very set that it had sent itself. One calm
// round is not enough: what I heard from a rank does not say what that rank heard. So everyone also says whether its
// last round was calm, and ends after a calm round in which all said so: then each knows that all have the same set. A
// rank that its peers suspect hears nothing from them; it runs into the deadline with too few left, and takes itself to
// be given up.
//
// Where maps move, each also says the latest version that it has. All have heard all survivors in the last round, so
// they have the same maximum (M7), of which core/survivors.h makes the new group's maps.
//
// No number of rounds can mend a rank that dies between telling two others in the last one. Creating the group then
// fails, with an error and in bounded time, and the survivors can shrink again.
//
// What must hold is A1 and A2 of docs/PROTOCOL.md (spec/agreement.pml): ranks that go on go on with the same ranks, and
// nobody waits in the creation for a rank that will not come.
#include <algorithm>
#include <cstdio>
#include <map>

#include "core/group.h"
#include "core/interrupt.h"
#include "core/survivors.h"

namespace tw {
namespace {

// What any rank knows of a rank, joined round by round. A round is calm only if all know the same of everybody, so what
// ranks decide at the end, they decide alike.
enum Suspicion : uint8_t {
  kOut = 1,        // not asked any more; set together with each of the others
  kAway = 2,       // blamed, left or dead: no side of its own
  kSilent = 4,     // lives, as far as is known, and did not answer somebody in time: perhaps one of another side
  kElsewhere = 8,  // makes another call at this occasion; silent too
};

// Makes the group send nothing more; peers are not told of an error.
void finish_quietly(twGroup& group, twResult_t result, Sentence why) {
  ErrorRecord record = empty_record();
  record.result = result;
  record.sticky = 1;
  record.phase = twPhaseShrink;
  record.set_sentence(std::move(why));
  group.set_error(record);
}

class Agreement {
 public:
  explicit Agreement(twGroup& group)
      : group_(group),
        bootstrap_(*group.comm->bootstrap),
        known_(group.ranks()),
        version_(newest_version(group)),
        newest_(version_) {
    // At least shrink_ms, also where the group's own timeout is shorter: survivors notice an error up to one timeout
    // apart.
    patience_ = std::chrono::milliseconds(std::max(group.config.given.timeout_ms, group.comm->environment.shrink_ms));
  }

  Status reach(uint64_t tags) {
    // Each piece of news about a rank costs two rounds, and two calm rounds end the agreement. That takes fewer than
    // half of the tags of an occasion.
    const int rounds = 2 * 4 * group_.ranks() + 2;
    bool calm = false;
    for (int round = 0; round < rounds; ++round) {
      const bool was_calm = calm;
      bool all_were_calm = false;
      TW_RETURN_IF_FAILED(hold_round(tags + static_cast<uint64_t>(round), was_calm, &calm, &all_were_calm));
      if (calm && all_were_calm) return check_larger_side();
    }
    return fail(twInternalError, "the survivors did not agree in {} rounds", rounds);
  }

  // The survivors, as ranks of the comm.
  std::vector<int> survivors() const { return members_with(kOut, 0); }
  // The latest version that one of them has.
  MapVersion newest() const { return newest_; }

  // Whether a member of the new group, which all others expect at its creation, does not come.
  bool does_not_come(int member) { return has_left(group_.rank_of(member)) || excluded_; }
  bool excluded() const { return excluded_; }

  Status given_up() {
    return stay_behind(fail(twExcluded, "rank {} was given up by its peers, which go on without it", group_.me()));
  }

 private:
  std::vector<int> members_with(int mask, int value) const {
    std::vector<int> members;
    for (int rank = 0; rank < group_.ranks(); ++rank) {
      if ((known_[rank] & mask) == value) members.push_back(group_.members[rank]);
    }
    return members;
  }

  // Lets the larger side go on. Ranks that live and are not blamed, and yet did not answer, are either hung, or have
  // given up ranks of this side. It is judged by what all of this side have agreed on, not by the ranks that this rank
  // itself has missed: others may have missed nobody, and would wait for it in vain.
  Status check_larger_side() {
    const std::vector<int> side = survivors();
    const std::vector<int> others = members_with(kSilent | kAway, kSilent);
    if (others.size() < side.size()) return {};
    std::vector<int> members = members_with(kElsewhere, kElsewhere);
    if (!members.empty()) {  // nobody is given up for that: all can make one call now
      std::vector<Occasion> calls;
      for (const int member : members) calls.push_back(made_[member]);  // others told of it: it creates, as is likely
      members.insert(members.end(), side.begin(), side.end());
      calls.resize(members.size(), {Call::kShrink, group_.number});
      return call_mismatch(members, calls);
    }
    return stay_behind(
        fail(twExcluded, "rank {} live but did not answer all of rank {} in time; these are not more, and do not go on",
             ranks_text(others), ranks_text(side)));
  }

  // Ends this rank's part: no later call will answer either, and no step will be made.
  Status stay_behind(Status why) {
    leave_group(group_);
    group_.arena->excluded = true;
    finish_quietly(group_, twExcluded, why.sentence);
    return why;
  }

  // Takes in the error that finished the group, which this rank may learn of only now, from a peer's abort signal.
  void learn() {
    if (told_) return;
    told_ = !check_usable(group_, twPhaseShrink).ok();
    if (!told_) return;
    const ErrorRecord record = group_.error();
    excluded_ = record.result == twExcluded;
    if (record.peer >= 0 && record.peer != group_.me()) known_[record.peer] |= kOut | kAway;
  }

  // Whether a rank's process is gone, or it has left the group. An answer that it gave before counts all the same:
  // others have it too, and whether a round was calm must follow from the same answers for all. If that rank has a new
  // group already, this rank is not in it, since creating it would have waited for all its members.
  bool has_left(int rank) {
    const AbortSignal signal = group_.backend->abort_of(rank);
    excluded_ = excluded_ || signal.went_on;
    return signal.left || signal.went_on || !bootstrap_.alive(group_.members[rank]);
  }

  void look_around() {
    learn();
    for (int rank = 0; rank < group_.ranks(); ++rank) {
      if (rank != group_.me() && has_left(rank)) known_[rank] |= kOut | kAway;
    }
  }

  // Whether a rank whose answer is not here is waited for.
  bool is_waited_for(int rank) {
    learn();
    return !excluded_ && known_[rank] == 0 && !has_left(rank);
  }

  // Why a rank that gave no answer of use is suspected.
  static uint8_t why(Presence presence, const Occasion& made, const Occasion& mine) {
    if (presence == Presence::kGone || presence == Presence::kGaveUp) return kOut | kAway;
    if (presence == Presence::kLate) return kOut | kSilent;
    // A rank that destroys the group, or has nothing to say, takes no part. One that grows it, or meets in it, does not
    // know of the error yet.
    const bool leaves = made.group == mine.group && made.call != Call::kGrow && made.call != Call::kMeet;
    return leaves ? kOut | kAway : kOut | kSilent | kElsewhere;
  }

  Status hold_round(uint64_t tag, bool was_calm, bool* calm, bool* all_were_calm) {
    look_around();
    if (excluded_) return given_up();
    const std::vector<uint8_t> sent = known_;
    const std::vector<int> asked = survivors();
    const uint64_t version = pack(version_);
    const Parcel mine{Packer().add<uint8_t>(was_calm).add(version).add_bytes(sent.data(), sent.size()).take(), {}};
    const Occasion occasion{Call::kShrink, group_.number};
    Opening opening(bootstrap_, occasion);
    std::vector<Parcel> all;
    const auto presence =
        opening.for_survivors().exchange(asked, tag, mine, std::chrono::steady_clock::now() + patience_, &all,
                                         [&](int member) { return !is_waited_for(group_.rank_of(member)); });
    if (excluded_) return given_up();
    if (was_interrupted()) {
      abort_group(group_);
      return fail(twInterrupted, "interrupted while survivors had not answered: rank {} gave the group up",
                  group_.me());
    }
    *calm = *all_were_calm = true;
    newest_ = version_;  // of those who answer now: what a rank had that is out by then counts for nobody
    for (size_t i = 0; i < asked.size(); ++i) {
      const int rank = group_.rank_of(asked[i]);
      const bool answers = presence[i] == Presence::kHere && opening.occasion(i) == occasion && !all[i].bytes.empty();
      if (!answers) {
        known_[rank] |= why(presence[i], opening.occasion(i), occasion);
        made_[asked[i]] = opening.occasion(i);
        *calm = false;
        continue;
      }
      Unpacker reader(all[i].bytes);
      if (reader.get<uint8_t>() == 0) *all_were_calm = false;
      newest_ = newer(newest_, unpack_version(reader.get<uint64_t>()));
      const std::string theirs = reader.get_bytes();
      if (theirs.size() != sent.size()) return fail(twInternalError, "rank {} sent no list of survivors", rank);
      for (size_t r = 0; r < sent.size(); ++r) {
        if (static_cast<uint8_t>(theirs[r]) != sent[r]) *calm = false;
        known_[r] |= static_cast<uint8_t>(theirs[r]);
      }
    }
    if (known_ != sent) *calm = false;
    return known_[group_.me()] != 0 ? given_up() : Status{};
  }

  twGroup& group_;
  Bootstrap& bootstrap_;
  bool told_ = false;             // whether that error is known
  bool excluded_ = false;         // it blames this rank, or peers have gone on
  std::vector<uint8_t> known_;    // [N] Suspicion of each rank
  std::map<int, Occasion> made_;  // by member: the call that this rank has seen it make instead
  const MapVersion version_;      // this rank's latest, as the call has found it
  MapVersion newest_;
  std::chrono::milliseconds patience_{};
};

// Whether a group of survivors goes on with the maps in force: nobody gives others.
bool keeps_maps(const twGroup& group, const twGroupConfig_t* given) {
  if (group.moving == nullptr || given == nullptr) return group.moving != nullptr;
  const twPlacement_t* const placement = given->placement;
  return placement != nullptr && placement->moves == 1 && placement->slot_expert == nullptr &&
         given->expert_rank == nullptr && given->expert_slot == nullptr;
}

// Refuses a configuration that keeps the maps, of other experts or layers.
Status check_kept(const twGroup& group, const twGroupConfig_t& given) {
  const PlacementSpec& spec = group.config.placement;
  const int32_t layers = given.placement->num_layers == 0 ? 1 : given.placement->num_layers;
  for (const auto& [name, value, had] : {std::tuple(Argument("config.num_experts"), given.num_experts, spec.experts),
                                         {Argument("config.placement->num_layers"), layers, spec.layers}}) {
    if (value == had) continue;
    return fail(twInvalidArgument, "{} is {}; survivors keep the maps of the group, so it must be {}, or {} given",
                name, Value(value), had, Argument("config.placement->slot_expert"));
  }
  return {};
}

// Puts what remains of the group into the new one's configuration, which then points into `remains` and `placement`.
void keep_maps(const Remains& remains, twPlacement_t* placement, twGroupConfig_t* config) {
  const twPlacement_t kept = remains.placement.as_given();
  placement->num_layers = kept.num_layers;
  placement->num_slots = kept.num_slots;
  placement->slot_expert = kept.slot_expert;
  placement->slot_shares = placement->policy == twReplicaShares ? kept.slot_shares : nullptr;
  placement->weight_bytes = std::max(placement->weight_bytes, kept.weight_bytes);
  config->placement = placement;
  config->expert_rank = remains.expert_rank.data();
  config->expert_slot = remains.expert_slot.data();
}

}  // namespace

Status shrink_group(twGroup& group, const twGroupConfig_t* given, const Status& readable,
                    std::unique_ptr<twGroup>* survivors) {
  const uint64_t tags = group.comm->next_tags();
  const Occasion occasion{Call::kShrink, group.number};
  const ErrorRecord record = group.error();
  if (group.arena->shrunk != 0 && group.arena->shrunk != group.number) {
    Opening(*group.comm->bootstrap, occasion).give(group.members, tags);
    return fail(twInvalidUsage,
                "another group of this window was shrunk; create this one anew, with {} the group that {} returned",
                Argument("config.arena"), Function{"twGroupShrink"});
  }
  if (group.arena->gave_up || group.arena->excluded || (record.sticky && record.result == twExcluded)) {
    leave_group(group);  // no later call will answer either
    // Tells it also to peers that do something else at this occasion.
    Opening(*group.comm->bootstrap, occasion).give(group.members, tags);
    return fail(twExcluded, "the peers of rank {} go on without it: {}", group.me(), record.sentence);
  }
  Agreement agreement(group);
  TW_RETURN_IF_FAILED(agreement.reach(tags));
  finish_quietly(group, twInvalidUsage,
                 compose("it was shrunk; use the group that {} returned", Function{"twGroupShrink"}));
  twGroupConfig_t config = given != nullptr ? *given : group.config.given;
  if (given == nullptr) config.expert_rank = config.expert_slot = nullptr;
  twPlacement_t placement = group.config.placement.as_given();
  if (given == nullptr && group.config.placement.given) config.placement = &placement;
  if (given != nullptr && given->placement != nullptr) placement = *given->placement;
  config.arena = nullptr;
  std::vector<int> members = agreement.survivors();
  Remains remains;
  Status sound = readable;
  if (sound.ok() && keeps_maps(group, given)) {
    if (given != nullptr) sound = check_kept(group, *given);
    std::vector<int> ranks;
    for (const int member : members) ranks.push_back(group.rank_of(member));
    remains = remains_of(group, agreement.newest(), ranks);
    keep_maps(remains, &placement, &config);
  }
  // Fewer ranks send less: a bound that was meant for all of them, or for a guess at how many survive, becomes as much
  // as can come.
  const int64_t most = static_cast<int64_t>(members.size()) * config.max_tokens;
  if (config.max_recv_tokens > most) config.max_recv_tokens = 0;
  // Creation gets the upper half of the tags: the agreement took few.
  const bool all = members.size() == group.members.size();
  Status created = create_group(
      group.comm, config, sound, std::move(members), tags + (1 << 15), survivors, occasion,
      [&](int member) { return agreement.does_not_come(member); }, given == nullptr ? group.config.room : Room{});
  // If it is interrupted, ranks that shrink again do so without this one.
  created = heed_interrupt(group, std::move(created));
  if (!created.ok()) return agreement.excluded() ? agreement.given_up() : created;
  (*survivors)->lost = std::move(remains.lost);
  if (!all) leave_group(group, true);
  group.arena->shrunk = group.number;
  return {};
}

}  // namespace tw
