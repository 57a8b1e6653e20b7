"""A process that takes the place of one that died while ranks connect, when others' links stood already."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import HANGS, PATIENT

pytestmark = pytest.mark.processes

CONNECT = """
import sys, tokenway as tw
rank, address, timeout = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
print("comes", flush=True)
with tw.Comm.shm(rank, 3, address, timeout=timeout) as comm:
    print("connected", comm.rank, flush=True)
"""


class Started:
    """A process that connects as a rank of three."""

    def __init__(self, rank: int, address: str):
        command = [sys.executable, "-c", CONNECT, str(rank), address, str(PATIENT)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self.process.stdout is not None and self.process.stdout.readline() == "comes\n"

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> str:
        """What it said."""
        return self.process.communicate(timeout=HANGS)[0].strip()


def replaced(folder: Path, pause: float) -> list[str]:
    """What ranks 0, 1 and the second rank 2 say. Rank 1 has all links, and has told so, when the first rank 2 is
    killed; rank 0 sleeps until the second has come, so that nobody is connected before. pause: seconds for what cannot
    be seen from outside."""
    address = str(folder / f"replaced-{os.getpid()}")
    ranks = [Started(0, address), Started(1, address)]
    time.sleep(pause)
    ranks[0].signal(signal.SIGSTOP)
    first = Started(2, address)
    time.sleep(pause)
    ranks[1].signal(signal.SIGSTOP)
    first.signal(signal.SIGKILL)
    first.end()
    ranks.append(Started(2, address))
    time.sleep(pause)
    for rank in (1, 0):
        ranks[rank].signal(signal.SIGCONT)
        time.sleep(pause)
    return [rank.end() for rank in ranks]


def test_the_second_process_learns_that_links_stand(tmp_path) -> None:
    """Where the second comes later than the pause allows for, rank 1 finds the first dead, and all may try again."""
    for pause in (0.5, 2.0, 8.0):
        folder = tmp_path / str(pause)
        folder.mkdir()
        said = replaced(folder, pause)
        if any("is gone" in text for text in said):
            continue
        assert said == [f"connected {rank}" for rank in range(3)]
        return
    pytest.skip("this machine is too busy for a process to come in time")
