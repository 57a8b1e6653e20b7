"""What the pretended libraries of this folder share: an exchange of objects over gloo, and misbehaviour on demand.

PRETENDED, "hangs", "dies", "raises" or "wrong", is what rank 1 does in its combine number PRETENDED_AT (from 0) and in
all later ones.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

_combines = 0


def gathered(mine: Any) -> list[Any]:
    """Every rank's object."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def plain(rows: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that can be pickled: float8 cannot."""
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows


def here(ids: torch.Tensor, experts: int) -> list[int]:
    """The tokens with an expert on this rank, the last one first: libraries may put rows in any order."""
    local = experts // dist.get_world_size()
    return [t for t, row in enumerate(ids.tolist()) if any(e // local == dist.get_rank() for e in row)][::-1]


def summed(pieces: list[tuple[torch.Tensor, list[int]]], tokens: int) -> torch.Tensor:
    """[T, H]: rows of every rank, added to the tokens that they are of."""
    global _combines
    out = torch.zeros((tokens, pieces[0][0].shape[1]))
    for rows, of in pieces:
        for row, token in zip(rows, of, strict=True):
            out[token] += row.float()
    number, how = _combines, os.environ.get("PRETENDED", "")
    _combines += 1
    if how and dist.get_rank() == 1 and number >= int(os.environ.get("PRETENDED_AT", "0")):
        if how == "hangs":
            time.sleep(600)
        if how == "dies":
            os._exit(7)
        if how == "raises":
            raise RuntimeError("an assertion of a kernel\nhidden is none that it was compiled for")
        out = -out
    return out.to(pieces[0][0].dtype)
