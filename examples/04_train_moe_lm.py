"""Trains a small language model with mixture-of-experts layers, its experts spread over processes or GPUs.

    python examples/04_train_moe_lm.py                          # 4 processes, on the Python standard library's sources
    python examples/04_train_moe_lm.py --ranks 2 --steps 100 --plot loss.png
    python examples/04_train_moe_lm.py --text FOLDER --record-routing routing.npz
    python examples/04_train_moe_lm.py --device cuda --ranks 8  # a GPU each
    python examples/04_train_moe_lm.py --balance 20             # experts move as their load does
    python examples/04_train_moe_lm.py --check-ranks            # the same losses, however many ranks there are?
    python examples/04_train_moe_lm.py --check-ranks --device cuda

A decoder on bytes: attention is data-parallel, each layer's 16 experts are expert-parallel, two per byte. Some files
are never trained on; their loss is printed beside that of a model that knows only which byte follows which. At the end
the model writes some text. The model is examples/moe_lm.py, and docs/TRAINING.md explains what happens here.

One batch of every step is split over the ranks, whatever their number, so the losses are the same but for rounding, and
repeated runs have the same bits, on GPUs too. Needs PyTorch; --plot needs matplotlib. Exit code 0 if the model, trained
for 300 steps or more, is better than the bigrams, or with --check-ranks if all losses agree.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from moe_lm import (
    AdamW,
    MoELanguageModel,
    Shape,
    SumOverRanks,
    add_gradients,
    bigram_loss,
    expert_tensors,
    layer_group,
    parameters_of,
    read_corpus,
    share,
    starts_of,
    windows,
)
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch.nn import functional

import tokenway as tw
from tokenway import balance
from tokenway.nn import shared_parameters
from tokenway.training import Experts

WARMUP, CLIP, BALANCE = 50, 1.0, 0.01  # steps; the gradient's norm; the balance loss's weight
ENOUGH = 300  # steps after which the model must be better than bigrams
CHECKED, TOLERANCE = 50, 1e-4  # --check-ranks: steps, and how far losses may be apart, as a part of them


@dataclass(frozen=True)
class Job:
    """What a run is asked for."""

    shape: Shape
    text: str | None
    steps: int
    batch: int
    rate: float
    seed: int
    device: str
    evaluate_every: int
    sample: int  # bytes to write at the end
    record: bool
    balance: int = 0  # steps between two plans of where experts go; 0: they stay


@dataclass
class Learned:
    """What a rank comes back with."""

    losses: list[float]  # of the whole batch, by step
    withheld: list[tuple[int, float]]  # step, loss
    text: str
    parameters: int
    here: int  # parameters on this rank
    seconds: float
    chosen: np.ndarray | None  # uint16 [steps, layers, sequences of this rank, S, K]
    moved: int = 0  # experts that came to this rank


def rank_main(job: Job) -> Learned:
    """What every rank runs."""
    comm = tw.connect(device=None if job.device == "cpu" else job.device)
    if comm.device is None:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // comm.nranks))  # ranks share the cores
    else:
        torch.use_deterministic_algorithms(True)  # attention's backward pass, for one, has others
    with comm, layer_group(comm, job.shape, -(-job.batch // comm.nranks), job.balance > 0) as group:
        return Training(job, comm, group).run()


class Training:
    """One rank's model, optimiser and text."""

    def __init__(self, job: Job, comm: tw.Comm, group: tw.Group):
        self.job, self.comm = job, comm
        self.device = "cpu" if comm.device is None else f"cuda:{comm.device}"
        self.corpus = read_corpus(job.text)
        self.experts = self.balancer = None
        if job.balance:
            weights = balance.Weights(group, expert_tensors(job.shape))
            self.experts = Experts(weights)
            self.balancer = balance.TrainingBalancer(group, weights, every=job.balance)
        self.model = MoELanguageModel(job.shape, group, job.seed, self.experts).to(self.device)
        self.optimiser = AdamW(list(self.model.parameters()), experts=self.experts)
        told = 2  # the loss, and the norm of the experts' gradients, travel with the gradients
        self.add = SumOverRanks(comm, sum(p.numel() for p in shared_parameters(self.model)) + told)
        self.chosen: list[np.ndarray] = []

    def run(self) -> Learned:
        """Trains, evaluates, writes; on all ranks, in the same order."""
        job, start = self.job, time.monotonic()
        losses: list[float] = []
        withheld: list[tuple[int, float]] = []
        with Bar(job.steps, self.comm.rank == 0) as bar:
            for step in range(job.steps):
                losses.append(self.step(step))
                if (step + 1) % job.evaluate_every == 0 and step + 1 < job.steps:
                    withheld.append((step + 1, self.evaluate(32)))
                bar.show(losses, withheld, job.batch * job.shape.length)
        withheld.append((job.steps, self.evaluate(None)))
        seconds = time.monotonic() - start
        text = self.write(job.sample)
        parameters = parameters_of(self.model, job.shape.experts)
        here = sum(p.numel() for p in self.model.parameters())
        self.add.close()
        moved = 0
        if self.balancer is not None:
            self.balancer.close()
            moved = self.balancer.statistics.moves
        recorded = np.stack(self.chosen) if job.record else None
        return Learned(losses, withheld, text, parameters, here, seconds, recorded, moved)

    def step(self, step: int) -> float:
        """One batch, of which this rank has its share; the loss of the whole."""
        job, length = self.job, self.job.shape.length
        rng = np.random.default_rng([job.seed, step])
        starts = rng.integers(0, len(self.corpus.train) - length, job.batch)
        mine = starts[share(job.batch, self.comm.rank, self.comm.nranks)]
        before, after = (t.to(self.device) for t in windows(self.corpus.train, mine, length))
        self.model.zero_grad()
        logits, balance = self.model(before)
        # Each rank's part of the mean over the whole batch: parts add up, as gradients do.
        loss = functional.cross_entropy(logits.flatten(0, 1), after.flatten(), reduction="sum") / (job.batch * length)
        (loss + BALANCE * balance * (len(mine) / job.batch)).backward()
        if self.experts is not None:
            self.experts.sum_gradients()
        whole, norm = add_gradients(self.model, self.add, [loss.detach()])
        self.optimiser.step(job.rate * rate_at(step, job.steps), min(1.0, CLIP / max(norm, 1e-12)))
        if self.balancer is not None:
            self.balancer.step()
        if job.record:
            ids = torch.stack([block.moe.chosen for block in self.model.blocks])
            self.chosen.append(ids.cpu().numpy().astype(np.uint16))
        return whole

    @torch.no_grad()
    def evaluate(self, most: int | None) -> float:
        """Nats per byte of the withheld text: of `most` of its windows, evenly spread, or of all."""
        length = self.job.shape.length
        starts = starts_of(self.corpus.withheld, length)
        if most is not None:
            starts = starts[:: max(1, len(starts) // most)]
        total = torch.zeros((), device=self.device)
        for first in range(0, len(starts), self.job.batch):
            batch = starts[first : first + self.job.batch]  # of the last one, some ranks may have nothing
            mine = batch[share(len(batch), self.comm.rank, self.comm.nranks)]
            before, after = (t.to(self.device) for t in windows(self.corpus.withheld, mine, length))
            logits, _ = self.model(before)
            total += functional.cross_entropy(logits.flatten(0, 1), after.flatten(), reduction="sum")
        vector = torch.zeros(self.add.length, device=self.device)
        vector[0] = total
        return self.add(vector)[0].item() / (len(starts) * length)

    @torch.no_grad()
    def write(self, count: int) -> str:
        """Text after a prompt, byte by byte. Rank 0 has the one sequence; the other ranks serve it with their experts
        and have no tokens of their own."""
        text, length = list(b"\n\ndef "), self.job.shape.length
        generator = torch.Generator().manual_seed(self.job.seed)
        for _ in range(count):
            window = torch.tensor([text[-length:]], device=self.device)
            logits, _ = self.model(window if self.comm.rank == 0 else window[:0])
            if self.comm.rank == 0:
                likely = (logits[0, -1].float().cpu() / 0.7).softmax(dim=-1)
                text.append(int(torch.multinomial(likely, 1, generator=generator)))
            else:
                text = [*text[-length + 1 :], 0]  # of the same length: nothing of it is looked at
        return bytes(text).decode("utf-8", errors="replace").lstrip("\n")


def rate_at(step: int, steps: int) -> float:
    """The learning rate as a part of the highest: rises for WARMUP steps, then falls along a cosine to a tenth."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    done = (step - WARMUP) / max(1, steps - WARMUP)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


class Bar:
    """Progress, on rank 0: a bar on a terminal, elsewhere a line now and then."""

    def __init__(self, steps: int, shown: bool):
        self.console = Console(highlight=False, quiet=not shown)
        self.steps, self.start = steps, time.monotonic()
        columns = (
            *(TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}")),
            *(TimeElapsedColumn(), TextColumn("of which left"), TimeRemainingColumn()),
        )
        self.progress = Progress(*columns, console=self.console, disable=not (shown and self.console.is_terminal))
        self.task = self.progress.add_task("", total=steps, told="")

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.progress.stop()

    def show(self, losses: list[float], withheld: list[tuple[int, float]], tokens: int) -> None:
        """After a step."""
        done = len(losses)
        speed = done * tokens / (time.monotonic() - self.start)
        told = f"loss {np.mean(losses[-20:]):.3f}  withheld {withheld[-1][1] if withheld else math.nan:.3f}"
        self.progress.update(self.task, completed=done, told=f"{told}  {speed:,.0f} bytes/s")
        if not self.console.is_terminal and (done % max(1, self.steps // 10) == 0):
            self.console.print(f"step {done} of {self.steps}  {told}  {speed:,.0f} bytes/s")


# ---- output --------------------------------------------------------------------------------------


def draw(learned: Learned, bigrams: float, path: str) -> None:
    """Writes the picture: the loss by step, that of the withheld text, and the bigrams'."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    steps = np.arange(1, len(learned.losses) + 1)
    axes.plot(steps, learned.losses, linewidth=0.8, alpha=0.7, label="trained on")
    axes.plot(*zip(*learned.withheld, strict=True), marker="o", markersize=3, label="withheld")
    axes.axhline(bigrams, color="gray", linestyle="--", label="bigrams, withheld")
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.grid(True, alpha=0.25)
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def save_routing(by_rank: list[Learned], job: Job, path: str) -> tuple[int, ...]:
    """Writes which experts every byte was sent to: chosen, uint16 [steps, layers, batch, S, K]; its shape."""
    chosen = np.concatenate([r.chosen for r in by_rank if r.chosen is not None], axis=2)
    np.savez_compressed(path, chosen=chosen, experts=job.shape.experts, batch=job.batch, seed=job.seed)
    return chosen.shape


def train(console: Console, job: Job, options: argparse.Namespace) -> int:
    """Trains once, and reports."""
    corpus = read_corpus(job.text)
    console.print(
        f"{len(corpus.train):,} bytes of {corpus.name}, {len(corpus.withheld):,} withheld; {job.batch} sequences of "
        f"{job.shape.length} a step, on {options.ranks} ranks ({job.device})",
        markup=False,
    )
    by_rank = tw.run(rank_main, options.ranks, job)
    first = by_rank[0]
    console.print(
        f"\n{first.parameters:,} parameters, {first.here:,} of them on rank 0; "
        f"{job.steps} steps in {first.seconds:.0f} s"
    )
    if job.balance:
        console.print(f"{sum(learned.moved for learned in by_rank)} experts moved.")
    bigrams, withheld = bigram_loss(corpus, job.shape.length), first.withheld[-1][1]
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("withheld files", "nats per byte", "bits per byte"):
        table.add_column(name, justify="left" if name.startswith("with") else "right")
    for name, loss in (("this model", withheld), ("bigrams", bigrams)):
        table.add_row(name, f"{loss:.4f}", f"{loss / math.log(2):.4f}")
    console.print(table)
    if options.plot:
        draw(first, bigrams, options.plot)
        console.print(f"Loss by step: {options.plot}", markup=False)
    if options.record_routing:
        shape = save_routing(by_rank, job, options.record_routing)
        console.print(f"Routing {list(shape)}: {options.record_routing}", markup=False)
    if job.sample:
        console.rule("[bold]what it writes", align="left")
        console.print(Text(first.text))
        console.rule()
    better = withheld < bigrams
    console.print("The model is better than bigrams." if better else "The model is not better than bigrams.")
    return 0 if better or job.steps < ENOUGH else 1


def check_ranks(console: Console, job: Job) -> int:
    """The first steps on 1, 2 and 4 ranks, and on 4 once more."""
    job = replace(job, steps=CHECKED, sample=0, evaluate_every=CHECKED)
    counts = [n for n in (1, 2, 4) if job.device == "cpu" or n <= torch.cuda.device_count()]
    if not counts:
        raise ValueError("--device cuda: PyTorch finds no GPU")
    runs = [(ranks, tw.run(rank_main, ranks, job)[0]) for ranks in (*counts, counts[-1])]
    base = np.array(runs[0][1].losses)
    table = Table(box=box.SIMPLE_HEAD, title=f"{CHECKED} steps, float32", title_justify="left")
    for name in ("ranks", "first loss", "last loss", "withheld", "largest difference from 1 rank"):
        table.add_column(name, justify="right")
    worst = 0.0
    for ranks, learned in runs:
        apart = float(np.max(np.abs(np.array(learned.losses) - base) / base))
        worst = max(worst, apart)
        cells = (
            *(f"{x:.6f}" for x in (learned.losses[0], learned.losses[-1], learned.withheld[-1][1])),
            f"{apart:.1e}",
        )
        table.add_row(str(ranks), *cells)
    console.print(table)
    (_, a), (_, b) = runs[-2:]
    same = a.losses == b.losses and a.withheld == b.withheld
    *fewer, most = map(str, counts)
    told = f"{', '.join(fewer)} and {most} ranks" if fewer else "1 rank"
    console.print(f"Losses of {told} within {TOLERANCE:g}: {'yes' if worst <= TOLERANCE else 'NO'}")
    console.print(f"{most} rank{'s' * (counts[-1] > 1)} twice, the same bits: {'yes' if same else 'NO'}")
    return 0 if same and worst <= TOLERANCE else 1


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a small MoE language model over several ranks.")
    shape = Shape()
    parser.add_argument("--text", help="a file or folder to train on (default: the Python standard library's sources)")
    parser.add_argument("--ranks", type=int, default=4, help="processes, or GPUs (default %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=600, help="(default %(default)s)")
    parser.add_argument(
        "--batch", type=int, default=32, help="sequences of a step, over all ranks (default %(default)s)"
    )
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    for name, told in (("layers", ""), ("hidden", "elements of a token"), ("heads", ""), ("experts", "of a layer")):
        parser.add_argument(f"--{name}", type=int, default=getattr(shape, name), help=f"{told} (default %(default)s)")
    parser.add_argument("--top-k", type=int, default=shape.top_k, help="experts per byte (default %(default)s)")
    parser.add_argument(
        "--inner", type=int, default=shape.inner, help="elements inside an expert (default %(default)s)"
    )
    parser.add_argument("--length", type=int, default=shape.length, help="bytes of a sequence (default %(default)s)")
    parser.add_argument("--evaluate-every", type=int, default=100, help="steps (default %(default)s)")
    parser.add_argument("--sample", type=int, default=400, help="bytes to write at the end (default %(default)s)")
    moving = "plan so often where experts and replicas go, and move them"
    parser.add_argument("--balance", type=int, default=0, metavar="STEPS", help=f"{moving} (default: they stay)")
    parser.add_argument("--plot", metavar="FILE", help="draw the losses")
    parser.add_argument("--record-routing", metavar="FILE.npz", help="keep which experts every byte was sent to")
    parser.add_argument(
        "--check-ranks", action="store_true", help=f"{CHECKED} steps on 1, 2 and 4 ranks, or as many GPUs, compared"
    )
    options = parser.parse_args(arguments)
    for name in (
        "ranks",
        "steps",
        "batch",
        "layers",
        "hidden",
        "heads",
        "experts",
        "inner",
        "length",
        "evaluate_every",
    ):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1")
    if options.balance < 0:
        parser.error(f"--balance is {options.balance}; it must be at least 0")
    if not 1 <= options.top_k <= options.experts:
        parser.error(f"--top-k is {options.top_k}; it must be from 1 to {options.experts}, the experts")
    if options.hidden % options.heads:
        parser.error(f"--hidden is {options.hidden}; it must be a multiple of {options.heads}, the heads")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'tokenway[plot]'")
    return options


def main() -> int:
    """Starts the ranks, prints and draws."""
    options = parse()
    shape = Shape(*(getattr(options, name) for name in Shape.__dataclass_fields__))
    job = Job(
        shape=shape,
        text=options.text,
        steps=options.steps,
        batch=options.batch,
        rate=options.rate,
        seed=options.seed,
        device=options.device,
        evaluate_every=options.evaluate_every,
        sample=options.sample,
        record=bool(options.record_routing),
        balance=options.balance,
    )
    console = Console(highlight=False)
    # Ranks may be more than cores: threads of PyTorch that wait for each other must not hold a core meanwhile.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without, sums of products may differ from run to run
    try:
        return check_ranks(console, job) if options.check_ranks else train(console, job, options)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
