"""What integrations share: the comm of a process group, and one group for layers of all row types and sizes.

    peers = groups.of(process_group, device=x.device)  # never collective, the same object each time
    shared = peers.shared(experts=64, top_k=8, mode="auto")  # never collective
    group = shared.with_room(tw.RowType(x.shape[1], x.dtype), max_tokens)  # collective the first time, and to grow

`with_room` returns what the functions of `tokenway.autograd` take for a group; it has `route`, `dispatch` and `combine`
too. Collective are `with_room`, where it makes something or makes it larger; `Peers.comm`, the first time; and `close`.
Nothing else is. Ranks must make these calls in the same order and name the same, as they do if they build and run the
same model; those that differ get an error.

So sizes must be known alike. A rank's own number of tokens is not, unless batches are padded alike or replicated:
`Sizes` is what a user has told of that, and says in a sentence what is missing.

A process group that is destroyed, and that nothing holds any more, takes its comm and groups along. As with PyTorch's
own collectives, destroy it when all ranks have come through their steps: it asks nobody, and a peer that waits gets
PeerAborted. On a CUDA device it waits for what is queued there. A process that ends without has nothing to wait for,
and its peers see it as gone. One thread at a time may use the groups of a process group.
"""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

import tokenway as tw
from tokenway import meeting
from tokenway.errors import InUse
from tokenway.party import party_of
from tokenway.pytorch import gradients
from tokenway.pytorch.typed_group import TypedGroup

# Tokens that a group has room for from the start. Of the mode "auto" the largest bound of low latency stays what it is
# when the group grows, so a first call of a few tokens must not make it that few.
FEW = 256
_SPARE = 8  # handles that are kept: of two kinds of rows, on two streams, of two micro-batches


@dataclass(frozen=True)
class Sizes:
    """What all ranks know of each other's batches, as a user has said it alike on all of them.

    max_tokens: no rank ever has more tokens in a call. equal: in every call all ranks have equally many. Errors:
    InvalidArgument."""

    max_tokens: int | None = None
    equal: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and (not isinstance(self.max_tokens, int) or not 1 <= self.max_tokens < 2**31):
            told = f"is {self.max_tokens!r}; it must be None or an integer from 1 to {2**31 - 1}"
            raise tw.InvalidArgument.of("max_tokens", told)

    def room(self, tokens: int, how: str) -> int:
        """For how many tokens of a rank a call must have room: the same on all ranks. tokens: this rank's. how: in
        which words a user gives sizes. Raises InvalidUsage where nothing is known, on all ranks."""
        if self.equal:
            return max(tokens, self.max_tokens or 1)
        if self.max_tokens is None:
            raise tw.InvalidUsage(
                "ranks may have different numbers of tokens, and no rank knows those of others: say how many a rank "
                f"has at most, or that all have equally many ({how}), alike on all ranks"
            )
        return self.max_tokens

    def check(self, tokens: int, how: str) -> None:
        """Raises InvalidArgument for more tokens of this rank than were said, of which other ranks know nothing: a
        caller tells them (`refuse_routing` of the group)."""
        if not self.equal and self.max_tokens is not None and tokens > self.max_tokens:
            raise tw.InvalidArgument.of("tokens", f"are {tokens}; at most {self.max_tokens} were said ({how})")


class OpenCombines:
    """Combines that this rank has still to make, each kept from its dispatch on. One that it leaves out, as its experts
    raise, holds a lane, and peers wait in it, so it is refused before whatever else asks them.

    refused: whether one was, since its user has set this back."""

    def __init__(self) -> None:
        self.refused = False
        self._refusals: dict[Hashable, Callable[[], object]] = {}

    def add(self, key: Hashable, refuse: Callable[[], object]) -> None:
        """Behind a dispatch. refuse: tells peers that its combine does not come."""
        self._refusals[key] = refuse

    def discard(self, key: Hashable) -> None:
        """Before the combine, or where there is none to be made."""
        self._refusals.pop(key, None)

    def refuse(self, keys: Iterable[Hashable] | None = None) -> None:
        """Those of these keys, None: all, in the order of their dispatches."""
        for key in list(self._refusals) if keys is None else keys:
            refusal = self._refusals.pop(key, None)
            if refusal is not None:
                self.refused = True
                refusal()

    def clear(self) -> None:
        """Where the group is gone, and all its steps with it."""
        self._refusals.clear()
        self.refused = False


class SharedGroup:
    """One group for all layers with the same experts, top_k and further settings, whatever their rows are: one window,
    as large as the largest row and the largest call so far. `Peers.shared` makes it. settings: keywords of Group."""

    def __init__(self, peers: Peers, settings: dict[str, Any]):
        self._peers = weakref.ref(peers)  # which holds this one
        self.settings = settings
        self._views: dict[Any, TypedGroup] = {}  # by what rows consist of
        self.group: tw.Group | None = None  # None until it is needed
        self._spare: list[tuple[Any, int]] = []  # handles whose calls are over, and the room that they have
        self.open = OpenCombines()  # for users that make a dispatch and its combine in two calls
        self.before_close: list[Callable[[], None]] = []  # of users that have threads in the group

    @property
    def steps(self) -> int:
        """Dispatches, combines, gathers and reduce-scatters that this rank has called, forward and backward."""
        return sum(view.steps for view in self._views.values())

    def with_room(self, rows: tw.RowType, max_tokens: int) -> TypedGroup:
        """The group as layers with such rows see it, with room for max_tokens of them from each rank, and for gradients
        of the weights beside each; rows that are to be trained with are of float32 or bfloat16.

        Collective, and not in a capture, the first time; and whenever rows or max_tokens are larger than all before, in
        which case the group grows, by doubling (`Group.reserve`: what there is goes on). Else nothing is sent. All
        ranks name the same. On a CUDA device making and growing wait for the other ranks, not for the device. Errors:
        those of `tokenway.connect`, `Group`, `Group.reserve` and `Group.rows`, on all ranks alike; InvalidUsage in a
        capture."""
        group = self.group
        most = rows.combine_bytes + 4 * self.settings["top_k"]
        if group is None:
            group = self._make(rows, max_tokens, most)
        room = group.settings
        if max_tokens > group.max_tokens or rows.dispatch_bytes > room.dispatch_room or most > room.combine_room:
            self._refuse_capture()
            tokens = _doubled(max_tokens) if max_tokens > group.max_tokens else None
            group.reserve(max_tokens=tokens, dispatch_room=rows.dispatch_bytes, combine_room=most)
        kind = *rows.all_payloads().items(), rows.combine_dtype_name(), rows.combine_elements(), rows.combine_scale
        view = self._views.get(kind)
        if view is None:
            view = self._views[kind] = TypedGroup(group, rows)
        return view

    def route(self, view: TypedGroup, ids: Any, weights: Any = None, layer: int = 0) -> Any:
        """As `TypedGroup.route` of one of the group's views; into a handle that was kept, where there is one: making it
        takes longer than its dispatch, and what its dispatches show has been looked at before. layer: 0 but in groups
        of a `Placement`, which keep none."""
        spare = self._spare
        if layer or not spare or gradients.capturing(view.group):  # a graph's handle is its own
            return view.route(ids, weights, layer=layer)
        stream, room = view.group.native.place.stream(), view.max_tokens
        for i in range(len(spare) - 1, -1, -1):
            handle, known = spare[i]
            # Of another stream: its last call may still run.
            if handle.group is view and known == room and handle.stream == stream:
                del spare[i]
                handle.update(ids, weights)
                return handle
        return view.route(ids, weights)

    def keep(self, handle: Any, room: int) -> None:
        """For `route`: a handle that was combined, and that nobody will use again; what its dispatch has shown ends
        with the next one. room: `max_tokens` of its view when it was routed. Does nothing in a capture, nor in groups
        of a `Placement`: a handle is of one layer, and where maps move none may live on."""
        view = handle.group
        if self.settings.get("expert_map") is None and view.group is self.group and not gradients.capturing(view.group):
            self._spare.append((handle, room))
            del self._spare[:-_SPARE]

    def close(self) -> None:
        """Collective: closes the group, which is made anew if it is needed again."""
        try:
            if self.group is not None:
                self._settle()
                self.group.close()
        finally:  # it may raise of a group that is closed all the same, or is still there to be closed
            if self.group is None or self.group.closed:
                self.group = None
                self._views.clear()
                self._spare.clear()
                self.open.clear()

    def give_up(self) -> None:
        """The same without asking the other ranks. Those that wait get PeerAborted."""
        if self.group is not None:
            self._settle()
            with suppress(tw.TokenwayError):  # which it raises while another thread is in a call of it
                self.group.abort()
                self.close()

    def _settle(self) -> None:
        while self.before_close:
            self.before_close.pop()()

    def _make(self, rows: tw.RowType, max_tokens: int, combine_room: int) -> tw.Group:
        peers = self._peers()
        if peers is None:
            raise tw.InvalidUsage("the process group is destroyed; its groups are gone")
        self._refuse_capture()
        self.group = tw.Group(
            peers.comm,
            **self.settings,
            hidden=rows.hidden,
            dtype=rows.dtype,
            payloads=rows.payloads,
            combine_dtype=rows.sum_dtype_name(),
            max_tokens=max(FEW, _doubled(max_tokens)),
            dispatch_room=rows.dispatch_bytes,
            combine_room=combine_room,
        )
        return self.group

    def _refuse_capture(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise tw.InvalidUsage(
                "a group that is made or grows asks the other ranks, which a captured stream cannot: make the largest "
                "call once before the capture"
            )

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"SharedGroup({told}, group={self.group!r}, steps={self.steps})"


class Views:
    """A shared group as the rows of one user see it: found again at once, by a key for what such rows consist of, where
    `SharedGroup.with_room` would do nothing. To say what they consist of takes longer than to find them."""

    def __init__(self, shared: SharedGroup):
        self._shared = shared
        self._made: dict[Hashable, TypedGroup] = {}

    def find(self, key: Hashable, max_tokens: int = 0) -> TypedGroup | None:
        """The view of the key; None where the group is to be made, as it was closed or never was, or is to grow."""
        view, group = self._made.get(key), self._shared.group
        if view is None or view.group is not group or max_tokens > group.max_tokens:
            return None
        return view

    def make(self, key: Hashable, rows: tw.RowType, max_tokens: int) -> TypedGroup:
        """`SharedGroup.with_room`, for a key that finds nothing."""
        view = self._made[key] = self._shared.with_room(rows, max_tokens)
        return view

    def plain(self, hidden: int, dtype: torch.dtype, max_tokens: int) -> TypedGroup:
        """`SharedGroup.with_room` for rows with nothing beside them."""
        key = hidden, dtype
        return self.find(key, max_tokens) or self.make(key, tw.RowType(hidden, dtype), max_tokens)

    def there(self) -> list[TypedGroup]:
        """Those of the group that there is, in the order in which they were first made."""
        return [view for view in self._made.values() if view.group is self._shared.group]


class Peers:
    """The ranks of a process group: their comm, and the groups over it. `of` makes it."""

    def __init__(self, process_group: Any, device: int | None, timeout: float | None, backend: str):
        self._process_group = weakref.ref(process_group)
        self._device, self._timeout, self._backend = device, timeout, backend
        self._comm: tw.Comm | None = None
        self._process = os.getpid()
        self.groups: dict[Any, SharedGroup] = {}  # by their settings, in the order in which they were asked for

    @property
    def comm(self) -> tw.Comm:
        """The comm. Collective the first time that it is asked for."""
        if self._comm is None:
            process_group = self._process_group()
            if process_group is None:
                raise tw.InvalidUsage("the process group is destroyed")
            options = {"device": self._device, "timeout": self._timeout, "backend": self._backend}
            self._comm = tw.connect(process_group, **options)
        return self._comm

    def shared(self, *, experts: int, top_k: int, **settings: Any) -> SharedGroup:
        """The group of all layers that route alike. settings: further keywords of Group, hashable, but for what
        `with_room` is given: rows, max_tokens and rooms. Not collective: the group is made where it is needed. Errors:
        InvalidArgument for settings that are not hashable."""
        settings = {"experts": experts, "top_k": top_k, "timeout": self._timeout} | settings
        try:
            key = frozenset(settings.items())
        except TypeError as error:
            raise tw.InvalidArgument(f"settings: {error}; places of experts are hashable as a Placement") from None
        shared = self.groups.get(key)
        if shared is None:
            shared = self.groups[key] = SharedGroup(self, settings)
        return shared

    def is_of(self, process_group: Any) -> bool:
        """Whether these are the ranks of a process group, as `of` takes it."""
        return self._process_group() is resolved(process_group)

    def close(self) -> None:
        """Collective: closes the groups and the comm. They are made anew if they are needed again."""
        for shared in self.groups.values():
            shared.close()
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.close()

    def give_up(self) -> None:
        """The same where the other ranks are not there to agree: asks nobody. Peers that wait get PeerAborted."""
        if self._process != os.getpid():  # a forked child's copy is its parent's
            return
        for shared in self.groups.values():
            shared.give_up()
        comm, self._comm = self._comm, None
        if comm is not None:
            with suppress(tw.TokenwayError):  # a group is left
                comm.close()

    def __repr__(self) -> str:
        return f"Peers({self._comm!r}, groups={list(self.groups.values())})"


_living: dict[tuple[int, int | None], Peers] = {}  # by the process group's id, as not all of them can be hashed


def of(process_group: Any = None, *, device: Any = None, timeout: float | None = None, backend: str = "auto") -> Peers:
    """The peers of a process group: of torch.distributed (None: the default one), a DeviceMesh of one dimension, or
    what `tokenway.connect` takes for one. The same object each time, until the process group is destroyed. Not
    collective.

    device: None, "cpu" or a CUDA device, as a torch.device or a string; those of a tensor that is to be sent. timeout,
    backend: as of `connect` and, timeout, of `Group`, taken the first time. Errors: InvalidArgument."""
    process_group = resolved(process_group)
    key = id(process_group), _index(device)
    peers = _living.get(key)
    if peers is None:
        peers = _living[key] = Peers(process_group, key[1], timeout, backend)
        weakref.finalize(process_group, _forget, key).atexit = False
    return peers


def close(process_group: Any = None) -> None:
    """Closes what there is of a process group, as `of` takes it, on all devices. Collective among its ranks."""
    number = id(resolved(process_group))
    for key, peers in list(_living.items()):
        if key[0] == number:
            peers.close()


def barrier(process_group: Any, timeout: float) -> None:
    """Waits on the host for all ranks of a process group, as `of` takes it, to come here. timeout: seconds, where these
    meet at a store. Collective."""
    group = resolved(process_group)
    if isinstance(group, torch.distributed.ProcessGroup):
        torch.distributed.barrier(group)
    else:
        party_of(group, None, None, None, None).gather("a barrier", 0, timeout)


def living() -> list[Peers]:
    """Of all process groups that there are: what is in use, and how many steps it has made (`SharedGroup.steps`)."""
    return [peers for peers in _living.values() if peers.groups]


def give_back(handle: Any) -> None:
    """The lane of a handle whose call has failed, on all ranks alike, so that the next call finds one."""
    if handle.leased:
        with suppress(tw.TokenwayError):
            handle.release()


def complete(pending: Any, handle: Any) -> None:
    """Receives a call that was sent (`Pending`), and gives back the lane of its handle where that fails. An error is
    raised again by a further call."""
    try:
        pending.hook()
    except InUse:  # another call was in the way: this one is still to be completed
        raise
    except tw.TokenwayError:
        give_back(handle)
        raise


def resolved(process_group: Any = None) -> Any:
    """What `of` takes, as an object that lives as long as the ranks are together: a process group, or what stands for
    one. Not collective. Errors: InvalidArgument; InvalidUsage without a default process group."""
    if process_group is None:
        process_group = torch.distributed.group.WORLD
        if process_group is None:
            raise tw.InvalidUsage("torch.distributed is not initialised, so there is no default process group")
    if hasattr(process_group, "get_group") or process_group is torch.distributed.GroupMember.NON_GROUP_MEMBER:
        return meeting.group_of(process_group)
    return process_group


def _index(device: Any) -> int | None:
    """The CUDA device's number, None for the CPU."""
    if device is None:
        return None
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise tw.InvalidArgument.of("device", f"is {str(device)!r}; it must be 'cpu' or a CUDA device")
    if device.type == "cpu":
        return None
    return torch.cuda.current_device() if device.index is None else device.index


def _doubled(tokens: int) -> int:
    """The power of two from which on there is room."""
    return 1 << max(tokens - 1, 0).bit_length()


def _forget(key: tuple[int, int | None]) -> None:
    """The process group is gone."""
    peers = _living.pop(key, None)
    if peers is not None:
        peers.give_up()


@atexit.register
def _leave() -> None:
    """The process ends, and what it has with it. Nobody is asked, so groups are not closed, and do not say so."""
    warnings.filterwarnings("ignore", message=r"Group\(.* was not closed", category=ResourceWarning)
