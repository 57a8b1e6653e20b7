"""How ranks on GPUs find each other: the launchers, process groups, and what a comm says of itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import launched_gpu
import pytest
import torch
from harness import caught

import tokenway as tw

SCRIPT = Path(__file__).with_name("launched_gpu.py")


def environment() -> dict[str, str]:
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in dropped}
    return kept | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("mode", [[], ["gloo"], ["nccl"]], ids=["environment", "gloo", "nccl"])
def test_torchrun(two_devices, mode) -> None:
    """With torchrun's environment alone, and over process groups."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(SCRIPT), *mode], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        assert f"rank {rank} of 2 on cuda:{rank}: [0, 1]" in done.stdout, done.stdout


def test_own_launcher(two_devices) -> None:
    assert tw.run(launched_gpu.meet, 2, timeout=120) == [(0, [0, 1]), (1, [0, 1])]


@pytest.mark.parametrize(("way", "found"), [("auto", "nvlink"), ("torch", "torch")])
def test_a_store_needs_no_process_group(two_devices, tmp_path, way: str, found: str) -> None:
    met = tw.run(launched_gpu.meet_at, 2, str(tmp_path / "store"), way, timeout=120)
    assert met == [(found, [0, 1])] * 2


def test_one_rank_alone() -> None:
    with tw.connect(device="cuda", timeout=20) as comm:
        assert (comm.rank, comm.nranks) == (0, 1)
        assert comm.device == torch.cuda.current_device()
        assert launched_gpu.exchange(comm) == [0]


def test_devices_of_local_ranks(devices) -> None:
    wanted = [0, 0, devices - 1]
    comms = tw.local_comms(3, devices=wanted, timeout=20)
    assert [comm.device for comm in comms] == wanted
    for comm in comms:
        comm.close()
    for comm in tw.local_comms(2):
        assert comm.device is None
        comm.close()


@pytest.mark.parametrize("wrong", [[0], [0, 999], [0, -5], [0, 0, 0]])
def test_wrong_devices(wrong) -> None:
    outcome = caught(tw.local_comms, 2, devices=wrong)
    assert outcome[0] in ("twInvalidArgument", "twUnsupported") and "device" in outcome[1], outcome


def test_too_many_ranks_on_a_device() -> None:
    outcome = caught(tw.local_comms, 17, devices=[0] * 17)
    assert outcome[0] in ("twInvalidArgument", "twUnsupported") and "16" in outcome[1], outcome


def sizes(env: Any) -> tuple[int, int]:
    """Free device memory before groups and after they are closed."""
    settings: dict[str, Any] = {"experts": 8, "top_k": 4, "hidden": 4096, "max_tokens": 512, "lanes": 2}

    def free() -> int:
        env.stream.synchronize()
        return torch.cuda.mem_get_info(env.device)[0]

    with tw.Group(env.comm, **settings):
        pass
    before = free()
    for _ in range(5):
        with tw.Group(env.comm, **settings) as group:
            assert group.window_bytes().window > 1 << 20
    return before, free()


def test_windows_are_given_back(pair) -> None:
    for before, after in pair.run(sizes):
        assert after >= before - (8 << 20), (before, after)
