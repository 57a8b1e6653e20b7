"""What run.py breaks: the bug, the invariant that it breaks, the test that must fail, and the edits.

An edit's old text occurs exactly once in its file; when the library's code moves, run.py says which text is gone.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    file: str
    old: str  # occurs exactly once
    new: str


@dataclass(frozen=True)
class Mutation:
    name: str
    invariant: str
    unit: str  # tests/cc/<unit>.cc, which holds the test
    test: str  # a GoogleTest filter
    edits: tuple[Edit, ...]


WORDS = "src/exchange/words.h"
STEP = "src/exchange/step.h"
DISPATCH = "src/exchange/dispatch.h"
COMBINE = "src/exchange/combine.h"
ROUTING = "src/exchange/routing.h"
SUMMATION = "src/exchange/summation.h"
CALLS = "src/core/calls.cc"
SHRINK = "src/core/shrink.cc"
GROUP = "src/core/group.cc"
LANES = "src/core/lanes.h"
TRANSPORT_H = "src/cpu/transport.h"
TRANSPORT = "src/cpu/transport.cc"
WINDOW = "src/cpu/window.cc"
VECTOR = "src/cpu/vector.cc"
CHECK = "src/api/check.cc"
MAP = "src/layout/window_map.h"

PUBLISH_DISPATCH = (
    "  publish_step(t, map, at, Mode::kDispatch, bound, [&](int peer) { return routing.send_counts[peer]; });\n"
)
PUBLISH_COMBINE = (
    "  publish_step(t, map, at, Mode::kCombine, bound, [&](int peer) { return received.counts[peer]; });\n"
)

# The number of completed cycles: it moves on with the first dispatch after a combine.
CYCLE = (
    Edit(
        WORDS,
        "  constexpr int bank() const { return bank_of(step); }",
        "  int cycle = -1;\n  constexpr int bank() const { return cycle >= 0 ? cycle & 1 : bank_of(step); }",
    ),
    Edit(STEP, "t.publish(peer, map.word(at.lane, at.bank(), ", "t.publish(peer, map.word(at.lane, bank_of(at.step), "),
    Edit(STEP, "= map.word(at.lane, at.bank(), peer);", "= map.word(at.lane, bank_of(at.step), peer);"),
    Edit(LANES, "struct Lane {\n", "struct Lane {\n  int cycle = 0;\n  bool combined = false;\n"),
    Edit(
        CALLS,
        "  call->at = group.lanes.begin(lane);\n",
        "  call->at = group.lanes.begin(lane);\n"
        "  if (group.lanes[lane].combined) ++group.lanes[lane].cycle;\n"
        "  group.lanes[lane].combined = false;\n"
        "  call->at.cycle = group.lanes[lane].cycle;\n",
    ),
    Edit(
        CALLS,
        "  call.at = group.lanes.begin(lane);\n",
        "  call.at = group.lanes.begin(lane);\n"
        "  group.lanes[lane].combined = true;\n"
        "  call.at.cycle = group.lanes[lane].cycle;\n",
    ),
    Edit(
        MAP,
        "c.align(dispatch > inbox ? dispatch : inbox, kPageAlignment)",
        "c.align(c.add(c.align(dispatch, kRegionAlignment), inbox), kPageAlignment)",
    ),
    Edit(
        MAP,
        "    return bank_at(lane, bank) + (static_cast<uint64_t>(token)",
        "    const uint64_t rows = meta_at_ + row(shape_.ranks, 0, shape_.max_tokens) * meta_bytes(shape_.top_k);\n"
        "    const uint64_t inbox_at = (rows + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment;\n"
        "    return bank_at(lane, bank) + inbox_at + (static_cast<uint64_t>(token)",
    ),
)

MUTATIONS = (
    Mutation(
        "one bank",
        "S1",
        "eager_peer_test",
        "EagerPeer.DispatchDispatch",
        (Edit(WORDS, "return static_cast<int>(step & 1);", "return static_cast<int>(step & 0);"),),
    ),
    Mutation(
        "bank chosen by the kind of step",
        "S1",
        "lanes_test",
        "Lanes.EveryLegalOrder",
        (
            Edit(
                WORDS,
                "  constexpr int bank() const { return bank_of(step); }",
                "  int kind = -1;\n  constexpr int bank() const { return kind >= 0 ? kind : bank_of(step); }",
            ),
            Edit(
                CALLS,
                "  call->at = group.lanes.begin(lane);\n",
                "  call->at = group.lanes.begin(lane);\n  call->at.kind = 0;\n",
            ),
            Edit(
                CALLS,
                "  call.at = group.lanes.begin(lane);\n",
                "  call.at = group.lanes.begin(lane);\n  call.at.kind = 1;\n",
            ),
        ),
    ),
    Mutation(
        # With places of their own for rows and inbox, and words by the step: only the bank is wrong.
        "bank chosen by the dispatch and combine cycle",
        "S1",
        "lanes_test",
        "Lanes.CombineAfterCombine",
        CYCLE,
    ),
    Mutation(
        "bank chosen by the dispatch and combine cycle, dispatches",
        "S1",
        "lanes_test",
        "Lanes.DispatchAfterDispatch",
        CYCLE,
    ),
    Mutation(
        "one shared counting word for both phases",
        "S1, S2",
        "eager_peer_test",
        "EagerPeer.EveryWriterHasAWordOfItsOwn",
        (
            Edit(
                TRANSPORT,
                "  at(peer, offset).store(pack(word), std::memory_order_seq_cst);\n",
                "  at(peer, offset).store(pack(word), std::memory_order_seq_cst);\n"
                "  at(peer, 8).fetch_add(1, std::memory_order_seq_cst);\n",
            ),
            Edit(
                TRANSPORT,
                "  if (spin(offset, step)) return Wake::kArrived;\n",
                "  if (at(me_, 8).load() >= static_cast<uint64_t>(ranks()) * step) return Wake::kArrived;\n"
                "  if (spin(offset, step)) return Wake::kArrived;\n",
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
                "  if (handle.pending == Pending::kNone) return {};\n  return fail(",
                "  return {};\n  return fail(",
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
                "            shape.combine_bytes);\n    }\n",
                "            shape.combine_bytes);\n    }\n    t.flush();\n"
                "    t.publish(source, map.word(at.lane, at.bank(), t.rank()),\n"
                "              {at.step, Mode::kCombine, static_cast<uint32_t>(received.counts[source])}, bound);\n",
            ),
        ),
    ),
    Mutation(
        "own rows summed from the view, after publishing",
        "S3",
        "lanes_test",
        "Lanes.FastPeerOverwritesTheView",
        (Edit(CHECK, "!group.backend->in_window(input.rows.data) &&", "true &&"),),
    ),
    Mutation(
        "own rows summed where sums overwrite them",
        "S9",
        "exchange_test",
        "Exchange.SumsOverTheirRows",
        (Edit(CHECK, "return std::less_equal<>()(a.end, b.begin) ||", "return true ||"),),
    ),
    Mutation(
        "a stale pointer names its successor",
        "pointers",
        "arguments_test",
        "Arguments.StaleObjectsAreNotTheirSuccessors",
        (Edit("src/core/quarantine.h", "constexpr size_t kKept = 256;", "constexpr size_t kKept = 0;"),),
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
        "lanes depend on when a refusal was completed",
        "S5",
        "errors_test",
        "Errors.RefusalLeavesLanesAlike",
        (Edit(CALLS, "    if (send_only) hold(group, *handle, lane);\n", ""),),
    ),
    Mutation(
        "a held lane leased again",
        "S5",
        "lanes_test",
        "Lanes.HeldLanesAreLeftAlone",
        (Edit(LANES, "      if (lanes_[lane].holder != nullptr) continue;\n", ""),),
    ),
    Mutation(
        "refusal not published",
        "S2",
        "errors_test",
        "Errors.RefusedDispatchForgetsTheEarlierOne",
        (Edit(CALLS, "  group.backend->send_refusal(at);\n", ""),),
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
        "a wait does not look for abort words",
        "S6",
        "sticky_test",
        "Sticky.WaitEndsWhenPeersGiveUp",
        (Edit(TRANSPORT, "    if (find_abort().kind != 0) return Wake::kAborted;\n", ""),),
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
        "survivors wait for those who gave the group up",
        "S6",
        "shrink_test",
        "Shrink.TwoAborters",
        (Edit(SHRINK, "if (group_.backend->abort_of(rank).left || !boot", "if (!boot"),),
    ),
    Mutation(
        "a second rank that gives up tells nobody",
        "S6",
        "shrink_test",
        "Shrink.ThreeAbortersOfFour",
        (Edit(GROUP, "    announce(group, record);\n", ""),),
    ),
    Mutation(
        "a shrunk group waits out its timeout",
        "S6",
        "shrink_test",
        "Shrink.PendingOperationsEnd",
        (Edit(CALLS, "return group.is_sticky() ? now : now +", "return now +"),),
    ),
    Mutation(
        "steps compared without the wrap",
        "S2",
        "sticky_test",
        "Sticky.TimeoutAtTheWrap",
        (Edit(WORDS, "return static_cast<int32_t>(seen - step) >= 0;", "return seen >= step;"),),
    ),
    Mutation(
        "words born at step 0",
        "S2",
        "sticky_test",
        "Sticky.TimeoutAtTheWrap",
        (Edit(WINDOW, "pack({context.first_step, Mode::kNone, 0})", "pack({0, Mode::kNone, 0})"),),
    ),
    Mutation(
        "slots by chance",
        "S9",
        "routing_test",
        "Routing.*",
        (Edit(ROUTING, "routing->send_counts[mine[i].rank]++;", "routing->send_counts[mine[i].rank]++ ^ 1;"),),
    ),
    Mutation(
        "a rank twice for one token",
        "S9",
        "routing_test",
        "Routing.*",
        (Edit(ROUTING, "      if (at > 0 && mine[at - 1].rank == rank) continue;\n", ""),),
    ),
    Mutation(
        "ranks in the order of k",
        "S9",
        "routing_test",
        "Routing.*",
        (Edit(ROUTING, "      while (at > 0 && mine[at - 1].rank > rank) --at;\n", ""),),
    ),
    Mutation(
        "partials summed over ranks descending",
        "S9",
        "exchange_test",
        "Exchange.LayoutsWeightingsTypes",
        (Edit(COMBINE, "      rows[position] = t.local(", "      rows[count - 1 - position] = t.local("),),
    ),
    Mutation(
        "own partial not rounded",
        "S9",
        "exchange_test",
        "Exchange.LayoutsWeightingsTypes",
        (
            # The rank's own rows go around the wire type: kept as float32 until the sum.
            Edit(
                COMBINE,
                "  int64_t row = 0;\n",
                "  int64_t row = 0;\n  auto& kept = unrounded[t.local(0)];\n  kept.clear();\n",
            ),
            Edit(
                COMBINE,
                "      t.put(source, map.inbox(",
                "      if (source == t.rank() && types.to == twBfloat16) {\n"
                "        auto& wide = kept[meta.header->token];\n"
                "        wide.resize(types.elements);\n"
                "        sum(reinterpret_cast<std::byte*>(wide.data()), terms.rows,\n"
                "            types.weighted ? terms.weights : nullptr, terms.count,\n"
                "            RowTypes{types.from, twFloat32, types.elements, types.weighted});\n"
                "      }\n"
                "      t.put(source, map.inbox(",
            ),
            Edit(
                COMBINE,
                "    sum(out + token * out_stride, rows, nullptr, count, types);\n",
                "    sum(out + token * out_stride, rows, nullptr, count, types);\n"
                "    if (types.from != twBfloat16 || types.to != twFloat32) continue;\n"
                "    if (!unrounded[t.local(0)].contains(token)) continue;\n"
                "    for (int64_t i = 0; i < types.elements; ++i) {\n"
                "      float total = 0;\n"
                "      for (int32_t position = 0; position < count; ++position) {\n"
                "        const bool own = routing.destinations[routing.first[token] + position].rank == t.rank();\n"
                "        const uint32_t bits = static_cast<const uint16_t*>(rows[position])[i];\n"
                "        const float term = own ? unrounded[t.local(0)][token][i] : std::bit_cast<float>(bits << 16);\n"
                "        total = position == 0 ? term : total + term;\n"
                "      }\n"
                "      reinterpret_cast<float*>(out + token * out_stride)[i] = total;\n"
                "    }\n",
            ),
            Edit(
                COMBINE,
                "// How rows are typed on their way.\n",
                "inline std::map<const void*, std::map<int, std::vector<float>>> unrounded;\n\n"
                "// How rows are typed on their way.\n",
            ),
            Edit(
                COMBINE,
                '#include "exchange/routing.h"\n',
                '#include <map>\n#include <vector>\n\n#include "exchange/routing.h"\n',
            ),
        ),
    ),
    Mutation(
        "sums started from 0",
        "S9",
        "summation_test",
        "Summation.StartsFromTheFirstTerm",
        (
            Edit(
                SUMMATION,
                "float value = kFirst ? term(0, i) : sum[i] + term(0, i);",
                "float value = (kFirst ? 0.0f : sum[i]) + term(0, i);",
            ),
        ),
    ),
    Mutation(
        "ties rounded up instead of to even",
        "S9",
        "summation_test",
        "Summation.NarrowBf16",
        (Edit(SUMMATION, "(bits + 0x7fffu + (bits >> 16 & 1u)) >> 16", "(bits + 0x8000u) >> 16"),),
    ),
    Mutation(
        "banks placed by the bound",
        "S10",
        "layout_test",
        "Layout.BoundMovesNothingOutsideABank",
        (
            Edit(
                MAP,
                "    return bank_at(lane, bank) + payload_at_[q]",
                "    const uint64_t bank_bytes = bank_bytes_ / shape_.max_tokens * bound;\n"
                "    return lane_at(lane) + banks_at_ + bank_bytes * bank + payload_at_[q]",
            ),
            Edit(
                MAP,
                "    return bank_at(lane, bank) + meta_at_",
                "    const uint64_t bank_bytes = bank_bytes_ / shape_.max_tokens * bound;\n"
                "    return lane_at(lane) + banks_at_ + bank_bytes * bank + meta_at_",
            ),
        ),
    ),
    Mutation(
        "lanes placed by the bound",
        "S10",
        "layout_test",
        "Layout.BoundMovesNothingOutsideABank",
        (
            Edit(
                MAP,
                "    return bank_at(lane, bank) + payload_at_[q]",
                "    const uint64_t lane_bytes = lane_bytes_ / shape_.max_tokens * bound;\n"
                "    return lanes_at_ + lane_bytes * lane + banks_at_ + bank_bytes_ * bank + payload_at_[q]",
            ),
            Edit(
                MAP,
                "    return bank_at(lane, bank) + meta_at_",
                "    const uint64_t lane_bytes = lane_bytes_ / shape_.max_tokens * bound;\n"
                "    return lanes_at_ + lane_bytes * lane + banks_at_ + bank_bytes_ * bank + meta_at_",
            ),
        ),
    ),
    Mutation(
        "rows streamed without their last bytes",
        "S4",
        "streaming_test",
        "Streaming.EveryOffsetAndLength",
        (Edit(VECTOR, "  std::memcpy(out, in, n);\n}\n\nvoid stream_fence", "}\n\nvoid stream_fence"),),
    ),
)
