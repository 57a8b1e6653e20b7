"""What a run measures, as plain data: the same on all ranks, and in the JSON that is written."""

from __future__ import annotations

from dataclasses import dataclass

from tokenway.bench.case import Case
from tokenway.bench.framework_options import Frameworks
from tokenway.bench.hosts_options import Hosts
from tokenway.bench.moving_options import Moving
from tokenway.bench.nvlink_options import Nvlink
from tokenway.bench.portable_options import Portable
from tokenway.bench.profiles import PROFILES


@dataclass(frozen=True)
class Settings:
    """What a run measures; the same on all ranks."""

    ranks: int = 4
    launched: bool = False  # by torchrun or `tokenway launch`: this process is a rank
    profiles: tuple[str, ...] = ("deepseek-v3",)
    routings: tuple[str, ...] = ("uniform",)
    tokens: tuple[int, ...] = (1, 8, 128, 512)
    dtype: str = "bfloat16"
    layout: str = "rank_major"
    weighting: str = "none"
    iterations: int = 50
    rounds: int = 5
    warmup: int = 2
    seed: int = 0
    baselines: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()  # baselines that cannot run here, and why
    backward: bool = False
    both_modes: bool = False  # pairs of both, in one group, instead of dispatch and combine in one layout
    returns: bool = False  # pairs whose rows return in other ways, beside those of sums from each rank
    collective: str | None = None  # all_gatherv, reduce_scatterv or all: these, instead of dispatch and combine
    verify_only: bool = False
    overhead: bool = False
    aux: bool = False
    layer: bool = False
    layer_mode: str = "auto"  # of a layer's group
    fixed_experts: float | None = None  # us of a kernel in place of a layer's experts, measured beside it
    empty_ranks: int = 0  # of a layer: so many, the last ones, have no tokens
    timeline: str | None = None  # of a layer: a picture of its kernels
    quick: bool = False
    json: str | None = None
    plot: str | None = None
    nvlink: Nvlink | None = None  # None: the CPU backend
    portable: Portable | None = None  # likewise
    hosts: Hosts | None = None  # likewise: between hosts
    frameworks: Frameworks | None = None  # integrations beside frameworks, instead of dispatch and combine
    moving: Moving | None = None  # steps while experts move, instead of dispatch and combine

    def cases(self) -> list[Case]:
        """The rows of the run, in order."""
        return [
            Case(
                PROFILES[profile],
                routing,
                tokens,
                self.ranks,
                self.dtype,
                self.layout,
                self.weighting,
                self.seed,
            )
            for profile in self.profiles
            for routing in self.routings
            for tokens in self.tokens
        ]
