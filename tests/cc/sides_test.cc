// Survivors that come so far apart that some give others up: sides. Whatever a rank decides on, its peers decide alike,
// so nobody waits for one that does not come. The order of all that matters is fixed here; nothing hangs on time.
#include <latch>

#include "survivors.h"

namespace tw::test {
namespace {

struct Sides : ::testing::TestWithParam<bool> {
  const Env patience{"TOKENWAY_SHRINK_MS", std::to_string(kLong.count()).c_str()};
  const Env creation{"TOKENWAY_TIMEOUT_MS", std::to_string(kLong.count()).c_str()};

  static std::unique_ptr<World> make_world(int ranks) {
    if (!GetParam()) return std::make_unique<World>(ranks, impatient(kLong.count()));
    return std::make_unique<World>(connect(ranks), impatient(kLong.count()));
  }
};

// Rank 3's patience ends when rank 2 has answered, and ranks 0 and 1 come right then: rank 3 has given up half of the
// four that live. Rank 2, whose patience has not ended, misses nobody. But it decides by what rank 3 knows too, so both
// go on or neither does. They do not, and leave, so that the others can go on.
TEST_P(Sides, HalfIsGivenUp) {
  const auto world = make_world(5);
  world->kill(4);
  std::latch given_up(1);
  Scripted::take_over(
      world->comms[3], [](int meeting, int member) { return meeting == 0 && member < 2; },
      [&](int meeting) {
        if (meeting == 0) given_up.count_down();
      });
  std::vector<Outcome> outcomes(4);
  on_all_ranks(4, [&](int rank) {
    if (rank < 2) given_up.wait();
    outcomes[rank] = shrink((*world)[rank]);
  });
  for (const int rank : {0, 1}) {
    EXPECT_TW(twSuccess, outcomes[rank].result) << "rank " << rank << ": " << outcomes[rank].sentence;
    EXPECT_EQ(outcomes[rank].members, (std::vector{0, 1})) << "rank " << rank;
  }
  for (const int rank : {2, 3}) {
    EXPECT_TW(twExcluded, outcomes[rank].result) << "rank " << rank << ": " << outcomes[rank].sentence;
    // Nor alone, once the others have left.
    EXPECT_TW(twExcluded, shrink((*world)[rank]).result) << "rank " << rank;
  }
}

// As above, but three of five: those who have given up two are the larger side.
TEST_P(Sides, LessThanHalfIsGivenUp) {
  const auto world = make_world(6);
  world->kill(5);
  std::latch given_up(1);
  Scripted::take_over(
      world->comms[4], [](int meeting, int member) { return meeting == 0 && member < 2; },
      [&](int meeting) {
        if (meeting == 0) given_up.count_down();
      });
  std::vector<Outcome> outcomes(5);
  on_all_ranks(5, [&](int rank) {
    if (rank < 2) given_up.wait();
    outcomes[rank] = shrink((*world)[rank]);
  });
  for (int rank = 0; rank < 5; ++rank) {
    EXPECT_TW(rank < 2 ? twExcluded : twSuccess, outcomes[rank].result) << "rank " << rank;
    const std::vector<int> members = rank < 2 ? std::vector<int>{} : std::vector<int>{2, 3, 4};
    EXPECT_EQ(outcomes[rank].members, members) << "rank " << rank;
  }
}

INSTANTIATE_TEST_SUITE_P(Meetings, Sides, ::testing::Bool(),
                         [](const auto& one) { return one.param ? "OverSockets" : "InOneProcess"; });

}  // namespace
}  // namespace tw::test
