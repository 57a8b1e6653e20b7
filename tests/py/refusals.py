"""Wrong calls, and what a rank does around them. Runs on the ranks.

Each entry: what is wrong -> (the call's arguments, changed; the sentence as a regular expression).
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import player
from cases import Round, Setup, answers, make_ids, make_payloads
from harness import PATIENT, caught

import tokenway as tw
from tokenway.tensors import aligned_bytes, numpy_dtype

BF16 = numpy_dtype("bfloat16")
SETUP = Setup(ranks=3, experts=6, hidden=4, max_tokens=8, payloads=((3, "uint8"),), combine_dtype="float32")
ROUND = Round((3, 8, 2))
TOKENS = ROUND.tokens[0]  # rank 0 makes the wrong calls

_TOKENS = r"tokens "
_ROWS = r"rows "


def _tokens(shape: tuple[int, ...] = (TOKENS, 4), dtype: Any = BF16) -> np.ndarray:
    return np.zeros(shape, dtype)


def _read_only(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    array = np.zeros(shape, dtype)
    array.flags.writeable = False
    return array


DISPATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": (
        {"tokens": _tokens(dtype=np.float32)},
        _TOKENS + r"has dtype float32 \(11\); it must be bfloat16",
    ),
    "too few rows": (
        {"tokens": _tokens((2, 4))},
        _TOKENS + r"has shape \[2, 4\]; it must be \[3, 4\]",
    ),
    "too many rows": (
        {"tokens": _tokens((9, 4))},
        _TOKENS + r"has shape \[9, 4\]; it must be \[3, 4\]",
    ),
    "elements": (
        {"tokens": _tokens((3, 5))},
        _TOKENS + r"has shape \[3, 5\]; it must be \[3, 4\]",
    ),
    "one dimension": ({"tokens": _tokens((12,))}, _TOKENS + r"has shape \[12\]"),
    "no dimension": ({"tokens": _tokens(())}, _TOKENS + r"has 0 dimensions; it must have from 1 to 6"),
    "seven dimensions": (
        {"tokens": _tokens((3, 4, 1, 1, 1, 1, 1))},
        _TOKENS + r"has 7 dimensions; it must have from 1 to 6",
    ),
    "columns apart": (
        {"tokens": _tokens((3, 8))[:, ::2]},
        _TOKENS + r"has stride 2 in dimension 1 of shape \[3, 4\]; it must be 1",
    ),
    "columns backwards": ({"tokens": _tokens()[:, ::-1]}, _TOKENS + r"has stride -1 in dimension 1"),
    "columns repeated": (
        {"tokens": np.broadcast_to(_tokens((3, 1)), (3, 4))},
        _TOKENS + r"has stride 0 in dimension 1",
    ),
    "a list": ({"tokens": [[0.0] * 4] * 3}, _TOKENS + r"has dtype none .*; tokens is of type list; it must be"),
    "None": ({"tokens": None}, _TOKENS + r"has dtype none"),
    "objects": ({"tokens": _tokens(dtype=object)}, _TOKENS + r"has dtype none"),
    "big-endian": ({"tokens": _tokens(dtype=">f4")}, _TOKENS + r"has dtype none"),
    "complex": ({"tokens": _tokens(dtype=np.complex64)}, _TOKENS + r"has dtype none"),
    "a field of a record": (
        {"tokens": np.zeros((3, 4), [("a", "<f4"), ("b", "u1")])["a"]},
        _TOKENS + r"has dtype none",
    ),
    "no payload": ({"payloads": None}, r"payloads\['p0'\] has dtype none .*; it must be uint8"),
    "payload's dtype": (
        {"payloads": {"p0": np.zeros((3, 3), np.int8)}},
        r"payloads\['p0'\] has dtype int8 \(2\); it must be uint8",
    ),
    "payload's rows": (
        {"payloads": {"p0": np.zeros((4, 3), np.uint8)}},
        r"payloads\['p0'\] has shape \[4, 3\]; it must be \[3, 3\]",
    ),
    "bound below T": (
        {"bound": 2},
        r"bound is 2; it must be from the handle's tokens, 3, to max_tokens, 8",
    ),
    "bound above B": ({"bound": 9}, r"bound is 9; .* 3, to max_tokens, 8"),
    "negative bound": ({"bound": -1}, r"bound is -1; .* 3, to max_tokens, 8"),
    "bound of 40 bits": ({"bound": 2**40}, r"bound is -?\d+; .* max_tokens, 8"),
    "layout": ({"layout": "by_colour"}, r"layout is 'by_colour'; it must be 'rank_major'"),
    "out's dtype": (
        {"out": {"ids": np.zeros((3, 8, 2), np.int64)}},
        r"out\['ids'\] has dtype int64 \(7\); it must be int32",
    ),
    "out's shape": (
        {"out": {"weights": np.zeros((3, 8, 3), np.float32)}},
        r"out\['weights'\] has shape \[3, 8, 3\]; it must be \[3, 8, 2\]",
    ),
    "out apart": (
        {"out": np.zeros((3, 9, 4), BF16)[:, :8]},
        r"out\['tokens'\] has stride 36 in dimension 0 .*an output is C-contiguous",
    ),
    "out is a list": ({"out": [1.0]}, r"^out\['tokens'\] is of type list; it must be a NumPy array"),
    "out is read-only": (
        {"out": {"ids": _read_only((3, 8, 2), np.int32)}},
        r"^out\['ids'\] is read-only$",
    ),
    "out's name": (
        {"out": {"token": _tokens((3, 8, 4))}},
        r"^out has 'token'; it may have tokens, p0, ids, weights, counts, offsets, origins, source_counts$",
    ),
    "a payload's name": (
        {"payloads": {"p0": np.zeros((3, 3), np.uint8), "scales": np.zeros((3, 1), np.float32)}},
        r"^payloads is \['p0', 'scales'\]; this group's are \['p0'\]$",
    ),
    "tokens among payloads": ({"payloads": {"tokens": _tokens()}}, r"^payloads is \['tokens'\]; this"),
    "payloads of no names": ({"payloads": [np.zeros((3, 3), np.uint8)]}, r"^payloads is list, no mapping"),
    "layout of no type": ({"layout": ["rank_major"]}, r"layout is \['rank_major'\]; it must be 'rank_major'"),
    "no handle": ({"handle": None}, r"handle is NULL; handle is None; it must come from Group\.route"),
    "counts' shape": (
        {"out": {"counts": np.zeros(4, np.int32)}},
        r"out\['counts'\] has shape \[4\]; it must be \[3",
    ),
}

COMBINES: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": (
        {"rows": np.zeros((3, 8, 4), np.int32)},
        _ROWS + r"has dtype int32 \(5\); it must be float32, bfloat16 or float16",
    ),
    "a list": ({"rows": []}, _ROWS + r"has dtype none"),
    "ranks": (
        {"rows": np.zeros((2, 8, 4), np.float32)},
        _ROWS + r"has shape \[2, 8, 4\]; it must be \[3, 8, 4\]",
    ),
    "bound": (
        {"rows": np.zeros((3, 7, 4), np.float32)},
        _ROWS + r"has shape \[3, 7, 4\]; it must be \[3, 8, 4\]",
    ),
    "elements": ({"rows": np.zeros((3, 8, 5), np.float32)}, _ROWS + r"has shape \[3, 8, 5\]"),
    "columns apart": (
        {"rows": np.zeros((3, 8, 8), np.float32)[..., ::2]},
        _ROWS + r"has stride 2 in dimension 2",
    ),
    "the other layout": (
        {"layout": "expert_major"},
        _ROWS + r"has shape \[3, 8, 4\]; it must be \[2, 24, 4\]",
    ),
    "no layout": ({"layout": "by_colour"}, r"layout is 'by_colour'; it must be 'rank_major'"),
    "weighting": ({"weighting": "some"}, r"weighting is 'some'; it must be 'none'"),
    "out's dtype": (
        {"out": np.zeros((3, 4), np.float64)},
        r"out has dtype float64 \(12\); it must be float32, bfloat16 or float16",
    ),
    "out's shape": (
        {"out": np.zeros((4, 4), np.float32)},
        r"out has shape \[4, 4\]; it must be \[3, 4\]",
    ),
    "out apart": (
        {"out": np.zeros((3, 5), np.float32)[:, :4]},
        r"out has stride 5 in dimension 0",
    ),
    "out is a list": ({"out": []}, r"^out is of type list; it must be a NumPy array"),
    "out is read-only": ({"out": _read_only((3, 4), np.float32)}, r"^out is read-only$"),
    "no dtype": ({"dtype": "float33"}, r"^dtype is 'float33'; it must be one of uint8"),
    "a dtype that is none": ({"dtype": object()}, r"^dtype is <object .*; it must be one of"),
    "layout of no type": ({"layout": ["rank_major"]}, r"layout is \['rank_major'\]"),
    "weighting of no type": ({"weighting": {}}, r"weighting is {}"),
}


def _ids(*rows: list[int], dtype: Any = np.int32) -> np.ndarray:
    return np.array(rows, dtype)


_TWO = _ids([0, 1], [2, 3])
ROUTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "id above E": (
        {"ids": _ids([0, 1], [2, 6])},
        r"ids\[1, 1\] is 6; it must be -1 \(no expert\) or from 0 to 5",
    ),
    "id below -1": ({"ids": _ids([-2, 1])}, r"ids\[0, 0\] is -2; it must be -1"),
    "id of 64 bits": (
        {"ids": _ids([1, 2**32 + 1], dtype=np.int64)},
        r"ids\[0, 1\] is 4294967297; it must be",
    ),
    "id twice": ({"ids": _ids([4, 4])}, r"ids\[0, 1\] is 4, which the token has already"),
    "float ids": ({"ids": _TWO.astype(np.float32)}, r"ids has dtype float32 \(11\); .* int32 or int64"),
    "ids of one dimension": ({"ids": _TWO[0]}, r"ids has shape \[2\]; it must be \[T, 2\]"),
    "K": ({"ids": np.zeros((2, 3), np.int32)}, r"ids has shape \[2, 3\]; it must be \[T, 2\]"),
    "a list": ({"ids": [[0, 1]]}, r"ids has dtype none"),
    "weights' dtype": (
        {"ids": _TWO, "weights": np.zeros((2, 2))},
        r"weights has dtype float64 \(12\); it must be float32",
    ),
    "weights' shape": (
        {"ids": _TWO, "weights": np.zeros((2, 3), np.float32)},
        r"weights has shape \[2, 3\]; it must be \[T, 2\]",
    ),
    "weights' tokens": (
        {"ids": _TWO, "weights": np.zeros((3, 2), np.float32)},
        r"weights has 3 tokens; it must have as many as ids, 2",
    ),
    "memory of another dtype": (
        {"ids": _TWO, "memory": np.zeros(9999, np.int32)},
        r"^memory is of dtype int32; it must be a contiguous, writable tensor of uint8",
    ),
    "memory apart": (
        {"ids": _TWO, "memory": np.zeros(99999, np.uint8)[::2]},
        r"^memory is not contiguous; it must be",
    ),
    "memory that is read-only": (
        {"ids": _TWO, "memory": _read_only((99999,), np.uint8)},
        r"^memory is read-only; it must be",
    ),
    "memory that is no tensor": (
        {"ids": _TWO, "memory": memoryview(bytearray(99999))},
        r"^memory is of type memoryview; it must be",
    ),
    "memory between lines": (
        {"ids": _TWO, "memory": aligned_bytes(99999)[1:]},
        r"memory is 0x\w+; it must be aligned to 64 bytes",
    ),
    "little memory": (
        {"ids": _TWO, "memory": np.zeros(64, np.uint8)},
        r"memory has 64 bytes; it must have \d+",
    ),
}

# Settings of a group that one rank cannot have: what is wrong there, and what all are told.
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"experts": 0, "top_k": 1}, r"experts is 0; it must be from 1 to 1048576"),
    "top_k": ({"top_k": 7}, r"top_k is 7; it must be from 1 to 6"),
    "top_k of 65": ({"top_k": 65, "experts": 100}, r"top_k is 65; it must be from 1 to 64"),
    "max_tokens": ({"max_tokens": 0}, r"max_tokens is 0; it must be from 1 to 268435455"),
    "hidden": ({"hidden": 0, "combine_hidden": 1}, r"hidden is 0; it must be from 1"),
    "lanes": ({"lanes": 65}, r"lanes is 65; it must be from 1 to 64"),
    "no lanes": ({"lanes": 0}, r"lanes is 0; it must be from 1 to 64"),
    "combine_dtype": ({"combine_dtype": "int8"}, r"combine_dtype is int8 \(2\); it must be float32"),
    "invalid_id": ({"invalid_id": 1}, r"invalid_id is 1, which is a valid id; .* at least 2"),
    "global invalid_id": (
        {"invalid_id": 5, "id_space": "global"},
        r"invalid_id is 5, which is a valid id; .* at least 6",
    ),
    "id_dtype": ({"id_dtype": "int16"}, r"id_dtype is int16 \(3\); it must be int32 or int64"),
    "rank of an expert": (
        {"expert_map": ([0, 0, 1, 1, 2, 3], [0, 1, 0, 1, 0, 0])},
        r"expert_rank\[5\] is 3; it must be from 0 to 2",
    ),
    "slot of an expert": (
        {"expert_map": ([0, 0, 1, 1, 2, 2], [0, 1, 0, 2, 0, 1])},
        r"expert_slot\[3\] is 2; rank 1 holds 2 experts, so it must be from 0 to 1",
    ),
    "slot taken": (
        {"expert_map": ([0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 0, 1])},
        r"expert_slot\[3\] is 1, which expert 2 has already on rank 1",
    ),
    "64 bits": ({"hidden": 2**58, "max_tokens": 2**27}, r"pass 64 bits; lower max_tokens"),
    "elements of 63 bits": ({"hidden": 2**61}, r"hidden is \d+; it must be from 1"),
}

# One field that differs on rank 1: the field's name in C.
MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"experts": 7}, r"experts differs: rank 0 has 6, rank 1 has 7"),
    "top_k": ({"top_k": 3}, r"top_k differs: rank 0 has 2, rank 1 has 3"),
    "max_tokens": ({"max_tokens": 9}, r"max_tokens differs: rank 0 has 8, rank 1 has 9"),
    "hidden": (
        {"hidden": 5, "combine_hidden": 4},
        r"hidden differs: rank 0 has 4, rank 1 has 5",
    ),
    "dtype": ({"dtype": "float16"}, r"dtype differs: rank 0 has 10, rank 1 has 9"),
    "payloads": ({"payloads": {}}, r"num_payloads differs: rank 0 has 2, rank 1 has 1"),
    "a payload's dtype": ({"payloads": {"p0": (3, "int8")}}, r"payloads\['p0'\]\.dtype differs"),
    "a payload's elements": ({"payloads": {"p0": (2, "uint8")}}, r"payloads\['p0'\]\.elements differs"),
    "combine_dtype": ({"combine_dtype": "float16"}, r"combine_dtype differs"),
    "combine_hidden": ({"combine_hidden": 5}, r"combine_hidden differs: rank 0 has 4, rank 1 has 5"),
    "lanes": ({"lanes": 2}, r"lanes differs: rank 0 has 1, rank 1 has 2"),
    "timeout": ({"timeout": 3.0}, r"timeout_ms differs: rank 0 has \d+, rank 1 has 3000"),
    "expert_map": (
        {"expert_map": ([0, 0, 1, 1, 2, 2], [0, 1, 1, 0, 0, 1])},
        r"expert_slot\[2\] differs: rank 0 has 0, rank 1 has 1",
    ),
}


# Arguments that only NumPy can make: PyTorch has no backward strides, no such dtypes, no read-only tensors.
NUMPY_ALONE = {
    *("columns backwards", "objects", "big-endian", "a field of a record"),
    *("out is read-only", "memory that is read-only"),
}
# Routings that only a host that reads the ids can refuse.
BAD_IDS = {"id above E", "id below -1", "id of 64 bits", "id twice"}


# Settings of which a device refuses more, and says that first.
_ON_DEVICES = {r"pass 64 bits; lower max_tokens": r"tokens has rows of 512\.0 PiB; on a device they may have 16\.0 MiB"}


def sentence(backend: str, pattern: str) -> str:
    """What a backend's refusal must match: what tensors it takes instead is its own business."""
    if backend == "fabric" or (backend.startswith("torch") and backend != "torch-emulated"):
        return pattern  # as the CPU's: host memory, NumPy's tensors
    if backend != "cpu" and pattern in _ON_DEVICES:
        return _ON_DEVICES[pattern]
    told_by_python = "NumPy array" in pattern or pattern.startswith("^memory")
    return pattern.split("; it must be")[0] if backend != "cpu" and told_by_python else pattern


# ---- on the ranks --------------------------------------------------------------------------------


def adapt(env: Any, value: Any) -> Any:
    """An argument with the backend's tensors for NumPy's."""
    if isinstance(value, dict):
        return {name: adapt(env, one) for name, one in value.items()}
    return env.backend.tensor(value) if isinstance(value, np.ndarray) else value


class Calls:
    """A group of SETUP with the right arguments of every call at hand."""

    def __init__(self, env: Any, **changes: Any):
        self.env = env
        self.group = tw.Group(env.comm, **SETUP.settings() | {"timeout": PATIENT} | changes)
        self.route()

    def route(self) -> None:
        ids, weights = make_ids(SETUP, ROUND, self.env.rank)
        self.handle = self.group.route(adapt(self.env, ids), adapt(self.env, weights))

    def dispatch(self, **changes: Any) -> Any:
        tokens, extra = make_payloads(SETUP, ROUND, self.env.rank)
        given = {"handle": self.handle, "tokens": tokens, "payloads": {"p0": extra}}
        return self.group.dispatch(**adapt(self.env, given | changes))

    def combine(self, **changes: Any) -> Any:
        rows = np.zeros((3, 8, 4), np.float32)
        return self.group.combine(**adapt(self.env, {"handle": self.handle, "rows": rows} | changes))

    def good_round(self) -> Any:
        """A whole round, to be verified: the group works."""
        case = player.Case(SETUP, ((ROUND,),))
        return player.Player(self.env, self.group, case).flights()[0][0]


def refused_dispatch(env: Any, name: str) -> tuple[Any, float, Any]:
    """What the call ended with, how long it took, and a good round after it."""
    calls = Calls(env)
    calls.good_round()  # a refusal must stand where a dispatch would, whatever the channel has behind it
    changes = DISPATCHES[name][0] if env.rank == 0 else {}
    begin = time.monotonic()
    outcome = caught(calls.dispatch, **changes)
    took = time.monotonic() - begin
    good = calls.good_round()
    calls.group.close()
    return outcome, took, good


def refused_combine(env: Any, name: str) -> tuple[Any, float, Any]:
    """As refused_dispatch; the good round here is the same combine, tried again on its lease."""
    calls = Calls(env)
    received = calls.dispatch()
    # Copies: the refused combine is a step, so the views end with it.
    array = env.backend.array
    fields = [array(getattr(received, n)) for n in ("tokens", "ids", "weights", "counts")]
    scales = array(received.payloads["p0"])
    begin = time.monotonic()
    outcome = caught(calls.combine, **(COMBINES[name][0] if env.rank == 0 else {}))
    took = time.monotonic() - begin
    rows = answers(SETUP, ROUND, env.rank, *fields)
    got = player.Got(
        [fields[0], scales],
        *fields[1:],
        offsets=array(received.offsets),
        out=array(calls.combine(rows=rows, weighting="topk")),
    )
    calls.group.close()
    return outcome, took, got


def broken_shrink(env: Any, changes: dict[str, Any]) -> tuple[Any, float]:
    """Shrinking a whole group, where rank 1 asks for what C cannot hold."""
    calls = Calls(env)
    begin = time.monotonic()
    outcome = caught(calls.group.shrink, **(changes if env.rank == 1 else {}))
    took = time.monotonic() - begin
    calls.group.close()
    return outcome, took


def settings_on(env: Any, rank: int, changes: dict[str, Any]) -> tuple[Any, float]:
    """Creating a group where one rank has other settings."""
    begin = time.monotonic()
    outcome = caught(Calls, env, **(changes if env.rank == rank else {}))
    return outcome, time.monotonic() - begin
