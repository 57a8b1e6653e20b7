"""Ranks, run and launch: what comes back, and what failures do."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import AT_ONCE, HANGS, PATIENT
from launched import exchange
from marks import but

import tokenway as tw
import tokenway.launch
from tokenway.launch import launch, script_command

pytestmark = pytest.mark.processes
SCRIPT = Path(__file__).with_name("launched.py")


# ---- what ranks run: importable, as they are other processes -------------------------------------


def meet(*args: Any) -> Any:
    with tw.connect(timeout=PATIENT) as comm:
        return comm.rank, exchange(comm), args


def fail_on(rank: int) -> int:
    with tw.connect(timeout=PATIENT) as comm:
        exchange(comm)
        if comm.rank == rank:
            raise ValueError(f"rank {comm.rank} does not want to")
        return comm.rank


def leave_on(rank: int, code: int) -> int:
    with tw.connect(timeout=PATIENT) as comm:
        if comm.rank == rank:
            os._exit(code)
        return comm.rank


def sleep_on(rank: int) -> int:
    with tw.connect(timeout=PATIENT) as comm:
        if comm.rank == rank:
            time.sleep(60)
        return comm.rank


def echo_environment(name: str) -> Any:
    return os.environ.get(name), os.environ["TOKENWAY_NRANKS"]


def fail_before_connecting(rank: int) -> None:
    if os.environ["TOKENWAY_RANK"] == str(rank):
        raise ValueError("no model here")
    with tw.connect(timeout=PATIENT):
        pass


def fail_in_a_group(rank: int) -> None:
    with (
        tw.connect(timeout=PATIENT) as comm,
        tw.Group(comm, experts=4, top_k=1, hidden=2, max_tokens=1, dtype="float32", timeout=PATIENT) as group,
    ):
        handle = group.route(np.zeros((1, 1), np.int32))
        if comm.rank == rank:
            raise KeyError("the culprit")
        group.dispatch(handle, np.zeros((1, 2), np.float32))


def leave_a_child_on(rank: int) -> None:
    """The rank is killed, and a process that it has forked lives on with all that it had open."""
    with tw.connect(timeout=PATIENT) as comm:
        if comm.rank == rank:
            if os.fork() == 0:
                time.sleep(30)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)


def note_and_sleep(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    time.sleep(60)


def square(value: int, connection: Any) -> None:
    connection.send((value * value, os.getppid()))


def have_children() -> list[int]:
    """By each way to start one: what it said."""
    with tw.connect(timeout=300) as comm:
        said = []
        for method in ("spawn", "fork", "forkserver"):
            context = multiprocessing.get_context(method)
            ours, theirs = context.Pipe(duplex=False)
            child = context.Process(target=square, args=(comm.rank + 2, theirs))
            child.start()
            said.append(ours.recv()[0])
            child.join()
        exchange(comm)
        return said


class Squares:
    """A data set."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> tuple[int, int]:
        return i * i, os.getpid()


def load_data() -> tuple[list[int], bool]:
    from torch.utils.data import DataLoader

    with tw.connect(timeout=300) as comm:
        values, workers = [], set()
        for value, worker in DataLoader(Squares(), batch_size=None, num_workers=1):
            values.append(value)
            workers.add(worker)
        exchange(comm)
        return values, os.getpid() in workers


def sleep_in(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    time.sleep(120)


def note_and_sleep_with_a_child(folder: str) -> None:
    child = multiprocessing.get_context("fork").Process(target=sleep_in, args=(folder,), daemon=True)
    child.start()
    sleep_in(folder)


def unpicklable() -> Any:
    return lambda: 1


# ---- run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nranks", [1, 3])
def test_values(nranks) -> None:
    values = tw.run(meet, nranks, "a", 2, timeout=60)
    assert values == [(r, list(range(nranks)), ("a", 2)) for r in range(nranks)]


@pytest.mark.parametrize("nranks", [0, -1, 1025])
def test_numbers_of_ranks(nranks) -> None:
    with pytest.raises(tw.InvalidArgument, match=rf"nranks is {nranks}; allowed 1\.\.1024"):
        tw.run(os.getpid, nranks)


@pytest.fixture
def patient(monkeypatch) -> None:
    """The one to blame has as long as it takes to fail, once another has because of it."""
    monkeypatch.setattr(tokenway.launch, "_CULPRIT", PATIENT)


@pytest.mark.usefixtures("patient")
def test_a_rank_that_raises() -> None:
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 of 2: .*ValueError: rank 1 does not want to"):
        tw.run(fail_on, 2, 1, timeout=60)
    assert time.monotonic() - begin < 45


def test_a_rank_that_raises_before_it_connects() -> None:
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 of 2: .*ValueError: no model here"):
        tw.run(fail_before_connecting, 2, 1)
    assert time.monotonic() - begin < 45


@pytest.mark.usefixtures("patient")
def test_the_culprit_is_named() -> None:
    """Not the ranks that fail because of it, which are of lower numbers here."""
    with pytest.raises(RuntimeError, match=r"(?s)rank 2 of 3: .*KeyError: 'the culprit'"):
        tw.run(fail_in_a_group, 3, 2, timeout=60)


@pytest.mark.parametrize(
    ("code", "told"), [(3, "ended with exit code 3"), (0, "the process ended before the function had returned")]
)
def test_a_rank_that_exits(code: int, told: str) -> None:
    with pytest.raises(RuntimeError, match=f"rank 0 of 2: {told}"):
        tw.run(leave_on, 2, 0, code, timeout=60)


def test_a_rank_that_is_killed_with_a_child() -> None:
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 of 2: ended with exit code -9"):
        tw.run(leave_a_child_on, 2, 1, timeout=60)
    assert time.monotonic() - begin < 45


def test_ranks_have_children() -> None:
    assert tw.run(have_children, 2, timeout=300) == [[4, 4, 4], [9, 9, 9]]


@pytest.mark.long
@pytest.mark.torch
def test_data_loaders(torch) -> None:
    assert tw.run(load_data, 2, timeout=300) == [([0, 1, 4, 9, 16, 25], False)] * 2


def test_a_value_that_cannot_travel() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 0 of 1: .*[Pp]ickle"):
        tw.run(unpicklable, 1, timeout=60)


def test_a_rank_that_hangs() -> None:
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[(0, )?1\] of 2 did not end within"):
        tw.run(sleep_on, 2, 1, timeout=4)
    assert time.monotonic() - begin < 45


# ---- Ranks ---------------------------------------------------------------------------------------


def test_killed_and_stopped() -> None:
    with tw.Ranks(sleep_on, 2, -1) as ranks:
        assert [outcome.value for outcome in ranks.wait(HANGS)] == [0, 1]
    with tw.Ranks(sleep_on, 2, 0) as ranks:
        outcomes = ranks.wait(HANGS, [1])
        assert outcomes[1].ok and outcomes[0] is None
        ranks.signal(0, signal.SIGSTOP)
        assert ranks.wait(0.2)[0] is None
        ranks.signal(0, signal.SIGKILL)
        killed = ranks.wait(HANGS)[0]
        assert killed.exitcode == -signal.SIGKILL and not killed.ok and killed.error is None
    with tw.Ranks(sleep_on, 2, 0) as ranks:  # leaving ends what runs, stopped or not
        ranks.signal(0, signal.SIGSTOP)
        processes = ranks.processes
    assert all(process.exitcode is not None for process in processes)


def test_environment_of_ranks() -> None:
    with tw.Ranks(echo_environment, 2, "SOME_VARIABLE", env={"SOME_VARIABLE": "x"}) as ranks:
        assert [outcome.value for outcome in ranks.wait(HANGS)] == [("x", "2")] * 2


# ---- launch --------------------------------------------------------------------------------------


@pytest.fixture
def from_here(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


@pytest.mark.usefixtures("from_here")
def test_launch_command(capfd) -> None:
    assert launch(script_command(str(SCRIPT), []), 3) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == [f"rank {r} of 3: [0, 1, 2]" for r in range(3)]


@pytest.mark.usefixtures("from_here")
def test_launch_fails_with_its_ranks() -> None:
    assert launch(script_command(str(SCRIPT), ["fail"]), 3) == 7


def test_launch_ends_the_others() -> None:
    text = "import os, time; time.sleep(0 if os.environ['TOKENWAY_RANK'] == '2' else 60); os._exit(4)"
    begin = time.monotonic()
    assert launch([sys.executable, "-c", text], 3) == 4
    assert time.monotonic() - begin < 45


def test_launch_of_a_rank_that_is_killed() -> None:
    text = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert launch([sys.executable, "-c", text], 2) == 128 + signal.SIGKILL


def lives(process: int) -> bool:
    """Whether it runs: one that nobody has waited for yet does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


SLEEP = "import os, sys, time; open(f'{sys.argv[1]}/{os.getpid()}', 'w').close(); time.sleep(60)"
TWO_SLEEP = f"launch([sys.executable, '-c', {SLEEP!r}, sys.argv[1]], 2)"
STARTERS = {
    "launch": f"from tokenway.launch import launch; sys.exit({TWO_SLEEP})",
    "run": "import tokenway, test_launch; tokenway.run(test_launch.note_and_sleep, 2, sys.argv[1])",
    "with children": "import tokenway, test_launch; "
    "tokenway.run(test_launch.note_and_sleep_with_a_child, 2, sys.argv[1])",
}


SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
QUICK = [("launch", signal.SIGKILL), ("run", signal.SIGHUP), ("with children", signal.SIGTERM)]


@pytest.mark.parametrize(("starter", "number"), but("long", QUICK, STARTERS, SIGNALS))
def test_a_starter_that_is_ended(starter, number, tmp_path) -> None:
    """Ranks do not outlive who has started them, nor their children them."""
    count = 4 if starter == "with children" else 2
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", f"import sys; {STARTERS[starter]}", str(tmp_path)], env=env)
    try:
        deadline = time.monotonic() + HANGS
        while len(list(tmp_path.iterdir())) < count and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        told = starter == "launch" and number != signal.SIGKILL
        assert process.wait(HANGS) == (128 + number if told else -number)
    finally:
        process.kill()
    ranks = [int(path.name) for path in tmp_path.iterdir()]
    assert len(ranks) == count
    deadline = time.monotonic() + AT_ONCE
    while any(map(lives, ranks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [rank for rank in ranks if lives(rank)]


def test_launch_under_nohup(tmp_path) -> None:
    code = f"import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); {STARTERS['launch']}"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=env)
    try:
        deadline = time.monotonic() + HANGS
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        assert all(lives(int(path.name)) for path in tmp_path.iterdir())
    finally:
        process.terminate()
        process.wait(HANGS)


def test_launch_of_nothing() -> None:
    with pytest.raises(FileNotFoundError):
        launch(["/nonexistent/program"], 2)


# ---- connect -------------------------------------------------------------------------------------


def test_connect_alone(monkeypatch) -> None:
    for name in ("TOKENWAY_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with tw.connect() as first, tw.connect() as second:
        assert (first.rank, first.nranks, second.nranks) == (0, 1, 1)
        assert exchange(first) == exchange(second) == [0]


def test_connect_with_a_broken_environment(monkeypatch) -> None:
    monkeypatch.setenv("TOKENWAY_RANK", "one")
    monkeypatch.setenv("TOKENWAY_NRANKS", "2")
    monkeypatch.setenv("TOKENWAY_ADDRESS", "x")
    with pytest.raises(tw.InvalidArgument, match="TOKENWAY_RANK is 'one'; it must be an integer"):
        tw.connect()
    monkeypatch.delenv("TOKENWAY_RANK")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(tw.Unsupported, match=r"WORLD_SIZE is 4 and LOCAL_WORLD_SIZE 2: .* one host only"):
        tw.connect()
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with pytest.raises(tw.InvalidArgument, match="LOCAL_WORLD_SIZE is None; it must be an integer"):
        tw.connect()
