"""Mutations of maps that move: what ranks tell, the version that follows, which map it means, and weights that follow
maps."""

from mutation import CPU_LOADS, ENTRIES, Edit, Mutation

EPOCHS = "src/exchange/epochs.h"
CORE = "src/core/moving.cc"
API = "src/api/moving.cc"
UNIT = "epochs_test"
VERSIONS = "Epochs.LeastOfWhatAllHaveTold"
LANES = "Moving.EachLaneSwitchesWhenAllHaveToldThere"
VOID = "Moving.WhatOneRankHasVoidIsVoidForAll"

BALANCER = "python/tokenway/balance/balancer.py"
BOARD = "python/tokenway/balance/board.py"
COPIES = "python/tokenway/balance/copies.py"
ROUNDS = "python/tokenway/balance/rounds.py"
PLANS = "python/tokenway/balance/plans.py"
WORLD = "python/tokenway/balance/world.py"
BALANCED = "py/test_balancer"
PLAYED = "py/test_balance_playing"
DOES = "test_a_group_does_what_was_played"
MOVED_EXPERTS = "python/tokenway/integrations/moved_experts.py"
PARAMETERS = "py/test_moved_experts"

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
        "ready before all copies have ended",
        "M2",
        BALANCED,
        "test_slow_copies",
        (
            Edit(
                BALANCER,
                "not each.pieces and self._beside.ended(each.number)\n",
                "not each.pieces\n",
            ),
        ),
    ),
    Mutation(
        "a copy that has failed is as good as any",
        "M6",
        BALANCED,
        "test_failed_copies",
        (Edit(COPIES, "if each.done() and each.exception()), None)", "if False), None)"),),
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
        (
            Edit(
                ROUNDS,
                "slots[rank] if now[slot] < 0 and following[slot] < 0)",
                "reversed(slots[rank]) if following[slot] < 0)",
            ),
        ),
    ),
    Mutation(
        "a plan is read while it is written",
        "ranks follow one plan",
        BALANCED,
        "test_a_board_that_is_half_written",
        (Edit(BOARD, "    if zlib.crc32(board[8 : 24 + 4 * int(size)]) != told:\n", "    if told is None:\n"),),
    ),
    Mutation(
        "each rank follows a plan when it likes",
        "M1",
        BALANCED,
        "test_experts_move",
        (Edit(BOARD, "    if found != number or not 0 <", "    if not 0 <"),),
    ),
    # ---- what is played, beside what a group does
    Mutation(
        "a map that is played comes a dispatch late",
        "a group does what was played",
        PLAYED,
        DOES,
        (Edit(WORLD, "while self.version < min(self.ready):", "while self.version + 1 < min(self.ready):"),),
    ),
    Mutation(
        "a copy is looked at in the step that begins it",
        "a group does what was played",
        PLAYED,
        "test_a_copy_is_over_a_step_later_at_the_soonest",
        (Edit(BALANCER, "ended = not begun and not each.pieces and self", "ended = not each.pieces and self"),),
    ),
    Mutation(
        "handles that are gone need their map until the next call",
        "a group does what was played",
        PLAYED,
        DOES,
        (Edit("python/tokenway/moving.py", "        self._blocks.free()", "        pass"),),
    ),
    Mutation(
        "loads of before the last plan count again",
        "plans are for what has come since",
        PLAYED,
        "test_old_loads_are_taken_out",
        (Edit(PLANS, "now - kept * before, 1 - kept, out", "now, 1, out"),),
    ),
    Mutation(
        "a plan that was given gives way to one of the rank's own",
        "a plan that is given is followed",
        BALANCED,
        "test_plans_from_elsewhere",
        (
            Edit(
                BALANCER,
                "        if self._given is not None:\n",
                "        if self._given is not None and self._every is not None:\n",
            ),
        ),
    ),
    Mutation(
        "what holds a part of a parameter keeps the old memory",
        "experts read what moves",
        PARAMETERS,
        "test_experts_move_with_all_that_is_theirs",
        (Edit(MOVED_EXPERTS, "in _tensors_in([holder, list(layers)]):", "in _tensors_in([list(layers)]):"),),
    ),
    Mutation(
        "a part of a parameter begins where the parameter does",
        "experts read what moves",
        PARAMETERS,
        "test_experts_move_with_all_that_is_theirs",
        (Edit(MOVED_EXPERTS, "flat = memory(name, index).view(-1)[at:]", "flat = memory(name, index).view(-1)"),),
    ),
    Mutation(
        "a window does not begin with what was loaded",
        "experts read what moves",
        PARAMETERS,
        "test_experts_move_with_all_that_is_theirs",
        (Edit(MOVED_EXPERTS, "memory(name, index).view(-1).copy_(bytes_)", "memory(name, index).view(-1)"),),
    ),
    Mutation(
        "experts with gaps between them are taken",
        "experts read what moves",
        PARAMETERS,
        "test_what_cannot_move",
        (Edit(MOVED_EXPERTS, "== slots and _dense(tensor)", "== slots"),),
    ),
)
