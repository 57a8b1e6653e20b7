// What tests of survivors share: a rank's shrink and what became of it, and meetings that go in a given order.
#pragma once

#include <unistd.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/group.h"
#include "harness.h"

namespace tw::test {

// What ranks wait at most where somebody does not come.
inline constexpr std::chrono::milliseconds kLong{20000};

struct Outcome {
  twResult_t result = twSuccess;
  std::vector<int> members;  // of the new group, as ranks of the comm
  std::chrono::milliseconds waited{0};
  std::string sentence;
};

inline std::vector<int> members_of(twGroup_t group) {
  twGroupInfo_t info{};
  info.size = sizeof info;
  EXPECT_TW(twSuccess, twGroupInfo(group, &info));
  return {info.comm_ranks, info.comm_ranks + info.nranks};
}

inline Outcome shrink(twGroup_t group) {
  Outcome outcome;
  twGroup_t survivors = nullptr;
  const twGroupConfig_t config = impatient(kLong.count());
  const auto begin = std::chrono::steady_clock::now();
  outcome.result = twGroupShrink(group, &config, &survivors);
  outcome.waited = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin);
  EXPECT_EQ(outcome.result == twSuccess, survivors != nullptr);
  if (survivors == nullptr) {
    outcome.sentence = twLastError();
    return outcome;
  }
  outcome.members = members_of(survivors);
  // A group that its other members do not have cannot be used, nor ended in a barrier.
  const twErrorRecord_t old = error_of(group);
  EXPECT_EQ(old.sticky, 1);
  dispatch_nothing(survivors, config);
  EXPECT_TW(twSuccess, twGroupDestroy(survivors));
  return outcome;
}

inline std::string text(const std::vector<int>& numbers) {
  std::string all;
  for (const int number : numbers) all += (all.empty() ? "" : ", ") + std::to_string(number);
  return "{" + all + "}";
}

// Comms that meet over sockets, as processes do: there a parcel comes to nobody but whom it was sent to.
inline std::vector<twComm_t> connect(int ranks) {
  const std::string address = "survivors-test-" + std::to_string(::getpid());
  std::vector<twComm_t> comms(ranks);
  on_all_ranks(ranks, [&](int rank) {
    twCommConfig_t config = TW_COMM_CONFIG_INIT;
    config.address = address.c_str();
    EXPECT_TW(twSuccess, twCommCreateShm(&comms[rank], rank, ranks, &config));
  });
  return comms;
}

// A rank's meetings, of which a test says when they end and without whom.
class Scripted : public Bootstrap {
 public:
  // A meeting of the rank from now on, the first is 0: whom it is not to wait for, but to find late.
  using Late = std::function<bool(int meeting, int member)>;
  // After a meeting.
  using After = std::function<void(int meeting)>;

  // Takes the place of the comm's own from now on.
  static void take_over(twComm_t comm, Late late, After after) {
    comm->bootstrap = std::make_unique<Scripted>(std::move(comm->bootstrap), std::move(late), std::move(after));
  }
  Scripted(std::unique_ptr<Bootstrap> inner, Late late, After after)
      : inner_(std::move(inner)), late_(std::move(late)), after_(std::move(after)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  bool in_process() const override { return inner_->in_process(); }
  bool shares_memory() const override { return inner_->shares_memory(); }
  bool alive(int peer) override { return inner_->alive(peer); }
  Status last_words(int peer) override { return inner_->last_words(peer); }
  void give(std::span<const int> members, uint64_t tag, const std::string& bytes) override {
    inner_->give(members, tag, bytes);
  }
  void give_up(std::span<const int> members, uint64_t occasion) override { inner_->give_up(members, occasion); }
  std::vector<Presence> exchange(std::span<const int> members, uint64_t tag, const Parcel& mine, TimePoint deadline,
                                 std::vector<Parcel>* all, const Left& left, Needs) override {
    const int meeting = meetings_++;
    const auto gone = [&](int member) { return late_(meeting, member) || (left && left(member)); };
    std::vector<Presence> presence = inner_->exchange(members, tag, mine, deadline, all, gone);
    for (size_t i = 0; i < members.size(); ++i) {
      if (presence[i] == Presence::kGone && late_(meeting, members[i])) presence[i] = Presence::kLate;
    }
    after_(meeting);
    return presence;
  }

 private:
  std::unique_ptr<Bootstrap> inner_;
  Late late_;
  After after_;
  int meetings_ = 0;
};

}  // namespace tw::test
