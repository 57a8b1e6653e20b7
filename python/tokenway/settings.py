"""What a group is made of, as Python says it and as C takes it."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from ctypes import addressof, byref, c_void_p
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tokenway import _header, _native, checked, sentences, tensors
from tokenway.errors import InvalidArgument, TokenwayError
from tokenway.placement import Placement

COMBINABLE = ("float32", "bfloat16", "float16")
FP8 = "float8_e4m3fn"
FP8_BLOCK, FP8_ALIGNED = 128, 16  # elements that share a scale, and bytes at whose multiples values and scales begin


@dataclass(frozen=True)
class Payload:
    """A tensor that travels beside the tokens: `elements` values of `dtype` per token, copied and never interpreted."""

    elements: int
    dtype: Any

    def row_bytes(self) -> int:
        """Of one token."""
        return self.elements * tensors.numpy_dtype(tensors.dtype_name(self.dtype)).itemsize


@dataclass(frozen=True)
class WindowBytes:
    """What a group takes, in bytes per rank. `expert_buffers` is 2 * E * B * row, a design with a place per expert."""

    window: int
    per_lane: int
    dispatch_row: int
    combine_row: int
    expert_buffers: int


@dataclass(frozen=True)
class RowType:
    """What rows consist of: of a group, or of the calls that `Group.rows` returns. Group documents the fields.

    Of calls, combine_dtype may be float8_e4m3fn too: a combine's partials are quantised where they are made, and
    multiplied with their scales in float32 where they are summed. combine_scale: the one scale of all of them, from
    2**-116 to 2**116, bit for bit the same on all ranks (values beyond 448 times it saturate); None: each block of 128
    elements has a scale of its own, which travels with it. What a combine returns is then of the rows' own dtype where
    that can be summed, else bfloat16, unless the call says otherwise."""

    hidden: int
    dtype: Any = "bfloat16"
    payloads: Mapping[str, Payload | tuple[int, Any]] | None = None
    combine_dtype: Any = None
    combine_hidden: int | None = None
    combine_scale: float | None = None

    def all_payloads(self) -> dict[str, Payload]:
        """Name to payload, in the order of the C API: tokens first. Dtypes by their common names."""
        taken = {"tokens", "ids", "weights", "counts", "offsets", "origins", "source_counts"}
        extra = {name: p if isinstance(p, Payload) else Payload(*p) for name, p in (self.payloads or {}).items()}
        if not taken.isdisjoint(extra):
            raise InvalidArgument.of("payloads", f"are named {list(extra)}; {', '.join(sorted(taken))} are taken")
        if len(extra) >= _header.MAX_PAYLOADS:
            raise InvalidArgument.of(
                "payloads", f"has {len(extra)} entries; it must have at most {_header.MAX_PAYLOADS - 1}"
            )
        named = {"tokens": Payload(self.hidden, self.dtype)} | extra
        return {name: Payload(p.elements, tensors.dtype_name(p.dtype)) for name, p in named.items()}

    def payload_names(self) -> list[str]:
        """What callers call them, in the same order."""
        return ["tokens", *(f"payloads[{name!r}]" for name in self.payloads or ())]

    def combine_dtype_name(self) -> str:
        """Of the rows on their way back: as asked for, else that of tokens if it can be summed."""
        if self.combine_dtype is not None:
            return tensors.dtype_name(self.combine_dtype)
        return self.sum_dtype_name()

    def sum_dtype_name(self) -> str:
        """Of the tokens, if that can be summed."""
        name = tensors.dtype_name(self.dtype)
        return name if name in COMBINABLE else "bfloat16"

    def combine_elements(self) -> int:
        """Of one of those rows: as asked for, else as many as a token has."""
        return self.hidden if self.combine_hidden is None else self.combine_hidden

    @property
    def dispatch_bytes(self) -> int:
        """Bytes of a dispatched row, payloads and all: `dispatch_room` of a group that shall have room for it."""
        return sum(payload.row_bytes() for payload in self.all_payloads().values())

    @property
    def combine_bytes(self) -> int:
        """Bytes of a combined row on its way, likewise: `combine_room`."""
        elements, name = self.combine_elements(), self.combine_dtype_name()
        if name != FP8:
            return Payload(elements, name).row_bytes()
        scales = 4 * -(-elements // FP8_BLOCK) if self.combine_scale is None else 0
        return sum(-(-part // FP8_ALIGNED) * FP8_ALIGNED for part in (elements, scales))


def put_payloads(payloads: Mapping[str, Payload], into: Any) -> None:
    """Writes payloads into the C structs that describe them."""
    for q, (name, payload) in enumerate(payloads.items()):
        into[q].dtype = tensors.CODES[payload.dtype]
        field = "hidden" if q == 0 else f"payloads[{name!r}].elements"
        into[q].elements = _native.fit(field, payload.elements, 63)


@dataclass(frozen=True, kw_only=True)
class Settings(RowType):
    """The keywords of `Group`, which documents them."""

    max_tokens: int
    experts: int | None = None
    top_k: int | None = None
    expert_map: Sequence[Any] | Placement | None = None
    lanes: int | None = None
    timeout: float | None = None
    id_dtype: Any = "int32"
    id_space: str = "local"
    invalid_id: int = -1
    sm_limit: int = 0
    mode: str = "low_latency"
    max_recv_tokens: int | None = None
    overflow: str = "refuse"
    row_alignment: int | None = None
    lease_bytes: int = 0
    dispatch_room: int = 0
    combine_room: int = 0
    inbox_tokens: int | None = None
    low_latency_tokens: int | None = None
    combine_rows: str = "per_rank"
    token_replicas: int = 1
    domain: int = 0
    room_for: Sequence[Mapping[str, Any]] = ()

    def others(self) -> list[Settings]:
        """Of the groups that shall have room in this one's window."""
        made = []
        for i, other in enumerate(self.room_for):
            if not isinstance(other, Mapping) or any(name in other for name in ("arena", "room_for")):
                wanted = "a dict of keywords of Group, without arena and room_for"
                raise InvalidArgument.of(f"room_for[{i}]", f"is {other!r}; it must be {wanted}")
            made.append(Settings(**other))
        return made

    def places(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Where experts, or physical slots, are: contiguous int32 arrays (rank, place there); None: in blocks."""
        placement = self.placement
        name, given, count = "expert_map", self.expert_map, self.experts
        if placement is not None:
            name, given, count = "expert_map.where", placement.where, placement.num_slots(self.experts)
        if given is None:
            return None
        if len(given) != 2:
            raise InvalidArgument.of(name, f"has {len(given)} parts; it must be (rank[E], slot[E])")
        rank, slot = (checked.integers(f"{name}[{i}]", part) for i, part in enumerate(given))
        if rank.shape != (count,) or slot.shape != (count,):
            raise InvalidArgument.of(name, f"has shapes {rank.shape} and {slot.shape}; they must be ({count},)")
        return rank, slot

    @cached_property
    def placement(self) -> Placement | None:
        """expert_map, where experts may have several slots or are counted."""
        return Placement.of(self.expert_map, self.experts)


@contextmanager
def telling(call: Callable[[Any], int]) -> Iterator[None]:
    """Peers wait in a collective call for this rank: where its settings cannot even be written down for C, the call is
    made all the same, with a config that C refuses and tells of. `call` takes the config."""
    try:
        yield
    except Exception as error:
        unreadable = _header.GroupConfig()
        unreadable.size = 0
        call(byref(unreadable))
        if isinstance(error, TokenwayError):
            raise
        raise InvalidArgument(f"settings: {error}") from error


def telling_comm(comm: Any) -> AbstractContextManager[None]:
    """The same around what precedes the creation of a group on a comm."""
    return telling(lambda nothing: _native.lib.twGroupCreate(byref(c_void_p()), comm.pointer, nothing))


def make_config(settings: Settings) -> tuple[_header.GroupConfig, Any]:
    """Settings as the C struct, and what must outlive it."""
    config = _header.GroupConfig()
    config.mode = named("mode", settings.mode, _header.MODES)
    config.max_tokens = _native.fit("max_tokens", settings.max_tokens)
    if (settings.experts, settings.top_k) != (None, None):  # else C's default, 0
        config.num_experts = _native.fit("experts", settings.experts)
        config.top_k = _native.fit("top_k", settings.top_k)
        if config.num_experts == config.top_k == 0:
            config.top_k = sentences.ZERO  # written out, 0 is wrong
    payloads = settings.all_payloads()
    config.num_payloads = len(payloads)
    put_payloads(payloads, config.payloads)
    if settings.combine_scale is not None:
        wanted = "None: rows of a group's own have no scale, but those of Group.rows may"
        raise InvalidArgument.of("combine_scale", f"is {settings.combine_scale!r}; it must be {wanted}")
    config.combine_dtype = tensors.CODES[settings.combine_dtype_name()]
    config.combine_elements = _native.fit("combine_hidden", settings.combine_elements(), 63)
    places, placement = settings.places(), settings.placement
    if places is not None:
        config.expert_rank, config.expert_slot = (part.ctypes.data for part in places)
    native, keep = (None, None) if placement is None else placement.native(settings.experts)
    config.placement = None if native is None else addressof(native)
    config.lanes = 1 if settings.lanes is None else _native.fit_given("lanes", settings.lanes)
    if settings.timeout is not None:
        config.timeout_ms = milliseconds(settings.timeout)
    config.id_dtype = tensors.CODES[tensors.dtype_name(settings.id_dtype)]
    config.id_space = named("id_space", settings.id_space, _header.ID_SPACES)
    config.invalid_id = _native.fit("invalid_id", settings.invalid_id)
    config.sm_limit = _native.fit("sm_limit", settings.sm_limit)
    if settings.max_recv_tokens is not None:
        config.max_recv_tokens = _native.fit_given("max_recv_tokens", settings.max_recv_tokens)
    if settings.low_latency_tokens is not None:
        config.low_latency_tokens = _native.fit_given("low_latency_tokens", settings.low_latency_tokens)
    config.token_replicas = _native.fit_given("token_replicas", settings.token_replicas)
    config.domain = _native.fit("domain", settings.domain)
    config.overflow = named("overflow", settings.overflow, _header.OVERFLOWS)
    config.combine_rows = named("combine_rows", settings.combine_rows, _header.COMBINE_ROWS)
    if settings.row_alignment is not None:
        config.row_alignment = _native.fit_given("row_alignment", settings.row_alignment)
    if settings.inbox_tokens is not None:
        config.inbox_tokens = _native.fit_given("inbox_tokens", settings.inbox_tokens)
    for field in ("lease_bytes", "dispatch_room", "combine_room"):
        given = getattr(settings, field)
        if not isinstance(given, numbers.Integral) or not 0 <= given < 2**62:
            raise InvalidArgument.of(field, f"is {given!r}; it must be an integer from 0 to {2**62 - 1}")
        setattr(config, field, int(given))
    others = [make_config(other) for other in settings.others()]
    pointers = (c_void_p * len(others))(*(addressof(other) for other, _ in others))
    config.room_for, config.num_room_for = addressof(pointers), len(others)
    return config, (places, native, keep, others, pointers)


def named(field: str, value: str, codes: Mapping[str, int]) -> int:
    """The C library's number for one of several words."""
    if value not in codes:
        raise InvalidArgument.of(field, f"is {value!r}; it must be one of {list(codes)}")
    return codes[value]


def milliseconds(timeout: float) -> int:
    """A timeout for the C API from one in seconds."""
    if not isinstance(timeout, numbers.Real) or not 0.001 <= timeout <= 2e6:
        raise InvalidArgument.of("timeout", f"is {timeout!r}; it must be from 0.001 to 2e6 seconds")
    return round(timeout * 1000)


def window_bytes(nranks: int, **settings: Any) -> WindowBytes:
    """What a Group of these settings would take per rank on `nranks` ranks; creates nothing."""
    return window_of(nranks, Settings(**settings))


def window_of(nranks: int, settings: Settings) -> WindowBytes:
    """What `window_bytes` says, of settings that there are."""
    config, keep = make_config(settings)
    found = _header.WindowBytes()
    result = _native.lib.twGroupWindowBytes(byref(config), _native.fit("nranks", nranks), byref(found))
    _native.check(result, tensors=settings.payload_names())
    del keep
    return WindowBytes(found.window, found.per_lane, found.dispatch_row, found.combine_row, found.expert_buffers)
