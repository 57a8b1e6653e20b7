"""What tests of integrations have in common."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import need

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "FRAMEWORKS.md"
# Packages that `make test-frameworks` has and no other target: scripts/setup.sh.
APART = ROOT / ".venv" / "frameworks"
SGLANG_APART = ROOT / ".venv" / "sglang"


_here: list[Any] = []  # the device of this process's rank


def devices() -> int:
    """How many CUDA devices ranks may have."""
    import torch

    return torch.cuda.device_count()


def on_devices(ranks: int = 2) -> bool:
    """Whether so many ranks have a device each. Of fewer devices none is used (`need_devices`)."""
    return devices() >= ranks


def need_devices(ranks: int = 2) -> None:
    """Skips where there are devices, but not one for each rank: frameworks take the device that they find, and NCCL
    refuses two ranks on one."""
    if 0 < devices() < ranks:
        pytest.skip(f"{ranks} ranks need a device each, or a machine without any; there are {devices()}")


def begin(store: str | Path, ranks: int, blocking: bool = True) -> tuple[int, Any]:
    """(rank, device) of a process in the default process group: on the CPU over gloo, or on a device each, whose
    tensors go over NCCL, while what frameworks tell each other on the host still goes over gloo.

    blocking: calls return their own errors on devices too, as the tests of errors expect."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["TOKENWAY_RANK"])
    torch.set_num_threads(1)  # ranks share the cores
    device, backend = torch.device("cpu"), "gloo"
    if on_devices(ranks):
        # Before the first call of Tokenway's, which reads it; RANK and the like are the business of who wants them.
        os.environ["TOKENWAY_BLOCKING"] = "1" if blocking else "0"
        device, backend = torch.device("cuda", rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)  # where frameworks and NCCL look
    _here[:] = [device]
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    return rank, device


def here() -> Any:
    """The device of this rank, once it has begun: inputs, which are drawn on the CPU so that both have the same, are
    moved to it."""
    return _here[0]


def within(tolerance: float, ranks: int = 2) -> float:
    """How far results may lie from one rank's. On devices five times as far as on CPUs: cuBLAS takes its kernel by the
    shape, so that products of a share of the rows or heads add in other blocks, and some kernels add in no fixed
    order. A mutation's two per cent are far more in float32."""
    return 5 * tolerance if on_devices(ranks) else tolerance


def programs_of(heading: str) -> list[str]:
    """The Python that a section of the guide shows."""
    text = GUIDE.read_text(encoding="utf-8")
    section = re.split(r"^## ", text, flags=re.MULTILINE)
    (found,) = [part for part in section if part.startswith(f"{heading}\n")]
    return re.findall(r"```python\n(.*?)```", found, re.DOTALL)


def need_version(package: str, version: str) -> None:
    """Skips without the version that tests are for."""
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    need(found == version, f"{package} {version} (here: {found})")


@contextmanager
def packages_apart(folder: Path = APART) -> Iterator[None]:
    """With the packages of `make test-frameworks`, here and in processes that are started, behind all others."""
    kept = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [kept]), str(folder)])
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        if kept is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = kept


def framework_apart(versions: dict[str, str], folder: Path = APART) -> Any:
    """A fixture of a module: the packages of `make test-frameworks`, while its tests run. Skips without these versions,
    and where ranks would share a device."""

    @pytest.fixture(scope="module")
    def apart(torch: Any) -> Iterator[None]:
        with packages_apart(folder):
            importlib.invalidate_caches()
            for package, version in versions.items():
                need_version(package, version)
            need_devices()
            yield

    return apart


def install_entry_points(folder: Path) -> None:
    """Makes the entry points of pyproject.toml known in this process, as an installation does."""
    import tomllib  # which Python 3.10 lacks

    told = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    groups = ("\n".join([f"[{group}]", *(f"{name} = {of}" for name, of in told[group].items())]) for group in told)
    info = folder / "tokenway-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tokenway\nVersion: 0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("\n".join(groups) + "\n", encoding="utf-8")
    sys.path.append(str(folder))
    importlib.invalidate_caches()


def attempt(function: Any, *args: Any) -> Any:
    """What a call returns, or (the error's name, what it says and where)."""
    try:
        return function(*args)
    except Exception as error:
        return type(error).__name__, f"{error}\n{traceback.format_exc()}"


def mutated(module: Any, old: str, new: str) -> Any:
    """A module whose source says `new` where that of `module` says `old`."""
    text = Path(module.__file__).read_text(encoding="utf-8")
    assert text.count(old) == 1, f"the adapter holds the text to change {text.count(old)} times, not once: {old}"
    made = sys.modules["mutant"] = types.ModuleType("mutant")  # where a dataclass looks itself up
    exec(compile(text.replace(old, new), "mutant", "exec"), made.__dict__)
    return made


def assert_caught(outcomes: list[Any], judge: Callable[[list[Any]], object], raises: bool = False) -> None:
    """That a test notices a mutation, of which ranks have these outcomes: its judge refuses them. raises: the mutation
    makes calls raise. No other may: an error, which no judge takes, would hide whether results are looked at."""
    assert raises or all(isinstance(each, dict) for each in outcomes), outcomes
    with pytest.raises(AssertionError):
        judge(outcomes)


def whole(tensor: Any) -> Any:
    """A gradient as NumPy has it; of one that ranks have a part each of, all of it: collective."""
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().float().cpu().numpy().copy()


def steps() -> int:
    """Of all groups of Tokenway's in this process."""
    from tokenway.integrations import groups

    return sum(shared.steps for peers in groups.living() for shared in peers.groups.values())


def await_moves(moved: Any) -> None:
    """However busy the machine is: plans and copies that were begun end before the next step."""
    if moved._planning is not None:
        moved._planning.exception()
    moved.balancer.wait()


def check_maps(ranks: list[Any], experts: int, slots: int) -> None:
    """What ranks have found of a framework's own maps behind moves: where each expert is is what the slots say, a slot
    of each rank is spare, and the others' weights are those of their experts."""
    for found in ranks:
        for layer, table in enumerate(found["physical"]):
            places = [[p for p, held in enumerate(table) if held == expert] for expert in range(experts)]
            assert [[p for p in row if p >= 0] for row in found["logical"][layer]] == places
            assert found["counts"][layer] == [len(each) for each in places]
    for rank, found in enumerate(ranks):
        for layer, table in enumerate(found["physical"]):
            mine = table[rank * slots : (rank + 1) * slots]
            assert mine.count(-1) == 1
            assert all(expert in (-1, held) for expert, held in zip(mine, found["held"][layer], strict=True))
