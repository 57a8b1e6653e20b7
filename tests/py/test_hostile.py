"""Rubbish into the C API, in a child: no crash, no hang, always a sentence. See hostile.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = int(os.environ.get("HOSTILE", "2500"))


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_rubbish(seed: int) -> None:
    script = Path(__file__).with_name("hostile.py")
    path = os.pathsep.join([str(script.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, str(script), str(seed), str(CASES)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr[-4000:]}"
    # It must have come past the first check of everything, not only been turned away.
    for name in ("twDispatch", "twCombine", "twComplete", "twHandleCreate", "twGroupCreate"):
        assert f"{name}: twSuccess" in done.stdout, done.stdout
        assert f"{name}: twInvalidArgument" in done.stdout, done.stdout
