"""Hosts that are namespaces of this machine: what they share, what not, and programs that are started on them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import Env

HERE = Path(__file__).parent


def where(env: Env) -> tuple[str, ...]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, socket.gethostname(), os.readlink("/proc/self/ns/net")


def test_hosts_have_nothing_in_common_and_their_ranks_all(world) -> None:
    made = world((1, 2, 2), "cpu")
    made.key = None  # a comm would not come about
    seen = [ask(made, rank) for rank in made.everyone]
    assert seen[1] == seen[2] and seen[3] == seen[4]
    for a, b in ((0, 1), (0, 3), (1, 3)):
        assert all(here != there for here, there in zip(seen[a], seen[b], strict=True))


def ask(made: Any, rank: int) -> tuple[str, ...]:
    """Where a rank is, of a comm that has no other."""
    made.workers.connections[rank].send((("alone", 0, "cpu", f"alone-{os.getpid()}-{rank}"), 0, 1, where, ()))
    ((fine, told),) = made.workers.collect([rank], 60.0)
    assert fine, told
    return told


def spread(words: str, *command: str) -> subprocess.CompletedProcess[str]:
    module = [sys.executable, "-m", "tokenway.bench.namespaces", words, "--"]
    return subprocess.run([*module, *command], capture_output=True, text=True, timeout=300)


NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def test_a_command_on_every_rank(tmp_path) -> None:
    """With the variables that torchrun would set, in the folder where it was called."""
    program = "import os, json, sys; "
    program += (
        f"json.dump([os.environ[n] for n in {NAMES}] + [os.getcwd()], open(sys.argv[1] + os.environ['RANK'], 'w'))"
    )
    done = spread("1,2", sys.executable, "-c", program, f"{tmp_path}/")
    assert done.returncode == 0, done.stderr
    told = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert [line[:5] for line in told] == [
        ["0", "3", "0", "1", "0"],
        ["1", "3", "0", "2", "1"],
        ["2", "3", "1", "2", "1"],
    ]
    assert len({tuple(line[5:]) for line in told}) == 1 and told[0][-1] == os.getcwd()


def test_a_rank_that_fails(tmp_path) -> None:
    """Ends the others, and the command ends as it did; no network stays."""
    before = links()
    program = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(600)"
    assert spread("2x1", sys.executable, "-c", program).returncode == 7
    assert links() == before


def links() -> str:
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1, 1)])
def test_networks_end(network, sizes) -> None:
    before = links()
    made = network(sizes)
    assert len(links().splitlines()) == len(before.splitlines()) + 1 + len(sizes)
    holders = [host.pid for host in made.hosts]
    made.close()
    assert links() == before
    assert not any(Path(f"/proc/{pid}").exists() for pid in holders)
