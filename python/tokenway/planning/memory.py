"""What an exchange holds in memory: the window by the library itself, and what ranks have beside it between hosts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tokenway import _header, plan
from tokenway.planning.fitting import META, PACKET, PACKET_DATA
from tokenway.settings import window_bytes

BANKS = 2
RECORD, TARGET, ALIGNMENT = 8, 8, 8  # bytes of a record's head, of a target in it, and what rows are padded to
REGION = 64  # what regions are aligned to
FOLD_TAG = 8


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank. window: None where there are more ranks than the library allows. packets: what a GPU's window
    has beyond that of a CPU. beside: inboxes, returns, staging and tags between hosts, for either sum."""

    window: int | None
    packets: int
    beside: dict[str, int]


@lru_cache(maxsize=256)
def packet_bound(ranks: int, tokens: int) -> int:
    """Tokens up to which all rows of a call go as packets, among so many ranks of a domain: the library's own number,
    of a group whose most tokens are `tokens`."""
    return int(plan.describe(ranks, tokens, experts=max(256, ranks), top_k=8, hidden=7168)["packet bound"])


def meta_bytes(top_k: int) -> int:
    """What goes with a dispatched row."""
    return META + 8 * (top_k - 8)


def record(row: int, targets: float) -> float:
    """Bytes of a row as a record for so many ranks."""
    return RECORD + TARGET * targets + -(-row // ALIGNMENT) * ALIGNMENT


def message_row(row: int, top_k: int, wanted: float) -> float:
    """Bytes of a dispatched row in a message, which `wanted` ranks of the host want: one record of it, and each of
    these has one of metadata."""
    return record(row, wanted) + wanted * record(meta_bytes(top_k), 1)


def of(
    ranks: int, domain: int, *, experts: int, top_k: int, hidden: int, tokens: int, dispatch_row: int, combine_row: int
) -> Memory:
    """Of a group of low latency of these shapes, bounded by `tokens`; rows in bytes."""
    window = None
    if ranks <= _header.MAX_RANKS:
        elements = {"hidden": dispatch_row, "dtype": "uint8", "combine_hidden": hidden, "combine_dtype": "bfloat16"}
        sizes = {"experts": experts, "top_k": top_k, "max_tokens": tokens}
        window = window_bytes(ranks, **elements, **sizes).window
    lines = min(tokens, packet_bound(domain, tokens)) if domain > 1 else 0
    words = max(-(-dispatch_row // 8) + meta_bytes(top_k) // 8 + _header.MAX_PAYLOADS - 1, -(-combine_row // 8))
    packet_row = -(-words * 8 // PACKET_DATA) * PACKET
    packets = BANKS * domain * (lines * packet_row + tokens * PACKET)
    return Memory(window, packets, _beside(ranks, domain, top_k, tokens, dispatch_row, combine_row))


def _beside(ranks: int, domain: int, top_k: int, tokens: int, row: int, combine_row: int) -> dict[str, int]:
    """`HostsMap` (src/layout/hosts_map.h), of hosts alike, without its words."""
    hosts = ranks // domain
    if hosts == 1:
        return {"flat": 0, "by_domain": 0}
    targets = min(top_k, domain)
    token = _header.MAX_PAYLOADS * (record(0, targets) + ALIGNMENT) + row + targets * record(meta_bytes(top_k), 1)
    inbox = _aligned(tokens * token)
    returned = record(combine_row, 1) + record(4, 1)
    returns = _aligned(domain * tokens * returned)
    folds = max(inbox, _aligned(8 + tokens * (returned + domain * record(4 * top_k, 1))))
    # What returns lies in the window's bank, behind the combine's inbox, where it finds room there.
    bank = ranks * tokens * (row + meta_bytes(top_k))
    own = tokens * min(top_k, ranks) * combine_row + (hosts - 1) * returns > bank
    flat = (hosts - 1) * (inbox + own * returns + max(inbox, returns))
    by_domain = (hosts - 1) * (2 * folds + own * returns + FOLD_TAG * tokens * domain)
    return {"flat": BANKS * flat, "by_domain": BANKS * by_domain}


def _aligned(size: float) -> int:
    return -(-int(size) // REGION) * REGION
