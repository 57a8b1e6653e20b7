// Survivors of an error agree on who they are. Each starts from what it knows (whom its error blames, whose process is
// gone) and tells all others that it does not suspect; suspicions are joined until a round changes nothing.
//
// Why this ends alike everywhere: a rank is done when it heard, in one round, everybody that it does not suspect, and
// all had sent the same set as it had. Those then are done too. A rank that its peers suspect hears nothing from them:
// it runs into the deadline with nobody left but itself, and takes itself to be the one given up.
#include <algorithm>
#include <cstdio>

#include "core/group.h"

namespace tw {
namespace {

// Not the group's own timeout if that is shorter: survivors notice an error up to one timeout apart.
constexpr std::chrono::milliseconds kLeastPatience{10000};

class Agreement {
 public:
  explicit Agreement(twGroup& group) : group_(group), bootstrap_(*group.comm->bootstrap), suspects_(group.ranks()) {
    const twErrorRecord_t record = group.error();
    if (record.sticky && record.peer >= 0 && record.peer != group.me()) suspects_[record.peer] = true;
    patience_ = std::max(std::chrono::milliseconds(group.config.given.timeout_ms), kLeastPatience);
  }

  Status reach(uint64_t tags) {
    const int rounds = group_.ranks() + 2;  // each round but the last adds a suspect
    for (int round = 0; round < rounds; ++round) {
      bool same = true;
      TW_RETURN_IF_FAILED(hold_round(tags + static_cast<uint64_t>(round), &same));
      if (same) return check_not_alone();
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

  Status hold_round(uint64_t tag, bool* same) {
    for (int rank = 0; rank < group_.ranks(); ++rank) {
      if (rank != group_.me() && !bootstrap_.alive(group_.members[rank])) suspects_[rank] = true;
    }
    const std::vector<uint8_t> sent = suspects_;
    const std::vector<int> asked = survivors();
    std::vector<Parcel> all;
    const auto presence = bootstrap_.exchange(asked, tag, {Packer().add_bytes(sent.data(), sent.size()).take(), {}},
                                              std::chrono::steady_clock::now() + patience_, &all);
    *same = true;
    for (size_t i = 0; i < asked.size(); ++i) {
      const int rank = rank_of(asked[i]);
      if (presence[i] != Presence::kHere) {
        suspects_[rank] = true;
        silent_ += presence[i] == Presence::kLate ? 1 : 0;
        *same = false;
        continue;
      }
      const std::string theirs = Unpacker(all[i].bytes).get_bytes();
      if (theirs.size() != sent.size()) return fail(twInternalError, "rank %d sent no list of survivors", rank);
      for (size_t r = 0; r < sent.size(); ++r) {
        if (static_cast<uint8_t>(theirs[r]) != sent[r]) *same = false;
        if (theirs[r] != 0) suspects_[r] = true;
      }
    }
    if (!suspects_[group_.me()]) return {};
    return fail(twExcluded, "rank %d was given up by its peers, which go on without it", group_.me());
  }

  int rank_of(int member) const {
    return static_cast<int>(std::find(group_.members.begin(), group_.members.end(), member) - group_.members.begin());
  }

  twGroup& group_;
  Bootstrap& bootstrap_;
  std::vector<uint8_t> suspects_;
  size_t silent_ = 0;
  std::chrono::milliseconds patience_{};
};

// The old group sends nothing more.
void retire(twGroup& group) {
  if (group.is_sticky()) return;
  twErrorRecord_t record{};
  record.size = sizeof record;
  record.result = twInvalidUsage;
  record.sticky = 1;
  record.peer = record.reporter = record.lane = record.token = record.k = -1;
  record.phase = twPhaseShrink;
  std::snprintf(record.message, sizeof record.message, "it was shrunk; use the group that twGroupShrink returned");
  group.set_error(record);
}

}  // namespace

Status shrink_group(twGroup& group, const twGroupConfig_t* given, const Status& readable,
                    std::unique_ptr<twGroup>* survivors) {
  const uint64_t tags = group.comm->next_tags();
  const twErrorRecord_t record = group.error();
  const bool gave_up = record.result == twPeerAborted && record.peer == group.me();
  if (record.sticky && (record.result == twExcluded || gave_up)) {
    return fail(twExcluded, "the peers of rank %d go on without it: %s", group.me(), record.message);
  }
  Agreement agreement(group);
  TW_RETURN_IF_FAILED(agreement.reach(tags));
  retire(group);
  twGroupConfig_t config = given != nullptr ? *given : group.config.given;
  if (given == nullptr) config.expert_rank = config.expert_slot = nullptr;
  // Creation gets the upper half of the tags: the agreement took few.
  return create_group(group.comm, config, readable, agreement.survivors(), tags + (1 << 15), survivors);
}

}  // namespace tw
