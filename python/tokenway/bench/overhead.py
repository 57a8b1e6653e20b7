"""What Python adds to a dispatch and a combine: one rank, one token.

The same two calls are made in a loop in C, on the same group and handle, with the very structs that
the Python path has filled; what is left of Python's time is the way there. The loop is compiled on
the spot, so it needs a C compiler.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tokenway import _native, tensors
from tokenway.bench.case import Case
from tokenway.bench.settings import Settings
from tokenway.connecting import connect
from tokenway.group import Group
from tokenway.handle import Handle
from tokenway.row_types import TypedRows
from tokenway.settings import RowType

TARGET_US = 15.0
ROUNDS = 21

LOOP = """
typedef int (*call_t)(void*, void*, const void*, void*);
int tw_pairs(long n, call_t dispatch, call_t combine, void* group, void* handle, void** structs) {
  int result = 0;
  for (long i = 0; i < n && !result; ++i) {
    result = dispatch(group, handle, structs[0], structs[1]);
    if (!result) result = combine(group, handle, structs[2], structs[3]);
  }
  return result;
}
"""

Pairs = Callable[[int], None]  # makes n pairs


def measure(settings: Settings) -> dict[str, Any]:
    """us per pair of each path, and what it adds to the loop in C; medians of rounds in turns."""
    count = 100 if settings.quick else 1000
    case = settings.cases()[0]
    with connect() as comm, Group(comm, **case.group_settings(1)) as group:
        paths, notes = _paths(case, group)
        times = _times(paths, count)
    medians = {name: float(np.median(of)) for name, of in times.items()}
    base = medians.get("C")
    measured = {
        "profile": case.profile.name,
        "hidden": case.profile.hidden,
        "dtype": case.dtype,
        "rounds": ROUNDS,
        "pairs_per_round": count,
        "target_us": TARGET_US,
        "paths": {
            name: {
                "us": round(median, 3),
                "added_us": None if base is None else round(median - base, 3),
                "rounds": [round(t, 3) for t in times[name]],
            }
            for name, median in medians.items()
        },
        "notes": notes,
    }
    return {"overhead": measured}


def _times(paths: dict[str, Pairs], count: int) -> dict[str, list[float]]:
    """us per pair of each path, by round."""
    times: dict[str, list[float]] = {name: [] for name in paths}
    gc.collect()
    gc.disable()
    try:
        for path in paths.values():
            path(count // 10)
        for _ in range(ROUNDS):
            for name, path in paths.items():
                start = time.perf_counter_ns()
                path(count)
                times[name].append((time.perf_counter_ns() - start) / 1e3 / count)
    finally:
        gc.enable()
    return times


def _paths(case: Case, group: Group) -> tuple[dict[str, Pairs], list[str]]:
    """The paths that can be measured here, and why others cannot."""
    x, (tokens, scales) = case.exchange, case.inputs(0)
    handle = group.route(x.ids[0], x.weight[0])
    out = _outputs(case, tokens, scales)
    payloads = None if scales is None else {"scales": scales}
    answer = np.zeros((1, case.profile.hidden), tensors.numpy_dtype(case.combine_dtype))
    rows = np.ones((1, *answer.shape), answer.dtype)
    direct = _direct(group, handle, (tokens, payloads, out, rows, answer))
    direct(1)  # fills the structs
    paths: dict[str, Pairs] = {}
    notes = []
    loop = _compile()
    if isinstance(loop, str):
        notes.append(f"C: {loop}")
    else:
        paths["C"] = _loop_in_c(loop, group, handle, (tokens, payloads, out, rows, answer))
    paths["NumPy, out= given"] = direct
    kind = RowType(case.profile.hidden, tokens.dtype, _payload_types(payloads), combine_dtype=answer.dtype)
    named = group.rows(kind)
    paths["NumPy, out= given, rows named by the call"] = _direct(named, handle, (tokens, payloads, out, rows, answer))
    paths["NumPy, views and new tensors"] = _direct(group, handle, (tokens, payloads, None, rows, None))
    if importlib.util.find_spec("torch") is None:
        notes.append("PyTorch: not installed")
        return paths, notes
    made = [tensors.to_torch(a) for a in (tokens, rows, answer)]
    extra = payloads and {k: tensors.to_torch(v) for k, v in payloads.items()}
    torch_out = {k: tensors.to_torch(v) for k, v in out.items()}
    paths["PyTorch, out= given"] = _direct(group, handle, (made[0], extra, torch_out, made[1], made[2]))
    if extra:
        notes.append("registered ops: they carry no further payloads")
    else:
        routed = [tensors.to_torch(a) for a in (x.ids[0], x.weight[0])]
        paths["PyTorch ops, with routing and new tensors"] = ops_path(group, made[0], made[1], routed)
    return paths, notes


def _payload_types(payloads: dict[str, Any] | None) -> dict[str, tuple[int, Any]] | None:
    """What a `RowType` says of further payloads [1, elements]."""
    return payloads and {name: (rows.shape[1], rows.dtype) for name, rows in payloads.items()}


def _outputs(case: Case, tokens: Any, scales: Any) -> dict[str, Any]:
    """Every output of a dispatch in memory of the caller's, so that each call does the same."""
    out = {
        "tokens": np.zeros_like(tokens)[None],
        "ids": np.zeros((1, 1, case.profile.top_k), np.int32),
        "weights": np.zeros((1, 1, case.profile.top_k), np.float32),
        "counts": np.zeros(1, np.int32),
    }
    return out if scales is None else out | {"scales": np.zeros_like(scales)[None]}


def _direct(group: Group | TypedRows, handle: Handle, args: tuple[Any, ...]) -> Pairs:
    tokens, payloads, out, rows, answer = args

    def path(count: int) -> None:
        for _ in range(count):
            group.dispatch(handle, tokens, payloads, out=out)
            group.combine(handle, rows, out=answer)

    return path


def _loop_in_c(loop: Any, group: Group, handle: Handle, args: tuple[Any, ...]) -> Pairs:
    fill = _direct(group, handle, args)
    calls = [ctypes.cast(f, ctypes.c_void_p) for f in (_native.lib.twDispatch, _native.lib.twCombine)]
    used = group.structs[-1]  # each call takes the last, and gives it back
    structs = (ctypes.c_void_p * 4)(*used.dispatch_at, *used.combine_at)

    def path(count: int) -> None:
        fill(1)  # other paths have used the structs in between
        result = loop(count - 1, *calls, group.pointer, handle.pointer, structs)
        _native.check(result, group.pointer)

    return path


def ops_path(group: Group, tokens: Any, rows: Any, routed: list[Any], weighting: str = "none") -> Pairs:
    """Pairs of the registered ops, rank_major, with a new routing and new tensors each time."""
    import torch

    from tokenway import ops

    number = ops.register(group)
    dispatch, combine = torch.ops.tokenway.dispatch, torch.ops.tokenway.combine
    count_tokens = tokens.shape[0]

    def path(count: int) -> None:
        order = ops.start()
        for _ in range(count):
            order = dispatch(tokens, *routed, order, number, count_tokens, "rank_major")[-1]
            order = combine(rows, order, number, count_tokens, weighting)[-1]

    return path


def _compile() -> Any:
    """The loop as a ctypes function, or why there is none."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return "no C compiler was found, so nothing tells what Python adds"
    with tempfile.TemporaryDirectory(prefix="tokenway-bench-") as folder:
        source, library = Path(folder, "loop.c"), Path(folder, "loop.so")
        source.write_text(LOOP)
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return f"{compiler} failed: {done.stderr.strip().splitlines()[-1:]}"
        loop = ctypes.CDLL(str(library)).tw_pairs
    void = ctypes.c_void_p
    loop.argtypes = [ctypes.c_long, void, void, void, void, ctypes.POINTER(void)]
    loop.restype = ctypes.c_int
    return loop
