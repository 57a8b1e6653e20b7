"""Experts that move beside captured graphs of more kernels than the device's queue of launches holds. Copies wait for
steps and no step for a copy (M8), so neither can hold the other up, however launches queue; a kernel that waits for
what its host does behind a launch can, which a control shows."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from gpu_world import TIMEOUT, capture

import tokenway as tw
from tokenway import balance

KERNELS = 1200  # of a graph beside its layers: a queue of launches holds some 1,000
REPLAYS = 10_000
LAYERS, EXPERTS, SPARE, HIDDEN, TOKENS, TOP_K = 2, 16, 4, 64, 24, 3
USED = EXPERTS // 2  # slots of a rank
SLOTS = USED + SPARE
TENSORS = {"scale": ((HIDDEN,), "float32"), "more": ((1 << 21,), "float32")}  # 8 MiB that each move copies
STEP_BYTES = 1 << 20  # so a plan's copies take many steps
QUIET = 5.0  # seconds without a launch, after which one is taken to hang

WAITER = """
extern "C" __global__ void wait_for_host(volatile int* flag) { while (*flag == 0) {} }
"""


def swapped(table: np.ndarray, drawn: np.random.Generator) -> np.ndarray:
    """As many experts of each layer as there are spare slots change ranks."""
    wanted = table.copy()
    for row in wanted:
        one, other = drawn.permutation(USED)[:SPARE], USED + drawn.permutation(USED)[:SPARE]
        row[np.concatenate([one, other])] = row[np.concatenate([other, one])]
    return wanted


def placement() -> tw.Placement:
    table = np.full((LAYERS, 2, SLOTS), -1)
    table[:, :, :USED] = np.arange(EXPERTS).reshape(2, USED)
    room = balance.weight_bytes(TENSORS, layers=LAYERS, slots=SLOTS, ranks=2)
    return tw.Placement(table.reshape(LAYERS, -1), count_loads=True, moves=True, weight_bytes=room)


class Steps:
    """A graph of layers, whose experts scale their rows, and of many more kernels."""

    def __init__(self, env: Any, group: tw.Group, weights: balance.Weights):
        self._env, self._group, self._weights = env, group, weights
        drawn = np.random.default_rng(env.rank)
        ids = np.stack([drawn.permuted(np.tile(np.arange(EXPERTS), (TOKENS, 1)), axis=1)[:, :TOP_K]] * LAYERS)
        self._ids = env.backend.tensor(ids.astype(np.int32))
        self._scales = env.backend.tensor(drawn.random((TOKENS, TOP_K), np.float32))
        self._rows = env.backend.tensor(drawn.standard_normal((TOKENS, HIDDEN)).astype(np.float32))
        self._handles = [group.route(self._ids[layer], layer=layer) for layer in range(LAYERS)]
        self.results = torch.zeros((LAYERS, TOKENS, HIDDEN), device=self._rows.device)
        self.counter = torch.zeros(1, dtype=torch.float64, device=self._rows.device)
        for layer in range(LAYERS):
            for slot, expert in enumerate(group.expert_of_slot(layer)[SLOTS * env.rank :][:SLOTS].tolist()):
                weights.tensor("scale", layer)[slot] = 1.0 + expert
        self.step()
        self.graph, _ = capture(env, self.step)

    def step(self) -> None:
        for layer, handle in enumerate(self._handles):
            handle.update(self._ids[layer])
            came = self._group.dispatch(handle, self._rows, layout="expert_major", bound=TOKENS)
            rows = came.tokens * self._weights.tensor("scale", layer)[:, None, :]
            self._group.combine(handle, rows, weights=self._scales, out=self.results[layer])
        for _ in range(KERNELS):
            self.counter.add_(1)


def moved(env: Any, replays: int) -> tuple[bool, int, float]:
    """(whether results are those of before, experts that have moved here, kernels that have run)."""
    made = {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": TOKENS, "dtype": "float32"}
    with tw.Group(env.comm, timeout=TIMEOUT, combine_rows="per_expert", expert_map=placement(), **made) as group:
        weights = balance.Weights(group, TENSORS)
        steps = Steps(env, group, weights)
        env.stream.synchronize()
        before, drawn = steps.results.clone(), np.random.default_rng(7)
        with balance.Balancer(group, weights, every=None, step_bytes=STEP_BYTES) as balancer:
            for asked in range(replays):
                steps.graph.replay()
                if balancer.idle and asked % 8 == 0:
                    balancer.follow(swapped(balancer.slot_maps().physical_to_logical, drawn))
                balancer.step()
            env.stream.synchronize()
            group.check()
            same = torch.equal(before, steps.results)
            steps.graph.reset()
            return same, balancer.statistics.moves, float(steps.counter)


def test_neither_waits(pair) -> None:
    """Replays are enqueued as fast as they can be, while experts move all the time."""
    for same, moves, ran in pair.run(moved, REPLAYS, timeout=300):
        assert same and moves >= 2 * LAYERS * SPARE  # of two plans
        assert ran >= KERNELS * REPLAYS


def waiting(env: Any, replays: int) -> tuple[bool, int]:
    """(whether launches have stopped, how many there were): behind a kernel that waits for what the host does later."""
    kernel = torch.cuda._compile_kernel(WAITER, "wait_for_host")
    flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    counter = torch.zeros(1, device=f"cuda:{torch.cuda.current_device()}")

    def step() -> None:
        for _ in range(KERNELS):
            counter.add_(1)

    step()
    graph, _ = capture(env, step)
    graph.replay()
    env.stream.synchronize()
    launched, hung = [0], [False]

    def watch() -> None:
        """Ends it: nobody else would."""
        seen = -1
        while flag.item() == 0:
            seen, before = launched[0], seen
            if seen == before:
                hung[0] = True
                flag.fill_(1)
            time.sleep(QUIET)

    watcher = threading.Thread(target=watch)
    kernel(grid=(1, 1, 1), block=(1, 1, 1), args=[flag])
    watcher.start()
    for _ in range(replays):
        graph.replay()
        launched[0] += 1
    flag.fill_(1)  # what the kernel waits for; the launches before it do not return
    env.stream.synchronize()
    watcher.join()
    graph.reset()
    return hung[0], launched[0]


def test_a_kernel_that_waits_for_its_host_hangs(pair) -> None:
    """The same graphs, so that the test above could have hung."""
    if not hasattr(torch.cuda, "_compile_kernel"):
        pytest.skip(f"PyTorch {torch.__version__} compiles no kernels")
    for hung, _ in pair.run(waiting, REPLAYS, timeout=300):
        assert hung
