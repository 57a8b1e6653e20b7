"""A byte-level language model with mixture-of-experts layers: what examples/04_train_moe_lm.py trains, and on what.

Attention is data-parallel: every rank has all of it, and its share of a batch. Experts are expert-parallel: a rank has
its share of them, for the tokens of all ranks.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import tokenway as tw
from tokenway import autograd, balance
from tokenway.nn import ExpertParallelMoE, expert_parameters, shared_parameters
from tokenway.training import Experts

# Of the standard library, never trained on.
WITHHELD = ("bisect.py", "calendar.py", "heapq.py", "json/decoder.py", "shlex.py", "string.py", "textwrap.py")
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "pydoc_data"}
_SUFFIXES = {".py", ".c", ".cc", ".h", ".md", ".txt", ".rst"}


# ---- text ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on, and bytes withheld."""

    name: str
    train: np.ndarray  # uint8
    withheld: np.ndarray


def read_corpus(path: str | None) -> Corpus:
    """The Python standard library's sources but for WITHHELD; or a folder's texts but for every 20th; or a file but for
    its last 20th. In the order of their names, so the same on every rank."""
    if path is not None and Path(path).is_file():
        data = np.frombuffer(Path(path).read_bytes(), np.uint8)
        cut = len(data) - len(data) // 20
        return _long_enough(Corpus(path, data[:cut], data[cut:]))
    root = Path(path or sysconfig.get_path("stdlib"))
    suffixes = {".py"} if path is None else _SUFFIXES
    found = [p for p in root.rglob("*") if p.suffix in suffixes and not _LEFT_OUT & set(p.relative_to(root).parts)]
    names = sorted(p.relative_to(root).as_posix() for p in found if p.is_file())
    withheld = [name for name in names if name in WITHHELD] if path is None else names[::20]
    kept = sorted(set(names) - set(withheld))
    train, rest = (
        np.frombuffer(b"".join((root / n).read_bytes() for n in part), np.uint8) for part in (kept, withheld)
    )
    return _long_enough(Corpus(path or "the Python standard library", train, rest))


def _long_enough(corpus: Corpus) -> Corpus:
    if min(len(corpus.train), len(corpus.withheld)) < 1000:
        raise ValueError(
            f"{corpus.name}: {len(corpus.train)} bytes to train on and {len(corpus.withheld)} withheld; each must "
            "be at least 1000"
        )
    return corpus


def windows(data: np.ndarray, starts: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
    """Bytes [n, length] from each start, and those that follow them, int64."""
    both = torch.from_numpy(data[starts[:, None] + np.arange(length + 1)].astype(np.int64))
    return both[:, :-1], both[:, 1:]


def bigram_loss(corpus: Corpus, length: int) -> float:
    """Nats per byte of a model that knows the byte before, from counts of the text, over `starts_of` its windows."""
    pairs = np.bincount(corpus.train[:-1].astype(np.int64) * 256 + corpus.train[1:], minlength=256 * 256)
    counts = pairs.reshape(256, 256) + 0.1
    logs = np.log(counts / counts.sum(axis=1, keepdims=True))
    before, after = windows(corpus.withheld, starts_of(corpus.withheld, length), length)
    return float(-logs[before.numpy(), after.numpy()].mean())


def starts_of(data: np.ndarray, length: int) -> np.ndarray:
    """Where windows begin that cover a text once, but for its end."""
    return np.arange(0, len(data) - length, length)


def share(count: int, rank: int, ranks: int) -> slice:
    """A rank's part of `count` things: contiguous, as even as can be."""
    return slice(count * rank // ranks, count * (rank + 1) // ranks)


# ---- model ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """How big the model is."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    experts: int = 16
    top_k: int = 2
    inner: int = 192
    length: int = 128  # bytes that it sees


class Block(nn.Module):
    """Causal attention, then experts; each on a normalised input, added to it."""

    def __init__(self, shape: Shape, group: tw.Group, seed: int, experts: Experts | None, layer: int):
        super().__init__()
        self.heads = shape.heads
        self.norms = nn.ModuleList(nn.RMSNorm(shape.hidden) for _ in range(2))
        self.mix = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.back = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.moe = ExpertParallelMoE(group, shape.inner, seed=seed, experts=experts, layer=layer if experts else 0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[n, S, H] -> [n, S, H], and the balance loss."""
        n, length, hidden = x.shape
        parts = self.mix(self.norms[0](x)).view(n, length, 3, self.heads, hidden // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.back(seen.transpose(1, 2).reshape(n, length, hidden))
        out, balance = self.moe(self.norms[1](x))
        return x + out, balance


class MoELanguageModel(nn.Module):
    """Bytes [n, S] -> logits of the next ones [n, S, 256], and the mean balance loss of the layers.

    All ranks make the same parameters from the seed, and each keeps those of its experts. experts: where these are, if
    they move.
    """

    def __init__(self, shape: Shape, group: tw.Group, seed: int, experts: Experts | None = None):
        super().__init__()
        torch.manual_seed(seed)
        self.bytes = nn.Embedding(256, shape.hidden)
        self.places = nn.Embedding(shape.length, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape, group, 1000 * seed + n, experts, n) for n in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, 256, bias=False)
        for embedding in (self.bytes, self.places):
            nn.init.normal_(embedding.weight, std=0.05)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.bytes(x) + self.places(torch.arange(x.shape[1], device=x.device))
        balances = []
        for block in self.blocks:
            h, balance = block(h)
            balances.append(balance)
        return self.head(self.norm(h)), torch.stack(balances).mean()


def layer_group(comm: tw.Comm, shape: Shape, sequences: int, moves: bool = False) -> tw.Group:
    """The group that all layers share. sequences: most of a rank at once. moves: experts move as their load does."""
    return autograd.make_group(
        comm,
        experts=shape.experts,
        top_k=shape.top_k,
        hidden=shape.hidden,
        max_tokens=sequences * shape.length,
        dtype="float32",
        expert_map=placement_of(shape, comm.nranks) if moves else None,
    )


def expert_tensors(shape: Shape) -> dict[str, Any]:
    """What an expert that moves consists of, by name: its weights, their gradients, and what `AdamW` keeps of them."""
    weights = {"gate_up": (2 * shape.inner, shape.hidden), "down": (shape.hidden, shape.inner)}
    return balance.trained({name: (of, "float32") for name, of in weights.items()}, AdamW.STATES)


def placement_of(shape: Shape, ranks: int) -> tw.Placement:
    """Where experts begin: a slot more on each rank than is needed, for replicas, and one that is empty, to move to."""
    used = -(-shape.experts // ranks) + (ranks > 1)
    table = np.full((shape.layers, ranks, used + 1), -1)
    plan = balance.plan(np.ones((shape.layers, shape.experts)), ranks=ranks, slots=used)
    table[:, :, :used] = plan.physical_to_logical.reshape(shape.layers, ranks, used)
    room = balance.weight_bytes(expert_tensors(shape), layers=shape.layers, slots=used + 1, ranks=ranks)
    tables = table.reshape(shape.layers, -1)
    return tw.Placement(tables, count_loads=True, load_decay=0.9, moves=True, weight_bytes=room)


def parameters_of(model: nn.Module, experts: int) -> int:
    """Of the whole model, over all ranks. The experts here stand for the others."""
    shared = sum(p.numel() for p in shared_parameters(model))
    per_expert = sum(p.numel() // max(p.shape[0], 1) for p in expert_parameters(model))
    return shared + experts * per_expert


class AdamW:
    """Adam with decoupled weight decay (https://arxiv.org/abs/1711.05101) of all that are no vectors. PyTorch has the
    same; but its optimisers load its compiler, which takes every rank some seconds."""

    STATES = ("mean", "square")

    def __init__(
        self,
        parameters: list[nn.Parameter],
        decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        experts: Experts | None = None,
    ):
        self.parameters, self.decay, self.betas, self.steps = parameters, decay, betas, 0
        # Of experts that move, where these are.
        kept = [[experts.state(p, name) if experts else None for p in parameters] for name in self.STATES]
        self.means, self.squares = (
            [torch.zeros_like(p) if state is None else state for p, state in zip(parameters, states, strict=True)]
            for states in kept
        )

    @torch.no_grad()
    def step(self, rate: float, scale: float) -> None:
        """rate: of learning. scale: of the gradients, which stay as they are."""
        self.steps += 1
        a, b = self.betas
        for p, mean, square in zip(self.parameters, self.means, self.squares, strict=True):
            if p.grad is None:  # experts of a rank that has none
                continue
            if p.dim() > 1:
                p.mul_(1 - rate * self.decay)
            mean.mul_(a).add_(p.grad, alpha=(1 - a) * scale)
            square.mul_(b).addcmul_(p.grad, p.grad, value=(1 - b) * scale * scale)
            spread = (square / (1 - b**self.steps)).sqrt_().add_(1e-8)
            p.addcdiv_(mean, spread, value=-rate / (1 - a**self.steps))


# ---- sums over ranks -----------------------------------------------------------------------------


class SumOverRanks:
    """Adds up float32 vectors of all ranks, in the order of the ranks: the same bits on every rank, every time.

    An exchange in which every token goes to every rank. Its combine brings each rank the sum of its share of the vector
    (a reduce-scatter), its dispatch brings every rank all shares (an all-gather).
    """

    def __init__(self, comm: tw.Comm, length: int, width: int = 1024):
        self.length, ranks = length, comm.nranks
        rows = -(-length // (ranks * width))
        self.shape = (ranks, rows, width)
        self.group = tw.Group(comm, experts=ranks, top_k=ranks, hidden=width, max_tokens=rows, dtype="float32")
        self.device = "cpu" if comm.device is None else f"cuda:{comm.device}"
        everywhere = torch.arange(ranks, device=self.device).repeat(rows, 1)
        self.handle = self.group.route(everywhere)
        self.group.dispatch(self.handle, torch.zeros(rows, width, device=self.device))  # a combine answers a dispatch

    def __call__(self, vector: Tensor) -> Tensor:
        """[length] -> [length]. A collective: two steps."""
        rows = torch.zeros(self.shape, device=self.device)
        rows.view(-1)[: self.length] = vector
        mine = self.group.combine(self.handle, rows)
        return self.group.dispatch(self.handle, mine).tokens.reshape(-1)[: self.length].clone()

    def close(self) -> None:
        """Collective."""
        self.handle.release()
        self.group.close()


def add_gradients(model: nn.Module, add: SumOverRanks, told: list[Any]) -> list[float]:
    """Adds up the gradients of what all ranks share, and the numbers `told`, which it returns added up, and with them
    the norm of all gradients: those of the experts are complete as they are."""
    shared = [p for p in shared_parameters(model) if p.grad is not None]
    own = sum(
        (p.grad.square().sum() for p in expert_parameters(model) if p.grad is not None),
        torch.zeros((), device=add.device),
    )
    numbers = torch.stack([torch.as_tensor(n, dtype=torch.float32, device=add.device) for n in (*told, own)])
    flat = add(torch.cat([numbers, *(p.grad.reshape(-1) for p in shared)]))  # type: ignore[union-attr]
    numbers, gradients = flat[: len(numbers)], flat[len(numbers) :]
    for p, gradient in zip(shared, gradients.split([p.numel() for p in shared]), strict=True):
        p.grad = gradient.view_as(p)
    norm = (gradients.square().sum() + numbers[-1]).sqrt()
    return [*numbers[:-1].tolist(), norm.item()]
