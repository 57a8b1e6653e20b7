"""Micro-batches of vLLM, two that take turns in a layer, in contexts of vLLM's."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from frameworks import attempt, here, steps
from vllm_ranks import HIGH, LOW, apply, given, kernel_of, manager_of, wanted

import tokenway as tw


class Event:
    """Of a device, where there is none."""

    def record(self, stream: Any = None) -> None:
        pass


def streams(stack: ExitStack) -> tuple[Any, Any]:
    """(of computations, of communication); on the CPU something that stands for both."""
    import torch
    from vllm.v1.worker import ubatching

    if here().type != "cpu":
        return torch.cuda.current_stream(), torch.cuda.Stream()
    stream = object()
    stack.enter_context(patch.object(torch, "Event", Event))
    stack.enter_context(patch.object(ubatching, "current_stream", lambda: stream))
    return stream, stream


def run_micro_batches(case: dict[str, Any], config: Any, rank: int, fail: Any = None) -> dict[str, Any]:
    """Two, as vLLM's contexts let them take turns: one is sent while the other computes. fail: what the second's
    experts call, on rank 1. "left": what the first was told when it left, where it waits for the second."""
    import torch
    from vllm import forward_context
    from vllm.forward_context import DPMetadata, create_forward_context
    from vllm.v1.worker import ubatching

    order, out, left = [], [None, None], [None, None]
    cases = [case, case | {"sizes": (2, 4)}]
    data = [given(each, rank) for each in cases]

    def compute(i: int, rows: Any) -> None:
        order.append(f"experts {i}")
        if fail is not None and (i, rank) == (1, 1):
            fail(rows)

    kernels = [kernel_of(each, config, lambda rows, i=i: compute(i, rows))[0] for i, each in enumerate(cases)]
    manager_of(LOW if case["batched"] else HIGH).set_num_sms(20)  # as vLLM does around micro-batches
    told = [DPMetadata(torch.tensor(each["sizes"], dtype=torch.int32)) for each in cases]
    contexts = [create_forward_context(None, config, each if case["known"] else None) for each in told]
    barrier, before = threading.Barrier(3), steps()
    with ExitStack() as stack:
        # Which contexts of micro-batches leave set.
        stack.enter_context(patch.object(forward_context, "_forward_context", None))
        ubatches = ubatching.make_ubatch_contexts(2, *streams(stack), contexts, barrier)

        def run(i: int) -> None:
            torch.set_num_threads(1)
            if here().type != "cpu":
                torch.cuda.set_device(here())  # of this thread
            try:
                with ubatches[i]:
                    order.append(f"begin {i}")
                    out[i] = attempt(apply, kernels[i], cases[i], rank, *data[i])
            except tw.TokenwayError as error:  # the other would wait for ever, as vLLM's worker ends then
                left[i] = type(error).__name__, str(error)
                ubatches[i].cpu_signal_event.set()

        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        barrier.wait()
        ubatches[0].cpu_wait_event.set()
        for thread in threads:
            thread.join()
    arrays = [each if isinstance(each, tuple) else each.cpu().numpy() for each in out]
    found = {"out": arrays, "wanted": [wanted(*each) for each in data], "order": order, "left": left[0]}
    return found | {"steps": steps() - before}
