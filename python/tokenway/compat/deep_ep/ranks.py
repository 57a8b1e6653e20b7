"""What all Buffers of a process group share on one device: its comm, its groups, and the order of its calls."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

import torch

import tokenway as tw
from tokenway.compat.deep_ep.events import Streams
from tokenway.compat.deep_ep.expanded import Expanded
from tokenway.compat.deep_ep.normal import Normal
from tokenway.integrations import groups
from tokenway.integrations.low_latency import LowLatency

_known: weakref.WeakKeyDictionary[groups.Peers, Ranks] = weakref.WeakKeyDictionary()


class Ranks:
    """Of a process group and a device. `of` makes it. Groups are made in the first call that needs them."""

    def __init__(self, device: torch.device):
        self.streams = Streams(device)
        self._exchanges: dict[Any, Any] = {}  # by their kind and what they are for

    def normal(self, peers: groups.Peers, experts: int, top_k: int) -> Normal:
        """The exchange of normal mode. Not collective."""
        return self._exchange(Normal, peers, experts, top_k)

    def low_latency(self, peers: groups.Peers, experts: int, top_k: int) -> LowLatency:
        """The exchange of low-latency mode. Not collective."""
        return self._exchange(LowLatency, peers, experts, top_k)

    def expanded(self, peers: groups.Peers, experts: int, top_k: int) -> Expanded:
        """The exchange of ElasticBuffers. Not collective."""
        return self._exchange(Expanded, peers, experts, top_k)

    def _exchange(self, kind: Any, peers: groups.Peers, experts: int, top_k: int) -> Any:
        key = kind, experts, top_k
        if key not in self._exchanges:
            self._exchanges[key] = kind(peers, experts, top_k)
        return self._exchanges[key]

    def close(self) -> None:
        """Collective: closes the groups, whose handles end with them; those that are needed again are made anew. A
        group that is finished is closed without an error."""
        for exchange in self._exchanges.values():
            with suppress(tw.GroupFinished):
                exchange.shared.close()


def of(process_group: Any, device: Any) -> tuple[Ranks, groups.Peers]:
    """Of a process group, as `groups.of` takes it, and the device of a tensor. Not collective."""
    device = torch.device(device)
    peers = groups.of(process_group, device=device)
    found = _known.get(peers)
    if found is None:
        found = _known[peers] = Ranks(device)
    return found, peers


def close(process_group: Any) -> None:
    """Collective among its ranks: closes the groups of all Buffers of a process group."""
    for peers in groups.living():
        if peers in _known and peers.is_of(process_group):
            _known[peers].close()
