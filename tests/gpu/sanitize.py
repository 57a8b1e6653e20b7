#!/usr/bin/env python3
"""A small workload for compute-sanitizer: two ranks on one GPU, staged, verified.

    compute-sanitizer --tool memcheck  --error-exitcode 9 python3 tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python3 tests/gpu/sanitize.py

A sanitizer lets kernels run one after the other. Staged steps need no more: all ranks send, then all
ranks complete. Lines and bulk, both layouts, odd rows, several payloads, bad ids, few blocks.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

# Before PyTorch is there. Every tensor is an allocation of its own, or the sanitizer could not see its end; nothing
# runs beside a module that is being loaded, so kernels may be loaded when they are needed.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
os.environ["CUDA_MODULE_LOADING"] = "LAZY"
sys.path.append(str(Path(__file__).parents[1] / "py"))

import device_backend
from cases import Round, Setup, verify

SETUPS = (
    Setup(ranks=2, experts=5, top_k=3, hidden=40, max_tokens=9, payloads=((3, "uint8"), (2, "float32"))),
    Setup(ranks=2, experts=8, top_k=4, hidden=129, dtype="float32", combine_dtype="float32", max_tokens=20),
    Setup(ranks=2, experts=6, top_k=6, hidden=17, dtype="uint8", combine_hidden=5, max_tokens=12, lanes=2),
)


def rounds_of(setup: Setup) -> list[Round]:
    most = setup.max_tokens
    rounds = [Round((most, most - 3)), Round((0, 2), seed=1, bound=2, routing="holes")]
    rounds.append(Round((most, 1), seed=2, weighting="none", rows="bfloat16", out="float16", strided=True))
    both = [replace(r, layout=layout) for layout in ("rank_major", "expert_major") for r in rounds]
    if setup.width == setup.hidden:
        both.append(replace(rounds[0], identity=True, rows=setup.dtype, seed=4))
    return [*both, replace(rounds[0], own=True, seed=3)]


def main() -> int:
    device_backend.prepare(blocking=False)
    lacking = device_backend.missing()
    if lacking:
        print(f"sanitize.py needs a GPU: {lacking}", file=sys.stderr)
        return 1
    from gpu_world import Locals, line_tokens

    begin, count = time.monotonic(), 0
    for lines in (None, 0):
        for limit in (0, 1):
            for setup in SETUPS:
                rounds = rounds_of(setup)
                with Locals(2, devices=[0, 0]) as ranks, line_tokens(lines):
                    got = ranks.staged(setup, rounds, sm_limit=limit, timeout=300)
                for round_, of in zip(rounds, got, strict=True):
                    verify(setup, round_, of)
                count += len(rounds)
    print(f"{count} rounds verified in {time.monotonic() - begin:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
