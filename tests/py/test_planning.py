"""`tokenway plan`: rows as the library counts them, constants as the files have them, predictions that are monotone."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenway as tw
from tokenway import cli
from tokenway.bench import report, routing
from tokenway.bench.case import Case
from tokenway.bench.profiles import PROFILES
from tokenway.bench.tables import planning as tables
from tokenway.planning import fitting, machines, memory, model, posts, record, rows, simulation
from tokenway.planning.fitted import CARDS
from tokenway.planning.model import Choice, Work
from tokenway.planning.rows import Layer
from tokenway.reference import Exchange

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "PLANNING.md"
H100 = machines.MACHINES["h100-cx7"]
ROW = 14336


def work(gpus: int, tokens: int, domain: int = 8, row: int = ROW, **others: Any) -> Work:
    layer = Layer(256, 8, gpus, min(domain, gpus), **others)
    return Work(layer, tokens, row, row)


USUAL = Choice()


def predict(asked: Work, choice: Choice = USUAL, machine: machines.Machine = H100) -> model.Prediction:
    count = rows.gathered if choice.route == "gathered" else rows.routed
    return model.predict(machine, asked, choice, count(asked.layer, asked.tokens))


# ---- rows ----------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 40), st.data())
def test_the_chance_of_whole_experts_is_hypergeometric(experts: int, data: Any) -> None:
    top_k, here = (data.draw(st.integers(low, experts)) for low in (1, 0))
    shares = np.repeat([1.0, 0.0], [here, experts - here])
    assert rows.chance(shares, experts, top_k) == pytest.approx(
        1 - comb(experts - here, top_k) / comb(experts, top_k), abs=1e-12
    )


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=7), st.data())
def test_the_chance_of_shares_is_a_mean_over_sets(shares: list[float], data: Any) -> None:
    top_k = data.draw(st.integers(1, len(shares)))
    sets = list(itertools.combinations(shares, top_k))
    none = sum(float(np.prod([1 - share for share in chosen])) for chosen in sets) / len(sets)
    assert rows.chance(np.array(shares), len(shares), top_k) == pytest.approx(1 - none, abs=1e-12)


@pytest.mark.parametrize("kind", ["uniform", "skewed"])
@pytest.mark.parametrize("domain", [1, 4, 16])
def test_expected_rows_are_those_of_the_oracle(kind: str, domain: int) -> None:
    """Within five standard deviations of rows that the oracle dispatches, and of domains as if each were a rank."""
    ranks, tokens, experts, top_k = 16, 2000, 64, 5
    layer = Layer(experts, top_k, ranks, domain)
    by_rank, by_domain = rows.chances(layer, kind, seed=3)
    generate = routing.GENERATORS[kind]
    drawn = [generate(r, tokens, experts, top_k, 3, ranks=ranks) for r in range(ranks)]
    for wanted, places in ((by_rank, ranks), (by_domain, ranks // domain)):
        whole = Exchange([d[0] for d in drawn[:places]], [d[1] for d in drawn[:places]], experts, tokens)
        found = np.stack([r.counts for r in whole.routing]).sum(axis=0)
        expected = places * tokens * wanted
        sampled = 1.0 if kind == "uniform" else 1 + places * tokens / rows.MOST_SAMPLED  # the chance is drawn as well
        noise = np.sqrt(sampled * np.maximum(expected * (1 - wanted), 1e-9))
        assert np.all(np.abs(found - expected) <= 5 * noise + 1e-6)


def test_counts_are_those_of_the_oracle() -> None:
    """Of drawn ids, with tokens that go nowhere, as Exchange counts them."""
    ids, weights = routing.uniform(0, 100, 32, 3, seed=1)
    ids[::7] = -1
    layer = Layer(32, 3, 8, 4)
    to_rank, to_domain = rows.counts(ids, layer)
    empty = np.zeros((0, 3), np.int32), np.zeros((0, 3), np.float32)
    exchange = Exchange([ids, *[empty[0]] * 7], [weights, *[empty[1]] * 7], 32, 100)
    assert to_rank.tolist() == exchange.routing[0].counts.tolist()
    exchange = Exchange([ids, empty[0]], [weights, empty[1]], 32, 100)
    assert to_domain.tolist() == exchange.routing[0].counts.tolist()


@pytest.mark.parametrize("hosts", [(0, 1, 2, 3, 4, 5), (0, 0, 1, 1, 2, 2), (0, 1, 1, 0, 1, 2)])
def test_posts_are_counted_token_by_token(hosts: tuple[int, ...]) -> None:
    """As a reader would count them, and bytes as the closed form has them. Networks that count are in test_posts."""
    ranks, experts, top_k, payloads, partial = 6, 12, 3, (142, 12), 284
    layer = Layer(experts, top_k, ranks, 1)
    drawn = [routing.uniform(rank, 7 * (rank % 3), experts, top_k, seed=5)[0] for rank in range(ranks)]
    drawn[5][:] = -1
    to_ranks = np.stack([rows.counts(ids, layer)[0] for ids in drawn])
    there = {(s, p): 0 for s in range(ranks) for p in range(ranks)}
    for source, ids in enumerate(drawn):
        for token in ids:
            for peer in {int(e) // 2 for e in token if e >= 0}:
                there[source, peer] += 1
    steps = {
        "dispatch": (posts.dispatch(to_ranks, hosts, payloads, top_k), sum(payloads) + 8 * (1 + top_k), 3),
        "combine": (posts.combine(to_ranks, hosts, partial), partial, 1),
    }
    for name, (step, row, parts) in steps.items():
        for source, peer in there:
            found = step.puts[source, peer], step.bytes[source, peer], step.adds[source, peer]
            count = there[(source, peer) if name == "dispatch" else (peer, source)]
            wanted = (1 + parts * (count > 0), 16 + count * row, 1)
            assert found == (wanted if hosts[source] != hosts[peer] else (0, 0, 0)), (name, source, peer)
    far = sum(count for (s, p), count in there.items() if hosts[s] != hosts[p]) / ranks
    asked = Work(layer, 14, sum(payloads), partial)
    links = model.links(asked, Choice(way="direct"), rows.Rows(0.0, far, far, 0.0, far, far))
    for name, (step, _, _) in steps.items():
        assert (step.bytes - posts.NOTE * step.adds).sum() == pytest.approx(ranks * links[name].nic, rel=1e-12)
    told = posts.counts(hosts, experts // ranks)
    assert told.bytes.max() == 16 + 4 * (ranks + 2) and told.puts.max() == 2 and told.puts[0, 0] == 0
    assert posts.nothing(hosts).puts.tolist() == posts.nothing(hosts).adds.tolist() == told.adds.tolist()


@pytest.mark.parametrize("placement", rows.PLACEMENTS)
@pytest.mark.parametrize("ranks", [8, 48])
def test_shares_are_whole_experts(placement: str, ranks: int) -> None:
    shares = Layer(32, 4, ranks, 8, placement).shares()
    assert np.allclose(shares.sum(axis=0), 1)
    if placement == "replicated":
        assert (shares > 0).sum(axis=1).min() >= 1  # no rank is idle


def test_copies_are_taken_alike() -> None:
    """Two copies of each expert: a token goes to as many ranks, each of which gets half."""
    ids, _ = routing.uniform(0, 20_000, 8, 2, seed=0)
    to_rank, _ = rows.counts(ids, Layer(8, 2, 16, 8, "replicated"))
    assert to_rank.sum() == 40_000
    assert np.abs(to_rank - 2500).max() < 5 * 50


# ---- constants -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made() -> dict[str, fitting.Card]:
    return fitting.lend(fitting.cards(RESULTS))


def test_constants_are_those_of_the_files(made: dict[str, fitting.Card]) -> None:
    """python -m tokenway.planning.fitting bench/results python/tokenway/planning/fitted.py makes them anew."""
    space: dict[str, Any] = {}
    exec(fitting.source(made), space)
    assert space["CARDS"] == CARDS


def test_fits_see_one_card_and_two_gpus() -> None:
    runs = fitting.read(RESULTS)
    for card in ("H100", "H200"):
        points = fitting.fitted_points(runs, card)
        assert {point.gpus for point in points} == {2}
        assert {fitting._card(runs[point.file]) for point in points} == {card}
        held_out = {point.file for point in fitting.held_out_points(runs, card)}
        assert held_out and not held_out & {point.file for point in points}
        assert {fitting._card(runs[file]) for file in held_out} == {card}
    runs["nvlink-2-gpus.json"]["gpu"]["gpu"] = "NVIDIA H200"
    with pytest.raises(ValueError, match=r"nvlink-2-gpus.json: of H200; a fit of H100 may not see it"):
        fitting.fit(runs, "H100")


def test_constants_are_physical(made: dict[str, fitting.Card]) -> None:
    for card in made.values():
        for rate in card.rates.values():
            assert rate.start > 0 and rate.row >= 0
            assert 0 < rate.gb_s <= card.put_gb_s * 1.01  # what is borrowed has the ceiling of its own card


def test_a_fit_finds_what_made_the_points() -> None:
    known = fitting.Rate(start=4.0, gb_s=300.0, row=0.002)
    points = [fitting.Point("dispatch", 2, tokens, row, 0.0, "") for tokens in (1, 64, 512) for row in (7392, ROW)]
    found = fitting.fit_rate([replace(point, us=known.us(*point.traffic())) for point in points], 400.0)
    assert (found.start, found.gb_s, found.row) == pytest.approx((4.0, 300.0, 0.002), rel=1e-6)
    capped = fitting.fit_rate([replace(point, us=known.us(*point.traffic())) for point in points], 200.0)
    assert capped.gb_s == 200.0


def test_held_out_deviations_are_those_of_the_page() -> None:
    """All but those that docs/PLANNING.md names are within 15 %."""
    found = fitting.held_out(RESULTS, CARDS)
    beyond = {
        (row["card"], row["file"], row["step"], row["tokens"]) for row in found if abs(row["deviation"]) > record.WITHIN
    }
    assert beyond == {
        ("H100", "nvlink-4-gpus.json", "dispatch", 32),
        ("H100", "high-throughput-4-gpus.json", "counts", 512),
        ("H200", "returns-4-gpus.json", "combine", 8),
        *(("H200", "peers-4-gpus.json", "pair", tokens) for tokens in (1, 8, 32)),
    }
    assert f"{len(beyond)} of {len(found)} are not" in PAGE.read_text("utf-8")


def test_packet_bounds_are_the_librarys() -> None:
    for ranks, bound in fitting.PACKET_BOUND.items():
        assert memory.packet_bound(ranks, 4096) == bound


# ---- the model -----------------------------------------------------------------------------------------------------

GPUS = st.sampled_from((8, 16, 32, 64))
TOKENS = st.integers(1, 2048)
CHOICES = st.sampled_from(model.choices(Layer(256, 8, 16, 8)))


@settings(deadline=None, max_examples=60)
@given(GPUS, TOKENS, st.integers(16, 30_000), st.integers(1, 2000), CHOICES)
def test_more_bytes_are_never_faster(gpus: int, tokens: int, row: int, more: int, choice: Choice) -> None:
    few, many = (predict(work(gpus, tokens, row=size), choice) for size in (row, row + more))
    for name in ("dispatch_us", "combine_us", "pair_us"):
        assert getattr(few, name) <= getattr(many, name) + 1e-9


@settings(deadline=None, max_examples=60)
@given(GPUS, TOKENS, st.floats(1, 400), st.floats(1, 4), CHOICES)
def test_faster_cards_are_never_slower(gpus: int, tokens: int, nic: float, times: float, choice: Choice) -> None:
    slow, fast = (
        predict(work(gpus, tokens), choice, machines.given(H100, nic_gb_s=rate)) for rate in (nic, nic * times)
    )
    assert fast.pair_us <= slow.pair_us + 1e-9


@settings(deadline=None, max_examples=60)
@given(GPUS, TOKENS, CHOICES)
def test_links(gpus: int, tokens: int, choice: Choice) -> None:
    """Within a domain no byte crosses the network; between domains a message has no more rows than readers."""
    inside = predict(work(gpus, tokens, domain=gpus), choice)
    assert all(step.nic == 0 for step in inside.links.values())
    if gpus > 8:
        links = predict(work(gpus, tokens), choice).links
        assert all(step.nic > 0 for step in links.values())
    found = rows.routed(work(gpus, tokens).layer, tokens)
    assert found.crossing <= found.far + 1e-9


@pytest.mark.parametrize("kind", ["uniform", "skewed"])
def test_what_leaves_comes(kind: str) -> None:
    """Of all ranks together, rows that are drawn: what goes out is what comes in, and what the means say."""
    asked = work(16, 400)
    drawn = simulation.drawn(asked, kind, seed=2)
    assert drawn.to_rank.sum(axis=1).sum() == drawn.to_rank.sum(axis=0).sum()
    expected = rows.routed(asked.layer, asked.tokens, kind, seed=2)
    domain = np.arange(16) // 8
    near = drawn.to_rank[(domain[:, None] == domain) & ~np.eye(16, dtype=bool)].sum() / 16
    far = drawn.to_rank[domain[:, None] != domain].sum() / 16
    assert (near, far) == pytest.approx((expected.near, expected.far), rel=0.02)


def test_rows_to_other_hosts_are_those_that_were_measured() -> None:
    """bench/results/hosts-2x2.json counts rows to ranks of other hosts and to hosts, of one routing."""
    run = json.loads((RESULTS / "hosts-2x2.json").read_text("utf-8"))
    for row in run["rows"]:
        if row["tokens"] >= 128:
            found = rows.routed(Layer(256, row["top_k"], 4, 2), row["tokens"])
            counted = row["rows_between_hosts"]
            assert 4 * found.far == pytest.approx(counted["to_ranks"], rel=0.02)
            assert 4 * found.crossing == pytest.approx(counted["to_hosts"], rel=0.02)


def test_pull_and_folds_save_bytes_of_the_network() -> None:
    """About 3.2, 2.0 and 1.4 times the bytes, as decision 0065 has it of choices that are independent."""
    for gpus, times in ((16, 3.2), (32, 2.0), (64, 1.4)):
        found = rows.routed(work(gpus, 1).layer, 1)
        assert found.far / found.crossing == pytest.approx(times, abs=0.08)


def test_memory_is_the_librarys() -> None:
    """The window by window_bytes, and what is beside it as PROTOCOL.md tells: 234.2 and 56.3 MB."""
    sizes = {"experts": 256, "top_k": 8, "hidden": 7168, "tokens": 128, "dispatch_row": ROW, "combine_row": ROW}
    held = memory.of(64, 8, **sizes)
    assert held.window == tw.window_bytes(64, experts=256, top_k=8, hidden=7168, max_tokens=128).window
    assert {name: round(size / 1e6, 1) for name, size in held.beside.items()} == {"flat": 234.2, "by_domain": 56.3}
    assert memory.of(8, 8, **sizes).beside == {"flat": 0, "by_domain": 0}
    assert memory.of(2048, 8, **sizes | {"experts": 2048}).window is None


def test_a_window_with_packets_is_one_that_was_measured() -> None:
    run = json.loads((RESULTS / "nvlink-2-gpus.json").read_text("utf-8"))
    sizes = {"experts": 256, "top_k": 8, "hidden": 7168, "tokens": 4096, "dispatch_row": ROW, "combine_row": ROW}
    held = memory.of(2, 2, **sizes)
    assert held.window is not None
    assert held.window + held.packets == pytest.approx(run["rows"][0]["window_bytes"], rel=0.002)


# ---- the simulation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [8, 16, 64])
@pytest.mark.parametrize("tokens", [1, 8, 128, 1024])
def test_events_agree_with_the_closed_form(gpus: int, tokens: int) -> None:
    """Where all ranks have the same and begin together: within 3 %."""
    asked = work(gpus, tokens)
    found = simulation.pair_us(H100, asked, Choice(), simulation.even(asked), np.zeros(gpus))
    closed = model.predict(H100, asked, Choice(), rows.routed(asked.layer, tokens).mean())
    assert found == pytest.approx(closed.pair_us, rel=0.03)


def test_lateness_and_skew_make_pairs_longer() -> None:
    asked = work(16, 64)
    even = simulation.even(asked)
    late = np.zeros(16)
    prompt = simulation.pair_us(H100, asked, Choice(), even, late)
    late[5] = 200.0
    one = simulation.pair_us(H100, asked, Choice(), even, late)
    # All need what the late rank sends, so none ends before that; and it does not cost more than it is late.
    assert prompt < one <= prompt + 200 + 1e-9
    assert one > 200
    uniform, skewed = (simulation.tails(H100, asked, kind, 5, seed=1) for kind in ("uniform", "skewed"))
    assert uniform.p50 <= uniform.p99 and uniform.p50 < skewed.p50
    assert simulation.tails(H100, asked, "skewed", 5, seed=1) == skewed


def test_the_simulation_refuses_what_it_does_not_know() -> None:
    asked = work(16, 8)
    with pytest.raises(ValueError, match=r"knows routed, low_latency, pull, flat alone"):
        simulation.pair_us(H100, asked, Choice(sums="by_domain"), simulation.even(asked), np.zeros(16))


# ---- the command and the page --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--gpus", "12"], "--gpus: 12; must be at most --domain (8), or a multiple of it"),
        (["--gpus", "4096"], "4096; allowed 2..2048"),
        (["--tokens", "0"], "0; allowed 1..131072"),
        (["--nic", "0"], "--nic: 0.0; must be above 0"),
        (["--nic-latency", "-1"], "--nic-latency: -1.0; must be at least 0"),
        (["--put-us", "nan"], "--put-us: nan; must be at least 0"),
        (["--late", "0.1", "5"], "--late: only with --simulate"),
        (["--simulate", "1", "--gpus", "8", "--late", "2", "5"], "--late: 2.0; the chance must be from 0 to 1"),
        (["--simulate", "9999"], "--simulate: 9999 pairs of 16 GPUs; allowed 1..8192"),
        (["--placement", "contiguous", "--gpus", "512"], "--placement contiguous: 512 GPUs and 256 experts"),
        (["--machine", "abacus"], "invalid choice: 'abacus'"),
    ],
)
def test_bad_arguments(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *words]) == cli.BAD_ARGUMENTS
    assert told in capsys.readouterr().err


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    words = ["--gpus", "8,64", "--tokens", "8", "--dtype", "fp8", "--simulate", "2", "--late", "0.5", "30"]
    assert cli.main(["plan", *words, "--json", str(file), "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    found = json.loads(file.read_text("utf-8"))
    assert [(row["gpus"], row["tokens"]) for row in found["predictions"]] == [(8, 8), (64, 8)]
    assert found["settings"]["late_us"] == 30.0 and all("tails" in row for row in found["predictions"])
    for line in tables.cells(found):
        assert line[2] in out
    assert "nothing of this was measured on GPUs" in out and "assumed" in out
    assert picture.stat().st_size > 1000
    best = found["predictions"][1]["best"]["pair_us"]
    assert best == min(choice["pair_us"] for choice in found["predictions"][1]["choices"])


def test_rows_are_as_wide_as_those_of_the_bench() -> None:
    case = Case(PROFILES["deepseek-v3"], "uniform", 8, 8, "float8_e4m3fn", "rank_major", "none")
    assert (case.dispatch_row, case.combine_row) == (7392, ROW)
    assert fitting.DEEPSEEK == (256, 8, ROW, 7392)


@pytest.mark.parametrize(
    "name", ["plan-h100-cx7.json", "plan-gb200-nvl72.json", "plan-fit.json", "plan-published.json"]
)
def test_files_are_made_of_this_package(name: str) -> None:
    """python -m tokenway.planning.record bench/results makes them anew; then the page, by tokenway.bench.report."""
    held = json.loads((RESULTS / name).read_text("utf-8"))
    assert _close(held, record.files(RESULTS)[name])
    assert name in report.tables_of(PAGE)


def _close(a: Any, b: Any) -> bool:
    """Alike, but for the last digits of floats."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_close(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_close, a, b))
    return bool(a == pytest.approx(b, rel=1e-4)) if isinstance(a, float) else bool(a == b)


def test_choices_are_said_in_words() -> None:
    choice = {"route": "routed", "mode": "high_throughput", "way": "pull", "sums": "by_domain"}
    assert tables.words(choice, 2) == "HT pull by_domain" and tables.words(choice, 1) == "HT"
