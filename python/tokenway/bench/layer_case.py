"""One MoE layer on one rank, at one size: Tokenway's, the same over NCCL and PyTorch alone, and its parts.

Both layers have the same router, the same experts and the same products; what differs is how rows get there and back.
On the CPU the other way goes over gloo. Needs PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenway.bench import routing, runner
from tokenway.bench.profiles import Profile
from tokenway.comm import Comm
from tokenway.pytorch import autograd
from tokenway.pytorch.nn import ExpertParallelMoE, balance_loss

TIMEOUT = 60.0  # of groups, seconds
GUMBEL = 1.2825  # the standard deviation of Gumbel's distribution: logits with it choose as `routing` draws
NEAR = 0.02  # how far results may be apart, of their norm: bfloat16 sums in another order
BACKWARD = "both"  # the phase of forward and backward passes
LOW_LATENCY = 1024  # tokens up to which a call of a group of both modes is of low latency, where windows have room

Call = Callable[[], Any]


class Layer(ExpertParallelMoE):
    """Tokenway's layer with parameters that are drawn on the device: those of 256 experts take minutes elsewhere."""

    def __init__(self, group: Any, profile: Profile, popularity: Tensor | None, seed: int):
        self._popularity = popularity
        self.instead: Call | None = None  # of the experts' products: what is enqueued, which reads nothing
        super().__init__(group, profile.inner, seed=seed)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """The router is the same on all ranks; tokens whose first element is 1 find popular experts popular."""
        generator = torch.Generator(self.router.device)
        self.router.normal_(std=GUMBEL * self.group.hidden**-0.5, generator=generator.manual_seed(seed))
        if self._popularity is not None:
            self.router[:, 0] = self._popularity.to(self.router.device)
        for slot, expert in enumerate(self.experts):
            for values in (self.gate_up[slot], self.down[slot]):
                values.normal_(std=values.shape[-1] ** -0.5, generator=generator.manual_seed(seed + 1 + expert))

    def compute(self, rows: Tensor, weights: Tensor, sizes: Tensor | list[int]) -> Tensor:
        """As the layer has it; or rows of any content in memory of their own, as experts leave them."""
        if self.instead is None:
            return super().compute(rows, weights, sizes)
        self.instead()
        return torch.empty_like(rows)


class _AllGather(torch.autograd.Function):
    """[T, ...] of every rank, one after the other; of gradients the sum of what all ranks have for this one."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        out = rows.new_empty((dist.get_world_size() * len(rows), *rows.shape[1:]))
        dist.all_gather_into_tensor(out, rows.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (rows,) = gradients
        out = rows.new_empty((len(rows) // dist.get_world_size(), *rows.shape[1:]))
        dist.reduce_scatter_tensor(out, rows.contiguous())
        return out


class _ReduceScatter(torch.autograd.Function):
    """The other way around."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return _AllGather.backward(ctx, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _AllGather.forward(ctx, *gradients)


class LayerCase:
    """The tensors and calls of a size. Groups and layers are collective to make and to close, by the stack."""

    def __init__(
        self,
        stack: ExitStack,
        comm: Comm,
        profile: Profile,
        tokens: int,
        *,
        skewed: bool = False,
        backward: bool = False,
        empty_ranks: int = 0,
        seed: int = 0,
        dtype: str = "bfloat16",
        mode: str = "auto",
    ):
        """tokens: of each rank, but the last `empty_ranks`, which have none. mode: of the group."""
        shape = {"experts": profile.experts, "top_k": profile.top_k, "hidden": profile.hidden, "max_tokens": tokens}
        own = {"dtype": dtype, "timeout": TIMEOUT}
        ranks = comm.nranks
        self.tokens, self.hidden, self.experts, self.top_k = tokens, profile.hidden, profile.experts, profile.top_k
        given: dict[str, Any] = {"mode": mode}
        if mode != "low_latency":  # outputs of a fixed size, as a graph needs them: as many rows as may come
            given["max_recv_tokens"] = ranks * tokens
        if mode == "auto":
            given["low_latency_tokens"] = min(tokens, LOW_LATENCY)
        self.group = stack.enter_context(runner.open_group(comm, autograd.make_group, **shape, **own, **given))
        self.mode = self.group.shape.mode_of(tokens)  # of its calls
        self.layout = ""  # of its last dispatch
        popularity = torch.from_numpy(routing.log_popularity(profile.experts, seed)).float() if skewed else None
        self.layer = Layer(self.group, profile, popularity, seed)
        device = self.layer.router.device
        generator = torch.Generator(device).manual_seed(seed * 4099 + comm.rank + 1)
        self.x = torch.randn((1, tokens, profile.hidden), device=device, generator=generator)
        self.x[..., 0] = 1.0
        self.x = self.x.to(getattr(torch, dtype))
        self._empty = comm.rank >= ranks - empty_ranks
        if self._empty:
            self.x = self.x[:, :0].contiguous()
        self.gradient = torch.randn(self.x.shape, device=device, generator=generator).to(self.x.dtype)
        self._bare_group = stack.enter_context(runner.open_group(comm, **shape, **own))
        self.parameters = (self.layer.router, self.layer.gate_up, self.layer.down)
        self.trains = backward
        self._count_rows()

    def _count_rows(self) -> None:
        """What comes to this rank, which the other way is told: it then has no wait for the host."""
        with torch.no_grad():
            ids, weights, _ = self.layer.route(self.x[0])
            everyone = _AllGather.apply(self._filled(ids, self.experts))
        here = self.layer.experts  # asked once: the other way's calls are timed on the host too
        self._local = len(here)
        own = torch.isin(everyone, torch.tensor(here, device=ids.device))
        self.rows = int(own.sum())
        # The last place is of no expert: what fills up the tokens of ranks that have none.
        self._place = torch.full((self.experts + 1,), self._local, device=ids.device)
        self._place[here] = torch.arange(self._local, device=ids.device)
        self._ids, self._weights = ids.to(torch.int32), weights
        self._handle = self._bare_group.route(self._ids, self._weights)
        self._answers = torch.zeros(
            (self.group.nranks, self.tokens, self.hidden), dtype=self.x.dtype, device=self.x.device
        )
        self._result = torch.zeros_like(self.x[0])
        with torch.no_grad():
            self._rows = self._arranged(everyone)
        self._some = torch.randn((self.rows, self.hidden), device=ids.device).to(self.x.dtype)
        self._ones = torch.ones(self.rows, device=ids.device)

    # ------------------------------------------------------------------------------------------------- whole layers

    def ours(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tokenway's layer: its output and the balance loss."""
        out = self.layer(x, self.tokens)
        self.layout = self.layer.layout
        return out

    def theirs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same by all-gather, index_select, the same products, index_add and reduce-scatter."""
        tokens = x[0]
        ids, weights, probabilities = self.layer.route(x)
        gathered = _AllGather.apply(self._filled(tokens, 0))
        everyone = _AllGather.apply(self._filled(ids[0], self.experts))
        all_weights = _AllGather.apply(self._filled(weights[0], 0))
        order, offsets = self._arranged(everyone)
        source = order // self.top_k
        answers = self.compute(
            gathered.index_select(0, source), all_weights.reshape(-1).index_select(0, order), offsets
        )
        sums = torch.zeros_like(gathered).index_add(0, source, answers)
        return _ReduceScatter.apply(sums)[: x.shape[1]].view(x.shape), balance_loss(probabilities, ids)

    def _filled(self, rows: Tensor, value: float) -> Tensor:
        """As many rows as ranks with tokens have: NCCL gathers the same number from all."""
        if not self._empty:
            return rows
        return torch.cat([rows, rows.new_full((self.tokens, *rows.shape[1:]), value)])

    def compute(self, rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        """The experts' products, by sizes on the device where PyTorch can."""
        sizes: Any = offsets if self.layer.ungrouped is None else offsets.diff().tolist()
        return self.layer.compute(rows, weights, sizes)

    def _arranged(self, everyone: Tensor) -> tuple[Tensor, Tensor]:
        """For ids [N * T, K] of all ranks: which of them this rank's experts have, by expert, [R]; and where each
        expert's begin, [L + 1] int32."""
        places = self._place[everyone.reshape(-1)]
        ordered, order = places.sort(stable=True)
        bounds = torch.arange(self._local + 1, device=places.device)
        return order[: self.rows], torch.searchsorted(ordered, bounds).to(torch.int32)

    def passes(self, layer: Callable[[Tensor], tuple[Tensor, Tensor]]) -> dict[str, Call]:
        """Its phases: forward passes for inference, and forward and backward."""

        def forward() -> Any:
            with torch.no_grad():
                return layer(self.x)

        def both() -> Any:
            x = self.x.detach().requires_grad_()
            out, loss = layer(x)
            return torch.autograd.grad((out, loss), (x, *self.parameters), (self.gradient, torch.ones_like(loss)))

        return {"forward": forward} | ({BACKWARD: both} if self.trains else {})

    def fixed(self, instead: Call) -> Call:
        """A forward pass for inference of Tokenway's layer, with `instead` in place of its experts' products: results
        are arbitrary."""

        @torch.no_grad()
        def forward() -> Any:
            self.layer.instead = instead
            try:
                return self.ours(self.x)
            finally:
                self.layer.instead = None

        return forward

    # -------------------------------------------------------------------------------------------------- the parts

    def parts(self) -> dict[str, Call]:
        """The experts' products over as many rows as come; the router and its loss; a bare exchange of the same tokens,
        whose routing is new in each call."""

        @torch.no_grad()
        def experts() -> Any:
            return self.compute(self._some, self._ones, self._rows[1])

        @torch.no_grad()
        def router() -> Any:
            ids, _, probabilities = self.layer.route(self.x)
            return balance_loss(probabilities, ids)

        def exchange() -> None:
            group, handle = self._bare_group, self._handle
            handle.update(self._ids, self._weights)
            group.dispatch(handle, self.x[0], bound=self.tokens)
            group.combine(handle, self._answers, out=self._result)

        return {"experts": experts, "router": router, "exchange": exchange}

    # ------------------------------------------------------------------------------------------------ verification

    def problem(self) -> str | None:
        """What is wrong with Tokenway's layer beside the other one, in a forward pass and, if that is measured, in the
        gradients of x and of all parameters. Collective."""
        for phase in self.passes(self.ours):
            got, want = (self.passes(layer)[phase]() for layer in (self.ours, self.theirs))
            names = ("output", "loss") if phase == "forward" else ("x", "router", "gate_up", "down")
            if found := self._differs(names, got, want):
                return f"{phase} on rank {self.group.rank}: {found}"
        return None

    @staticmethod
    def _differs(names: Sequence[str], got: Sequence[Tensor], want: Sequence[Tensor]) -> str | None:
        for name, a, b in zip(names, got, want, strict=True):
            apart = (a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30)
            if not float(apart) <= NEAR:
                return f"{name} is apart by {float(apart):.3g} of its norm, allowed is {NEAR}"
        return None

    def capturable(self) -> str | None:
        """Why no graph can hold a layer here, None if one can."""
        return self.layer.ungrouped
