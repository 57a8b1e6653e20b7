"""The portable backend beside the others: no way to exchange changes a bit, and connect() takes the right one. What a
group does is tested by the suite: --backend torch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import harness
import ml_dtypes
import numpy as np
import player
import pytest
from cases import Case, Round, Setup, verify_case
from harness import HANGS, PATIENT, caught
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from portable_backend import WAYS
from strategies import EXAMPLES
from strategies import cases as any_case
from test_properties import HARD

import tokenway as tw
from tokenway import callbacks, portable
from tokenway.bench import report, timing
from tokenway.bench.tables import portable as portable_table

pytestmark = pytest.mark.usefixtures("torch")

EVERY_WAY = pytest.mark.parametrize("way", list(WAYS))


def play(way: str, case: Case) -> list[Any]:
    return harness.Threads(way, case.setup.ranks).run(player.play, case)


@settings(max_examples=max(4, EXAMPLES // 5), deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
@example("torch", HARD)
@example("torch-exact", HARD)
@example("torch-fixed", HARD)
@example("torch-gathered", HARD)
@example("torch-ring", HARD)
@example("torch-split", HARD)
@given(st.sampled_from(list(WAYS)), any_case(max_ranks=4))
def test_no_way_changes_a_bit(way: str, case: Case) -> None:
    verify_case(case, play(way, case))


@EVERY_WAY
@pytest.mark.parametrize("overflow", ["refuse", "drop"])
def test_high_throughput(way: str, overflow: str) -> None:
    """Rows go to their final places, and those that are dropped are dropped in every way."""
    room = {"max_recv_tokens": 9} if overflow == "drop" else {}
    setup = Setup(
        ranks=3,
        experts=7,
        top_k=3,
        hidden=9,
        max_tokens=8,
        payloads=((5, "uint8"),),
        mode="high_throughput",
        row_alignment=8,
        overflow=overflow,
        lanes=2,
        **room,
    )
    rounds = [Round((8, 0, 5), seed=s, layout=layout) for s, layout in ((0, "flat"), (1, "grouped"))]
    case = Case(setup, tuple((round_,) for round_ in rounds))
    verify_case(case, play(way, case))


@EVERY_WAY
def test_completed_in_any_order(way: str) -> None:
    """Ranks complete what they sent on several channels in orders of their own: no two wait for each other."""
    setup = Setup(ranks=3, experts=6, top_k=4, hidden=100, max_tokens=64, lanes=4)
    rounds = tuple(Round((64, 64, 64), seed=s, send_dispatch=True, send_combine=True) for s in range(4))
    for order in range(5):
        case = Case(setup, (rounds,), order=order)
        verify_case(case, play(way, case))


def describe_group(env: harness.Env, settings: dict[str, Any]) -> portable.PortableInfo | None:
    with tw.Group(env.comm, **settings) as group:
        return portable.describe(group.pointer)


def test_what_was_measured() -> None:
    """Ranks agree on it, and a block is no longer than the longest message."""
    setup = {"experts": 4, "top_k": 2, "hidden": 8, "max_tokens": 4}
    infos = harness.Threads("torch", 3).run(describe_group, setup)
    assert infos[0] == infos[1] == infos[2]
    info = infos[0]
    assert info.strategy == "auto"
    assert min(info.exchange_us, info.exchange_rate, info.gather_us, info.gather_rate) > 0
    # A row: 16 bytes of payload, header and routing of 8 + 2 * 8, and 16 for each of the two puts.
    longest = -(-4 * (16 + 24 + 32) // 64) * 64
    assert 0 <= info.inline_bytes <= longest
    assert harness.Threads("torch-fixed", 2).run(describe_group, setup)[0].inline_bytes == longest
    assert harness.Threads("torch-exact", 2).run(describe_group, setup)[0].inline_bytes == 0
    assert harness.Threads("cpu", 2).run(describe_group, setup) == [None, None]


def connect_differently(env: harness.Env) -> tuple[str, str, Any]:
    from portable_backend import file_allgather

    allgather = file_allgather(env.rank, env.nranks, f"differ-{os.getppid()}")
    strategy = "routed" if env.rank else "gathered"
    return caught(tw.Comm.portable, env.rank, env.nranks, allgather, strategy=strategy, capacity=64)


def test_strategies_differ() -> None:
    for result, text, _ in harness.Processes("cpu", 2).run(connect_differently):
        assert result == "twConfigMismatch"
        assert "strategy, inline_bytes or on_device differ: rank 0 has gathered and 64, r" in text


@pytest.mark.parametrize(
    ("keywords", "kind", "text"),
    [
        (
            {"backend": "tcp"},
            tw.InvalidArgument,
            "backend is 'tcp'; it must be one of 'auto', 'shm', 'fabric', 'nv",
        ),
        ({"backend": "torch"}, tw.InvalidUsage, "torch.distributed is not initialised"),
        ({"backend": "nvlink"}, tw.Unsupported, "backend 'nvlink' is not for the CPU"),
        ({"backend": "shm", "device": 0}, tw.Unsupported, "backend 'shm' is not for device 0"),
        (
            {"backend": "torch", "strategy": "ring"},
            tw.InvalidArgument,
            "strategy is 'ring'; it must be 'routed'",
        ),
        (
            {"backend": "torch", "capacity": -1},
            tw.InvalidArgument,
            "capacity is -1; it must be 'auto', 'exa",
        ),
        ({"backend": "torch", "capacity": True}, tw.InvalidArgument, "capacity is True"),
        ({"backend": "shm", "strategy": "routed"}, tw.InvalidArgument, "strategy is given, and backend 'shm' has no"),
    ],
)
def test_connect_refuses(keywords: dict[str, Any], kind: Any, text: str) -> None:
    with pytest.raises(kind, match=text):
        tw.connect(**keywords)


def connected(rank: int, port: int, kind: str) -> None:
    """A user's program: prints what connect() took and why, and that an exchange works."""
    import logging

    import torch.distributed as dist
    from launched import exchange

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s: %(message)s")
    if kind != "gloo":  # a backend that somebody else has registered, for host memory
        make = lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout)  # noqa: E731
        dist.Backend.register_backend(kind, make, devices=["cpu"])
    dist.init_process_group(kind, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    told = {}
    for backend in ("auto", "shm", "torch"):
        with tw.connect(backend=backend, timeout=PATIENT) as comm:
            told[backend] = (comm.backend, comm.why, exchange(comm))
    differs = caught(tw.connect, backend="shm" if rank else "torch", timeout=PATIENT)[:2]
    print(json.dumps([told, differs]), flush=True)
    dist.destroy_process_group()


def started(function: str, *arguments: str) -> list[subprocess.Popen[str]]:
    """Two ranks that call a function of this file with their rank, a free port and the arguments."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = f"import sys, test_portable; test_portable.{function}(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path]),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(port), *arguments], env=environment, text=True, **pipes
        )
        for rank in range(2)
    ]


def left(rank: int, port: int) -> None:
    """Rank 0 ends by an error, with its group open, while rank 1 does not come."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    group = tw.Group(
        tw.connect(backend="torch", timeout=PATIENT), experts=2, top_k=1, hidden=4, max_tokens=2, timeout=0.5
    )
    handle = group.route(np.array([[1 - rank]], np.int32))
    print("here", flush=True)
    if rank == 1:
        sys.stdin.read()
        os._exit(0)
    group.dispatch(handle, np.ones((1, 4), ml_dtypes.bfloat16))


@pytest.mark.processes
def test_leaving_by_an_error() -> None:
    """A process that ends so is not kept by a peer that is late."""
    early, late = started("left")
    try:
        assert late.stdout is not None and late.stdout.readline() == "here\n"
        log = early.communicate(timeout=HANGS)[1]
        assert "PeerTimeout: rank 1 did not arrive in time in dispatch" in log
        assert early.returncode == 1 and late.poll() is None
    finally:
        early.kill()
        late.kill()
        late.communicate()


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["gloo", pytest.param("anothers", marks=pytest.mark.long)])
def test_connect_over_a_process_group(kind: str) -> None:
    ranks = started("connected", kind)
    ends = [process.communicate(timeout=HANGS) for process in ranks]
    for rank, (out, log) in enumerate(ends):
        assert ranks[rank].returncode == 0, log
        told, differs = json.loads(out.splitlines()[-1])
        assert told["auto"] == ["shm", "all ranks are on one host", [0, 1]]
        assert told["shm"] == ["shm", "it was asked for", [0, 1]]
        assert told["torch"] == ["torch", "it was asked for", [0, 1]]
        assert differs == ["twConfigMismatch", "backend differs: rank 0 has 'torch', rank 1 has 'shm'"]
        assert ("tokenway: 2 ranks, backend 'torch': it was asked for" in log) == (rank == 0)


@pytest.mark.long
def test_bench(tmp_path) -> None:
    """Every way of the bench is verified at every point; gathered has auto's blocks, and auto two groups."""
    data = tmp_path / "run.json"
    command = [sys.executable, "-m", "tokenway.cli", "bench", "--backend", "torch", "--ranks", "2", "--tokens", "1,3"]
    ways = ["routed", "gathered", "auto", "fixed", "gathered-exact"]
    command += [
        "--top-k",
        "1",
        "4",
        "--profile",
        "qwen3-30b-a3b",
        "--strategy",
        *ways,
        "--iterations",
        "2",
        "--rounds",
        "1",
        "--quick",
        "--json",
        str(data),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("qwen3-30b-a3b")]
    assert [line[1:3] for line in lines] == [["1", "1"], ["1", "3"], ["4", "1"], ["4", "3"]]
    assert all(line.count("(1.00x)") >= 1 and len(line) == 4 + 2 * len(ways) + 2 for line in lines)
    assert "auto takes at most" in done.stdout and "two groups of auto's" in done.stdout
    run = json.loads(data.read_text())
    for row in run["rows"]:
        assert list(row["ways"]) == ways and len(row["again"]["rounds"]) == 1
        assert row["portable"]["gathered"]["inline_bytes"] == row["portable"]["auto"]["inline_bytes"]
    assert "medians of 2 iterations in 1 rounds" in report.markdown(run)


def timed(*rounds: float) -> dict[str, Any]:
    return timing.summary([[us, us] for us in rounds])


def test_bench_of_wrong_results(tmp_path) -> None:
    """All ranks learn of a difference, and close what they have: nothing is said but that."""
    spoiled = (
        "import tokenway as tw\n"
        "honest = tw.Group.combine\n"
        "def combine(self, *args, **kwargs):\n"
        "    out = honest(self, *args, **kwargs)\n"
        "    out.view('u2')[...] ^= 1\n"
        "    return out\n"
        "tw.Group.combine = combine\n"
    )
    (tmp_path / "sitecustomize.py").write_text(spoiled)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "tokenway.cli", "bench", "--backend", "torch", "--ranks", "2", "--tokens", "1"]
    command += ["--strategy", "routed", "--top-k", "1", "--profile", "qwen3-30b-a3b", "--quick", "--verify-only"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 1 and "tokenway bench: " in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "group" not in done.stderr, done.stderr


def test_bench_table() -> None:
    """Ratios are those of turns that followed each other, so a machine that is busy for some rounds changes none."""
    quick = {"routed": timed(10, 90, 10), "gathered": timed(16, 144, 16), "auto": timed(90, 11, 11)}
    busy = {"routed": timed(10, 90, 90), "gathered": timed(20, 180, 180), "auto": timed(12, 12, 108)}
    rows = [
        {"profile": "p", "top_k": 1, "tokens": t, "rows_moved": 3, "ways": ways, "again": timed(9, 99, 12)}
        for t, ways in ((1, quick), (2, busy))
    ]
    settings = {"portable": {"strategies": ["routed", "gathered", "auto"]}, "iterations": 6, "rounds": 3}
    heads, cells = portable_table.columns({"settings": settings, "rows": rows})
    assert heads[-2:] == ["auto / better", "auto / itself"]
    assert [line[-2] for line in cells] == ["1.10x", "1.20x"]
    run = {"settings": settings, "rows": rows}
    assert portable_table.notes(run)[2] == "auto takes at most 1.20x the better one, 1.10x or less at 1 of 2 points"
    assert portable_table.iterations(run) == "6 iterations in 3 rounds"
    rows[0]["ways"]["routed"] = timed(*[10] * 9)
    assert portable_table.iterations(run) == "6 to 18 iterations in 3 to 9 rounds"
    for row in rows:  # nothing to compare
        del row["ways"]["auto"], row["again"]
    settings["portable"]["strategies"].remove("auto")
    heads, cells = portable_table.columns(run)
    assert heads[-1] == "gathered us" and all(len(line) == len(heads) for line in cells)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--strategy", "auto"], "--strategy: only with --backend torch"),
        (["--backend", "torch", "--strategy", "ring"], "--strategy: 'ring'"),
        (["--backend", "torch", "--top-k", "0"], "--top-k: 0; allowed 1..64"),
        (["--backend", "torch", "--layout", "flat"], "--layout: rank_major or expert_major with --backend torch"),
        (["--backend", "torch", "--backward"], "--backward: not with --backend torch"),
    ],
)
def test_bench_refuses(arguments: list[str], text: str, capsys: Any) -> None:
    from tokenway import cli

    assert cli.main(["bench", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_info() -> None:
    from tokenway import info

    assert info.collect()["backends"]["torch"].startswith("available")


def test_a_row_of_zeros_is_not_lost() -> None:
    """A group whose ranks have nothing to send still exchanges: frames travel alone."""
    setup = Setup(ranks=3, experts=6, top_k=2, hidden=4, max_tokens=8)
    for way in WAYS:
        case = Case(setup, ((Round((0, 0, 0)),), (Round((0, 8, 0), routing="one"),)))
        verify_case(case, play(way, case))


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), TimeoutError("a watchdog's")])
def test_an_interrupt_ends_no_wait(interrupt: BaseException) -> None:
    """What a signal's handler raises while the C library waits: told afterwards, and no peer is taken for gone."""

    class Interrupted:
        def wait(self, move: int, timeout_ms: int) -> int:
            raise interrupt

    carrier = portable.Carrier()
    carrier._channels[1] = Interrupted()
    assert carrier._wait(None, 1, 1, 100) == 0
    with pytest.raises(type(interrupt)):
        callbacks.tell()
    callbacks.tell()
