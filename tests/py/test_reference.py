"""The oracle against a formulation of its own: pure Python, element by element."""

from __future__ import annotations

import ctypes
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenway import reference as ref

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

# Signed zeros, non-finite values, subnormals of float16 and float32, ties and overflow on the way
# to the narrow types.
SPECIAL = [
    *(0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.1),
    *(2.0**-24, -(2.0**-24), 3 * 2.0**-25, 2.0**-25, 1023.5 * 2.0**-24, 6.1e-5),
    *(1e-40, -1e-45, 65504.0, 65520.0, -65519.0, 3.4e38, -3.38e38),
    *(1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8 + 2.0**-20),
]


# ---- the naive formulation -----------------------------------------------------------------------


def f32(x: float) -> float:
    """A Python float rounded to float32.

    One operation on float32 values in double precision, then rounded to float32, gives what the
    float32 operation gives: 53 >= 2 * 24 + 2 bits.
    """
    return ctypes.c_float(x).value


def bits(x: float) -> int:
    """Bits of a float32 value."""
    return struct.unpack("<I", struct.pack("<f", x))[0]


def rounded(x: float, dtype: str) -> float:
    """A float32 value rounded to a dtype, to nearest even, by integer arithmetic on its bits."""
    if dtype == "float32" or np.isnan(x) or np.isinf(x):
        return x
    if dtype == "bfloat16":
        b = bits(x)
        b = (b + 0x7FFF + ((b >> 16) & 1)) & 0xFFFF0000
        return struct.unpack("<f", struct.pack("<I", b))[0]
    try:
        return struct.unpack("<e", struct.pack("<e", x))[0]
    except OverflowError:
        return float(np.copysign(np.inf, x))


class Naive:
    """All ranks of an exchange with dictionaries and loops; ids[s][t] and weights[s][t] lists."""

    def __init__(self, x: ref.Exchange) -> None:
        self.x = x
        self.ids = [i.tolist() for i in x.ids]
        if x.weights is None:
            self.weights = [[[1.0] * x.top_k for _ in i] for i in self.ids]
        else:
            self.weights = [w.tolist() for w in x.weights]
        if x.expert_map is None:
            self.home = {}
            for r in range(x.ranks):
                size = x.experts // x.ranks + (1 if r < x.experts % x.ranks else 0)
                for j in range(size):
                    self.home[len(self.home)] = (r, j)
        else:
            ranks, slots = x.expert_map
            self.home = {e: (int(ranks[e]), int(slots[e])) for e in range(x.experts)}

    def ranks_of(self, s: int, t: int) -> list[int]:
        return sorted({self.home[e][0] for e in self.ids[s][t] if e != -1})

    def slot(self, s: int, t: int, d: int) -> int:
        return sum(d in self.ranks_of(s, u) for u in range(t))

    def expert_row(self, s: int, t: int, expert: int) -> int:
        earlier = [(a, u) for a in range(self.x.ranks) for u in range(len(self.ids[a]))]
        return sum((a, u) < (s, t) and expert in self.ids[a][u] for a, u in earlier)

    def local_id(self, expert: int, rank: int) -> int:
        x = self.x
        if expert == -1:
            return x.invalid_id
        if x.id_space == "global":
            return expert
        return self.home[expert][1] if self.home[expert][0] == rank else x.invalid_id

    def partial(self, s: int, t: int, r: int, rows, layout: str, weighting: str, h: int) -> float:
        """The element h of what r sends back for token t of s, before rounding to the wire."""
        local = [(k, e) for k, e in enumerate(self.ids[s][t]) if e != -1 and self.home[e][0] == r]
        if layout == "rank_major":
            value = float(rows[r][s, self.slot(s, t, r), h])
            if weighting == "none":
                return value
            weight = self.weights[s][t][local[0][0]]
            for k, _ in local[1:]:
                weight = f32(weight + self.weights[s][t][k])
            return f32(weight * value)
        total = None
        for k, e in local:
            value = float(rows[r][self.home[e][1], self.expert_row(s, t, e), h])
            if weighting == "topk":
                value = f32(self.weights[s][t][k] * value)
            total = value if total is None else f32(total + value)
        return total

    def output(self, s: int, t: int, rows, layout, weighting, wire, out, h: int) -> float:
        total = None
        for r in self.ranks_of(s, t):
            value = rounded(self.partial(s, t, r, rows, layout, weighting, h), wire)
            total = value if total is None else f32(total + value)
        return rounded(0.0 if total is None else total, out)


# ---- generated cases -----------------------------------------------------------------------------


def random_ids(rng: np.random.Generator, tokens: int, experts: int, top_k: int, dtype) -> np.ndarray:
    """Distinct experts, with -1 anywhere; more -1 where K > E. int [T, K]."""
    ids = np.full((tokens, top_k), -1, dtype)
    for t in range(tokens):
        n = int(rng.integers(0, min(experts, top_k) + 1))
        ids[t, rng.permutation(top_k)[:n]] = rng.permutation(experts)[:n]
    return ids


def values(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Float32 values, about a third of them special."""
    plain = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)
    return np.where(rng.random(shape) < 0.35, rng.choice(SPECIAL, shape), plain).astype(np.float32)


@st.composite
def exchanges(draw) -> tuple[ref.Exchange, np.random.Generator]:
    ranks = draw(st.integers(1, 4), label="ranks")
    experts = draw(st.integers(1, 9), label="experts")
    top_k = draw(st.integers(1, 5), label="top_k")
    tokens = draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks), label="tokens")
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1), label="seed"))
    dtype = draw(st.sampled_from([np.int32, np.int64]))
    ids = [random_ids(rng, t, experts, top_k, dtype) for t in tokens]
    weights = None
    if draw(st.booleans(), label="weights"):
        weights = [values(rng, i.shape) for i in ids]
    expert_map = None
    if draw(st.booleans(), label="expert_map"):
        home = rng.integers(0, ranks, experts).astype(np.int32)
        slot = np.zeros(experts, np.int32)
        for r in range(ranks):
            slot[home == r] = rng.permutation(np.count_nonzero(home == r))
        expert_map = home, slot
    x = ref.Exchange(
        ids,
        weights,
        experts,
        bound=max(tokens) + draw(st.integers(0, 2), label="slack"),
        expert_map=expert_map,
        id_space=draw(st.sampled_from(["local", "global"])),
        invalid_id=draw(st.sampled_from([-1, 77])),
    )
    return x, rng


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Bit-equal, up to the payload of NaNs; same dtype and shape."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    a_nan, b_nan = np.isnan(a.astype(np.float32)), np.isnan(b.astype(np.float32))
    equal = np.ascontiguousarray(a).view(unsigned) == np.ascontiguousarray(b).view(unsigned)
    return bool(np.all((a_nan & b_nan) | (equal & ~a_nan & ~b_nan)))


@settings(max_examples=150, deadline=None)
@given(exchanges())
def test_routing_and_dispatch(case) -> None:
    x, rng = case
    naive = Naive(x)
    tokens = [rng.integers(0, 2**63, (len(i), 2)) for i in x.ids]
    scales = [rng.standard_normal(len(i)).astype(ml_dtypes.bfloat16) for i in x.ids]

    for s, r in enumerate(x.routing):
        for t in range(len(x.ids[s])):
            goes = naive.ranks_of(s, t)
            for d in range(x.ranks):
                assert r.goes[t, d] == (d in goes)
                assert r.position[t, d] == (goes.index(d) if d in goes else -1)
                assert r.slot[t, d] == (naive.slot(s, t, d) if d in goes else -1)

    for d in range(x.ranks):
        got = ref.dispatch_rank_major(x, d, [tokens, scales])
        assert got.payloads[0].shape == (x.ranks, x.bound, 2)
        assert got.counts.dtype == np.int32 and got.ids.dtype == x.ids[0].dtype
        assert got.weights.dtype == np.float32
        ids = np.full((x.ranks, x.bound, x.top_k), x.invalid_id)
        weights = np.zeros(ids.shape, np.float32)
        for s in range(x.ranks):
            here = [t for t in range(len(x.ids[s])) if d in naive.ranks_of(s, t)]
            assert got.counts[s] == len(here)
            for p, t in enumerate(here):
                assert (got.payloads[0][s, p] == tokens[s][t]).all()
                assert got.payloads[1][s, p] == scales[s][t]
                ids[s, p] = [naive.local_id(e, d) for e in naive.ids[s][t]]
                weights[s, p] = naive.weights[s][t]
        assert (got.ids == ids).all()
        assert same(got.weights, weights)


@settings(max_examples=150, deadline=None)
@given(exchanges())
def test_dispatch_expert_major(case) -> None:
    x, rng = case
    naive = Naive(x)
    tokens = [rng.integers(0, 2**63, (len(i), 2)) for i in x.ids]
    for d in range(x.ranks):
        local = {slot: e for e, (r, slot) in naive.home.items() if r == d}
        assert x.local_experts(d).tolist() == [local[slot] for slot in range(len(local))]
        got = ref.dispatch_expert_major(x, d, [tokens])
        assert got.payloads[0].shape == (len(local), x.ranks * x.bound, 2)
        ids = np.full((len(local), x.ranks * x.bound), x.invalid_id)
        weights = np.zeros(ids.shape, np.float32)
        for slot, e in local.items():
            n = 0
            for s in range(x.ranks):
                for t, row in enumerate(naive.ids[s]):
                    if e in row:
                        assert (got.payloads[0][slot, n] == tokens[s][t]).all()
                        ids[slot, n] = naive.local_id(e, d)
                        weights[slot, n] = naive.weights[s][t][row.index(e)]
                        n += 1
            assert got.counts[slot] == n
        assert got.counts.dtype == np.int32 and got.ids.dtype == x.ids[0].dtype
        assert (got.ids == ids).all()
        assert same(got.weights, weights)


BOUNDED = ("rank_major", "expert_major")


@pytest.mark.parametrize("room", [1, 4, 9, 10, 30])
def test_exact_layouts_hold_the_bounded_ones(room) -> None:
    """flat is rank_major and grouped is expert_major without the gaps; what has no room is as if never routed there."""
    rng = np.random.default_rng(room)
    ids = [random_ids(rng, n, 6, 3, np.int32) for n in (5, 0, 5)]
    tokens = [rng.standard_normal((len(i), 2)).astype(np.float32) for i in ids]
    whole = ref.Exchange(ids, None, 6, bound=5)
    x = ref.Exchange(ids, None, 6, bound=5, max_recv_tokens=room, alignment=4)
    for r in range(3):
        wanted = np.array([whole.routing[s].counts[r] for s in range(3)])
        assert (x.kept[:, r] <= wanted).all() and x.kept[:, r].sum() == min(room, wanted.sum())
        assert (x.kept[:, r].cumsum() == np.minimum(room, wanted.cumsum())).all(), "the last sources' rows are dropped"
        flat, bounded = ref.dispatch_flat(x, r, [tokens]), ref.dispatch_rank_major(whole, r, [tokens])
        for s, n in enumerate(x.kept[:, r]):
            begin = x.sources(r)[s]
            assert (flat.payloads[0][begin : begin + n] == bounded.payloads[0][s, :n]).all()
            assert (flat.ids[begin : begin + n] == bounded.ids[s, :n]).all()
        grouped, by_expert = ref.dispatch_grouped(x, r, [tokens]), ref.dispatch_expert_major(whole, r, [tokens])
        blocks = x.blocks(r)
        assert (blocks % 4 == 0).all() and blocks[-1] == len(grouped.payloads[0])
        for e, n in enumerate(grouped.counts):
            rows = grouped.payloads[0][blocks[e] : blocks[e + 1]]
            assert (rows[:n] == by_expert.payloads[0][e, :n]).all(), "kept rows are the first of each expert"
            assert not rows[n:].any() and n <= by_expert.counts[e]
    sums = ref.combine(x, [ref.dispatch_flat(x, r, [tokens]).payloads[0] for r in range(3)], layout="flat")
    for s, of in enumerate(sums):
        ranks = (x.routing[s].goes & (x.routing[s].slot < x.kept[s])).sum(axis=1)
        assert np.allclose(of, tokens[s] * ranks[:, None])


@settings(max_examples=600, deadline=None)
@given(
    exchanges(),
    st.sampled_from(BOUNDED),
    st.sampled_from(ref.WEIGHTINGS),
    *[st.sampled_from(sorted(DTYPES))] * 3,
)
def test_combine(case, layout, weighting, rows_type, wire, out) -> None:
    x, rng = case
    hidden = 3
    rows = []
    for r in range(x.ranks):
        lead = (x.ranks, x.bound)
        if layout == "expert_major":
            lead = (len(x.local_experts(r)), x.ranks * x.bound)
        with np.errstate(over="ignore"):
            rows.append(values(rng, (*lead, hidden)).astype(DTYPES[rows_type]))
    got = ref.combine(x, rows, layout=layout, weighting=weighting, wire=DTYPES[wire], out=DTYPES[out])
    naive = Naive(x)
    for s in range(x.ranks):
        want = np.zeros((len(x.ids[s]), hidden), np.float32)
        for t, h in np.ndindex(*want.shape):
            want[t, h] = naive.output(s, t, rows, layout, weighting, wire, out, h)
        assert same(got[s], want.astype(DTYPES[out]))  # exact: `want` is of that type already
        assert same(
            got[s],
            ref.combine(
                x,
                rows,
                layout=layout,
                weighting=weighting,
                wire=DTYPES[wire],
                out=DTYPES[out],
                owners=[s],
            )[0],
        )


def test_rows_beyond_the_counts_are_not_read() -> None:
    rng = np.random.default_rng(3)
    ids = [random_ids(rng, 4, 6, 3, np.int32) for _ in range(3)]
    x = ref.Exchange(ids, None, 6, bound=5)
    ones = [np.ones((4, 2), np.float32)] * 3
    for layout, dispatch in (
        ("rank_major", ref.dispatch_rank_major),
        ("expert_major", ref.dispatch_expert_major),
    ):
        rows = [dispatch(x, r, [ones]) for r in range(3)]
        poisoned = []
        for got in rows:
            p = got.payloads[0].copy()
            for i, n in enumerate(got.counts):
                p[i, n:] = np.nan
            poisoned.append(p)
        clean = ref.combine(x, [g.payloads[0] for g in rows], layout=layout, weighting="topk")
        dirty = ref.combine(x, poisoned, layout=layout, weighting="topk")
        assert all(same(a, b) for a, b in zip(clean, dirty, strict=True))


# ---- single facts, by hand -----------------------------------------------------------------------


def one_rank(ids: list[list[int]], weights: list[list[float]] | None = None) -> ref.Exchange:
    w = None if weights is None else [np.array(weights, np.float32)]
    return ref.Exchange([np.array(ids, np.int32)], w, experts=4, bound=len(ids))


@pytest.mark.parametrize("layout", ref.LAYOUTS)
def test_negative_zero_passes_through(layout) -> None:
    x = one_rank([[2, -1]])
    shape = {"rank_major": (1, 1, 1), "expert_major": (4, 1, 1)}.get(layout, (1, 1))
    out = ref.combine(x, [np.full(shape, -0.0, np.float32)], layout=layout)[0]
    assert np.signbit(out[0, 0])


def test_token_without_experts_gives_positive_zeros() -> None:
    x = one_rank([[-1, -1]])
    out = ref.combine(x, [np.full((1, 1, 2), np.nan, np.float32)])[0]
    assert (out == 0).all() and not np.signbit(out).any()


def test_product_is_rounded_before_the_sum() -> None:
    w = np.float32(1 + 2**-12)
    rows = np.zeros((4, 1, 1), np.float32)
    rows[0], rows[1] = -(1 + 2.0**-11), w
    x = one_rank([[0, 1]], [[1.0, w]])
    out = ref.combine(x, [rows], layout="expert_major", weighting="topk")[0]
    assert out[0, 0] == 0  # a fused multiply-add would leave 2**-24


def test_sum_runs_over_k_not_over_experts() -> None:
    rows = np.array([1e8, 1.0, -1e8, 0], np.float32).reshape(4, 1, 1)
    by_k = {(0, 2, 1): 1.0, (0, 1, 2): 0.0, (1, 0, 2): 0.0}
    for ids, want in by_k.items():
        out = ref.combine(one_rank([list(ids)]), [rows], layout="expert_major")[0]
        assert out[0, 0] == want


def test_partial_is_rounded_to_the_wire_once() -> None:
    """Two ranks send 1 + 2**-9 each: bfloat16 loses it on the wire, float32 does not."""
    x = ref.Exchange([np.array([[0, 1]]), np.zeros((0, 2), np.int64)], None, 2, bound=1)
    rows = [np.full((2, 1, 1), 1 + 2.0**-9, np.float32)] * 2
    assert ref.combine(x, rows, wire=ml_dtypes.bfloat16)[0][0, 0] == 2
    assert ref.combine(x, rows)[0][0, 0] == 2 + 2.0**-8


def test_contiguous_placement() -> None:
    rank, slot = ref.contiguous_placement(7, 3)
    assert rank.tolist() == [0, 0, 0, 1, 1, 2, 2] and rank.dtype == np.int32
    assert slot.tolist() == [0, 1, 2, 0, 1, 0, 1] and slot.dtype == np.int32
    rank, slot = ref.contiguous_placement(2, 4)
    assert rank.tolist() == [0, 1] and slot.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": [np.array([[0, 4]])]}, r"ids\[0\]\[0, 1\]: 4; allowed -1..3"),
        ({"ids": [np.array([[-2, 0]])]}, r"-2; allowed -1..3"),
        ({"ids": [np.array([[1, 1]])]}, "twice"),
        ({"ids": [np.array([[1.0, 2.0]])]}, "must be int"),
        ({"ids": [np.array([[0, 1]] * 3)]}, r"3 tokens; allowed 0..2"),
        ({"weights": [np.ones((1, 2))]}, "float32"),
        ({"id_space": "remote"}, "'remote'; allowed: local, global"),
    ],
)
def test_bad_exchange(change, message) -> None:
    good = {"ids": [np.array([[0, 1]])], "weights": None, "experts": 4, "bound": 2}
    ref.Exchange(**good)
    with pytest.raises(ValueError, match=message):
        ref.Exchange(**{**good, **change})


@pytest.mark.parametrize("bad", [([0, 2], [0, 0]), ([0, 0], [0, 2]), ([0, 0], [0, 0]), ([0], [0])])
def test_bad_placement(bad) -> None:
    with pytest.raises(ValueError, match="expert_map"):
        ref.placement(2, 2, (np.array(bad[0]), np.array(bad[1])))


def test_bad_combine_options() -> None:
    x, rows = one_rank([[0, 1]]), [np.zeros((1, 1, 1), np.float32)]
    with pytest.raises(ValueError, match=r"wire: .*float64"):
        ref.combine(x, rows, wire=np.float64)
    with pytest.raises(ValueError, match="layout: 'round'"):
        ref.combine(x, rows, layout="round")
    with pytest.raises(ValueError, match="weighting: 'mean'"):
        ref.combine(x, rows, weighting="mean")


# ---- the exchange as a layer ---------------------------------------------------------------------


@pytest.mark.parametrize("layout", ref.LAYOUTS)
@pytest.mark.parametrize(("ranks", "experts", "top_k"), [(1, 5, 3), (4, 10, 4), (3, 16, 6)])
def test_dense_moe_identity(layout, ranks, experts, top_k) -> None:
    """Dispatch, different linear experts, combine = the dense layer, within rounding."""
    hidden = 24
    rng = np.random.default_rng([ranks, experts, top_k])
    expert = rng.standard_normal((experts, hidden, hidden)).astype(np.float32)
    tokens = [rng.standard_normal((n, hidden)).astype(np.float32) for n in (7, 0, 12, 5)[:ranks]]
    ids = [random_ids(rng, len(t), experts, top_k, np.int32) for t in tokens]
    weights = [rng.random(i.shape).astype(np.float32) for i in ids]
    x = ref.Exchange(ids, weights, experts, bound=12, alignment=4)

    rows = []
    for r in range(ranks):
        own = expert[x.local_experts(r)]
        if layout == "expert_major":
            got = ref.dispatch_expert_major(x, r, [tokens])
            rows.append(np.einsum("lnh,lhg->lng", got.payloads[0], own))
            continue
        if layout == "grouped":
            got = ref.dispatch_grouped(x, r, [tokens])
            blocks = x.blocks(r)
            expert_of = np.repeat(np.arange(len(own)), np.diff(blocks))
            rows.append(np.einsum("ph,phg->pg", got.payloads[0], own[expert_of]))
            continue
        flat = layout == "flat"
        got = (ref.dispatch_flat if flat else ref.dispatch_rank_major)(x, r, [tokens])
        result = np.zeros_like(got.payloads[0])
        filled = np.full(len(result), True) if flat else np.arange(x.bound) < got.counts[:, None]
        for at in map(tuple, np.argwhere(filled)):
            for e, w in zip(got.ids[at], got.weights[at], strict=True):
                if e != -1:
                    result[at] += w * (got.payloads[0][at] @ own[e])
        rows.append(result)

    weighting = "topk" if layout in ("expert_major", "grouped") else "none"
    out = ref.combine(x, rows, layout=layout, weighting=weighting)
    eps = np.finfo(np.float32).eps
    for s in range(ranks):
        wide, magnitude = (np.zeros((len(ids[s]), hidden)) for _ in range(2))
        for t, k in np.argwhere(ids[s] >= 0):
            e, w = expert[ids[s][t, k]].astype(float), float(weights[s][t, k])
            wide[t] += w * (tokens[s][t].astype(float) @ e)
            magnitude[t] += w * (np.abs(tokens[s][t]).astype(float) @ np.abs(e))
        assert out[s].dtype == np.float32
        assert (np.abs(out[s] - wide) <= (hidden + top_k + ranks + 2) * eps * magnitude).all()


def test_deepseek_shape() -> None:
    """A larger exchange: every row arrives, and comes back as its own sum."""
    ranks, experts, top_k, tokens, hidden = 4, 256, 8, 64, 7168
    rng = np.random.default_rng(0)
    ids = [np.argsort(rng.random((tokens, experts)))[:, :top_k] for _ in range(ranks)]
    x = ref.Exchange(ids, None, experts, bound=tokens)
    rows = [rng.standard_normal((tokens, hidden)).astype(ml_dtypes.bfloat16) for _ in ids]
    received = [ref.dispatch_rank_major(x, r, [rows]) for r in range(ranks)]
    out = ref.combine(x, [g.payloads[0] for g in received], out=np.float32)
    for s in range(ranks):
        copies = x.routing[s].goes.sum(axis=1)
        assert sum(g.counts[s] for g in received) == copies.sum()
        assert (out[s] == rows[s].astype(np.float32) * copies[:, None]).all()
