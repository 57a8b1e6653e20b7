"""The exchange of low latency around experts that take rows in blocks of a fixed size, one for each expert: each row
returns as it is, and its owner weights and sums."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tokenway as tw
from tokenway.integrations.groups import Peers, SharedGroup, Views, complete, give_back
from tokenway.pytorch import gradients
from tokenway.pytorch.typed_group import TypedGroup

SCALES, TOKEN = "scales", "token"  # payloads: of fp8 rows, and a row's number in its source's batch, and its source
# Elements of the latter, int32, of which two are unused: kernels for usual calls take all that travels by 16 bytes.
TOKEN_ELEMENTS = 4
_FP8_BLOCK, _PACKED = 128, 4  # elements to a scale, and scales to an int32

Forms = list[tuple[str, tuple[int, ...], torch.dtype]]  # of outputs: name, shape, dtype


class Names(NamedTuple):
    """What a framework calls the arguments that sentences of errors name."""

    rows: str = "x"
    ids: str = "topk_idx"
    weights: str = "topk_weights"
    results: str = "x"
    bound: str = "num_max_dispatch_tokens_per_rank"


DEEP_EP = Names()


class Sent:
    """A dispatch: what its combines need, and what a caller may look up.

    shape, device: of the rows that came, which are their caller's alone; counts: [L] int32; told: [L, N * b, 4] int32,
    what has come with each row. What is asked for by few is made of that when it is asked for."""

    def __init__(
        self,
        exchange: LowLatency,
        view: TypedGroup,
        handle: Any,
        bound: int,
        made: dict[str, Tensor],
        dtype: torch.dtype,
    ):
        self.exchange, self.view, self.handle, self.bound = exchange, view, handle, bound
        self.dtype = dtype  # of what experts return
        self.shape, self.device = made["tokens"].shape, made["tokens"].device
        self.counts, self.told = made["counts"], made[TOKEN]
        self.buffer: Tensor | None = None  # for the next combine's rows

    def source(self) -> Tensor:
        """[L, N * b] int32: a row's number in its source's batch."""
        return self.told[..., 0].contiguous()

    def ranges(self) -> Tensor:
        """[L, N] int64: where the rows of each source begin, times 2**32, plus how many they are."""
        places, ranks = self.shape[1], self.view.nranks
        there = torch.arange(places, device=self.device) < self.counts[:, None]
        sources = torch.where(there, self.told[..., 1], ranks).long()
        counts = sources.new_zeros(len(sources), ranks + 1).scatter_add_(1, sources, there.long())[:, :ranks]
        return (counts.cumsum(1) - counts) << 32 | counts


class LowLatency:
    """The exchange of all layers of a process group that route alike. Two dispatches or combines may be under way at
    once; none holds a lane once it is complete, so combines may follow in any order, and twice.

    peers: those of the process group. experts, top_k: of the routings. names: of arguments, in errors. dtypes: that
    rows may have before they are quantised. settings: further ones of the group."""

    def __init__(
        self,
        peers: Peers,
        experts: int,
        top_k: int,
        names: Names = DEEP_EP,
        dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,),
        **settings: Any,
    ):
        self.experts, self.top_k = experts, top_k
        self._names, self._dtypes = names, dtypes
        settings = {"mode": "low_latency", "combine_rows": "per_expert", "lanes": 2} | settings
        self.shared: SharedGroup = peers.shared(experts=experts, top_k=top_k, **settings)
        self._views = Views(self.shared)
        self._told: list[Tensor] = []  # all that there were: captured graphs read them as long as they are replayed
        self._told_to: dict[int, Tensor] = {}  # of the last of them, so many rows
        self._forms: dict[Any, Forms] = {}  # of outputs

    def view(self, hidden: int, dtype: torch.dtype, scales: tuple[int, str] | None, bound: int) -> TypedGroup:
        """The group as such rows see it. Collective the first time, and where rows or bound are larger than all before,
        which all ranks know alike."""
        key = hidden, dtype, scales
        view = self._views.find(key, bound)
        if view is not None:
            return view
        payloads: dict[str, Any] = {TOKEN: (TOKEN_ELEMENTS, "int32")}
        if scales is not None:
            payloads[SCALES] = scales
        sent = dtype if scales is None else torch.float8_e4m3fn
        return self._views.make(key, tw.RowType(hidden, sent, payloads, dtype), bound)

    def dispatch(
        self,
        x: Tensor,
        ids: Tensor,
        bound: int,
        fp8: bool,
        power_of_two: bool,
        packed: bool,
        send_only: bool,
        sm_limit: int = 0,
        layer: int = 0,
    ) -> tuple[Sent, Tensor, Tensor | None, Callable[[], None]]:
        """Sends rows [T, H] of one of the dtypes to their experts, quantised before if fp8. ids: [T, K] int32 or int64,
        -1 for none. bound: b, alike on all ranks, T at most. sm_limit: as of `Group.dispatch`. layer: whose map ids go
        by, in a group that has maps; rows come by the slots of this rank then. Returns (the dispatch;
        rows [L, N * b, H]; for fp8 scales [L, N * b, S], by column, else None; what receives them: done already, unless
        send_only). A step of all ranks. Errors: as `Group.dispatch`."""
        with gradients.telling(partial(self.refuse, bound)):
            self._check_rows(x)
        blocks = -(-x.shape[-1] // _FP8_BLOCK)
        scales = None
        if fp8:
            scales = (-(-blocks // _PACKED), "int32") if packed else (blocks, "float32")
        view = self.view(x.shape[-1], x.dtype, scales, bound)
        with gradients.telling(partial(view.refuse_dispatch, "expert_major", bound)):
            self._check_sizes(x, ids, bound)
            rows, beside = x, {TOKEN: self.told(len(x), view)}
            if fp8:
                rows, beside[SCALES] = tw.quantize_fp8(x, power_of_two, packed=packed)
            handle = view.route(ids, layer=layer)
            made = self._outputs(view, (x.shape[-1], x.dtype, scales, bound))
        try:
            by_column = [SCALES] if fp8 else None
            asked: dict[str, Any] = {"layout": "expert_major", "bound": bound, "column_major": by_column}
            asked["sm_limit"] = sm_limit
            pending = view.dispatch(handle, rows, beside, out=dict(made), send_only=send_only, **asked)
        except Exception:
            give_back(handle)
            raise
        columns = made[SCALES].transpose(1, 2)[:, : view.nranks * bound] if fp8 else None
        sent = Sent(self, view, handle, bound, made, x.dtype)
        return sent, made["tokens"], columns, _received(pending, handle, send_only)

    def refuse(self, bound: int) -> None:
        """Tells peers, who are in a dispatch of rows that are not known here, that this rank cannot make the call. If
        there is no group yet, they are not told."""
        group = self.shared.group
        if group is not None:
            calls = self._views.there() or [group]
            calls[-1].refuse_dispatch("expert_major", bound)

    def combine(
        self, sent: Sent, rows: Tensor, weights: Tensor, out: Tensor | None, send_only: bool, sm_limit: int = 0
    ) -> tuple[Tensor, Callable[[], None]]:
        """Returns rows [L, N * b, H], of the dtype of what was sent before it was quantised, which are weighted where
        they came from and summed: [T, H], and what receives it: done already, unless send_only. weights: [T, K]
        float32. A step of all ranks. Errors: as `Group.combine`."""
        view, handle = sent.view, sent.handle
        with gradients.telling(partial(gradients.refuse_combine, handle, view)):
            for name, given, shape, dtype in (
                (self._names.results, rows, sent.shape, sent.dtype),
                (self._names.weights, weights, (handle.tokens, self.top_k), torch.float32),
            ):
                if tuple(given.shape) != tuple(shape) or given.dtype != dtype:
                    told = f"is {str(given.dtype)[6:]} {list(given.shape)}"
                    wanted = f"{str(dtype)[6:]} {list(shape)}"
                    raise tw.InvalidArgument.of(name, f"{told}; it must be {wanted}")
            rows, weights = rows.contiguous(), weights.contiguous()
            if out is None:
                out = rows.new_empty(handle.tokens, rows.shape[-1])
        try:
            asked: dict[str, Any] = {"layout": "expert_major", "weights": weights, "out": out, "sm_limit": sm_limit}
            pending = view.combine(handle, rows, send_only=send_only, **asked)
        except Exception:
            give_back(handle)
            raise
        return out, _received(pending, handle, send_only)

    def _check_rows(self, x: Tensor) -> None:
        if x.dim() != 2 or x.dtype not in self._dtypes:
            wanted = " or ".join(str(dtype)[6:] for dtype in self._dtypes)
            told = f"is {str(x.dtype)[6:]} {list(x.shape)}; it must be {wanted} [T, H]"
            raise tw.InvalidArgument.of(self._names.rows, told)

    def _check_sizes(self, x: Tensor, ids: Any, bound: int) -> None:
        names = self._names
        if len(x) > bound:
            raise tw.InvalidArgument.of(names.rows, f"has {len(x)} rows; it must have at most {names.bound}, {bound}")
        if not isinstance(ids, Tensor) or tuple(ids.shape) != (len(x), self.top_k):
            found = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
            raise tw.InvalidArgument.of(names.ids, f"is {found}; it must be {[len(x), self.top_k]}")

    def told(self, tokens: int, view: TypedGroup) -> Tensor:
        """[T, 4] int32, the payload TOKEN: 0, 1, 2 and so on, each with this rank."""
        if not self._told or self._told[-1].shape[0] < view.max_tokens:  # all at once: never first in a capture
            device = gradients.device_of(view.group)
            told = torch.zeros(view.max_tokens, TOKEN_ELEMENTS, dtype=torch.int32, device=device)
            told[:, 0] = torch.arange(len(told), device=device)
            told[:, 1] = view.rank
            self._told.append(told)
            self._told_to.clear()
        found = self._told_to.get(tokens)
        if found is None:
            found = self._told_to[tokens] = self._told[-1][:tokens]
        return found

    def _outputs(self, view: TypedGroup, key: Any) -> dict[str, Tensor]:
        """What a dispatch writes to. key: what their forms follow from, the bound at last."""
        forms = self._forms.get(key)
        if forms is None:
            forms = self._forms[key] = _forms(view, key[-1])
        device = gradients.device_of(view.group)
        return {name: torch.empty(shape, dtype=dtype, device=device) for name, shape, dtype in forms}


class Once:
    """Functions that are called one after the other until each has gone well once, however often this is called. One
    that raises is called again the next time."""

    def __init__(self, *functions: Callable[[], None]):
        self._left = list(functions)

    def __call__(self) -> None:
        while self._left:
            self._left[0]()
            del self._left[0]


def _received(pending: Any, handle: Any, send_only: bool) -> Callable[[], None]:
    """What receives a call that was sent: nothing is left to do of one that is complete."""
    if send_only:
        return Once(partial(_complete, pending, handle))
    give_back(handle)
    return _nothing


def _nothing() -> None:
    pass


def _complete(pending: Any, handle: Any) -> None:
    """Receives, and gives the lane back, of which nothing is needed then: outputs are tensors of their own."""
    complete(pending, handle)
    give_back(handle)


def _forms(view: TypedGroup, bound: int) -> Forms:
    """Of what a dispatch writes to."""
    experts, places = view.num_local_experts, view.nranks * bound
    forms: Forms = []
    for name, payload in view.type.all_payloads().items():
        dtype = getattr(torch, payload.dtype)
        shape: tuple[int, ...] = experts, places, payload.elements
        if name == SCALES:
            step = 16 // dtype.itemsize  # columns begin at multiples of 16 bytes
            shape = experts, payload.elements, -(-places // step) * step
        forms.append((name, shape, dtype))
    return [*forms, ("counts", (experts,), torch.int32)]
