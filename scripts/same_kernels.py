#!/usr/bin/env python3
"""Whether two builds of the library have the same machine code in every kernel, names aside.

    python scripts/same_kernels.py OLD/libtokenway.so NEW/libtokenway.so

For changes that move or rename code and must not change a kernel. Both are to be built by the same nvcc for the same
GPUs (`make build` in two checkouts). A kernel's name may change, and the namespaces and types in it; so kernels are
compared as what they are made of: each body, instruction by instruction, as cuobjdump of the CUDA toolkit disassembles
it. Functions that a kernel calls may lie in another order behind it, as ptxas sorts them by name. Bodies that only one
of them has are named, with how many lines of the nearest other body differ. The exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import bisect
import collections
import difflib
import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator

FUNCTION = re.compile(r"^\s*Function : (\S+)$")
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*(?:/\* 0x[0-9a-f]+ \*/)?$")
SYMBOL = re.compile(r"\b_Z\w+")  # of a function that is called, or of a constant
JUMP = re.compile(r"\b(BRA|BSSY|CALL\.REL\.NOINC|BREAK|BRX|JMP)\b.*?\b(0x[0-9a-f]+) ;")
RETURN = re.compile(r"\bMOV R\d+, (0x[0-9a-f]+) ;")
STEP = 16  # bytes of an instruction
NEAR = 16  # instructions before a call, in which it is told where to return to


def without_places(body: list[str]) -> tuple[str, ...]:
    """The body with the functions behind the kernel in an order of their own, and addresses counted from each."""
    while body and body[-1] == "NOP ;":  # behind the last function, whichever that is
        body = body[:-1]
    calls = {i: int(m[2], 16) // STEP for i, line in enumerate(body) if (m := JUMP.search(line)) and "CALL" in m[1]}
    starts = sorted({0, *calls.values()})
    start_of = [starts[bisect.bisect_right(starts, i) - 1] for i in range(len(body))]
    seen: dict[int, str] = {}

    def named(start: int) -> str:
        if start not in seen:
            seen[start] = ""  # a function that calls itself
            seen[start] = hashlib.sha256("\n".join(text(start)).encode()).hexdigest()[:16]
        return seen[start]

    def place(start: int, at: int) -> str:
        other = start_of[at] if at < len(body) else at
        return f"+{at - start}" if other == start else f"{named(other)}+{at - other}"

    def target(i: int) -> str | None:
        """The address in an instruction that jumps, or says where a call soon behind it is to return to."""
        if match := JUMP.search(body[i]):
            return match[2]
        if match := RETURN.search(body[i]):
            call = int(match[1], 16) // STEP - 1
            return match[1] if call in calls and i <= call < i + NEAR else None
        return None

    def text(start: int) -> Iterator[str]:
        for i in range(start, next((s for s in starts if s > start), len(body))):
            line = body[i]
            if address := target(i):
                line = line.replace(f"{address} ;", f"{place(start, int(address, 16) // STEP)} ;")
            yield line

    return (*text(0), *sorted(named(start) for start in starts[1:]))


def bodies(library: str) -> dict[str, tuple[str, ...]]:
    """Name of each kernel, with its GPU -> its instructions."""
    said = subprocess.run(["cuobjdump", "-sass", library], check=True, capture_output=True, text=True).stdout
    found: dict[str, list[str]] = {}
    gpu, body = "", None
    for line in said.splitlines():
        if line.startswith("arch = "):
            gpu = line.removeprefix("arch = ").strip()
        elif match := FUNCTION.match(line):
            body = found.setdefault(f"{gpu} {match[1]}", [])
        elif body is not None and (match := INSTRUCTION.match(line)):
            body.append(SYMBOL.sub("symbol", match[1]))
    return {name: without_places(lines) for name, lines in found.items()}


def plain(name: str) -> str:
    gpu, _, symbol = name.partition(" ")
    return f"{gpu} " + subprocess.run(["c++filt", symbol], check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    args = parser.parse_args()
    old, new = bodies(args.old), bodies(args.new)
    gone = collections.Counter(old.values()) - collections.Counter(new.values())
    come = collections.Counter(new.values()) - collections.Counter(old.values())
    for name, body in new.items():
        if not come[body]:
            continue
        nearest = min(gone, key=lambda other: abs(len(other) - len(body)), default=())
        differing = sum(line[0] in "+-" for line in difflib.ndiff(nearest, body)) if len(body) < 3000 else "many"
        print(f"only in the new library: {plain(name)}: {len(body)} instructions, {differing} lines differ")
    for name, body in old.items():
        if gone[body]:
            print(f"only in the old library: {plain(name)}: {len(body)} instructions")
    print(f"{len(old)} kernels before, {len(new)} now, {sum(come.values())} changed or new")
    return 1 if gone or come else 0


if __name__ == "__main__":
    sys.exit(main())
