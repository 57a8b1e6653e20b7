"""A mixture-of-experts layer on a text, spread over several processes.

    python examples/01_moe_layer.py examples/text/experts.txt
    python examples/01_moe_layer.py examples/text/experts.txt --ranks 3 --gate deepseek --experts 64

Every process (rank) owns a part of the text and a part of the experts. Tokenway carries each word
to the ranks of its experts (dispatch) and the results back (combine). The part that a rank runs is
`rank_main`; everything below it prints and checks. Exit code 0 if all checks hold.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from dataclasses import dataclass

import numpy as np
from moe_text import BF16, Layer, dense, embed, shard, swiglu, words_of
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import tokenway as tw
from tokenway import reference

Array = np.ndarray


@dataclass
class Round:
    """What one rank put into one round of the layer, and what it got: for the checks below."""

    tokens: Array  # [T, H], what it owns
    ids: Array  # [T, K]
    weights: Array  # [T, K]
    counts: Array  # [L] rows that its experts received
    received: list[Array]  # per expert [n, H]
    received_ids: Array  # [L, N*b]
    received_weights: Array
    sources: Array  # [N] rows received from each rank
    rows: list[Array]  # per expert [n, H], what the experts made of them
    out: Array  # [T, H], what came back


def rank_main(layer: Layer, words: list[str], max_tokens: int) -> list[Round]:
    """What every rank runs."""
    comm = tw.connect()
    mine = shard(len(words), comm.rank, comm.nranks)
    tokens = embed(words[mine], mine.start, layer.hidden)

    home, _ = reference.contiguous_placement(layer.experts, comm.nranks)
    experts = [layer.expert(number) for number in np.flatnonzero(home == comm.rank)]

    rounds = []
    with (
        comm,
        tw.Group(
            comm,
            experts=layer.experts,
            top_k=layer.top_k,
            hidden=layer.hidden,
            max_tokens=max_tokens,
        ) as group,
    ):
        for first in range(0, most_tokens(len(words), comm.nranks), max_tokens):
            # Ranks with less text have fewer tokens here, in the end none. They still take part.
            x = tokens[first : first + max_tokens]
            ids, weights = layer.route(x)
            handle = group.route(ids, weights)
            recv = group.dispatch(handle, x, layout="expert_major")
            rows = np.empty_like(recv.tokens)
            for slot, n in enumerate(recv.counts):
                rows[slot, :n] = swiglu(recv.tokens[slot, :n].astype(np.float32), experts[slot])
            out = group.combine(handle, rows, weighting="topk")

            sources, _ = handle.num_recv_tokens()
            rounds.append(
                Round(
                    tokens=x,
                    ids=ids,
                    weights=weights,
                    counts=recv.counts.copy(),
                    received=[recv.tokens[slot, :n] for slot, n in enumerate(recv.counts)],
                    received_ids=recv.ids,
                    received_weights=recv.weights,
                    sources=sources,
                    rows=[rows[slot, :n] for slot, n in enumerate(recv.counts)],
                    out=out,
                )
            )
    return rounds


def most_tokens(words: int, ranks: int) -> int:
    """Tokens of the rank that has most."""
    parts = [shard(words, rank, ranks) for rank in range(ranks)]
    return max(part.stop - part.start for part in parts)


# ---- checks --------------------------------------------------------------------------------------


class Compared:
    """Counts values compared bit for bit, and those that differ."""

    def __init__(self) -> None:
        self.values = 0
        self.different = 0

    def __call__(self, got: Array, want: Array) -> None:
        """Compares two arrays."""
        self.values += want.size
        if got.shape != want.shape or got.dtype != want.dtype:
            self.different += want.size
            return
        bits = [np.ascontiguousarray(a).view(f"u{a.itemsize}") for a in (got, want)]
        self.different += int(np.count_nonzero(bits[0] != bits[1]))


def compare_with_oracle(layer: Layer, ranks: list[Round], max_tokens: int, same: Compared) -> None:
    """One round, everything that every rank received, against the NumPy oracle."""
    ids, weights = [r.ids for r in ranks], [r.weights for r in ranks]
    exchange = reference.Exchange(ids, weights, experts=layer.experts, bound=max_tokens)
    all_rows = []
    for rank, got in enumerate(ranks):
        want = reference.dispatch_expert_major(exchange, rank, [[r.tokens for r in ranks]])
        same(got.counts, want.counts)
        same(got.received_ids, want.ids)
        same(got.received_weights, want.weights)
        same(got.sources, np.array([r.counts[rank] for r in exchange.routing], np.int32))
        rows = np.zeros(want.payloads[0].shape, BF16)
        for slot, n in enumerate(want.counts):
            same(got.received[slot], want.payloads[0][slot, :n])
            rows[slot, : len(got.rows[slot])] = got.rows[slot]
        all_rows.append(rows)
    outs = reference.combine(exchange, all_rows, layout="expert_major", weighting="topk")
    for got, want in zip(ranks, outs, strict=True):
        same(got.out, want)


def joined(rounds_of: list[list[Round]], field: str) -> Array:
    """A field of all rounds of all ranks, in the order of the text."""
    return np.concatenate([getattr(r, field) for rounds in rounds_of for r in rounds])


# ---- output --------------------------------------------------------------------------------------


def traffic_table(rounds_of: list[list[Round]]) -> tuple[Table, Array]:
    """Who sent how many rows to whom: a table, and [N, N] from rank, to rank."""
    ranks = range(len(rounds_of))
    traffic = np.array([sum(r.sources for r in rounds) for rounds in rounds_of]).T
    table = Table(box=box.SIMPLE_HEAD, title="Rows sent, from rank to rank", title_justify="left")
    for name in ("from", "tokens", "in rounds", *(f"to {rank}" for rank in ranks)):
        table.add_column(name, justify="right")
    for rank in ranks:
        sizes = [len(r.tokens) for r in rounds_of[rank]]
        cells = [rank, sum(sizes), f"{np.count_nonzero(sizes)} of {len(sizes)}", *traffic[rank]]
        table.add_row(*map(str, cells))
    return table, traffic


def experts_table(words: list[str], ids: Array, home: Array, top: int = 6) -> Table:
    """The busiest experts, and which words went there."""
    table = Table(box=box.SIMPLE_HEAD, title="Busiest experts", title_justify="left")
    for name in ("expert", "on rank", "rows"):
        table.add_column(name, justify="right")
    table.add_column("words that went there most")
    load = np.bincount(ids.ravel(), minlength=len(home))
    for expert in np.argsort(-load, kind="stable")[:top]:
        there = Counter(words[token] for token in np.nonzero(ids == expert)[0])
        text = "   ".join(f"{word} {count}" for word, count in there.most_common(5))
        table.add_row(str(expert), str(home[expert]), str(load[expert]), Text(text))
    return table


def print_savings(console: Console, traffic: Array, ids: Array, sizes: list[int], home: Array) -> None:
    """How many rows crossed from rank to rank, and how many would with a row per expert."""
    owner = np.repeat(np.arange(len(sizes)), sizes)
    per_expert = int(np.count_nonzero(home[ids] != owner[:, None]))
    crossed = int(traffic.sum() - np.trace(traffic))
    console.print(f"Rows that left their rank: {crossed}.")
    if per_expert:
        saved = 100 * (1 - crossed / per_expert)
        console.print(f"With a row per expert it would be: {per_expert}. Saved: {saved:.1f} %.")


def report(console: Console, layer: Layer, words: list[str], rounds_of: list[list[Round]], max_tokens: int) -> bool:
    """Prints what happened and checks all of it; whether everything holds."""
    ids, weights, out = (joined(rounds_of, field) for field in ("ids", "weights", "out"))
    home, _ = reference.contiguous_placement(layer.experts, len(rounds_of))
    table, traffic = traffic_table(rounds_of)
    console.print(table)
    console.print(experts_table(words, ids, home))
    sizes = [sum(len(r.tokens) for r in rounds) for rounds in rounds_of]
    print_savings(console, traffic, ids, sizes, home)

    same = Compared()
    for ranks in zip(*rounds_of, strict=True):
        compare_with_oracle(layer, list(ranks), max_tokens, same)
    equal = same.values - same.different
    console.print(f"\nEqual to the NumPy oracle, bit for bit: {equal} of {same.values} values")

    exact, bound = dense(layer, joined(rounds_of, "tokens"), ids, weights)
    difference = np.abs(out.astype(np.float64) - exact)
    within = difference <= bound  # False where there is a NaN
    worst = np.unravel_index(np.argmax(difference), difference.shape)
    console.print(
        f"Within rounding of one process in float64: {np.count_nonzero(within)} of {within.size} values\n"
        f"  largest difference {difference[worst]:.2e}, where the roundings allow {bound[worst]:.2e}; "
        f"the value is {exact[worst]:.3f}",
        soft_wrap=True,
    )
    return same.values == equal > 0 and bool(within.all())


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="An MoE layer on a text, over several processes.")
    parser.add_argument("file", help="a text file")
    parser.add_argument("--ranks", type=int, default=4, help="processes (default %(default)s)")
    parser.add_argument("--gate", choices=("softmax", "deepseek"), default="softmax")
    parser.add_argument("--groups", type=int, default=8, help="of experts, for --gate deepseek")
    parser.add_argument("--topk-groups", type=int, default=2, help="groups that a token may use")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4, help="experts per token")
    parser.add_argument("--hidden", type=int, default=256, help="elements of a token")
    parser.add_argument("--inner", type=int, default=128, help="columns inside an expert")
    parser.add_argument("--max-tokens", type=int, default=64, help="of a rank in one round")
    parser.add_argument("--words", type=int, default=8000, help="read at most so many")
    return parser.parse_args(arguments)


def main() -> int:
    """Starts the ranks, prints and checks."""
    options = parse()
    try:
        words = words_of(options.file)[: options.words]
    except OSError as error:
        print(error, file=sys.stderr)
        return 2
    if not words:
        print(f"{options.file} holds no words", file=sys.stderr)
        return 2
    layer = Layer(
        options.hidden,
        options.inner,
        options.experts,
        options.top_k,
        options.gate,
        options.groups,
        options.topk_groups,
    )
    console = Console(highlight=False)
    console.print(
        f"{len(words)} words of {os.path.basename(options.file)} on {options.ranks} ranks\n"
        f"{layer.experts} experts, {layer.top_k} per word ({layer.gate} gate), hidden size {layer.hidden}\n",
        markup=False,
    )
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of each rank: they share the cores
    rounds_of = tw.run(rank_main, options.ranks, layer, words, options.max_tokens, timeout=300)
    holds = report(console, layer, words, rounds_of, options.max_tokens)
    console.print("[green]All checks hold.[/]" if holds else "[red]A check FAILED.[/]")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
