"""What the C library says, in Python's words.

C gives a sentence in parts (include/tokenway/errors.h): each argument, constant and function, and each number that
belongs to an argument, is a part of its own. Tables here say what Python calls them; other text stays as it is."""

from __future__ import annotations

import numbers
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

KINDS = ("text", "argument", "value", "least", "most", "constant", "function", "under_way")
TEXT, ARGUMENT, VALUE, LEAST, MOST, CONSTANT, FUNCTION, UNDER_WAY = range(8)


class Part(NamedTuple):
    """A part of a sentence: twErrorPart_t."""

    kind: int
    text: str
    name: str = ""
    indices: tuple[int, ...] = ()
    value: int = 0


class Told(NamedTuple):
    """A sentence in Python's words, and what it says of the first argument that it names: see InvalidArgument."""

    text: str
    argument: str | None = None
    index: tuple[int, ...] = ()
    value: Any = None
    allowed: tuple[int, int] | None = None


ZERO = -(2**31)  # what C gets for 0 in fields where C's 0 is its default, but not ours
_ZEROED = {
    "config.top_k",
    "config.lanes",
    "config.max_recv_tokens",
    "config.row_alignment",
    "config.inbox_tokens",
    "config.low_latency_tokens",
    "config.token_replicas",
    "input.max_recv_tokens",
    "input.row_alignment",
    "config.placement->num_layers",
    "config.placement->num_slots",
}
UNFIT = (-1, -2)  # what C gets for an argument that it has no number for: tokenway.arguments

CONSTANTS = {
    **{f"tw{name}": repr(name.lower()) for name in ("Flat", "Grouped", "Routed", "Gathered", "Auto")},
    "twRankMajor": "'rank_major'",
    "twExpertMajor": "'expert_major'",
    "twGroupedByBound": "'grouped_by_bound'",
    "twRowPerRank": "'per_rank'",
    "twRowPerExpert": "'per_expert'",
    "twWeightNone": "'none'",
    "twWeightTopk": "'topk'",
    "twLowLatency": "'low_latency'",
    "twHighThroughput": "'high_throughput'",
    "twAutomatic": "'auto'",
    "twScalesNone": "None",
    "twScalesBlocks": "None, for a scale of each block,",
    "twScalesTensor": "a number",
    "twReplicaShares": "'shares'",
    "twReplicaBalanced": "'balanced'",
}
FUNCTIONS = {
    "twDispatch": "dispatch",
    "twCombine": "combine",
    "twComplete": "Pending.result",
    "twExchangeCounts": "exchange_counts",
    "twAllGatherV": "all_gatherv",
    "twReduceScatterV": "reduce_scatterv",
    "twGroupReplaceMap": "replace_map",
    "twGroupStageMap": "moving.stage",
    "twGroupReady": "moving.ready",
    "twGroupEpochs": "moving.epochs",
    "twGroupLost": "moving.lost_experts",
    "twGroupMeet": "balance.Weights()",
    "twGroupRoutingLayout": "routing_layout",
    "twHandleUpdate": "Handle.update",
    "twGroupCreate": "Group()",
    "twGroupAbort": "Group.abort",
    "twGroupReserve": "Group.reserve",
    "twGroupShrink": "Group.shrink",
    "twGroupDestroy": "Group.close",
    "twGroupMap": "expert_of_slot",
    "twGroupLoads": "loads",
    "twCommDestroy": "Comm.close",
    "twCompleteRequest": "Pending.result",
    "twHandleCreateForLayer": "route",
    "twHandleRelease": "Handle.release",
    "twHandleNumRecvTokens": "num_recv_tokens",
    "twHandleNumRecvRows": "recv_rows",
    "twHandleNumExpertRows": "expert_rows",
    "twHandleNumOutputRows": "the size of outputs",
    "twHandleCountsReady": "counts_ready",
    "twHandleDestroy": "the end of a handle",
    "twGroupSteps": "a look at the steps of lanes",
}
# Arguments by their paths in C, without the "[]" of elements. Python's name of others is the path without its struct.
ARGUMENTS = {
    "config.combine_elements": "combine_hidden",
    "input.types": "payloads",
    "input.elements": "combine_hidden",
    "input.wire_dtype": "combine_dtype",
    "input.wire_scales": "combine_scale",
    "input.wire_scale": "combine_scale",
    "config.num_experts": "experts",
    "config.num_ranks": "ranks",
    "config.num_nodes": "nodes",
    "config.num_groups": "groups",
    "config.num_layers": "layers",
    "config.slots_per_rank": "slots",
    "config.placement->num_layers": "placement.layers",
    "config.placement->num_slots": "placement.slots",
    "config.placement->slot_shares": "placement.shares",
    "config.placement->count_loads": "placement.count_loads",
    "config.placement->moves": "placement.moves",
    "config.placement->weight_bytes": "placement.weight_bytes",
    "config.old_map": "old",
    "slot_shares": "shares",
    "input.host_sizes": "sizes",
    "input.tensors": "rows",
    "output.tokens": "out",
    "output.choice_values": "out[1]",
    **{f"output.{name}": f"out[{name!r}]" for name in ("ids", "weights", "counts", "offsets", "origins")},
    **{f"output.{name}": f"out[{name!r}]" for name in ("source_counts", "sorted_rows", "block_experts", "num_sorted")},
    "query.device_sms": "sms",
}
_STRUCTS = ("config.", "input.", "output.", "query.", "reserve.")
_UNREADABLE = "its settings were refused there"  # what stands for a config that Python has not even written down


def _of_tensor(part: Part, tensors: Sequence[str]) -> str | None:
    """The name of one of a call's tensors, or of a field of its description; None for everything else. tensors: their
    names in C's order."""
    struct, _, field = part.name.partition(".")
    array, _, field = field.partition("[]")
    if array not in ("payloads", "tensors", "types") or not part.indices:
        return None
    known = tensors or (() if array == "tensors" else ("tokens",))
    if part.indices[0] >= len(known):
        return None
    name = known[part.indices[0]]
    if struct == "config" or array == "types":
        return {".dtype": "dtype", ".elements": "hidden"}.get(field, name) if name == "tokens" else name + field
    if struct == "output":
        return "out['tokens']" if name == "tokens" else "out" + name.removeprefix("rows").removeprefix("payloads")
    return name


def _places(indices: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, indices))}]" if indices else ""


def _of_argument(part: Part, tensors: Sequence[str]) -> tuple[str, tuple[int, ...]]:
    """Python's name of an argument, and the indices that are not in the name."""
    if (name := _of_tensor(part, tensors)) is not None:
        return name, ()
    path = part.name.removesuffix("[]")
    if (name := ARGUMENTS.get(path)) is not None:
        return name, part.indices
    path = next((path.removeprefix(struct) for struct in _STRUCTS if path.startswith(struct)), path).replace("->", ".")
    return (path.replace("[]", _places(part.indices)), ()) if "[]" in path else (path, part.indices)


def _stands_for(number: int, given: Any) -> bool:
    """Whether C has got a number in place of what was given: for what is no number, and for names."""
    return given is not None and (number in UNFIT or type(given) is str)


def _without_config(parts: Sequence[Part]) -> Sequence[Part]:
    """The same parts, but for a config that cannot be read, of which Python's callers know nothing: what C says of it,
    as the rest of the sentence does, becomes words of ours."""
    if not any(part.kind == VALUE and part.name == "config" and not part.value for part in parts):
        return parts
    begin = next(i for i, part in enumerate(parts) if part.name == "config")
    return [*parts[:begin], Part(TEXT, _UNREADABLE)]


def tell(parts: Sequence[Part], tensors: Sequence[str] = (), given: Mapping[str, Any] | None = None) -> Told:
    """A sentence of the C library. tensors: the names of the call's tensors, in C's order. given: what the caller gave
    for arguments of which C may have got a number that stands for it."""
    words: list[str] = []
    name, index, value = None, (), None
    bounds: dict[int, int] = {}
    spoken = ""  # the last argument of the sentence
    for part in _without_config(parts):
        word = part.text
        if part.kind == ARGUMENT:
            spoken, indices = _of_argument(part, tensors)
            word = spoken + _places(indices)
            if name is None:
                name, index = spoken, indices
        elif part.kind == VALUE:
            here: Any = part.value
            if part.value == ZERO and part.name in _ZEROED:
                here, word = 0, "0"
            elif given is not None and _stands_for(part.value, given.get(spoken)):
                here, word = given[spoken], reprlib.repr(given[spoken])
                here = here if issubclass(type(here), numbers.Number) else None  # an exception keeps no tensor
            value = here if value is None and spoken == name else value
        elif part.kind in (LEAST, MOST) and spoken == name:
            bounds.setdefault(part.kind, part.value)
        elif part.kind == CONSTANT:
            word = CONSTANTS.get(part.name, part.text)
        elif part.kind in (FUNCTION, UNDER_WAY):
            word = FUNCTIONS.get(part.name, part.text)
        words.append(word)
    allowed = (bounds[LEAST], bounds[MOST]) if len(bounds) == 2 else None
    return Told("".join(words), name, index, value, allowed)
