"""Parameters of a framework's layers that become views of a window, from which experts move."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness import said

import tokenway as tw

pytestmark = [pytest.mark.torch, pytest.mark.needs("loads"), pytest.mark.usefixtures("torch")]

EXPERTS, SLOTS = 4, 3  # of all ranks, and of each of two, a spare one too
FIRST = [0, 1, 0, 2, 3, 2]  # what slots of two ranks hold at first, in the last of each what is to be spare


@pytest.fixture(autouse=True)
def on_the_cpu(backend: str) -> None:
    if backend not in ("cpu", "emulated"):
        pytest.skip("parameters are on the CPU, or where it stands for a device")


@dataclass
class Config:
    """As kernels hold parts of parameters."""

    scale: Any
    parts: Any


class Slotted:
    """Likewise."""

    __slots__ = ("half",)

    def __init__(self, half: Any):
        self.half = half


def values(name: int, expert: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([name, expert]).integers(-9, 10, shape)


def layer_of(rank: int, layer: int) -> tuple[dict[str, Any], Any]:
    """(a layer's parameters as quantised ones may be, what holds parts of them)."""
    import torch

    mine = [FIRST[rank * SLOTS + place] for place in range(SLOTS)]

    def tensor(name: int, shape: tuple[int, ...], dtype: Any) -> Any:
        return torch.from_numpy(np.stack([values(10 * layer + name, e, shape) for e in mine])).to(dtype)

    weight, scale = tensor(0, (8, 4), torch.bfloat16), tensor(1, (2, 6), torch.float32)
    found = {
        "weight": torch.nn.Parameter(weight, requires_grad=False),
        "bytes": torch.nn.Parameter(tensor(2, (5,), torch.int8), requires_grad=False),
        "scale": torch.nn.Parameter(scale.transpose(1, 2), requires_grad=False),  # [L, 6, 2], by column
        "factor": torch.nn.Parameter(tensor(3, (), torch.float32), requires_grad=False),
    }
    halves = {"up": found["weight"].data[:, :4], "down": found["weight"].data[:, 4:]}
    holder = SimpleNamespace(
        config=Config(found["scale"].data.transpose(1, 2), [found["factor"].data, halves]),
        slotted=Slotted(found["weight"].data.view(SLOTS, -1)[:, 16:]),
        other=[torch.zeros(3), torch.zeros(3, device="meta"), torch.eye(3).to_sparse()],
    )
    return found, holder


def holds(parameters: dict[str, Any], holder: Any, layer: int, place: int, expert: int) -> bool:
    """Whether a slot has all of an expert, and what holds parts of it has too."""
    want = {
        name: values(10 * layer + i, expert, shape)
        for i, (name, shape) in enumerate({"weight": (8, 4), "scale": (2, 6), "bytes": (5,), "factor": ()}.items())
    }
    shown = {name: parameters[name][place].float().numpy() for name in parameters}
    shown["scale"] = shown["scale"].T
    parts = holder.config.parts
    also = {
        "weight": np.concatenate([parts[1][name][place].float().numpy() for name in ("up", "down")]),
        "scale": holder.config.scale[place].numpy(),
        "factor": parts[0][place].numpy(),
    }
    half = np.array_equal(holder.slotted.half[place].float().numpy(), want["weight"].reshape(-1)[16:])
    return half and all(np.array_equal(found[name], want[name]) for found in (shown, also) for name in found)


def run_moves(env: Any) -> Any:
    """A plan that is given: what each slot has before and after it."""
    with env.context():
        return moves(env)


def moves(env: Any) -> Any:
    from tokenway.integrations import moved_experts

    assert moved_experts.first_map(EXPERTS, 2 * SLOTS, 2, "slots").tolist() == FIRST
    made = [layer_of(env.rank, layer) for layer in range(2)]
    addresses = [parameters["weight"].data_ptr() for parameters, _ in made]
    kept = []

    def make(placement: tw.Placement) -> Any:
        shape = {"experts": EXPERTS, "top_k": 1, "hidden": 4, "max_tokens": 8, "dtype": "float32"}
        kept.append(tw.Group(env.comm, **shape, expert_map=placement))
        return SimpleNamespace(group=kept[0], before_close=[])

    def policy(loads: np.ndarray, now: np.ndarray) -> np.ndarray:
        assert loads.shape == (2, EXPERTS) and sorted(now[0].tolist()) == now[1].tolist() == [0, 1, 2, 3]
        return np.array([[2, 1, 0, 3], [0, 1, 2, 3]])

    settings = moved_experts.Settings(EXPERTS, 2, SLOTS, 2, 100, policy)
    moved = moved_experts.MovedExperts([each for each, _ in made], [holder for _, holder in made], settings, make)
    shows = [parameters["weight"].data_ptr() for parameters, _ in made]
    found: dict[str, Any] = {"elsewhere": all(old != new for old, new in zip(addresses, shows, strict=True))}
    found["before"] = [
        holds(*made[layer], layer, place, FIRST[env.rank * SLOTS + place]) for layer in range(2) for place in range(2)
    ]
    changes: dict[int, Any] = {}
    for _ in range(60):
        for layer in range(2):
            handle = kept[0].route(env.backend.tensor(np.array([[0], [3]])), layer=layer)
            kept[0].combine(handle, kept[0].dispatch(handle, env.backend.tensor(np.ones((2, 4), np.float32))).tokens)
            handle.release()
        if moved._planning is not None:
            moved._planning.exception()
        changes |= {layer: table.tolist() for layer, table in moved.step().items()}
    found["changes"], found["tables"] = changes, moved.tables().tolist()
    mine = np.array(found["tables"])[:, env.rank * SLOTS : (env.rank + 1) * SLOTS]
    found["after"] = [
        holds(*made[layer], layer, place, int(mine[layer, place])) for layer, place in np.argwhere(mine >= 0)
    ]
    moved.close()
    kept[0].close()
    return found


def test_experts_move_with_all_that_is_theirs(world) -> None:
    """Whatever parameters are like, and whatever holds a part of them."""
    first, second = world(2).run(run_moves)
    for found in (first, second):
        assert found["elsewhere"] and found["before"] == [True] * 4 and found["after"] == [True] * 4
        assert found["changes"].keys() == {0} and found["tables"] == first["tables"]
        assert found["tables"][1] == [0, 1, -1, 2, 3, -1]
    held = np.array(first["tables"][0]).reshape(2, SLOTS)
    assert sorted(held[0].tolist()) == [-1, 1, 2] and sorted(held[1].tolist()) == [-1, 0, 3]


@pytest.mark.torch
@pytest.mark.parametrize("when", ["before", "on the way", "behind"])
def test_what_did_not_move_is_as_it_was(torch, when) -> None:
    """Where there is no window for them, or what follows fails: parameters, and what holds parts of them."""
    from tokenway.integrations.moved_experts import _Moving

    made = [layer_of(0, layer) for layer in range(2)]
    parameters = [each for each, _ in made]
    sizes = {name: x.numel() * x.element_size() for name, x in parameters[0].items()}
    asked: list[str] = []

    def memory(name: str, layer: int) -> Any:
        asked.append(name)
        if when == "on the way" and len(asked) == 2 * len(sizes) + 2:
            raise tw.OutOfMemory("no window")
        return torch.zeros(SLOTS, sizes[name] // SLOTS, dtype=torch.uint8)

    with pytest.raises(tw.OutOfMemory), _Moving(parameters, [holder for _, holder in made]) as moving:
        for part, *_ in moving._parts:
            part.data = part.new_empty(0)  # as a device's are
        if when != "before":
            moving.settle(memory)
        raise tw.OutOfMemory("no memory")
    for layer, (each, holder) in enumerate(made):
        assert all(holds(each, holder, layer, place, FIRST[place]) for place in range(2))


def refusals(env: Any) -> list[Any]:
    """What cannot move."""
    import torch

    from tokenway.integrations import moved_experts

    settings = moved_experts.Settings(EXPERTS, 2, SLOTS, 2, 100)
    whole = torch.zeros(2 * SLOTS, 4)
    wrong: list[list[dict[str, Any]]] = [
        [],
        [{"weight": torch.zeros(SLOTS + 1, 4)}],
        [{"weight": torch.zeros(SLOTS, 8)[:, :4]}],
        [{"weight": torch.zeros(SLOTS, 4)}, {"weight": torch.zeros(SLOTS, 5)}],
        [{"weight": torch.zeros(SLOTS, 4)}, {"other": torch.zeros(SLOTS, 4)}],
        [{"weight": whole[:SLOTS]}, {"weight": whole[SLOTS:]}],
    ]
    told: list[Any] = []
    for layers in wrong:
        try:
            moved_experts.MovedExperts(layers, [], settings, lambda placement: None)
        except tw.TokenwayError as error:
            told.append((type(error).__name__, str(error)))
    try:
        moved_experts.first_map(5, 6, 2, "redundant")
    except tw.Unsupported as error:
        told.append((type(error).__name__, str(error)))
    return told


def test_what_cannot_move(world) -> None:
    """Is refused before anything is asked of the other ranks."""
    for told in world(2).run(refusals):
        sentences = [
            "^there are no layers",
            r"^weight of layer 0 has shape \[4, 4\]",
            r"^weight of layer 0 has shape \[3, 4\], strides \[8, 1\] .* without gaps",
            r"^weight of layer 1 has shape \[3, 5\]",
            "^other of layer 1 has shape|^layer 1 has",
            "^weight of layer 1 shares its memory with other weights",
            "^redundant is 1, for 5 experts on 2 ranks; it must be 3, or more by a multiple of 2",
        ]
        assert len(told) == len(sentences)
        for found, sentence in zip(told, sentences, strict=True):
            said(found, "Unsupported", sentence)
