"""Mutations of gathers and reduces: places, sums, what ranks must give alike, and whose turn it is."""

from mutation import CALLS, COLLECTING, COLLECTIVE_H, COLLECTIVES_API, Edit, Mutation
from mutation import COLLECTIVES as CORE

UNIT = "collectives_test"
AWAIT = (
    "  StepEnd end = await_step(transport, context.map, call.at, call.mode(), "
    "collective_note(call.bound, call.digest),\n                           "
)


def _mutation(name: str, invariant: str, test: str, *edits: Edit) -> Mutation:
    return Mutation(name, invariant, UNIT, f"Collectives.{test}", edits)


COLLECTIVES = (
    _mutation(
        "sums begin with the rank's own rows",
        "sums",
        "Staged",
        Edit(COLLECTIVE_H, "source == t.rank() ? own_row(q, i) : nullptr;", "source == 0 ? own_row(q, i) : nullptr;"),
    ),
    _mutation(
        "a gather's rows go to the other bank",
        "S1",
        "Staged",
        Edit(
            COLLECTIVE_H,
            "  const uint64_t bank = map.bank(at.channel, at.bank());\n  for (int32_t q",
            "  const uint64_t bank = map.bank(at.channel, 1 - at.bank());\n  for (int32_t q",
        ),
    ),
    _mutation(
        "a reduce sends every rank the first rank's rows",
        "slots",
        "Staged",
        Edit(COLLECTING, "    first[rank] = first[rank - 1] + call.sizes[rank - 1];\n", ""),
    ),
    _mutation(
        "own rows are read from a view after the signal",
        "S3",
        "OwnRowsOfAView",
        Edit(
            COLLECTING,
            "return call.in_window ? nullptr : row_at(call, of, first + i, context.me);",
            "return row_at(call, of, first + i, context.me);",
        ),
    ),
    _mutation(
        "the next step begins before what was sent alone has ended",
        "S2",
        "MoreThanChannels",
        Edit(CALLS, "  if (state.request != 0) TW_RETURN_IF_FAILED(finish_request(group, channel, stream));\n", ""),
    ),
    _mutation(
        "what was sent alone holds its channel",
        "S5",
        "RefusedAmongSent",
        Edit(
            CORE,
            "  group.channels[channel].request = *request;\n",
            "  group.channels[channel].request = *request;\n"
            "  group.channels[channel].holder = reinterpret_cast<const twHandle*>(&group);\n",
        ),
    ),
    _mutation(
        "sizes are no part of what ranks must give alike",
        "note",
        "WhatRanksMustHaveAlike",
        Edit(
            COLLECTIVES_API,
            "    for (const int32_t size : call->sizes) digest = mix_digest(digest, static_cast<uint64_t>(size));\n",
            "",
        ),
    ),
    _mutation(
        "a gather takes a reduce's signal",
        "S5",
        "DifferentCalls",
        Edit(COLLECTING, f"{AWAIT}deadline, counts);\n", f"{AWAIT}deadline, counts, true);\n"),
    ),
    _mutation(
        "sums that failed are left as they were",
        "S6",
        "NobodyComes",
        Edit(COLLECTING, "      fill_nan(tensor.out, tensor.to, rows * tensor.elements);\n", ""),
    ),
)
