"""The oracle on the device: what a rank must receive, computed by PyTorch beside the exchange itself.

It follows python/tokenway/reference.py operation by operation, in float32 with one kernel for each
multiplication and each addition, so that results are compared bit for bit without leaving the device;
nothing here waits for it. Who uses it compares it with the NumPy oracle now and then.

Shapes: T tokens, K ids, N ranks, L experts of a rank, b the bound, H elements.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cases import Round, Setup

from tokenway import reference as ref

Tensor = torch.Tensor


@dataclass
class Inputs:
    """The inputs of one rank: ids [T, K] int64, weights [T, K] float32, payloads [T, elements] each, tokens first."""

    ids: Tensor
    weights: Tensor
    payloads: list[Tensor]


@dataclass
class Wanted:
    """What a dispatch must leave; rows of payloads beyond `filled` are nothing."""

    payloads: list[Tensor]
    filled: Tensor
    ids: Tensor
    weights: Tensor
    counts: Tensor


class DeviceOracle:
    """For groups of one setup, on one device."""

    def __init__(self, setup: Setup, device: Any):
        self.setup = setup
        self.device = device
        home, slot = ref.placement(setup.experts, setup.ranks, setup.expert_map)
        none = np.int64(-1)  # the last place, which id -1 reads
        self.home = torch.from_numpy(np.append(home.astype(np.int64), none)).to(device)
        self.slot = torch.from_numpy(np.append(slot.astype(np.int64), none)).to(device)
        self.here = []  # experts of each rank, by slot
        for rank in range(setup.ranks):
            experts = np.flatnonzero(home == rank)
            self.here.append(torch.from_numpy(experts[np.argsort(slot[experts])]).to(device))
        self.columns = torch.arange(setup.width, device=device) % setup.hidden

    # ---- inputs ----------------------------------------------------------------------------------

    def inputs(self, generator: torch.Generator, tokens: int, holes: float) -> Inputs:
        """Random ones: the same for the same state of the generator, on devices of the same model."""
        s, on = self.setup, {"device": self.device, "generator": generator}
        ids = torch.rand(tokens, s.experts, **on).argsort(1)[:, : s.top_k]
        ids = torch.where(torch.rand(tokens, s.top_k, **on) < holes, -1, ids)
        weights = torch.randn(tokens, s.top_k, **on)
        if s.dtype in ("float32", "bfloat16", "float16"):
            payloads = [torch.randn(tokens, s.hidden, **on).to(getattr(torch, s.dtype))]
        else:
            payloads = [self._bytes(tokens, s.hidden, s.dtype, on)]
        payloads += [self._bytes(tokens, n, dtype, on) for n, dtype in s.payloads]
        return Inputs(ids, weights, payloads)

    def _bytes(self, tokens: int, elements: int, dtype: str, on: Any) -> Tensor:
        kind = getattr(torch, dtype)
        raw = torch.randint(0, 256, (tokens, elements * kind.itemsize), dtype=torch.uint8, **on)
        return raw.view(kind)

    # ---- dispatch --------------------------------------------------------------------------------

    def dispatched(self, inputs: list[Inputs], rank: int, bound: int, layout: str) -> Wanted:
        """What `rank` receives from all ranks."""
        if layout == "rank_major":
            return self._rank_major(inputs, rank, bound)
        return self._expert_major(inputs, rank, bound)

    def _rank_major(self, inputs: list[Inputs], rank: int, bound: int) -> Wanted:
        s = self.setup
        rows, ids, weights, counts = [], [], [], []
        for of in inputs:
            there = self.home[of.ids] == rank
            goes = there.any(1)
            place = torch.where(goes, goes.cumsum(0) - 1, bound)  # row `bound` is thrown away
            counts.append(goes.sum())
            rows.append([self._put((bound,), place, as_bytes(p)) for p in of.payloads])
            if s.id_space == "global":
                shown = torch.where(of.ids < 0, s.invalid_id, of.ids)
            else:
                shown = torch.where(there, self.slot[of.ids], s.invalid_id)
            ids.append(self._put((bound,), place, shown, s.invalid_id))
            weights.append(self._put((bound,), place, of.weights))
        count = torch.stack(counts)
        filled = torch.arange(bound, device=self.device) < count[:, None]
        payloads = [torch.stack([r[q] for r in rows]) for q in range(len(rows[0]))]
        return Wanted(payloads, filled, torch.stack(ids), torch.stack(weights), count)

    def _expert_major(self, inputs: list[Inputs], rank: int, bound: int) -> Wanted:
        s, experts = self.setup, len(self.here[rank])
        lead = (experts, s.ranks * bound)
        rubbish = lead[0] * lead[1]
        base = torch.zeros(s.experts + 1, dtype=torch.int64, device=self.device)
        rows = [self._flat(lead, as_bytes(p)) for p in inputs[0].payloads]
        ids = torch.full((rubbish + 1,), s.invalid_id, dtype=torch.int64, device=self.device)
        weights = torch.zeros(rubbish + 1, device=self.device)
        for of in inputs:
            known = of.ids % (s.experts + 1)  # -1 marks the last column
            chosen = torch.zeros(len(known), s.experts + 1, dtype=torch.int64, device=self.device)
            chosen.scatter_(1, known, 1)
            earlier = (base + chosen.cumsum(0) - chosen).gather(1, known)
            base = base + chosen.sum(0)
            there = self.home[of.ids] == rank
            place = torch.where(there, self.slot[of.ids] * lead[1] + earlier, rubbish)
            shown = of.ids if s.id_space == "global" else self.slot[of.ids]
            for k in range(s.top_k):
                for to, payload in zip(rows, of.payloads, strict=True):
                    to[place[:, k]] = as_bytes(payload)
                ids[place[:, k]] = shown[:, k]
                weights[place[:, k]] = of.weights[:, k]
        count = base[self.here[rank]]
        filled = torch.arange(lead[1], device=self.device) < count[:, None]
        invalid = torch.where(filled, ids[:-1].view(lead), s.invalid_id)
        payloads = [to[:-1].view(*lead, to.shape[1]) for to in rows]
        return Wanted(payloads, filled, invalid, weights[:-1].view(lead), count)

    def _flat(self, lead: tuple[int, ...], like: Tensor) -> Tensor:
        return torch.zeros(lead[0] * lead[1] + 1, like.shape[1], dtype=torch.uint8, device=self.device)

    def _put(self, lead: tuple[int, ...], place: Tensor, rows: Tensor, fill: Any = 0) -> Tensor:
        """[b, ...] with rows at their places; the place b is thrown away."""
        to = torch.full((lead[0] + 1, *rows.shape[1:]), fill, dtype=rows.dtype, device=self.device)
        to[place] = rows
        return to[:-1]

    # ---- experts ---------------------------------------------------------------------------------

    def answers(self, round_: Round, rank: int, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Rows for combine from what arrived, as cases.answers makes them; rubbish beyond the counts."""
        wide = tokens.float()[..., self.columns]
        if round_.layout == "expert_major":
            return self._of_experts(round_, wide, self.here[rank][:, None, None], weights)
        own = torch.cat([self.here[rank], self.here[rank].new_full((1,), -1)])
        if self.setup.id_space == "global":
            known = torch.where((ids >= 0) & (ids < self.setup.experts), ids, -1).long()
            expert = torch.where(self.home[known] == rank, known, -1)
        else:
            expert = own[torch.where((ids >= 0) & (ids < len(own) - 1), ids, -1).long()]
        return self._of_rank(round_, wide, expert, weights)

    def _of_experts(self, round_: Round, wide: Tensor, expert: Tensor, weights: Tensor) -> Tensor:
        rows = affine(wide, expert)
        if round_.weighting == "none":
            rows = weights[..., None] * rows
        return rows.to(getattr(torch, round_.rows))

    def _of_rank(self, round_: Round, wide: Tensor, expert: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(wide)
        for k in range(self.setup.top_k):
            term = affine(wide, expert[..., k, None])
            if round_.weighting == "none":
                term = weights[..., k, None] * term
            total = torch.where(expert[..., k, None] >= 0, total + term, total)
        return total.to(getattr(torch, round_.rows))

    # ---- combine ---------------------------------------------------------------------------------

    def combined(self, round_: Round, of: Inputs) -> Tensor:
        """The owner's result, from its own inputs alone."""
        wire, out = getattr(torch, self.setup.combine_dtype), getattr(torch, round_.out)
        wide = of.payloads[0].float()[..., self.columns]
        owner = self.home[of.ids]

        def partials() -> Iterable[tuple[Tensor, Tensor]]:
            for rank in range(self.setup.ranks):
                there = owner == rank
                yield there.any(1), self._partial(round_, of, wide, there).to(wire).float()

        return ordered_sum(wide, partials()).to(out)

    def _partial(self, round_: Round, of: Inputs, wide: Tensor, there: Tensor) -> Tensor:
        """What the experts of one rank make of every token; `there` [T, K]: which ids are that rank's."""
        each = range(self.setup.top_k)
        topk = round_.weighting == "topk"
        if round_.layout == "rank_major":
            row = self._of_rank(round_, wide, torch.where(there, of.ids, -1), of.weights).float()
            if not topk:
                return row
            weight = ordered_sum(of.weights[:, :1], ((there[:, k], of.weights[:, k, None]) for k in each))
            return weight * row

        def terms() -> Iterable[tuple[Tensor, Tensor]]:
            for k in each:
                row = self._of_experts(round_, wide, of.ids[:, k, None], of.weights[:, k]).float()
                yield there[:, k], of.weights[:, k, None] * row if topk else row

        return ordered_sum(wide, terms())


def affine(tokens: Tensor, expert: Tensor) -> Tensor:
    """cases.affine: another straight line for each expert. Two kernels, so that nothing is fused."""
    number = expert.float() + 1
    return tokens * (number / 64 + 1) + number / 32


def ordered_sum(like: Tensor, terms: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Terms in order, each row from its first on; (which rows [T], term [T, ...])."""
    total = torch.zeros_like(like)
    started = torch.zeros(len(like), 1, dtype=torch.bool, device=like.device)
    for at, term in terms:
        at = at[:, None]
        total = torch.where(at, torch.where(started, total + term, term), total)
        started = started | at
    return total


def as_bytes(rows: Tensor) -> Tensor:
    """[..., elements] as uint8 [..., bytes]."""
    return rows.contiguous().view(torch.uint8)


def differs(got: Tensor, want: Tensor) -> Tensor:
    """Whether any bit does: a bool on the device. NaN of any kind is one."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return torch.ones((), dtype=torch.bool, device=want.device)
    bad = as_bytes(got) != as_bytes(want)
    if got.is_floating_point():
        same = torch.isnan(got) & torch.isnan(want)
        bad = bad & ~same[..., None].expand(*same.shape, got.dtype.itemsize).reshape(bad.shape)
    return bad.any()


def rows_differ(got: Tensor, want: Tensor, filled: Tensor) -> Tensor:
    """As `differs` for payloads, whose rows count where `filled`; want is bytes."""
    if got.shape[:-1] != want.shape[:-1]:
        return torch.ones((), dtype=torch.bool, device=want.device)
    return ((as_bytes(got) != want) & filled[..., None]).any()
