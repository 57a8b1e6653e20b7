// Ranks that create, shrink and destroy the groups of a comm in different orders: all that meet hear it at once, by a
// sentence that names what each does, and can go on. Nothing waits for a timeout, which is longer than any test.
#include "survivors.h"

namespace tw::test {
namespace {

struct Lifetime : ::testing::TestWithParam<bool> {
  const Env patience{"TOKENWAY_SHRINK_MS", std::to_string(kLong.count()).c_str()};

  Lifetime() : config(impatient(kLong.count())) {
    if (GetParam()) {
      world = std::make_unique<World>(connect(3), config);
    } else {
      world = std::make_unique<World>(3, config);
    }
  }

  twResult_t create(int rank, twGroup_t* group) { return twGroupCreate(group, world->comms[rank], &config); }
  twResult_t destroy(int rank) {
    const twGroup_t group = world->groups[rank];
    world->groups[rank] = nullptr;
    return twGroupDestroy(group);
  }
  // All have come through the same number of calls, so they can make any together.
  void expect_in_step() {
    std::vector<twGroup_t> fresh(3);
    on_all_ranks(3, [&](int rank) {
      ASSERT_TW(twSuccess, create(rank, &fresh[rank]));
      dispatch_nothing(fresh[rank], config);
      EXPECT_TW(twSuccess, twGroupDestroy(fresh[rank]));
    });
  }

  twGroupConfig_t config;
  std::unique_ptr<World> world;
};

TEST_P(Lifetime, CreatingAgainstDestroying) {
  on_all_ranks(3, [&](int rank) {
    twGroup_t fresh = nullptr;
    EXPECT_TW(twCallMismatch, rank == 0 ? destroy(0) : create(rank, &fresh));
    EXPECT_EQ(fresh, nullptr);
    // Who is not there yet when the first two differ is not named.
    EXPECT_TRUE(says("rank 0 destroys a group while rank ")) << rank;
    EXPECT_TRUE(says(" create")) << rank;
  });
  expect_in_step();
}

// All are named where all have come.
TEST_P(Lifetime, NamesWhatEachDoes) {
  const std::vector<int> ranks{0, 1, 2, 5};
  const std::vector<Occasion> calls{{Call::kDestroy, 3 << 16}, {}, {}, {Call::kShrink, 3 << 16}};
  const std::string text = call_mismatch(ranks, calls).text();
  EXPECT_EQ(text.find("rank 0 destroys a group while rank 1, 2 create one and rank 5 shrinks one; all ranks"), 0u)
      << text;
}

// As a `with` block does that an exception leaves.
TEST_P(Lifetime, CreatingAgainstDestroyingAfterGivingUp) {
  on_all_ranks(3, [&](int rank) {
    twGroup_t fresh = nullptr;
    if (rank == 0) {
      EXPECT_TW(twSuccess, twGroupAbort((*world)[0]));
      EXPECT_TW(twSuccess, destroy(0));  // waits for nobody
    } else {
      EXPECT_TW(twCallMismatch, create(rank, &fresh));
      EXPECT_TRUE(says("rank 0 destroys a group while rank ")) << rank;
    }
  });
  expect_in_step();
}

// Here its next call meets what the others do next.
TEST_P(Lifetime, OneIsACallAhead) {
  on_all_ranks(3, [&](int rank) {
    twGroup_t fresh = nullptr;
    if (rank == 0) {
      EXPECT_TW(twSuccess, twGroupAbort((*world)[0]));
      EXPECT_TW(twSuccess, destroy(0));
      EXPECT_TW(twCallMismatch, create(0, &fresh));
    } else {
      EXPECT_TW(twCallMismatch, create(rank, &fresh));
      EXPECT_TW(twSuccess, destroy(rank));  // finished, by rank 0
    }
  });
  expect_in_step();
}

TEST_P(Lifetime, DestroyingDifferentGroups) {
  std::vector<twGroup_t> second(3);
  on_all_ranks(3, [&](int rank) { ASSERT_TW(twSuccess, create(rank, &second[rank])); });
  on_all_ranks(3, [&](int rank) {
    if (rank == 2) {
      EXPECT_TW(twCallMismatch, twGroupDestroy(second[2]));
      EXPECT_TRUE(says("rank 2 destroys the one that call 2 of the comm made"));
    } else {
      EXPECT_TW(twCallMismatch, destroy(rank));
      EXPECT_TRUE(says(" the group that call 1 of the comm made while rank 2 destroys"));
    }
  });
  // Who closes the rest waits for nobody either: its peers have left that group, or are seen to close the other.
  on_all_ranks(3, [&](int rank) {
    const twResult_t ended = rank == 2 ? destroy(2) : twGroupDestroy(second[rank]);
    EXPECT_TRUE(ended == twSuccess || ended == twCallMismatch) << twLastError();
  });
  expect_in_step();
}

// More shrink than create: they go on without it, and it hears why.
TEST_P(Lifetime, CreatingWhileMoreShrink) {
  on_all_ranks(3, [&](int rank) {
    twGroup_t fresh = nullptr;
    if (rank == 1) {
      EXPECT_TW(twCallMismatch, create(1, &fresh));
      EXPECT_TRUE(says("shrink")) << "the others";
      EXPECT_TRUE(says("rank 1 creates")) << "this one";
      return;
    }
    const Outcome outcome = shrink((*world)[rank]);
    EXPECT_TW(twSuccess, outcome.result) << outcome.sentence;
    EXPECT_EQ(outcome.members, (std::vector{0, 2}));
  });
}

// More make another call than shrink: all hear it, nobody is given up, and all can shrink then.
void shrink_alone(World& world, const std::function<twResult_t(int rank)>& call, const std::string& sentence) {
  on_all_ranks(3, [&](int rank) {
    if (rank == 1) {
      const Outcome outcome = shrink(world[1]);
      EXPECT_TW(twCallMismatch, outcome.result);
      EXPECT_NE(outcome.sentence.find(sentence), std::string::npos) << outcome.sentence;
    } else {
      EXPECT_TW(twCallMismatch, call(rank));
    }
  });
  on_all_ranks(3, [&](int rank) {
    const Outcome outcome = shrink(world[rank]);
    EXPECT_TW(twSuccess, outcome.result) << outcome.sentence;
    EXPECT_EQ(outcome.members, (std::vector{0, 1, 2}));
  });
}

TEST_P(Lifetime, ShrinkingWhileMoreCreate) {
  std::vector<twGroup_t> fresh(3);
  shrink_alone(
      *world, [&](int rank) { return create(rank, &fresh[static_cast<size_t>(rank)]); },
      "rank 0, 2 create a group while rank 1 shrinks one");
}

// They do not leave the group by that.
TEST_P(Lifetime, ShrinkingWhileMoreMeet) {
  shrink_alone(
      *world, [&](int rank) { return twGroupMeet((*world)[rank], nullptr, 0, 0, nullptr); },
      "rank 0, 2 meet in a group while rank 1 shrinks one");
}

INSTANTIATE_TEST_SUITE_P(Meetings, Lifetime, ::testing::Bool(),
                         [](const auto& one) { return one.param ? "OverSockets" : "InOneProcess"; });

}  // namespace
}  // namespace tw::test
