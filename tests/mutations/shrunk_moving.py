"""Mutations of what survivors begin with where maps move: which maps, which weights, which experts are lost, and how
experts go on moving."""

from mutation import SHRINK, Edit, Mutation

SURVIVORS = "src/core/survivors.cc"
LEFT = "survivors_test"
LATEST = "Shrunk.BeginsWithTheLatestVersionThatAnySurvivorHas"
KEPT = "Survivors.KeepTheirSlots"
GOES_ON = "test_a_model_goes_on"
WEIGHTS = "python/tokenway/balance/weights.py"
MOVED = "py/test_moved_ranks"
BALANCER = "python/tokenway/balance/balancer.py"
ROUNDS = "python/tokenway/balance/rounds.py"
BALANCED = "py/test_balancer"

SHRUNK_MOVING_MUTATIONS = (
    Mutation(
        "survivors go by the least version",
        "M7",
        LEFT,
        LATEST,
        (
            Edit(
                SURVIVORS,
                "has_epoch(one.epoch, other.epoch) ? one : other",
                "has_epoch(one.epoch, other.epoch) ? other : one",
            ),
        ),
    ),
    Mutation(
        "a survivor goes by its own version",
        "M7",
        LEFT,
        LATEST,
        (Edit(SHRINK, "newest_ = newer(newest_, unpack_version(reader.get<uint64_t>()));", "reader.get<uint64_t>();"),),
    ),
    Mutation(
        "a survivor tells the version of its first lane",
        "M7",
        LEFT,
        LATEST,
        (
            Edit(
                SURVIVORS,
                "newest = channel == 0 ? version : newer(newest, version);",
                "if (channel == 0) newest = version;",
            ),
        ),
    ),
    Mutation(
        "a survivor goes by an epoch that was void",
        "M7",
        LEFT,
        LATEST,
        (Edit(SURVIVORS, "!newest.uses(open->epoch)", "!has_epoch(newest.epoch, open->epoch)"),),
    ),
    Mutation(
        "survivors go by maps that are not decided",
        "M7",
        LEFT,
        LATEST,
        (Edit(SURVIVORS, "!open || !newest.uses(open->epoch)", "!open"),),
    ),
    Mutation(
        "lost experts fill the last empty slots",
        "experts move after a shrink",
        LEFT,
        KEPT,
        (Edit(SURVIVORS, "own) + more - 1);", "own) + more);"),),
    ),
    Mutation(
        "lost experts are named to nobody",
        "lost experts are named",
        LEFT,
        KEPT,
        (Edit(SURVIVORS, "    is_lost[p] = 1;\n", ""),),
    ),
    Mutation(
        "weights have no room for further slots",
        "weights",
        LEFT,
        KEPT,
        (Edit(SURVIVORS, "if (most > had) after.weight_bytes =", "if (most > 2 * had) after.weight_bytes ="),),
    ),
    Mutation(
        "shares stay where nobody is left",
        "an expert has a share",
        LEFT,
        "Survivors.SharesOfTheDeadGoToWhoIsLeft",
        (Edit(SURVIVORS, "sums[map[p]] <= 0.0) shares[p] = 1.0f;", "sums[map[p]] < 0.0) shares[p] = 1.0f;"),),
    ),
    Mutation(
        "a map of other layers is kept",
        "S10",
        LEFT,
        "Shrunk.RefusesOtherExpertsAndLayers",
        (Edit(SHRINK, "    if (value == had) continue;\n", "    if (value >= 0) continue;\n"),),
    ),
    Mutation(
        "survivors' weights stay behind",
        "M7",
        MOVED,
        GOES_ON,
        (Edit(WEIGHTS, "made.tensor(name, layer)[: len(kept)] = kept", "del kept"),),
    ),
    Mutation(
        "every rank loads all lost experts into its own slots",
        "M7",
        MOVED,
        GOES_ON,
        (Edit(WEIGHTS, "if each.rank == group.rank and load is not None:", "if load is not None:"),),
    ),
    Mutation(
        "ranks are filled with experts that they have",
        "no replica on a rank twice",
        BALANCED,
        "test_ranks_with_fewer_experts_are_filled",
        (Edit(ROUNDS, "key=lambda e: (e in row, -loads[e] / held[e], e)", "key=lambda e: (-loads[e] / held[e], e)"),),
    ),
    Mutation(
        "a rank that is to have more gives something up all the same",
        "a plan comes to its end",
        BALANCED,
        "test_rounds_come_to_an_end",
        (Edit(ROUNDS, "            if gone != NOTHING:\n", "            if gone in now or gone == NOTHING:\n"),),
    ),
    Mutation(
        "an idle lane is passed for nobody's load",
        "loads",
        MOVED,
        "test_an_idle_lane",
        (Edit(BALANCER, "bound=1, lane=lane, count=False)", "bound=1, lane=lane)"),),
    ),
    Mutation(
        "idle lanes are left alone",
        "M4",
        MOVED,
        "test_an_idle_lane",
        (Edit(BALANCER, "            _pass(self.group, self.weights, lane)\n", "            pass\n"),),
    ),
)
