// Calls that the ranks of a comm make together outside of steps. Each has an occasion of its own (twComm::next_tags),
// the same on all ranks as long as they make the same calls in the same order. So that a rank which does not is noticed
// at once, instead of being taken for one that does or waited for, the parcel that opens a call says which it is.
#pragma once

#include <vector>

#include "bootstrap/bootstrap.h"

namespace tw {

enum class Call : uint8_t { kCreate = 1, kShrink, kDestroy };

struct Occasion {
  Call call = Call::kCreate;
  uint64_t group = 0;  // which one is shrunk or destroyed: the tags that it was created at; 0 for kCreate

  bool operator==(const Occasion&) const = default;
};

// The comm's bootstrap for the meeting that opens a call: adds this rank's occasion to what it gives, and takes those
// of the others off.
class Opening : public Bootstrap {
 public:
  // Ends the meeting as soon as somebody makes another call, since then it cannot be what it is for; what those gave
  // who are not here counts as not given. `left`: beside the one that exchange() is asked with.
  Opening(Bootstrap& comm, Occasion own, Left left = {}) : comm_(comm), own_(own), left_(std::move(left)) {}
  // The meeting goes on without who makes another call.
  Opening& for_survivors() {
    ends_ = false;
    return *this;
  }

  int rank() const override { return comm_.rank(); }
  int size() const override { return comm_.size(); }
  bool in_process() const override { return comm_.in_process(); }
  bool alive(int peer) override { return comm_.alive(peer); }
  void give_up(std::span<const int> members, uint64_t occasion) override { comm_.give_up(members, occasion); }
  // Parcels without descriptors.
  std::vector<Presence> exchange(std::span<const int> members, uint64_t tag, const Parcel& mine, TimePoint deadline,
                                 std::vector<Parcel>* all, const Left& left = {},
                                 Needs needs = Needs::kWhoeverComes) override;

  // Gives this rank's occasion alone: it does not wait.
  void give(std::span<const int> members, uint64_t tag, const std::string& bytes = {}) override;

  // What the i-th member does; only of one that is here.
  const Occasion& occasion(size_t i) const { return occasions_[i]; }
  // twCallMismatch if somebody is here who makes another call than this rank: names the call of each. Who makes
  // `allowed` may.
  Status mismatch(const Occasion* allowed = nullptr) const;

 private:
  bool anybody_elsewhere(const std::vector<Parcel>& come) const;

  Bootstrap& comm_;
  Occasion own_;
  Left left_;
  bool ends_ = true;
  // Of the last meeting.
  std::vector<int> members_;
  std::vector<int> here_;  // of them, by place
  std::vector<Occasion> occasions_;
};

// That ranks make different calls, each the one beside it; in the order of the ranks.
Status call_mismatch(std::span<const int> ranks, std::span<const Occasion> occasions);

}  // namespace tw
