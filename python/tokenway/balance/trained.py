"""What an expert consists of while it is trained: weights, a gradient of each, and what an optimiser keeps of each.

Names tell which is which: "down" are weights, "down.grad" their gradient, "down.exp_avg" and whatever else begins so a
state. Weights go wherever the expert has a slot, states go with the slot that leads it, and gradients stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenway.errors import InvalidArgument

GRADIENT = "grad"


def trained(weights: Mapping[str, tuple[Any, Any]], states: Iterable[str] = ()) -> dict[str, tuple[Any, Any]]:
    """The tensors of `Weights` for experts that are trained, from those that they are without.

    weights: by name (shape of one expert, dtype), names without a dot. states: names of what the optimiser keeps for
    each element, as PyTorch's call it: ("exp_avg", "exp_avg_sq") of Adam and AdamW, ("momentum_buffer",) of SGD. Adds
    to each of the weights NAME.grad and NAME.STATE, of its shape and dtype. Errors: InvalidArgument.
    """
    names = list(states)
    for name in weights:
        if "." in name:
            raise InvalidArgument.of("weights", f"has {name!r}; names of weights must be without a dot")
    for state in names:
        if not isinstance(state, str) or not state or state == GRADIENT or names.count(state) > 1:
            raise InvalidArgument.of("states", f"has {state!r}; names must differ, from {GRADIENT!r} too")
    made = dict(weights)
    for name, what in weights.items():
        made |= {f"{name}.{each}": what for each in (GRADIENT, *names)}
    return made


@dataclass(frozen=True)
class Parts:
    """The names of an expert's tensors, by what they are."""

    weights: tuple[str, ...]
    states: tuple[str, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> Parts:
        """Of what `Weights` has. Errors: InvalidArgument where a gradient is missing, or of another shape or dtype, or
        where a name belongs to no weights."""
        weights = tuple(name for name in tensors if "." not in name)
        states = []
        for name, what in tensors.items():
            base, _, kind = name.partition(".")
            if base not in weights:
                raise InvalidArgument.of("weights", f"has {name!r}, but no {base!r}; balance.trained names tensors")
            if kind == GRADIENT and what != tensors[base]:
                allowed = "; a gradient must be of the shape and dtype of its weights"
                raise InvalidArgument.of("weights", f"has {name!r} {list(what)}{allowed}, {list(tensors[base])}")
            if kind and kind != GRADIENT:
                states.append(name)
        for name in weights:
            if gradient_of(name) not in tensors:
                raise InvalidArgument.of("weights", f"has no {gradient_of(name)!r}; balance.trained names tensors")
        return cls(weights, tuple(states))


def gradient_of(name: str) -> str:
    """The name of the gradient of weights."""
    return f"{name}.{GRADIENT}"
