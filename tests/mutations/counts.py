"""Mutations of the exchange of counts: the step, what it brings, and what must follow from it."""

from mutation import BACKEND, CALLS, COUNTS_H, CPU, ENTRIES, LAYOUT_API, LAYOUT_H, STEP, Edit, Mutation

PUBLISH = "  publish_step(t, map, at, Mode::kCounts, note, [](int) { return 0; });\n"
AWAIT = (
    "    const StepEnd end =\n"
    "        await_step(transport_, context_.map, call.at, Mode::kCounts, note_of(call, handle), deadline, "
    "counts_.data());\n"
)

COUNTS = (
    Mutation(
        "counts published before they are written",
        "S4",
        "eager_peer_test",
        "EagerPeer.Counts",
        (
            Edit(COUNTS_H, PUBLISH, ""),
            Edit(
                COUNTS_H,
                "  const Shape& shape = map.shape();\n  const std::vector",
                PUBLISH + "  const Shape& shape = map.shape();\n  const std::vector",
            ),
        ),
    ),
    Mutation(
        "counts written to the other bank",
        "S1",
        "eager_peer_test",
        "EagerPeer.Counts",
        (
            Edit(
                COUNTS_H,
                "map.counts(at.channel, at.bank(), t.rank())",
                "map.counts(at.channel, 1 - at.bank(), t.rank())",
            ),
        ),
    ),
    Mutation(
        "counts of the step before",
        "S1",
        "eager_peer_test",
        "EagerPeer.Counts",
        (Edit(COUNTS_H, "map.counts(at.channel, at.bank(), source)", "map.counts(at.channel, 1 - at.bank(), source)"),),
    ),
    Mutation(
        "counts taken without a wait",
        "S4",
        "counts_test",
        "Counts.TimeoutNamesTheLateRank",
        (Edit(CPU, AWAIT, "    (void)deadline;\n    const StepEnd end;\n"),),
    ),
    Mutation(
        "counts taken from the signal of another call",
        "S5",
        "counts_test",
        "Counts.CallMismatch",
        (Edit(CPU, AWAIT, AWAIT.replace("counts_.data()", "counts_.data(), true")),),
    ),
    Mutation(
        "counts of an earlier routing",
        "S9",
        "counts_test",
        "Counts.UpdateForgetsThem",
        (Edit(ENTRIES, "  handle->counts.exchanged = false;\n", ""),),
    ),
    Mutation(
        "counts that failed are taken for known",
        "S6",
        "counts_test",
        "Counts.RefusalOfABlockingCallFreesTheChannel",
        (
            Edit(
                CALLS,
                "    handle.counts.exchanged = false;\n    part_leases(group, handle);  // no dispatch may follow\n",
                "    handle.counts.exchanged = true;\n    part_leases(group, handle);\n",
            ),
        ),
    ),
    Mutation(
        "a refused exchange of counts is not waited out",
        "S2",
        "counts_test",
        "Counts.RefusedStepIsWaitedOut",
        (Edit(CALLS, "  TW_RETURN_IF_FAILED(drain(group, channel, twPhaseCounts, call.stream));\n", ""),),
    ),
    Mutation(
        "a refused exchange of counts is told to nobody",
        "S2",
        "counts_test",
        "Counts.RefusalLeavesChannelsAlike",
        (
            Edit(
                ENTRIES,
                "return tw::refuse_counts(*group, known, input.lane, input.send_only == 1, input.stream, ",
                "return (",
            ),
        ),
    ),
    Mutation(
        "channels depend on when a refused exchange of counts was completed",
        "S5",
        "counts_test",
        "Counts.RefusalLeavesChannelsAlike",
        (Edit(CALLS, "  if (send_only && !learns_late(group)) hold(group, *handle, channel);\n", ""),),
    ),
    Mutation(
        "counts keep their channel",
        "S5",
        "counts_test",
        "Counts.GiveTheirChannelBack",
        (
            Edit(
                CALLS,
                "  if (end.code == twSuccess || !call.send_only) give_back(group, handle);\n",
                "  if (!call.send_only) give_back(group, handle);\n",
            ),
        ),
    ),
    Mutation(
        "rows that were not announced",
        "S9",
        "counts_test",
        "Counts.RowsThatWereNotAnnounced",
        (
            Edit(
                CPU,
                "      if (received.counts[peer] == handle.counts.at(shape(), peer, context_.me)) continue;\n",
                "      continue;\n",
            ),
        ),
    ),
    Mutation(
        "only the rank that lacks room refuses",
        "S9",
        "counts_test",
        "Counts.OverflowIsRefusedAlike",
        (
            Edit(
                COUNTS_H,
                "    if (wanted > room && overflow.rank < 0)",
                "    if (wanted > room && to == t.rank())",
            ),
        ),
    ),
    Mutation(
        "rows begin behind those that were dropped",
        "S9",
        "counts_test",
        "Counts.DroppedRows",
        (Edit(COUNTS_H, "      row += rows;\n", "      row = wanted;\n"),),
    ),
    Mutation(
        "rows that were dropped are sent",
        "S9",
        "counts_test",
        "Counts.DroppedRows",
        (Edit(BACKEND, "return shape.exact() ? &counts.at(shape, me, 0) : routing", "return routing"),),
    ),
    Mutation(
        "low latency leaves out the rows that were dropped",
        "S9",
        "modes_test",
        "Modes.LowLatencyDropsNothing",
        (Edit(BACKEND, "return shape.exact() ? &counts.at(", "return counts.exchanged ? &counts.at("),),
    ),
    Mutation(
        "a limit that an exchange of counts names holds for rows alone that are dropped",
        "S9",
        "call_settings_test",
        "CallSettings.OverflowFollowsTheCall",
        (
            Edit(
                COUNTS_H,
                "    if (wanted > room && overflow.rank < 0)",
                "    if (wanted > shape.recv_rows && overflow.rank < 0)",
            ),
        ),
    ),
    Mutation(
        "ranks with other limits of received rows read each other's counts all the same",
        "S10",
        "call_settings_test",
        "CallSettings.RoomsThatDifferAreTold",
        (
            Edit(
                CPU,
                "collective_note(static_cast<uint32_t>(call.room), mix_rows(",
                "collective_note(0, mix_rows(",
            ),
        ),
    ),
    Mutation(
        "limits of counts change under a captured dispatch",
        "S10",
        "call_settings_test",
        "PretendedExactGroup.GraphsKeepTheLimitsOfTheirHandles",
        (Edit("src/api/counts.cc", "  TW_RETURN_IF_FAILED(check_captured(group, handle, *call));\n", ""),),
    ),
    Mutation(
        "counts that are exchanged again keep the sizes of those before",
        "S9",
        "call_settings_test",
        "PretendedExactGroup.OutputsHaveTheRoomOfTheCounts",
        (
            Edit(
                CALLS,
                "now.again && now.room == before.room && now.alignment == before.alignment;\n",
                "now.again;\n",
            ),
        ),
    ),
    Mutation(
        "all experts' counts go to every rank",
        "S9",
        "counts_test",
        "Counts.UnevenRanks",
        (Edit(COUNTS_H, "      if (placement.rank[expert] == rank) told", "      told"),),
    ),
    Mutation(
        "the last expert's rows are not told",
        "S9",
        "counts_test",
        "Counts.UnevenRanks",
        (
            Edit(
                CPU,
                "handle.counts.experts + context_.local_experts)",
                "handle.counts.experts + context_.local_experts - 1)",
            ),
        ),
    ),
    Mutation(
        "a layout counts logical experts",
        "S9",
        "routing_layout_test",
        "RoutingLayout.PhysicalExperts",
        (Edit(LAYOUT_API, "  if (!group.maps.empty()) {\n", "  if (group.maps.size() > 1) {\n"),),
    ),
    Mutation(
        "a layout leaves what was in its memory",
        "S9",
        "routing_layout_test",
        "RoutingLayout.ByHand",
        (Edit(LAYOUT_H, "  std::fill_n(layout.token_in_rank, all, uint8_t{0});\n", "  (void)all;\n"),),
    ),
    Mutation(
        "ready when the first counts have come",
        "S4",
        "counts_ready_test",
        "CountsReady.OnceAllHaveCome",
        (Edit(STEP, "    if (waited.wake != Wake::kArrived) return true;\n", "    return true;\n"),),
    ),
    Mutation(
        "asking for counts waits",
        "S6",
        "counts_ready_test",
        "CountsReady.OnceAllHaveCome",
        (
            Edit(
                CALLS, "timeout_ms < 0 ? patience : std::min(patience, asked);", "asked < patience ? patience : asked;"
            ),
        ),
    ),
    Mutation(
        "asking for counts never ends",
        "S6",
        "counts_ready_test",
        "CountsReady.LateRank",
        (Edit(CALLS, "  handle.counts_deadline = patience;\n", ""),),
    ),
    Mutation(
        "whose counts are late is waited for once more",
        "S6",
        "counts_ready_test",
        "CountsReady.LateRank",
        (
            Edit(
                CALLS,
                "deadline = std::min(deadline_of(group), handle.counts_deadline);\n",
                "deadline = deadline_of(group);\n",
            ),
        ),
    ),
    Mutation(
        "asking for counts gives their channel back",
        "S5",
        "counts_ready_test",
        "CountsReady.ChangesNothing",
        (
            Edit(
                CALLS,
                "  *ready = *ready || std::chrono::steady_clock::now() >= patience;\n",
                "  *ready = *ready || std::chrono::steady_clock::now() >= patience;\n"
                "  if (*ready) give_back(group, handle);\n",
            ),
        ),
    ),
)
