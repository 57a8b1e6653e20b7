"""What `connect` takes for a process group, and what ranks outside of it hear."""

from __future__ import annotations

import os
from typing import Any

import pytest
from harness import HANGS, PATIENT, caught
from launched import exchange

import tokenway as tw

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("torch")]


def join(store: str) -> int:
    import torch.distributed as dist

    rank, nranks = int(os.environ["TOKENWAY_RANK"]), int(os.environ["TOKENWAY_NRANKS"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=nranks)
    return rank


def part(store: str, way: str) -> Any:
    """Two of three ranks connect; the third tries to."""
    import torch.distributed as dist

    join(store)
    group = dist.new_group([0, 1])
    found: list[Any] = []

    def meet() -> None:
        with tw.connect(group, backend=way, timeout=PATIENT) as comm:
            found.extend(exchange(comm))

    outcome = caught(meet)
    dist.barrier()
    dist.destroy_process_group()
    return outcome[:2], found


@pytest.mark.parametrize("way", ["auto", pytest.param("torch", marks=pytest.mark.long)])
def test_a_rank_outside(tmp_path, way) -> None:
    first, second, third = tw.run(part, 3, str(tmp_path / "store"), way, timeout=HANGS)
    assert first == second == (("twSuccess", ""), [0, 1])
    assert third == (("twInvalidArgument", "this rank (global rank 2) is not in process_group"), [])


def meshes(store: str) -> Any:
    import torch.distributed as dist

    rank = join(store)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    told = [caught(tw.connect, wrong)[:2] for wrong in (mesh, "ep", 5, dist)]
    with tw.connect(mesh["ep"], timeout=PATIENT) as comm:
        met = comm.nranks, comm.rank, exchange(comm)
    with tw.connect(dist.init_device_mesh("cpu", (4,)), timeout=PATIENT) as comm:
        met += (comm.rank == rank,)
    dist.destroy_process_group()
    return told, met


@pytest.mark.long
def test_meshes(tmp_path) -> None:
    for rank, (told, met) in enumerate(tw.run(meshes, 4, str(tmp_path / "store"), timeout=HANGS)):
        assert {result for result, _ in told} == {"twInvalidArgument"}
        assert told[0][1].startswith("process_group is a DeviceMesh of dimensions ('dp', 'ep'); give one's, as ")
        assert told[1][1] == "process_group is of type str; it must be a ProcessGroup, or a DeviceMesh of one dimension"
        assert met == (2, rank % 2, [0, 1], True)


def wish(store: str, wrong: dict[str, Any]) -> Any:
    """One rank asks for what cannot be."""
    import torch.distributed as dist

    rank = join(store)
    outcome = caught(lambda: tw.connect(**{"timeout": PATIENT} | (wrong if rank == 0 else {})).close())
    dist.destroy_process_group()
    return outcome[:2]


@pytest.mark.parametrize(
    ("wrong", "result", "told"),
    [
        ({"backend": "smoke"}, "twInvalidArgument", "backend is 'smoke'; it must be one of"),
        pytest.param(
            {"backend": "nvlink"}, "twUnsupported", "backend 'nvlink' is not for the CPU", marks=pytest.mark.long
        ),
        pytest.param(
            {"strategy": "lazy"}, "twInvalidArgument", "strategy is 'lazy'; it must be", marks=pytest.mark.long
        ),
        ({"timeout": "soon"}, "twInvalidArgument", "timeout is 'soon'; it must be from 0.001"),
    ],
)
def test_a_wish_that_cannot_be(tmp_path, wrong, result, told) -> None:
    """The others hear of it when they meet."""
    first, second = tw.run(wish, 2, str(tmp_path / "store"), wrong, timeout=HANGS)
    assert first[0] == result and told in first[1]
    assert second[0] == "twPeerRefused" and f"rank 0 cannot connect: {told}" in second[1]
