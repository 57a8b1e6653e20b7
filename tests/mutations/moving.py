"""Mutations of maps that move: what ranks tell, the version that follows, which map it means, and weights that follow
maps."""

from mutation import CPU_LOADS, ENTRIES, SHRINK, Edit, Mutation

EPOCHS = "src/exchange/epochs.h"
CORE = "src/core/moving.cc"
API = "src/api/moving.cc"
UNIT = "epochs_test"
VERSIONS = "Epochs.LeastOfWhatAllHaveTold"
LANES = "Moving.EachLaneSwitchesWhenAllHaveToldThere"
VOID = "Moving.WhatOneRankHasVoidIsVoidForAll"

SURVIVORS = "src/core/survivors.cc"
LEFT = "survivors_test"
LATEST = "Shrunk.BeginsWithTheLatestVersionThatAnySurvivorHas"
KEPT = "Survivors.KeepTheirSlots"
GOES_ON = "test_a_model_goes_on"

BALANCER = "python/tokenway/balance/balancer.py"
COPIES = "python/tokenway/balance/copies.py"
ROUNDS = "python/tokenway/balance/rounds.py"
WEIGHTS = "python/tokenway/balance/weights.py"
BALANCED = "py/test_balancer"
MOVED = "py/test_moved_ranks"

MOVING_MUTATIONS = (
    Mutation(
        "a version is the most that any rank has told",
        "M2",
        UNIT,
        VERSIONS,
        (Edit(EPOCHS, "if (ahead < least) least = ahead;", "if (ahead > least) least = ahead;"),),
    ),
    Mutation(
        "words that no rank can have told are taken",
        "M2",
        UNIT,
        "Epochs.NoMoreThanCanBeOpen",
        (Edit(EPOCHS, "if (least == 0 || least > kMostOpenEpochs) return before;", ""),),
    ),
    Mutation(
        "epochs are void to nobody",
        "M6",
        UNIT,
        VOID,
        (Edit(EPOCHS, "voids |= voids_in(before, told(rank), least);", "(void)voids_in(before, told(rank), least);"),),
    ),
    Mutation(
        "epochs are void to all by rank 0's word alone",
        "M6",
        UNIT,
        VOID,
        (Edit(EPOCHS, "voids |= voids_in(before, told(rank), least);", "voids |= voids_in(before, told(0), least);"),),
    ),
    Mutation(
        "a rank that is further ahead has other epochs void",
        "M6",
        UNIT,
        VERSIONS,
        (Edit(EPOCHS, "return told >> 16 >> (ahead_of(before, told) - least) &", "return told >> 16 &"),),
    ),
    Mutation(
        "void epochs do not move on with the version",
        "M6",
        UNIT,
        VERSIONS,
        (Edit(EPOCHS, "before.voids << least | voids};", "before.voids | voids};"),),
    ),
    Mutation(
        "an epoch is void again when its bit has gone round",
        "M6",
        UNIT,
        "Epochs.VersionsUseWhatIsNotVoid",
        (Edit(EPOCHS, "(past > 31 || (voids >> past & 1) == 0)", "(voids >> (past & 31) & 1) == 0"),),
    ),
    Mutation(
        "a head chooses a map that is void",
        "M5",
        UNIT,
        "Epochs.HeadsMayBeReadWhileTheyAreWritten",
        (Edit(EPOCHS, "version.uses(word >> 1) ? word & 1", "has_epoch(version.epoch, word >> 1) ? word & 1"),),
    ),
    Mutation(
        "a rank that has failed says so for its last epoch alone",
        "M6",
        UNIT,
        VOID,
        (Edit(CORE, "voids_ = voids_ << (epoch - ready_) | (failed ? 1u : 0u);", "voids_ = failed ? 1u : 0u;"),),
    ),
    Mutation(
        "one version for all lanes",
        "M2",
        UNIT,
        LANES,
        (
            Edit(CPU_LOADS, "MapVersion& version = versions_[at.channel];", "MapVersion& version = versions_[0];"),
            Edit(CPU_LOADS, "moves() ? versions_[channel] : MapVersion{};", "moves() ? versions_[0] : MapVersion{};"),
        ),
    ),
    Mutation(
        "a version of what the other bank was told",
        "S1",
        UNIT,
        LANES,
        (
            Edit(
                CPU_LOADS,
                "transport.local(place(at, source))",
                "transport.local(place({at.channel, at.step + 1}, source))",
            ),
        ),
    ),
    Mutation(
        "a handle gets its map where it is routed",
        "M3",
        UNIT,
        "Moving.HandlesBindInTheirFirstStep",
        (
            Edit(
                ENTRIES,
                "  if (group.moving != nullptr) return;  // its first step says by which map\n",
                "  if (group.moving != nullptr) {\n"
                "    tw::bind_routing(const_cast<twGroup&>(group), *handle, 0, nullptr);\n    return;\n  }\n",
            ),
        ),
    ),
    Mutation(
        "a map is staged while a lane has not the one before",
        "M1",
        UNIT,
        LANES,
        (
            Edit(
                API,
                "if (const auto& open = group.moving->open(layer)) {",
                "if (const auto& open = group.moving->open(layer); open && agreed > open->epoch) {",
            ),
        ),
    ),
    Mutation(
        "sixteen epochs are open",
        "M2",
        UNIT,
        "Moving.FifteenAreOpenAtMost",
        (Edit(API, "- agreed < tw::kMostOpenEpochs) return {};", "- agreed <= tw::kMostOpenEpochs) return {};"),),
    ),
    Mutation(
        "one lane decides for all of a rank",
        "M4",
        UNIT,
        LANES,
        (
            Edit(
                CORE,
                "if (!has_epoch(version.epoch, agreed.epoch)) agreed = version;",
                "if (!has_epoch(agreed.epoch, version.epoch)) agreed = version;",
            ),
        ),
    ),
    Mutation(
        "handles of an older map are not told of",
        "M4",
        UNIT,
        "Moving.HandlesBindInTheirFirstStep",
        (Edit(CORE, "&& !has_epoch(map.version, oldest)) oldest = map.version;", "&& false) oldest = map.version;"),),
    ),
    Mutation(
        "weights are written to beyond their memory",
        "weights",
        UNIT,
        "Moving.WeightsAreReadAtPeers",
        (
            Edit(
                API, "if (at <= all && bytes <= all - at) return {};", "if (at <= all && at + bytes <= all) return {};"
            ),
        ),
    ),
    Mutation(
        "this rank's weights are read for a peer's",
        "weights",
        UNIT,
        "Moving.WeightsAreReadAtPeers",
        (
            Edit(
                API,
                "source = group->backend->window_of(rank);",
                "source = group->backend->window();",
            ),
        ),
    ),
    # ---- what moves weights
    Mutation(
        "an epoch ends for the balancer when this rank is ready",
        "M4",
        BALANCED,
        "test_experts_move",
        (
            Edit(
                BALANCER,
                "            and _reached(epochs.agreed, self._open[0].number)\n"
                "            and _reached(epochs.oldest, self._open[0].number)\n",
                "            and _reached(epochs.ready, self._open[0].number)\n",
            ),
        ),
    ),
    Mutation(
        "handles of an older map are nobody's reason to wait",
        "M4",
        BALANCED,
        "test_a_handle_of_an_older_map",
        (Edit(BALANCER, "            and _reached(epochs.oldest, self._open[0].number)\n", ""),),
    ),
    Mutation(
        "what follows a void epoch is staged",
        "M1",
        BALANCED,
        "test_failed_copies",
        (
            Edit(
                BALANCER,
                "self._queue = deque(epoch for epoch in self._queue if epoch.layer != done.epoch.layer)",
                "pass",
            ),
        ),
    ),
    Mutation(
        "a void epoch's map is taken for the layer's",
        "M6",
        BALANCED,
        "test_failed_copies",
        (Edit(BALANCER, "            if void:  # what", "            if False:  # what"),),
    ),
    Mutation(
        "ready before all copies have begun",
        "M2",
        BALANCED,
        "test_small_pieces",
        (Edit(BALANCER, "if not each.failed and (each.pieces or not", "if not each.failed and (False and not"),),
    ),
    Mutation(
        "ready before all copies have ended",
        "M2",
        BALANCED,
        "test_slow_copies",
        (
            Edit(
                BALANCER,
                "(each.pieces or not self._copies.ended(each.number)):",
                "each.pieces:",
            ),
        ),
    ),
    Mutation(
        "a copy that has failed is as good as any",
        "M6",
        BALANCED,
        "test_failed_copies",
        (Edit(COPIES, "return any(each.done() and each.exception() is not None", "return any(False"),),
    ),
    Mutation(
        "an expert is given up by all ranks at once",
        "M1",
        BALANCED,
        "test_rounds_come_to_an_end",
        (Edit(ROUNDS, "    while lost := _lost(now, found):\n", "    while lost := set[int]():\n"),),
    ),
    Mutation(
        "experts that have to change places do not",
        "a plan comes to its end",
        BALANCED,
        "test_rounds_come_to_an_end",
        (Edit(ROUNDS, "return found or _chain(gets, gives, staying)", "return found"),),
    ),
    Mutation(
        "a slot that an epoch frees is filled in it",
        "M1",
        BALANCED,
        "test_rounds_come_to_an_end",
        (Edit(ROUNDS, "(now < 0) & (following < 0))[0])", "(following < 0))[-1])"),),
    ),
    Mutation(
        "a plan is read while it is written",
        "ranks follow one plan",
        BALANCED,
        "test_a_board_that_is_half_written",
        (Edit(BALANCER, "    if zlib.crc32(board[8 : 24 + 4 * int(size)]) != told:\n", "    if told is None:\n"),),
    ),
    Mutation(
        "each rank follows a plan when it likes",
        "M1",
        BALANCED,
        "test_experts_move",
        (Edit(BALANCER, "    if found != number or not 0 <", "    if not 0 <"),),
    ),
    # ---- what survivors begin with
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
        (
            Edit(
                ROUNDS, "            if gone != NOTHING:\n", "            if (now == gone).any() or gone == NOTHING:\n"
            ),
        ),
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
