// Survivors of an error agree on who they are. Each starts from what it knows (whom its error blames, who has left the
// group, whose process is gone) and tells all others that it does not suspect; suspicions are joined, round by round.
// What it comes to know while it waits for an answer ends that wait: only a rank that is silently stuck costs the
// deadline.
//
// A round is calm for a rank if everybody that it asked answered with the set that it had sent itself. One calm round
// is not enough: what I heard from a rank does not say what that rank heard. So everyone says whether its last round
// was calm, and ends after a calm round in which all said so: then each knows that all have the same set. A rank that
// its peers suspect hears nothing from them; it runs into the deadline with too few left, and takes itself to be given
// up.
//
// What no number of rounds can mend is a rank that dies between telling two others in the last one. Creating the group
// then fails, with an error and in bounded time, and the survivors can shrink again.
#include <algorithm>
#include <cstdio>
#include <map>

#include "core/group.h"
#include "core/interrupt.h"

namespace tw {
namespace {

// What is known of a rank, by anybody: joined round by round. A round is calm only if all know the same of everybody,
// so what ranks decide at the end, they decide alike.
enum Suspicion : uint8_t {
  kOut = 1,        // not asked any more; stands beside each of the others
  kAway = 2,       // blamed, left or dead: no side of its own
  kSilent = 4,     // lives, as far as is known, and did not answer somebody in time: perhaps one of another side
  kElsewhere = 8,  // makes another call at this occasion; silent too
};

// The group sends nothing more; peers are not told of an error.
void finish_quietly(twGroup& group, twResult_t result, const char* why) {
  twErrorRecord_t record = empty_record();
  record.result = result;
  record.sticky = 1;
  record.phase = twPhaseShrink;
  std::snprintf(record.message, sizeof record.message, "%s", why);
  group.set_error(record);
}

class Agreement {
 public:
  explicit Agreement(twGroup& group) : group_(group), bootstrap_(*group.comm->bootstrap), known_(group.ranks()) {
    // Not the group's own timeout if that is shorter: survivors notice an error up to one timeout apart.
    patience_ = std::chrono::milliseconds(std::max(group.config.given.timeout_ms, group.comm->environment.shrink_ms));
  }

  Status reach(uint64_t tags) {
    // Something new of a rank costs two, and two calm ones end it. Fewer than half of the tags of an occasion.
    const int rounds = 2 * 4 * group_.ranks() + 2;
    bool calm = false;
    for (int round = 0; round < rounds; ++round) {
      const bool was_calm = calm;
      bool all_were_calm = false;
      TW_RETURN_IF_FAILED(hold_round(tags + static_cast<uint64_t>(round), was_calm, &calm, &all_were_calm));
      if (calm && all_were_calm) return check_larger_side();
    }
    return fail(twInternalError, "the survivors did not agree in %d rounds", rounds);
  }

  // The comm's ranks of those who survive.
  std::vector<int> survivors() const { return members_with(kOut, 0); }

  // Of a member of the new group, which all others take to come to its creation: whether it does not.
  bool does_not_come(int member) { return has_left(group_.rank_of(member)) || excluded_; }
  bool excluded() const { return excluded_; }

  Status given_up() {
    return stay_behind(fail(twExcluded, "rank %d was given up by its peers, which go on without it", group_.me()));
  }

 private:
  std::vector<int> members_with(int mask, int value) const {
    std::vector<int> members;
    for (int rank = 0; rank < group_.ranks(); ++rank) {
      if ((known_[rank] & mask) == value) members.push_back(group_.members[rank]);
    }
    return members;
  }

  // Ranks that live and are not blamed, and yet did not answer: either they are hung, or they have given up ranks of
  // this side. The larger side goes on. Judged by what all of this side have agreed on, not by whom this rank itself
  // has missed: others may have missed nobody, and would wait for it in vain.
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
        fail(twExcluded, "rank %s live but did not answer all of rank %s in time; these are not more, and do not go on",
             ranks_text(others).c_str(), ranks_text(side).c_str()));
  }

  // No later call will answer either, and no step be made.
  Status stay_behind(Status why) {
    leave_group(group_);
    group_.excluded = true;
    finish_quietly(group_, twExcluded, why.text.c_str());
    return why;
  }

  // The error that finished the group, which this rank may learn of only now, from a peer's abort signal.
  void learn() {
    if (told_) return;
    told_ = !check_usable(group_, twPhaseShrink).ok();
    if (!told_) return;
    const twErrorRecord_t record = group_.error();
    excluded_ = record.result == twExcluded;
    if (record.peer >= 0 && record.peer != group_.me()) known_[record.peer] |= kOut | kAway;
  }

  // Whose process is gone, or who has left the group. An answer that it gave before counts all the same: others have it
  // too, and whether a round was calm must follow from the same answers for all. One who has a new group has one
  // without this rank, whom creating it would have waited for.
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

  // Of a rank whose answer is not here.
  bool is_waited_for(int rank) {
    learn();
    return !excluded_ && known_[rank] == 0 && !has_left(rank);
  }

  // Why a rank is suspected that gave no answer to take.
  static uint8_t why(Presence presence, const Occasion& made, const Occasion& mine) {
    if (presence == Presence::kGone || presence == Presence::kGaveUp) return kOut | kAway;
    if (presence == Presence::kLate) return kOut | kSilent;
    // Who destroys the group, or has nothing to say, takes no part.
    const bool leaves = made.group == mine.group;
    return leaves ? kOut | kAway : kOut | kSilent | kElsewhere;
  }

  Status hold_round(uint64_t tag, bool was_calm, bool* calm, bool* all_were_calm) {
    look_around();
    if (excluded_) return given_up();
    const std::vector<uint8_t> sent = known_;
    const std::vector<int> asked = survivors();
    const Parcel mine{Packer().add<uint8_t>(was_calm).add_bytes(sent.data(), sent.size()).take(), {}};
    const Occasion occasion{Call::kShrink, group_.number};
    Opening opening(bootstrap_, occasion);
    std::vector<Parcel> all;
    const auto presence =
        opening.for_survivors().exchange(asked, tag, mine, std::chrono::steady_clock::now() + patience_, &all,
                                         [&](int member) { return !is_waited_for(group_.rank_of(member)); });
    if (excluded_) return given_up();
    if (was_interrupted()) {
      abort_group(group_);
      return fail(twInterrupted, "interrupted while survivors had not answered: rank %d gave the group up",
                  group_.me());
    }
    *calm = *all_were_calm = true;
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
      const std::string theirs = reader.get_bytes();
      if (theirs.size() != sent.size()) return fail(twInternalError, "rank %d sent no list of survivors", rank);
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
  bool told_ = false;             // the error that finished the group
  bool excluded_ = false;         // it blames this rank, or peers have gone on
  std::vector<uint8_t> known_;    // of each rank, as Suspicion
  std::map<int, Occasion> made_;  // by member, the call of whom this rank has met elsewhere
  std::chrono::milliseconds patience_{};
};

}  // namespace

Status shrink_group(twGroup& group, const twGroupConfig_t* given, const Status& readable,
                    std::unique_ptr<twGroup>* survivors) {
  const uint64_t tags = group.comm->next_tags();
  const Occasion occasion{Call::kShrink, group.number};
  const twErrorRecord_t record = group.error();
  if (group.gave_up || group.excluded || (record.sticky && record.result == twExcluded)) {
    leave_group(group);  // no later call will answer either
    // Told also to peers that do something else at this occasion.
    Opening(*group.comm->bootstrap, occasion).give(group.members, tags);
    return fail(twExcluded, "the peers of rank %d go on without it: %s", group.me(), record.message);
  }
  Agreement agreement(group);
  TW_RETURN_IF_FAILED(agreement.reach(tags));
  finish_quietly(group, twInvalidUsage, "it was shrunk; use the group that twGroupShrink returned");
  twGroupConfig_t config = given != nullptr ? *given : group.config.given;
  if (given == nullptr) config.expert_rank = config.expert_slot = nullptr;
  const twPlacement_t placement = group.config.placement.as_given();
  if (given == nullptr && group.config.placement.given) config.placement = &placement;
  std::vector<int> members = agreement.survivors();
  // Fewer ranks send less: what held for all of them, or for a guess at how many survive, is as much as can come.
  const int64_t most = static_cast<int64_t>(members.size()) * config.max_tokens;
  if (config.max_recv_tokens > most) config.max_recv_tokens = 0;
  // Creation gets the upper half of the tags: the agreement took few.
  const bool all = members.size() == group.members.size();
  Status created = create_group(group.comm, config, readable, std::move(members), tags + (1 << 15), survivors, occasion,
                                [&](int member) { return agreement.does_not_come(member); });
  // Where it is interrupted, who shrinks again does so without this rank.
  created = heed_interrupt(group, std::move(created));
  if (!created.ok()) return agreement.excluded() ? agreement.given_up() : created;
  if (!all) leave_group(group, true);
  return {};
}

}  // namespace tw
