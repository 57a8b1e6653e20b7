// Occasions: the calls that the ranks of a comm make together outside of steps (create, grow, shrink, destroy, meet).
// Each call takes the next occasion (twComm::next_tags), the same on all ranks as long as they make the same calls in
// the same order. The parcel that opens a call says which call it is. So a rank that makes another one is noticed at
// once (twCallMismatch), instead of being taken for a partner or waited for. What changes here changes which rank is
// named in that error.
#pragma once

#include <vector>

#include "bootstrap/bootstrap.h"

namespace tw {

enum class Call : uint8_t { kCreate = 1, kShrink, kDestroy, kGrow, kMeet };

struct Occasion {
  Call call = Call::kCreate;
  uint64_t group = 0;  // the group that is shrunk, destroyed, grown or met in: the tags of its creation; 0 for kCreate

  bool operator==(const Occasion&) const = default;
};

// The comm's bootstrap, for the meeting that opens a call: it adds this rank's occasion to what it gives, and takes the
// occasions of the others off.
class Opening : public Bootstrap {
 public:
  // The meeting ends as soon as somebody makes another call, since it cannot serve its purpose then; parcels of ranks
  // that are not here count as not given. `left`: in addition to the one that exchange() is asked with.
  Opening(Bootstrap& comm, Occasion own, Left left = {}) : comm_(comm), own_(own), left_(std::move(left)) {}
  // Makes the meeting go on without ranks that make another call.
  Opening& for_survivors() {
    ends_ = false;
    return *this;
  }

  int rank() const override { return comm_.rank(); }
  int size() const override { return comm_.size(); }
  bool in_process() const override { return comm_.in_process(); }
  bool shares_memory() const override { return comm_.shares_memory(); }
  bool alive(int peer) override { return comm_.alive(peer); }
  Status last_words(int peer) override { return comm_.last_words(peer); }
  void give_up(std::span<const int> members, uint64_t occasion) override { comm_.give_up(members, occasion); }
  // Exchanges parcels, which must be without descriptors.
  std::vector<Presence> exchange(std::span<const int> members, uint64_t tag, const Parcel& mine, TimePoint deadline,
                                 std::vector<Parcel>* all, const Left& left = {},
                                 Needs needs = Needs::kPresent) override;

  // Gives this rank's occasion alone; does not wait.
  void give(std::span<const int> members, uint64_t tag, const std::string& bytes = {}) override;

  // The call of the i-th member; only for one that is here.
  const Occasion& occasion(size_t i) const { return occasions_[i]; }
  // Fails with twCallMismatch, and names the call of each rank, if a rank is here that makes another call than this
  // rank. A rank that makes `allowed` is no mismatch.
  Status mismatch(const Occasion* allowed = nullptr) const;

 private:
  bool anybody_elsewhere(const std::vector<Parcel>& come) const;

  Bootstrap& comm_;
  Occasion own_;
  Left left_;
  bool ends_ = true;
  // The last meeting's members and their occasions.
  std::vector<int> members_;
  std::vector<int> here_;  // which of them came, by place
  std::vector<Occasion> occasions_;
};

// Makes the error that ranks make different calls: calls[i] is that of members[i]; the sentence has them in the order
// of the ranks.
Status call_mismatch(std::span<const int> ranks, std::span<const Occasion> occasions);

}  // namespace tw
