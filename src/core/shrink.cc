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

#include "core/group.h"
#include "core/interrupt.h"

namespace tw {
namespace {

class Agreement {
 public:
  explicit Agreement(twGroup& group) : group_(group), bootstrap_(*group.comm->bootstrap), suspects_(group.ranks()) {
    // Not the group's own timeout if that is shorter: survivors notice an error up to one timeout apart.
    patience_ = std::chrono::milliseconds(std::max(group.config.given.timeout_ms, group.comm->environment.shrink_ms));
  }

  Status reach(uint64_t tags) {
    const int rounds = 2 * group_.ranks() + 2;  // a suspect more costs two, and two calm ones end it
    bool calm = false;
    for (int round = 0; round < rounds; ++round) {
      const bool was_calm = calm;
      bool all_were_calm = false;
      TW_RETURN_IF_FAILED(hold_round(tags + static_cast<uint64_t>(round), was_calm, &calm, &all_were_calm));
      if (calm && all_were_calm) return check_not_alone();
    }
    return fail(twInternalError, "the survivors did not agree in %d rounds", rounds);
  }

  // The comm's ranks of those who survive.
  std::vector<int> survivors() const {
    std::vector<int> members;
    for (int rank = 0; rank < group_.ranks(); ++rank) {
      if (!suspects_[rank]) members.push_back(group_.members[rank]);
    }
    return members;
  }

 private:
  // Ranks that live and are not blamed, and yet did not answer: either they are hung, or they have given this rank up.
  // The larger side goes on.
  Status check_not_alone() const {
    if (silent_ == 0 || silent_ < survivors().size()) return {};
    return fail(twExcluded, "%zu ranks live but did not answer rank %d; they seem to have given it up", silent_,
                group_.me());
  }

  // The error that finished the group, which this rank may learn of only now, from a peer's abort word.
  void learn() {
    if (told_) return;
    told_ = !check_usable(group_, twPhaseShrink).ok();
    if (!told_) return;
    const twErrorRecord_t record = group_.error();
    excluded_ = record.result == twExcluded;
    if (record.peer >= 0 && record.peer != group_.me()) suspects_[record.peer] = true;
  }

  // Whose process is gone, or who has left the group. An answer that it gave before counts all the same: others have it
  // too, and whether a round was calm must follow from the same answers for all. One who has a new group has one
  // without this rank, whom creating it would have waited for.
  bool has_left(int rank) {
    const AbortWord word = group_.backend->abort_of(rank);
    excluded_ = excluded_ || word.went_on;
    return word.left || word.went_on || !bootstrap_.alive(group_.members[rank]);
  }

  void look_around() {
    learn();
    for (int rank = 0; rank < group_.ranks(); ++rank) {
      if (rank != group_.me() && has_left(rank)) suspects_[rank] = true;
    }
  }

  // Of a rank whose answer is not here.
  bool is_waited_for(int rank) {
    learn();
    return !excluded_ && !suspects_[rank] && !has_left(rank);
  }

  Status hold_round(uint64_t tag, bool was_calm, bool* calm, bool* all_were_calm) {
    look_around();
    if (excluded_) return given_up();
    const std::vector<uint8_t> sent = suspects_;
    const std::vector<int> asked = survivors();
    const Parcel mine{Packer().add<uint8_t>(was_calm).add_bytes(sent.data(), sent.size()).take(), {}};
    std::vector<Parcel> all;
    const auto presence = bootstrap_.exchange(asked, tag, mine, std::chrono::steady_clock::now() + patience_, &all,
                                              [&](int member) { return !is_waited_for(rank_of(member)); });
    if (excluded_) return given_up();
    if (was_interrupted()) {
      abort_group(group_);
      return fail(twInterrupted, "interrupted while survivors had not answered: rank %d gave the group up",
                  group_.me());
    }
    *calm = *all_were_calm = true;
    for (size_t i = 0; i < asked.size(); ++i) {
      const int rank = rank_of(asked[i]);
      // Who has nothing to say destroys the group (destroy_group) at this occasion.
      if (presence[i] != Presence::kHere || all[i].bytes.empty()) {
        silent_ += presence[i] == Presence::kLate ? 1 : 0;
        suspects_[rank] = true;
        *calm = false;
        continue;
      }
      Unpacker reader(all[i].bytes);
      if (reader.get<uint8_t>() == 0) *all_were_calm = false;
      const std::string theirs = reader.get_bytes();
      if (theirs.size() != sent.size()) return fail(twInternalError, "rank %d sent no list of survivors", rank);
      for (size_t r = 0; r < sent.size(); ++r) {
        if (static_cast<uint8_t>(theirs[r]) != sent[r]) *calm = false;
        if (theirs[r] != 0) suspects_[r] = true;
      }
    }
    if (suspects_ != sent) *calm = false;
    return suspects_[group_.me()] ? given_up() : Status{};
  }

  Status given_up() {
    if (excluded_) leave_group(group_);  // no later call will answer either
    return fail(twExcluded, "rank %d was given up by its peers, which go on without it", group_.me());
  }

  int rank_of(int member) const {
    return static_cast<int>(std::find(group_.members.begin(), group_.members.end(), member) - group_.members.begin());
  }

  twGroup& group_;
  Bootstrap& bootstrap_;
  bool told_ = false;      // the error that finished the group
  bool excluded_ = false;  // it blames this rank, or peers have gone on
  std::vector<uint8_t> suspects_;
  size_t silent_ = 0;
  std::chrono::milliseconds patience_{};
};

// The old group sends nothing more.
void retire(twGroup& group) {
  if (group.is_sticky()) return;
  twErrorRecord_t record = empty_record();
  record.result = twInvalidUsage;
  record.sticky = 1;
  record.phase = twPhaseShrink;
  std::snprintf(record.message, sizeof record.message, "it was shrunk; use the group that twGroupShrink returned");
  group.set_error(record);
}

}  // namespace

Status shrink_group(twGroup& group, const twGroupConfig_t* given, const Status& readable,
                    std::unique_ptr<twGroup>* survivors) {
  const uint64_t tags = group.comm->next_tags();
  const twErrorRecord_t record = group.error();
  if (group.gave_up || (record.sticky && record.result == twExcluded)) {
    leave_group(group);  // no later call will answer either
    return fail(twExcluded, "the peers of rank %d go on without it: %s", group.me(), record.message);
  }
  Agreement agreement(group);
  TW_RETURN_IF_FAILED(agreement.reach(tags));
  retire(group);
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
  // Where it is interrupted, who shrinks again does so without this rank.
  TW_RETURN_IF_FAILED(heed_interrupt(
      group, create_group(group.comm, config, readable, std::move(members), tags + (1 << 15), survivors)));
  if (!all) leave_group(group, true);
  return {};
}

}  // namespace tw
