"""What the C library says, in Python's words: fields of structs are arguments here, constants and functions have names
of their own."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Mapping
from typing import Any

_NAMES = {
    **{f"tw{name}": repr(name.lower()) for name in ("Flat", "Grouped", "Routed", "Gathered", "Auto")},
    "twRankMajor": "'rank_major'",
    "twExpertMajor": "'expert_major'",
    "twWeightNone": "'none'",
    "twWeightTopk": "'topk'",
    "twLowLatency": "'low_latency'",
    "twHighThroughput": "'high_throughput'",
    "twReplicaShares": "'shares'",
    "twDispatch": "dispatch",
    "twCombine": "combine",
    "twComplete": "Pending.result",
    "twExchangeCounts": "exchange_counts",
    "twAllGatherV": "all_gatherv",
    "twReduceScatterV": "reduce_scatterv",
    "twGroupReplaceMap": "replace_map",
    "twHandleUpdate": "Handle.update",
    "twGroupCreate": "Group()",
    "twGroupAbort": "Group.abort",
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
    "twHandleNumOutputRows": "the size of outputs",
    "twHandleCountsReady": "counts_ready",
    "twHandleDestroy": "the end of a handle",
    "twGroupSteps": "a look at the steps of lanes",
}
_FIELDS = {
    "config.payloads[0].dtype": "dtype",
    "config.payloads[0].elements": "hidden",
    "config.combine_elements": "combine_hidden",
    "output.tokens": "out",
    **{f"output.{name}": f"out[{name!r}]" for name in ("ids", "weights", "counts", "offsets", "origins")},
    "input.tensors": "rows",
}
_WORDS = {f"num_{name}": name for name in ("experts", "ranks", "nodes", "groups")} | {
    "slots_per_rank": "slots",
    "host_sizes": "sizes",
}
_ZERO = re.compile(r"(?<!\] )\bis -2147483648\b")  # _native.ZERO, which stands in fields, not in elements as ids are
_NO_STRUCT = re.compile(r"config->size is 0; .* in this version")  # what stands for settings that never came to C
_CONSTANT = re.compile(r"\b(tw[A-Z]\w*)(?: \(\d+\))?")
_WORD = re.compile(rf"\b({'|'.join(_WORDS)})\b")
_FIELD = re.compile(r"\b(?:input|output|config)(?:(?:\.|->)\w+)+(?:\[0\]\.\w+)?")
_TENSOR = re.compile(r"\b(in|out)put\.(?:payloads|tensors)\[(\d+)\]")


def in_python(text: str) -> str:
    """A sentence of the C library. Which of a call's tensors it speaks of is left to `of_call`, which knows them."""

    def field(found: re.Match[str]) -> str:
        name = found[0].replace("->", ".")
        if _TENSOR.match(text, found.start()):
            return found[0]
        return _FIELDS.get(name) or name.split(".", 1)[1]

    text = _ZERO.sub("is 0", _NO_STRUCT.sub("its settings were refused there", text))
    text = _FIELD.sub(field, _CONSTANT.sub(lambda found: _NAMES.get(found[1], found[0]), text))
    return _WORD.sub(lambda found: _WORDS[found[0]], text)


def of_call(text: str, inputs: Collection[str], values: Mapping[str, Any]) -> str:
    """The same of a call with these tensors. values: what was given for arguments of which C has seen numbers,
    -1 and -2 for what has none or does not fit."""

    def tensor(found: re.Match[str]) -> str:
        name = list(inputs)[int(found[2])]
        if found[1] == "in":
            return name
        return "out['tokens']" if name == "tokens" else re.sub("^(rows|payloads)", "out", name)

    text = _TENSOR.sub(tensor, text)
    for name, value in values.items():
        if value is not None:
            told = f"{name} is {reprlib.repr(value)}"
            text = re.sub(rf"\A{name} is -[12]\b", lambda _, told=told: told, text)
    return text
