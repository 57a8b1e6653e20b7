"""Mutations of the protocol: banks, waits, publishing, leases, what ends a wait (S1 to S6)."""

from mutation import (
    CALLS,
    CHANNELS,
    CHECK,
    COMBINE,
    COMBINING,
    DISPATCH,
    GROUP,
    MAP,
    MESH,
    NOTES,
    ROW_TYPES,
    SHRINK,
    SIGNALS,
    STEP,
    TRANSPORT,
    VECTOR,
    Edit,
    Mutation,
)

PUBLISH_DISPATCH = (
    "  publish_step(t, map, at, Mode::kDispatch, note, [&](int peer) { return routing.send_counts[peer]; });\n"
)
PUBLISH_COMBINE = "  publish_step(t, map, at, Mode::kCombine, note, [&](int peer) { return counts[peer]; });\n"

BEGIN_DISPATCH = (
    "  call->at = group.backend->on_device() ? "
    "group.channels.begin_dispatch(channel) : group.channels.begin(channel);\n"
)

# The number of completed cycles: it moves on with the first dispatch after a combine.
CYCLE = (
    Edit(
        SIGNALS,
        "  constexpr int bank() const { return bank_of(step); }",
        "  int cycle = -1;\n  constexpr int bank() const { return cycle >= 0 ? cycle & 1 : bank_of(step); }",
    ),
    Edit(
        STEP,
        "t.publish(peer, map.signal(at.channel, at.bank(), ",
        "t.publish(peer, map.signal(at.channel, bank_of(at.step), ",
    ),
    Edit(STEP, "= map.signal(at.channel, at.bank(), peer);", "= map.signal(at.channel, bank_of(at.step), peer);"),
    Edit(CHANNELS, "struct Channel {\n", "struct Channel {\n  int cycle = 0;\n  bool combined = false;\n"),
    Edit(
        CALLS,
        BEGIN_DISPATCH,
        BEGIN_DISPATCH + "  if (group.channels[channel].combined) ++group.channels[channel].cycle;\n"
        "  group.channels[channel].combined = false;\n"
        "  call->at.cycle = group.channels[channel].cycle;\n",
    ),
    Edit(
        COMBINING,
        "  call.at = group.channels.begin(channel);\n",
        "  call.at = group.channels.begin(channel);\n"
        "  group.channels[channel].combined = true;\n"
        "  call.at.cycle = group.channels[channel].cycle;\n",
    ),
    Edit(
        MAP,
        "c.align(std::max({dispatch, inbox, counts, least.bank}), kPageAlignment)",
        "c.align(c.add(c.align(dispatch, kRegionAlignment), inbox), kPageAlignment)",
    ),
    Edit(
        MAP,
        "    return bank_at(channel, bank) + (static_cast<uint64_t>(token) * shape_.fan_out()",
        "    const uint64_t rows = meta_at_ + row(shape_.ranks, 0, shape_.max_tokens) * meta_bytes(shape_.top_k);\n"
        "    const uint64_t inbox_at = (rows + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment;\n"
        "    return bank_at(channel, bank) + inbox_at + (static_cast<uint64_t>(token) * shape_.fan_out()",
    ),
)

PROTOCOL = (
    Mutation(
        "one bank",
        "S1",
        "eager_peer_test",
        "EagerPeer.DispatchDispatch",
        (Edit(SIGNALS, "return static_cast<int>(step & 1);", "return static_cast<int>(step & 0);"),),
    ),
    Mutation(
        "bank chosen by the kind of step",
        "S1",
        "channels_test",
        "Channels.EveryLegalOrder",
        (
            Edit(
                SIGNALS,
                "  constexpr int bank() const { return bank_of(step); }",
                "  int kind = -1;\n  constexpr int bank() const { return kind >= 0 ? kind : bank_of(step); }",
            ),
            Edit(
                CALLS,
                BEGIN_DISPATCH,
                BEGIN_DISPATCH + "  call->at.kind = 0;\n",
            ),
            Edit(
                COMBINING,
                "  call.at = group.channels.begin(channel);\n",
                "  call.at = group.channels.begin(channel);\n  call.at.kind = 1;\n",
            ),
        ),
    ),
    Mutation(
        # Rows and inbox have places of their own, and signals go by the step: only the bank is wrong.
        "bank chosen by the dispatch and combine cycle",
        "S1",
        "channels_test",
        "Channels.CombineAfterCombine",
        CYCLE,
    ),
    Mutation(
        "bank chosen by the dispatch and combine cycle, dispatches",
        "S1",
        "channels_test",
        "Channels.DispatchAfterDispatch",
        CYCLE,
    ),
    Mutation(
        "one shared counting signal for both phases",
        "S1, S2",
        "eager_peer_test",
        "EagerPeer.EveryWriterHasASignalOfItsOwn",
        (
            Edit(
                TRANSPORT,
                "  at(peer, offset).store(pack(signal), std::memory_order_seq_cst);\n",
                "  at(peer, offset).store(pack(signal), std::memory_order_seq_cst);\n"
                "  at(peer, 8).fetch_add(1, std::memory_order_seq_cst);\n",
            ),
            Edit(
                TRANSPORT,
                "  if (spin(offset, step, deadline)) return Wake::kArrived;\n",
                "  if (at(me_, 8).load() >= static_cast<uint64_t>(ranks()) * step) return Wake::kArrived;\n"
                "  if (spin(offset, step, deadline)) return Wake::kArrived;\n",
            ),
        ),
    ),
    Mutation(
        "sending ahead before the own wait ended",
        "S2",
        "errors_test",
        "Errors.NothingIsSentWhileAStepIsPending",
        (
            Edit(
                CALLS,
                "  if (handle.pending == Pending::kNone) return {};\n  const char* const names[]",
                "  return {};\n  const char* const names[]",
            ),
        ),
    ),
    Mutation(
        "refused step not waited out",
        "S2",
        "errors_test",
        "Errors.RefusedStepIsWaitedOut:Errors.RefusingRankDoesNotRunAhead",
        (
            Edit(
                CALLS,
                "  if (!state.draining) return {};\n",
                "  state.draining = false;\n  if (!state.draining) return {};\n",
            ),
        ),
    ),
    Mutation(
        "combine publishes before it has read the rows",
        "S3",
        "eager_peer_test",
        "EagerPeer.CombineFromTheView",
        (
            Edit(COMBINE, PUBLISH_COMBINE, ""),
            Edit(COMBINE, "  int64_t row = 0;\n", "  int64_t row = 0;\n" + PUBLISH_COMBINE),
        ),
    ),
    Mutation(
        "combine publishes to each peer when that peer's rows are done",
        "S3",
        "eager_peer_test",
        "EagerPeer.CombineFromTheView",
        (
            Edit(COMBINE, PUBLISH_COMBINE, ""),
            Edit(
                COMBINE,
                " partial, shape.combine_bytes);\n    }\n",
                " partial, shape.combine_bytes);\n    }\n    t.flush();\n"
                "    t.publish(source, map.signal(at.channel, at.bank(), t.rank()),\n"
                "              {at.step, Mode::kCombine, static_cast<uint32_t>(counts[source])}, note);\n",
            ),
        ),
    ),
    Mutation(
        "own rows summed from the view, after publishing",
        "S3",
        "channels_test",
        "Channels.FastPeerOverwritesTheView",
        (Edit(CHECK, "call->apart = !call->in_window && !overlap;", "call->apart = !overlap;"),),
    ),
    Mutation(
        "dispatch publishes before the rows",
        "S4",
        "eager_peer_test",
        "EagerPeer.DispatchDispatch",
        (
            Edit(DISPATCH, PUBLISH_DISPATCH, ""),
            Edit(
                DISPATCH,
                "  const size_t ids_bytes = sizeof(int32_t) * shape.top_k;\n",
                PUBLISH_DISPATCH + "  const size_t ids_bytes = sizeof(int32_t) * shape.top_k;\n",
            ),
        ),
    ),
    Mutation(
        "no flush before publishing",
        "S4",
        "eager_peer_test",
        "EagerPeer.DispatchDispatch",
        (Edit(STEP, "  t.flush();\n", ""),),
    ),
    Mutation(
        "channels depend on when a refusal was completed",
        "S5",
        "errors_test",
        "Errors.RefusalLeavesChannelsAlike",
        (Edit(CALLS, "if (send_only || learns_late(group)) {", "if (learns_late(group)) {"),),
    ),
    Mutation(
        "a held channel leased again",
        "S5",
        "channels_test",
        "Channels.HeldChannelsAreLeftAlone",
        (Edit(CHANNELS, "      if (channels_[channel].holder != nullptr) continue;\n", ""),),
    ),
    Mutation(
        "refusal not published",
        "S2",
        "errors_test",
        "Errors.RefusedDispatchForgetsTheEarlierOne",
        (
            Edit(
                CALLS,
                "  TW_RETURN_IF_FAILED(group.backend->send_refusal(at, refusal));\n",
                "",
            ),
        ),
    ),
    Mutation(
        "going on after a timeout",
        "S6",
        "sticky_test",
        "Sticky.LaterCallsSendNothing",
        (
            Edit(
                GROUP,
                "Status check_usable(twGroup& group, twPhase_t phase) {\n",
                "Status check_usable(twGroup& group, twPhase_t phase) {\n  if (group.context.me >= 0) return {};\n",
            ),
        ),
    ),
    Mutation(
        "peers not told of an error",
        "S6",
        "sticky_test",
        "Sticky.LaterCallsSendNothing",
        (Edit(GROUP, "  announce(group, culprit);\n", ""),),
    ),
    Mutation(
        "a wait does not look for abort signals",
        "S6",
        "sticky_test",
        "Sticky.WaitEndsWhenPeersGiveUp",
        (Edit(TRANSPORT, "      if (now >= std::min(given_up, deadline)) return Wake::kAborted;\n", ""),),
    ),
    Mutation(
        "a wait sees the death of one rank only",
        "S6",
        "sticky_test",
        "Sticky.DeathBehindASlowRank",
        (
            Edit(
                TRANSPORT,
                "    if (bootstrap_->alive(members_[rank])) continue;\n",
                "    if (rank != peer || bootstrap_->alive(members_[rank])) continue;\n",
            ),
        ),
    ),
    Mutation(
        "survivors end after one calm round",
        "S6",
        "shrink_test",
        "Shrink.LaterThanThePatienceOfOne*",
        (Edit(SHRINK, "if (calm && all_were_calm) return", "if (calm) return"),),
    ),
    Mutation(
        "survivors are not told who was silent",
        "S6",
        "sides_test",
        "Meetings/Sides.HalfIsGivenUp/*",
        (
            Edit(
                SHRINK, "if (static_cast<uint8_t>(theirs[r]) != sent[r])", "if ((theirs[r] & kOut) != (sent[r] & kOut))"
            ),
            Edit(SHRINK, "known_[r] |= static_cast<uint8_t>(theirs[r]);", "known_[r] |= theirs[r] & kOut;"),
        ),
    ),
    Mutation(
        "a side that does not go on tells nobody",
        "S6",
        "sides_test",
        "Meetings/Sides.HalfIsGivenUp/*",
        (Edit(SHRINK, "    leave_group(group_);\n    group_.arena->excluded", "    group_.arena->excluded"),),
    ),
    Mutation(
        "survivors wait for those who gave the group up",
        "S6",
        "shrink_test",
        "Patient.TwoAborters",
        (Edit(SHRINK, "return signal.left || signal.went_on || !boot", "return signal.went_on || !boot"),),
    ),
    Mutation(
        "survivors wait on for one that has left meanwhile",
        "S6",
        "shrink_test",
        "LeftWaiting.ForOneThatGivesUp",
        (Edit(SHRINK, "return !is_waited_for(group_.rank_of(member));", "return group_.rank_of(member) < 0;"),),
    ),
    Mutation(
        "who is left out does not hear that the others go on",
        "S6",
        "shrink_test",
        "LeftWaiting.OneThatOthersGaveUpForAnotherReason",
        (Edit(SHRINK, "  if (!all) leave_group(group, true);\n", ""),),
    ),
    Mutation(
        "survivors do not hear whom an error blames",
        "S6",
        "shrink_test",
        "LeftWaiting.ForOneThatAnErrorBlames",
        (Edit(SHRINK, "  bool is_waited_for(int rank) {\n    learn();\n", "  bool is_waited_for(int rank) {\n"),),
    ),
    Mutation(
        "a rank that destroys a broken group tells nobody",
        "S6",
        "shrink_test",
        "LeftWaiting.ForOneThatDestroysABrokenGroup",
        (
            Edit(GROUP, "    opening.give(group->members, tags);  // to peers", "    // to peers"),
            Edit(GROUP, "    close_quietly(*group);\n    return stopped ?", "    return stopped ?"),
        ),
    ),
    Mutation(
        "a post waits for a meeting",
        "S6",
        "mesh_test",
        "Mesh.PostsPassByAMeetingThatWaits",
        (
            Edit(
                MESH,
                "    const std::lock_guard lock(connections_mutex_);\n    peers_[peer].connection.queue(kPostTag | tag",
                "    const std::lock_guard meeting(meeting_mutex_);\n"
                "    const std::lock_guard lock(connections_mutex_);\n"
                "    peers_[peer].connection.queue(kPostTag | tag",
            ),
            Edit(MESH, "    one_at_a_time.unlock();", "    "),
            Edit(MESH, "    one_at_a_time.lock();\n", ""),
        ),
    ),
    Mutation(
        "a second rank that gives up tells nobody",
        "S6",
        "shrink_test",
        "Patient.ThreeAbortersOfFour",
        (Edit(GROUP, "    leave_group(group);  // finished by", "    // finished by"),),
    ),
    Mutation(
        "a shrunk group waits out its timeout",
        "S6",
        "shrink_test",
        "Patient.PendingOperationsEnd",
        (Edit(CALLS, "return group.is_sticky() ? now : now +", "return now +"),),
    ),
    Mutation(
        "steps compared without the wrap",
        "S2",
        "sticky_test",
        "Sticky.TimeoutAtTheWrap",
        (Edit(SIGNALS, "return static_cast<int32_t>(seen - step) >= 0;", "return seen >= step;"),),
    ),
    Mutation(
        "signals born at step 0",
        "S2",
        "sticky_test",
        "Sticky.TimeoutAtTheWrap",
        (Edit(STEP, "pack({first_step, Mode::kNone, 0})", "pack({0, Mode::kNone, 0})"),),
    ),
    Mutation(
        "rows streamed without their last bytes",
        "S4",
        "streaming_test",
        "Streaming.EveryOffsetAndLength",
        (Edit(VECTOR, "  std::memcpy(out, in, n);\n}\n\nvoid stream_fence", "}\n\nvoid stream_fence"),),
    ),
    Mutation(
        "a view lies in the other bank than its dispatch",
        "S1",
        "device_side_test",
        "PretendedGroup.ViewsLieInTheBankOfTheLease",
        (Edit(CHANNELS, "    channels_[channel].second = !channels_[channel].second;\n", ""),),
    ),
    Mutation(
        "a lease goes on with the banks of the one before",
        "S1",
        "device_side_test",
        "PretendedGroup.ViewsLieInTheBankOfTheLease",
        (Edit(CHANNELS, "    state.second = state.refused =", "    state.refused ="),),
    ),
    Mutation(
        "calls go on after a device has found an error",
        "S6",
        "device_side_test",
        "PretendedGroup.NewsOfTheDevice",
        (Edit(GROUP, "  poll_device(group);\n  if (group.is_sticky()) {\n", "  if (group.is_sticky()) {\n"),),
    ),
    Mutation(
        "a dispatch takes as many SMs as the group, whatever it says itself",
        "S8",
        "call_settings_test",
        "PretendedGroup.CallsHaveLimitsOfTheirOwn",
        (
            Edit(
                CHECK,
                "  call->sm_limit = input.sm_limit;\n  for (int q = 0; q < call->rows.payloads; ++q) {\n",
                "  for (int q = 0; q < call->rows.payloads; ++q) {\n",
            ),
        ),
    ),
    Mutation(
        "ranks that name other rows read each other's all the same",
        "S10",
        "row_types_test",
        "RowTypes.RanksThatDifferAreTold",
        (Edit(NOTES, "return digest ^ rows;", "return digest ^ (rows & 0);"),),
    ),
    Mutation(
        "rows of another type lie at the places of the group's own",
        "S10",
        "layout_test",
        "Layout.OtherRowsMoveNothingOutsideABank",
        (Edit(MAP, "bytes[q] : 0;\n    map.place_payloads();\n", "bytes[q] : 0;\n"),),
    ),
    Mutation(
        "growth left out of the notes",
        "S10",
        "growth_test",
        "Growth.CallsOfAnotherGrowthAreRefused",
        (Edit(ROW_TYPES, "mix_rows(slots ? kSlotsDigest : 0, group.context.growth)", "slots ? kSlotsDigest : 0"),),
    ),
    Mutation(
        "the mode of a call left out of the notes",
        "S10",
        "modes_test",
        "Modes.RanksThatDifferAreTold",
        (Edit(ROW_TYPES, "mix_rows(slots ? kSlotsDigest : 0, group.context.growth)", "group.context.growth"),),
    ),
    Mutation(
        "signals that move when a group grows",
        "S2",
        "growth_test",
        "Growth.AMapKeepsWhatOutlivesSteps:Growth.HandlesGoOnAndNewOnesAreLarger",
        (Edit(MAP, "    grown.first_bytes_ = first_bytes_;\n", ""),),
    ),
    Mutation(
        "new banks over the old ones",
        "S2",
        "growth_test",
        "Growth.AMapKeepsWhatOutlivesSteps",
        (Edit(MAP, "c.align(bytes_, kGrowthAlignment)", "channels_at_"),),
    ),
    Mutation(
        "a handle of before a growth takes all",
        "S10",
        "growth_test",
        "Growth.AHandleKeepsItsSize",
        (
            Edit(
                CHECK,
                "  if (call->bound > handle.max_tokens && ",
                "  if (call->bound > shape.max_tokens && ",
            ),
        ),
    ),
)
