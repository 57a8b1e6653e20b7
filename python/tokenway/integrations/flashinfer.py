"""FlashInfer: its expert-parallel communication through Tokenway, by FlashInfer's own registry.

    from tokenway.integrations import flashinfer as tokenway_flashinfer

    tokenway_flashinfer.register()
    comm = create_communication(BootstrapConfig(world_size, rank), params, "tokenway")  # on every rank
    received = comm.dispatch(hidden_states, topk_ids, topk_weights)
    out = comm.combine(experts(received))

docs/FRAMEWORKS.md says what works, and what ranks must do alike.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenway import InvalidArgument
from tokenway.integrations import supported

LEAST, BELOW = "0.7.2", "0.7.3"


def register(name: str = "tokenway") -> type:
    """Makes `name` a communication of FlashInfer's in this process, for `create_communication` and for
    `MoEEpLayer(..., backend=SplitConfig(comm=name))`. Not collective. Returns the class that is registered.

    It takes the options timeout (seconds after which a late rank is an error, default 100) and device ("cpu", or by
    default the CUDA device that the bootstrap names, if there are any). To create one is collective among the ranks of
    the bootstrap's process group, or of the default one; all of one process group, with the same experts, top_k and
    invalid id, share a group and its window, so that one dispatch and its combine end before another begins. Its ranks
    are those of the process group; InvalidArgument where the bootstrap names others, or an nccl_comm alone. Errors:
    Unsupported, which names the versions, where FlashInfer or PyTorch is missing, too old or too new."""
    supported.check_framework("flashinfer-python", LEAST, BELOW, "flashinfer")
    from flashinfer.moe_ep import MoEEpCommunication, MoEEpDispatchResult, register_communication

    @register_communication(name)
    class TokenwayCommunication(MoEEpCommunication):
        """Rows by source rank, each token once to each of its ranks; sums over ranks in their order, float32."""

        def __init__(self, bootstrap: Any, params: Any, *, timeout: float | None = None, device: Any = None):
            super().__init__(bootstrap, params)
            from tokenway.integrations.rank_major import RankMajor

            _check_place(bootstrap)
            self.process_group = bootstrap.process_group
            shared = _shared(bootstrap, params, timeout, device)
            row = params.dispatch_bytes_per_token
            self.exchange = RankMajor(shared, params.max_tokens_per_rank, params.token_dtype, params.hidden_size, row)

        @classmethod
        def is_platform_supported(cls) -> bool:
            """Everywhere: where devices do not reach each other, creating one says so, on all ranks."""
            return True

        def dispatch(
            self,
            hidden_states: Any,
            topk_ids: Any,
            topk_weights: Any = None,
            *,
            hidden_states_scale: Any = None,
            max_tokens_per_rank: int | None = None,
            eplb_local_stats: Any = None,
        ) -> Any:
            """As FlashInfer documents it; eplb_local_stats [S] of any dtype, on all ranks or none, take a step more."""
            given = hidden_states, topk_ids, topk_weights, hidden_states_scale, max_tokens_per_rank
            told = Statistics(self.process_group, hidden_states.device, self.ep_size, eplb_local_stats)
            with told.telling():
                with self.exchange.telling(max_tokens_per_rank):
                    told.check()
                received = self.exchange.dispatch(*given)
            scales = None if hidden_states_scale is None else received.payloads["scales"].flatten(0, 1)
            return MoEEpDispatchResult(
                hidden_states=received.tokens.flatten(0, 1),
                topk_ids=received.ids.flatten(0, 1),
                topk_weights=None if topk_weights is None else received.weights.flatten(0, 1),
                tokens_per_rank=received.tokens.shape[1],
                hidden_states_scale=scales,
                eplb_gathered_stats=told.gathered(),
            )

        def combine(self, expert_output: Any, *, output: Any = None) -> Any:
            """As FlashInfer documents it."""
            return self.exchange.combine(expert_output, output)

    return TokenwayCommunication


class Statistics:
    """What a rank tells the others beside a dispatch: values [S], or None. By a step of its own behind it, which a rank
    that cannot make the dispatch leaves out, as its peers do, which learn of it in theirs; or refuses, if they learn of
    it later."""

    def __init__(self, process_group: Any, device: Any, size: int, values: Any):
        self._values, self._size = values, size
        self._gathers: Any = None
        if values is not None:
            from tokenway.integrations import collectives, groups

            self._gathers = collectives.of(groups.resolved(process_group), device)

    def check(self) -> None:
        """Raises InvalidArgument unless they are [S]."""
        if self._values is not None and self._values.dim() != 1:
            told = f"has shape {list(self._values.shape)}; it must be [S], as many on all ranks"
            raise InvalidArgument.of("eplb_local_stats", told)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Around a dispatch."""
        try:
            yield
        except Exception:
            group = None if self._gathers is None else self._gathers.shared.group
            if group is not None and group.native.place.learns_late:
                self._gathers.refuse("all_gatherv")
            raise

    def gathered(self) -> Any:
        """[N, S]: those of all ranks. A step of all ranks. Errors: as `Group.all_gatherv`."""
        if self._values is None:
            return None
        return self._gathers.all_gatherv([self._values[None].contiguous()], [1] * self._size)[0]


def _check_place(bootstrap: Any) -> None:
    """Raises InvalidArgument unless a bootstrap's rank and world_size are those of its process group, which is the one
    that rows go through: of any other, they would reach wrong ranks. Not collective."""
    from tokenway.integrations import groups

    if bootstrap.process_group is None and bootstrap.nccl_comm is not None:
        told = f"is {bootstrap.nccl_comm}, without a process_group; it must be None, or process_group given too"
        raise InvalidArgument.of("bootstrap.nccl_comm", told)
    which = "the default process group" if bootstrap.process_group is None else "its process_group"
    group = groups.resolved(bootstrap.process_group)
    for name, found in (("world_size", group.size()), ("rank", group.rank())):
        if (given := getattr(bootstrap, name)) != found:
            told = f"is {given}; it must be {found}, that of {which}"
            raise InvalidArgument.of(f"bootstrap.{name}", told, value=given, allowed=(found, found))


def _shared(bootstrap: Any, params: Any, timeout: float | None, device: Any) -> Any:
    """The group of all communications like this one. Not collective."""
    import torch

    from tokenway.integrations import groups

    if device is None and torch.cuda.is_available():
        index = bootstrap.device
        index = int(os.environ.get("LOCAL_RANK", bootstrap.rank)) if index is None else index  # as FlashInfer finds it
        device = torch.device("cuda", index)
    return groups.of(bootstrap.process_group, device=device, timeout=timeout).shared(
        experts=params.num_experts, top_k=params.top_k, id_space="global", invalid_id=params.invalid_expert_id
    )
