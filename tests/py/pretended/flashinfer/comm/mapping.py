"""As far as the benchmark uses it."""

from __future__ import annotations


class Mapping:
    """Who is where."""

    def __init__(
        self, world_size: int, rank: int, gpus_per_node: int, *, tp_size: int, moe_ep_size: int, moe_tp_size: int
    ):
        assert tp_size == world_size == moe_ep_size * moe_tp_size
        self.moe_ep_size, self.moe_ep_rank = moe_ep_size, rank
