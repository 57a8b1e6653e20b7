"""What autograd is told of: where memory that it has saved was written to, PyTorch's own error, no wrong gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from harness import Env, caught
from test_torch import with_torch

import tokenway as tw

pytestmark = pytest.mark.torch
TOKENS, HIDDEN = 3, 16
SETTINGS: dict[str, Any] = {"experts": 6, "top_k": 2, "hidden": HIDDEN, "max_tokens": TOKENS, "dtype": "float32"}
SETTINGS |= {"timeout": 20}
MODES: dict[str, dict[str, Any]] = {"rank_major": {}, "flat": {"mode": "high_throughput"}}


@pytest.fixture(autouse=True)
def _needs_torch(torch) -> None:
    """All of this file does."""


class Ours:
    """A rank's tensors and calls."""

    def __init__(self, env: Env, group: tw.Group):
        import torch

        self.torch, self.group, self.env = torch, group, with_torch(env)

    def full(self, shape: tuple[int, ...], value: float, dtype: Any = np.float32) -> Any:
        return self.env.backend.tensor(np.full(shape, value, dtype))

    def route(self) -> tw.Handle:
        ids = np.array([[0, 1], [2, 3], [4, 5]], np.int32)
        return self.group.route(self.env.backend.tensor(ids), self.full((TOKENS, 2), 0.5))

    def dispatch(self, value: float, handle: tw.Handle | None = None, **more: Any) -> Any:
        handle = self.route() if handle is None else handle
        if self.group.exact:
            self.group.exchange_counts(handle)
        return self.group.dispatch(handle, self.full((TOKENS, HIDDEN), value), **more)

    def saved(self, x: Any) -> Any:
        """A sum whose gradient needs x."""
        weight = self.torch.ones(x.shape[-1], requires_grad=True, device=x.device)
        return (x.detach() * weight).sum() if x.requires_grad else (x * weight).sum()

    def refused(self, loss: Any) -> bool:
        """Whether autograd found what it had saved changed."""
        try:
            loss.backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error), error
            return True
        return False


# ---- views ----------------------------------------------------------------------------------------------------------


def run_views(env: Env, layout: str) -> None:
    """Views are valid until the next step on their channel, whichever it is, and no longer."""
    with tw.Group(env.comm, **(SETTINGS | MODES[layout])) as group:
        ours = Ours(env, group)

        def gather() -> Any:
            return group.all_gatherv(ours.full((1, 2), 1), [1] * group.nranks, layout="rank_major").rows

        def reduce() -> None:
            group.reduce_scatterv(ours.full((group.nranks, 2), 1))

        def again(received: Any) -> None:
            ours.dispatch(2, received.handle).handle.release()

        steps: list[Callable[[Any], Any]] = [
            lambda received: group.combine(received.handle, received.tokens),
            lambda received: (received.handle.release(), ours.dispatch(2).handle.release()),
            lambda received: (received.handle.release(), gather()),
            lambda received: (received.handle.release(), reduce()),
        ]
        if layout == "rank_major":
            steps.append(again)
        for i, step in enumerate(steps):
            received = ours.dispatch(1)
            before, slices = ours.saved(received.tokens), ours.saved(received.tokens[..., 1:])
            fine = ours.saved(received.tokens)
            assert not ours.refused(fine), "nothing has happened"
            step(received)
            assert ours.refused(before) and ours.refused(slices), i
        # A gather's views, and a gather that shows none; NumPy's steps end those of PyTorch too.
        rows = gather()
        loss, fine = ours.saved(rows), ours.saved(rows)
        assert not ours.refused(fine)
        reduce()
        assert ours.refused(loss)
        # Saved when it was over already, and overwritten.
        received = ours.dispatch(3)
        group.combine(received.handle, received.tokens)
        late = ours.saved(received.tokens)
        other = ours.dispatch(4)
        assert ours.refused(late) or other.tokens.data_ptr() != received.tokens.data_ptr()
        other.handle.release()


@pytest.mark.parametrize("layout", MODES)
def test_views_of_the_window(threads, layout) -> None:
    threads(2).run(run_views, layout)


def run_two_groups(env: Env) -> None:
    """The next step on a view's channel ends it, whichever group of the window makes it."""
    small = {"experts": 3, "top_k": 1, "hidden": 2, "max_tokens": 1, "dtype": "float32", "timeout": 20}
    with tw.Group(env.comm, lanes=2, **SETTINGS) as first, tw.Group(env.comm, arena=first, **small) as second:
        ours, others = Ours(env, first), Ours(env, second)
        received = ours.dispatch(1)
        losses = [ours.saved(received.tokens) for _ in range(2)]
        ids = others.env.backend.tensor(np.zeros((1, 1), np.int32))

        def step(lane: int) -> None:
            second.dispatch(second.route(ids), others.full((1, 2), 1), lane=lane).handle.release()

        step(1)
        assert not ours.refused(losses.pop())
        received.handle.release()
        step(0)
        assert ours.refused(losses.pop())
        second.close()
        received = ours.dispatch(1)
        loss = ours.saved(received.tokens)
        first.combine(received.handle, received.tokens)
        assert ours.refused(loss)


def test_views_of_a_window_that_groups_share(threads) -> None:
    threads(2).run(run_two_groups)


def run_lanes(env: Env) -> None:
    """A step on another channel changes nothing."""
    with tw.Group(env.comm, lanes=3, **SETTINGS) as group:
        ours = Ours(env, group)
        if group.device is None:  # steps that nobody has counted yet
            group.dispatch(group.route(np.zeros((0, 2), np.int32)), np.zeros((0, HIDDEN), np.float32)).handle.release()
        first, second = ours.dispatch(1), ours.dispatch(2)
        losses = [ours.saved(first.tokens) for _ in range(2)], [ours.saved(second.tokens) for _ in range(2)]
        ours.dispatch(3).handle.release()
        assert not ours.refused(losses[0].pop()) and not ours.refused(losses[1].pop())
        group.combine(second.handle, second.tokens)
        assert ours.refused(losses[1].pop())
        kept = ours.saved(first.tokens)
        assert not ours.refused(losses[0].pop())
        assert caught(group.dispatch, first.handle, ours.full((1, HIDDEN), 1))[0] == "twInvalidArgument"
        assert ours.refused(kept), "a refusal is a step too"
        first.handle.release()


def test_lanes(threads) -> None:
    threads(2).run(run_lanes)


def run_handle(env: Env) -> None:
    """Views of a handle, until its next dispatch."""
    with tw.Group(env.comm, **SETTINGS) as group:
        ours = Ours(env, group)
        for memory in (False, True):
            block = ours.full((group.handle_bytes + 64,), 0, np.uint8)
            block = block[-block.data_ptr() % 64 :][: group.handle_bytes]
            ids = ours.env.backend.tensor(np.array([[0, 1]], np.int32))
            handle = group.route(ids, memory=block) if memory else group.route(ids)
            tokens = ours.full((1, HIDDEN), 1)
            received = group.dispatch(handle, tokens)
            version = block._version
            loss, fine = ours.saved(received.weights), ours.saved(received.weights)
            group.combine(handle, received.tokens)
            assert not ours.refused(fine), "a combine writes nothing there"
            pending = group.dispatch(handle, tokens, send_only=True)
            pending.result()
            assert ours.refused(loss)
            assert (block._version > version) == memory
            handle.release()


def test_views_of_a_handle(threads) -> None:
    threads(1).run(run_handle)


# ---- tensors that are given ---------------------------------------------------------------------------------------


def run_given(env: Env) -> None:
    """Each call that writes to a caller's tensor, also when a pending one is completed."""
    import torch

    with tw.Group(env.comm, **SETTINGS) as group:
        ours, n = Ours(env, group), env.nranks

        def combined(y: Any, **more: Any) -> Any:
            received = ours.dispatch(0)
            return group.combine(received.handle, received.tokens, out=y, **more)

        def dispatched(y: Any, **more: Any) -> Any:
            found = ours.dispatch(0, out=y, **more)
            (found if isinstance(found, tw.handle.Received) else found.result()).handle.release()

        def gathered(y: Any, **more: Any) -> Any:
            return group.all_gatherv(ours.full((TOKENS, HIDDEN), 0), [TOKENS] * n, out=y, **more)

        def reduced(y: Any, **more: Any) -> Any:
            return group.reduce_scatterv(ours.full((n * TOKENS, HIDDEN), 0), out=y, **more)

        gate_up = ours.full((TOKENS, 2 * HIDDEN), 1)
        calls: dict[str, tuple[tuple[int, ...], Callable[..., Any]]] = {
            "combine": ((TOKENS, HIDDEN), combined),
            "dispatch": ((n, TOKENS, HIDDEN), dispatched),
            "dispatch of a mapping": ((n, TOKENS, HIDDEN), lambda y: dispatched({"tokens": y})),
            "all_gatherv": ((n * TOKENS, HIDDEN), gathered),
            "all_gatherv of several": (
                (n * TOKENS, HIDDEN),
                lambda y: group.all_gatherv([ours.full((TOKENS, HIDDEN), 0)], [TOKENS] * n, out=[y]),
            ),
            "reduce_scatterv": ((TOKENS, HIDDEN), reduced),
            "swiglu": ((TOKENS, HIDDEN), lambda y: tw.swiglu(gate_up, out=y)),
            "swiglu_backward": (
                (TOKENS, 2 * HIDDEN),
                lambda y: tw.swiglu_backward(gate_up, ours.full((TOKENS, HIDDEN), 1), out=(y, None)),
            ),
            "quantize_fp8": (
                (TOKENS, 1),
                lambda y: tw.quantize_fp8(gate_up, out=(torch.empty_like(gate_up, dtype=torch.float8_e4m3fn), y)),
            ),
        }
        for name, (shape, call) in calls.items():
            if group.device is not None and name in ("swiglu", "swiglu_backward", "quantize_fp8"):
                continue  # functions without a group, whose devices emulated ones are not
            s = ours.full(shape, 1).requires_grad_()
            y = s.exp()
            call(y)
            assert ours.refused(y.sum()), name
            with torch.no_grad():  # of a leaf, as PyTorch's operations in place
                version = s._version
                call(s)
                assert s._version > version, name
            with torch.inference_mode():
                call(ours.full(shape, 1) * 2)
        for name, call in (("combine", combined), ("gather", gathered), ("reduce", reduced)):
            s = ours.full((n * TOKENS if name == "gather" else TOKENS, HIDDEN), 1).requires_grad_()
            first, y = s.exp(), s.exp()
            pending = call(y, send_only=True)
            with torch.no_grad():
                first.copy_(y)  # what is there before it is complete
            version = y._version
            pending.result()
            assert y._version > version, name


def test_tensors_that_are_given(threads) -> None:
    threads(2).run(run_given)


def run_refused(env: Env) -> list[Any]:
    """The last rank gives what may not be written to; the others learn of it."""
    import torch

    outcomes = []
    with tw.Group(env.comm, **SETTINGS) as group:
        ours, n, bad = Ours(env, group), env.nranks, env.rank == env.nranks - 1
        leaf = ours.full((n, TOKENS, HIDDEN), 1).requires_grad_()
        with torch.inference_mode():
            inference = ours.full((n, TOKENS, HIDDEN), 1) * 1
        part = torch.zeros(2, n, TOKENS, HIDDEN, device=leaf.device)[0].requires_grad_()  # a leaf, and a view
        for x in (leaf, leaf[:], part, part[:], inference):
            flat = x.detach().view(n * TOKENS, HIDDEN) if x is inference else x.view(n * TOKENS, HIDDEN)
            handle = ours.route()
            outcomes.append(caught(ours.dispatch, 1, handle, out=x if bad else None))
            with suppress(tw.InvalidUsage):  # on devices a handle holds its channel all the same
                handle.release()
            received = ours.dispatch(1)
            outcomes.append(caught(group.combine, received.handle, received.tokens, out=flat[:TOKENS] if bad else None))
            if received.handle.leased:
                received.handle.release()
            if not env.backend.knows_calls:  # a gather that is refused ends the group: test_staged.py
                continue
            rows = ours.full((TOKENS, HIDDEN), 1)
            outcomes.append(caught(group.all_gatherv, rows, [TOKENS] * n, out=flat if bad else None))
        good = ours.dispatch(1)  # the group goes on
        group.combine(good.handle, good.tokens)
    return [outcome and outcome[:2] for outcome in outcomes]


def test_what_may_not_be_written_to(threads, made_for) -> None:
    *others, bad = threads(2).run(run_refused)
    calls = 3 if made_for.knows_calls else 2
    wanted = ["leaf that requires gradients"] * 4 * calls + ["is an inference tensor"] * calls
    for (result, text), sentence in zip(bad, wanted, strict=True):
        assert result == "twInvalidArgument" and sentence in text and "out" in text, text
    for outcomes in others:
        assert {result for result, _ in outcomes} == {"twPeerRefused"}, outcomes
