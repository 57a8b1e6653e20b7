"""A group in numbers: who takes part, how long rows are, and which shapes a dispatch brings. What a layout's leading
dimensions are, and a call's default bound, the C library says (twGroupLayout): here they become shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from tokenway import _header, arguments, tensors
from tokenway.native_group import NativeGroup
from tokenway.settings import FP8, Payload, RowType, Settings

BY_BOUND = "grouped_by_bound"  # what the C library calls "grouped" in low latency
GROUPED = ("grouped", BY_BOUND)


class Field(NamedTuple):
    """A tensor to be: its shape, and its dtype by the common name."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(eq=False)
class Shape:
    """What the settings of a group have come to on this rank. `Group` documents those that it has too. It changes when
    the group grows, and all parts of the group hold this one."""

    rank: int
    nranks: int
    experts: int
    top_k: int
    num_local_experts: int
    hidden: int
    max_tokens: int
    dtype: str
    combine_hidden: int
    combine_dtype: str
    id_dtype: str
    payloads: dict[str, Payload]  # tokens first
    mode: str
    exact: bool  # high throughput alone: outputs are as large as what comes
    low_latency_tokens: int  # the largest b of a low-latency dispatch in the mode "auto"; else 0
    sizes_outputs: bool  # outputs as large as what comes have no fixed size: the host of a device learns it before
    max_recv_rows: int  # of a step of high throughput
    layouts: dict[str, _header.LayoutInfo]  # those of the group's mode
    default_layout: str  # the one whose rows are views of the window; in the mode "auto" that of low latency
    default_bound: int  # b of a dispatch in it; 0 in the exact layouts, which have none
    sum_dtype: str = ""  # of what a combine returns by default
    combine_scale: float | None = None  # of rows that return as fp8: of all; None: each block has its own
    named: bool = False  # calls name what rows consist of
    own: bool = True  # dispatched rows are of the type that the group was made with, which leases are for

    @classmethod
    def of(cls, settings: Settings, native: NativeGroup) -> Shape:
        info, layouts = native.info(), native.layouts()
        default_layout = next(name for name, layout in layouts.items() if layout.views)
        exact = bool(layouts[default_layout].exact)
        counts = any(layout.exact for layout in layouts.values())
        payloads = settings.all_payloads()
        return cls(
            rank=info.rank,
            nranks=info.nranks,
            experts=info.nranks if settings.experts is None else settings.experts,
            top_k=1 if settings.top_k is None else settings.top_k,
            num_local_experts=info.num_local_experts,
            hidden=settings.hidden,
            max_tokens=settings.max_tokens,
            dtype=tensors.dtype_name(settings.dtype),
            combine_hidden=settings.combine_elements(),
            combine_dtype=settings.combine_dtype_name(),
            sum_dtype=settings.combine_dtype_name(),
            id_dtype=tensors.dtype_name(settings.id_dtype),
            payloads=payloads,
            mode=settings.mode,
            exact=exact,
            low_latency_tokens=info.low_latency_tokens,
            sizes_outputs=counts and native.device is not None and settings.max_recv_tokens is None,
            max_recv_rows=min(settings.max_recv_tokens or 2**31, info.nranks * settings.max_tokens),
            layouts=layouts,
            default_layout=default_layout,
            default_bound=layouts[default_layout].default_bound,
        )

    def of_rows(self, rows: RowType) -> Shape:
        """The group as calls see it whose rows are others."""
        payloads = rows.all_payloads()
        return replace(
            self,
            hidden=rows.hidden,
            dtype=payloads["tokens"].dtype,
            combine_hidden=rows.combine_elements(),
            combine_dtype=(combined := rows.combine_dtype_name()),
            sum_dtype=rows.sum_dtype_name() if combined == FP8 else combined,
            combine_scale=rows.combine_scale,
            payloads=payloads,
            named=True,
            own=list(payloads.values()) == list(self.payloads.values()),
        )

    @cached_property
    def extra_names(self) -> tuple[str, ...]:
        """Of the payloads, but for tokens."""
        return tuple(name for name in self.payloads if name != "tokens")

    def grow(self, info: _header.GroupInfo, layouts: dict[str, _header.LayoutInfo]) -> None:
        """Takes over what the group has room for now."""
        self.max_tokens = info.max_tokens
        self.layouts = layouts
        self.default_bound = layouts[self.default_layout].default_bound
        if info.max_recv_tokens:
            self.max_recv_rows = info.max_recv_tokens

    def mode_of(self, bound: Any) -> str:
        """Of a dispatch that names no layout. bound: b, None for none; any value is taken, as by `copies`."""
        if not self.low_latency_tokens:
            return self.mode
        fits = bound is not None and arguments.int32(bound) <= self.low_latency_tokens
        return "low_latency" if fits else "high_throughput"

    def choose(self, layout: Any, bound: Any, counted: bool = True) -> Any:
        """The layout of a dispatch as the C library has it; where none is named, of the mode "auto". layout: as named,
        None for none; bound: as of `mode_of`; counted: whether counts were exchanged since the routing, or that was
        tried. All ranks have made the same calls, so they choose alike."""
        if layout is None:
            return "rank_major" if self.mode_of(bound) == "low_latency" else "flat"
        if type(layout) is str and layout == "grouped" and not self.exact:
            fits = not counted and (bound is None or self.mode_of(bound) == "low_latency")
            slots = fits or not self.low_latency_tokens
            return BY_BOUND if slots else layout
        return layout

    def is_exact(self, layout: Any) -> bool:
        """Whether a dispatch in a layout is one of high throughput. Any value is taken, as by `copies`."""
        form = self.layouts.get(layout) if type(layout) is str else None
        return self.exact if form is None else bool(form.exact)

    def copies(self, layout: Any) -> bool:
        """Whether a layout of this group has no view of the window, so that its rows need memory. Any value is taken:
        the C library refuses what is no layout of the group."""
        form = self.layouts.get(layout) if isinstance(layout, str) else None
        return form is not None and not form.views

    def lead(self, layout: str, bound: int, rows: int) -> tuple[int, ...]:
        """The dimensions before those of a row: [N, b], [L, N*b], or [P]; of the exact layouts [rows]."""
        form = self.layouts[layout]
        if form.exact:
            return (rows,)
        if not form.packed:
            return form.blocks, form.rows_per_bound * bound
        step = form.row_alignment
        return ((form.rows_per_bound * bound + form.blocks * (step - 1)) // step * step,)

    def fields(self, layout: str, lead: tuple[int, ...]) -> dict[str, Field]:
        """Every tensor that a dispatch can bring, by name: the table of `Received`, but for payloads by column."""
        form = self.layouts[layout]
        chosen = lead if form.by_expert else (*lead, form.ids_per_row)
        return {
            **{name: Field((*lead, payload.elements), payload.dtype) for name, payload in self.payloads.items()},
            "ids": Field(chosen, self.id_dtype),
            "weights": Field(chosen, "float32"),
            "counts": Field((form.blocks,), "int32"),
            "offsets": Field((form.blocks + 1,), "int32"),
            "origins": Field(lead, "int64"),
            "source_counts": Field((form.blocks, self.nranks), "int32"),
        }

    def list_fields(self, capacity: int, block: int) -> dict[str, Field]:
        """The index lists of a dispatch, by name, that have so many places."""
        return {
            "sorted_rows": Field((capacity,), "int32"),
            "block_experts": Field((capacity // block,), "int32"),
            "num_sorted": Field((1,), "int32"),
        }

    def __str__(self) -> str:
        return (
            f"Group(rank={self.rank}, nranks={self.nranks}, experts={self.experts}, top_k={self.top_k}, "
            f"hidden={self.hidden}, max_tokens={self.max_tokens})"
        )
