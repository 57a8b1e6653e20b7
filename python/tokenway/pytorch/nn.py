"""The layer of `tokenway.nn`, which says how it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tokenway import reference
from tokenway.arguments import telling
from tokenway.calls import Calls
from tokenway.errors import InvalidArgument, InvalidUsage
from tokenway.group import Group
from tokenway.pytorch import autograd, gradients, inference
from tokenway.pytorch import experts as products
from tokenway.pytorch.training import Experts
from tokenway.shape import BY_BOUND

# Rows of an expert, of all ranks, up to which a dispatch of low latency has a place for each of them (expert_major): to
# read an expert's matrices takes an H100 or H200 as long as to multiply 200 to 300 rows by them, so until then products
# over empty places take no longer than those over rows alone. To be confirmed by measurement.
PADDED_ROWS = 256
# The same where grouped products leave empty rows out, so that these cost memory alone, min(K, L) rows for each: 1024
# tokens of 8 ranks, for which outputs of 7168 bfloat16 and K = 8 are 0.9 GiB.
GROUPED_ROWS = 8192


class ExpertParallelMoE(torch.nn.Module):
    """A router, E SwiGLU experts of which this rank holds L, and the exchange between the ranks.

    group: any of dtype float32 or bfloat16; to train, one of `tokenway.autograd.make_group`, or, where neither router
    nor x requires gradients, any whose combine_dtype is its dtype. Its experts, top_k, hidden (H), dtype, device and
    expert_map are the layer's, and so is its mode: in the mode "auto" each forward is of high throughput or of low
    latency, by its bound. Layers of the same shape share one.
    inner: elements inside an expert, I. normalize: divide a token's weights by their sum. seed: what the initial values
    follow from, the same on all ranks. experts: `tokenway.training.Experts` with gate_up and down, of a group whose
    expert_map is a `Placement`: experts have replicas then, and move. layer: which of its maps is this layer's.

    Parameters:

    ========  =================  ==============  ==================================================================
    name      shape              dtype           is
    ========  =================  ==============  ==================================================================
    router    [E, H]             float32         the same on all ranks: their gradients are for the caller to add up
    gate_up   [L, 2 * I, H]      the group's     of this rank's experts alone: their gradients are complete
    down      [L, H, I]          the group's     likewise
    ========  =================  ==============  ==================================================================

    Initial values are uniform within 1 / sqrt(columns), and follow from the seed and an expert's number, so they do not
    depend on the number of ranks. `experts` says which experts the rank holds, in the order of the parameters, now, and
    -1 for a slot that has none; `chosen` which of all the last forward chose, [..., S, K] int64; `layout` how its rows
    came.

    What an expert computes: down @ (w * silu(gate @ x) * (up @ x)), gate_up being gate above up, and w the token's
    weight for it. A token's result is the sum of its K experts'; its weights are the K largest of softmax(router @ x),
    float32.

    Where nothing requires gradients (`torch.no_grad`) a forward pass makes nothing for a backward pass. Layouts are
    those that products take as they come. In high throughput it is grouped, for PyTorch's grouped matrix products. In
    low latency, which exchanges no counts, it is grouped too, or where there are no such products (`ungrouped` says
    why) expert_major, for batched ones, as long as places are few (of N * bound `GROUPED_ROWS` for grouped products
    without gradients, else `PADDED_ROWS`) or a graph is captured; else rows come by source and are put into order on
    the host's word.

    One CUDA graph can capture forward and backward, of any number of layers: in low latency always; in high throughput
    where `uncapturable` is None, for bfloat16 on devices for which PyTorch has grouped matrix products. In low latency
    with few places, and with the group's max_recv_tokens where a graph could capture it, eager calls do not wait for
    the device either.

    Under autocast the router computes in float32 and the experts in the group's dtype, to which x is cast; elsewhere x
    must have it.

    The gradient of an expert's parameters is that of the sum of the losses of all ranks, whichever ranks its tokens
    came from; of an expert in several slots once `experts.sum_gradients` has been called. So ranks with shares of one
    batch must give each token's loss the weight that it has in the whole.
    """

    def __init__(
        self,
        group: Group,
        inner: int,
        *,
        normalize: bool = True,
        seed: int = 0,
        experts: Experts | None = None,
        layer: int = 0,
    ):
        super().__init__()
        if not isinstance(inner, int) or inner < 1:
            raise InvalidArgument.of("inner", f"is {inner!r}; it must be an integer of at least 1")
        gradients.weight_columns(group.top_k, group.dtype)  # of a dtype that rows can be summed in
        self._check_experts(group, inner, experts, layer)
        self.group = group
        self.inner = inner
        self.layer = layer
        self.normalize = normalize
        self.chosen: Tensor | None = None  # [..., S, K] int64: the experts that the last forward chose
        self.layout: str | None = None  # of the last forward's dispatch
        device = gradients.device_of(group)
        dtype, local_experts, hidden = getattr(torch, group.dtype), group.num_local_experts, group.hidden
        # Why there are no grouped matrix products for this layer, None if there are.
        self.ungrouped = products.why_not(device, dtype, local_experts, hidden, inner)
        # Why a graph cannot capture this layer in high throughput, None if it can: what the device must tell the host.
        self.uncapturable = None if group.mode == "low_latency" else self.ungrouped
        self._slots: np.ndarray | None = None  # of this rank, where experts move
        self.router = torch.nn.Parameter(torch.empty(group.experts, hidden, device=device))
        if experts is None:
            self.gate_up = torch.nn.Parameter(torch.empty(local_experts, 2 * inner, hidden, dtype=dtype, device=device))
            self.down = torch.nn.Parameter(torch.empty(local_experts, hidden, inner, dtype=dtype, device=device))
        else:
            self._slots = np.flatnonzero(experts.weights.rank_of_slot == group.rank)
            self.gate_up, self.down = experts.parameter("gate_up", layer), experts.parameter("down", layer)
        self.reset_parameters(seed)

    @staticmethod
    def _check_experts(group: Group, inner: int, experts: Experts | None, layer: int) -> None:
        if experts is None:
            if group.settings.placement is not None:
                what = "is None; a group whose expert_map has experts in slots of their own needs one of its weights"
                raise InvalidArgument.of("experts", f"{what} (tokenway.training.Experts)")
            if layer != 0:
                raise InvalidArgument.of("layer", f"is {layer!r}; without experts it must be 0")
            return
        if not isinstance(experts, Experts) or experts.weights.group is not group:
            raise InvalidArgument.of("experts", "must be tokenway.training.Experts of the layer's group")
        if not isinstance(layer, int) or not 0 <= layer < group.layers:
            raise InvalidArgument.of("layer", f"is {layer!r}; it must be an integer from 0 to {group.layers - 1}")
        wanted = {"gate_up": (2 * inner, group.hidden), "down": (group.hidden, inner)}
        for name, shape in wanted.items():
            found = experts.weights.layout.tensors.get(name)
            if found != (shape, group.dtype):
                raise InvalidArgument.of(
                    "experts", f"has {name} {found}; it must be {(shape, group.dtype)}, by inner, hidden and dtype"
                )

    @property
    def experts(self) -> list[int]:
        """The global numbers of this rank's experts, by slot."""
        group = self.group
        if self._slots is not None:
            return group.expert_of_slot(self.layer)[self._slots].tolist()
        ranks, slots = reference.placement(group.experts, group.nranks, group.settings.places())
        local = np.flatnonzero(ranks == group.rank)
        return local[np.argsort(slots[local])].tolist()

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Sets initial values: the same for an expert on whichever rank it is."""
        _fill(self.router, seed, 0)
        for slot, expert in enumerate(self.experts):
            if expert >= 0:
                _fill(self.gate_up[slot], seed, 2 * expert + 1)
                _fill(self.down[slot], seed, 2 * expert + 2)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [..., H] -> ids [..., K] int64 by descending probability, weights [..., K] float32, and the
        probabilities of all experts [..., E] float32."""
        with _as_it_is(tokens.device.type):  # weights are float32, whatever the experts compute in
            probabilities = functional.linear(tokens.float(), self.router.float()).softmax(dim=-1)
        weights, ids = probabilities.topk(self.group.top_k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return ids, weights, probabilities

    def forward(self, x: Tensor, bound: int | None = None, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x: [..., S, H] of the group's dtype, at most max_tokens tokens in all, differently many on each rank, or
        none. bound: as of `tokenway.autograd.dispatch`, the same on all ranks: in the mode "auto" one of at most
        low_latency_tokens makes the forward one of low latency. bias: [..., S, H] of the group's dtype or float32, to
        which the experts' results are added in the combine: what a shared expert has made of x, or a residual.
        Returns (the layer's output [..., S, H], the balance loss of `balance_loss`, a scalar float32).

        Two steps of all ranks, in high throughput three, and two in the backward pass. On a CUDA device it waits for
        the number of rows that came, but as the class says. Errors:
        InvalidArgument; InvalidUsage in a capture if it cannot; those of `tokenway.autograd`.
        """
        group, layout, by_device = self.group, "grouped", self.uncapturable is None
        learns = _requires(x) or _requires(bias) or any(p.requires_grad for p in self.parameters())
        tracked = torch.is_grad_enabled() and learns
        if group.shape.mode_of(bound) == "low_latency":
            layout = self._layout_of(bound, tracked)
            by_device = layout != "rank_major"
        elif not by_device and gradients.capturing(group):
            raise InvalidUsage(f"this layer cannot be captured into a graph: {self.uncapturable}")
        with telling(lambda: group.refuse_routing(layout, bound)):  # peers are in the dispatch already
            x = self._checked(x)
            bias = None if bias is None else self._checked_bias(bias, x)
            back = gradients.returning(group)
            ids, weights, probabilities = self.route(x)
            tokens, k = x.reshape(-1, group.hidden), group.top_k
            routing = ids.reshape(-1, k), weights.reshape(-1, k)
        self.chosen, self.layout = ids, layout
        if by_device and not tracked:
            out = self._inferred(back, tokens, *routing, layout, bound, bias)
        else:
            out = self._tracked(tokens, *routing, layout, bound, by_device, bias)
        return out.view(x.shape), balance_loss(probabilities, ids)

    def _layout_of(self, bound: int | None, tracked: bool) -> str:
        """Of a forward pass of low latency."""
        group, grouped = self.group, self.ungrouped is None
        places = group.nranks * (bound if isinstance(bound, int) else group.shape.default_bound)
        few = places <= (GROUPED_ROWS if grouped and not tracked else PADDED_ROWS)
        if not few and not gradients.capturing(group) and not gradients.returns_choices(group):
            return "rank_major"
        return BY_BOUND if grouped else "expert_major"

    def _checked(self, x: Tensor) -> Tensor:
        """x, in the dtype of the experts under autocast."""
        hidden = self.group.hidden
        if not isinstance(x, Tensor):
            raise InvalidArgument.of("x", f"is of type {type(x).__name__}; it must be a tensor [..., S, {hidden}]")
        if x.dim() < 2 or x.shape[-1] != hidden:
            raise InvalidArgument.of("x", f"has shape {list(x.shape)}; it must be [..., S, {hidden}]")
        return x.to(self.gate_up.dtype) if torch.is_autocast_enabled(x.device.type) else x

    def _checked_bias(self, bias: Tensor, x: Tensor) -> Tensor:
        """bias, a row for each token."""
        if not isinstance(bias, Tensor):
            raise InvalidArgument.of("bias", f"is of type {type(bias).__name__}; it must be a tensor {list(x.shape)}")
        if bias.shape != x.shape:
            raise InvalidArgument.of("bias", f"has shape {list(bias.shape)}; it must be {list(x.shape)}, that of x")
        return bias.reshape(-1, self.group.hidden)

    def _inferred(
        self,
        back: Calls,
        tokens: Tensor,
        ids: Tensor,
        weights: Tensor,
        layout: str,
        bound: int | None,
        bias: Tensor | None,
    ) -> Tensor:
        """What comes back for tokens, by experts that take rows as they come."""
        arrived = inference.dispatch(self.group, tokens, ids, weights, layout, bound, self.layer)
        try:
            with _as_it_is(tokens.device.type):
                results = self.compute(arrived.rows, arrived.weights, arrived.sizes)
        except Exception:
            with suppress(Exception):
                inference.refuse(arrived)
            raise
        return inference.combine(back, arrived, results, bias)

    def _tracked(
        self,
        tokens: Tensor,
        ids: Tensor,
        weights: Tensor,
        layout: str,
        bound: int | None,
        by_device: bool,
        bias: Tensor | None,
    ) -> Tensor:
        """The same for gradients too, and (not by_device) for experts that want to know on the host how many rows each
        has. Batched products sum over empty places, which are 0 therefore. Beside these nothing reads rows, weights or
        gradients beyond what came: products take offsets, and by_expert what ids name."""
        padded = layout == "expert_major"
        routed = autograd.bring(self.group, tokens, ids, weights, layout, bound, self.layer, fill=padded)
        with telling(partial(gradients.refuse_combine, routed.handle)), _as_it_is(tokens.device.type):
            if by_device:
                results = self.compute(routed.tokens, routed.weights, routed.counts if padded else routed.offsets)
            else:
                grouped = autograd.by_expert(routed)
                results = grouped.sum(self.compute(grouped.rows, grouped.weights, grouped.sizes))
        return autograd.give_back(routed, results, bias, fill=padded)

    def compute(self, rows: Tensor, weights: Tensor, sizes: Tensor | list[int]) -> Tensor:
        """What this rank's experts make of their rows, weighted: [R, H] by expert, [R] float32 -> [R, H]. sizes: [L],
        rows of each with its padding; or on the device [L + 1] int32, where each expert's begin and at last all. Or
        [L, C, H], [L, C] and on the device [L] int32, how many of an expert's rows there are, which come first ->
        [L, C, H]. With sizes on the device, results and gradients of further rows are arbitrary."""
        if not len(self.gate_up):
            return rows  # nothing came; still a part of the graph
        if isinstance(sizes, Tensor) and rows.dim() == 3:
            return products.padded(rows, weights, sizes, self.gate_up, self.down)
        if isinstance(sizes, Tensor):
            ends = sizes[1:]
            inside = products.swiglu(products.product(rows, self.gate_up, ends), weights, ends[-1:])
            return products.product(inside, self.down, ends)
        results = []
        # unbind and split: their gradients are one stack and one cat, those of indexing a whole tensor for each expert.
        parts = zip(rows.split(sizes), weights.split(sizes), self.gate_up.unbind(), self.down.unbind(), strict=True)
        for x, w, gate_up, down in parts:
            results.append(functional.linear(products.swiglu(functional.linear(x, gate_up), w), down))
        return torch.cat(results)

    def extra_repr(self) -> str:
        g = self.group
        return (
            f"experts={g.experts}, here={self.experts}, top_k={g.top_k}, hidden={g.hidden}, inner={self.inner}, "
            f"normalize={self.normalize}"
        )


def balance_loss(probabilities: Tensor, ids: Tensor) -> Tensor:
    """How unevenly tokens are spread over experts: 1 if evenly, up to E; a scalar float32, 0 without tokens.

    probabilities: [..., S, E] float32, differentiable. ids: [..., S, K]. For each sequence, E * sum over experts of
    (share of its S * K choices that fell on the expert) * (the expert's mean probability), as in Switch Transformers
    (https://arxiv.org/abs/2101.03961, section 2.2); then the mean over sequences. Over sequences, and not over all that
    a rank holds, so that its mean over ranks with equally many sequences is that of the whole batch.
    """
    length, experts = probabilities.shape[-2:]
    sequences = probabilities.shape[:-2].numel()
    chosen = torch.zeros_like(probabilities).scatter_(-1, ids, 1.0)
    share = chosen.sum(dim=-2) / max(length * ids.shape[-1], 1)
    return experts * (share * probabilities.sum(dim=-2)).sum() / max(length * sequences, 1)


def expert_parameters(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The parameters of a model that this rank alone holds: those of its experts. Their gradients are complete."""
    for module in model.modules():
        if isinstance(module, ExpertParallelMoE):
            yield from (module.gate_up, module.down)


def shared_parameters(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """All other parameters, the same on every rank if they began so. Their gradients must be added up over the ranks
    before an optimiser's step."""
    own = {id(parameter) for parameter in expert_parameters(model)}
    yield from (parameter for parameter in model.parameters() if id(parameter) not in own)


def _requires(x: object) -> bool:
    """Whether a forward pass of x requires gradients for it; False for what is no tensor, which is refused later."""
    return isinstance(x, Tensor) and x.requires_grad


def _as_it_is(device: str) -> AbstractContextManager[None]:
    """Without autocast: or some of the ways to multiply would, and others not."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _fill(values: Tensor, seed: int, number: int) -> None:
    """Uniform within 1 / sqrt(columns), from the seed and a number alone: drawn on the CPU, in float32."""
    bound = values.shape[-1] ** -0.5
    drawn = np.random.default_rng([seed, number]).uniform(-bound, bound, values.shape)
    values.copy_(torch.from_numpy(drawn.astype(np.float32)))
