"""The class of `tokenway.training`, which says how it is used."""

from __future__ import annotations

import torch

from tokenway import tensors
from tokenway.balance import Replicas, Weights
from tokenway.balance.trained import gradient_of
from tokenway.errors import InvalidArgument

Tensor = torch.Tensor


class Experts:
    """The experts' weights of one rank as parameters of PyTorch, in memory that peers read.

    weights: `balance.Weights` of tensors as `balance.trained` names them; `tensor` shows them as PyTorch's, on the CPU
    too. `keep` has an optimiser's states there. Errors: InvalidArgument.
    """

    def __init__(self, weights: Weights):
        self.weights = weights
        self.replicas = Replicas(weights)
        self._parameters: dict[tuple[str, int], torch.nn.Parameter] = {}

    def tensor(self, name: str, layer: int = 0) -> Tensor:
        """A layer's tensor of this rank, [local slots, ...]: a view, as of `Weights.tensor`."""
        found = self.weights.tensor(name, layer)
        return found if isinstance(found, Tensor) else tensors.to_torch(found)

    def parameter(self, name: str, layer: int = 0) -> torch.nn.Parameter:
        """Weights of a layer as a parameter, [local slots, ...], the same one each time. What moves comes there, so an
        optimiser keeps it for good. Errors: InvalidArgument."""
        if name not in self.replicas.parts.weights:
            allowed = f"it must be one of {list(self.replicas.parts.weights)}"
            raise InvalidArgument.of("name", f"is {name!r}; {allowed}")
        found = self._parameters.get((name, layer))
        if found is None:
            found = torch.nn.Parameter(self.tensor(name, layer))
            self._parameters[name, layer] = found
            self.weights.shown.append(found)
        return found

    def state(self, parameter: Tensor, name: str) -> Tensor | None:
        """Where a state of this name of a parameter's elements is, [local slots, ...]; None for other parameters than
        this object's. Errors: InvalidArgument where there is none."""
        for (weights, layer), own in self._parameters.items():
            if own is parameter:
                states = self.replicas.parts.states
                if f"{weights}.{name}" not in states:
                    kept = [each.partition(".")[2] for each in states if each.startswith(f"{weights}.")]
                    told = f"is {name!r}; it must be one of {kept}, which balance.trained was told of"
                    raise InvalidArgument.of("state", told)
                return self.tensor(f"{weights}.{name}", layer)
        return None

    def keep(self, optimiser: torch.optim.Optimizer) -> None:
        """Has an optimiser keep what it keeps for each element of these parameters where it moves with them. To be
        called once, before or after its first step; what it makes anew later (in its first step, or by
        load_state_dict) goes there too. What it keeps as one number, such as its steps, stays, alike on all ranks.

        Errors: InvalidArgument, here or from the optimiser's step behind which that shows, where `balance.trained` was
        not told of a state, or it has another dtype."""
        self._adopt(optimiser)
        optimiser.register_step_post_hook(lambda of, *_: self._adopt(of))
        optimiser.register_load_state_dict_post_hook(self._adopt)

    @torch.no_grad()
    def _adopt(self, optimiser: torch.optim.Optimizer) -> None:
        for parameter in self._parameters.values():
            kept = optimiser.state.get(parameter) or {}
            for name, value in kept.items():
                if not isinstance(value, Tensor) or value.shape != parameter.shape:
                    continue
                place = self.state(parameter, name)
                assert place is not None, "the parameter is this object's"
                if value.dtype != place.dtype:
                    told = f"of {name!r} is {value.dtype} in the optimiser and {place.dtype} in the weights"
                    raise InvalidArgument.of("dtype", f"{told}; they must be alike")
                if value.data_ptr() != place.data_ptr():
                    kept[name] = place.copy_(value)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Between the backward pass and the optimiser's step, on all ranks: has `grad` of each parameter be the sum of
        all slots of an expert in the slot that leads it (`balance.Replicas`), and 0 in the others and where no rows
        came. So a norm over the parameters of all ranks counts each expert once. Of parameters that require no gradient
        `grad` stays as it is, which must be so on all ranks alike."""
        for (name, layer), parameter in self._parameters.items():
            if not parameter.requires_grad:
                continue
            place = self.tensor(gradient_of(name), layer)
            if parameter.grad is None:
                place.zero_()
            elif parameter.grad.data_ptr() != place.data_ptr() or not place.numel():
                place.copy_(parameter.grad)
            parameter.grad = place
        asked = {at for at, parameter in self._parameters.items() if parameter.requires_grad}
        self.replicas.sum_gradients(asked)

    def spread(self) -> None:
        """Behind the optimiser's step, on all ranks, where there is no `balance.TrainingBalancer`, whose `step` does
        it: copies the weights of each expert from the slot that leads it to the others."""
        self.replicas.spread()
