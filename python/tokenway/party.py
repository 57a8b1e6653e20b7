"""Who is to connect, and how these ranks tell each other something before they have a comm."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenway import meeting, nccl
from tokenway.errors import InvalidArgument, SystemFailure, TokenwayError

# A caller's allgather may want as many bytes from each rank: a card is filled up to a multiple of these, and what may
# differ in length, a few strings, fits in one.
_CARD, _MOST = 4096, 512


@dataclass(frozen=True)
class Party:
    """This rank's part in it. gather(occasion, mine, timeout): what every rank gives, in rank order, something that
    JSON can say; `occasion` is the same everywhere. process_group: of torch.distributed, in whose kind of process group
    the portable backend exchanges; None: in its usual one."""

    rank: int
    nranks: int
    gather: Callable[[str, Any, float], list[Any]]
    process_group: Any = None


def party_of(process_group: Any, rank: Any, nranks: Any, store: Any, allgather: Any, nccl_comm: Any = None) -> Party:
    """What `connect` was given: a process group or what is like one, or a rank, a number of ranks, and a store or an
    allgather, or a communicator of NCCL's. None of all: the default process group. Raises InvalidArgument for what is
    none of these."""
    alone = {"rank": rank, "nranks": nranks, "store": store, "allgather": allgather}
    given = [name for name, value in alone.items() if value is not None]
    if nccl_comm is not None:
        if given or process_group is not None:
            others = [*given, *["process_group"] * (process_group is not None)]
            raise InvalidArgument(f"{' and '.join(others)} is given beside nccl_comm, which has its own")
        known = nccl.Communicator(nccl_comm)
        return Party(known.rank, known.nranks, _by(known.allgather, known.rank, known.nranks))
    if not given:
        return _of_group(process_group)
    if process_group is not None:
        raise InvalidArgument(f"{' and '.join(given)} is given beside process_group, which has its own")
    if (store is None) == (allgather is None):
        raise InvalidArgument(f"{' and '.join(given)} is given; store or allgather must be, and one of them alone")
    check_place(rank, nranks)
    if store is not None:
        return Party(rank, nranks, _at(store, "store", rank, nranks))
    if not callable(allgather):
        told = f"is of type {type(allgather).__name__}; it must be a function of bytes that returns a list of bytes"
        raise InvalidArgument.of("allgather", told)
    return Party(rank, nranks, _by(allgather, rank, nranks))


def check_place(rank: Any, nranks: Any) -> None:
    """Raises InvalidArgument for a rank that is none of so many."""
    if not isinstance(nranks, int) or nranks < 1:
        raise InvalidArgument.of("nranks", f"is {nranks!r}; it must be an integer of at least 1")
    if not isinstance(rank, int) or not 0 <= rank < nranks:
        raise InvalidArgument.of("rank", f"is {rank!r}; it must be an integer from 0 to {nranks - 1}")


# ---- process groups --------------------------------------------------------------------------------


def _of_group(given: Any) -> Party:
    like = _of_stateless(given)
    if like is not None:
        return like
    import torch.distributed as dist

    group = meeting.group_of(given)
    rank, nranks = dist.get_rank(group), dist.get_world_size(group)

    def gather(occasion: str, mine: Any, timeout: float) -> list[Any]:
        return meeting.gather(group, occasion, mine, rank, nranks, timeout)

    return Party(rank, nranks, gather, group or dist.group.WORLD)


def _of_stateless(given: Any) -> Party | None:
    """Of a group that torch.distributed does not list: a ProcessGroup made by hand, or an object with a rank, a number
    of ranks (`size` or `world_size`) and a store, each a method or an attribute. None for what is none of these."""
    distributed = sys.modules.get("torch.distributed")
    if given is None or distributed is None or given is distributed.GroupMember.NON_GROUP_MEMBER:
        return None
    if isinstance(given, distributed.ProcessGroup) and given in distributed.distributed_c10d._world.pg_map:
        return None
    found = [_of_names(given, *names) for names in (("rank",), ("size", "world_size"), ("store", "get_group_store"))]
    rank, nranks, store = found
    if not isinstance(rank, int) or not isinstance(nranks, int) or not isinstance(store, distributed.Store):
        return None
    check_place(rank, nranks)
    return Party(rank, nranks, _at(store, "process_group", rank, nranks))


def _of_names(given: Any, *names: str) -> Any:
    for name in names:
        value = getattr(given, name, None)
        if value is not None:
            return value() if callable(value) else value
    return None


# ---- stores and functions --------------------------------------------------------------------------


def _at(store: Any, name: str, rank: int, nranks: int) -> Callable[[str, Any, float], list[Any]]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not isinstance(store, distributed.Store):
        raise InvalidArgument.of(name, f"is of type {type(store).__name__}; it must be a torch.distributed.Store")

    def gather(occasion: str, mine: Any, timeout: float) -> list[Any]:
        return meeting.gather_at(store, occasion, mine, rank, nranks, timeout)

    return gather


def _by(allgather: Callable[[bytes], Any], rank: int, nranks: int) -> Callable[[str, Any, float], list[Any]]:
    def gather(occasion: str, mine: Any, timeout: float) -> list[Any]:
        if isinstance(mine, tuple):  # a sentence of an error may be long
            mine = [x[:_MOST] if isinstance(x, str) else x for x in mine]
        card = json.dumps([occasion, mine]).encode()
        # In this thread, as it may be one of few that may call it; so nothing but itself bounds how long it waits.
        parts = gathered(allgather, card.ljust(-(-len(card) // _CARD) * _CARD), rank, nranks)
        return [_told(part, occasion, rank, source) for source, part in enumerate(parts)]

    return gather


def _told(card: Any, occasion: str, rank: int, source: int) -> Any:
    try:
        found, told = json.loads(bytes(card))
    except (ValueError, TypeError):
        raise SystemFailure(f"allgather returned on rank {rank} what rank {source} has not given") from None
    if found != occasion:
        raise SystemFailure(f"allgather returned on rank {rank} what rank {source} gave at another time")
    return told


def gathered(allgather: Callable[[bytes], Any], mine: bytes, rank: int, nranks: int) -> list[Any]:
    """What a caller's allgather brings: for each rank as many bytes as this one gives. Raises InvalidArgument where
    it returns something else, SystemFailure where it raises."""
    try:
        parts = allgather(mine)
    except TokenwayError:
        raise
    except Exception as error:
        raise SystemFailure(f"allgather raised {type(error).__name__} on rank {rank}: {error}") from error
    if not isinstance(parts, (list, tuple)) or len(parts) != nranks:
        seen = f"{len(parts)} parts" if isinstance(parts, (list, tuple)) else f"a {type(parts).__name__}"
        raise InvalidArgument.of(
            "allgather",
            f"returned {seen} on rank {rank}; it must return a list of {nranks}, what each rank has given",
        )
    for source, part in enumerate(parts):
        if not isinstance(part, (bytes, bytearray, memoryview)):
            raise InvalidArgument.of(
                "allgather", f"returned a {type(part).__name__} for rank {source} on rank {rank}; it must be bytes"
            )
        length = memoryview(part).nbytes
        if length != len(mine):
            raise InvalidArgument.of(
                "allgather",
                f"returned {length} bytes for rank {source} on rank {rank}; it must return the {len(mine)} "
                "that every rank has given",
            )
    return list(parts)
