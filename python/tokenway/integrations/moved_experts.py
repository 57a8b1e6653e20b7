"""Experts of a framework that has a balancer of its own (EPLB): their weights in memory that peers read, a group whose
maps move, and who decides where experts go. What integrations of such frameworks share."""

from __future__ import annotations

import logging
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tokenway as tw
from tokenway import balance
from tokenway.integrations.groups import SharedGroup

LOG = logging.getLogger(__name__)
VARIABLE = "TOKENWAY_BALANCE"
OURS, THEIRS = "1", "framework"
_LEAVES = (type, types.FunctionType, types.MethodType, types.ModuleType, str, bytes, int, float, complex, np.ndarray)

Array = np.ndarray
Policy = Callable[[Array, Array], Array]


def asked() -> str:
    """What the environment asks for: "" nothing, "1" that Tokenway's balancer plans, "framework" that the framework's
    own policy does; Tokenway moves experts in both. Errors: InvalidArgument for another value."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", OURS, THEIRS):
        raise tw.InvalidArgument.of(VARIABLE, f"is {value!r}; it must be 0, {OURS} or {THEIRS!r}")
    return "" if value == "0" else value


def first_map(experts: int, slots: int, ranks: int, redundant: str) -> Array:
    """[slots] int64: where a framework loads experts, slots / ranks on each rank in turn: as many different ones on
    each as it can use, and in its last slot, which is to be spare, the rank's first one once more. redundant: what the
    framework calls the setting of slots - experts. Errors: Unsupported."""
    each = slots // ranks
    if slots % ranks or (each - 1) * ranks < experts:
        least = -(-experts // ranks) * ranks + ranks - experts
        what = f"{redundant} is {slots - experts}, for {experts} experts on {ranks} ranks"
        why = f"one slot of each rank stays empty where experts move ({VARIABLE})"
        raise tw.Unsupported(f"{what}; it must be {least}, or more by a multiple of {ranks}: {why}")
    table = np.full((ranks, each), -1, np.int64)
    table[:, :-1] = np.arange(ranks * (each - 1)).reshape(ranks, each - 1) % experts
    table[:, -1] = table[:, 0]
    return table.ravel()


def with_spares(table: Array, ranks: int) -> Array:
    """The map [slots] of `first_map` as a group has it: int32, the last slot of each rank spare."""
    spare = table.reshape(ranks, -1).astype(np.int32)
    spare[:, -1] = -1
    return spare.ravel()


@dataclass(frozen=True)
class Settings:
    """How experts are balanced. experts: E; ranks: N; slots: of a rank, a spare one too. every: steps between plans.
    window: of how many steps loads are an average, about. policy: the framework's, which rank 0 calls in a thread:
    (loads [layers, E] float32, the map [layers, slots in use]) -> the next one; None: Tokenway plans."""

    experts: int
    ranks: int
    slots: int
    every: int
    window: int
    policy: Policy | None = None


class MovedExperts:
    """The experts of a model's layers, which move between ranks beside its steps.

    layers: of each layer its tensors by name, [slots of a rank, ...], filled as `first_map` says; experts lie one
    behind the other in them, without gaps. holder: what holds these tensors, and views of them, however deep: all of
    them show the group's window from then on, and what they were is free. make: collective; from a Placement makes the
    group of the layers' exchange, by its `with_room`. Making it is collective. Errors: Unsupported for tensors that
    cannot move, on a rank where they are so; those of a group, of `balance.Weights` and of `balance.Balancer`."""

    def __init__(
        self,
        layers: Sequence[Mapping[str, Tensor]],
        holder: Any,
        settings: Settings,
        make: Callable[[tw.Placement], SharedGroup],
    ):
        self.settings = settings
        sizes = _sizes(layers, settings.slots)
        shape = len(layers), settings.ranks * settings.slots
        loaded = first_map(settings.experts, shape[1], settings.ranks, "slots - experts")
        table = np.tile(with_spares(loaded, settings.ranks), (shape[0], 1))
        told = {name: ((size,), "uint8") for name, size in sizes.items()}
        room = balance.weight_bytes(told, layers=shape[0], slots=settings.slots, ranks=settings.ranks)
        decay = 1 - 1 / max(settings.window, 1)
        placement = tw.Placement(table, count_loads=True, load_decay=decay, moves=True, weight_bytes=room)
        with _Moving(layers, holder) as moving:
            shared = make(placement)
            assert shared.group is not None
            self.weights = balance.Weights(shared.group, told)
            moving.settle(lambda name, layer: _tensor(self.weights.tensor(name, layer)))
        ours = settings.policy is None
        every = settings.every if ours else None
        self.balancer = balance.Balancer(shared.group, self.weights, every=every)
        shared.before_close.append(self.close)
        self._shared = shared
        self._told = table
        self._thread = None if ours or shared.group.rank else ThreadPoolExecutor(1, "tokenway-policy")
        self._planning: Future[Array] | None = None
        self._steps = 0

    def step(self) -> dict[int, Array]:
        """Behind each step of the model, on all ranks: `Balancer.step`. Returns the maps [slots] int32 that have
        changed since the last call, by layer, -1 for spare slots. Errors: those of `Balancer.step`."""
        self._steps += 1
        self.balancer.step()
        self._follow()
        changed = {}
        for layer in range(len(self._told)):
            table = self.balancer.table(layer)
            if (table != self._told[layer]).any():
                self._told[layer] = changed[layer] = table
        return changed

    def tables(self) -> Array:
        """[layers, slots] int32: the maps, as `step` has told them."""
        return self._told.copy()

    def close(self) -> None:
        """Ends threads, and waits for copies. Before the group closes, which calls it."""
        if self._thread is not None:
            self._thread.shutdown()
        self.balancer.close()
        self.weights.close()

    def _follow(self) -> None:
        """On rank 0, where the framework decides: asks its policy in a thread, every so many steps."""
        policy, thread = self.settings.policy, self._thread
        if thread is None or policy is None:
            return
        if self._planning is None:
            if self._steps % self.settings.every == 0 and self.balancer.idle and (loads := self._loads()).any():
                self._planning = thread.submit(policy, loads, self.balancer.slot_maps().physical_to_logical)
        elif self._planning.done():
            planned, self._planning = self._planning, None
            try:
                self.balancer.follow(np.asarray(planned.result()))
            except Exception:  # of the policy's, or of its plan: the model goes on as it is
                LOG.warning("there is no plan of the framework's", exc_info=True)

    def _loads(self) -> Array:
        group = self._shared.group
        assert group is not None
        loads: Array = group.loads
        return loads


def _sizes(layers: Sequence[Mapping[str, Tensor]], slots: int) -> dict[str, int]:
    """Bytes of one expert by name, alike in all layers. Errors: Unsupported."""
    found: dict[str, int] = {}
    for index, layer in enumerate(layers):
        for name, tensor in layer.items():
            each = tensor.numel() * tensor.element_size() // max(slots, 1)
            packed = tensor.dim() > 0 and tensor.shape[0] == slots and _dense(tensor)
            if not packed or not each or (index and found.get(name) != each):
                told = f"{name} of layer {index} has shape {list(tensor.shape)}, strides {list(tensor.stride())}"
                wanted = f"[{slots}, ...] without gaps between experts, of as many bytes in all layers"
                raise tw.Unsupported(f"{told} and is {tensor.dtype}; to move experts it must be {wanted}")
            found[name] = each
        if index and layer.keys() != found.keys():
            raise tw.Unsupported(f"layer {index} has {sorted(layer)}; to move experts it must have {sorted(found)}")
    if not found:
        raise tw.Unsupported("there are no layers with experts that could move")
    return found


def _dense(tensor: Tensor) -> bool:
    """Whether its elements lie without gaps, first dimension by first dimension."""
    inner = sorted(zip(tensor.stride()[1:], tensor.shape[1:], strict=True))
    size = 1
    for stride, extent in inner:
        if extent != 1 and stride != size:
            return False
        size *= extent
    return tensor.shape[0] == 1 or tensor.stride(0) == size


def _tensor(view: Any) -> Tensor:
    """Of a window, [slots, bytes]."""
    return view if isinstance(view, Tensor) else torch.from_numpy(view)


class _Moving:
    """Takes tensors out of the memory that they have, and puts them, and all that holds a part of it, elsewhere. In
    between their contents are on the host, so that a device need not hold both. Where what is within raises, all have
    memory of their own again, with what was there."""

    def __init__(self, layers: Sequence[Mapping[str, Tensor]], holder: Any):
        self._kept: list[tuple[int, str, Tensor]] = []
        self._parts: list[tuple[Tensor, int, str, int, torch.Size, tuple[int, ...]]] = []
        places: dict[int, tuple[int, int, str, int]] = {}
        for index, layer in enumerate(layers):
            for name, tensor in layer.items():
                size = tensor.numel() * tensor.element_size()
                storage = tensor.untyped_storage().data_ptr()
                places.setdefault(storage, (index, size, name, tensor.data_ptr()))
                if places[storage][0] != index or places[storage][2] != name:
                    raise tw.Unsupported(f"{name} of layer {index} shares its memory with other weights of experts")
        for part in _tensors_in([holder, list(layers)]):
            place = places.get(_memory_of(part))
            if place is None:
                continue
            index, size, name, begin = place
            at, used = part.data_ptr() - begin, _span(part)
            if at < 0 or at + used > size:
                raise tw.Unsupported(f"a tensor {list(part.shape)} reaches beyond {name} of layer {index}")
            self._parts.append((part, index, name, at, part.shape, part.stride()))
        for index, layer in enumerate(layers):
            for name, tensor in layer.items():
                flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
                self._kept.append((index, name, flat.cpu() if flat.is_cuda else flat))

    def __enter__(self) -> _Moving:
        for part, *_ in self._parts:
            if part.is_cuda:
                part.data = part.new_empty(0)
        if any(part.is_cuda for part, *_ in self._parts):
            torch.cuda.empty_cache()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            devices = {(index, name): part.device for part, index, name, *_ in self._parts}
            whole = {(i, name): kept.to(devices.get((i, name), kept.device)) for i, name, kept in self._kept}
            self._show(lambda name, index: whole[index, name])
        self._kept.clear()
        self._parts.clear()

    def settle(self, memory: Callable[[str, int], Tensor]) -> None:
        """memory: of a name and layer [slots, bytes], contiguous."""
        for index, name, bytes_ in self._kept:
            memory(name, index).view(-1).copy_(bytes_)
        self._show(memory)

    def _show(self, memory: Callable[[str, int], Tensor]) -> None:
        """Has all parts show that memory."""
        for part, index, name, at, shape, stride in self._parts:
            flat = memory(name, index).view(-1)[at:]
            whole = flat[: flat.numel() // part.element_size() * part.element_size()].view(part.dtype)
            part.data = whole.as_strided(shape, stride, whole.storage_offset())


def _memory_of(tensor: Tensor) -> int | None:
    """Where a tensor's storage begins; None of those that have none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None


def _span(tensor: Tensor) -> int:
    """Bytes from its first element to behind its last."""
    if not tensor.numel():
        return 0
    last = sum(stride * (extent - 1) for stride, extent in zip(tensor.stride(), tensor.shape, strict=True))
    return (last + 1) * tensor.element_size()


def _tensors_in(held: Any) -> Iterator[Tensor]:
    """All tensors that objects hold in their attributes, and in lists and dicts there, each once."""
    seen: set[int] = set()
    todo = [held]
    while todo:
        each = todo.pop()
        if each is None or isinstance(each, _LEAVES) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, Mapping):
            todo.extend(each.values())
        elif isinstance(each, (list, tuple, set, frozenset)):
            todo.extend(each)
        elif not type(each).__module__.startswith(("torch._C", "tokenway.")):
            todo.extend(getattr(each, "__dict__", {}).values())
            todo.extend(getattr(each, name, None) for name in _slots_of(type(each)))


def _slots_of(kind: type) -> Iterable[str]:
    for each in kind.__mro__:
        names = each.__dict__.get("__slots__", ())
        yield from (names,) if isinstance(names, str) else names
